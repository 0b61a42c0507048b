"""The loss over the steps of a run."""

from collections.abc import Sequence

import plotly.graph_objects as go

from harmony_lab.figures.theme import ACCENT_COLOUR, dress

__all__ = ["loss_curve"]


def loss_curve(losses: Sequence[float]) -> go.Figure:
    """Loss by step, the first step being 1."""
    figure = go.Figure(
        go.Scatter(
            x=list(range(1, len(losses) + 1)),
            y=list(losses),
            mode="lines+markers" if len(losses) <= 60 else "lines",
            line={"color": ACCENT_COLOUR, "width": 2},
            marker={"size": 5},
            hovertemplate="step %{x}: %{y:.4f}<extra></extra>",
        )
    )
    title = f"Loss: {losses[0]:.4g} → {losses[-1]:.4g}" if losses else "Loss: no step yet"
    dress(figure, title=title, height=280, legend=False)
    figure.update_xaxes(title={"text": "step"})
    return figure
