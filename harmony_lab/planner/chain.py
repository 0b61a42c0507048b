"""chain: what a plan, a profile and a machine say, as the flat arrays that lowering works on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.compiled import Floats, Ints, compiled
from harmony_lab.costs import Profile
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.chain_tables import (
    BACKWARD_WORKSPACE,
    BATCH_BYTES,
    BUFFER_BYTES,
    CONSUMER,
    FORWARD_WORKSPACE,
    GRADIENT_BYTES,
    IS_BACKWARD,
    IS_FUSED,
    IS_KEPT,
    IS_STASHED,
    KEEPS_END,
    NEXT_TASK,
    NUM_COLUMNS,
    ON_DEVICE,
    OPTIMIZER_BYTES,
    PRODUCER,
    RECOMPUTE_WORKSPACE,
    SAVED_BYTES,
    SENDS_ON,
    STAGE_START,
    STAGE_STOP,
    TASK_DEVICE,
    TASK_END,
    TASK_STAGE,
    TWIN,
    UNIT_END,
    UNIT_FIRST,
    UNIT_LAST,
    UNIT_SIZE,
    UNIT_TASK,
    UPDATE_WORKSPACE,
    UPDATES_BUFFERS,
    UPDATES_HERE,
    USERS_END,
    VALUE_BYTES,
    VALUE_GRADIENT_BYTES,
    WEIGHT_BYTES,
    Chain,
)
from harmony_lab.planner.compose import Stage, forward_stages, stages
from harmony_lab.planner.pack import PackCosts

__all__ = ["Lowerable", "chain"]


class Lowerable(NamedTuple):
    """A chain and the order in which its units are lowered; ``seconds``: of each unit's computing."""

    chain: Chain
    order: Ints
    seconds: Floats


class _Units(NamedTuple):
    """Microbatches of every task, one after the other."""

    task: Ints
    first: Ints
    last: Ints
    size: Ints  # index into ``sizes``
    task_end: Ints
    sizes: tuple[int, ...]


def chain(plan: Plan, profile: Profile, machine: Machine, costs: PackCosts, *, evaluating: bool = False) -> Lowerable:
    """The plan as arrays; ``evaluating``: its forward alone.  The plan is taken as valid (``compose.validate``)."""
    run = forward_stages(plan) if evaluating else stages(plan, profile)
    task_stage = np.repeat(np.arange(len(run)), [len(stage.devices) for stage in run])
    task_device = np.array([device for stage in run for device in stage.devices])
    units = _units(run)
    used = [np.unique(units.size[task_stage[units.task] == number]).tolist() for number in range(len(run))]
    seconds = _unit_seconds(run, units, used, task_stage, costs)
    most_units = int(np.bincount(task_stage[units.task]).max())
    peers = int(plan.peer_transfers and machine.all_reach)
    stage_table, keeps, users = _by_stage(plan, profile, run, costs)
    if evaluating:
        stage_table[:, UPDATES_BUFFERS] = 0
    made = Chain(
        options=np.array([len(units.sizes), most_units, plan.prefetch, peers, int(plan.just_in_time_update), 0]),
        stages=stage_table,
        tasks=_table(
            "tasks",
            {
                TASK_STAGE: task_stage,
                TASK_DEVICE: task_device,
                UNIT_END: units.task_end,
                NEXT_TASK: _next(task_device),
                SENDS_ON: peers if machine.all_reach else _sends_on(plan, run, machine),
            },
        ),
        units=_table(
            "units",
            {UNIT_TASK: units.task, UNIT_FIRST: units.first, UNIT_LAST: units.last, UNIT_SIZE: units.size},
        ),
        cells=_by_stage_and_size(run, units.sizes, used, costs),
        values=_by_boundary_and_size(run, units.sizes, costs),
        boundaries=_by_boundary(plan, run),
        keeps=keeps,
        users=users,
        devices=np.empty((machine.num_devices, NUM_COLUMNS["devices"]), dtype=np.int64),
        host_values=np.empty((plan.num_layers + 1) * most_units, dtype=np.int64),
        host_gradients=np.empty((len(run), machine.num_devices), dtype=np.int64),
    )
    return Lowerable(made, _order(made, seconds), seconds)


def _table(name: str, columns: Mapping[int, npt.ArrayLike]) -> Ints:
    rows = len(np.asarray(next(iter(columns.values()))))
    table = np.zeros((rows, NUM_COLUMNS[name]), dtype=np.int64)
    for column, values in columns.items():
        table[:, column] = values
    return table


