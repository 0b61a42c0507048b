"""The baselines' programs: order of microbatches, memory at the start, and the compiled loops that emit the ops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.machine import Machine
from harmony_lab.plan import Pack, microbatches
from harmony_lab.planner import layerwise, paging
from harmony_lab.planner.baseline_tables import LayerTables, Microbatches
from harmony_lab.planner.emit import (
    DOES_NOT_FIT,
    FAILED_BYTES,
    FAILED_DEVICE,
    FAILED_OP,
    FULL,
    RESIDENT,
    START,
    STATUS,
    Construction,
    columns,
    construction,
)
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.streaming import stream
from harmony_lab.program import Program
from harmony_lab.roles import Role

__all__ = [
    "Iteration",
    "Needs",
    "in_memory_program",
    "paged_program",
    "pipeline_units",
    "runnable_program",
    "streaming_program",
]

_OPS_PER_LAYER = 6  # about; where it is more, memory for twice as many is taken
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What a layerwise iteration is of.  ``size``: of microbatches.  ``clips``: gradients by the norm of all.

    ``stages`` and ``units``: of a pipeline; empty and None: data parallel.
    """

    tables: LayerTables
    machine: Machine
    minibatch_size: int
    size: int
    recomputes: bool
    clips: bool = False
    stages: Sequence[Pack] = ()
    units: Ints | None = None


class Needs(NamedTuple):
    """Why there is no program: what a device would need at once, with microbatches of that size, for the layer that is
    too much (-1: for all of them)."""

    size: int
    device: int
    num_bytes: int
    layer: int = -1


class _Settled(NamedTuple):
    """Pages on the devices between two iterations, the oldest of each device first, and whether they have changed."""

    page: Ints
    is_changed: Ints


def paged_program(iteration: Iteration) -> Program | Needs:
    """An iteration in the middle of training: what is on the devices at its start is what it leaves there.

    Under least-recently-used eviction that depends on the iteration's own order alone, so one iteration from empty
    devices finds it.
    """
    run = _Run(iteration)
    first, p = run.emitted(_Settled(*np.zeros((2, 0), np.int64)), on_demand=True)
    if first.counts[STATUS] == DOES_NOT_FIT:
        return _needs(first, iteration.size, int(first.counts[FAILED_OP]))
    settled = _left(p)
    made, p = run.emitted(settled, on_demand=True)
    after = _left(p)
    assert np.array_equal(np.stack(settled), np.stack(after)), "the iteration leaves what it does not find"
    return _program(made, iteration.tables, iteration.machine, iteration.minibatch_size)


def in_memory_program(iteration: Iteration) -> Program | Needs:
    """The same with all weights, buffers and optimizer state on the devices, for good."""
    run = _Run(iteration)
    kinds = (layerwise.WEIGHTS, layerwise.BUFFERS, layerwise.OPTIMIZER_STATE)
    rows = run.num_replicas * (len(iteration.tables.profile) + 1)
    pages = np.concatenate([np.arange(slot * rows, (slot + 1) * rows) for slot in kinds])
    pages = pages[run.pages[pages, paging.NUM_BYTES] > 0]
    made, p = run.emitted(_Settled(pages, np.zeros(len(pages), np.int64)), on_demand=False)
    return _kept_within(made, p, iteration)


def runnable_program(iteration: Iteration, *, on_demand: bool, role: Role = Role.ALONE) -> Program | Needs:
    """The same, paged (``on_demand``) or in memory, as an iteration that the runtime can run: from empty devices, and
    in the end all that was changed goes to the host (``layerwise``).

    ``role``: of the minibatch; one that is ``ADDING`` leaves its gradients on the host, the ``LAST`` finds the sum of
    those of the others there and adds to it.
    """
    run = _Run(iteration, ends_empty=True, role=role)
    made, p = run.emitted(_Settled(*np.zeros((2, 0), np.int64)), on_demand=on_demand)
    if made.counts[STATUS] == DOES_NOT_FIT:
        return _needs(made, iteration.size, int(made.counts[FAILED_OP]))
    return _kept_within(made, p, iteration)


