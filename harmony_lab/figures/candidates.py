"""Candidates: every plan the search kept, by the time and the memory it needs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from harmony_lab.figures.scales import byte_unit, time_unit
from harmony_lab.figures.spec import Spec
from harmony_lab.figures.theme import CRITICAL_COLOUR, INK_COLOUR, MODE_COLOURS, label, looks
from harmony_lab.plan import Mode
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["candidates_scatter", "candidates_spec"]

_SYMBOLS = {Mode.DP: "circle", Mode.PP: "diamond"}


def candidates_scatter(frame: "pandas.DataFrame") -> go.Figure:
    """Predicted seconds per iteration against the largest peak of any device; lower left is better, the best is ringed.

    ``frame``: the ranking, as ``SearchResult.to_frame`` gives it.
    """
    return go.Figure(candidates_spec(frame))


def candidates_spec(frame: "pandas.DataFrame", at_hand: tuple[int, float] | None = None) -> Spec:
    """``candidates_scatter`` as plain data; with a cross for another plan, by its peak and its seconds."""
    size = byte_unit(float(frame["peak_bytes"].max()) if len(frame) else 0)
    time = time_unit(float(frame["step_s"].max()) if len(frame) else 1)
    peaks, steps = frame["peak_bytes"].to_numpy(dtype=float) / size.size, frame["step_s"].to_numpy(float) / time.size
    data: list[dict[str, Any]] = []
    for mode in Mode:
        chosen = np.flatnonzero(frame["mode"] == mode.value)
        if len(chosen):
            data.append(
                {
                    "type": "scatter",
                    "x": peaks[chosen],
                    "y": steps[chosen],
                    "mode": "markers",
                    "name": label(mode),
                    "marker": {
                        "color": MODE_COLOURS[mode],
                        "symbol": _SYMBOLS[mode],
                        "size": 9,
                        "opacity": 0.8,
                        "line": {"width": 0},
                    },
                    "customdata": frame["rank"].to_numpy(dtype=np.int32)[chosen],
                    "hovertext": [_hover(row) for row in frame.iloc[chosen].to_dict("records")],
                    "hovertemplate": "%{hovertext}<extra></extra>",
                }
            )
    if len(frame):
        best = int(frame["rank"].to_numpy().argmin())
        data.append(
            {
                "type": "scatter",
                "x": peaks[[best]],
                "y": steps[[best]],
                "mode": "markers",
                "name": "best",
                "marker": {"symbol": "circle-open", "size": 18, "color": INK_COLOUR, "line": {"width": 2}},
                "hoverinfo": "skip",
            }
        )
    if at_hand is not None:
        data.append(
            {
                "type": "scatter",
                "x": [at_hand[0] / size.size],
                "y": [at_hand[1] / time.size],
                "mode": "markers",
                "name": "the plan at hand",
                "marker": {"symbol": "cross-thin", "size": 14, "line": {"width": 2.5, "color": CRITICAL_COLOUR}},
                "hoverinfo": "skip",
            }
        )
    layout = looks(title=f"{len(frame)} candidates: lower left is better", height=380)
    layout["xaxis"] = {"title": {"text": f"peak memory of a device, at most ({size.name})"}}
    layout["yaxis"] = {"title": {"text": f"predicted iteration ({time.name})"}}
    return {"data": data, "layout": layout}


def _hover(row: Mapping[Any, Any]) -> str:
    packs = f"{row['num_forward_packs']} + {row['num_backward_packs']} packs"
    sizes = f"microbatches of {row['forward_microbatch_size']} forward, {row['backward_microbatch_size']} backward"
    return (
        f"<b>rank {row['rank']}</b>, {row['mode']}: {packs}, {sizes}<br>"
        f"{format_seconds(row['step_s'])}, {row['samples_per_s']:.3g} samples/s, {row['bubble_fraction']:.0%} idle<br>"
        f"peak at most {format_bytes(row['peak_bytes'])}, {format_bytes(row['swap_bytes'])} swapped, "
        f"{format_bytes(row['peer_bytes'])} between devices"
    )
