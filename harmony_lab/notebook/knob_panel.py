"""The knobs as controls with what each does, the packs' cuts, and the plan's text form, which can be edited."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import ipywidgets

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.figures.theme import label
from harmony_lab.notebook.effects import Effect
from harmony_lab.notebook.knobs import (
    Knobs,
    Updates,
    cuts_text,
    devices_text,
    microbatch_choices,
    parse_cuts,
    parse_devices,
)
from harmony_lab.notebook.pack_strip import PackStrip
from harmony_lab.notebook.plan_file import PlanFile
from harmony_lab.notebook.text import effect_html, error_html
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.compose import updatable
from harmony_lab.precision import Precision
from harmony_lab.preview import can_stay, cuts_of, recut

__all__ = ["KnobCalls", "KnobPanel"]

_MEANINGS = {
    "mode": "how the work is shared out among the devices",
    "minibatch_size": "samples between two updates of the weights",
    "forward_microbatch_size": "samples that a forward pack computes at once",
    "num_forward_packs": "packs that the layers are cut into on the way forward; the last backward pack runs its own",
    "backward_microbatch_size": "samples that a backward pack computes at once",
    "num_backward_packs": "packs that the layers are cut into on the way back",
    "devices": "which device gets the first pack, the second, and so on",
    "prefetch": "packs whose weights are fetched while another computes: hides transfers, takes memory",
    "peer_transfers": "values that the next device needs go there, not by way of the host",
    "updates": "when the optimizer updates a pack; clipping by the global norm needs all gradients first",
    "precision": "what layers compute in",
    "mirrored": "in a pipeline: packs go back over the devices in the reverse order",
    "num_stashed": "inputs of backward packs that wait on the device instead of on the host",
    "num_resident_packs": "packs whose weights stay on the device from forward to backward",
    "num_kept_packs": "of those, packs that keep all that backward needs, so that nothing is computed again",
    "num_device_updates": "packs whose optimizer runs on the device, with its state there, instead of on the host",
}
_GROUPS = {
    "how the work is shared out": ("mode", "minibatch_size", "devices", "mirrored"),
    "microbatches and packs": (
        "forward_microbatch_size",
        "num_forward_packs",
        "backward_microbatch_size",
        "num_backward_packs",
    ),
    "transfers, updates, precision": ("prefetch", "peer_transfers", "updates", "precision"),
    "what stays on the devices, instead of being fetched or computed again": (
        "num_stashed",
        "num_resident_packs",
        "num_kept_packs",
        "num_device_updates",
    ),
}
_WIDE = {"description_width": "145px"}
_AT_FIRST = 1024  # no slider's end later lies beyond that of its first range: the End key in a page goes no further
_FULL = {"width": "auto"}


class KnobCalls(NamedTuple):
    """Who is told what a user does.  ``take``: a plan was typed, read from a file, or its packs were cut."""

    turn: Callable[[Knobs], None]
    take: Callable[[Plan], None]
    undo: Callable[[], None]
    reset: Callable[[], None]


class KnobPanel:
    """Controls that show a plan; ``view`` for the side, ``strip_view`` for below the candidates.

    A value that ``show`` sets is not the user's, nor one that a control takes by itself meanwhile, as where its choices
    or its range change: those arrive on the thread that shows.  The user's may arrive on any; they wait while a plan is
    shown, and none is lost.  What was refused stays visible, with the reason, until the next turn is taken or
    ``restore`` is called.
    """

    def __init__(self, calls: KnobCalls) -> None:
        self._calls = calls
        self._lock = threading.RLock()
        self._shown: Knobs | None = None
        self._plan: Plan | None = None
        self._texts: dict[str, str] = {}  # what text fields were set to
        self._profile: Profile | None = None
        self._shower: int | None = None  # the thread that sets controls
        self.refused = False
        """Whether something is visible that the plan at hand is not."""
        self.controls = _controls()
        self.effects = {name: ipywidgets.HTML() for name in self.controls}
        for name, control in self.controls.items():
            control.tooltip = _MEANINGS[name]
            control.observe(lambda change, name=name: self._changed(name, change["new"]), "value")
        self.text = ipywidgets.Textarea(
            description="plan", rows=5, continuous_update=False, style={"description_width": "40px"}, layout=_FULL
        )
        self.cuts = {
            way: _text(f"cut {way} before", "layers, such as 2, 4, 6 or every 2") for way in ("forward", "backward")
        }
        self.text.observe(lambda change: self._typed("plan", change["new"]), "value")
        for way, field in self.cuts.items():
            field.observe(lambda change, way=way: self._typed(way, change["new"]), "value")
        self.strip = PackStrip(self._cut)
        self.message = ipywidgets.HTML()
        self.undo = _button("undo", "undo", "take back what was refused, else the plan that was shown before")
        self.reset = _button("back to the candidate", "refresh", "take the chosen candidate's plan again")
        self.undo.on_click(lambda _: calls.undo())
        self.reset.on_click(lambda _: calls.reset())
        self.file = PlanFile(lambda: self._plan, self.take, self.complain)
        rows = []
        for title, names in _GROUPS.items():
            rows.append(ipywidgets.HTML(f'<div class="harmony-group">{title}</div>'))
            rows += [ipywidgets.VBox([self.controls[name], self.effects[name]]) for name in names]
        buttons = ipywidgets.HBox([self.undo, self.reset], layout={"flex_flow": "row wrap"})
        self.view = ipywidgets.VBox([*rows, self.message, buttons])
        cuts = ipywidgets.Box(list(self.cuts.values()), layout={"flex_flow": "row wrap"})
        self.strip_view = ipywidgets.VBox([self.strip, cuts, self.text, self.file.view])
        self.enable(False)

    def show(self, plan: Plan, profile: Profile, wanted: Callable[[], bool] = lambda: True) -> None:
        """Set every control to that plan, unless it is no longer ``wanted``; calls nobody back."""
        with self._lock:
            if not wanted():
                return
            self._profile, self._plan, self.refused = profile, plan, False
            self._shown = Knobs.of(plan)
            self._shower = threading.get_ident()
            try:
                self._set(self._shown, plan, profile)
            finally:
                self._shower = None

    def _set(self, knobs: Knobs, plan: Plan, profile: Profile) -> None:
        for name in ("forward_microbatch_size", "backward_microbatch_size"):
            control = self.controls[name]
            choices = microbatch_choices(profile, plan.minibatch_size, getattr(knobs, name))
            if control.options != choices:
                control.options = choices
        for name in ("num_forward_packs", "num_backward_packs"):
            self.controls[name].max = plan.num_layers
        self.controls["prefetch"].max = max(2, knobs.prefetch)
        possible = can_stay(plan)
        self.controls["num_stashed"].max = len(possible.device_stash)
        self.controls["num_resident_packs"].max = len(possible.resident_packs)
        self.controls["num_kept_packs"].max = len(plan.resident_packs) if possible.kept_packs else 0
        self.controls["num_device_updates"].max = max(len(updatable(plan, profile)), knobs.num_device_updates)
        for name, control in self.controls.items():
            shown = getattr(knobs, name)
            control.value = devices_text(shown) if name == "devices" else shown
        self._texts = {
            "plan": str(plan),
            "forward": cuts_text(cuts_of(plan.forward_packs)),
            "backward": cuts_text(cuts_of(plan.backward_packs)),
        }
        self.text.value = self._texts["plan"]
        for way, field in self.cuts.items():
            field.value = self._texts[way]
        self.strip.show(plan, profile)
        self.message.value = ""

    @property
    def plan(self) -> Plan | None:
        """The plan at hand."""
        return self._plan

    def show_effect(self, effect: Effect) -> None:
        self.effects[effect.knob].value = effect_html(effect.text)

    def complain(self, message: str) -> None:
        self.message.value = error_html(message)

    def refuse(self, message: str, at_hand: Plan | None = None) -> None:
        """Say why what was turned or typed is no plan; whatever is turned next starts from the plan at hand, by default
        the one shown last.
        """
        with self._lock:
            self.complain(message)
            self._plan = at_hand or self._plan
            if self._plan is not None:
                self._shown = Knobs.of(self._plan)
            self.refused = True
            self.undo.disabled = False

    def restore(self) -> None:
        """Show the plan at hand instead of what was refused."""
        if self._plan is not None and self._profile is not None:
            self.show(self._plan, self._profile)

    def take(self, plan: Plan) -> None:
        self._calls.take(plan)

    def enable(self, enabled: bool) -> None:
        for control in (*self.controls.values(), self.text, *self.cuts.values(), self.reset, self.undo, self.strip):
            control.disabled = not enabled
        self.file.enable(enabled)

    # -- what the user does ---------------------------------------------------------------------------------------

    def _changed(self, name: str, value: Any) -> None:
        if threading.get_ident() != self._shower:
            with self._lock:
                self._turned(name, value)

    def _turned(self, name: str, value: Any) -> None:
        if self._shown is None:
            return
        if name == "devices":
            try:
                value = self._shown.devices if value == devices_text(self._shown.devices) else parse_devices(value)
            except PlanError as error:
                self.refuse(str(error))
                return
        if getattr(self._shown, name) != value:
            self._shown = self._shown.turn(**{name: value})
            self._calls.turn(self._shown)
        elif self.refused:  # turned back by hand
            self._calls.undo()

    def _typed(self, what: str, text: str) -> None:
        if self._plan is None or text == self._texts.get(what):
            return
        self._texts[what] = text
        try:
            if what == "plan":
                self.take(Plan.parse(text))
            else:
                packs = self._plan.fused_pack.start if what == "forward" else self._plan.num_layers
                self._cut(what, parse_cuts(text, packs))
        except PlanError as error:
            self.refuse(str(error))

    def _cut(self, way: str, cuts: tuple[int, ...]) -> None:
        if self._plan is None:
            return
        try:
            self.take(recut(self._plan, **{f"{way}_cuts": cuts}))
        except PlanError as error:
            self.refuse(str(error))


def _controls() -> dict[str, Any]:
    return {
        "mode": ipywidgets.ToggleButtons(
            options=[(label(mode), mode) for mode in Mode],
            tooltips=["every device runs all packs on its share", "packs go round the devices"],
            description="mode",
            style={"button_width": "auto", **_WIDE},
        ),
        "minibatch_size": ipywidgets.BoundedIntText(
            value=1, min=1, max=10**6, description="minibatch", style=_WIDE, layout=_FULL
        ),
        "forward_microbatch_size": _sizes("forward microbatch"),
        "num_forward_packs": _count("forward packs", 0),
        "backward_microbatch_size": _sizes("backward microbatch"),
        "num_backward_packs": _count("backward packs", 1),
        "devices": ipywidgets.Text(description="order of devices", continuous_update=False, style=_WIDE, layout=_FULL),
        "prefetch": _count("packs fetched ahead", 0),
        "peer_transfers": _switch("transfers between devices directly"),
        "updates": ipywidgets.ToggleButtons(
            options=[(f"update {Updates.EACH}", Updates.EACH), *((str(when), when) for when in list(Updates)[1:])],
            tooltips=[
                "each pack right after its backward, while others still compute",
                "all packs at the end of the step",
                "on the host, beside the next step's forward",
            ],
            description="updates",
            style={"button_width": "auto", **_WIDE},
        ),
        "precision": ipywidgets.ToggleButtons(
            options=[(str(precision), precision) for precision in Precision],
            tooltips=[
                "everything in 32 bits",
                "matrix products in bf16; weights cross the links in half the bytes; the masters stay fp32. Layers are "
                "profiled in it first",
            ],
            description="precision",
            style={"button_width": "auto", **_WIDE},
        ),
        "mirrored": _switch("backward on the device of the forward (pipeline)"),
        "num_stashed": _count("inputs kept on device", 0),
        "num_resident_packs": _count("packs that stay", 0),
        "num_kept_packs": _count("kept for backward", 0),
        "num_device_updates": _count("updates on device", 0),
    }


def _sizes(description: str) -> Any:
    options = range(1, _AT_FIRST + 1)
    return ipywidgets.SelectionSlider(options=options, description=description, style=_WIDE, layout=_FULL)


def _count(description: str, least: int) -> Any:
    return ipywidgets.IntSlider(
        value=least, min=least, max=_AT_FIRST, description=description, style=_WIDE, layout=_FULL
    )


def _switch(description: str) -> Any:
    return ipywidgets.Checkbox(description=description, indent=False, layout=_FULL)


def _text(description: str, placeholder: str) -> Any:
    return ipywidgets.Text(
        description=description,
        placeholder=placeholder,
        continuous_update=False,
        style={"description_width": "145px"},
        layout={"flex": "1 1 300px"},
    )


def _button(description: str, icon: str, tooltip: str) -> Any:
    return ipywidgets.Button(description=description, icon=icon, tooltip=tooltip, layout={"width": "auto"})
