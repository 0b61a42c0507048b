"""Timelines: what every stream of every device did when."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from harmony_lab.figures.critical import CriticalPath, critical_line, critical_path
from harmony_lab.figures.lanes import KINDS, MOVING, Lanes, lanes, thinned
from harmony_lab.figures.scales import Unit, time_unit
from harmony_lab.figures.spec import ZOOMED, Spec, panel_axes, panel_domains, panel_title, time_range
from harmony_lab.figures.theme import GRID_COLOUR, OP_COLOURS, label, looks
from harmony_lab.program import OpKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes

__all__ = ["TIMELINE_LEFT", "compare_figure", "compare_spec", "timeline_figure", "timeline_spec", "timelines_spec"]

TIMELINE_LEFT: Final = 130
"""Pixels left of the time axis."""
_MOST_BARS: Final = 4000
_MOST_EDGED_BARS: Final = 400
_ROW_PIXELS: Final = 24
_GAP_PIXELS: Final = 40


def timeline_figure(trace: Trace) -> go.Figure:
    """A row per device and stream, a bar per op, coloured by op kind; beyond 4,000 ops short neighbours share a bar."""
    return go.Figure(timeline_spec(trace))


def compare_figure(predicted: Trace, measured: Trace) -> go.Figure:
    """Two timelines one above the other, on one time axis."""
    return go.Figure(compare_spec(predicted, measured))


def timeline_spec(trace: Trace) -> Spec:
    """``timeline_figure`` as plain data."""
    every = lanes(trace)
    bars, unit = _few(every, trace), time_unit(trace.makespan_s)
    path = critical_path(trace)
    height = 135 + _ROW_PIXELS * max(3, len(bars.names))
    layout = looks(title=_title(trace, path), height=height, left=TIMELINE_LEFT, top=60)
    layout |= {"barmode": "overlay", "bargap": 0, "meta": ZOOMED}
    layout["xaxis"] = _time_axis(trace.makespan_s, titled=True)
    layout["yaxis"] = _rows_axis(bars)
    layout["shapes"] = _edges(bars, 0)
    return {"data": [*_traces(bars, unit, 0), *critical_line(path, trace, every, unit.size)], "layout": layout}


def compare_spec(predicted: Trace, measured: Trace) -> Spec:
    """``compare_figure`` as plain data."""
    named = [(str(trace.origin).capitalize(), trace) for trace in (predicted, measured)]
    return timelines_spec("Predicted and measured", named)


def timelines_spec(title: str, named: Sequence[tuple[str, Trace]]) -> Spec:
    """Timelines one above the other, each under its name, on one time axis."""
    drawn = [lanes(trace) for _, trace in named]
    longest_s = max(trace.makespan_s for _, trace in named)
    heights = [_ROW_PIXELS * max(3, len(bars.names)) for bars in drawn]
    gaps = _GAP_PIXELS * (len(named) - 1)
    layout = looks(title=title, height=120 + gaps + sum(heights), left=TIMELINE_LEFT, top=70)
    layout |= {"barmode": "overlay", "bargap": 0, "meta": ZOOMED, "shapes": [], "annotations": []}
    data: list[dict[str, Any]] = []
    seen: set[str] = set()
    last = len(named) - 1
    unit = time_unit(longest_s)
    for row, ((low, high), every, (name, trace)) in enumerate(
        zip(panel_domains(heights, _GAP_PIXELS), drawn, named, strict=True)
    ):
        bars, path = _few(every, trace), critical_path(trace)
        x, y = panel_axes(row)
        layout[f"xaxis{x[1:]}"] = _time_axis(longest_s, titled=row == last) | {"anchor": y}
        layout[f"yaxis{y[1:]}"] = _rows_axis(bars) | {"anchor": x, "domain": [low, high]}
        if row < last:
            layout[f"xaxis{x[1:]}"] |= {"matches": panel_axes(last)[0], "showticklabels": False}
        layout["shapes"] += _edges(bars, row)
        heading = f"{name}: {trace.took}; critical path: {path.words()}"
        layout["annotations"].append(panel_title(heading, high, size=12))
        for drawing in (*_traces(bars, unit, row), *critical_line(path, trace, every, unit.size, row=row)):
            data.append(drawing | {"showlegend": drawing["name"] not in seen})
            seen.add(drawing["name"])
    return {"data": data, "layout": layout}


def _few(bars: Lanes, trace: Trace) -> Lanes:
    return thinned(bars, trace.makespan_s, limit=_MOST_BARS)


def _title(trace: Trace, path: CriticalPath) -> str:
    title = f"{str(trace.origin).capitalize()} iteration: {trace.took}"
    return f"{title}<br><sup>critical path: {path.words()}</sup>" if path.ops else title


def _traces(bars: Lanes, unit: Unit, row: int) -> Iterator[dict[str, Any]]:
    """A bar trace per op kind; small: numbers travel as typed arrays, hover texts are put together in the browser."""
    end_s = float((bars.start_s + bars.duration_s).max(initial=0.0))
    edged = (bars.duration_s > end_s / _MOST_EDGED_BARS) & (len(bars) <= _MOST_EDGED_BARS)  # would cover thin bars
    x, y = panel_axes(row)
    for position, kind in enumerate(KINDS):
        of_kind = bars.kind == position
        chosen = bars.select(of_kind)
        if not len(chosen):
            continue
        moves = kind in MOVING
        own = edged[of_kind]
        durations = (chosen.duration_s / unit.size).astype(np.float32)
        yield {
            "type": "bar",
            "orientation": "h",
            "name": label(kind),
            "legendgroup": label(kind),
            "base": (chosen.start_s / unit.size).astype(np.float32),
            "x": durations,
            "y": chosen.row.astype(np.int16),
            "xaxis": x,
            "yaxis": y,
            "width": 0.78,
            "marker": {
                "color": OP_COLOURS[kind],
                "line": {"width": (own * 0.6).astype(np.float32) if own.any() else 0, "color": "rgba(0,0,0,0.45)"},
            },
            "customdata": _details(chosen, durations),
            "hovertext": _moved(chosen) if moves else None,
            "hovertemplate": _hover(kind, unit, merged=bool((chosen.num_ops > 1).any()), moves=moves),
        }


def _details(bars: Lanes, durations: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[bars, 7]: op, layers, samples, ops in the bar, duration; numbers of ops are exact up to 16 million."""
    return np.column_stack([bars.number, bars.layers, bars.samples, bars.num_ops, durations]).astype(np.float32)


