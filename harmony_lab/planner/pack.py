"""Packs: what a range of layers costs in seconds and bytes, and balanced partitions of layers into packs."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import pairwise

from harmony_lab.costs import Profile
from harmony_lab.plan import Pack

__all__ = ["PackCosts", "balanced_packs", "largest_fitting_packs"]

Range = tuple[int, int]


class PackCosts:
    """Seconds and bytes of packs under one profile, remembered.

    Bytes of compute ops leave out blocks that the program counts itself (weights, gradients, inputs, outputs): they are
    what an op needs beside them.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.weight_bytes = cache(profile.weight_bytes)
        self.gradient_bytes = cache(profile.gradient_bytes)
        self.buffer_bytes = cache(profile.buffer_bytes)
        self.boundary_bytes = cache(profile.boundary_bytes)
        self.boundary_gradient_bytes = cache(profile.boundary_gradient_bytes)
        self.batch_input_bytes = cache(profile.batch_input_bytes)
        self.forward_s = cache(self._forward_s)
        self.recompute_s = cache(self._recompute_s)
        self.backward_s = cache(self._backward_s)
        self.saved_bytes = cache(self._saved_bytes)
        self.forward_workspace = cache(self._forward_workspace)
        self.recompute_workspace = cache(self._recompute_workspace)
        self.backward_workspace = cache(self._backward_workspace)

    def _forward_s(self, start: int, stop: int, size: int) -> float:
        return sum(self.profile.cost(layer, size).forward_s for layer in range(start, stop))

    def _recompute_s(self, start: int, stop: int, size: int) -> float:
        return sum(self.profile.cost(layer, size).recompute_s for layer in range(start, stop))

    def _backward_s(self, start: int, stop: int, size: int) -> float:
        return sum(self.profile.cost(layer, size).backward_s for layer in range(start, stop))

    def _saved_bytes(self, start: int, stop: int, size: int) -> int:
        return math.ceil(self._saved_before(start, stop, size)[-1])

    def _saved_before(self, start: int, stop: int, size: int) -> list[float]:
        """What is kept for backward when each layer begins, from the first trainable one on, and after the last.

        Layers below that one keep nothing: what they compute is dropped after its last use, which may be there.
        """
        first = max(start, min(stop, self.profile.first_trainable_layer))
        saved: list[float] = [self._new_bytes(start, first, size)]
        for layer in range(first, stop):
            saved.append(saved[-1] + self.profile.cost(layer, size).saved_bytes)
        return saved

    def _new_bytes(self, start: int, boundary: int, size: int) -> int:
        """Values of a boundary that did not come in at ``start``."""
        if boundary == start:
            return 0
        given = {spec.name for spec in self.profile.boundaries[start]}
        return sum(spec.num_bytes(size) for spec in self.profile.boundaries[boundary] if spec.name not in given)

    def _forward_workspace(self, start: int, stop: int, size: int, keep: tuple[int, ...]) -> int:
        """Forward without gradient, beside its input and the boundaries it keeps."""
        peak = 0.0
        kept = 0
        for layer in range(start, stop):
            crossing = 0
            if layer > start:
                if layer in keep:
                    kept += self.boundary_bytes(layer, size)
                else:
                    crossing = self.boundary_bytes(layer, size)
            peak = max(peak, kept + crossing + self.profile.cost(layer, size).forward_peak_bytes)
        return max(0, math.ceil(peak) - sum(self.boundary_bytes(boundary, size) for boundary in keep))

    def _recompute_workspace(self, start: int, stop: int, size: int) -> int:
        """Forward with gradient, beside its input and what it saves."""
        saved = self._saved_before(start, stop, size)
        first = stop + 1 - len(saved)
        peaks = [
            (self._new_bytes(start, layer, size) if layer < first else saved[layer - first])
            + self.profile.cost(layer, size).recompute_peak_bytes
            for layer in range(start, stop)
        ]
        return max(0, math.ceil(max(peaks) - saved[-1]))

    def _backward_workspace(self, start: int, stop: int, size: int) -> int:
        """Backward, beside what was saved and the gradients of the pack's output and input."""
        saved = self._saved_before(start, stop, size)
        first = stop + 1 - len(saved)
        peak = 0.0
        for layer in range(first, stop):
            alive = saved[layer - first] + self.profile.cost(layer, size).backward_peak_bytes
            alive += self._passing_gradient_bytes(layer, size)
            if layer == stop - 1 < len(self.profile) - 1:  # the loss's own gradient is no block
                alive -= self.boundary_gradient_bytes(stop, size)
            if layer == start:
                alive -= self.boundary_gradient_bytes(start, size)
            peak = max(peak, alive)
        return max(0, math.ceil(peak - saved[-1]))

    def _passing_gradient_bytes(self, layer: int, size: int) -> int:
        """Gradients of values that pass by that layer on their way from a later one to an earlier one."""
        before = {spec.name for spec in self.profile.boundaries[layer]}
        after = self.profile.boundaries[layer + 1]
        return sum(spec.num_bytes(size) for spec in after if spec.requires_grad and spec.name in before)

    # -- the least that must be on the device at once ----------------------------------------------------------------

    def forward_bytes(self, start: int, stop: int, size: int, keep: tuple[int, ...] | None = None) -> int:
        """Device memory of one microbatch's forward."""
        keep = (stop,) if keep is None else keep
        return (
            self.weight_bytes(start, stop)
            + self.buffer_bytes(start, stop)
            + self.batch_input_bytes(start, stop, size)
            + self.boundary_bytes(start, size)
            + sum(self.boundary_bytes(boundary, size) for boundary in keep)
            + self.forward_workspace(start, stop, size, keep)
        )

    def backward_bytes(self, start: int, stop: int, size: int) -> int:
        """Device memory of one microbatch's recompute and backward."""
        held = (
            self.weight_bytes(start, stop)
            + self.buffer_bytes(start, stop)
            + self.batch_input_bytes(start, stop, size)
            + self.boundary_bytes(start, size)
            + self.saved_bytes(start, stop, size)
        )
        backward = (
            self.gradient_bytes(start, stop)
            + self.boundary_gradient_bytes(stop, size)
            + self.boundary_gradient_bytes(start, size)
            + self.backward_workspace(start, stop, size)
        )
        return held + max(self.recompute_workspace(start, stop, size), backward)


