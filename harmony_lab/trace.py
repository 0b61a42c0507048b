"""Trace: when every op of a Program happened, predicted or measured; memory, traffic and busy time follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.machine import HOST, Hop, Machine
from harmony_lab.program import Op, OpKind, Program, Stream, TensorKind
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["MemoryTimeline", "Origin", "Span", "Trace"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_STREAMS = tuple(Stream)  # by ``STREAM_CODES``


class Origin(StrEnum):
    PREDICTED = "predicted"
    MEASURED = "measured"


class Span(NamedTuple):
    """One op and when it ran, in seconds from the start of the iteration."""

    number: int  # of the op in its program
    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes alive on one device: ``num_bytes[i, k]`` of ``kinds[k]`` from ``times_s[i]`` until the next time."""

    times_s: Floats
    kinds: tuple[TensorKind, ...]
    num_bytes: Ints

    @property
    def total_bytes(self) -> Ints:
        total: Ints = self.num_bytes.sum(axis=1)
        return total

    @property
    def peak_bytes(self) -> int:
        return int(self.total_bytes.max(initial=0))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What happened in one iteration.

    ``start_s`` and ``end_s`` are parallel to ``program.ops``, seconds from the start.  ``memory``: one timeline per
    device.  ``moved_bytes``: bytes by (source, destination, kind), devices by index, the host as ``HOST``.  In a
    measured trace memory and moved bytes are counted from the allocations and copies that took place.
    """

    origin: Origin
    program: Program
    machine: Machine
    start_s: Floats
    end_s: Floats
    memory: tuple[MemoryTimeline, ...]
    moved_bytes: Mapping[tuple[int, int, TensorKind], int]

    @cached_property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))

    @property
    def took(self) -> str:
        """How long the iteration took, and by which clock where that is not the wall's."""
        return format_seconds(self.makespan_s) + (" in virtual time" if self.machine.virtual_time else "")

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes alive at once, per device, everything included: weights, activations, temporaries."""
        return tuple(timeline.peak_bytes for timeline in self.memory)

    def spans(self) -> list[Span]:
        rows = zip(self.program.ops, self.start_s.tolist(), self.end_s.tolist(), strict=True)
        return [Span(i, op, start, end) for i, (op, start, end) in enumerate(rows)]

    # -- traffic --------------------------------------------------------------------------------------------------

    @cached_property
    def link_bytes(self) -> dict[tuple[Hop, TensorKind], int]:
        """Bytes over every link, by direction and tensor kind."""
        totals: dict[tuple[Hop, TensorKind], int] = {}
        for (source, destination, kind), num_bytes in self.moved_bytes.items():
            for hop in self.machine.route(source, destination):
                totals[hop, kind] = totals.get((hop, kind), 0) + num_bytes
        return totals

    @property
    def swap_bytes(self) -> int:
        """Bytes between devices and host, both directions: the swap volume."""
        return sum(n for (source, destination, _), n in self.moved_bytes.items() if HOST in (source, destination))

    @property
    def peer_bytes(self) -> int:
        """Bytes between devices."""
        return sum(n for (source, destination, _), n in self.moved_bytes.items() if HOST not in (source, destination))

    # -- busy time ------------------------------------------------------------------------------------------------

    @cached_property
    def busy_s(self) -> dict[tuple[int, Stream], float]:
        """Seconds in which each (device, stream) had an op running."""
        ops, size = self.program.op_columns, len(_STREAMS)
        spent = np.bincount((ops.device - HOST) * size + ops.stream, weights=self.end_s - self.start_s)
        used = np.unique((ops.device - HOST) * size + ops.stream).tolist()
        keys = {key: (key // size + HOST, _STREAMS[key % size]) for key in used}
        return {keys[key]: float(spent[key]) for key in used if keys[key][1] is not Stream.MEMORY}

    def busy_fraction(self, device: int, stream: Stream) -> float:
        return self.busy_s.get((device, stream), 0.0) / self.makespan_s if self.makespan_s else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Share of the iteration in which devices do not compute, averaged over devices."""
        count = self.program.num_devices
        return 1.0 - sum(self.busy_fraction(device, Stream.COMPUTE) for device in range(count)) / count

    # -- other forms ----------------------------------------------------------------------------------------------

    def to_frame(self) -> "pandas.DataFrame":
        """A row per op: kind, device, stream, layers, samples, start, end, bytes moved."""
        import pandas

        return pandas.DataFrame(
            {
                "op": str(span.op.kind),
                "device": span.op.device,
                "stream": str(span.op.stream),
                "first_layer": span.op.layers[0],
                "stop_layer": span.op.layers[1],
                "first_sample": span.op.samples[0],
                "stop_sample": span.op.samples[1],
                "start_s": span.start_s,
                "end_s": span.end_s,
                "moved_bytes": sum(transfer.num_bytes for transfer in self.program.transfers(span.number)),
            }
            for span in self.spans()
        )

    def to_chrome(self) -> dict[str, Any]:
        """Trace Event JSON, for Perfetto and chrome://tracing: a process per device, a thread per stream, microseconds.

        Written with ``json.dump`` it opens at https://ui.perfetto.dev.
        """
        streams = list(Stream)
        events: list[dict[str, Any]] = []
        for device, stream in self.program.queues:
            name = "host" if device == HOST else self.machine.devices[device].name
            ids = {"pid": device + 1, "tid": streams.index(stream)}
            events.append({"ph": "M", "name": "process_name", "pid": device + 1, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": str(stream)}})
        for number, op, start_s, end_s in self.spans():
            if op.kind is not OpKind.FREE:
                moved = sum(transfer.num_bytes for transfer in self.program.transfers(number))
                events.append(
                    {
                        "ph": "X",
                        "name": f"{op.kind} [{op.layers[0]}:{op.layers[1]}]",
                        "cat": str(op.kind),
                        "pid": op.device + 1,
                        "tid": streams.index(op.stream),
                        "ts": start_s * 1e6,
                        "dur": (end_s - start_s) * 1e6,
                        "args": {"op": number, "samples": list(op.samples), "moved_bytes": moved},
                    }
                )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def __str__(self) -> str:
        peaks = ", ".join(format_bytes(peak) for peak in self.peak_bytes)
        timing = " in this timing" if self.origin is Origin.PREDICTED else ""
        return (
            f"{self.origin} iteration: {self.took}, "
            f"{format_bytes(self.swap_bytes)} swapped, {format_bytes(self.peer_bytes)} between devices, "
            f"{self.bubble_fraction:.0%} idle, peak memory {peaks}{timing}"
        )

    def __repr__(self) -> str:
        return f"<Trace of a {self}>"

    def _repr_html_(self) -> str:
        from harmony_lab.figures.images import trace_html

        return trace_html(self)
