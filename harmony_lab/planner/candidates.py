"""candidates: the four-tuples worth simulating, for one mode and setting of the switches, most promising first.

In three steps: many combinations of microbatch sizes and numbers of packs are forecast (``outlook``) with packs of
equal time; then all of forward's for the best of backward's; then edges of the best are moved layer by layer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.emulation import Emulation, computing_threads, emulation_on, moving_s
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.outlook import Setting, Sized, Transfer, forecast
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.partition import cut
from harmony_lab.planner.rates import host_rates, peer_rates, ring
from harmony_lab.planner.result import Rejected
from harmony_lab.planner.survey import cut_backward, refine, slide, survey
from harmony_lab.units import format_bytes

__all__ = ["Candidates", "Tuple4", "microbatch_sizes"]

_MORE_PACKS = 7  # numbers of packs looked at above the least that fits, beside two rounds of the devices
_MANY_PACKS, _SPARSE = 4, 8  # times the least at most, in steps of an eighth
_PROMISING, _FEW_PAIRS = 8, 24  # of backward's, those for which all of forward's are looked at; all if no more than few
_ALL_SIZES = 6  # so few sizes are all looked at, else only those that cut the minibatch evenly
_REFINED, _REFINED_MORE = 20, 3  # candidates whose edges are moved a little, and more
_ALIKE = 4  # of these, at most, with the same backward packs
_STEPS, _MORE_STEPS = 30_000, 120_000  # microbatches of packs in forecasts, to move one candidate's edges
_LEAST_TRIES = 20


class Tuple4(NamedTuple):
    """The paper's four-tuple, as sizes and edges of packs, and its forecast."""

    seconds: float
    forward_size: int
    forward_edges: tuple[int, ...]
    backward_size: int
    backward_edges: tuple[int, ...]

    @property
    def forward_packs(self) -> tuple[Pack, ...]:
        return tuple(map(Pack, self.forward_edges, self.forward_edges[1:]))

    @property
    def backward_packs(self) -> tuple[Pack, ...]:
        return tuple(map(Pack, self.backward_edges, self.backward_edges[1:]))


