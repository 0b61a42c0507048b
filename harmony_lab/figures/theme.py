"""Theme: one colour and one name for every op and tensor kind, and the looks all figures share."""

from collections.abc import Mapping
from typing import Any, Final

from harmony_lab.plan import Mode
from harmony_lab.program import OpKind, Stream, TensorKind

__all__ = [
    "ACCENT_COLOUR",
    "ALARM_COLOUR",
    "BUDGET_COLOUR",
    "CRITICAL_COLOUR",
    "FONT_FAMILY",
    "GRID_COLOUR",
    "INK_COLOUR",
    "MODE_COLOURS",
    "OP_COLOURS",
    "SEQUENTIAL",
    "TENSOR_COLOURS",
    "dress",
    "ink_on",
    "label",
    "looks",
    "sequential",
]

# Found by pushing colours apart in CIELAB under normal, deuteranopic and protanopic sight (Machado et al., 2009), while
# each stays near its hue and off both a white and a black page.
OP_COLOURS: Final[Mapping[OpKind, str]] = {
    OpKind.FORWARD: "#1079EA",
    OpKind.RECOMPUTE: "#6DBDFF",
    OpKind.BACKWARD: "#C5660A",
    OpKind.UPDATE: "#9EA880",
    OpKind.SWAP_IN: "#1F7A43",
    OpKind.SWAP_OUT: "#FDC772",
    OpKind.SEND: "#8E748A",
    OpKind.RECV: "#74378B",
    OpKind.ALL_REDUCE: "#EAD301",
    OpKind.FREE: "#C9CDD3",
}
TENSOR_COLOURS: Final[Mapping[TensorKind, str]] = {
    TensorKind.WEIGHT: "#1952CA",
    TensorKind.BUFFER: "#CFD5CB",
    TensorKind.GRADIENT: "#CE806B",
    TensorKind.INPUT: "#9D7700",
    TensorKind.ACTIVATION: "#77B8FF",
    TensorKind.ACTIVATION_GRADIENT: "#A10E52",
    TensorKind.SAVED: "#00929F",
    TensorKind.WORKSPACE: "#CFDA6B",
    TensorKind.OPTIMIZER: "#752A86",
}
MODE_COLOURS: Final[Mapping[Mode, str]] = {Mode.DP: "#1079EA", Mode.PP: "#C5660A"}

SEQUENTIAL: Final = ("#E7F0F8", "#B5D3E8", "#74AFD6", "#3883B8", "#0A5A92", "#08386A")
"""From little to much, equally spaced."""
ACCENT_COLOUR: Final = "#1079EA"
ALARM_COLOUR: Final = "#D6273B"  # beyond a budget
CRITICAL_COLOUR: Final = "#E01E8C"  # the critical path; on a white and a black page and across all bars
BUDGET_COLOUR: Final = "#7A808A"
INK_COLOUR: Final = "#757B85"  # text that is readable on white and on black
GRID_COLOUR: Final = "rgba(128,134,144,0.22)"
FONT_FAMILY: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_WORDS: Final[Mapping[str, str]] = {
    OpKind.RECV: "receive",
    OpKind.ALL_REDUCE: "all-reduce",
    TensorKind.WEIGHT: "weights",
    TensorKind.BUFFER: "buffers",
    TensorKind.GRADIENT: "gradients",
    TensorKind.INPUT: "batch inputs",
    TensorKind.ACTIVATION: "activations",
    TensorKind.ACTIVATION_GRADIENT: "activation gradients",
    TensorKind.SAVED: "saved for backward",
    TensorKind.WORKSPACE: "temporaries",
    TensorKind.OPTIMIZER: "optimizer state",
    Mode.DP: "data parallel",
    Mode.PP: "pipeline parallel",
}


def label(kind: OpKind | TensorKind | Stream | Mode) -> str:
    """Readable words: ``"swap in"``, ``"activation gradients"``."""
    return _WORDS.get(kind, kind.value.replace("_", " "))


def sequential(share: float) -> str:
    """The colour at that share, 0 to 1, of ``SEQUENTIAL``, between its steps too."""
    place = min(max(share, 0.0), 1.0) * (len(SEQUENTIAL) - 1)
    low = min(int(place), len(SEQUENTIAL) - 2)
    pairs = zip(_channels(SEQUENTIAL[low]), _channels(SEQUENTIAL[low + 1]), strict=True)
    return "#" + "".join(f"{round(one + (other - one) * (place - low)):02X}" for one, other in pairs)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on that colour: 4.58 to 1 at least (WCAG's contrast)."""
    parts = (value / 255 for value in _channels(colour))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#FFFFFF"


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


_AXIS: Final = {
    "automargin": True,
    "gridcolor": GRID_COLOUR,
    "zeroline": False,
    "ticks": "",
    "ticklabelstandoff": 4,
    "exponentformat": "none",
    "title": {"standoff": 8},
}
_TEMPLATE: Final = {"layout": {"xaxis": _AXIS, "yaxis": _AXIS}}


def looks(*, title: str, height: int, legend: bool = True, left: int = 70, top: int = 40) -> dict[str, Any]:
    """The layout all figures start from; ``height``, in pixels, includes the margins ``left`` and ``top``."""
    return {
        "template": _TEMPLATE,
        "title": {
            "text": title,
            "font": {"size": 14},
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 10},
        },
        "font": {"family": FONT_FAMILY, "size": 12, "color": INK_COLOUR},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": height,
        "margin": {"l": left, "r": 20, "t": top, "b": 45},
        "showlegend": legend,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xref": "paper",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "font": {"size": 11},
            "traceorder": "normal",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK_COLOUR, "activecolor": ACCENT_COLOUR},
        "hoverlabel": {"font": {"family": FONT_FAMILY, "size": 12}, "align": "left"},
    }


def dress(figure: Any, *, title: str, height: int, left: int = 70, top: int = 40) -> None:
    """Give a plotly figure object the common looks."""
    layout = looks(title=title, height=height, left=left, top=top)
    figure.layout.template = layout.pop("template")
    figure.update_layout(layout)
