"""AtRest: what a dashboard finds out once nobody turns any more: what every knob does, what a run takes, baselines."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from harmony_lab.costs import Profile
from harmony_lab.lab_costs import forecast_on
from harmony_lab.notebook.baselines_elsewhere import BaselinesElsewhere, is_large
from harmony_lab.notebook.candidates import CandidateTable, Line, pending_line
from harmony_lab.notebook.effects import effects
from harmony_lab.notebook.knob_panel import KnobPanel
from harmony_lab.notebook.launch_panel import LaunchPanel
from harmony_lab.notebook.sides import Sides
from harmony_lab.notebook.text import Weighed
from harmony_lab.notebook.worker import Worker
from harmony_lab.plan import Plan

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["AtRest"]

_AFTER_S = 0.3  # so that nobody who still turns waits for it


class AtRest:
    """A thread of its own that does one short piece at a time; ``show_plan`` makes it leave what it does for the plan
    before.  A large model's baselines come from a process, which another thread listens to."""

    def __init__(
        self,
        lab: "Lab",
        sides: Sides,
        parts: tuple[CandidateTable, KnobPanel, LaunchPanel],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._lab = lab
        self._sides = sides
        self._table, self._knobs, self._launcher = parts
        self._num_shown = 0  # plans
        self._worker = Worker("harmony-lab dashboard effects", on_error, delay_s=_AFTER_S)
        self._listener = Worker("harmony-lab dashboard baselines", on_error)
        self._elsewhere: BaselinesElsewhere | None = None

    def close(self) -> None:
        self._num_shown += 1  # nobody wants to know any more
        self._worker.close()
        self._listener.close()
        if self._elsewhere is not None:
            self._elsewhere.stop()

    def wait_idle(self, timeout_s: float) -> bool:
        """As ``Worker.wait_idle``."""
        return self._listener.wait_idle(timeout_s) and self._worker.wait_idle(timeout_s)

    def rank(self, ranking: list[Line], profile: Profile) -> None:
        """Show the ranking now, and one baseline after the other below it."""
        lab, result, names = self._lab, self._lab.result, self._sides.baselines
        found: list[Line] = []

        def show() -> None:
            if self._lab.result is result:
                self._table.show(ranking, [*found, *(pending_line(name) for name in names[len(found) :])])

        def add() -> None:
            number = self._num_shown
            while len(found) < len(names) and self._lab.result is result:
                found.append(self._sides.baseline_line(names[len(found)], profile))
                show()
                if number != self._num_shown:  # first what that plan's knobs do
                    self._worker.submit("baselines", add)
                    return

        def listen() -> None:
            with contextlib.suppress(OSError):  # where no process can be started
                self._elsewhere = BaselinesElsewhere(profile, lab.machine, lab.minibatch_size, names)
            for told in () if self._elsewhere is None else self._elsewhere.answers():
                found.append(self._sides.line(told))
                show()
            if len(found) < len(names) and self._lab.result is result:  # the process has ended early
                self._worker.submit("baselines", add)

        show()
        if self._elsewhere is not None:
            self._elsewhere.stop()
            self._elsewhere = None
        if is_large(profile, lab.machine, lab.minibatch_size):
            self._listener.submit("baselines", listen)
        else:
            self._worker.submit("baselines", add)

    def show_plan(self, plan: Weighed, reference: Plan, base: Plan, profile: Profile) -> None:
        """Find what training with that plan takes, and the effect of every knob; see ``effects``."""
        self._num_shown += 1
        number = self._num_shown

        def weigh() -> None:
            lab, trace = self._lab, plan.preview.trace
            if lab.optimizer is not None:
                expected = forecast_on(lab.machine, plan.preview, lab.layers, lab.optimizer, profile)
                self._launcher.expect(trace.makespan_s, expected)
            for effect in effects(plan, reference, base, profile, lab.preview, wanted, lab.has_profile):
                self._knobs.show_effect(effect)

        def wanted() -> bool:
            return number == self._num_shown

        self._worker.submit("effects", weigh)
