"""Plotly figures and static pictures: pure functions of traces, profiles and results; each loads on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "candidate_heatmap": "swaps",
    "candidates_scatter": "candidates",
    "compare_figure": "timeline",
    "link_utilisation": "utilisation",
    "loss_curve": "loss",
    "memory_timeline": "memory",
    "profile_figure": "profile",
    "swap_heatmap": "swaps",
    "timeline_figure": "timeline",
}

__all__ = [*sorted(_HOMES)]

if TYPE_CHECKING:
    from harmony_lab.figures.candidates import candidates_scatter
    from harmony_lab.figures.loss import loss_curve
    from harmony_lab.figures.memory import memory_timeline
    from harmony_lab.figures.profile import profile_figure
    from harmony_lab.figures.swaps import candidate_heatmap, swap_heatmap
    from harmony_lab.figures.timeline import compare_figure, timeline_figure
    from harmony_lab.figures.utilisation import link_utilisation


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'harmony_lab.figures' has no attribute {name!r}")
    return getattr(import_module(f"harmony_lab.figures.{home}"), name)


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *__all__]
