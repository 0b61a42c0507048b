"""Packs: what a range of layers costs in seconds and bytes, and balanced partitions of layers into packs."""

from collections.abc import Collection
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from harmony_lab.compiled import Floats, Ints
from harmony_lab.costs import Profile
from harmony_lab.plan import Pack
from harmony_lab.planner.partition import best_partitions, furthest_stops
from harmony_lab.planner.tables import (
    backward_costs,
    backward_needs,
    backward_row,
    forward_costs,
    forward_needs,
    forward_row,
    model_bytes,
)

__all__ = ["PackCosts", "balanced_packs", "partitions"]

Fits = npt.NDArray[np.bool_]
_TABLES = 256  # of what fits, remembered at once: at most this many times (layers + 1)² bytes


class PackCosts:
    """Seconds and bytes of packs under one profile, remembered.

    Bytes of compute ops leave out blocks that the program counts itself (weights, gradients, inputs, outputs): they are
    what an op needs beside them.

    Where the profile's memory is additive, a pack needs its state and input, and the sum of what its layers need beside
    theirs.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.model = model_bytes(profile)
        self.forward_costs = cache(lambda size: forward_costs(profile, size))
        self.backward_costs = cache(lambda size: backward_costs(profile, size))
        self.boundary_bytes = cache(profile.boundary_bytes)
        self.boundary_gradient_bytes = cache(profile.boundary_gradient_bytes)
        self.batch_input_bytes = cache(profile.batch_input_bytes)
        self.forward_s = cache(self._forward_s)
        self.recompute_s = cache(self._recompute_s)
        self.backward_s = cache(self._backward_s)
        self.forward_workspace = cache(self._forward_workspace)
        self._fitting = lru_cache(_TABLES)(self._find_fitting)
        self._stash_matters = cache(self._find_stash_matters)
        self._backward_parts = cache(self._find_backward_parts)

    # -- seconds ------------------------------------------------------------------------------------------------------

    def _forward_s(self, start: int, stop: int, size: int) -> float:
        seconds = self.forward_costs(size).seconds
        return float(seconds[stop] - seconds[start])

    def _recompute_s(self, start: int, stop: int, size: int) -> float:
        seconds = self.backward_costs(size).recompute_s
        return float(seconds[stop] - seconds[start])

    def _backward_s(self, start: int, stop: int, size: int) -> float:
        seconds = self.backward_costs(size).backward_s
        return float(seconds[stop] - seconds[start])

    def layer_seconds(self, size: int, *, forward: bool) -> Floats:
        """Of each layer: its forward, or its recompute and backward."""
        if forward:
            return np.diff(self.forward_costs(size).seconds)
        costs = self.backward_costs(size)
        return np.diff(costs.recompute_s + costs.backward_s)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def weight_bytes(self, start: int, stop: int) -> int:
        return int(self.model.weights[start, stop])

    def gradient_bytes(self, start: int, stop: int) -> int:
        return int(self.model.gradients[start, stop])

    def buffer_bytes(self, start: int, stop: int) -> int:
        return int(self.model.buffers[start, stop])

    def optimizer_bytes(self, start: int, stop: int) -> int:
        """The optimizer's state for the parameters that the pack owns."""
        return self.profile.optimizer_bytes(start, stop)

    def update_workspace(self, start: int, stop: int) -> int:
        """Temporaries of the pack's update on a device, which goes layer by layer."""
        return max((layer.largest_update_bytes for layer in self.profile.layers[start:stop]), default=0)

    def _forward_workspace(self, start: int, stop: int, size: int, keep: tuple[int, ...]) -> int:
        """Forward without gradient, beside its input and the boundaries it keeps: its output's and maybe others."""
        assert stop in keep
        kept = self._kept(keep)
        alive = np.zeros(len(kept), dtype=np.int64)
        forward_row(self.model, self.forward_costs(size), kept, start, stop, alive)
        return int(alive[stop]) - sum(self.boundary_bytes(boundary, size) for boundary in keep)

    def _kept(self, boundaries: Collection[int]) -> Ints:
        kept = np.zeros(len(self.profile) + 1, dtype=np.int64)
        kept[list(boundaries)] = 1
        return kept

    def saved_bytes(self, start: int, stop: int, size: int) -> int:
        """What forward with gradient leaves for backward."""
        return self._backward_parts(start, stop, size)[0]

    def recompute_workspace(self, start: int, stop: int, size: int) -> int:
        """Forward with gradient, beside its input and what it saves."""
        return self._backward_parts(start, stop, size)[1]

    def backward_workspace(self, start: int, stop: int, size: int) -> int:
        """Backward, beside what was saved and the gradients of the pack's output and input."""
        return self._backward_parts(start, stop, size)[2]

    def _find_backward_parts(self, start: int, stop: int, size: int) -> tuple[int, int, int]:
        saved, recompute, backward = np.zeros((3, stop + 1), dtype=np.int64)
        backward_row(self.model, self.backward_costs(size), start, stop, saved, recompute, backward)
        return int(saved[stop]), int(recompute[stop]), int(backward[stop])

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
        saved, recompute, backward = self._backward_parts(start, stop, size)
        held = (
            self.weight_bytes(start, stop)
            + self.buffer_bytes(start, stop)
            + self.batch_input_bytes(start, stop, size)
            + self.boundary_bytes(start, size)
            + saved
        )
        gradients = (
            self.gradient_bytes(start, stop)
            + self.boundary_gradient_bytes(stop, size)
            + self.boundary_gradient_bytes(start, size)
        )
        return held + max(recompute, gradients + backward)

    def needs(self, size: int, *, forward: bool, stash_at: Collection[int] = ()) -> Ints:
        """[start, stop]: ``forward_bytes`` or ``backward_bytes`` of every pack; 0 where stop is not above start.

        ``stash_at``: boundaries that forward packs keep for backward.
        """
        needs = np.zeros((len(self.profile) + 1,) * 2, dtype=np.int64)
        if forward:
            forward_needs(self.model, self.forward_costs(size), self._kept(stash_at), needs)
        else:
            backward_needs(self.model, self.backward_costs(size), needs)
        return needs

    def fits(self, size: int, budget_bytes: int, *, forward: bool, stash_at: Collection[int] = ()) -> Fits:
        """[start, stop]: whether that pack needs at most so much."""
        matters = forward and self._stash_matters(size)
        return self._fitting(size, budget_bytes, forward, frozenset(stash_at) if matters else frozenset())

    def _find_fitting(self, size: int, budget_bytes: int, forward: bool, stash_at: frozenset[int]) -> Fits:
        needs = self.needs(size, forward=forward, stash_at=stash_at)
        return (needs > 0) & (needs <= budget_bytes)

    def _find_stash_matters(self, size: int) -> bool:
        """Whether boundaries that a pack keeps add to its memory; not where every layer keeps its output anyway."""
        costs = self.forward_costs(size)
        return not self.model.is_additive or bool((costs.peak < costs.boundary[1:]).any())

    def reach(self, size: int, budget_bytes: int, *, forward: bool) -> Ints:
        """For each start the last stop of a pack that fits; the start itself where none does."""
        return furthest_stops(self.fits(size, budget_bytes, forward=forward))


