"""Benchmark of the runtime: what planning costs where nothing binds, what a second device brings, what overlaps."""

import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harmony_lab.bench import chaos
from harmony_lab.bench.resuming import resume_step_ratio
from harmony_lab.bench.scaling import speedup_of_two_processes
from harmony_lab.bench.training import (
    SHAPES,
    Subject,
    alternating,
    emulated,
    layerwise_plan,
    plain_step,
    threads,
    trainer,
)
from harmony_lab.machine import HOST
from harmony_lab.plan import Mode
from harmony_lab.program import OpKind, Stream, TensorKind
from harmony_lab.trace import Trace

__all__ = ["bench_runtime", "to_json"]

Progress = Callable[[int, int, str], None]
_MINIBATCH, _MICROBATCH = 16, 4
_SHARED_MINIBATCH = 32  # of two devices: eight microbatches each in PP, four in DP
_WARM_UP = 3
_OVERLAPPED = 0.8  # transfers of this share of the time that computing takes
_UNBOUND_STEPS = 5  # whose median that time is: a single step on a busy host may take half as long again


def bench_runtime(
    *,
    chaos_plans: int = 2000,
    rounds: int = 9,
    progress: Progress = lambda done, total, text: None,
    shapes: tuple[Any, ...] = SHAPES,
) -> dict[str, Any]:
    """Ratios of step times, each the median of ``rounds`` alternating runs.

    ``overhead_vs_checkpoint``: one emulated device, a block to a pack, free links, against plain PyTorch with a
    checkpoint at every block, same microbatches, one thread for computing each; the median over the models.
    ``overhead_smallest``: of the smallest.  ``speedup_two_devices_*``: of two devices of one core each over one, the
    largest model; ``predicted_speedup_*`` what the simulator says of it, ``speedup_two_processes`` what two processes
    that train plainly, each for itself, reach on this host.  ``overlap_ratio``: a step whose transfers,
    one after the other, take 0.8 times as long as its computing, over one with free links; without overlap it would be
    1.8.  ``overlap_ratio_busier_way``: where those in, or those out, whichever are more, take that long by themselves.
    That is an average: forward computes for a fifth of the time but needs two fifths of what comes in, so that links
    bind it.  ``overlap_ratio_every_phase``: where those in take at most 0.8 times as long as computing in forward and
    in backward each.  ``predicted_overlap_*`` says what the schedule allows.  ``resume_step_ratio``: of training that
    was resumed from a file over training that went on, the largest model.  ``chaos_*``: see ``bench.chaos``.
    """
    total = len(shapes) + 6
    overheads = {}
    for number, shape in enumerate(shapes):
        overheads[shape.name] = _overhead(Subject(shape, _MINIBATCH, _MICROBATCH), rounds)
        progress(number + 1, total, f"overhead of {shape.name}")
    largest = Subject(shapes[-1], _MINIBATCH, _MICROBATCH)
    found: dict[str, Any] = {
        "overhead_vs_checkpoint": statistics.median(overheads.values()),
        "overhead_smallest": overheads[shapes[0].name],
        "overheads": overheads,
    }
    work = shapes[-1], _SHARED_MINIBATCH, _MICROBATCH
    for number, mode in enumerate((Mode.PP, Mode.DP)):
        speedup, predicted = _speedup(Subject(*work), mode, rounds)
        found |= {f"speedup_two_devices_{mode}": speedup, f"predicted_speedup_{mode}": predicted}
        progress(len(shapes) + 1 + number, total, f"two devices, {mode}")
    found["speedup_two_processes"] = speedup_of_two_processes(*work, rounds)
    progress(len(shapes) + 3, total, "two processes")
    found |= _overlap(largest, rounds)
    progress(total - 2, total, "overlap")
    found["resume_step_ratio"] = resume_step_ratio(shapes[-1], _MINIBATCH, _MICROBATCH, rounds)
    progress(total - 1, total, "resuming")
    failed = chaos.failures(chaos_plans, lambda done, plans, text: progress(total - 1, total, f"chaos {done}/{plans}"))
    found |= {"chaos_plans": chaos_plans, "chaos_failures": len(failed), "chaos_failed": failed}
    progress(total, total, "done")
    return found


