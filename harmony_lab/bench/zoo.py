"""The zoo: small random-weight models of every kind that harmony_lab must train as plain PyTorch does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["LENGTH", "VOCABULARY", "WIDTH", "Specimen", "ZooModel", "images", "tokens"]

WIDTH = 32
VOCABULARY = 64
LENGTH = 16
"""Hidden size, vocabulary and sequence length of the zoo's models, unless a model's point is another."""


class Specimen(NamedTuple):
    """A model in train mode, and its loss where the model does not return it."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One entry.

    ``make()`` builds the model with the same random weights each time, ``batch(num_samples, seed)`` a batch for it.
    ``refused``: the reason that ``decompose`` must give, as a part of its message; None for a supported model.
    ``couples``: batch statistics tie the samples of a microbatch together, so a minibatch in several microbatches
    is another computation in plain PyTorch too.
    """

    name: str
    make: Callable[[], Specimen]
    batch: Callable[[int, int], Any]
    note: str
    refused: str | None = None
    couples: bool = False


def tokens(num_samples: int, seed: int, *, vocabulary: int = VOCABULARY, length: int = LENGTH) -> dict[str, Any]:
    """Tokens, and labels that differ from them and of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (num_samples, length), generator=generator)
    labels = ids.flip(1)
    ignored = torch.randint(0, length // 2, (num_samples, 1), generator=generator)
    return {"input_ids": ids, "labels": labels.masked_fill(torch.arange(length) < ignored, -100)}


def padded_tokens(num_samples: int, seed: int, **sizes: int) -> dict[str, Any]:
    """The same with an attention mask that hides the end of each sample."""
    batch = tokens(num_samples, seed, **sizes)
    length = batch["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(seed + 1)
    visible = torch.randint(length // 2, length + 1, (num_samples, 1), generator=generator)
    return {**batch, "attention_mask": (torch.arange(length) < visible).long()}


def images(num_samples: int, seed: int, *, size: int = 32, channels: int = 3, classes: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(num_samples, channels, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, classes, (num_samples,), generator=generator)}


def fresh(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The model with the zoo's weights, in train mode; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args, **kwargs).train()


def inputs_and(targets: str, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """(inputs, targets) of a batch in which the targets are one entry."""
    return {name: value for name, value in batch.items() if name != targets}, batch[targets]
