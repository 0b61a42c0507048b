"""Launch: choose the data and the number of steps, start training, and watch it."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from harmony_lab.errors import HarmonyError
from harmony_lab.notebook.live import RunPanel
from harmony_lab.notebook.text import error_html, note_html
from harmony_lab.notebook.weak import weakly
from harmony_lab.run import Run

__all__ = ["GIVEN", "LaunchPanel", "data_names"]

GIVEN = "(given)"
"""Stands for the data that was passed to the dashboard instead of a name."""
_USUAL_NAMES = ("loader", "train_loader", "dataloader", "data", "batches", "train_data")


def data_names(namespace: Mapping[str, Any]) -> list[str]:
    """Names that look like training data, the likeliest first: data loaders, then what has a usual name."""
    loaders = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and type(value).__name__ in ("DataLoader", "StatefulDataLoader")
    ]
    usual = [name for name in _USUAL_NAMES if name in namespace and name not in loaders]
    return loaders + usual


class LaunchPanel:
    """``on_launch(data, steps)`` starts a run somewhere else and returns at once."""

    def __init__(
        self, on_launch: Callable[[Any, int], None], namespace: Callable[[], Mapping[str, Any]], data: Any = None
    ) -> None:
        self._on_launch = on_launch
        self._namespace = namespace
        self._data = data
        self._panel: RunPanel | None = None
        self.source = ipywidgets.Combobox(
            description="data",
            placeholder="name of a DataLoader or a list of batches",
            ensure_option=False,
            style={"description_width": "40px"},
            layout={"width": "320px"},
        )
        self.steps = ipywidgets.BoundedIntText(
            value=100,
            min=1,
            max=10**9,
            description="steps",
            style={"description_width": "40px"},
            layout={"width": "150px"},
        )
        self.launch = ipywidgets.Button(
            description="Launch", icon="rocket", button_style="primary", tooltip="train with the plan shown above"
        )
        self.launch.on_click(weakly(self._clicked))
        self.message = ipywidgets.HTML()
        self.run_box = ipywidgets.VBox()
        row = ipywidgets.HBox([self.source, self.steps, self.launch], layout={"flex_flow": "row wrap"})
        self.view = ipywidgets.VBox([row, self.message, self.run_box])
        self.offer()
        self.enable(False)

    def offer(self) -> None:
        """Look again which names there are to train on."""
        names = ([GIVEN] if self._data is not None else []) + data_names(self._namespace())
        self.source.options = names
        if not self.source.value and names:
            self.source.value = names[0]

    def enable(self, enabled: bool) -> None:
        self.launch.disabled = not enabled

    def follow(self, run: Run) -> None:
        """Show that run instead of the one before."""
        if self._panel is not None:
            if self._panel.run is run:
                return
            self._panel.close()
        self.message.value = ""
        self._panel = RunPanel(run)
        self.run_box.children = [self._panel.view]

    @property
    def panel(self) -> RunPanel | None:
        return self._panel

    def complain(self, message: str) -> None:
        self.message.value = error_html(message)

    def close(self) -> None:
        self.enable(False)
        if self._panel is not None:
            self._panel.close()

    def _clicked(self, _: Any) -> None:
        try:
            data = self._chosen_data()
        except HarmonyError as error:
            self.complain(str(error))
            return
        self.launch.disabled = True
        self.message.value = note_html("preparing the devices …")
        self._on_launch(data, self.steps.value)

    def _chosen_data(self) -> Any:
        name = self.source.value.strip()
        if name == GIVEN and self._data is not None:
            return self._data
        namespace = self._namespace()
        if name in namespace:
            return namespace[name]
        known = ", ".join(data_names(namespace)) or "none yet"
        given = f"there is no {name!r} in this notebook" if name else "no data was named"
        raise HarmonyError(f"{given}: give the name of a DataLoader or of a list of batches (found: {known})")
