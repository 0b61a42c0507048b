"""The loss over the steps of a run."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go

from harmony_lab.figures.curves import thinned_losses
from harmony_lab.figures.spec import Spec
from harmony_lab.figures.theme import ACCENT_COLOUR, looks

__all__ = ["loss_curve", "loss_spec"]

_MOST_POINTS: Final = 2000
_MOST_MARKERS: Final = 60
_FEWEST_STEPS: Final = 6  # that the axis has room for


def loss_curve(losses: Sequence[float]) -> go.Figure:
    """Loss by step, the first step being 1; of a long run, lows and highs of short stretches."""
    return go.Figure(loss_spec(losses))


def loss_spec(losses: Sequence[float]) -> Spec:
    """``loss_curve`` as plain data."""
    kept = thinned_losses(losses, _MOST_POINTS)
    line = {
        "type": "scatter",
        "x": np.asarray(kept, dtype=np.int32) + 1,
        "y": np.asarray(losses, dtype=np.float64)[kept],
        "mode": "lines+markers" if len(losses) <= _MOST_MARKERS else "lines",
        "line": {"color": ACCENT_COLOUR, "width": 2},
        "marker": {"size": 5},
        "hovertemplate": "step %{x}: %{y:.4f}<extra></extra>",
    }
    title = f"Loss: {losses[0]:#.4g} → {losses[-1]:#.4g}" if losses else "Loss: no step yet"
    layout = looks(title=title, height=280, legend=False)
    layout["xaxis"] = {"title": {"text": "step"}, "range": [0.5, max(_FEWEST_STEPS, len(losses)) + 0.5]}
    if len(losses) <= _FEWEST_STEPS:  # or there would be ticks between steps
        layout["xaxis"]["dtick"] = 1
    return {"data": [line], "layout": layout}
