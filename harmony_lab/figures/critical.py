"""The critical path of an iteration: the chain of ops that nothing could have shortened without shortening itself."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.figures.lanes import KINDS, Lanes
from harmony_lab.figures.spec import panel_axes
from harmony_lab.figures.theme import CRITICAL_COLOUR, label
from harmony_lab.program import OpColumns, OpKind, Stream
from harmony_lab.trace import Trace

__all__ = ["CriticalPath", "critical_line", "critical_path"]

_SHOWN_KINDS: Final = 4
_LEAST_SHARE: Final = 0.005
_MANY_STRETCHES: Final = 150  # of the line: a thick one would cover all else


class CriticalPath(NamedTuple):
    """``ops`` by number, first to last.  ``seconds``: of its ops, by kind; ``waiting_s``: between them, where links or
    cores were shared with others, or (measured) where a thread was late.
    """

    ops: tuple[int, ...]
    seconds: Mapping[OpKind, float]
    waiting_s: float

    def words(self) -> str:
        """``"backward 52%, swap in 20%, waiting 3%"``, the largest shares first."""
        total = sum(self.seconds.values()) + self.waiting_s
        parts = sorted(((s, label(kind)) for kind, s in self.seconds.items()), reverse=True)[:_SHOWN_KINDS]
        parts.append((self.waiting_s, "waiting"))
        return ", ".join(f"{name} {s / total:.0%}" for s, name in parts if total and s / total >= _LEAST_SHARE)


def critical_path(trace: Trace) -> CriticalPath:
    """Back from the op that ended last, each time to the one that ended last of those it had to wait for: its
    predecessor on the stream and the ops it comes after.
    """
    ops = trace.program.op_columns
    if not len(ops.kind):
        return CriticalPath((), {}, 0.0)
    ends, after, after_end = trace.end_s.tolist(), ops.after.tolist(), [0, *ops.after_end.tolist()]
    before = _before(ops).tolist()
    number = int(trace.end_s.argmax())
    path = [number]
    while waited_for := [
        *after[after_end[number] : after_end[number + 1]],
        *([before[number]] if before[number] >= 0 else ()),
    ]:
        number = max(waited_for, key=lambda other: (ends[other], other))
        path.append(number)
    path.reverse()
    spent_s = (trace.end_s - trace.start_s)[path]
    of_kind = np.bincount(ops.kind[path], weights=np.maximum(spent_s, 0.0), minlength=len(KINDS))
    seconds = {kind: float(s) for kind, s in zip(KINDS, of_kind, strict=True) if s > 0}
    return CriticalPath(tuple(path), seconds, max(0.0, trace.makespan_s - sum(seconds.values())))


def _before(ops: OpColumns) -> Ints:
    """The op before each on its stream, -1 where there is none."""
    stream = ops.device * len(Stream) + ops.stream
    order = np.argsort(stream, kind="stable")
    before = np.full(len(order), -1)
    follows = np.flatnonzero(np.diff(stream[order]) == 0) + 1
    before[order[follows]] = order[follows - 1]
    return before


def critical_line(
    path: CriticalPath, trace: Trace, bars: Lanes, unit_s: float, *, row: int = 0
) -> Iterator[dict[str, Any]]:
    """The path as a line through the rows of a timeline: along each op, down or up to the next one's row.

    ``bars``: all of the trace's, not merged.  ``row``: the panel, as in ``spec.panel_axes``.  Nothing where there is no
    path.
    """
    rows = np.full(len(trace.program.ops), -1, dtype=np.int64)
    rows[bars.number] = bars.row
    numbers = np.array(path.ops, dtype=np.int64)
    numbers = numbers[(rows[numbers] >= 0) & (trace.end_s[numbers] > trace.start_s[numbers])]
    if not len(numbers):
        return
    first = np.flatnonzero(np.diff(rows[numbers], prepend=-2))  # ops that follow each other on a row: one stretch
    last = np.append(first[1:], len(numbers)) - 1
    x, y = panel_axes(row)
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": "critical path",
        "legendgroup": "critical path",
        "x": (np.column_stack([trace.start_s[numbers[first]], trace.end_s[numbers[last]]]).ravel() / unit_s).astype(
            np.float32
        ),
        "y": np.repeat(rows[numbers[first]], 2).astype(np.int16),
        "xaxis": x,
        "yaxis": y,
        "line": {"color": CRITICAL_COLOUR, "width": 2.5 if len(first) <= _MANY_STRETCHES else 1.2},
        "hoverinfo": "skip",
    }
