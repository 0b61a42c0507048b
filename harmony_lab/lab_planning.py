"""Planning: one model's layers on one machine, from profile to a chosen plan; no training."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from harmony_lab.compiled import is_ready, say_so, wait_for_compiling
from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.lab_costs import costs_on, why_only_planned
from harmony_lab.layers import LayerSequence
from harmony_lab.listeners import Listeners
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.search import SearchResult, Switches
from harmony_lab.planner.searches import Searches
from harmony_lab.precision import Precision
from harmony_lab.preview import Preview, preview, repacked
from harmony_lab.profiler.steps import ProgressCallback
from harmony_lab.progress import Progress
from harmony_lab.trace import Trace

if TYPE_CHECKING:
    import torch

__all__ = ["Planning"]


class Planning:
    """What a Lab knows and does before it trains: ``measure``, ``search``, ``preview``, ``choose``."""

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: "torch.optim.Optimizer | None",
        machine: Machine,
        minibatch_size: int,
        precision: Precision,
    ) -> None:
        self.layers, self.optimizer, self.machine, self.minibatch_size = layers, optimizer, machine, minibatch_size
        self.searches = Searches()
        self._precision = precision
        self._state = threading.RLock()  # held for moments: fields below
        self._work = threading.RLock()  # held for long: one measurement, search or launch at a time
        self._listeners = Listeners()
        self._profiles: dict[Precision, Profile] = {}
        self._result: SearchResult | None = None
        self._preview: Preview | None = None
        self._progress: Progress | None = None
        self._closed = False

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        """Of the chosen plan; before, what was asked for."""
        return self._precision

    @property
    def profile(self) -> Profile | None:
        """In that precision."""
        return self._profiles.get(self._precision)

    def has_profile(self, precision: Precision | str) -> bool:
        """Whether layers have been profiled in that precision: choosing a plan of another one takes as long."""
        return Precision.of(precision) in self._profiles

    @property
    def result(self) -> SearchResult | None:
        """The last search's ranking."""
        return self._result

    @property
    def plan(self) -> Plan | None:
        """The chosen plan: the best one after a search, until ``choose`` takes another."""
        preview = self._preview
        return None if preview is None else preview.plan

    @property
    def predicted(self) -> Trace | None:
        """The chosen plan's simulated iteration."""
        preview = self._preview
        return None if preview is None else preview.trace

    @property
    def chosen(self) -> Preview | None:
        """The chosen plan with its program and simulated iteration."""
        return self._preview

    @property
    def only_planned(self) -> str:
        """Why this Lab estimates costs and cannot train, in a sentence; empty where it measures and trains."""
        return why_only_planned(self.layers, self.machine)

    @property
    def progress(self) -> Progress | None:
        """How far the part under way is; None between parts."""
        return self._progress

    @property
    def closed(self) -> bool:
        return self._closed

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call back with each event's name; returns what ends the subscription."""
        return self._listeners.subscribe(callback)

    # -- from profile to plan -------------------------------------------------------------------------------------

    def measure(self, progress: ProgressCallback | None = None, *, cache: bool = True) -> Profile:
        """Profile every kind of layer on the machine's devices.  Forgets profiles and results from before.

        ``cache=False``: measure also what was measured before.  A machine that is not at hand is estimated.
        """
        with self._work:
            measured = self._measured(self._precision, progress, cache=cache)
            with self._state:
                self._profiles, self._result, self._preview = {self._precision: measured}, None, None
        self._listeners.notify("profile")
        return measured

    def _measured(
        self, precision: Precision, progress: ProgressCallback | None = None, *, cache: bool = True
    ) -> Profile:
        self._must_be_free("measure")
        try:
            return costs_on(
                self.layers,
                self.machine,
                self.optimizer,
                precision=precision,
                minibatch_size=self.minibatch_size,
                cache=cache,
                progress=self._reporter("profile", progress),
            )
        finally:
            self._progress = None

    def _costs_in(self, precision: Precision, progress: ProgressCallback | None = None) -> Profile:
        """The profile in that precision, measured where there is none."""
        found = self._profiles.get(precision)
        if found is not None:
            return found
        with self._work:
            found = self._profiles.get(precision) or self._measured(precision, progress)
            with self._state:
                self._profiles = {**self._profiles, precision: found}
        if precision is self._precision:
            self._listeners.notify("profile")
        return found

    def search(
        self,
        progress: ProgressCallback | None = None,
        *,
        modes: Sequence[Mode | str] = tuple(Mode),
        precisions: Sequence[Precision | str] = (),
        max_grad_norm: float | None = None,
    ) -> SearchResult:
        """Rank the plans that fit and choose the best; profiles first where that was not done yet.

        ``precisions``: to rank plans of together, by default the Lab's alone.  ``max_grad_norm``: as ``launch`` will
        have it; plans are then ranked by what they take where updates wait for the norm of all gradients.

        Raises ``PlanDoesNotFitError`` when nothing fits, naming what is missing.
        """
        with self._work:
            self._must_be_open("search")
            wanted = [Precision.of(precision) for precision in precisions] or [self._precision]
            measured = [self._costs_in(precision, progress) for precision in dict.fromkeys(wanted)]
            report = self._reporter("search", progress)
            if not is_ready():
                report(0, 1, "the planner is being compiled, once; a minute or more")
            wait_for_compiling(say_so if progress is None and not self._listeners else None)
            try:
                result = self.searches.search(
                    measured,
                    self.machine,
                    self.minibatch_size,
                    modes=tuple(Mode(mode) for mode in modes),
                    switches=Switches(deferred_updates=max_grad_norm is not None),
                    progress=report,
                )
            finally:
                self._progress = None
            with self._state:
                self._result = result
            self._listeners.notify("result")
            self.choose(result.best)
        return result

    def prepare(self, progress: ProgressCallback | None = None) -> Self:
        """Do whatever of measuring, searching and choosing was not done yet."""
        with self._work:
            if self._result is None or self._preview is None:
                self.search(progress)
        return self

    def preview(self, plan: Plan | str) -> Preview:
        """Lower and simulate a plan or its text, also one that does not fit; nothing is chosen."""
        self._must_be_open("preview")
        plan = Plan.of(plan)
        return preview(plan, self._costs_in(plan.precision), self.machine)

    def choose(self, plan: Plan | str | int) -> Preview:
        """Take that plan (or its text), or that rank of the last search (0 is the best), for the next launch.

        A plan of another precision than the last is profiled for first, unless that was done before.

        A plan that does not fit can be looked at; ``launch`` refuses it.
        """
        with self._work:  # so that no other profile arrives between
            preview = self.preview(self._candidate(plan) if isinstance(plan, int) else plan)
            with self._state:
                switched = self._precision is not preview.plan.precision
                self._preview, self._precision = preview, preview.plan.precision
        if switched:
            self._listeners.notify("profile")
        self._listeners.notify("plan")
        return preview

    def _candidate(self, rank: int) -> Plan:
        if self._result is None:
            raise HarmonyError(f"there is no ranking to take rank {rank} from: call search() first")
        candidates = self._result.candidates
        if not 0 <= rank < len(candidates):
            raise HarmonyError(
                f"the ranking has {len(candidates)} plans, 0 to {len(candidates) - 1}; rank {rank} was asked for"
            )
        return candidates[rank].plan

    def with_packs(
        self,
        *,
        num_forward_packs: int | None = None,
        num_backward_packs: int | None = None,
        plan: Plan | None = None,
        **knobs: Any,
    ) -> Plan:
        """``plan``, by default the chosen one, with other numbers of packs and knobs; see ``preview.repacked``."""
        base = plan or self.plan or self.prepare().plan
        assert base is not None
        return repacked(
            base,
            self._costs_in(base.precision),
            num_forward_packs=num_forward_packs,
            num_backward_packs=num_backward_packs,
            **knobs,
        )

    def _must_be_open(self, what: str) -> None:
        if self._closed:
            raise HarmonyError(f"cannot {what}: this Lab is closed, by close() or by a newer Lab over the same model")

    def _must_be_free(self, what: str) -> None:
        """To be open, and to have nothing else at work on the devices."""
        self._must_be_open(what)

    def _reporter(self, stage: str, callback: ProgressCallback | None) -> ProgressCallback:
        def report(done: int, total: int, text: str) -> None:
            self._progress = Progress(stage=stage, done=done, total=total, text=text)
            self._listeners.notify("progress")
            if callback is not None:
                callback(done, total, text)

        return report
