"""Footprint: a memory timeline thinned to what a figure can show, its peak kept."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.program import TensorKind
from harmony_lab.trace import MemoryTimeline, Origin, Trace
from harmony_lab.units import format_bytes

__all__ = ["INCLUDED", "Footprint", "footprints"]

INCLUDED: Final = "weights, gradients, activations, saved, temporaries; without framework context"
_FEWEST: Final = 60
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class Footprint(NamedTuple):
    """What one device's figure draws: ``num_bytes[i, k]`` of ``kinds[k]`` from ``times_s[i]`` to the next time."""

    device: int
    times_s: _Floats
    kinds: tuple[TensorKind, ...]
    num_bytes: _Ints
    budget_bytes: int
    peak_bytes: int
    peak_s: float

    @property
    def over_budget(self) -> bool:
        return self.peak_bytes > self.budget_bytes

    def words(self, trace: Trace) -> str:
        """Peak and budget; another timing of the same program may peak higher, up to ``planner.check.peak_bytes``."""
        name, budget = trace.machine.devices[self.device].name, format_bytes(self.budget_bytes)
        where = "prediction" if trace.origin is Origin.PREDICTED else "measurement"
        text = f"{name}: peak {format_bytes(self.peak_bytes)} of {budget} in this {where}"
        return f"{text}: {format_bytes(self.peak_bytes - self.budget_bytes)} too much" if self.over_budget else text


def footprints(trace: Trace, *, most_points: int, most_values: int) -> list[Footprint]:
    """One per device that holds anything (all, where none does), of at most ``most_points`` times, about
    ``most_values`` numbers for all devices and kinds.
    """
    curves = sum(len(_used(timeline)) for timeline in trace.memory)
    limit = max(_FEWEST, min(most_points, most_values // max(1, curves)))
    budgets = trace.program.budgets
    used = [device for device, timeline in enumerate(trace.memory) if timeline.num_bytes.any()]
    return [
        _footprint(trace.memory[device], device, trace.makespan_s, budgets[device], limit)
        for device in used or range(len(trace.memory))
    ]


def _used(timeline: MemoryTimeline) -> _Ints:
    """Columns of kinds that are ever there, in the order of ``TensorKind``: stacked alike in every figure."""
    order = list(TensorKind)
    used = [k for k in range(len(timeline.kinds)) if timeline.num_bytes[:, k].any()]
    return np.array(sorted(used, key=lambda k: order.index(timeline.kinds[k])), dtype=np.int64)


def _footprint(timeline: MemoryTimeline, device: int, makespan_s: float, budget: int, limit: int) -> Footprint:
    columns = _used(timeline)
    total = timeline.total_bytes
    peak = int(total.argmax()) if len(total) else 0
    times, kept = _thinned(timeline.times_s, total, limit)
    num_bytes = timeline.num_bytes[kept][:, columns]
    if len(kept) and times[-1] < makespan_s:  # the last step reaches to the end
        times, num_bytes = np.append(times, makespan_s), np.vstack([num_bytes, num_bytes[-1:]])
    return Footprint(
        device=device,
        times_s=times,
        kinds=tuple(timeline.kinds[k] for k in columns),
        num_bytes=num_bytes,
        budget_bytes=budget,
        peak_bytes=timeline.peak_bytes,
        peak_s=float(timeline.times_s[peak]) if len(total) else 0.0,
    )


def _thinned(times_s: _Floats, total: _Ints, limit: int) -> tuple[_Floats, _Ints]:
    """At most ``limit`` - 1 times and the samples to show from each on.

    Of every one of equally long stretches of time, the highest sample is shown from where the stretch's first one was,
    then the last one, which holds until the next stretch: an envelope no peak can slip through.
    """
    count = len(times_s)
    if count < limit:
        return times_s, np.arange(count)
    num_stretches = (limit - 1) // 2
    length = (times_s[-1] - times_s[0]) / num_stretches or 1.0
    stretch = np.minimum((times_s - times_s[0]) // length, num_stretches - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    last = np.append(first[1:], count) - 1
    high = np.lexsort((-total, stretch))[first]  # sorted within its stretch, the first is the highest
    several = last > first
    times = np.concatenate([times_s[first], times_s[last[several]]])
    samples = np.concatenate([high, last[several]])
    order = np.argsort(times, kind="stable")
    return times[order], samples[order]