def _moved(bars: Lanes) -> list[str]:
    """Bytes, and the samples they belong to; state belongs to none."""
    sizes = {num_bytes: format_bytes(num_bytes) for num_bytes in np.unique(bars.moved_bytes).tolist()}
    rows = zip(bars.moved_bytes.tolist(), bars.samples.tolist(), strict=True)
    return [f"samples [{a}:{b}): {sizes[n]}" if b else sizes[n] for n, (a, b) in rows]


def _hover(kind: OpKind, unit: Unit, *, merged: bool, moves: bool) -> str:
    lines = [
        f"<b>{label(kind)}</b>, op %{{customdata[0]}}" + (" (%{customdata[5]} ops in this bar)" if merged else ""),
        "layers [%{customdata[1]}:%{customdata[2]})",
    ]
    if moves:
        lines.append("%{hovertext}")
    elif kind is not OpKind.UPDATE:
        lines.append("samples [%{customdata[3]}:%{customdata[4]})")
    lines.append(f"%{{base:.4~g}} to %{{x:.4~g}} {unit.name}: %{{customdata[6]:.3~g}} {unit.name}")
    return "<br>".join(lines) + "<extra></extra>"


def _rows_axis(bars: Lanes) -> dict[str, Any]:
    count = len(bars.names)
    return {
        "tickvals": list(range(count)),
        "ticktext": list(bars.names),
        "range": [max(3, count) - 0.5, -0.5],
        "fixedrange": True,
        "showgrid": False,
    }


def _edges(bars: Lanes, row: int) -> list[dict[str, Any]]:
    """Lines between the rows of one device and the next."""
    x, y = panel_axes(row)
    return [
        {
            "type": "line",
            "xref": f"{x} domain",
            "yref": y,
            "x0": 0,
            "x1": 1,
            "y0": i - 0.5,
            "y1": i - 0.5,
            "line": {"color": GRID_COLOUR, "width": 1},
        }
        for i in range(1, len(bars.names))
        if bars.owners[i] != bars.owners[i - 1]
    ]


def _time_axis(longest_s: float, *, titled: bool) -> dict[str, Any]:
    unit = time_unit(longest_s)
    axis: dict[str, Any] = {"range": time_range(longest_s, unit.size)}
    return axis | ({"title": {"text": f"time ({unit.name})"}} if titled else {})