def _units(run: Sequence[Stage]) -> _Units:
    firsts, lasts, counts = [], [], []
    known: dict[tuple[int, int, int], tuple[Ints, Ints]] = {}
    for stage in run:
        for start, stop in stage.shares:
            key = (start, stop, stage.microbatch_size)
            if key not in known:
                first = np.arange(start, stop, stage.microbatch_size)
                known[key] = first, np.minimum(first + stage.microbatch_size, stop)
            firsts.append(known[key][0])
            lasts.append(known[key][1])
            counts.append(len(firsts[-1]))
    first, last = np.concatenate(firsts), np.concatenate(lasts)
    sizes, size = np.unique(last - first, return_inverse=True)
    return _Units(
        np.repeat(np.arange(len(counts)), counts), first, last, size, np.cumsum(counts), tuple(sizes.tolist())
    )


def _sends_on(plan: Plan, run: Sequence[Stage], machine: Machine) -> list[bool]:
    """Whether each task's device copies to the one that runs the next stage without the host."""
    return [
        plan.peer_transfers and any(machine.reaches(device, other) for other in following.devices)
        for stage, following in zip(run, (*run[1:], run[-1]), strict=True)
        for device in stage.devices
    ]


def _next(task_device: Ints) -> Ints:
    following = np.full(len(task_device), -1)
    for device in np.unique(task_device):
        own = np.flatnonzero(task_device == device)
        following[own[:-1]] = own[1:]
    return following


def _by_stage(plan: Plan, profile: Profile, run: Sequence[Stage], costs: PackCosts) -> tuple[Ints, Ints, Ints]:
    """The table of stages, and the lists that it cuts: what forward stages keep, whose updates need gradients."""
    stash = _stash(run)
    keeps: list[int] = []
    users: list[int] = []
    keeps_end, users_end = [], []
    for stage, of_stage in zip(run, _users(profile, run), strict=True):
        if not stage.backward:
            keeps += [*(b for b in stash if stage.pack.start < b < stage.pack.stop), stage.pack.stop]
        users += of_stage
        keeps_end.append(len(keeps))
        users_end.append(len(users))
    twins, kept = _twins(plan, run)
    forward = [stage.fused or not stage.backward for stage in run]
    here = [stage.backward and stage.pack in plan.device_updates and stage.trains(costs) for stage in run]
    columns: dict[int, npt.ArrayLike] = {
        STAGE_START: [stage.pack.start for stage in run],
        STAGE_STOP: [stage.pack.stop for stage in run],
        IS_BACKWARD: [stage.backward for stage in run],
        IS_FUSED: [stage.fused for stage in run],
        WEIGHT_BYTES: [costs.weight_bytes(*stage.pack) for stage in run],
        BUFFER_BYTES: [costs.buffer_bytes(*stage.pack) for stage in run],
        GRADIENT_BYTES: [costs.gradient_bytes(*stage.pack) if stage.backward else 0 for stage in run],
        UPDATES_BUFFERS: [
            updates and profile.updated_buffer_bytes(*stage.pack) > 0
            for stage, updates in zip(run, forward, strict=True)
        ],
        TASK_END: np.cumsum([len(stage.devices) for stage in run]),
        KEEPS_END: keeps_end,
        TWIN: twins,
        IS_KEPT: kept,
        USERS_END: users_end,
        UPDATES_HERE: here,
        OPTIMIZER_BYTES: [costs.optimizer_bytes(*stage.pack) for stage in run],
        UPDATE_WORKSPACE: [costs.update_workspace(*stage.pack) for stage in run],
    }
    return _table("stages", columns), np.array(keeps, dtype=np.int64), np.array(users, dtype=np.int64)


def _stash(run: Sequence[Stage]) -> list[int]:
    """Boundaries whose values backward packs need again, but those whose pack keeps more than that."""
    return sorted(
        stage.pack.start
        for stage in run
        if stage.backward and not stage.fused and stage.pack.start > 0 and not stage.kept
    )


def _twins(plan: Plan, run: Sequence[Stage]) -> tuple[list[int], list[int]]:
    twins, kept = [-1] * len(run), [0] * len(run)
    forward = {stage.pack: number for number, stage in enumerate(run) if not stage.backward}
    for number, stage in enumerate(run):
        if stage.backward and stage.pack in plan.resident_packs:
            other = forward[stage.pack]
            twins[number], twins[other] = other, number
            kept[number] = kept[other] = int(stage.kept)
    return twins, kept


def _users(profile: Profile, run: Sequence[Stage]) -> list[list[int]]:
    """Per stage, the stages whose update needs its gradients: its own, and those that own what it shares."""
    found = [[number] for number in range(len(run))]
    for shared in profile.shared:
        if shared.gradient_bytes:
            owner = min(shared.layers)
            owners = [n for n, stage in enumerate(run) if stage.backward and owner in range(*stage.pack)]
            for number, stage in enumerate(run):
                if any(stage.pack.start <= layer < stage.pack.stop for layer in shared.layers):
                    found[number] = sorted({*found[number], *owners})
    return found


