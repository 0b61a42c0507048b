"""PackStrip: the layers in a row, with the cuts between packs to be dragged, set and taken away."""

from collections.abc import Callable, Iterable
from typing import Any

import anywidget
import traitlets

from harmony_lab.costs import Profile
from harmony_lab.notebook.static_files import static_text
from harmony_lab.plan import Pack, Plan
from harmony_lab.preview import cuts_of
from harmony_lab.units import format_bytes

__all__ = ["PackStrip"]


class PackStrip(anywidget.AnyWidget):
    """``forward`` and ``backward`` are the cuts; a user's edit calls ``on_edit("forward" or "backward", cuts)``.

    Forward packs reach up to the last backward cut, where the fused pack starts.
    """

    _esm = static_text("packs.js")
    _css = static_text("packs.css")
    layers = traitlets.List(traitlets.Unicode()).tag(sync=True)
    forward = traitlets.List(traitlets.Int()).tag(sync=True)
    backward = traitlets.List(traitlets.Int()).tag(sync=True)
    forward_labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    backward_labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    disabled = traitlets.Bool(True).tag(sync=True)

    def __init__(self, on_edit: Callable[[str, tuple[int, ...]], None]) -> None:
        super().__init__()
        self._on_edit = on_edit
        self._shown: dict[str, tuple[int, ...]] = {}
        for way in ("forward", "backward"):
            self.observe(self._changed, way)

    def show(self, plan: Plan, profile: Profile) -> None:
        """Show that plan's packs, without calling ``on_edit``."""
        self._shown = {"forward": cuts_of(plan.forward_packs), "backward": cuts_of(plan.backward_packs)}
        names = [layer.name for layer in profile.layers]
        if self.layers != names:
            self.layers = names
        with self.hold_sync():
            self.forward_labels = _labels(plan.forward_packs, profile)
            self.backward_labels = _labels(plan.backward_packs, profile)
            self.forward = list(self._shown["forward"])
            self.backward = list(self._shown["backward"])

    def _changed(self, change: Any) -> None:
        way, cuts = change["name"], tuple(change["new"])
        if self._shown.get(way) not in (None, cuts):
            self._shown[way] = cuts
            self._on_edit(way, cuts)


def _labels(packs: Iterable[Pack], profile: Profile) -> list[str]:
    return [format_bytes(profile.weight_bytes(*pack)) for pack in packs]
