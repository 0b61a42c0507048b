"""Losses: how the losses of microbatches make up the minibatch's."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harmony_lab.layers import LOSS_TOTALS, LayerSequence
from harmony_lab.program import OpKind, Program
from harmony_lab.runtime.moves import batch_slice

__all__ = ["Losses", "combined_totals", "weight_of"]

Samples = tuple[int, int]


def weight_of(layers: LayerSequence, batch: Mapping[str, Tensor]) -> float:
    """What a whole minibatch weighs beside others: the samples or targets that its mean counts."""
    return float(layers.loss_weight(batch)) if layers.loss_reduction == "mean" else 1.0


def combined_totals(minibatches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What the terms of a mixed loss count in all minibatches together; empty for a loss of one term."""
    counted = [batch[LOSS_TOTALS] for batch in minibatches if LOSS_TOTALS in batch]
    return {LOSS_TOTALS: torch.stack(counted).sum(0)} if counted else {}


class Losses:
    """The microbatches' losses and their weights: the minibatch's loss is their weighted mean, or their sum.

    ``total_weight``: of all minibatches that one update is made of, where this one is a part; then its loss and
    gradients are its share of theirs.  ``stop_on_nan``: a loss that counts and is not finite raises
    ``FloatingPointError``.
    """

    def __init__(
        self,
        program: Program,
        layers: LayerSequence,
        batch: Mapping[str, Tensor],
        *,
        total_weight: float | None = None,
        stop_on_nan: bool = False,
    ) -> None:
        ends = len(layers)
        kinds = (OpKind.FORWARD, OpKind.BACKWARD)  # their microbatches may differ
        last = [op for op in program.ops if op.kind in kinds and op.layers[1] == ends]
        self._stop_on_nan = stop_on_nan
        self._losses: dict[Samples, float] = {}
        self._microbatches = sorted({op.samples for op in last if op.kind is OpKind.FORWARD})
        self._weights = dict.fromkeys(sorted({op.samples for op in last}), 1.0)
        if layers.loss_reduction == "mean":
            names = [spec.name for spec in layers.batch]
            weights = {
                samples: float(layers.loss_weight(batch_slice(layers, names, batch, samples, program.minibatch_size)))
                for samples in self._weights
            }
            if total_weight is None:
                total_weight = sum(weights[samples] for samples in self._microbatches)
            # Nothing counts at all: torch's mean over nothing is NaN, here as there.
            self._weights = {s: weight / total_weight if total_weight else math.nan for s, weight in weights.items()}

    def seed_gradient(self, samples: Samples) -> float | None:
        """The gradient of the minibatch's loss by that microbatch's; None where nothing counts (its own may be 0/0)."""
        return self._weights[samples] or None

    def add(self, samples: Samples, loss: float) -> None:
        if self._stop_on_nan and self._weights[samples] and not math.isfinite(loss * self._weights[samples]):
            raise FloatingPointError(f"the loss of samples {samples[0]}:{samples[1]} is {loss}")
        self._losses[samples] = loss

    def total(self) -> float:
        """The minibatch's loss."""
        return sum(self._weights[s] * self._losses[s] for s in self._microbatches if self._weights[s])
