"""Dashboard: a view of a Lab, with candidates, knobs, pictures and launch."""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from harmony_lab.errors import HarmonyError
from harmony_lab.notebook.candidates import NONE_CHOSEN, CandidateTable, candidate_rows
from harmony_lab.notebook.control_names import ControlNames
from harmony_lab.notebook.header import header_html
from harmony_lab.notebook.knob_panel import KnobPanel
from harmony_lab.notebook.knobs import Knobs
from harmony_lab.notebook.launch_panel import LaunchPanel
from harmony_lab.notebook.pictures import Pictures
from harmony_lab.notebook.text import Weighed, error_html, note_html, stylesheet_html, tiles, tiles_html, weighed
from harmony_lab.notebook.weak import weakly
from harmony_lab.notebook.worker import Worker
from harmony_lab.plan import Plan

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["Dashboard"]

_MOST_CANDIDATES = 10
_PAINTING_S = 5.0  # patience with what is being painted when the Lab closes


def _user_namespace() -> Mapping[str, Any]:
    """Names of the notebook; none outside of one."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return {} if shell is None else shell.user_ns


class Dashboard:
    """Widgets attached to a Lab; ``view`` is what to display.

    The Lab is the one truth: turning a knob calls ``lab.choose``, and whatever changes the Lab, in this view, in
    another or in a cell, arrives as an event and is painted.  The Lab keeps the Dashboard alive, its widgets do not.
    Events and callbacks only submit work::

        front end ── knob, click ──> hands: lab.prepare, choose, launch    (one thread, while there is work)
        Lab ──────── event ────────> painter: figures and texts            (another)

    ``data``: batches to train on; without it the panel asks for a name in the ``namespace``, by default the notebook's.
    """

    def __init__(
        self, lab: "Lab", *, data: Any = None, namespace: Callable[[], Mapping[str, Any]] = _user_namespace
    ) -> None:
        self.lab = lab
        self._reference: Weighed | None = None  # what deltas are taken from: the plan last chosen other than by knobs
        self._base: Plan | None = None  # what knobs are applied to: the reference or a plan that was typed
        self._requests = _Requests()
        self._hands = Worker("harmony-lab dashboard", self._failed)
        self._painter = Worker("harmony-lab dashboard painter", self._failed)
        self.header = ipywidgets.HTML()
        self.message = ipywidgets.HTML()  # what is going on
        self.trouble = ipywidgets.HTML()  # what went wrong
        self.progress = ipywidgets.FloatProgress(max=1.0, layout={"width": "100%", "display": "none"})
        self.table = CandidateTable(weakly(self._choose_rank))
        self.knobs = KnobPanel(weakly(self._turn), weakly(self._choose_plan), weakly(self._reset))
        self.figures = ipywidgets.HTML()
        self.pictures = Pictures()
        self.launcher = LaunchPanel(weakly(self._launch), namespace, data)
        self._hidden: list[Any] = []
        self.view = self._arranged()
        self._unsubscribe = lab.subscribe(self._event)
        self._paint_all()

    def _arranged(self) -> Any:
        candidates = _section("Candidates", self.table, flex="3 1 500px")
        knobs = _section("Knobs", self.knobs.view, flex="2 1 320px")
        top = ipywidgets.Box([candidates, knobs], layout={"flex_flow": "row wrap", "align_items": "flex-start"})
        top.add_class("harmony-columns")
        launch = _section("Launch", self.launcher.view, flex="0 0 auto")
        self._hidden = [top, self.pictures.view, launch]  # until there is a plan to show
        for part in self._hidden:
            part.layout.display = "none"
        view = ipywidgets.VBox(
            [
                ipywidgets.HTML(stylesheet_html()),
                self.header,
                self.progress,
                self.message,
                self.trouble,
                top,
                self.figures,
                self.pictures.view,
                launch,
                ControlNames(),
            ],
            layout={"width": "100%"},
        )
        view.add_class("harmony-lab")
        return view

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Do what is missing: profile and search, off this thread."""
        if self.lab.result is None or self.lab.chosen is None:
            self._hands.submit("prepare", self._prepare)

    def close(self) -> None:
        """Follow the Lab no longer and end the threads; the last state stays visible."""
        self._unsubscribe()
        self._hands.close()
        self._painter.close()
        self._painter.wait_idle(_PAINTING_S)
        self.knobs.enable(False)
        self.launcher.close()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)  # type: ignore[no-untyped-call]
        self.start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything asked for is done and painted; False when that took longer."""
        return self._hands.wait_idle(timeout_s) and self._painter.wait_idle(timeout_s)

    # -- what the user asks for -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.lab.prepare()

    def _choose_rank(self, rank: int) -> None:
        def choose() -> None:
            self._requests.forget()
            self.lab.choose(rank)

        self._hands.submit("choose", choose)

    def _turn(self, knobs: Knobs) -> None:
        number = self._requests.next_number()

        def choose() -> None:
            profile, base = self.lab.profile, self._base
            if profile is not None and base is not None:
                self._vary(lambda: knobs.apply(base, profile), number)

        self._hands.submit("choose", choose)

    def _choose_plan(self, plan: Plan) -> None:
        number = self._requests.next_number()

        def choose() -> None:
            self._base = plan
            self._vary(lambda: plan, number)

        self._hands.submit("choose", choose)

    def _reset(self) -> None:
        if self._reference is not None:
            self._choose_plan(self._reference.preview.plan)

    def _vary(self, make: Callable[[], Plan], number: int) -> None:
        """Choose a variation of the reference."""
        try:
            plan = make()
            self._requests.asked(plan, number)
            self.lab.choose(plan)
        except HarmonyError as error:
            self.knobs.complain(str(error))

    def _launch(self, data: Any, steps: int) -> None:
        def launch() -> None:
            try:
                self.lab.launch(data, steps)
            except Exception as error:
                self.launcher.complain(_in_words(error))
                self.launcher.enable(True)

        self._hands.submit("launch", launch)

    # -- what the Lab tells ---------------------------------------------------------------------------------------

    def _event(self, event: str) -> None:
        if event == "closed":
            self.close()
            self.message.value = note_html("This Lab is closed; the last state stays visible.")
            return
        paint = {
            "progress": self._paint_progress,
            "profile": self._paint_header,
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
        result = self.lab.result
        self._paint_header()
        if result is not None:
            self.progress.layout.display = "none"
            self.message.value = self.trouble.value = ""
            frame = result.to_frame()
            self.table.rows = candidate_rows(frame, _MOST_CANDIDATES)
            self.pictures.show_candidates(frame)

    def _paint_plan(self) -> None:
        preview, profile = self.lab.chosen, self.lab.profile
        if preview is None or profile is None:
            return
        plan, number = weighed(preview), self._requests.arrived(preview.plan)
        if number is None:
            self._refer_to(plan)
        if number is None or self._requests.is_newest(number):  # else the user has turned on: more is on its way
            self.knobs.show(preview.plan, profile)
        self.figures.value = tiles_html(tiles(plan, self._reference or plan), self._caption(), preview.problem)
        self.pictures.show_plan(preview.trace)
        self.knobs.enable(True)
        while self._hidden:
            self._hidden.pop().layout.display = "flex"
        self.launcher.enable(self.lab.run is None or not self.lab.run.active)

    def _refer_to(self, plan: Weighed) -> None:
        self._reference = plan
        self._base = plan.preview.plan
        self.table.mark(self._rank(self._base))

    def _rank(self, plan: Plan) -> int:
        result = self.lab.result
        shown = [] if result is None else [candidate.plan for candidate in result.candidates[:_MOST_CANDIDATES]]
        return shown.index(plan) if plan in shown else NONE_CHOSEN

    def _caption(self) -> str:
        rank = self.table.selected
        against = "the plan last chosen" if rank == NONE_CHOSEN else f"candidate {self.table.rows[rank][0]}"
        return (
            f"Predicted for one iteration; changes are against {against}. Peak: weights, gradients, activations and "
            "temporaries, the most that any timing of this plan can reach; the picture below shows that of this "
            "prediction. Swapped: both directions, all devices."
        )

    def _paint_run(self) -> None:
        run = self.lab.run
        if run is None:
            return
        self.launcher.follow(run)
        self.launcher.enable(not run.active and not self.lab.closed)
        if not run.active and run.trace is not None:
            self.pictures.show_measured(run.predicted, run.trace)

    def _failed(self, error: Exception) -> None:
        self.progress.layout.display = "none"
        self.message.value = ""
        self.trouble.value = error_html(_in_words(error))


class _Requests:
    """Plans that this view asked the Lab to choose and that may still arrive, oldest first.

    They tell a variation of the reference from a plan that was chosen elsewhere, and the newest from one that the user
    has moved on from.  A number is given when the user turns, the plan follows on another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = 0
        self._plans: list[tuple[Plan, int]] = []

    def next_number(self) -> int:
        with self._lock:
            self._newest += 1
            return self._newest

    def is_newest(self, number: int) -> bool:
        return number == self._newest

    def asked(self, plan: Plan, number: int) -> None:
        with self._lock:
            self._plans.append((plan, number))

    def arrived(self, plan: Plan) -> int | None:
        """The number of the request that this plan answers, None for one from elsewhere; older requests are dropped."""
        with self._lock:
            for position in reversed(range(len(self._plans))):
                if self._plans[position][0] == plan:
                    del self._plans[:position]
                    return self._plans[0][1]
        return None

    def forget(self) -> None:
        with self._lock:
            self._plans.clear()


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, HarmonyError) else f"{type(error).__name__}: {error}"


def _section(title: str, content: Any, *, flex: str) -> Any:
    heading = ipywidgets.HTML(f"<h4>{title}</h4>")
    return ipywidgets.VBox([heading, content], layout={"flex": flex, "min_width": "0"})
