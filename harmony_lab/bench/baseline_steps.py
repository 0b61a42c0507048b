"""The measured part of the baselines benchmark: steps of each baseline and of the best plan, on emulated devices."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from harmony_lab.bench.decoder import Shape
from harmony_lab.bench.training import SHAPES, Subject, adamw, emulated, trainer
from harmony_lab.costs import Profile
from harmony_lab.machine import Machine
from harmony_lab.planner.baselines import Baseline, baselines
from harmony_lab.planner.search import search
from harmony_lab.profiler.measure import profile
from harmony_lab.runtime.runner import Runner
from harmony_lab.trace import Trace
from harmony_lab.units import parse_bytes

__all__ = ["OURS", "bench_baseline_steps"]

OURS = "the best plan"
_MINIBATCH = 16
_MICROBATCHES = (2, 4, 8)
_NUM_DEVICES = 2
_WARM_UP = 2  # the first makes the optimizer's state and counts memory

Progress = Callable[[int, int, str], None]
Step = Callable[[], Trace]


def bench_baseline_steps(
    shape: Shape = SHAPES[1],
    *,
    memory: str = "12MiB",
    link: float = 1e8,
    rounds: int = 2,
    steps: int = 1,
    progress: Progress = lambda done, total, text: None,
) -> list[dict[str, Any]]:
    """A row for the best plan and each baseline, on two devices that together do not hold the training state.

    ``name``, ``fits``, ``reason`` (why not), ``microbatch_size`` and ``recomputes`` (of baselines), ``plan`` (of ours);
    ``predicted_s``, ``measured_s`` (median of all steps), ``swap_bytes`` (measured), ``peak_bytes``; ``speedup``: how
    much longer the step takes than ours in the same round, the median of ``rounds``; ``swap_ratio``: how much more it
    swaps.
    """
    subject = Subject(shape, _MINIBATCH, _MICROBATCHES[0])
    machine = emulated(_NUM_DEVICES, memory=parse_bytes(memory), link=link)
    costs = profile(
        subject.layers, machine, adamw(subject.model), microbatch_sizes=_MICROBATCHES, trials=3, cache=False
    )
    best = search(costs, machine, _MINIBATCH, shown=4).candidates[0]
    found = baselines(costs, machine, _MINIBATCH, runnable=True)
    ours = {"name": OURS, "fits": True, "reason": None, "plan": str(best.plan), "predicted_s": best.step_s}
    rows = [ours, *map(_row, found)]
    opens = {OURS: partial(_ours, subject, best.plan, machine, costs)}
    opens |= {baseline.name: partial(_baseline, subject, baseline, machine) for baseline in found if baseline.fits}
    measured: dict[str, list[list[Trace]]] = {name: [] for name in opens}
    for number in range(rounds):
        for position, (name, opened) in enumerate(opens.items()):
            progress(number * len(opens) + position, rounds * len(opens), name)
            with opened() as step:
                measured[name].append([step() for _ in range(_WARM_UP + steps)][_WARM_UP:])
    progress(rounds * len(opens), rounds * len(opens), "measured steps")
    return [{**row, **_measured(measured.get(row["name"]), measured[OURS])} for row in rows]


def _row(baseline: Baseline) -> dict[str, Any]:
    return {
        "name": baseline.name,
        "fits": baseline.fits,
        "reason": baseline.reason or None,
        "microbatch_size": baseline.microbatch_size,
        "recomputes": baseline.recomputes,
        "predicted_s": baseline.step_s,
    }


@contextmanager
def _ours(subject: Subject, plan: Any, machine: Machine, costs: Profile) -> Iterator[Step]:
    with trainer(subject, plan, machine, costs) as training:

        def step() -> Trace:
            training.step(subject.batch)
            assert training.last_trace is not None
            return training.last_trace

        yield step


@contextmanager
def _baseline(subject: Subject, baseline: Baseline, machine: Machine) -> Iterator[Step]:
    with Runner(subject.layers, adamw(subject.model), machine, baseline.lower) as runner:

        def step() -> Trace:
            runner.step(subject.batch)
            assert runner.last_trace is not None
            return runner.last_trace

        yield step


def _measured(of_rounds: list[list[Trace]] | None, ours: list[list[Trace]]) -> dict[str, Any]:
    if of_rounds is None:
        return dict.fromkeys(("measured_s", "swap_bytes", "peak_bytes", "speedup", "swap_ratio"))
    last, our_last = of_rounds[-1][-1], ours[-1][-1]
    pairs = zip(map(_step_s, of_rounds), map(_step_s, ours), strict=True)
    return {
        "measured_s": _step_s([trace for traces in of_rounds for trace in traces]),
        "swap_bytes": last.swap_bytes,
        "peak_bytes": max(last.peak_bytes),
        "speedup": statistics.median(theirs_s / ours_s for theirs_s, ours_s in pairs),
        "swap_ratio": last.swap_bytes / our_last.swap_bytes,
    }


def _step_s(traces: list[Trace]) -> float:
    return statistics.median(trace.makespan_s for trace in traces)
