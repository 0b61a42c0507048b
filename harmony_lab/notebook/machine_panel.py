"""MachinePanel: the machine, and what another one would do to the plan and to the best plan."""

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Machine
from harmony_lab.notebook.text import Weighed, error_html, error_words, note_html, tiles, tiles_html, weighed
from harmony_lab.notebook.weak import weakly
from harmony_lab.notebook.what_if import Profiles, Superseded, WhatIf, host_rate, while_wanted
from harmony_lab.notebook.worker import Worker
from harmony_lab.planner.search import SearchResult, search
from harmony_lab.precision import Precision
from harmony_lab.preview import Preview, preview
from harmony_lab.units import format_bytes, format_rate, parse_bytes, parse_rate

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["MachinePanel"]

_MEANING = (
    "Another machine, by name (such as 8x3090, pcie4 x8 behind 2 switches) or this one changed: what the plan at hand "
    "would do there, and which would be best. The Lab stays as it is."
)
_MOST_DEVICES = 16
_FACTORS = tuple(2.0 ** (half / 2) for half in range(-6, 7))  # an eighth to eight times
_WIDE = {"description_width": "150px"}


class MachinePanel:
    """Fields and sliders for a machine; ``best`` is the best plan on it, once found.

    Every change asks anew, on a thread of its own; a question that was superseded is broken off.  ``on_answer`` is
    called, on that thread, when ``best`` has changed.
    """

    def __init__(self, lab: "Lab", on_answer: Callable[[], None]) -> None:
        self._lab = lab
        self._on_answer = on_answer
        self._asked = 0  # of questions: an answer to an older one is of no use
        self._setting = False
        self._worker = Worker("harmony-lab what-if", self._failed)
        self._profiles = Profiles(self._estimated)
        self._best: Weighed | None = None
        self._known: tuple[Profile, Machine, int, SearchResult] | None = None  # the last search
        self.preset = ipywidgets.Combobox(
            placeholder="as it is, or such as 4x4090",
            description="machine",
            options=[f"{count}x{name}" for name in ("3090", "4090", "a6000", "h100") for count in (1, 4, 8)],
            continuous_update=False,
            style=_WIDE,
            layout={"width": "auto"},
        )
        self.devices = ipywidgets.IntSlider(
            min=1, max=_MOST_DEVICES, description="devices", style=_WIDE, layout={"width": "auto"}
        )
        self.memory = _Quantity("memory", format_bytes, lambda text: float(parse_bytes(text)))
        self.link = _Quantity("host link", format_rate, parse_rate)
        self.reset = ipywidgets.Button(
            description="reset", icon="undo", tooltip="the machine as it is", layout={"width": "auto"}
        )
        self.take = ipywidgets.Button(
            description="use that plan here",
            icon="check",
            tooltip="choose the best plan of the other machine on this one",
            layout={"width": "auto"},
            disabled=True,
        )
        self.measure = ipywidgets.Button(
            description="measure links",
            icon="exchange",
            tooltip="what the links of this machine really carry, alone and all at once; nothing is planned anew",
            layout={"width": "auto", "display": "none" if lab.only_planned else ""},
        )
        self.measured = ipywidgets.HTML()
        self.status = ipywidgets.HTML()
        self.shown_plan = ipywidgets.HTML()
        self.best_plan = ipywidgets.HTML()
        self._set(lab.machine)
        for control in (self.devices, *self.memory.controls, *self.link.controls):
            control.observe(weakly(self._turned), "value")
        self.preset.observe(weakly(self._named), "value")
        self.reset.on_click(weakly(self._reset))
        self.take.on_click(weakly(self._take))
        self.measure.on_click(weakly(self._measure))
        buttons = ipywidgets.HBox([self.reset, self.take, self.measure], layout={"flex_flow": "row wrap"})
        rows = [ipywidgets.HTML(note_html(_MEANING)), self.preset, self.devices, self.memory.view, self.link.view]
        self.view = ipywidgets.VBox([*rows, buttons, self.measured, self.status, self.shown_plan, self.best_plan])

    # -- what others ask ------------------------------------------------------------------------------------------

    @property
    def best(self) -> Weighed | None:
        """The best plan on the machine asked for; None for the Lab's own and while it is looked for."""
        return self._best

    def plan_changed(self) -> None:
        """The Lab's plan or profile is another now: answer anew, where there is a question."""
        if self._differs():
            self._ask()

    def nothing_fits(self) -> None:
        """There is no plan: say with how much memory there would be, where layers have been profiled."""
        profile = self._lab.profile
        if profile is None or self._differs():
            return
        self._asked += 1
        number = self._asked
        self.status.value = note_html("looking for how much memory suffices …")
        self._worker.submit("what-if", lambda: self._find_memory(profile, number))

    def enable(self, enabled: bool) -> None:
        for control in (
            self.preset,
            self.devices,
            *self.memory.controls,
            *self.link.controls,
            self.reset,
            self.measure,
        ):
            control.disabled = not enabled

    def close(self) -> None:
        self._asked += 1
        self._worker.close()
        self.enable(False)
        self.take.disabled = True

    def settle(self, timeout_s: float) -> bool:
        return self._worker.wait_idle(timeout_s)

    # -- what the user asks ---------------------------------------------------------------------------------------

    def _what_if(self) -> WhatIf:
        preset = self.preset.value.strip()
        base = Machine.preset(preset) if preset else self._lab.machine
        devices, memory, link = self.devices.value, self.memory.value, self.link.value
        return WhatIf(
            preset=preset,
            num_devices=None if devices == base.num_devices else devices,
            memory_bytes=None if memory == base.devices[0].memory_bytes else round(memory),
            link_bytes_per_s=None if link == host_rate(base) else link,
        )

    def _differs(self) -> bool:
        try:
            return self._what_if() != WhatIf()
        except HarmonyError:  # a preset half typed: said already
            return False

    def _set(self, machine: Machine) -> None:
        """Controls as that machine is."""
        self._setting = True
        try:
            self.devices.max = max(_MOST_DEVICES, machine.num_devices)
            self.devices.value = machine.num_devices
            self.memory.set(float(machine.devices[0].memory_bytes))
            self.link.set(host_rate(machine))
        finally:
            self._setting = False

    def _named(self, _: Any) -> None:
        if self._setting:
            return
        try:
            self._set(Machine.preset(self.preset.value) if self.preset.value.strip() else self._lab.machine)
        except HarmonyError as error:
            self._failed(error)
        else:
            self._ask()

    def _turned(self, change: Any) -> None:
        if self._setting:
            return
        self._setting = True
        try:
            for quantity in (self.memory, self.link):
                if change["owner"] in quantity.controls:
                    quantity.follow(change["owner"])
        except HarmonyError as error:
            self._failed(error)
            return
        finally:
            self._setting = False
        self._ask()

    def _reset(self, _: Any) -> None:
        self._setting = True
        self.preset.value = ""
        self._set(self._lab.machine)
        self._ask()

    def _take(self, _: Any) -> None:
        best = self._best
        if best is not None:
            self._worker.submit("take", lambda: self._choose(best.preview))

    def _choose(self, best: Preview) -> None:
        devices = tuple(device for device in best.plan.devices if device < self._lab.machine.num_devices)
        self._lab.choose(best.plan.with_(devices=devices))

    def _measure(self, _: Any) -> None:
        self.measure.disabled = True
        self.measured.value = note_html("measuring the links …")
        self._worker.submit("measure links", self._measure_links)

    def _measure_links(self) -> None:
        from harmony_lab.profiler.links import probe_links

        lab = self._lab
        try:
            if lab.run is not None and lab.run.active:
                raise HarmonyError("links are measured while nothing else uses them: stop the run first")
            probe = probe_links(lab.machine)
            note = "To plan with these rates: Lab(..., machine=harmony_lab.probe_links(machine).machine)"
            self.measured.value = f"{probe._repr_html_()}{note_html(note)}"
        except HarmonyError as error:
            self.measured.value = error_html(str(error))
        finally:
            self.measure.disabled = lab.closed

    # -- answers --------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._asked += 1
        number = self._asked
        self._best = None
        self.take.disabled = True
        self._worker.submit("what-if", lambda: self._answer(number))

    def _answer(self, number: int) -> None:
        lab, what_if = self._lab, self._what_if()
        measured, chosen = lab.profile, lab.chosen
        self.shown_plan.value = self.best_plan.value = ""
        if what_if == WhatIf():
            self.status.value = ""
            self._on_answer()
            return
        machine = what_if.machine(lab.machine)
        self.status.value = note_html(f"{machine}: looking for its best plan …")
        profile = self._profile(machine, measured)
        reference = None if chosen is None else weighed(chosen)
        if reference is not None:
            self.shown_plan.value = self._plan_there(reference.preview, profile, machine, reference)
        size = lab.minibatch_size if chosen is None else chosen.plan.minibatch_size
        try:
            result = self._search(profile, machine, size, number)
        except Superseded:
            return
        best = weighed(preview(result.best, profile, machine))
        if number != self._asked:
            return
        self._best = best
        source = "measured here" if profile is measured else f"as estimated for {profile.device}"
        against = "" if reference is None else "; changes are against the plan at hand"
        self.status.value = note_html(f"{machine}; seconds per layer {source}{against}")
        self.best_plan.value = (
            f"<h4>The best plan there</h4>{tiles_html(tiles(best, reference or best), result.explain(), None)}"
            f'<pre class="harmony-plan">{escape(str(result.best))}</pre>'
        )
        self.take.disabled = False
        self._on_answer()

    def _profile(self, machine: Machine, measured: Profile | None) -> Profile:
        lab = self._lab
        if measured is not None:
            return self._profiles.of(machine, lab.machine, measured)
        if not machine.devices[0].model:
            raise HarmonyError(
                f"no layer has been profiled on {lab.machine.devices[0].name}, so nothing is known of others like it: "
                "type a preset, such as 4x4090, whose costs are estimated"
            )
        return self._estimated(machine.devices[0].model, lab.precision)

    def _find_memory(self, profile: Profile, number: int) -> None:
        """The least memory of the slider's with which there is a plan."""
        machine = self._lab.machine
        for size, memory in self.memory.slider.options:
            if memory > machine.devices[0].memory_bytes and self._has_plan(profile, machine.with_(memory=int(memory))):
                if number == self._asked:
                    self.status.value = note_html(f"With {size} per device there is a plan. What else would do?")
                return
        if number == self._asked:
            self.status.value = note_html("There is no plan with eight times the memory either.")

    def _has_plan(self, profile: Profile, machine: Machine) -> bool:
        try:
            search(profile, machine, self._lab.minibatch_size, shown=1)
        except HarmonyError:
            return False
        return True

    def _search(self, profile: Profile, machine: Machine, minibatch_size: int, number: int) -> SearchResult:
        """The ranking there; known from before where only the plan at hand has changed."""
        known = self._known
        if known is None or known[0] is not profile or known[1:3] != (machine, minibatch_size):
            wanted = while_wanted(lambda: number == self._asked)
            result = self._lab.searches.search(profile, machine, minibatch_size, progress=wanted)
            known = self._known = profile, machine, minibatch_size, result
        return known[3]

    def _plan_there(self, chosen: Preview, profile: Profile, machine: Machine, reference: Weighed) -> str:
        heading = "<h4>The plan at hand, there</h4>"
        if max(chosen.plan.devices) >= machine.num_devices:
            return heading + note_html(f"uses {chosen.plan.num_devices} devices; that machine has fewer")
        try:
            there = weighed(preview(chosen.plan, profile, machine))
        except HarmonyError as error:
            return heading + error_html(str(error))
        return heading + tiles_html(tiles(there, reference), "", there.preview.problem)

    def _estimated(self, model: str, precision: Precision) -> Profile:
        from harmony_lab.profiler.estimate import estimate

        lab = self._lab
        return estimate(lab.layers, model, lab.optimizer, precision=precision, minibatch_size=lab.minibatch_size)

    def _failed(self, error: Exception) -> None:
        self.status.value = error_html(error_words(error))


