"""Swap volume: bytes moved by pack, by candidate and by link."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harmony_lab.figures.lanes import stream_name, stream_order
from harmony_lab.figures.link_load import hop_name
from harmony_lab.figures.scales import byte_unit
from harmony_lab.figures.spec import Spec
from harmony_lab.figures.theme import SEQUENTIAL, TENSOR_COLOURS, dress, ink_on, label, looks, sequential
from harmony_lab.figures.volumes import Volumes, volumes_of_candidates, volumes_of_packs
from harmony_lab.machine import Hop
from harmony_lab.program import Stream, TensorKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes

__all__ = ["candidate_heatmap", "candidate_swap_spec", "link_utilisation", "swap_heatmap", "swap_spec"]

_MOST_LABELLED_ROWS: Final = 60
_MOST_LABELLED_COLUMNS: Final = 16
_FEWEST_DECADES: Final = 2.0  # so that nearly equal volumes look alike
_MOST_PIXELS: Final = 900
_BAR_PIXELS: Final = 22


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


def link_utilisation(trace: Trace) -> go.Figure:
    """How busy every stream is, and what every link carries in each direction, by tensor kind."""
    # A peer transfer takes its time where it arrives.
    streams = sorted((key for key in trace.busy_s if key[1] is not Stream.PEER_OUT), key=stream_order)
    hops = sorted({hop for hop, _ in trace.link_bytes}, key=lambda hop: (hop.link, hop.direction))
    rows = [max(2, len(streams)), max(2, len(hops))]
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=60 / (60 + _BAR_PIXELS * sum(rows)),
        row_heights=rows,
        subplot_titles=[
            f"Busy share of the iteration, {trace.origin}",
            f"Bytes over each link, {trace.origin}, one iteration",
        ],
    )
    _busy_bars(figure, trace, streams)
    _link_bars(figure, trace, hops)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    figure.update_yaxes(autorange="reversed", showgrid=False, fixedrange=True)
    figure.update_xaxes(rangemode="tozero")
    dress(figure, title="", height=175 + _BAR_PIXELS * sum(rows), left=130, top=40)
    figure.update_layout(barmode="stack", bargap=0.25)
    return figure


def _busy_bars(figure: go.Figure, trace: Trace, streams: Sequence[tuple[int, Stream]]) -> None:
    shares = [trace.busy_fraction(device, stream) for device, stream in streams]
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[stream_name(trace.machine, device, stream) for device, stream in streams],
            x=shares,
            text=[f"{share:.0%}" for share in shares],
            textposition="outside",
            cliponaxis=False,
            marker={"color": SEQUENTIAL[3]},
            showlegend=False,
            hovertemplate="%{y}: busy %{x:.1%}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    figure.update_xaxes(range=[0, 1.1], tickvals=[0, 0.5, 1], tickformat=".0%", row=1, col=1)


def _link_bars(figure: go.Figure, trace: Trace, hops: Sequence[Hop]) -> None:
    loads = {hop: sum(n for (h, _), n in trace.link_bytes.items() if h == hop) for hop in hops}
    unit = byte_unit(max(loads.values(), default=0))
    for kind in TensorKind:
        num_bytes = [trace.link_bytes.get((hop, kind), 0) for hop in hops]
        if any(num_bytes):
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=[hop_name(hop) for hop in hops],
                    x=[n / unit.size for n in num_bytes],
                    name=label(kind),
                    marker={"color": TENSOR_COLOURS[kind]},
                    customdata=[format_bytes(n) for n in num_bytes],
                    hovertemplate="%{y}: %{customdata}",
                ),
                row=2,
                col=1,
            )
    figure.update_xaxes(ticksuffix=f" {unit.name}", row=2, col=1)


def _heatmap(volumes: Volumes, title: str, *, top: int = 40) -> Spec:
    rows, columns = len(volumes.rows), len(volumes.columns)
    present = volumes.num_bytes[volumes.num_bytes > 0]
    height = min(_MOST_PIXELS, 95 + top + 26 * max(2, rows))
    layout = looks(title=title, height=height, legend=False, left=90, top=top)
    if not len(present):
        note = {"text": "nothing is moved", "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
        return {"data": [], "layout": layout | {"annotations": [note]}}
    high = float(np.log10(present.max()))
    low = min(float(np.log10(present.min())) - 0.2, high - _FEWEST_DECADES)
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
