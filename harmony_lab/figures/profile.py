"""Profile figures: what every layer costs in time and memory."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harmony_lab.costs import Profile
from harmony_lab.figures.scales import byte_unit, time_unit
from harmony_lab.figures.theme import OP_COLOURS, TENSOR_COLOURS, dress, label
from harmony_lab.program import OpKind, TensorKind
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["profile_figure"]


def profile_figure(profile: Profile, microbatch_size: int | None = None) -> go.Figure:
    """Seconds, parameters and saved activations by layer, for microbatches of that size (default: the largest), and the
    whole model's seconds against the microbatch size.

    Raises ``OutOfRangeError`` beyond the sizes profiled.
    """
    size = profile.largest_microbatch if microbatch_size is None else microbatch_size
    costs = [profile.cost(layer, size) for layer in range(len(profile))]
    figure = make_subplots(
        rows=4,
        cols=1,
        vertical_spacing=0.11,
        subplot_titles=[
            "Compute, one microbatch",
            "Parameters",
            "Saved activations, one microbatch",
            "Compute of all layers, one microbatch, by its size",
        ],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=12)
    _time_bars(figure, profile, size)
    _byte_bars(figure, profile, 2, TensorKind.WEIGHT, [float(layer.parameter_bytes) for layer in profile.layers])
    _byte_bars(figure, profile, 3, TensorKind.SAVED, [cost.saved_bytes for cost in costs])
    _lines_by_size(figure, profile)
    title = f"Layers of {profile.model}<br><sup>microbatches of {size}; on {profile.device}</sup>"
    dress(figure, title=title, height=680, top=70)
    figure.update_layout(barmode="stack", bargap=0.15)
    for row in (1, 2, 3):
        figure.update_xaxes(showgrid=False, range=[-0.6, len(profile) - 0.4], row=row, col=1)
        if row > 1:
            figure.update_xaxes(matches="x", row=row, col=1)  # zoomed together
        if row < 3:
            figure.update_xaxes(showticklabels=False, row=row, col=1)
    figure.update_xaxes(title={"text": "layer", "standoff": 0, "font": {"size": 12}}, row=3, col=1)
    figure.update_xaxes(title={"text": "microbatch size"}, tickvals=list(profile.microbatch_sizes), row=4, col=1)
    figure.update_yaxes(nticks=5, rangemode="tozero")
    return figure


def _lines_by_size(figure: go.Figure, profile: Profile) -> None:
    """The sizes profiled as points; between them plans are costed along the lines."""
    sizes = profile.microbatch_sizes
    seconds = {
        OpKind.FORWARD: [sum(layer.costs[i].forward_s for layer in profile.layers) for i in range(len(sizes))],
        OpKind.BACKWARD: [sum(layer.costs[i].backward_s for layer in profile.layers) for i in range(len(sizes))],
    }
    unit = time_unit(max(map(max, seconds.values())))
    for kind, values in seconds.items():
        figure.add_trace(
            go.Scatter(
                x=list(sizes),
                y=[value / unit.size for value in values],
                name=label(kind),
                mode="lines+markers",
                marker={"color": OP_COLOURS[kind]},
                showlegend=False,  # the bars' says it
                hovertext=[
                    f"{size} samples: {label(kind)} {format_seconds(value)}, {format_seconds(value / size)} per sample"
                    for size, value in zip(sizes, values, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            ),
            row=4,
            col=1,
        )
    figure.update_yaxes(ticksuffix=f" {unit.name}", row=4, col=1)


def _time_bars(figure: go.Figure, profile: Profile, size: int) -> None:
    costs = [profile.cost(layer, size) for layer in range(len(profile))]
    seconds = {
        OpKind.FORWARD: [cost.forward_s for cost in costs],
        OpKind.BACKWARD: [cost.backward_s for cost in costs],
    }
    unit = time_unit(max((sum(both) for both in zip(*seconds.values(), strict=True)), default=0.0))
    for kind, values in seconds.items():
        figure.add_trace(
            go.Bar(
                x=list(range(len(profile))),
                y=[value / unit.size for value in values],
                name=label(kind),
                marker={"color": OP_COLOURS[kind]},
                hovertext=[
                    f"{layer.name}: {label(kind)} {format_seconds(value)}"
                    for layer, value in zip(profile.layers, values, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            ),
            row=1,
            col=1,
        )
    figure.update_yaxes(ticksuffix=f" {unit.name}", row=1, col=1)


def _byte_bars(figure: go.Figure, profile: Profile, row: int, kind: TensorKind, num_bytes: list[float]) -> None:
    unit = byte_unit(max(num_bytes, default=0))
    figure.add_trace(
        go.Bar(
            x=list(range(len(profile))),
            y=[n / unit.size for n in num_bytes],
            name=label(kind),
            marker={"color": TENSOR_COLOURS[kind]},
            hovertext=[f"{layer.name}: {format_bytes(n)}" for layer, n in zip(profile.layers, num_bytes, strict=True)],
            hovertemplate="%{hovertext}<extra></extra>",
        ),
        row=row,
        col=1,
    )
    figure.update_yaxes(ticksuffix=f" {unit.name}", row=row, col=1)