def _by_stage_and_size(
    run: Sequence[Stage], sizes: Sequence[int], used: Sequence[Sequence[int]], costs: PackCosts
) -> Ints:
    table = np.zeros((len(run) * len(sizes), NUM_COLUMNS["cells"]), dtype=np.int64)
    stash = _stash(run)
    for number, stage in enumerate(run):
        start, stop = stage.pack
        keep = (*(b for b in stash if start < b < stop), stop)
        for z in used[number]:
            size, row = sizes[z], table[number * len(sizes) + z]
            row[BATCH_BYTES] = costs.batch_input_bytes(start, stop, size)
            if stage.backward or stage.kept:
                row[SAVED_BYTES] = costs.saved_bytes(start, stop, size)
                row[RECOMPUTE_WORKSPACE] = costs.recompute_workspace(start, stop, size)
            if stage.backward:
                row[BACKWARD_WORKSPACE] = costs.backward_workspace(start, stop, size)
            elif not stage.kept:
                row[FORWARD_WORKSPACE] = costs.forward_workspace(start, stop, size, keep)
    return table


def _by_boundary_and_size(run: Sequence[Stage], sizes: Sequence[int], costs: PackCosts) -> Ints:
    num_layers = max(stage.pack.stop for stage in run)
    table = np.zeros(((num_layers + 1) * len(sizes), NUM_COLUMNS["values"]), dtype=np.int64)
    for boundary in {edge for stage in run for edge in stage.pack}:
        for z, size in enumerate(sizes):
            row = table[boundary * len(sizes) + z]
            row[VALUE_BYTES] = costs.boundary_bytes(boundary, size)
            row[VALUE_GRADIENT_BYTES] = costs.boundary_gradient_bytes(boundary, size)
    return table


def _by_boundary(plan: Plan, run: Sequence[Stage]) -> Ints:
    table = np.zeros((plan.num_layers + 1, NUM_COLUMNS["boundaries"]), dtype=np.int64)
    table[:, [PRODUCER, CONSUMER]] = -1
    needed = {stage.pack.start for stage in run if stage.backward}
    table[[b for b in plan.device_stash if b in needed], ON_DEVICE] = 1
    table[[b for b in _stash(run) if b not in plan.device_stash], IS_STASHED] = 1
    for number, stage in enumerate(run):
        if stage.backward:
            table[stage.pack.start, CONSUMER] = number
        else:
            table[stage.pack.start + 1 : stage.pack.stop + 1, PRODUCER] = number
    return table


# -- order ------------------------------------------------------------------------------------------------------------


def _unit_seconds(
    run: Sequence[Stage], units: _Units, used: Sequence[Sequence[int]], task_stage: Ints, costs: PackCosts
) -> Floats:
    table = np.zeros((len(run), len(units.sizes)))
    for number, stage in enumerate(run):
        for z in used[number]:
            table[number, z] = stage.seconds(costs, units.sizes[z])
    seconds: Floats = table[task_stage[units.task], units.size]
    return seconds


def _order(k: Chain, seconds: Floats) -> Ints:
    """All units in the order in which they would begin if only computing took time.

    This is the order in which memory is promised (see ``program``), so it must be one in which the devices really
    progress together.  Where several devices run one stage (DP), the stage ends on all of them before the next: what
    they reduce together leaves before more is promised to a device that is ahead.
    """
    task = k.units[:, UNIT_TASK]
    stage = k.tasks[task, TASK_STAGE]
    starts = _starts(k, seconds, np.zeros(len(task)), np.zeros(len(k.devices)))
    shared = np.diff(k.stages[:, TASK_END], prepend=0)[stage] > 1
    begins = np.concatenate([[0], k.tasks[:-1, UNIT_END]])
    position = np.arange(len(task)) - begins[task]
    order: Ints = np.lexsort((position, stage, starts, np.where(shared, stage, 0)))
    return order


@compiled
def _starts(k: Chain, seconds: Floats, ends: Floats, free_at: Floats) -> Floats:
    """When each unit would start; ``ends`` is filled with when it would end."""
    starts = ends.copy()
    for task in range(len(k.tasks)):
        stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
        begin = k.tasks[task - 1, UNIT_END] if task > 0 else 0
        produced = produced_end = 0
        if stage > 0:
            before = k.stages[stage - 2, TASK_END] if stage > 1 else 0
            source = before
            for other in range(before, k.stages[stage - 1, TASK_END]):
                if k.tasks[other, TASK_DEVICE] == device:
                    source = other
            produced = k.tasks[source - 1, UNIT_END] if source > 0 else 0
            produced_end = k.tasks[source, UNIT_END]
        for unit in range(begin, k.tasks[task, UNIT_END]):
            while produced < produced_end and k.units[produced, UNIT_LAST] < k.units[unit, UNIT_LAST]:
                produced += 1
            ready = ends[produced] if produced < produced_end else 0.0
            starts[unit] = max(free_at[device], ready)
            ends[unit] = free_at[device] = starts[unit] + seconds[unit]
    return starts