class _Quantity:
    """A slider over round multiples of what there is, and a field for any other value."""

    def __init__(self, name: str, words: Callable[[float], str], read: Callable[[str], float]) -> None:
        self._words, self._read = words, read
        self.value = 1.0
        self.slider = ipywidgets.SelectionSlider(
            options=[("1", 1.0)], description=name, readout=False, style=_WIDE, layout={"flex": "1 1 260px"}
        )
        self.field = ipywidgets.Text(
            description=f"{name}, typed",
            continuous_update=False,
            style={"description_width": "110px"},
            layout={"flex": "0 1 240px"},
        )
        self.view = ipywidgets.Box([self.slider, self.field], layout={"flex_flow": "row wrap"})

    @property
    def controls(self) -> tuple[Any, Any]:
        return self.slider, self.field

    def set(self, value: float) -> None:
        self.value = value
        self.slider.options = _options([value * factor for factor in _FACTORS], self._words)
        self.slider.value = value
        self.field.value = self._words(value)

    def follow(self, control: Any) -> None:
        """Take the value of the control that was changed, and show it on the other."""
        if control is self.slider:
            self.value = self.slider.value
            self.field.value = self._words(self.value)
            return
        self.value = float(self._read(self.field.value))
        others = [value for _, value in self.slider.options]
        if self.value not in others:
            self.slider.options = _options(sorted([*others, self.value]), self._words)
        self.slider.value = self.value


def _options(values: Sequence[float], words: Callable[[float], str]) -> list[tuple[str, float]]:
    return [(words(value), value) for value in values]
