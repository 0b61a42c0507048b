"""Swap volume: bytes moved by pack and by candidate."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go

from harmony_lab.figures.spec import Spec
from harmony_lab.figures.theme import SEQUENTIAL, ink_on, looks, sequential
from harmony_lab.figures.volumes import Volumes, volumes_of_candidates, volumes_of_packs
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes

__all__ = ["candidate_heatmap", "candidate_swap_spec", "swap_heatmap", "swap_spec"]

_MOST_LABELLED_ROWS: Final = 60
_MOST_LABELLED_COLUMNS: Final = 16
_FEWEST_DECADES: Final = 2.0  # so that nearly equal volumes look alike
_MOST_DECADES: Final = 3.0  # so that a few bytes somewhere do not make all else look alike
_MOST_PIXELS: Final = 900


def swap_heatmap(trace: Trace) -> go.Figure:
    """Bytes that each pack moves, by direction and tensor kind, over one iteration; the scale is logarithmic."""
    return go.Figure(swap_spec(trace))


def swap_spec(trace: Trace) -> Spec:
    """``swap_heatmap`` as plain data."""
    title = (
        f"Bytes moved by pack, {trace.origin}, {format_bytes(trace.swap_bytes)} swapped in all<br>"
        "<sup>[first:stop] layers; F forward, B backward; in: to the device, out: to the host, peer: to another</sup>"
    )
    return _heatmap(volumes_of_packs(trace), title, top=60)


def candidate_heatmap(names: Sequence[str], traces: Sequence[Trace]) -> go.Figure:
    """Bytes that each candidate moves in one iteration, by direction and tensor kind; the scale is logarithmic."""
    return go.Figure(candidate_swap_spec(names, traces))


def candidate_swap_spec(names: Sequence[str], traces: Sequence[Trace]) -> Spec:
    """``candidate_heatmap`` as plain data."""
    title = (
        "Bytes moved by candidate, predicted<br><sup>one iteration, all devices; in: to a device, out: to the host, "
        "peer: from one to another</sup>"
    )
    return _heatmap(volumes_of_candidates(names, traces), title, top=60)


def _heatmap(volumes: Volumes, title: str, *, top: int = 40) -> Spec:
    rows, columns = len(volumes.rows), len(volumes.columns)
    present = volumes.num_bytes[volumes.num_bytes > 0]
    height = min(_MOST_PIXELS, 95 + top + 26 * max(2, rows))
    layout = looks(title=title, height=height, legend=False, left=90, top=top)
    if not len(present):
        note = {"text": "nothing is moved", "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
        return {"data": [], "layout": layout | {"annotations": [note]}}
    high = float(np.log10(present.max()))
    least = float(np.log10(present.min())) - 0.2
    low = max(min(least, high - _FEWEST_DECADES), high - _MOST_DECADES)
    labelled = rows <= _MOST_LABELLED_ROWS and columns <= _MOST_LABELLED_COLUMNS
    heat = {
        "type": "heatmap",
        "x": [text.replace(" ", "<br>") for text in volumes.column_labels],
        "y": list(volumes.rows),
        "z": np.log10(np.where(volumes.num_bytes > 0, volumes.num_bytes, np.nan)).astype(np.float32),
        "zmin": low,
        "zmax": high + 0.01,
        "text": [[format_bytes(n) if n else "" for n in row] for row in volumes.num_bytes.tolist()],
        "colorscale": [[i / (len(SEQUENTIAL) - 1), colour] for i, colour in enumerate(SEQUENTIAL)],
        "showscale": not labelled,
        "colorbar": _colorbar(low, high),
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "%{y}<br>%{x}: %{text}<extra></extra>",
        "hoverongaps": False,
    }
    layout["yaxis"] = {"autorange": "reversed", "showgrid": False, "type": "category"}
    layout["xaxis"] = {"showgrid": False, "type": "category", "tickangle": 0, "tickfont": {"size": 10}}
    return {"data": [heat, _cell_texts(heat)] if labelled else [heat], "layout": layout}


def _cell_texts(heat: Spec) -> Spec:
    """What stands in the cells; plotly's own ink is hard to read on colours in between."""
    cells = [(y, x) for y in range(len(heat["y"])) for x in range(len(heat["x"])) if heat["text"][y][x]]
    span = heat["zmax"] - heat["zmin"]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [heat["x"][x] for _, x in cells],
        "y": [heat["y"][y] for y, _ in cells],
        "text": [heat["text"][y][x] for y, x in cells],
        "textfont": {
            "size": 10,
            "color": [ink_on(sequential((float(heat["z"][cell]) - heat["zmin"]) / span)) for cell in cells],
        },
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _colorbar(low: float, high: float) -> dict[str, object]:
    sizes = [1024**power * step for power in range(5) for step in (1, 4, 16, 64, 256)]
    shown = [size for size in sizes if low <= np.log10(size) <= high + 0.01]
    shown = shown[:: -(-len(shown) // 4) or 1]
    return {
        "tickvals": [float(np.log10(size)) for size in shown],
        "ticktext": [format_bytes(size) for size in shown],
        "thickness": 12,
        "outlinewidth": 0,
    }
