"""Benchmark of compiled layers: steps of the same plan with layers as machine code and as they are, in one run."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harmony_lab.bench.decoder import Shape
from harmony_lab.bench.training import SHAPES, Subject, alternating, emulated, layerwise_plan, trainer
from harmony_lab.costs import Profile
from harmony_lab.plan import Mode
from harmony_lab.profiler.compiling import compile_layers

__all__ = ["bench_compiled", "to_json"]

Progress = Callable[[int, int, str], None]
_MINIBATCH, _MICROBATCH = 16, 4


def bench_compiled(
    *,
    rounds: int = 9,
    progress: Progress = lambda done, total, text: None,
    shapes: Sequence[Shape] = SHAPES,
) -> dict[str, Any]:
    """One emulated device of one core, free links, a block to a pack.

    ``median_ratio``: of compiled to plain step time, over the models.  Of each of the ``rows``: ``ratio``, the median
    of ``rounds`` alternating runs; ``compute_ratio``, of the profiled seconds of all layers, forward, recompute and
    backward; ``saved_ratio``, of the bytes that backward needs; ``profile_s``, what profiling takes with compiling in
    it, where torch has no code on disk from before.
    """
    rows = []
    for number, shape in enumerate(shapes):
        rows.append(_row(shape, rounds))
        progress(number + 1, len(shapes), shape.name)
    return {"median_ratio": statistics.median(row["ratio"] for row in rows), "rows": rows}


def _row(shape: Shape, rounds: int) -> dict[str, Any]:
    machine = emulated(1)
    plain = Subject(shape, _MINIBATCH, _MICROBATCH)
    ours = Subject(shape, _MINIBATCH, _MICROBATCH)
    ours.layers = compile_layers(ours.layers)
    began_s = time.perf_counter()
    costs = ours.profile(machine)
    profile_s = time.perf_counter() - began_s
    plain_costs = plain.profile(machine)
    plan = layerwise_plan(plain, Mode.DP, 1)
    with trainer(plain, plan, machine, plain_costs) as before, trainer(ours, plan, machine, costs) as after:
        ratio = alternating(lambda: before.step(plain.batch), lambda: after.step(ours.batch), rounds)
    return {
        "model": shape.name,
        "ratio": ratio,
        "compute_ratio": _seconds(costs) / _seconds(plain_costs),
        "saved_ratio": costs.activation_bytes(_MICROBATCH) / plain_costs.activation_bytes(_MICROBATCH),
        "profile_s": profile_s,
    }


def _seconds(costs: Profile) -> float:
    one = [costs.cost(index, _MICROBATCH) for index in range(len(costs))]
    return sum(cost.forward_s + cost.recompute_s + cost.backward_s for cost in one)


def to_json(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1))