def streaming_program(
    tables: LayerTables, machine: Machine, minibatch_size: int, size: int, *, clips: bool = False
) -> Program | Needs:
    """The order of ZeRO-Infinity: layers' inputs stay on the device where they fit, the next layer is fetched ahead
    where that fits.  Where devices reach each other, weights and gradients cross the host's link once for all."""
    through_peers = machine.all_reach and machine.num_devices > 1
    parts = Microbatches(_shares(minibatch_size, machine.num_devices), size)
    num_ops = 2 * len(tables.profile) * parts.count * machine.num_devices
    for stashes, prefetches in ((False, True), (True, True), (True, False)):
        switches = {"through_peers": through_peers, "stashes": stashes, "prefetches": prefetches, "clips": clips}
        emit_into = partial(_stream, tables, parts, switches)
        made = _constructed(machine, num_ops, emit_into)
        if made.counts[STATUS] == 0:
            return _program(made, tables, machine, minibatch_size)
    return _needs(made, size, int(made.ops[made.counts[FAILED_OP], START]))


def _kept_within(made: Construction, p: paging.Pager, iteration: Iteration) -> Program | Needs:
    """The program, if no device has needed more than it has."""
    over = p.devices[:, paging.PEAK] - iteration.machine.budgets
    device = int(np.argmax(over))
    if over[device] > 0:
        return Needs(iteration.size, device, int(p.devices[device, paging.PEAK]))
    return _program(made, iteration.tables, iteration.machine, iteration.minibatch_size)


def _needs(made: Construction, size: int, layer: int) -> Needs:
    return Needs(size, int(made.counts[FAILED_DEVICE]), int(made.counts[FAILED_BYTES]), layer)


def _stream(tables: LayerTables, parts: Microbatches, switches: Mapping[str, bool], c: Construction) -> None:
    stream(c, tables.streaming(parts, **switches))


class _Run:
    """One layerwise iteration, to be emitted from different starts."""

    def __init__(self, iteration: Iteration, *, ends_empty: bool = False, role: Role = Role.ALONE) -> None:
        tables, minibatch_size, stages = iteration.tables, iteration.minibatch_size, iteration.stages
        self.machine, self.units = iteration.machine, iteration.units
        num_layers, count = len(tables.profile), self.machine.num_devices
        if self.units is None:
            devices = np.repeat(np.arange(count)[:, None], num_layers, axis=1)
            parts = Microbatches(_shares(minibatch_size, count), iteration.size)
        else:
            devices = np.repeat(np.arange(len(stages)), [pack.stop - pack.start for pack in stages])[None]
            parts = Microbatches([(0, minibatch_size)], iteration.size)
        self.num_replicas = len(devices)
        self.made, self.pages = tables.layerwise(
            parts,
            devices,
            recomputes=iteration.recomputes,
            ends_empty=ends_empty,
            clips=iteration.clips,
            leaves=role is Role.ADDING,
        )
        gradients = np.arange(num_layers) + layerwise.GRADIENTS * self.num_replicas * (num_layers + 1)  # one replica's
        self.found = gradients[self.pages[gradients, paging.NUM_BYTES] > 0] if role is Role.LAST else gradients[:0]
        self.num_computed = 2 * num_layers * parts.count * self.num_replicas

    def emitted(self, settled: _Settled, *, on_demand: bool) -> tuple[Construction, paging.Pager]:
        """Memory on demand is within budgets; else it is without limits."""
        capacities = np.array(self.machine.budgets) if on_demand else np.full(self.machine.num_devices, _UNLIMITED)
        used: list[paging.Pager] = []

        def emit_into(c: Construction) -> None:
            p = paging.pager(self.pages.copy(), capacities, on_demand=on_demand)
            used.append(p)
            for page, is_changed in zip(*settled, strict=True):
                paging.settle(c, p, page, is_changed)
            for page in self.found:
                paging.find(c, p, page)
            if self.units is None:
                layerwise.data_parallel(c, p, self.made)
            else:
                layerwise.pipeline(c, p, self.made, self.units)

        made = _constructed(self.machine, self.num_computed, emit_into, allow_overrun=not on_demand)
        return made, used[-1]