def microbatch_sizes(costs: PackCosts, shares: set[int], *, largest: int) -> list[int]:
    """Sizes up to ``largest`` that leave no rest smaller than what was measured in any of the shares.

    Of many only the smallest for every number of microbatches.
    """
    smallest = costs.profile.microbatch_sizes[0]
    most = max(shares)
    usable = [
        size
        for size in range(smallest, min(most, largest) + 1)
        if all(min(share, share % size or size) >= smallest for share in shares)
    ]
    if len(usable) <= _ALL_SIZES:
        return usable
    even = {-(-most // count) for count in range(1, most + 1)} | {min(most, largest)}
    return [size for size in usable if size in even] or usable


Row = tuple[int, int, int, int, bool]
"""Places of sizes and numbers of packs, forward and backward; whether the last pack is as large as fits."""


class Candidates:
    """All that one mode offers under one setting of prefetch and peers."""

    def __init__(
        self,
        costs: PackCosts,
        machine: Machine,
        minibatch_size: int,
        mode: Mode,
        *,
        prefetch: int,
        peers: bool,
        budget_bytes: int,
    ) -> None:
        self.costs, self.machine, self.mode = costs, machine, mode
        self.prefetch, self.peers, self.budget_bytes = prefetch, peers, budget_bytes
        self.num_looked_at = 0
        count = machine.num_devices
        self.minibatch_size = minibatch_size
        self.shares = {minibatch_size} if mode is Mode.PP else {minibatch_size // count, -(-minibatch_size // count)}
        profile = costs.profile
        self.backward_sizes = microbatch_sizes(costs, self.shares, largest=profile.largest_microbatch)
        self.forward_sizes = microbatch_sizes(costs, self.shares, largest=profile.largest_forward_microbatch)
        # Microbatches of samples that meet, or of values that cannot be cut, must be the same in both directions.
        inner = range(1, len(profile))
        self.equal_sizes = bool(profile.couples_samples) or not all(profile.splits_at(b) for b in inner)

    @cached_property
    def _sizes(self) -> list[int]:
        share = max(self.shares)
        sizes = {*self.backward_sizes, *self.forward_sizes}
        return sorted(sizes | {share % size or size for size in sizes})

    @cached_property
    def tables(self) -> Sized:
        return sized(self.costs, self._sizes, self.budget_bytes, self._taken.kernels_slowed)

    @cached_property
    def _taken(self) -> Emulation:
        return emulation_on(self.machine, self.costs.profile.emulation)

    @cached_property
    def setting(self) -> Setting:
        machine, count = self.machine, self.machine.num_devices
        is_pp = self.mode is Mode.PP
        down, up = host_rates(machine)
        peer = peer_rates(machine, down, up)
        reach = any(machine.reaches(*pair) for pair in ring(count)) if is_pp else machine.all_reach
        return Setting(
            chain=count if is_pp else 1,
            replicas=1 if is_pp else count,
            share=max(self.shares),
            prefetch=self.prefetch,
            peers=int(self.peers and reach),
            budget_bytes=self.budget_bytes,
            down=down,
            up=up,
            peer=peer if is_pp else peer.min(keepdims=True),
            release_s=max(device.release_s for device in machine.devices),
            op_s=self._taken.compute_s + self._taken.waking_s,
            compute_s=self._taken.compute_s,
            transfer=Transfer(moving_s(self._taken, 0.0), moving_s(self._taken, 1.0, 0), self._taken.waking_s),
            threads=computing_threads(machine),
            num_cores=machine.host.num_cores,
        )

    def best(self, count: int) -> list[Tuple4]:
        """The most promising, best first, ``count`` at most: of more than that only the best few are worked out."""
        coarse = self._forecasts(self._coarse())
        pairs = list(dict.fromkeys(row[2:] for _, row in coarse))
        promising = pairs if len(pairs) <= _FEW_PAIRS else pairs[:_PROMISING]
        rows = {row: seconds for seconds, row in coarse}
        rows |= {row: seconds for seconds, row in self._forecasts([r for pair in promising for r in self._fine(*pair)])}
        ordered = sorted(rows, key=lambda row: rows[row])
        moved = sorted(self._refined(row) for row in _diverse(ordered, _REFINED, _ALIKE))
        best = [self._moved(four, _MORE_STEPS) for four in moved[:_REFINED_MORE]]
        few = ordered[: count if len(ordered) <= count else _REFINED]
        others = [self._balanced(row, rows[row]) for row in few]
        return list(dict.fromkeys(sorted([*best, *moved[_REFINED_MORE:], *others])))[:count]

    def mirrored(self) -> list[Tuple4]:
        """The same packs forward and backward (``staying.mirror``), for every size and number, most promising first."""
        found = []
        num_layers = len(self.costs.profile)
        for size in self.backward_sizes:
            z = self._sizes.index(size)
            seconds, reach = self.tables.both_s[z], self.tables.backward_reach[z]
            for packs in self._counts(max(2, least_packs(reach, num_layers)), num_layers):
                edges = np.zeros(packs + 1, dtype=np.int64)
                if cut(seconds, reach, 0, num_layers, packs, edges):
                    takes_s = forecast(self.tables, self.setting, edges[:-1], z, edges, z, self._rests, np.inf)
                    both = tuple(edges.tolist())
                    found.append(Tuple4(takes_s, size, both[:-1], size, both))
        return sorted(found)

    @cached_property
    def rejected(self) -> list[Rejected]:
        """Microbatch sizes for which the layers cannot be cut into packs that fit, and why."""
        found = []
        ways = (
            (False, self.backward_sizes, self.tables.backward_reach),
            (True, self.forward_sizes, self.tables.forward_reach),
        )
        for forward, sizes, reaches in ways:
            for size in sizes:
                alone = np.flatnonzero(reaches[self._sizes.index(size)] <= np.arange(len(self.costs.profile)))
                if alone.size and not (forward and alone[0] == len(self.costs.profile) - 1):
                    way = "forward" if forward else "backward"
                    reason = self._too_large(int(alone[0]), size, forward)
                    found.append(Rejected(f"{self.mode}, {way} microbatches of {size}", reason))
        return found

    def _too_large(self, layer: int, size: int, forward: bool) -> str:
        need = self.costs.forward_bytes if forward else self.costs.backward_bytes
        return (
            f"layer {layer} ({self.costs.profile.layers[layer].name}) alone needs "
            f"{format_bytes(need(layer, layer + 1, size))} of {format_bytes(self.budget_bytes)}"
        )

    # -- combinations -------------------------------------------------------------------------------------------------

    def _coarse(self) -> list[Row]:
        rows = []
        num_layers = len(self.costs.profile)
        for size in self.backward_sizes:
            z = self._sizes.index(size)
            least = least_packs(self.tables.backward_reach[z], num_layers)
            for packs in self._counts(least, num_layers):
                if packs == 1:
                    rows.append((z, 0, z, 1, False))
                    continue
                for forward in {size} if self.equal_sizes else {size, min(2 * size, self.forward_sizes[-1])}:
                    if forward in self.forward_sizes:
                        y = self._sizes.index(forward)
                        few = self._least_forward(y, packs)
                        rows += [(y, n, z, packs, False) for n in range(few, few + self.setting.chain + 2)]
                        rows += [(y, n, z, packs, True) for n in range(1, self.setting.chain + 1)]
                        if self.prefetch and packs - 1 >= few + self.setting.chain + 2:  # about as large as backward's
                            rows += [(y, packs - 1, z, packs, False)]
        return rows

    def _fine(self, backward_z: int, packs: int, has_large: bool) -> Iterator[Row]:
        if packs == 1:
            return
        num_layers = len(self.costs.profile)
        sizes = [self._sizes[backward_z]] if self.equal_sizes else self.forward_sizes
        for size in sizes:
            z = self._sizes.index(size)
            least = 1 if has_large else self._least_forward(z, packs)
            for count in self._counts(least, num_layers - 1):
                yield z, count, backward_z, packs, has_large

    def _least_forward(self, z: int, backward_packs: int) -> int:
        """About how many forward packs there must be: where the last backward pack begins is not known yet."""
        num_layers = len(self.costs.profile)
        return max(1, least_packs(self.tables.forward_reach[z], num_layers - num_layers // backward_packs) - 2)

    def _counts(self, least: int, most: int) -> list[int]:
        """Numbers of packs to look at: all above the least for a while; where packs are fetched ahead, which takes room
        for two, some up to several times as many."""
        last = min(most, least + 2 * self.setting.chain + _MORE_PACKS)
        counts = list(range(least, last + 1))
        if self.prefetch:
            while (last := last + max(1, last // _SPARSE)) <= min(most, _MANY_PACKS * least):
                counts.append(last)
        return counts

    def _forecasts(self, rows: Sequence[Row]) -> list[tuple[float, Row]]:
        self.num_looked_at += len(rows)
        wanted = np.array(rows, dtype=np.int64).reshape(-1, 5)
        seconds = np.empty(len(rows))
        survey(self.tables, self.setting, self._rests, wanted, seconds)
        return sorted((s, row) for s, row in zip(seconds.tolist(), rows, strict=True) if s < np.inf)

    @cached_property
    def _rests(self) -> Ints:
        share, known = max(self.shares), self._sizes
        rests = [share % size or size for size in known]
        return np.array([known.index(rest) if rest in known else z for z, rest in enumerate(rests)])

    def _balanced(self, row: Row, seconds: float) -> Tuple4:
        """The candidate with packs of equal times."""
        y, num_forward, z, num_backward, has_large = row
        tables = self.tables
        forward, backward = np.zeros(num_forward + 1, dtype=np.int64), np.zeros(num_backward + 1, dtype=np.int64)
        cut_backward(tables, z, num_backward, has_large, backward)
        if num_forward:
            cut(tables.forward_s[y], tables.forward_reach[y], 0, int(backward[-2]), num_forward, forward)
        sizes = self._sizes
        return Tuple4(seconds, sizes[y], tuple(forward.tolist()), sizes[z], tuple(backward.tolist()))

    def _refined(self, row: Row) -> Tuple4:
        """The candidate with its last pack moved, and then all edges a little."""
        balanced = self._balanced(row, np.inf)
        y, num_forward, z, _, _ = row
        forward, backward = np.array(balanced.forward_edges), np.array(balanced.backward_edges)
        if num_forward:
            slide(
                self.tables,
                self.setting,
                forward,
                y,
                backward,
                z,
                self._rests,
                self._tries(forward, y, backward, z, _STEPS),
            )
        moved = balanced._replace(forward_edges=tuple(forward.tolist()), backward_edges=tuple(backward.tolist()))
        return self._moved(moved, _STEPS)

    def _moved(self, four: Tuple4, steps: int) -> Tuple4:
        """The candidate with its edges moved for so many steps of forecasts."""
        y, z = self._sizes.index(four.forward_size), self._sizes.index(four.backward_size)
        forward, backward = np.array(four.forward_edges), np.array(four.backward_edges)
        tries = self._tries(forward, y, backward, z, steps)
        seconds = refine(self.tables, self.setting, forward, y, backward, z, self._rests, tries)
        return four._replace(
            seconds=seconds, forward_edges=tuple(forward.tolist()), backward_edges=tuple(backward.tolist())
        )

    def _tries(self, forward: Ints, forward_z: int, backward: Ints, backward_z: int, steps: int) -> int:
        """How many forecasts those steps are, a microbatch of a pack each."""
        share = self.setting.share
        units = -(-share // self._sizes[forward_z]) * len(forward) + -(-share // self._sizes[backward_z]) * len(
            backward
        )
        return max(_LEAST_TRIES, steps // units)

    def plan(self, found: Tuple4) -> Plan:
        return Plan(
            mode=self.mode,
            minibatch_size=self.minibatch_size,
            forward_microbatch_size=found.forward_size,
            forward_packs=found.forward_packs,
            backward_microbatch_size=found.backward_size,
            backward_packs=found.backward_packs,
            devices=tuple(range(self.machine.num_devices)),
            prefetch=self.prefetch,
            peer_transfers=self.peers,
            precision=self.costs.profile.precision,
            fingerprint=self.costs.profile.fingerprint,
        )


def _diverse(ordered: Sequence[Row], count: int, alike: int) -> list[Row]:
    """The first ``count`` of which no more than ``alike`` have the same backward packs."""
    chosen: list[Row] = []
    having: Counter[tuple[int, int, bool]] = Counter()
    for row in ordered:
        having[row[2:]] += 1
        if having[row[2:]] <= alike:
            chosen.append(row)
            if len(chosen) == count:
                break
    return chosen


def least_packs(reach: Ints, stop: int) -> int:
    """How many packs layers [0, stop) need at least; ``stop`` where they do not fit at all."""
    count = edge = 0
    while edge < stop:
        following = int(reach[edge])
        if following <= edge:
            return stop
        edge, count = following, count + 1
    return count


def sized(costs: PackCosts, sizes: Sequence[int], budget_bytes: int, slowed: float = 1.0) -> Sized:
    """The profile's costs at those sizes as arrays; kernels take so many times as long."""
    profile = costs.profile
    layers = len(profile)
    shape, square = (len(sizes), layers + 1), (len(sizes), layers + 1, layers + 1)
    forward_s, recompute_s, backward_s = np.zeros(shape), np.full(shape, np.inf), np.full(shape, np.inf)
    values, gradients = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    needs = np.full((2, *square), 2**62, dtype=np.int64)
    reaches = np.tile(np.arange(layers), (2, len(sizes), 1))
    for z, size in enumerate(sizes):
        forward = costs.forward_costs(size)
        forward_s[z], values[z] = slowed * forward.seconds, forward.boundary
        needs[0, z], reaches[0, z] = costs.needs(size, forward=True), costs.reach(size, budget_bytes, forward=True)
        if size <= profile.largest_microbatch:
            backward = costs.backward_costs(size)
            recompute_s[z], backward_s[z] = slowed * backward.recompute_s, slowed * backward.backward_s
            gradients[z] = backward.boundary_gradient
            needs[1, z], reaches[1, z] = (
                costs.needs(size, forward=False),
                costs.reach(size, budget_bytes, forward=False),
            )
    return Sized(
        sizes=np.array(sizes),
        forward_s=forward_s,
        recompute_s=recompute_s,
        backward_s=backward_s,
        both_s=recompute_s + backward_s,
        value_bytes=values,
        gradient_bytes=gradients,
        forward_need=needs[0],
        backward_need=needs[1],
        forward_reach=reaches[0],
        backward_reach=reaches[1],
        weight_bytes=costs.model.weights,
        parameter_gradient_bytes=costs.model.gradients,
        update_s=slowed * np.concatenate([[0.0], np.cumsum([layer.update_s for layer in profile.layers])]),
    )
