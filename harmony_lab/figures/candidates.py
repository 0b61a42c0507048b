"""Candidates: every plan the search kept, by the time and the memory it needs."""

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from harmony_lab.figures.scales import byte_unit, time_unit
from harmony_lab.figures.theme import INK_COLOUR, MODE_COLOURS, dress, label
from harmony_lab.plan import Mode
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["candidates_scatter"]

_SYMBOLS = {Mode.DP: "circle", Mode.PP: "diamond"}


def candidates_scatter(frame: "pandas.DataFrame") -> go.Figure:
    """Predicted seconds per iteration against the largest peak of any device; lower left is better, the best is ringed.

    ``frame``: the ranking, as ``SearchResult.to_frame`` gives it.
    """
    figure = go.Figure()
    size = byte_unit(float(frame["peak_bytes"].max()) if len(frame) else 0)
    time = time_unit(float(frame["step_s"].max()) if len(frame) else 1)
    for mode in Mode:
        rows = frame[frame["mode"] == mode.value]
        if len(rows):
            figure.add_trace(
                go.Scatter(
                    x=rows["peak_bytes"].to_numpy(dtype=float) / size.size,
                    y=rows["step_s"].to_numpy(dtype=float) / time.size,
                    mode="markers",
                    name=label(mode),
                    marker={
                        "color": MODE_COLOURS[mode],
                        "symbol": _SYMBOLS[mode],
                        "size": 9,
                        "opacity": 0.8,
                        "line": {"width": 0},
                    },
                    customdata=rows["rank"].tolist(),
                    hovertext=[_hover(row) for _, row in rows.iterrows()],
                    hovertemplate="%{hovertext}<extra></extra>",
                )
            )
    if len(frame):
        best = frame.nsmallest(1, "rank").iloc[0]
        figure.add_trace(
            go.Scatter(
                x=[best["peak_bytes"] / size.size],
                y=[best["step_s"] / time.size],
                mode="markers",
                name="best",
                marker={"symbol": "circle-open", "size": 18, "color": INK_COLOUR, "line": {"width": 2}},
                hoverinfo="skip",
            )
        )
    dress(figure, title=f"{len(frame)} candidates: lower left is better", height=380)
    figure.update_xaxes(title={"text": f"peak memory of a device ({size.name})"})
    figure.update_yaxes(title={"text": f"predicted iteration ({time.name})"}, rangemode="tozero")
    return figure


def _hover(row: "pandas.Series[float]") -> str:
    packs = f"{row['num_forward_packs']} + {row['num_backward_packs']} packs"
    sizes = f"microbatches of {row['forward_microbatch_size']} forward, {row['backward_microbatch_size']} backward"
    return (
        f"<b>rank {row['rank']}</b>, {row['mode']}: {packs}, {sizes}<br>"
        f"{format_seconds(row['step_s'])}, {row['samples_per_s']:.3g} samples/s, {row['bubble_fraction']:.0%} idle<br>"
        f"peak {format_bytes(row['peak_bytes'])}, {format_bytes(row['swap_bytes'])} swapped, "
        f"{format_bytes(row['peer_bytes'])} between devices"
    )