def _overhead(subject: Subject, rounds: int) -> float:
    machine = emulated(1)
    plan = layerwise_plan(subject, Mode.DP, 1)
    plain = plain_step(subject.shape, subject.minibatch_size, subject.microbatch_size)
    with trainer(subject, plan, machine, subject.profile(machine)) as ours, threads(1):
        return alternating(plain, lambda: ours.step(subject.batch), rounds)


def _speedup(subject: Subject, mode: Mode, rounds: int) -> tuple[float, float]:
    """Measured and predicted."""
    alone = Subject(subject.shape, subject.minibatch_size, subject.microbatch_size)
    costs = subject.profile(emulated(2))
    costs_alone = replace(costs, emulation=alone.profile(emulated(1), trials=1).emulation)
    with ExitStack() as stack:
        trainers = []
        for one, count, known in ((alone, 1, costs_alone), (subject, 2, costs)):
            plan = layerwise_plan(one, Mode.DP if count == 1 else mode, count)
            trainers.append(stack.enter_context(trainer(one, plan, emulated(count), known)))
        single, double = trainers
        predicted = single.predicted.makespan_s / double.predicted.makespan_s
        return alternating(lambda: double.step(subject.batch), lambda: single.step(alone.batch), rounds), predicted


def _overlap(subject: Subject, rounds: int) -> dict[str, float]:
    plan = layerwise_plan(subject, Mode.DP, 1)
    other = Subject(subject.shape, subject.minibatch_size, subject.microbatch_size)
    free = emulated(1)
    costs = subject.profile(free)
    found: dict[str, float] = {}
    with trainer(subject, plan, free, costs) as unbound:
        traces = []
        for _ in range(_WARM_UP + _UNBOUND_STEPS):
            unbound.step(subject.batch)
            assert unbound.last_trace is not None
            traces.append(unbound.last_trace)
        phases = _phases(traces[_WARM_UP:])
        seconds = sum(phase.seconds for phase in phases)
        into, out = _moved_bytes(traces[-1])
        busier = _Phase(num_bytes=max(into, out), seconds=seconds)
        kinds = {
            "overlap_ratio": (_Phase(num_bytes=into + out, seconds=seconds),),
            "overlap_ratio_busier_way": (busier,),
            "overlap_ratio_every_phase": (busier, *phases),
        }
        for name, bounds in kinds.items():
            rate = max(phase.num_bytes / (_OVERLAPPED * phase.seconds) for phase in bounds)
            with trainer(other, plan, emulated(1, link=rate), costs) as bound:
                predicted = bound.predicted.makespan_s / unbound.predicted.makespan_s
                ratio = alternating(lambda: unbound.step(subject.batch), partial(bound.step, other.batch), rounds)
            found |= {name: ratio, f"predicted_{name}": predicted}
    return found


class _Phase(NamedTuple):
    """``num_bytes`` move, or come in, for what computes for ``seconds``."""

    num_bytes: int
    seconds: float


def _phases(traces: list[Trace]) -> tuple[_Phase, _Phase]:
    """Forward that keeps nothing for backward, and all other computing; seconds are medians over the traces."""
    program = traces[0].program
    blocks = program.blocks
    computing = [number for number, op in enumerate(program.ops) if op.stream is Stream.COMPUTE]
    forward = {
        number
        for number in computing
        if program.ops[number].kind is OpKind.FORWARD
        and all(blocks[block].kind is not TensorKind.SAVED for block in program.ops[number].writes)
    }
    needed = {block for number in forward for block in program.ops[number].reads}
    came = [block for op in program.ops if op.kind is OpKind.SWAP_IN for block in op.writes]

    def phase(ops: list[int], incoming: list[int]) -> _Phase:
        seconds = statistics.median(float((trace.end_s[ops] - trace.start_s[ops]).sum()) for trace in traces)
        return _Phase(num_bytes=sum(blocks[block].num_bytes for block in incoming), seconds=seconds)

    return (
        phase(sorted(forward), [block for block in came if block in needed]),
        phase([number for number in computing if number not in forward], [b for b in came if b not in needed]),
    )


def _moved_bytes(trace: Trace) -> tuple[int, int]:
    """Into the devices and out."""
    moved = trace.moved_bytes.items()
    into = sum(num_bytes for (source, _, _), num_bytes in moved if source == HOST)
    return into, sum(num_bytes for (_, destination, _), num_bytes in moved if destination == HOST)


def to_json(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1))
