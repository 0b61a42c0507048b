"""The knobs as controls, and the plan's text form, which can be edited."""

from collections.abc import Callable
from typing import Any

import ipywidgets

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.figures.theme import label
from harmony_lab.notebook.knobs import Knobs, microbatch_choices
from harmony_lab.notebook.text import error_html
from harmony_lab.plan import Mode, Plan

__all__ = ["KnobPanel"]

_WIDE = {"description_width": "145px"}
_FULL = {"width": "auto"}


class KnobPanel:
    """Controls that show a plan.  ``on_turn`` gets the knobs that a user turned, ``on_plan`` a plan that a user typed.

    A control that is set to what ``_shown`` says already was set by ``show``: only other values are the user's.
    """

    def __init__(
        self, on_turn: Callable[[Knobs], None], on_plan: Callable[[Plan], None], on_reset: Callable[[], None]
    ) -> None:
        self._on_turn = on_turn
        self._on_plan = on_plan
        self._shown: Knobs | None = None
        self._text_shown = ""
        self._profile: Profile | None = None
        self.controls: dict[str, Any] = {
            "mode": ipywidgets.ToggleButtons(
                options=[(label(mode), mode) for mode in Mode],
                tooltips=["every device runs all packs on its share", "packs go round the devices"],
                description="mode",
                style={"button_width": "auto", **_WIDE},
            ),
            "forward_microbatch_size": _sizes("forward microbatch"),
            "num_forward_packs": _count("forward packs", 0, 1),
            "backward_microbatch_size": _sizes("backward microbatch"),
            "num_backward_packs": _count("backward packs", 1, 1),
            "prefetch": _count("packs fetched ahead", 0, 2),
            "peer_transfers": _switch("transfers between devices directly"),
            "just_in_time_update": _switch("update each pack right after its backward"),
        }
        for name, control in self.controls.items():
            control.observe(lambda change, name=name: self._turned(name, change["new"]), "value")
        self.text = ipywidgets.Textarea(
            description="plan", rows=5, continuous_update=False, style={"description_width": "40px"}, layout=_FULL
        )
        self.text.observe(self._typed, "value")
        self.message = ipywidgets.HTML()
        self.reset = ipywidgets.Button(
            description="back to the candidate",
            icon="undo",
            tooltip="take the chosen candidate's plan again",
            layout={"width": "auto", "align_self": "flex-start"},
        )
        self.reset.on_click(lambda _: on_reset())
        self.view = ipywidgets.VBox([*self.controls.values(), self.text, self.message, self.reset])
        self.enable(False)

    def show(self, plan: Plan, profile: Profile) -> None:
        """Set every control to that plan; calls nobody back."""
        self._profile = profile
        knobs = Knobs.of(plan)
        self._shown = knobs
        for name in ("forward_microbatch_size", "backward_microbatch_size"):
            control = self.controls[name]
            choices = microbatch_choices(profile, plan.minibatch_size, getattr(knobs, name))
            if control.options != choices:
                control.options = choices
        for name in ("num_forward_packs", "num_backward_packs"):
            self.controls[name].max = plan.num_layers
        self.controls["prefetch"].max = max(2, knobs.prefetch)
        for name, control in self.controls.items():
            control.value = getattr(knobs, name)
        self._text_shown = str(plan)
        self.text.value = self._text_shown
        self.message.value = ""

    def complain(self, message: str) -> None:
        self.message.value = error_html(message)

    def enable(self, enabled: bool) -> None:
        for control in (*self.controls.values(), self.text, self.reset):
            control.disabled = not enabled

    def _turned(self, name: str, value: Any) -> None:
        if self._shown is None or getattr(self._shown, name) == value:
            return
        self._shown = self._shown.turn(**{name: value})
        self._on_turn(self._shown)

    def _typed(self, change: Any) -> None:
        text = change["new"]
        if text == self._text_shown:
            return
        self._text_shown = text
        try:
            plan = Plan.parse(text)
        except PlanError as error:
            self.complain(str(error))
            return
        self._on_plan(plan)


def _sizes(description: str) -> Any:
    return ipywidgets.SelectionSlider(options=(1,), description=description, style=_WIDE, layout=_FULL)


def _count(description: str, least: int, most: int) -> Any:
    return ipywidgets.IntSlider(value=least, min=least, max=most, description=description, style=_WIDE, layout=_FULL)


def _switch(description: str) -> Any:
    return ipywidgets.Checkbox(description=description, indent=False, layout=_FULL)
