"""Memory timelines: what is alive on every device, by tensor kind, against its budget."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from harmony_lab.figures.footprint import INCLUDED, Footprint, footprints
from harmony_lab.figures.scales import Unit, byte_unit, time_unit
from harmony_lab.figures.spec import ZOOMED, Spec, panel_axes, panel_domains, panel_title, time_range
from harmony_lab.figures.theme import ALARM_COLOUR, BUDGET_COLOUR, INK_COLOUR, TENSOR_COLOURS, label, looks
from harmony_lab.program import TensorKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes

__all__ = ["memory_spec", "memory_timeline"]

_MOST_POINTS: Final = 1500
_MOST_VALUES: Final = 9_000
_PANEL_PIXELS: Final = 150
_GAP_PIXELS: Final = 34
_CEILING: Final = 1.12  # of the axis, so that the budget's line and the peak's mark are seen


def memory_timeline(trace: Trace) -> go.Figure:
    """A panel per device: stacked areas by tensor kind, the budget dashed, the peak marked, red where beyond it.

    A device that holds nothing all along has no panel, unless none does.
    """
    return go.Figure(memory_spec(trace))


def memory_spec(
    trace: Trace, *, left: int = 80, name: str = "", until_s: float | None = None, most_bytes: int = 0
) -> Spec:
    """``memory_timeline`` as plain data; ``left`` are the pixels left of the time axis.

    ``name`` stands in the title.  The axes reach to ``until_s`` and ``most_bytes`` at least, so that figures can be
    compared.
    """
    devices = footprints(trace, most_points=_MOST_POINTS, most_values=_MOST_VALUES)
    end_s = max(trace.makespan_s, until_s or 0.0)
    time = time_unit(end_s)
    size = byte_unit(max(most_bytes, *(max(d.peak_bytes, d.budget_bytes) for d in devices)))
    count = len(devices)
    plot_pixels = count * _PANEL_PIXELS + (count - 1) * _GAP_PIXELS
    title = f"Memory, {name or trace.origin}<br><sup>{INCLUDED}</sup>"
    layout = looks(title=title, height=plot_pixels + 165, left=left, top=70)
    layout |= {"hovermode": "x unified", "hoversubplots": "single", "meta": ZOOMED, "shapes": [], "annotations": []}
    data: list[dict[str, Any]] = []
    seen: set[TensorKind] = set()
    for row, ((low, high), device) in enumerate(
        zip(panel_domains([_PANEL_PIXELS] * count, _GAP_PIXELS), devices, strict=True)
    ):
        x, y = panel_axes(row)
        ceiling = max(device.peak_bytes, device.budget_bytes, most_bytes) / size.size * _CEILING
        layout[f"xaxis{x[1:]}"] = {"anchor": y, "range": time_range(end_s, time.size)}
        layout[f"yaxis{y[1:]}"] = {
            "anchor": x,
            "domain": [low, high],
            "range": [0, ceiling],
            "nticks": 5,
            "ticksuffix": f" {size.name}",
            "fixedrange": True,
        }
        last = panel_axes(count - 1)[0]
        if row < count - 1:
            layout[f"xaxis{x[1:]}"] |= {"matches": last, "showticklabels": False}
        layout["annotations"].append(panel_title(_panel_title(trace, device), high, size=12))
        layout["shapes"].append(_budget(device, row, size))
        data += [*_areas(device, row, time, size, seen), *_peak(device, row, time, size)]
    layout[f"xaxis{panel_axes(count - 1)[0][1:]}"]["title"] = {"text": f"time ({time.name})"}
    return {"data": data, "layout": layout}


def _panel_title(trace: Trace, device: Footprint) -> str:
    text = device.words(trace)
    return f'<span style="color:{ALARM_COLOUR}"><b>{text}</b></span>' if device.over_budget else text


def _areas(device: Footprint, row: int, time: Unit, size: Unit, seen: set[TensorKind]) -> Iterator[dict[str, Any]]:
    times = (device.times_s / time.size).astype(np.float32)
    x, y = panel_axes(row)
    for column, kind in enumerate(device.kinds):
        yield {
            "type": "scatter",
            "x": times,
            "y": (device.num_bytes[:, column] / size.size).astype(np.float32),
            "xaxis": x,
            "yaxis": y,
            "name": label(kind),
            "legendgroup": kind.value,
            "showlegend": kind not in seen,
            "stackgroup": "alive",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0, "color": TENSOR_COLOURS[kind]},
            "fillcolor": TENSOR_COLOURS[kind],
            "hovertemplate": f"%{{y:.4~g}} {size.name}",
        }
        seen.add(kind)


def _budget(device: Footprint, row: int, size: Unit) -> dict[str, Any]:
    x, y = panel_axes(row)
    level = device.budget_bytes / size.size
    colour = ALARM_COLOUR if device.over_budget else BUDGET_COLOUR
    return {
        "type": "line",
        "xref": f"{x} domain",
        "yref": y,
        "x0": 0,
        "x1": 1,
        "y0": level,
        "y1": level,
        "line": {"color": colour, "dash": "dash", "width": 1.5},
    }


def _peak(device: Footprint, row: int, time: Unit, size: Unit) -> Iterator[dict[str, Any]]:
    if not device.peak_bytes:
        return
    x, y = panel_axes(row)
    colour = ALARM_COLOUR if device.over_budget else INK_COLOUR
    yield {
        "type": "scatter",
        "x": [device.peak_s / time.size],
        "y": [device.peak_bytes / size.size],
        "xaxis": x,
        "yaxis": y,
        "mode": "markers",
        "marker": {"symbol": "triangle-down", "size": 9, "color": colour},
        "showlegend": False,
        "name": "peak",
        "hovertemplate": format_bytes(device.peak_bytes),
    }
