"""Timelines: what every stream of every device did when."""

from collections.abc import Iterator
from math import ceil, log10
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harmony_lab.figures.lanes import KINDS, MOVING, Lanes, lanes, thinned
from harmony_lab.figures.scales import Unit, time_unit
from harmony_lab.figures.theme import GRID_COLOUR, OP_COLOURS, dress, label
from harmony_lab.program import OpKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["compare", "timeline"]

_MOST_BARS: Final = 4000
_MOST_EDGED_BARS: Final = 400
_DIGITS: Final = 7  # of the times at the end, as in single precision
_ROW_PIXELS: Final = 24


def timeline(trace: Trace) -> go.Figure:
    """A row per device and stream, a bar per op, coloured by op kind; beyond 4,000 ops short neighbours share a bar."""
    bars = _bars(trace)
    figure = go.Figure(list(_traces(bars, time_unit(trace.makespan_s))))
    height = 115 + _ROW_PIXELS * max(3, len(bars.names))
    dress(figure, title=_title(trace), height=height, left=130)
    figure.update_layout(barmode="overlay", bargap=0)
    _rows(figure, bars, 1)
    _time_axis(figure, trace.makespan_s, 1)
    return figure


def compare(predicted: Trace, measured: Trace) -> go.Figure:
    """Two timelines one above the other, on one time axis."""
    traces = (predicted, measured)
    drawn = [_bars(trace) for trace in traces]
    longest_s = max(trace.makespan_s for trace in traces)
    sizes = [max(3, len(bars.names)) for bars in drawn]
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=sizes,
        vertical_spacing=40 / (_ROW_PIXELS * sum(sizes) + 40),
        subplot_titles=[_title(trace) for trace in traces],
    )
    seen: set[str] = set()
    for row, bars in enumerate(drawn, start=1):
        for bar in _traces(bars, time_unit(longest_s)):
            bar.showlegend = bar.name not in seen
            seen.add(bar.name)
            figure.add_trace(bar, row=row, col=1)
        _rows(figure, bars, row)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    height = 160 + _ROW_PIXELS * sum(sizes)
    dress(figure, title="Predicted and measured", height=height, left=130, top=70)
    figure.update_layout(barmode="overlay", bargap=0)
    _time_axis(figure, longest_s, 2)
    return figure


def _bars(trace: Trace) -> Lanes:
    return thinned(lanes(trace), trace.makespan_s, limit=_MOST_BARS)


def _title(trace: Trace) -> str:
    return f"{str(trace.origin).capitalize()} iteration: {format_seconds(trace.makespan_s)}"


def _traces(bars: Lanes, unit: Unit) -> Iterator[Any]:
    """A bar trace per op kind; small: numbers travel as typed arrays, hover texts are put together in the browser."""
    end = float((bars.start_s + bars.duration_s).max(initial=0.0))
    decimals = max(0, _DIGITS - ceil(log10(end / unit.size or 1.0)))
    edged = (bars.duration_s > end / _MOST_EDGED_BARS) & (len(bars) <= _MOST_EDGED_BARS)  # edges would cover thin bars
    for position, kind in enumerate(KINDS):
        chosen = bars.select(bars.kind == position)
        if not len(chosen):
            continue
        moves = kind in MOVING
        own = edged[bars.kind == position]
        edges = (own * 0.6).astype(np.float32) if own.any() else 0
        yield go.Bar(
            orientation="h",
            name=label(kind),
            legendgroup=label(kind),
            base=np.round(chosen.start_s / unit.size, decimals),  # plotly writes this one out as text
            x=(chosen.duration_s / unit.size).astype(np.float32),
            y=chosen.row.astype(np.int16),
            width=0.78,
            marker={"color": OP_COLOURS[kind], "line": {"width": edges, "color": "rgba(0,0,0,0.45)"}},
            customdata=_details(chosen),
            hovertext=_moved(chosen) if moves else None,
            text=[f"{duration:.3g}" for duration in (chosen.duration_s / unit.size).tolist()],
            textposition="none",  # the durations are for the hover text
            hovertemplate=_hover(kind, unit, merged=bool((chosen.num_ops > 1).any()), moves=moves),
        )


def _details(bars: Lanes) -> Any:
    """[bars, 6]: op, layers, samples, ops in the bar; in the smallest integers that hold them."""
    table = np.column_stack([bars.number, bars.layers, bars.samples, bars.num_ops])
    return table.astype(np.int16 if table.max(initial=0) < 2**15 else np.int32)


def _moved(bars: Lanes) -> list[str]:
    """Bytes, and the samples they belong to; state belongs to none."""
    rows = zip(bars.moved_bytes.tolist(), bars.samples.tolist(), strict=True)
    return [f"samples [{a}:{b}): {format_bytes(n)}" if b else format_bytes(n) for n, (a, b) in rows]


def _hover(kind: OpKind, unit: Unit, *, merged: bool, moves: bool) -> str:
    lines = [
        f"<b>{label(kind)}</b>, op %{{customdata[0]}}" + (" (%{customdata[5]} ops in this bar)" if merged else ""),
        "layers [%{customdata[1]}:%{customdata[2]})",
    ]
    if moves:
        lines.append("%{hovertext}")
    elif kind is not OpKind.UPDATE:
        lines.append("samples [%{customdata[3]}:%{customdata[4]})")
    lines.append(f"%{{base:.4~g}} to %{{x:.4~g}} {unit.name}: %{{text}} {unit.name}")
    return "<br>".join(lines) + "<extra></extra>"


def _rows(figure: go.Figure, bars: Lanes, row: int) -> None:
    count = len(bars.names)
    axis = {
        "tickvals": list(range(count)),
        "ticktext": list(bars.names),
        "range": [max(3, count) - 0.5, -0.5],
        "fixedrange": True,
        "showgrid": False,
    }
    number = "" if row == 1 else str(row)
    figure.update_layout({f"yaxis{number}": axis})
    edges = [i for i in range(1, count) if bars.owners[i] != bars.owners[i - 1]]
    for edge in edges:
        figure.add_shape(
            type="line",
            xref=f"x{number} domain",
            yref=f"y{number}",
            x0=0,
            x1=1,
            y0=edge - 0.5,
            y1=edge - 0.5,
            line={"color": GRID_COLOUR, "width": 1},
        )


def _time_axis(figure: go.Figure, longest_s: float, row: int) -> None:
    unit = time_unit(longest_s)
    figure.update_xaxes(range=[0, longest_s / unit.size * 1.005 or 1.0])
    figure.update_layout({"xaxis" if row == 1 else f"xaxis{row}": {"title": {"text": f"time ({unit.name})"}}})
