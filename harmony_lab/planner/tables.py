"""Tables: the costs of layers at one microbatch size as arrays, and what every pack needs on a device, computed from
them.

Row functions give all packs that begin at one layer, in one pass over the layers; tables are all rows.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Floats, Ints, compiled
from harmony_lab.costs import Cost, ForwardCost, Profile
from harmony_lab.layers import TensorSpec

__all__ = [
    "BackwardCosts",
    "ForwardCosts",
    "ModelBytes",
    "backward_costs",
    "backward_needs",
    "backward_row",
    "forward_costs",
    "forward_needs",
    "forward_row",
    "model_bytes",
]


class ModelBytes(NamedTuple):
    """What does not depend on the microbatch size.  Of R layers; pack [start, stop) is at [start, stop].

    ``weights``, ``gradients``, ``buffers``  [R + 1, R + 1]
    ``next_reader``     [batch inputs, R]: the first layer from there on that reads it, R where none does
    ``first_trainable`` layers below have nothing to train and save nothing
    ``is_additive``     see ``Profile.additive_memory``
    """

    weights: Ints
    gradients: Ints
    buffers: Ints
    next_reader: Ints
    first_trainable: int
    is_additive: bool


class ForwardCosts(NamedTuple):
    """Forward at one size: ``seconds`` [R + 1] summed from the first layer on, and bytes: of each layer's peak [R], of
    the boundaries' values [R + 1], of each batch input.
    """

    seconds: Floats
    peak: Ints
    boundary: Ints
    batch: Ints


class BackwardCosts(NamedTuple):
    """Recompute and backward at one size: seconds [R + 1] summed from the first layer on, and bytes.

    ``passing``  [R]: gradients of values that pass by a layer on their way from a later one to an earlier one
    ``new``      [first_trainable + 1, the same]: values of a boundary that did not come in at a pack's start, both
                 up to the first trainable layer
    """

    recompute_s: Floats
    backward_s: Floats
    saved: Ints
    recompute_peak: Ints
    backward_peak: Ints
    boundary: Ints
    boundary_gradient: Ints
    passing: Ints
    new: Ints
    batch: Ints


# -- arrays from a profile -----------------------------------------------------------------------------------------


def model_bytes(profile: Profile) -> ModelBytes:
    layers = profile.layers
    repeated = {
        buffers: [shared for shared in profile.shared if shared.is_buffer is buffers] for buffers in (False, True)
    }
    return ModelBytes(
        weights=_ranges(
            [layer.parameter_bytes for layer in layers], [(s.num_bytes, s.layers) for s in repeated[False]]
        ),
        gradients=_ranges(
            [layer.gradient_bytes for layer in layers], [(s.gradient_bytes, s.layers) for s in repeated[False]]
        ),
        buffers=_ranges([layer.buffer_bytes for layer in layers], [(s.num_bytes, s.layers) for s in repeated[True]]),
        next_reader=np.array([_next_reader(profile, spec.name) for spec in profile.batch], dtype=np.int64).reshape(
            len(profile.batch), len(layers)
        ),
        first_trainable=profile.first_trainable_layer,
        is_additive=profile.additive_memory,
    )


def _ranges(values: list[int], shared: list[tuple[int, tuple[int, ...]]]) -> Ints:
    """Sums over all ranges of layers, with what several layers share counted once."""
    sums = _range_sums(np.array(values, dtype=np.int64))
    for num_bytes, readers in shared:
        reads = np.zeros(len(values), dtype=np.int64)
        reads[list(readers)] = 1
        sums -= num_bytes * np.maximum(_range_sums(reads) - 1, 0)
    return sums


def _range_sums(values: Ints) -> Ints:
    """[start, stop]: the sum of values[start:stop]."""
    sums = _summed(values)
    ranges: Ints = np.triu(sums[None, :] - sums[:, None])
    return ranges


def _summed(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])


def _next_reader(profile: Profile, name: str) -> list[int]:
    following = len(profile)
    readers = []
    for index in reversed(range(len(profile))):
        if name in profile.layers[index].batch_inputs:
            following = index
        readers.append(following)
    return readers[::-1]


def forward_costs(profile: Profile, size: int) -> ForwardCosts:
    """Raises ``OutOfRangeError`` for a size beyond what was measured forward."""
    kinds, kind_of = _kinds(profile)
    layers = [profile.layers[layer] for layer in kinds]
    forward_only = size > profile.largest_microbatch and bool(profile.forward_only_sizes)
    low, high, share = profile.between(size, forward_only=forward_only)
    if forward_only:
        below = [(layer.forward_costs[low - 1] if low else _forward_part(layer.costs[-1])) for layer in layers]
        above = [layer.forward_costs[high - 1] for layer in layers]
    else:
        below = [_forward_part(layer.costs[low]) for layer in layers]
        above = [_forward_part(layer.costs[high]) for layer in layers]
    seconds, peak = _between(below, above, share, kind_of)
    return ForwardCosts(
        seconds=_summed(seconds),
        peak=_whole(peak),
        boundary=_boundaries(profile, size),
        batch=_batch(profile, size),
    )


def _forward_part(cost: Cost) -> ForwardCost:
    return ForwardCost(cost.forward_s, cost.forward_peak_bytes)


def backward_costs(profile: Profile, size: int) -> BackwardCosts:
    """Raises ``OutOfRangeError`` for a size beyond what was measured backward."""
    low, high, share = profile.between(size)
    kinds, kind_of = _kinds(profile)
    columns = [
        [
            (cost.recompute_s, cost.backward_s, cost.saved_bytes, cost.recompute_peak_bytes, cost.backward_peak_bytes)
            for cost in (profile.layers[layer].costs[index] for layer in kinds)
        ]
        for index in (low, high)
    ]
    recompute_s, backward_s, saved, recompute_peak, backward_peak = _between(columns[0], columns[1], share, kind_of)
    return BackwardCosts(
        recompute_s=_summed(recompute_s),
        backward_s=_summed(backward_s),
        saved=_whole(saved),
        recompute_peak=_whole(recompute_peak),
        backward_peak=_whole(backward_peak),
        boundary=_boundaries(profile, size),
        boundary_gradient=_boundaries(profile, size, only_gradients=True),
        passing=_passing(profile, size),
        new=_new(profile, size),
        batch=_batch(profile, size),
    )


def _kinds(profile: Profile) -> tuple[list[int], Ints]:
    """A layer of each kind, and for each layer which of those is like it."""
    first: dict[int, int] = {}
    kind_of = np.empty(len(profile), dtype=np.int64)
    kinds: list[int] = []
    for index, layer in enumerate(profile.layers):
        position = first.setdefault(layer.kind, len(kinds))
        if position == len(kinds):
            kinds.append(index)
        kind_of[index] = position
    return kinds, kind_of


def _between(
    low: Sequence[tuple[float, ...]], high: Sequence[tuple[float, ...]], share: float, kind_of: Ints
) -> list[np.ndarray]:
    """Columns at a share of the way between those of two sizes, a row per layer."""
    below = np.array(low, dtype=np.float64)
    values = below + (np.array(high, dtype=np.float64) - below) * share
    return list(values[kind_of].T)


def _whole(num_bytes: Floats) -> Ints:
    """Bytes between measured sizes need not be whole numbers: the next larger ones."""
    return np.ceil(num_bytes).astype(np.int64)


def _boundaries(profile: Profile, size: int, *, only_gradients: bool = False) -> Ints:
    count = profile.boundary_gradient_bytes if only_gradients else profile.boundary_bytes
    return np.array([count(boundary, size) for boundary in range(len(profile) + 1)], dtype=np.int64)


def _batch(profile: Profile, size: int) -> Ints:
    return np.array([spec.num_bytes(size) for spec in profile.batch], dtype=np.int64)


def _passing(profile: Profile, size: int) -> Ints:
    passing = np.zeros(len(profile), dtype=np.int64)
    for layer in range(len(profile)):
        after = [spec for spec in profile.boundaries[layer + 1] if spec.requires_grad]
        passing[layer] = _common_bytes(after, {spec.name for spec in profile.boundaries[layer]}, size)
    return passing


def _common_bytes(values: Collection[TensorSpec], names: Collection[str], size: int) -> int:
    return sum(spec.num_bytes(size) for spec in values if spec.name in names)


def _new(profile: Profile, size: int) -> Ints:
    last = profile.first_trainable_layer
    new = np.zeros((last + 1, last + 1), dtype=np.int64)
    for start in range(last):
        given = {spec.name for spec in profile.boundaries[start]}
        for boundary in range(start + 1, last + 1):
            values = profile.boundaries[boundary]
            new[start, boundary] = profile.boundary_bytes(boundary, size) - _common_bytes(values, given, size)
    return new


# -- packs ---------------------------------------------------------------------------------------------------------


@compiled
def forward_row(model: ModelBytes, costs: ForwardCosts, kept: Ints, start: int, stop: int, alive: Ints) -> None:
    """Fill ``alive`` at each pack's stop: the most that a forward without gradient holds beside weights and input.

    ``kept`` [R + 1]: 1 at boundaries whose values stay until the end; those at the stop always do.
    """
    peak = 0
    held = 0
    for layer in range(start, stop):
        crossing = 0
        if layer > start:
            if kept[layer]:
                held += costs.boundary[layer]
            else:
                crossing = costs.boundary[layer]
        if model.is_additive:
            peak += costs.peak[layer]
        else:
            peak = max(peak, held + crossing + costs.peak[layer])
        alive[layer + 1] = max(peak, held + costs.boundary[layer + 1])


@compiled
def backward_row(
    model: ModelBytes, costs: BackwardCosts, start: int, stop: int, saved: Ints, recompute: Ints, backward: Ints
) -> None:
    """Fill at each pack's stop: what a forward with gradient saves, and what it and the backward hold beside that.

    Backward's is also beside the gradients of the pack's output and input.  Layers below the first trainable one keep
    nothing: what they compute is dropped after its last use, which may be there.
    """
    num_layers = len(costs.saved)
    kept = 0
    peak = 0  # of the forward with gradient
    inner = 0  # of the backward through all layers but the last
    total = 0  # of layers whose peaks add up
    for layer in range(start, stop):
        output = costs.boundary_gradient[layer + 1]
        if model.is_additive:
            total += costs.backward_peak[layer]
            peak += costs.recompute_peak[layer]
            kept += costs.saved[layer]
            left = total - costs.boundary_gradient[start] - output
            saved[layer + 1] = max(0, min(kept, left))
            recompute[layer + 1] = max(0, peak - saved[layer + 1])
            backward[layer + 1] = max(0, left - saved[layer + 1])
            continue
        if layer < model.first_trainable:
            peak = max(peak, costs.new[start, layer] + costs.recompute_peak[layer])
            kept = costs.new[start, layer + 1]
            alive = last = 0
        else:
            peak = max(peak, kept + costs.recompute_peak[layer])
            alive = kept + costs.backward_peak[layer] + costs.passing[layer]
            if layer == start:
                alive -= costs.boundary_gradient[start]
            last = alive if layer == num_layers - 1 else alive - output  # the loss's own gradient is no block
            kept += costs.saved[layer]
        saved[layer + 1] = kept
        recompute[layer + 1] = max(0, peak - kept)
        backward[layer + 1] = max(0, max(inner, last) - kept)
        inner = max(inner, alive)


@compiled
def _batch_bytes(model: ModelBytes, batch: Ints, start: int, stop: int) -> int:
    num_bytes = 0
    for spec in range(len(batch)):
        if model.next_reader[spec, start] < stop:
            num_bytes += batch[spec]
    return num_bytes


@compiled
def forward_needs(model: ModelBytes, costs: ForwardCosts, kept: Ints, needs: Ints) -> None:
    """Fill [start, stop] for all packs: device memory of one microbatch's forward."""
    num_layers = len(costs.peak)
    alive = np.zeros(num_layers + 1, dtype=np.int64)
    for start in range(num_layers):
        forward_row(model, costs, kept, start, num_layers, alive)
        for stop in range(start + 1, num_layers + 1):
            needs[start, stop] = (
                model.weights[start, stop]
                + model.buffers[start, stop]
                + _batch_bytes(model, costs.batch, start, stop)
                + costs.boundary[start]
                + alive[stop]
            )


@compiled
def backward_needs(model: ModelBytes, costs: BackwardCosts, needs: Ints) -> None:
    """Fill [start, stop] for all packs: device memory of one microbatch's recompute and backward."""
    num_layers = len(costs.saved)
    saved = np.zeros(num_layers + 1, dtype=np.int64)
    recompute = np.zeros(num_layers + 1, dtype=np.int64)
    backward = np.zeros(num_layers + 1, dtype=np.int64)
    for start in range(num_layers):
        backward_row(model, costs, start, num_layers, saved, recompute, backward)
        for stop in range(start + 1, num_layers + 1):
            gradients = model.gradients[start, stop] + costs.boundary_gradient[start] + costs.boundary_gradient[stop]
            needs[start, stop] = (
                model.weights[start, stop]
                + model.buffers[start, stop]
                + _batch_bytes(model, costs.batch, start, stop)
                + costs.boundary[start]
                + saved[stop]
                + max(recompute[stop], gradients + backward[stop])
            )