def balanced_packs(
    profile: Profile, start: int, stop: int, count: int, microbatch_size: int, forward: bool
) -> tuple[Pack, ...]:
    """``count`` packs of layers [start, stop) with the slowest one as fast as can be; memory is not looked at."""
    costs = PackCosts(profile)
    return (
        partition(_seconds(costs, start, stop, microbatch_size, forward), start, count, lambda first, last: True) or ()
    )


def largest_fitting_packs(
    costs: PackCosts,
    start: int,
    stop: int,
    count: int,
    microbatch_size: int,
    *,
    forward: bool,
    budget_bytes: int,
    stash_at: Collection[int] = (),
) -> tuple[Pack, ...] | None:
    """``count`` packs of layers [start, stop), balanced in time, each within ``budget_bytes``; None where there are
    none.

    ``stash_at``: boundaries that forward packs must keep for backward.
    """

    def fits(first: int, last: int) -> bool:
        if forward:
            keep = tuple(b for b in range(first + 1, last + 1) if b == last or b in stash_at)
            return costs.forward_bytes(first, last, microbatch_size, keep) <= budget_bytes
        return costs.backward_bytes(first, last, microbatch_size) <= budget_bytes

    return partition(_seconds(costs, start, stop, microbatch_size, forward), start, count, fits)


def _seconds(costs: PackCosts, start: int, stop: int, size: int, forward: bool) -> list[float]:
    if forward:
        return [costs.forward_s(layer, layer + 1, size) for layer in range(start, stop)]
    return [
        costs.recompute_s(layer, layer + 1, size) + costs.backward_s(layer, layer + 1, size)
        for layer in range(start, stop)
    ]


def partition(
    seconds: Sequence[float], start: int, count: int, fits: Callable[[int, int], bool]
) -> tuple[Pack, ...] | None:
    """Exactly ``count`` contiguous packs that minimise the slowest, each ``fits``; None where there are none.

    ``seconds[i]`` is layer ``start + i``.  The least bottleneck is found by bisection: for a given one, packs are
    filled greedily, which needs the fewest packs because ``fits`` only gets harder as a pack grows.
    """
    total = len(seconds)
    if not 1 <= count <= total:
        return None
    prefix = [0.0]
    for second in seconds:
        prefix.append(prefix[-1] + second)

    def fill(bottleneck: float) -> list[int] | None:
        edges = [0]
        while edges[-1] < total:
            first = last = edges[-1]
            while (
                last < total
                and prefix[last + 1] - prefix[first] <= bottleneck
                and fits(start + first, start + last + 1)
            ):
                last += 1
            if last == first or len(edges) > count:
                return None
            edges.append(last)
        return edges

    low, high = max(seconds), prefix[-1] * (1 + 1e-9)
    best = fill(high)
    if best is None:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        edges = fill(middle)
        if edges is None:
            low = middle
        else:
            best, high = edges, middle
        if high - low <= 1e-6 * high:
            break
    edges = _split_to(best, count, prefix)
    return tuple(Pack(start + first, start + last) for first, last in pairwise(edges))


def _split_to(edges: list[int], count: int, prefix: Sequence[float]) -> list[int]:
    """Cut the slowest packs that can be cut, near their middle, until there are ``count``."""
    edges = list(edges)
    while len(edges) - 1 < count:
        spans = [(prefix[b] - prefix[a], a, b) for a, b in pairwise(edges) if b - a > 1]
        _, first, last = max(spans, key=lambda span: (span[0], -span[1]))
        half = (prefix[first] + prefix[last]) / 2
        cut = min(range(first + 1, last), key=lambda edge: abs(prefix[edge] - half))
        edges = sorted([*edges, cut])
    return edges
