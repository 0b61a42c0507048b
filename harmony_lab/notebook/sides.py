"""Sides: the plans of a Lab that can be looked at beside others, by key."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.figures.comparison import Side
from harmony_lab.notebook.baselines_elsewhere import Told
from harmony_lab.notebook.candidates import Line, baseline_line
from harmony_lab.notebook.compare_panel import Option
from harmony_lab.notebook.contenders import Contenders
from harmony_lab.notebook.text import Weighed, side, weighed
from harmony_lab.plan import Plan
from harmony_lab.planner.search import SearchResult
from harmony_lab.trace import Trace

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["Sides"]

_AT_HAND, _WHAT_IF = "plan", "what-if"


class Sides:
    """The chosen plan, the best ``shown`` candidates, baselines, and what ``elsewhere()`` gives: the best plan of the
    machine that was asked about, if any.
    """

    def __init__(self, lab: "Lab", shown: int, elsewhere: Callable[[], Weighed | None]) -> None:
        self._lab = lab
        self._shown = shown
        self._elsewhere = elsewhere
        self._contenders: dict[int, Contenders] = {}  # for minibatches of that many samples
        self._weighed: tuple[SearchResult, dict[int, Weighed]] | None = None  # candidates of that result, by rank

    def best_plans(self) -> list[Plan]:
        result = self._lab.result
        return [] if result is None else [candidate.plan for candidate in result.candidates[: self._shown]]

    def candidate_traces(self) -> tuple[Sequence[str], Sequence[Trace]]:
        """Names and predicted iterations of the candidates."""
        ranks = range(len(self.best_plans()))
        found = [self._candidate(rank) for rank in ranks]
        return [f"candidate {rank}" for rank in ranks], [one.preview.trace for one in found if one is not None]

    def _candidate(self, rank: int) -> Weighed | None:
        """Simulated once per search."""
        result = self._lab.result
        if result is None or rank >= len(result.candidates):
            return None
        known = self._weighed
        if known is None or known[0] is not result:
            known = self._weighed = result, {}
        if rank not in known[1]:
            known[1][rank] = weighed(self._lab.preview(result.candidates[rank].plan))
        return known[1][rank]

    def _baselines(self, minibatch_size: int) -> Contenders:
        own, found = self._lab.minibatch_size, self._contenders.get(minibatch_size)
        if found is None:
            found = Contenders(self._lab.machine, minibatch_size)
            kept = {size: known for size, known in self._contenders.items() if size == own}
            self._contenders = {**kept, minibatch_size: found}
        return found

    @property
    def baselines(self) -> Sequence[str]:
        return Contenders.names

    def baseline_line(self, name: str, profile: Profile) -> Line:
        """A baseline as a row of the table of candidates; it may take seconds."""
        try:
            side = self._baselines(self._lab.minibatch_size).side(name, profile)
        except HarmonyError as error:
            return self.line(Told(name, str(error)))
        trace = side.trace
        told = Told(name, side.plan, trace.makespan_s, side.peak_bytes, trace.swap_bytes, trace.bubble_fraction)
        return self.line(told)

    def line(self, told: Told) -> Line:
        """As a row of the table."""
        lab = self._lab
        bound_s = 0.0 if lab.result is None else lab.result.lower_bound_s
        return baseline_line(told, lab.machine, lab.minibatch_size, bound_s)

    def options(self) -> list[Option]:
        """What there is, as (words, key)."""
        ranks = [(f"candidate {rank}", str(rank)) for rank in range(len(self.best_plans()))]
        options: list[Option] = [("the plan at hand", _AT_HAND), *ranks]
        options += [(f"baseline: {name}", name) for name in Contenders.names]
        if self._elsewhere() is not None:
            options.append(("the best plan of the what-if machine", _WHAT_IF))
        return options

    def side(self, key: str) -> Side | None:
        """None where it is not there any more, or not yet."""
        lab = self._lab
        if key in Contenders.names:
            size = lab.minibatch_size if lab.plan is None else lab.plan.minibatch_size
            return None if lab.profile is None else self._baselines(size).side(key, lab.profile)
        if key == _AT_HAND:
            return None if lab.chosen is None else side("the plan at hand", weighed(lab.chosen))
        if key == _WHAT_IF:
            best = self._elsewhere()
            return None if best is None else side(f"best on {best.preview.trace.machine.name}", best)
        candidate = self._candidate(int(key)) if key.isdigit() else None
        return None if candidate is None else side(f"candidate {key}", candidate)