def partitions(
    costs: PackCosts,
    start: int,
    stop: int,
    size: int,
    *,
    forward: bool,
    budget_bytes: int | None,
    counts: Collection[int],
    stash_at: Collection[int] = (),
) -> dict[int, tuple[Pack, ...]]:
    """Layers [start, stop) in each of ``counts`` numbers of packs, the slowest pack as fast as can be.

    Every pack is within ``budget_bytes`` (None: memory is not looked at); numbers for which there is no such partition
    are left out.  ``stash_at``: boundaries that forward packs must keep for backward.
    """
    if budget_bytes is None:
        fits = np.triu(np.ones((len(costs.profile) + 1,) * 2, dtype=np.bool_), k=1)
    else:
        fits = costs.fits(size, budget_bytes, forward=forward, stash_at=stash_at)
    return best_partitions(costs.layer_seconds(size, forward=forward), fits, start, stop, counts)


def balanced_packs(
    profile: Profile, start: int, stop: int, count: int, microbatch_size: int, forward: bool
) -> tuple[Pack, ...]:
    """``count`` packs of layers [start, stop) with the slowest one as fast as can be; memory is not looked at."""
    found = partitions(
        PackCosts(profile), start, stop, microbatch_size, forward=forward, budget_bytes=None, counts=(count,)
    )
    return found.get(count, ())
