"""Equality: how far layers run in sequence are from the plain model, in loss, gradients and buffers."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harmony_lab.bench.zoo import Specimen
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.profiler.reference import run_flat
from harmony_lab.runtime.moves import batch_slice

__all__ = ["Differences", "compare"]

_SEED = 3
_SMALLEST_SCALE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The largest differences found.

    ``loss``: relative.  ``gradients``: of each parameter, relative to the largest element of its gradient (at least
    1e-4 of the model's largest: what is smaller is rounding).  ``buffers``: relative to the largest element, or to 1.
    """

    loss: float
    gradients: float
    buffers: float

    def __or__(self, other: "Differences") -> "Differences":
        return Differences(
            loss=max(self.loss, other.loss),
            gradients=max(self.gradients, other.gradients),
            buffers=max(self.buffers, other.buffers),
        )


def compare(layers: LayerSequence, specimen: Specimen, batch: Any, edges: Sequence[int]) -> Differences:
    """Train on one minibatch, the plain model in one go, the layers in microbatches between ``edges``.

    The model's buffers are put back after; gradients of neither are left anywhere.
    """
    plain = copy.deepcopy(specimen.model)
    with reproducible_randomness(layers, _SEED, (edges[0], edges[-1])):
        expected = plain_loss(Specimen(plain, specimen.loss_fn), batch)
    before = {name: buffer.clone() for name, buffer in specimen.model.named_buffers()}
    tensors, _ = layers.flatten_batch(batch)
    found = _minibatch_loss(layers, tensors, edges)
    ours, theirs = _gradients(specimen.model, found), _gradients(plain, expected)
    differences = Differences(
        loss=_relative(found.detach(), expected.detach(), 0.0),
        gradients=_largest(ours, theirs, _SMALLEST_SCALE * max(_size(gradient) for gradient in theirs.values())),
        buffers=_largest(dict(specimen.model.named_buffers()), dict(plain.named_buffers()), 1.0),
    )
    for name, buffer in specimen.model.named_buffers():
        buffer.copy_(before[name])
    return differences


def plain_loss(specimen: Specimen, batch: Any) -> Tensor:
    """What a user of PyTorch writes; a loss may be returned as such, first, or under its name."""
    if specimen.loss_fn is not None:
        loss: Tensor = specimen.loss_fn(_call(specimen.model, batch[0]), batch[1])
        return loss
    output = _call(specimen.model, batch)
    found: Tensor = output[0] if isinstance(output, tuple) else output["loss"]
    return found


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


def _minibatch_loss(layers: LayerSequence, tensors: Mapping[str, Tensor], edges: Sequence[int]) -> Tensor:
    names = [spec.name for spec in layers.batch]
    losses, weights = [], []
    for start, stop in pairwise(edges):
        part = batch_slice(layers, names, tensors, (start, stop), edges[-1])
        losses.append(run_flat(layers, part, seed=_SEED, samples=(start, stop)))
        weights.append(layers.loss_weight(part))
    total = sum(weights) if layers.loss_reduction == "mean" else 1.0
    weighted = [loss * (weight / total) for loss, weight in zip(losses, weights, strict=True)]
    return torch.stack(weighted).sum()


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By name, zeros where no path leads to the loss."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(trained, found, strict=True))


def _largest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], least_scale: float) -> float:
    assert ours.keys() == theirs.keys(), "both have the same parameters and buffers"
    return max((_relative(ours[name], theirs[name], least_scale) for name in theirs), default=0.0)


def _relative(found: Tensor, expected: Tensor, least_scale: float) -> float:
    difference = _size(found.double() - expected.double())
    return difference / max(_size(expected), least_scale) if difference else 0.0


def _size(tensor: Tensor) -> float:
    """The largest absolute element; NaN where there is one."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
