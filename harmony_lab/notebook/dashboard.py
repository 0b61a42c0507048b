"""Dashboard: a view of a Lab, with candidates, knobs, pictures, what-ifs and launch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from harmony_lab.errors import HarmonyError
from harmony_lab.notebook.at_rest import AtRest
from harmony_lab.notebook.candidates import NONE_CHOSEN, CandidateTable, candidate_lines
from harmony_lab.notebook.compare_panel import ComparePanel
from harmony_lab.notebook.header import header_html
from harmony_lab.notebook.knob_panel import KnobCalls, KnobPanel
from harmony_lab.notebook.knobs import Knobs
from harmony_lab.notebook.launch_panel import LaunchPanel, first_batches, user_namespace
from harmony_lab.notebook.layers_panel import LayersPanel
from harmony_lab.notebook.machine_panel import MachinePanel
from harmony_lab.notebook.page import page
from harmony_lab.notebook.pictures import Pictures
from harmony_lab.notebook.requests import History, Requests
from harmony_lab.notebook.sides import Sides
from harmony_lab.notebook.text import (
    Weighed,
    error_html,
    error_words,
    note_html,
    tiles,
    tiles_html,
    weighed,
)
from harmony_lab.notebook.weak import weakly
from harmony_lab.notebook.worker import Worker
from harmony_lab.plan import Plan

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["Dashboard"]

_MOST_BESIDE = 10  # candidates that can be compared
_PAINTING_S = 5.0  # patience with what is being painted when the Lab closes
_VERIFIED_STEPS = 2


class Dashboard:
    """Widgets attached to a Lab; ``view`` is what to display.

    The Lab is the one truth: turning a knob calls ``lab.choose``, and whatever changes the Lab, in this view, in
    another or in a cell, arrives as an event and is painted.  The Lab keeps the Dashboard alive, its widgets do not.
    Events and callbacks only submit work::

        front end ── knob, click ──> hands: lab.prepare, choose, launch    (one thread, while there is work)
        Lab ──────── event ────────> painter: figures and texts            (another)
                                         └──> at rest: what each knob does, baselines   (a third)

    ``namespace``: where names of data to train on are looked up, by default the notebook.
    """

    def __init__(self, lab: "Lab", *, namespace: Callable[[], Mapping[str, Any]] = user_namespace) -> None:
        self.lab = lab
        self._reference: Weighed | None = None  # what deltas are taken from: the plan last chosen other than by knobs
        self._base: Plan | None = None  # what knobs are applied to: the reference or a plan that was typed
        self._requests = Requests()
        self._history = History()
        self._hands = Worker("harmony-lab dashboard", self._failed)
        self._painter = Worker("harmony-lab dashboard painter", self._failed)
        self.header = ipywidgets.HTML()
        self.message = ipywidgets.HTML()  # what is going on
        self.trouble = ipywidgets.HTML()  # what went wrong
        self.progress = ipywidgets.FloatProgress(max=1.0, layout={"width": "100%", "display": "none"})
        self.table = CandidateTable(weakly(self._choose))
        calls = KnobCalls(weakly(self._turn), weakly(self._take), weakly(self._undo), weakly(self._reset))
        self.knobs = KnobPanel(calls)
        self.figures = ipywidgets.HTML()
        self.machine = MachinePanel(lab, self._offer)
        self._sides = Sides(lab, _MOST_BESIDE, lambda: self.machine.best)
        self.compare = ComparePanel(self._sides.side, self._compare)
        self.layers = LayersPanel(weakly(self._measure_again), estimated=bool(lab.only_planned))
        self.pictures = Pictures(
            self._painter.submit,
            self._sides.candidate_traces,
            weakly(self._choose),
            [
                ("Compare", self.compare.view, self.compare.draw),
                ("What if", self.machine.view, lambda: None),
                ("Layers", self.layers.view, self.layers.draw),
            ],
        )
        self.launcher = LaunchPanel(weakly(self._launch), weakly(self._verify), namespace)
        self._at_rest = AtRest(lab, self._sides, (self.table, self.knobs, self.launcher), self._failed)
        status = [self.header, self.progress, self.message, self.trouble]
        parts = self.table, self.knobs, self.figures, self.pictures.view, self.launcher.view
        self.view, self._hidden = page(status, *parts)
        self._unsubscribe = lab.subscribe(self._event)
        self._paint_all()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Do what is missing: profile and search, off this thread."""
        if self.lab.result is None or self.lab.chosen is None:
            self._submit("prepare", self._prepare)

    def close(self) -> None:
        """Follow the Lab no longer and end the threads; the last state stays visible."""
        self._unsubscribe()
        for worker in (self._hands, self._at_rest, self._painter):
            worker.close()
        self._painter.wait_idle(_PAINTING_S)
        self.knobs.enable(False)
        self.machine.close()
        self.compare.enable(False)
        self.launcher.close()
        self.layers.enable(False)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)  # type: ignore[no-untyped-call]
        self.start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything asked for is done and painted; False when that took longer."""
        return self._hands.wait_idle(timeout_s) and self._painter.wait_idle(timeout_s)

    def settle_effects(self, timeout_s: float) -> bool:
        """Wait until the effects of knobs and baselines are shown as well."""
        return self.settle(timeout_s) and self._at_rest.wait_idle(timeout_s)

    # -- what the user asks for -----------------------------------------------------------------------------------

    def _submit(self, name: str, work: Callable[[], None]) -> None:
        """Have something done that the user asks for: what went wrong before is no longer of interest."""
        self.trouble.value = ""
        self._hands.submit(name, work)

    def _prepare(self) -> None:
        self.lab.prepare()

    def _measure_again(self) -> None:
        def measure() -> None:
            self.lab.measure(cache=False)
            self.lab.search()

        self._submit("measure", measure)

    def _submit_choice(self, work: Callable[[int], object]) -> None:
        """``work`` gets the number of the request."""
        number = self._requests.next_number()

        def choose() -> None:
            try:
                work(number)
            finally:
                self._requests.answered(number)
                self._painter.submit("controls", self._paint_controls)

        self._submit("choose", choose)

    def _choose(self, plan: Plan | int) -> None:
        """Take a plan as it is: the reference from now on."""

        def choose(_: int) -> None:
            self._requests.forget()
            self.lab.choose(plan)

        self._submit_choice(choose)

    def _turn(self, knobs: Knobs) -> None:
        self._submit_choice(lambda number: self._vary(lambda: self._turned(knobs), number))

    def _turned(self, knobs: Knobs) -> Plan:
        profile, base = self.lab.profile, self._base
        assert profile is not None  # or there are no knobs to turn
        assert base is not None
        return knobs.apply(base, profile)

    def _take(self, plan: Plan) -> None:
        def choose(number: int) -> None:
            before, self._base = self._base, plan
            if not self._vary(lambda: plan, number) and self._base is plan:
                self._base = before

        self._submit_choice(choose)

    def _undo(self) -> None:
        if self.knobs.refused:
            self.knobs.restore()
            self.knobs.undo.disabled = not self._history.can_go_back
            return
        past = self._history.back()
        if past is None:
            return
        if past.chosen:
            self._choose(past.plan)
        else:
            self._take(past.plan)

    def _reset(self) -> None:
        if self._reference is not None:
            self._take(self._reference.preview.plan)

    def _vary(self, make: Callable[[], Plan], number: int) -> bool:
        """Choose a variation of the reference; False where it is refused."""
        try:
            plan = make()
            self._requests.asked(plan, number)
            self.lab.choose(plan)
        except HarmonyError as error:
            if self._requests.is_newest(number):  # else the user has turned on: that is answered next
                self.knobs.refuse(str(error), self.lab.plan)
            return False
        return True

    def _launch(self, data: Any, steps: int) -> None:
        self._submit_training("launch", lambda: self.lab.launch(data, steps))

    def _verify(self, data: Any) -> None:
        def verify() -> None:
            self.launcher.certify(self.lab.verify(first_batches(data, _VERIFIED_STEPS)))
            self._allow_launch()

        self._submit_training("verify", verify)

    def _submit_training(self, name: str, work: Callable[[], object]) -> None:
        def train() -> None:
            try:
                work()
            except Exception as error:
                self.launcher.complain(error_words(error))
                self._allow_launch()

        self._submit(name, train)

    def _compare(self) -> None:
        self._painter.submit("compare", lambda: self.pictures.outdate("Compare"))

    # -- what the Lab tells ---------------------------------------------------------------------------------------

    def _event(self, event: str) -> None:
        if event == "closed":
            self.close()
            self.message.value = note_html("This Lab is closed; the last state stays visible.")
            return
        paint = {
            "progress": self._paint_progress,
            "profile": self._paint_profile,
            "result": self._paint_result,
            "plan": self._paint_plan,
            "run": self._paint_run,
        }.get(event)
        if paint is not None:
            self._painter.submit(event, paint)

    def _paint_all(self) -> None:
        self._paint_header()
        if self.lab.result is not None:
            self._paint_result()
            self._paint_plan()
        self._paint_run()

    def _paint_header(self) -> None:
        self.header.value = header_html(self.lab)

    def _paint_profile(self) -> None:
        self._paint_header()
        self._paint_progress()
        if self.lab.result is not None and self.lab.profile is not None:
            self.layers.show(self.lab.profile)
            self.pictures.outdate("Layers")

    def _paint_progress(self) -> None:
        progress = self.lab.progress
        self.progress.layout.display = "none" if progress is None else ""
        if progress is None:
            self.message.value = ""
        else:
            self.progress.value = progress.fraction
            count = f"{progress.done} of {progress.total}"
            self.message.value = note_html(f"{progress.stage}: {progress.text} ({count})")

    def _paint_result(self) -> None:
        result, profile = self.lab.result, self.lab.profile
        self._paint_header()
        if result is not None and profile is not None:
            self.progress.layout.display = "none"
            self.message.value = self.trouble.value = ""
            frame = result.to_frame()
            self._at_rest.rank(candidate_lines(frame, result.candidates), profile)
            self._offer()
            self.pictures.show_candidates(frame)
            self.layers.show(profile)
            self.pictures.outdate("Layers")

    def _paint_plan(self) -> None:
        preview, profile = self.lab.chosen, self.lab.profile
        if preview is None or profile is None:
            return
        self.trouble.value = ""
        plan, number = weighed(preview), self._requests.arrived(preview.plan)
        if number is None:
            self._refer_to(plan)
        self._history.arrived(preview.plan, chosen=number is None)
        # Where the user has turned on, what they turned stays visible: more is on its way.
        self.knobs.show(preview.plan, profile, lambda: number is None or self._requests.is_newest(number))
        self.figures.value = tiles_html(tiles(plan, self._reference or plan), self._caption(), preview.problem)
        self.pictures.show_plan(preview.trace, max(plan.peak_bytes))
        self.knobs.enable(True)
        self.knobs.undo.disabled = not (self.knobs.refused or self._history.can_go_back)
        while self._hidden:
            self._hidden.pop().layout.display = "flex"
        self._allow_launch()
        self.pictures.outdate("Compare")
        self.machine.plan_changed()
        if self._reference is not None and self._base is not None:
            self._at_rest.show_plan(plan, self._reference.preview.plan, self._base, profile)

    def _paint_controls(self) -> None:
        """Once all is answered: where plans were chosen elsewhere meanwhile, controls show the one that was last."""
        preview, profile = self.lab.chosen, self.lab.profile
        if preview is not None and profile is not None and self.knobs.plan != preview.plan:
            self.knobs.show(preview.plan, profile, lambda: not self._requests.is_waiting)

    def _refer_to(self, plan: Weighed) -> None:
        self._reference = plan
        self._base = plan.preview.plan
        self.table.mark(self._rank(self._base))

    def _rank(self, plan: Plan) -> int:
        result = self.lab.result
        plans = [] if result is None else [candidate.plan for candidate in result.candidates]
        return plans.index(plan) if plan in plans else NONE_CHOSEN

    def _caption(self) -> str:
        rank = self.table.selected
        against = "the plan last chosen" if rank == NONE_CHOSEN else f"candidate {self.table.rows[rank][0]}"
        return (
            f"Predicted for one iteration; changes are against {against}. Peak: weights, gradients, activations and "
            "temporaries, the most that any timing of this plan can reach; the picture below shows that of this "
            "prediction. Swapped: both directions, all devices."
        )

    def _allow_launch(self) -> None:
        preview, run = self.lab.chosen, self.lab.run
        busy = run is not None and run.active
        problem = None if preview is None else preview.problem
        ready = preview is not None and not busy and not self.lab.closed
        self.launcher.allow(ready, problem, self.lab.only_planned)
        self.layers.enable(not busy and not self.lab.closed)

    def _paint_run(self) -> None:
        run = self.lab.run
        if run is None:
            return
        self.launcher.follow(run)
        self._allow_launch()
        if not run.active and run.trace is not None:
            self.pictures.show_measured(run.predicted, run.trace)
            self.launcher.tell("The tab Measured has the last step beside the predicted one.")

    def _failed(self, error: Exception) -> None:
        self.progress.layout.display = "none"
        self.message.value = ""
        self.trouble.value = error_html(error_words(error))
        if self.lab.chosen is None and not self.lab.closed:
            self._show_without_plan()
        self._allow_launch()

    def _show_without_plan(self) -> None:
        """What can be done where there is no plan: ask about other machines, look at the layers, measure again."""
        if self.pictures.view in self._hidden:
            self._hidden.remove(self.pictures.view)
            self.pictures.view.layout.display = "flex"
        if self.lab.profile is not None:
            self.layers.show(self.lab.profile)
            self.pictures.outdate("Layers")
        self.pictures.look_at("What if")
        self.machine.nothing_fits()

    def _offer(self) -> None:
        """Tell the comparison what there is to compare."""
        self.compare.offer(self._sides.options())
        self._compare()
