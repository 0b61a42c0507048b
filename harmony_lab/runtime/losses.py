"""Losses: how the losses of microbatches make up the minibatch's."""

import math
from collections.abc import Mapping

from torch import Tensor

from harmony_lab.layers import LayerSequence
from harmony_lab.program import OpKind, Program
from harmony_lab.runtime.moves import batch_slice

__all__ = ["Losses"]

Samples = tuple[int, int]


class Losses:
    """The microbatches' losses and their weights: the minibatch's loss is their weighted mean, or their sum."""

    def __init__(self, program: Program, layers: LayerSequence, batch: Mapping[str, Tensor]) -> None:
        ends = len(layers)
        microbatches = sorted({op.samples for op in program.ops if op.kind is OpKind.BACKWARD and op.layers[1] == ends})
        self._losses: dict[Samples, float] = {}
        self._weights = dict.fromkeys(microbatches, 1.0)
        if layers.loss_reduction == "mean":
            names = [spec.name for spec in layers.batch]
            weights = [
                float(layers.loss_weight(batch_slice(layers, names, batch, samples, program.minibatch_size)))
                for samples in microbatches
            ]
            total = sum(weights)
            # Nothing counts at all: torch's mean over nothing is NaN, here as there.
            self._weights = {
                samples: weight / total if total else math.nan
                for samples, weight in zip(microbatches, weights, strict=True)
            }

    def seed_gradient(self, samples: Samples) -> float | None:
        """The gradient of the minibatch's loss by that microbatch's; None where nothing counts (its own may be 0/0)."""
        return self._weights[samples] or None

    def add(self, samples: Samples, loss: float) -> None:
        self._losses[samples] = loss

    def total(self) -> float:
        """The minibatch's loss."""
        return sum(weight * self._losses[samples] for samples, weight in self._weights.items() if weight)
