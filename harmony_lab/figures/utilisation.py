"""Utilisation: how busy every stream is, and what every link carries in all."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from harmony_lab.figures.lanes import stream_name, stream_order
from harmony_lab.figures.link_load import hop_name
from harmony_lab.figures.scales import Unit, byte_unit
from harmony_lab.figures.spec import Spec, panel_axes, panel_domains, panel_title
from harmony_lab.figures.theme import SEQUENTIAL, TENSOR_COLOURS, label, looks
from harmony_lab.machine import Hop
from harmony_lab.program import Stream, TensorKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes

__all__ = ["link_utilisation", "utilisation_spec"]

_BAR_PIXELS: Final = 22
_GAP_PIXELS: Final = 60
_HEADING_PIXELS: Final = 13


def link_utilisation(trace: Trace) -> go.Figure:
    """How busy every stream is, and what every link carries in each direction, by tensor kind."""
    return go.Figure(utilisation_spec(trace))


def utilisation_spec(trace: Trace) -> Spec:
    """``link_utilisation`` as plain data."""
    # A peer transfer takes its time where it arrives.
    streams = sorted((key for key in trace.busy_s if key[1] is not Stream.PEER_OUT), key=stream_order)
    hops = sorted({hop for hop, _ in trace.link_bytes}, key=lambda hop: (hop.link, hop.direction))
    unit = byte_unit(max((_carried(trace, hop) for hop in hops), default=0))
    heights = [_BAR_PIXELS * max(2, count) for count in (len(streams), len(hops))]
    headings = (
        f"Busy share of the iteration, {trace.origin}",
        f"Bytes over each link, {trace.origin}, one iteration",
    )
    layout = looks(title="", height=175 + sum(heights), left=130, top=40)
    layout |= {"barmode": "stack", "bargap": 0.25, "annotations": []}
    across: list[dict[str, Any]] = [
        {"range": [0, 1.1], "tickvals": [0, 0.5, 1], "tickformat": ".0%"},
        {"ticksuffix": f" {unit.name}"},
    ]
    for row, (low, high) in enumerate(panel_domains(heights, _GAP_PIXELS)):
        x, y = panel_axes(row)
        layout[f"xaxis{x[1:]}"] = across[row] | {"anchor": y, "rangemode": "tozero"}
        layout[f"yaxis{y[1:]}"] = {
            "anchor": x,
            "domain": [low, high],
            "autorange": "reversed",
            "showgrid": False,
            "fixedrange": True,
        }
        layout["annotations"].append(panel_title(headings[row], high, size=_HEADING_PIXELS))
    return {"data": [_busy_bars(trace, streams), *_link_bars(trace, hops, unit)], "layout": layout}


def _busy_bars(trace: Trace, streams: Sequence[tuple[int, Stream]]) -> dict[str, Any]:
    shares = [trace.busy_fraction(device, stream) for device, stream in streams]
    return {
        "type": "bar",
        "orientation": "h",
        "y": [stream_name(trace.machine, device, stream) for device, stream in streams],
        "x": shares,
        "text": [f"{share:.0%}" for share in shares],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": SEQUENTIAL[3]},
        "showlegend": False,
        "hovertemplate": "%{y}: busy %{x:.1%}<extra></extra>",
    }


def _link_bars(trace: Trace, hops: Sequence[Hop], unit: Unit) -> Iterator[dict[str, Any]]:
    x, y = panel_axes(1)
    for kind in TensorKind:
        num_bytes = [trace.link_bytes.get((hop, kind), 0) for hop in hops]
        if any(num_bytes):
            yield {
                "type": "bar",
                "orientation": "h",
                "xaxis": x,
                "yaxis": y,
                "y": [hop_name(hop) for hop in hops],
                "x": [n / unit.size for n in num_bytes],
                "name": label(kind),
                "marker": {"color": TENSOR_COLOURS[kind]},
                "customdata": [format_bytes(n) for n in num_bytes],
                "hovertemplate": "%{y}: %{customdata}",
            }


def _carried(trace: Trace, hop: Hop) -> int:
    return sum(num_bytes for (other, _), num_bytes in trace.link_bytes.items() if other == hop)
