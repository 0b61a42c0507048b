"""Launch: choose the data and the number of steps, start training, and watch it."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import ipywidgets

from harmony_lab.certificate import Certificate
from harmony_lab.errors import HarmonyError
from harmony_lab.forecast import Forecast
from harmony_lab.notebook.live import RunPanel
from harmony_lab.notebook.text import error_html, note_html
from harmony_lab.notebook.weak import weakly
from harmony_lab.run import Run
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["LaunchPanel", "data_names", "first_batches", "user_namespace"]

_LAUNCH = "train with the plan shown above"
_USUAL_NAMES = ("loader", "train_loader", "dataloader", "data", "batches", "train_data")


def user_namespace() -> Mapping[str, Any]:
    """Names of the notebook; none outside of one."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def data_names(namespace: Mapping[str, Any]) -> list[str]:
    """Names that look like training data, the likeliest first: data loaders, then what has a usual name."""
    loaders = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and type(value).__name__ in ("DataLoader", "StatefulDataLoader")
    ]
    usual = [name for name in _USUAL_NAMES if name in namespace and name not in loaders]
    return loaders + usual


def first_batches(data: Any, count: int) -> list[Any]:
    """The first few batches, of data that can be gone through again.  Raises ``HarmonyError`` for other data."""
    if iter(data) is data:
        raise HarmonyError(
            "this data can be gone through once only, so looking at its first batches would take them from training: "
            "give a DataLoader or a list of batches"
        )
    return list(islice(data, count))


class LaunchPanel:
    """``on_launch(data, steps)`` and ``on_verify(data)`` start work somewhere else and return at once."""

    def __init__(
        self,
        on_launch: Callable[[Any, int], None],
        on_verify: Callable[[Any], None],
        namespace: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._on_launch = on_launch
        self._on_verify = on_verify
        self._namespace = namespace
        self._panel: RunPanel | None = None
        self._expected: tuple[float, Forecast] | None = None
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
        self.launch = ipywidgets.Button(description="Launch", icon="rocket", button_style="primary", tooltip=_LAUNCH)
        self.launch.on_click(weakly(self._clicked))
        self.verify = ipywidgets.Button(
            description="Verify first",
            icon="check",
            tooltip="train copies for a few steps, with this plan and in plain PyTorch, and compare them",
            layout={"width": "auto"},
        )
        self.verify.on_click(weakly(self._verified))
        self.steps.observe(weakly(self._show_expected), "value")
        self.expected = ipywidgets.HTML()
        self.reason = ipywidgets.HTML()
        self.message = ipywidgets.HTML()
        self.certificate = ipywidgets.HTML()
        self.run_box = ipywidgets.VBox()
        row = ipywidgets.HBox([self.source, self.steps, self.launch, self.verify], layout={"flex_flow": "row wrap"})
        self.view = ipywidgets.VBox([row, self.expected, self.reason, self.message, self.certificate, self.run_box])
        self.offer()
        self.allow(False, None)

    def offer(self) -> None:
        """Look again which names there are to train on."""
        names = data_names(self._namespace())
        self.source.options = names
        if not self.source.value and names:
            self.source.value = names[0]

    def allow(self, allowed: bool, problem: str | None, only_planned: str = "") -> None:
        """Let the user launch, unless the plan has a ``problem`` or the Lab is ``only_planned``: then it is said."""
        if only_planned:
            self.launch.disabled = self.verify.disabled = True
            self.launch.tooltip = only_planned
            self.reason.value = note_html(only_planned)
            return
        self.launch.disabled = self.verify.disabled = not allowed or problem is not None
        self.launch.tooltip = _LAUNCH if problem is None else f"this plan cannot be launched: {problem}"
        self.reason.value = "" if problem is None else note_html("This plan does not fit, so it cannot be launched.")

    def expect(self, step_s: float, forecast: Forecast) -> None:
        """Say what a run takes, for as many steps as are set."""
        self._expected = step_s, forecast
        self._show_expected()

    def _show_expected(self, _: Any = None) -> None:
        if self._expected is not None:
            self.expected.value = note_html(_expectation(self.steps.value, *self._expected))

    def follow(self, run: Run) -> None:
        """Show that run instead of the one before."""
        if self._panel is not None:
            if self._panel.run is run:
                return
            self._panel.close()
        self.message.value = self.certificate.value = ""
        self._panel = RunPanel(run)
        self.run_box.children = [self._panel.view]

    @property
    def panel(self) -> RunPanel | None:
        return self._panel

    def tell(self, message: str) -> None:
        self.message.value = note_html(message)

    def complain(self, message: str) -> None:
        self.message.value = error_html(message)

    def close(self) -> None:
        self.allow(False, None)
        if self._panel is not None:
            self._panel.close()

    def certify(self, certificate: Certificate) -> None:
        """Show what ``Lab.verify`` found."""
        self.message.value = ""
        self.certificate.value = certificate._repr_html_()

    def _clicked(self, _: Any) -> None:
        self._begin("preparing the devices …", lambda data: self._on_launch(data, self.steps.value))

    def _verified(self, _: Any) -> None:
        self._begin("training copies, with this plan and in plain PyTorch …", self._on_verify)

    def _begin(self, words: str, work: Callable[[Any], None]) -> None:
        try:
            data = self._chosen_data()
        except HarmonyError as error:
            self.complain(str(error))
            return
        self.launch.disabled = self.verify.disabled = True
        self.tell(words)
        self.certificate.value = ""
        work(data)

    def _chosen_data(self) -> Any:
        name = self.source.value.strip()
        namespace = self._namespace()
        if name in namespace:
            return namespace[name]
        known = ", ".join(data_names(namespace)) or "none yet"
        given = f"there is no {name!r} in this notebook" if name else "no data was named"
        raise HarmonyError(f"{given}: give the name of a DataLoader or of a list of batches (found: {known})")


def _expectation(steps: int, step_s: float, forecast: Forecast) -> str:
    pairs = zip(forecast.device_peak_bytes, forecast.device_budget_bytes, strict=True)
    each = [f"{format_bytes(peak)} of {format_bytes(budget)}" for peak, budget in pairs]
    alike = len(each) > 1 and len(set(each)) == 1
    devices = f"{each[0]} each" if alike else ", ".join(each)
    count = "1 step takes" if steps == 1 else f"{steps} steps take"
    lacking = "" if forecast.fits else " That is more than there is."
    return (
        f"Forecast: {count} about {format_seconds(steps * step_s)}. Devices, at most: {devices}. Host: "
        f"{format_bytes(forecast.host_bytes)} ({format_bytes(forecast.pinned_bytes)} pinned), that is "
        f"{format_bytes(forecast.needed_bytes)} beside what the model takes now; "
        f"{format_bytes(forecast.available_bytes)} are available.{lacking}"
    )