def _left(p: paging.Pager) -> _Settled:
    pages = []
    for oldest in p.devices[:, paging.OLDEST].tolist():
        page = oldest
        while page >= 0:
            pages.append(page)
            page = int(p.pages[page, paging.NEWER])
    found = np.array(pages, dtype=np.int64)
    return _Settled(found, p.pages[found, paging.IS_CHANGED])


def _constructed(
    machine: Machine, num_computed: int, emit_into: Callable[[Construction], None], *, allow_overrun: bool = False
) -> Construction:
    room = _OPS_PER_LAYER * num_computed + 1024
    while True:
        made = construction(machine.budgets, room, allow_overrun=allow_overrun)
        emit_into(made)
        if made.counts[STATUS] != FULL:
            return made
        room *= 2


def _program(made: Construction, tables: LayerTables, machine: Machine, minibatch_size: int) -> Program:
    return Program.of_columns(
        minibatch_size,
        len(tables.profile),
        machine.budgets,
        *columns(made),
        resident=tuple(range(int(made.counts[RESIDENT]))),
    )


def _shares(minibatch_size: int, count: int) -> list[tuple[int, int]]:
    return [(minibatch_size * i // count, minibatch_size * (i + 1) // count) for i in range(count)]


# -- order of a pipeline ----------------------------------------------------------------------------------------------


def pipeline_units(costs: PackCosts, stages: Sequence[Pack], minibatch_size: int, size: int, *, gpipe: bool) -> Ints:
    """Rows (first layer, stop layer, microbatch, whether backward) of all stages, as they would start if only computing
    took time.

    GPipe (Huang et al., 2019): all forwards, then all backwards, the last microbatch's first.  1F1B (Narayanan et al.,
    2019): each stage runs as many microbatches ahead as there are stages after it, then one back for each forward.
    """
    parts = microbatches(0, minibatch_size, size)
    sequences = [_sequence(position, len(stages), len(parts), gpipe) for position in range(len(stages))]
    ended: dict[tuple[int, int, bool], float] = {}
    free_at, at = [0.0] * len(stages), [0] * len(stages)
    rows: list[tuple[int, int, int, int]] = []
    while True:
        best: tuple[float, int] | None = None
        for position, sequence in enumerate(sequences):
            if at[position] < len(sequence):
                j, backward = sequence[at[position]]
                needed = _needed(position, len(stages), j, backward)
                if needed is None or needed in ended:
                    start_s = max(free_at[position], ended[needed] if needed else 0.0)
                    if best is None or start_s < best[0]:
                        best = start_s, position
        if best is None:
            return np.array(rows, dtype=np.int64)
        start_s, position = best
        j, backward = sequences[position][at[position]]
        pack, samples = stages[position], parts[j][1] - parts[j][0]
        taken_s = costs.backward_s(*pack, samples) if backward else costs.recompute_s(*pack, samples)
        ended[position, j, backward] = free_at[position] = start_s + taken_s
        at[position] += 1
        rows.append((pack.start, pack.stop, j, int(backward)))


def _sequence(position: int, num_stages: int, count: int, gpipe: bool) -> list[tuple[int, bool]]:
    """(microbatch, whether backward) in the order of one stage."""
    if gpipe:
        return [(j, False) for j in range(count)] + [(j, True) for j in reversed(range(count))]
    ahead = min(num_stages - 1 - position, count)
    order = [(j, False) for j in range(ahead)]
    for j in range(count - ahead):
        order += [(j + ahead, False), (j, True)]
    return order + [(j, True) for j in range(count - ahead, count)]


def _needed(position: int, num_stages: int, j: int, backward: bool) -> tuple[int, int, bool] | None:
    """The unit whose result another one needs."""
    if backward:
        return (position + 1, j, True) if position + 1 < num_stages else (position, j, False)
    return (position - 1, j, False) if position else None
