"""Spec: a plotly figure as plain data, put together at once; a figure object would check and copy every part."""

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

__all__ = ["ZOOMED", "Spec", "panel_axes", "panel_domains", "panel_title", "spec_json", "time_range"]

Spec = dict[str, Any]
"""``{"data": [trace, ...], "layout": {...}}``, as plotly.js and ``plotly.graph_objects.Figure`` take it."""


ZOOMED: Final = {"zoomed": True}
"""A layout's ``meta`` where the dashboard zooms the figure's time with that of others beside it (``drawing.js``)."""


def time_range(longest_s: float, unit_s: float) -> list[float]:
    """Of a time axis: the same in all figures of one length, so that they can stand one below the other."""
    return [0, longest_s / unit_s * 1.005 or 1.0]


def spec_json(spec: Spec) -> str:
    """The JSON for plotly.js; numpy arrays travel as typed arrays."""
    return json.dumps(spec, default=_typed_array, separators=(",", ":"), allow_nan=False)


def _typed_array(value: Any) -> dict[str, str]:
    assert isinstance(value, np.ndarray), f"{type(value)} in a figure"
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    typed = {"dtype": f"{value.dtype.kind}{value.dtype.itemsize}", "bdata": b64encode(little.tobytes()).decode()}
    return typed | ({"shape": ", ".join(map(str, value.shape))} if value.ndim > 1 else {})


def panel_domains(heights: Sequence[float], gap: float) -> list[tuple[float, float]]:
    """Bottom and top of panels one below the other, as shares of them all; ``heights`` and ``gap`` in pixels."""
    total = sum(heights) + gap * (len(heights) - 1)
    tops = [1 - (sum(heights[:row]) + gap * row) / total for row in range(len(heights))]
    return [(max(0.0, top - height / total), top) for top, height in zip(tops, heights, strict=True)]


def panel_axes(row: int) -> tuple[str, str]:
    """The names by which a trace in that panel, from 0, refers to its axes: ``("x", "y")``, ``("x2", "y2")``."""
    number = str(row + 1) if row else ""
    return f"x{number}", f"y{number}"


def panel_title(text: str, top: float, *, size: int) -> dict[str, Any]:
    """A heading above the panel that ends at ``top``, as an annotation."""
    return {
        "text": text,
        "font": {"size": size},
        "showarrow": False,
        "x": 0,
        "xanchor": "left",
        "xref": "paper",
        "y": top,
        "yanchor": "bottom",
        "yref": "paper",
    }
