"""Memory timelines: what is alive on every device, by tensor kind, against its budget."""

from typing import Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harmony_lab.figures.footprint import INCLUDED, Footprint, footprints
from harmony_lab.figures.scales import Unit, byte_unit, time_unit
from harmony_lab.figures.theme import (
    ALARM_COLOUR,
    BUDGET_COLOUR,
    INK_COLOUR,
    TENSOR_COLOURS,
    dress,
    label,
)
from harmony_lab.program import TensorKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes

__all__ = ["memory_timeline"]

_MOST_POINTS: Final = 1500
_MOST_VALUES: Final = 9_000
_PANEL_PIXELS: Final = 150
_GAP_PIXELS: Final = 34


def memory_timeline(trace: Trace) -> go.Figure:
    """A panel per device: stacked areas by tensor kind, the budget dashed, the peak marked, red where beyond it."""
    devices = footprints(trace, most_points=_MOST_POINTS, most_values=_MOST_VALUES)
    time = time_unit(trace.makespan_s)
    size = byte_unit(max(max(d.peak_bytes, d.budget_bytes) for d in devices))
    count = len(devices)
    plot_pixels = count * _PANEL_PIXELS + (count - 1) * _GAP_PIXELS
    figure = make_subplots(
        rows=count,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_GAP_PIXELS / plot_pixels if count > 1 else 0,
        subplot_titles=[_panel_title(trace, i, device) for i, device in enumerate(devices)],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=12)
    seen: set[TensorKind] = set()
    for row, device in enumerate(devices, start=1):
        _areas(figure, device, row, time, size, seen)
        _budget(figure, device, row, size)
        _peak(figure, device, row, time, size)
        ceiling = max(device.peak_bytes, device.budget_bytes) / size.size * 1.12
        figure.update_yaxes(range=[0, ceiling], row=row, col=1)
    figure.update_yaxes(nticks=5, ticksuffix=f" {size.name}", fixedrange=True)
    end = trace.makespan_s / time.size or 1.0
    figure.update_xaxes(range=[0, end])
    figure.update_xaxes(title={"text": f"time ({time.name})"}, row=count, col=1)
    title = f"Memory, {trace.origin}<br><sup>{INCLUDED}</sup>"
    dress(figure, title=title, height=plot_pixels + 165, left=80, top=70)
    figure.update_layout(hovermode="x unified", hoversubplots="single")
    return figure


def _panel_title(trace: Trace, device: int, footprint: Footprint) -> str:
    name = trace.machine.devices[device].name
    text = f"{name}: peak {format_bytes(footprint.peak_bytes)} of {format_bytes(footprint.budget_bytes)}"
    if footprint.over_budget:
        excess = format_bytes(footprint.peak_bytes - footprint.budget_bytes)
        return f'<span style="color:{ALARM_COLOUR}"><b>{text}: {excess} too much</b></span>'
    return text


def _areas(figure: go.Figure, device: Footprint, row: int, time: Unit, size: Unit, seen: set[TensorKind]) -> None:
    times = (device.times_s / time.size).astype(np.float32)
    for column, kind in enumerate(device.kinds):
        area = go.Scatter(
            x=times,
            y=(device.num_bytes[:, column] / size.size).astype(np.float32),
            name=label(kind),
            legendgroup=kind.value,
            showlegend=kind not in seen,
            stackgroup="alive",
            mode="lines",
            line={"shape": "hv", "width": 0, "color": TENSOR_COLOURS[kind]},
            fillcolor=TENSOR_COLOURS[kind],
            hovertemplate=f"%{{y:.4~g}} {size.name}",
        )
        seen.add(kind)
        figure.add_trace(area, row=row, col=1)


def _budget(figure: go.Figure, device: Footprint, row: int, size: Unit) -> None:
    colour = ALARM_COLOUR if device.over_budget else BUDGET_COLOUR
    figure.add_hline(
        y=device.budget_bytes / size.size,
        line={"color": colour, "dash": "dash", "width": 1.5},
        row=row,
        col=1,
    )


def _peak(figure: go.Figure, device: Footprint, row: int, time: Unit, size: Unit) -> None:
    if not device.peak_bytes:
        return
    colour = ALARM_COLOUR if device.over_budget else INK_COLOUR
    figure.add_trace(
        go.Scatter(
            x=[device.peak_s / time.size],
            y=[device.peak_bytes / size.size],
            mode="markers",
            marker={"symbol": "triangle-down", "size": 9, "color": colour},
            showlegend=False,
            name="peak",
            hovertemplate=format_bytes(device.peak_bytes),
        ),
        row=row,
        col=1,
    )
