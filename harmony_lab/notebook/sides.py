"""Sides: the plans of a Lab that can be looked at beside others, by key."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from harmony_lab.figures.comparison import Side
from harmony_lab.notebook.compare_panel import Option
from harmony_lab.notebook.contenders import Contenders
from harmony_lab.notebook.text import Weighed, side, weighed
from harmony_lab.plan import Plan
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
        self._contenders = Contenders(lab.machine, lab.minibatch_size)

    def best_plans(self) -> list[Plan]:
        result = self._lab.result
        return [] if result is None else [candidate.plan for candidate in result.candidates[: self._shown]]

    def candidate_traces(self) -> tuple[Sequence[str], Sequence[Trace]]:
        """Names and predicted iterations of the candidates."""
        plans = self.best_plans()
        return [f"candidate {rank}" for rank in range(len(plans))], [self._lab.preview(plan).trace for plan in plans]

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
            return None if lab.profile is None else self._contenders.side(key, lab.profile)
        if key == _AT_HAND:
            return None if lab.chosen is None else side("the plan at hand", weighed(lab.chosen))
        if key == _WHAT_IF:
            best = self._elsewhere()
            return None if best is None else side(f"best on {best.preview.trace.machine.name}", best)
        plans = self.best_plans()
        if not key.isdigit() or int(key) >= len(plans):
            return None
        return side(f"candidate {key}", weighed(lab.preview(plans[int(key)])))
