"""Benchmark of the simulator: predicted against measured iterations on emulated devices, over models and links."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harmony_lab.bench.decoder import Shape
from harmony_lab.bench.training import Subject, emulated, layerwise_plan, trainer
from harmony_lab.costs import Profile
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.trace import Trace

__all__ = ["bench_prediction", "to_json"]

Progress = Callable[[int, int, str], None]
_MINIBATCH, _MICROBATCH = 16, 4
_NUM_DEVICES = 2
_WARM_UP = 2
_BUSY = 0.1  # of a step
_VIRTUAL = "virtual_"
SHAPES = (
    Shape(name="decoder 2 x 384", num_blocks=2, width=384, num_heads=4, length=64),
    Shape(name="decoder 3 x 448", num_blocks=3, width=448, num_heads=4, length=64),
    Shape(name="decoder 4 x 512", num_blocks=4, width=512, num_heads=4, length=64),
)
"""Wide enough that a value crosses a link in a millisecond: of less, most is when the host's cores come to copy it."""
LINKS = (20e9, 400e6, 100e6)  # bytes per second: computing binds, both, the link


def bench_prediction(
    *,
    rounds: int = 3,
    steps: int = 5,
    progress: Progress = lambda done, total, text: None,
    shapes: tuple[Shape, ...] = SHAPES,
) -> dict[str, Any]:
    """``rows``: a row per model, mode and link.  In each of the ``rounds`` a model is profiled anew and then trained,
    ``steps`` steps a row: what a row says is of the round whose measured step, over the predicted, is the median.

    Errors are |measured / predicted - 1| of a step, measured the median of its round; ``*_stream_error`` the same of
    how long a stream is busy, for those that should be during a tenth of the step or more.  ``virtual_*``: the same of
    steps in virtual time (``Machine.virtual_time``), with the round in the middle for these.
    """
    found: list[list[dict[str, Any]]] = []
    total = rounds * len(shapes) * len(LINKS) * len(Mode)
    for shape in shapes:
        subject = Subject(shape, _MINIBATCH, _MICROBATCH)
        kinds = [(layerwise_plan(subject, mode, _NUM_DEVICES), link) for mode in Mode for link in LINKS]
        of_shape: list[list[dict[str, Any]]] = [[] for _ in kinds]
        for _ in range(rounds):
            costs = subject.profile(emulated(_NUM_DEVICES))
            for rows, (plan, link) in zip(of_shape, kinds, strict=True):
                rows.append(_row(subject, plan, link, costs, steps))
                progress(sum(len(several) for several in found + of_shape), total, f"{shape.name}, {plan.mode}")
        found += of_shape
    rows = [{**_typical(several), **_virtual(_typical(several, _VIRTUAL))} for several in found]
    return {**_errors(rows), **_errors(rows, _VIRTUAL), "rows": rows}


def _virtual(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith(_VIRTUAL)}


def _errors(rows: list[dict[str, Any]], clock: str = "") -> dict[str, float]:
    errors = [row[f"{clock}error"] for row in rows]
    of_streams = [error for row in rows for error in _stream_errors(row, clock)]
    return {
        f"{clock}median_error": statistics.median(errors),
        f"{clock}worst_error": max(errors),
        f"{clock}median_stream_error": statistics.median(of_streams),
        f"{clock}worst_stream_error": max(of_streams),
    }


def _typical(rows: list[dict[str, Any]], clock: str = "") -> dict[str, Any]:
    """That with the median of measured over predicted, of an even number the lower one of the two."""
    ratios = [row[f"{clock}measured_s"] / row[f"{clock}predicted_s"] for row in rows]
    return rows[ratios.index(statistics.median_low(ratios))]


def _stream_errors(row: dict[str, Any], clock: str = "") -> list[float]:
    least_s = _BUSY * row[f"{clock}predicted_s"]
    busy = [stream for stream in row[f"{clock}streams"].values() if stream["predicted_s"] >= least_s]
    return [abs(stream["measured_s"] / stream["predicted_s"] - 1) for stream in busy]


def _row(subject: Subject, plan: Plan, link: float, costs: Profile, steps: int) -> dict[str, Any]:
    machine = emulated(_NUM_DEVICES, link=link)
    virtual = _compared(subject, plan, replace(machine, virtual_time=True), costs, steps)
    return {
        "model": subject.shape.name,
        "plan": str(plan),
        "link_bytes_per_s": link,
        **_compared(subject, plan, machine, costs, steps),
        **{f"{_VIRTUAL}{name}": virtual[name] for name in ("predicted_s", "measured_s", "error", "streams")},
    }


def _compared(subject: Subject, plan: Plan, machine: Machine, costs: Profile, steps: int) -> dict[str, Any]:
    with trainer(subject, plan, machine, costs) as training:
        predicted = training.predicted
        traces = []
        for _ in range(_WARM_UP + steps):
            training.step(subject.batch)
            assert training.last_trace is not None
            traces.append(training.last_trace)
    measured = traces[_WARM_UP:]
    measured_s = statistics.median(trace.makespan_s for trace in measured)
    return {
        "predicted_s": predicted.makespan_s,
        "measured_s": measured_s,
        "error": abs(measured_s / predicted.makespan_s - 1),
        "swap_bytes_predicted": predicted.swap_bytes,
        "swap_bytes_measured": measured[-1].swap_bytes,
        "peak_bytes_predicted": list(peak_bytes(predicted.program)),
        "peak_bytes_measured": np.max([trace.peak_bytes for trace in measured], axis=0).tolist(),
        "streams": _streams(predicted, measured),
    }


def _streams(predicted: Trace, measured: list[Trace]) -> dict[str, dict[str, float]]:
    """Busy seconds of every stream."""
    return {
        f"{'host' if device == HOST else f'd{device}'}.{stream}": {
            "predicted_s": busy_s,
            "measured_s": statistics.median(trace.busy_s.get((device, stream), 0.0) for trace in measured),
        }
        for (device, stream), busy_s in predicted.busy_s.items()
    }


def to_json(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1))
