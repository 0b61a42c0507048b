"""run: a Program against a Profile and a Machine in virtual time.

A discrete-event simulation: an op starts when the one before it on its stream and all it waits for have ended.  Ops
that share something (links; the host's cores) progress together at max-min fair rates (``sharing``); others take their
profiled seconds.
"""

import numpy as np

from harmony_lab.costs import Profile
from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Program, TensorKind
from harmony_lab.simulator.events import NEVER, Times, follow
from harmony_lab.simulator.work import work_of
from harmony_lab.trace import MemoryTimeline, Origin, Trace

__all__ = ["makespan_s", "run"]

_KINDS = tuple(TensorKind)


def run(program: Program, profile: Profile, machine: Machine) -> Trace:
    """The predicted Trace of one iteration.

    Deterministic; the Program is taken as valid (``planner.check``).  Raises ``ProgramError`` where it cannot come to
    its end.
    """
    work = work_of(program, profile, machine)
    times = follow(work.graph, work.flows)
    _all_ended(program, times)
    size = machine.num_devices + 1
    moved = {
        (route // size + HOST, route % size + HOST, _KINDS[kind]): int(work.moved[route, kind])
        for route, kind in zip(*(axis.tolist() for axis in np.nonzero(work.moved)), strict=True)
    }
    return Trace(
        origin=Origin.PREDICTED,
        program=program,
        machine=machine,
        start_s=times.start_s,
        end_s=times.end_s,
        memory=_timelines(program, times),
        moved_bytes=moved,
    )


def makespan_s(program: Program, profile: Profile, machine: Machine) -> float:
    """How long ``run`` says that the iteration takes, and nothing else."""
    work = work_of(program, profile, machine)
    times = follow(work.graph, work.flows)
    _all_ended(program, times)
    return float(times.end_s.max(initial=0.0))


def _all_ended(program: Program, times: Times) -> None:
    stuck = np.flatnonzero(times.end_s == NEVER)
    if stuck.size:
        op = int(stuck[0])
        raise ProgramError("this program cannot come to its end", [f"op {op} ({program.ops[op]}) never runs"])


def _timelines(program: Program, times: Times) -> tuple[MemoryTimeline, ...]:
    """Bytes by kind after each allocation and release, in the order in which they happened."""
    ops, blocks = program.op_columns, program.block_columns
    count = len(ops.kind)
    writer = np.repeat(np.arange(count), np.diff(ops.writes_end, prepend=0))
    freer = np.repeat(np.arange(count), np.diff(ops.frees_end, prepend=0))
    block = np.concatenate([ops.writes, ops.frees])
    when = np.concatenate([times.started[writer], times.ended[freer]])
    time_s = np.concatenate([times.start_s[writer], times.end_s[freer]])
    delta = np.concatenate([blocks.num_bytes[ops.writes], -blocks.num_bytes[ops.frees]])
    order = np.argsort(when, kind="stable")
    device = blocks.device[block]
    resident = np.array(program.resident, dtype=np.int64)
    timelines = []
    for index in range(program.num_devices):
        mine = order[device[order] == index]
        changes = np.zeros((len(mine) + 1, len(_KINDS)), dtype=np.int64)
        here = resident[blocks.device[resident] == index]
        np.add.at(changes[0], blocks.kind[here], blocks.num_bytes[here])
        changes[np.arange(1, len(mine) + 1), blocks.kind[block[mine]]] = delta[mine]
        timelines.append(
            MemoryTimeline(
                times_s=np.concatenate([[0.0], time_s[mine]]), kinds=_KINDS, num_bytes=np.cumsum(changes, axis=0)
            )
        )
    return tuple(timelines)
