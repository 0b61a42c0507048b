"""LayersPanel: what each layer costs, where the numbers come from, and a button to measure them again."""

from collections.abc import Callable
from typing import Any

import ipywidgets

from harmony_lab.costs import Profile
from harmony_lab.figures.profile import profile_figure
from harmony_lab.notebook.plot import Plot
from harmony_lab.notebook.text import note_html
from harmony_lab.units import format_bytes

__all__ = ["LayersPanel"]

_LARGEST_TOLD = 3


class LayersPanel:
    """``on_again()`` starts measuring somewhere else and returns at once.  ``estimated``: nothing can be measured."""

    def __init__(self, on_again: Callable[[], None], *, estimated: bool) -> None:
        self._on_again = on_again
        self._profile: Profile | None = None
        self.again = ipywidgets.Button(
            description="Measure again",
            icon="refresh",
            tooltip="run every kind of layer again, also what was measured before, and search again",
            layout={"width": "auto", "display": "none" if estimated else ""},
        )
        self.again.on_click(self._clicked)
        self.source = ipywidgets.HTML()
        self.plot = Plot()
        head = ipywidgets.HBox([self.again, self.source], layout={"flex_flow": "row wrap", "align_items": "center"})
        self.view = ipywidgets.VBox([head, self.plot])

    def show(self, profile: Profile) -> None:
        """Take that profile; ``draw`` draws it."""
        self._profile = profile
        self.enable(True)

    def draw(self) -> None:
        if self._profile is not None:
            notes = str(self._profile), _largest(self._profile), self._profile.unsteady
            self.source.value = "".join(note_html(note) for note in notes)
            self.plot.show(profile_figure(self._profile).to_plotly_json())

    def enable(self, enabled: bool) -> None:
        self.again.disabled = not enabled

    def _clicked(self, _: Any) -> None:
        self.enable(False)  # until there is a new profile
        self._on_again()


def _largest(profile: Profile) -> str:
    """The layers with the most parameters, in a sentence."""
    whole = sum(layer.parameter_bytes for layer in profile.layers)
    first = sorted(profile.layers, key=lambda layer: -layer.parameter_bytes)[:_LARGEST_TOLD]
    told = [
        f"{one.name} {format_bytes(one.parameter_bytes)} ({one.parameter_bytes / whole:.0%})" for one in first if whole
    ]
    return f"Largest layers, by parameters: {', '.join(told)}." if told else ""
