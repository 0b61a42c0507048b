"""Random models of 3 to 12 layers, and plain PyTorch training them: what random plans are compared with."""

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harmony_lab.layers import LayerSequence
from harmony_lab.plan import Mode, Plan, microbatches
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.runtime.runner import step_seed

__all__ = ["NUM_SUBJECTS", "OPTIMIZERS", "Subject", "batch_of", "subject", "train_plainly"]

_TRAITS = 4  # that a model may have: batch norm, dropout, a shared weight, a frozen block
NUM_SUBJECTS = 2**_TRAITS
_WIDTH = 4
_DROPPED = 0.3
Batch = tuple[Tensor, Tensor]

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # has no state
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    # A bias in front of batch norm has a gradient that is zero but for rounding: far below ``eps``.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, weight_decay=0.1),
}


class Subject(NamedTuple):
    model: nn.Module
    layers: LayerSequence

    @property
    def has_batch_norm(self) -> bool:
        """Then forward and backward must have the same microbatches, none of one sample."""
        return bool(self.layers.couples_samples)


@cache
def subject(number: int) -> Subject:
    """Blocks of Linear and Tanh in float64; by the bits of ``number`` with batch norm, which is a layer of its own,
    with dropout, with a weight that the first and the last block share, with a frozen block."""
    rng = random.Random(number)
    torch.manual_seed(number)
    normed, drops, tied, frozen = (bool(number >> trait & 1) for trait in range(_TRAITS))
    blocks: list[nn.Sequential] = []
    left = rng.randint(3, 12)
    while left:
        norm = normed and left > 1 and rng.random() < 0.6
        left -= 2 if norm else 1
        dropout = drops and (not blocks or rng.random() < 0.5)
        parts = [nn.Linear(_WIDTH, _WIDTH), *([nn.BatchNorm1d(_WIDTH)] if norm else []), nn.Tanh()]
        blocks.append(nn.Sequential(*parts, *([nn.Dropout(_DROPPED)] if dropout else [])))
    if tied:
        blocks[-1][0].weight = blocks[0][0].weight
    if frozen:
        rng.choice(blocks).requires_grad_(False)
    model = nn.Sequential(*blocks).double()
    return Subject(model, decompose(model, batch_of(2, torch.Generator()), nn.MSELoss()))


def batch_of(size: int, generator: torch.Generator) -> Batch:
    inputs, targets = torch.randn(2, size, _WIDTH, dtype=torch.float64, generator=generator)
    return inputs, targets


def train_plainly(
    of: Subject, optimizer: str, plan: Plan, steps: Sequence[Sequence[Batch]], max_grad_norm: float | None
) -> dict[str, Any]:
    """Copies of model and optimizer after these steps of one or more minibatches, with each step's loss and norm; in
    the microbatches of the plan, with the masks that its layers draw."""
    model = copy.deepcopy(of.model)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    losses, norms = [], []
    for number, batches in enumerate(steps):
        stepping.zero_grad()
        total = 0.0
        for at, (inputs, targets) in enumerate(batches):
            first = at * plan.minibatch_size
            for start, stop in _parts(plan):
                samples = first + start, first + stop
                with reproducible_randomness(of.layers, step_seed(0, number), samples):
                    loss = nn.functional.mse_loss(model(inputs[start:stop]), targets[start:stop])
                weighted = loss * ((stop - start) / (plan.minibatch_size * len(batches)))
                weighted.backward()  # type: ignore[no-untyped-call] # torch's has no types
                total += weighted.item()
        losses.append(total)
        if max_grad_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        stepping.step()
    return {"losses": losses, "norms": norms, "model": model.state_dict(), "optimizer": stepping.state_dict()["state"]}


def _parts(plan: Plan) -> list[tuple[int, int]]:
    shares = [plan.share(position) for position in range(plan.num_devices if plan.mode is Mode.DP else 1)]
    return [part for share in shares for part in microbatches(*share, plan.backward_microbatch_size)]
