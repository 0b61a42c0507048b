"""What a layer's graph calls beside torch's own ops: sizes and devices of a call, and edits of losses and layouts."""

from typing import Any

import torch
from torch import Tensor

from harmony_lab.layers import LayerCall

__all__ = [
    "count_targets",
    "device_of",
    "samples_apart",
    "samples_together",
    "share_of_mean",
    "share_of_sum",
    "size_of",
    "zero_without_targets",
]


def device_of(call: LayerCall) -> Any:
    return call.device


def size_of(call: LayerCall, factor: int, offset: int) -> int:
    """A size that is factor * samples + offset."""
    return call.sizes["batch"] * factor + offset


# -- losses -------------------------------------------------------------------------------------------------------


def zero_without_targets(loss: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The mean loss, 0 instead of 0 / 0 for a microbatch in which every target is ignored."""
    return torch.where((targets != ignored).any(), loss, torch.zeros_like(loss))


def count_targets(targets: Tensor, ignored: int, class_weight: Tensor | None) -> Tensor:
    """What a mean over targets divides by."""
    counted = targets != ignored
    if class_weight is None:
        return counted.sum()
    weights = class_weight[targets.masked_fill(~counted, 0)]
    return torch.where(counted, weights, torch.zeros_like(weights)).sum()


def share_of_mean(loss: Tensor, call: LayerCall, totals: Tensor, term: int, count: Tensor) -> Tensor:
    """A microbatch's mean, scaled so that the mean over samples of all microbatches' is the minibatch's mean.

    ``totals``: the minibatch's samples, then what each term counts in it.
    """
    scale = count.sum() / call.sizes["batch"] * (totals[0] / totals[term])
    return loss * scale.to(loss.dtype)


def share_of_sum(loss: Tensor, call: LayerCall, totals: Tensor) -> Tensor:
    """The same for a term that is a sum."""
    return loss * (totals[0] / call.sizes["batch"]).to(loss.dtype)


# -- layouts ------------------------------------------------------------------------------------------------------


def samples_together(value: Tensor, call: LayerCall, dim: int, blocks: int) -> Tensor:
    """Rows in blocks that each hold all samples, sorted by sample: so that a range of samples is a range of rows."""
    apart = torch.unflatten(value, dim, (blocks, call.sizes["batch"], -1))
    return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)


def samples_apart(value: Tensor, call: LayerCall, dim: int, blocks: int) -> Tensor:
    """What ``samples_together`` was given."""
    apart = torch.unflatten(value, dim, (call.sizes["batch"], blocks, -1))
    return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)
