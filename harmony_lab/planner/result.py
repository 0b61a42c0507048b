"""SearchResult: the plans that a search has found, what it says of them and why others were not possible."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.emulation import NOTHING, emulation_on
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.explain import Advice, advice, what_binds
from harmony_lab.planner.explain_waiting import waiting_for_gradients
from harmony_lab.planner.lower import lower
from harmony_lab.simulator.engine import makespan_s, run
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["Candidate", "Rejected", "SearchResult"]

_HELPS_TOLD = 2
_NO_GAP = 0.0005


class _Details(NamedTuple):
    peak_bytes: tuple[int, ...]
    swap_bytes: int
    peer_bytes: int
    bubble_fraction: float


@dataclass(frozen=True)
class Candidate:
    """A plan and what the simulator says of it; all but ``step_s`` is worked out when first asked for."""

    plan: Plan
    step_s: float
    profile: Profile = field(repr=False, compare=False)
    machine: Machine = field(repr=False, compare=False)

    def trace(self) -> Trace:
        """The predicted iteration."""
        return run(lower(self.plan, self.profile, self.machine), self.profile, self.machine)

    @cached_property
    def _details(self) -> _Details:
        trace = self.trace()
        return _Details(peak_bytes(trace.program), trace.swap_bytes, trace.peer_bytes, trace.bubble_fraction)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per device, the most alive at once under any timing."""
        return self._details.peak_bytes

    @property
    def swap_bytes(self) -> int:
        return self._details.swap_bytes

    @property
    def peer_bytes(self) -> int:
        return self._details.peer_bytes

    @property
    def bubble_fraction(self) -> float:
        return self._details.bubble_fraction

    def _repr_html_(self) -> str:
        return f"{self.plan._repr_html_()}{self.trace()._repr_html_()}"


class Rejected(NamedTuple):
    """Plans that were not possible, and why."""

    description: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Candidates, best first.

    ``lower_bound_s``: no plan of these modes and switches for this minibatch can be faster.  ``num_bounded``:
    candidates ruled out by bounds and forecasts; ``num_skipped``: promising ones that were not simulated because enough
    had been.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    lower_bound_s: float
    num_bounded: int = 0
    num_skipped: int = 0

    @property
    def best(self) -> Plan:
        return self.candidates[0].plan

    @cached_property
    def best_trace(self) -> Trace:
        """The best plan's predicted iteration."""
        return self.candidates[0].trace()

    @property
    def gap(self) -> float:
        """How much longer the best plan takes than the lower bound: 0.1 is 10%."""
        return self.candidates[0].step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What would make the best plan faster, most useful first."""
        best = self.candidates[0]
        return advice(best.plan, best.profile, best.machine)

    def explain(self) -> str:
        """What binds the best plan, how far it is from the bound, whether it is plain training, and what would help."""
        return self._explanation

    @cached_property
    def _explanation(self) -> str:
        best = self.candidates[0]
        sentences = [what_binds(best.plan, self.best_trace, best.peak_bytes), self._distance()]
        if emulation_on(best.machine, best.profile.emulation) is not NOTHING:
            costs = replace(best.profile, emulation=None)
            share = 1 - makespan_s(self.best_trace.program, costs, best.machine) / best.step_s
            sentences.append(f"{share:.0%} of the step is what emulating devices takes beside kernels and links.")
        if _moves_state_alone(best.plan):
            whole = "The whole model is one pack" if len(best.plan.backward_packs) == 1 else "Everything stays in place"
            here = len(best.plan.device_updates) == len(best.plan.backward_packs)
            goes = "updated weights go out once" if here else "gradients go out once"
            sentences.append(f"{whole}, as in plain training: weights come in once, {goes}, nothing else moves.")
        if not best.plan.just_in_time_update:
            waits = waiting_for_gradients(best.plan, best.step_s, best.plan, best.profile, best.machine)
            sentences.append(f"{waits[0].upper()}{waits[1:]}.")
        if self.advice:
            sentences.append(f"What would help: {'; '.join(map(str, self.advice[:_HELPS_TOLD]))}.")
        return "  ".join(sentences)

    def _distance(self) -> str:
        if not self.lower_bound_s:
            return "There is no lower bound to compare with."
        bound = format_seconds(self.lower_bound_s)
        if self.gap < _NO_GAP:
            return f"No such plan can be faster: the lower bound is {bound}."
        return f"The step is {self.gap:.1%} above {bound}, a bound that no plan of these modes and switches can beat."

    def to_frame(self) -> "pandas.DataFrame":
        """A row per candidate, best first."""
        import pandas

        return pandas.DataFrame(
            {
                "rank": rank,
                "plan": str(candidate.plan),
                "mode": str(candidate.plan.mode),
                "precision": str(candidate.plan.precision),
                "forward_microbatch_size": candidate.plan.forward_microbatch_size,
                "backward_microbatch_size": candidate.plan.backward_microbatch_size,
                "num_forward_packs": len(candidate.plan.forward_packs),
                "num_backward_packs": len(candidate.plan.backward_packs),
                "step_s": candidate.step_s,
                "samples_per_s": candidate.plan.minibatch_size / candidate.step_s,
                "peak_bytes": max(candidate.peak_bytes),
                "swap_bytes": candidate.swap_bytes,
                "peer_bytes": candidate.peer_bytes,
                "bubble_fraction": candidate.bubble_fraction,
                "gap": candidate.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0,
            }
            for rank, candidate in enumerate(self.candidates)
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary: candidates, bound, rejected plans and the explanation, for other programs to
        read."""
        best = self.candidates[0]
        return {
            "schema": "harmony_lab.search_result",
            "version": 1,
            "model": best.profile.model,
            "machine": best.machine.to_json(),
            "minibatch_size": best.plan.minibatch_size,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "explanation": self.explain(),
            "advice": [one._asdict() for one in self.advice],
            "candidates": [
                {
                    "plan": candidate.plan.to_json(),
                    "text": str(candidate.plan),
                    "step_s": candidate.step_s,
                    "peak_bytes": list(candidate.peak_bytes),
                    "swap_bytes": candidate.swap_bytes,
                    "peer_bytes": candidate.peer_bytes,
                    "bubble_fraction": candidate.bubble_fraction,
                }
                for candidate in self.candidates
            ],
            "rejected": [rejected._asdict() for rejected in self.rejected],
            "num_bounded": self.num_bounded,
            "num_skipped": self.num_skipped,
        }

    def __repr__(self) -> str:
        best, count = self.candidates[0], len(self.candidates)
        return (
            f"SearchResult: {count} candidate{'s' if count > 1 else ''}, best {format_seconds(best.step_s)} an "
            f"iteration ({self.gap:.0%} above the lower bound): {best.plan}"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{rank}</td><td>{candidate.plan.mode}</td><td>{candidate.plan.forward_microbatch_size} / "
            f"{candidate.plan.backward_microbatch_size}</td><td>{len(candidate.plan.forward_packs)} / "
            f"{len(candidate.plan.backward_packs)}</td><td>{format_seconds(candidate.step_s)}</td>"
            f"<td>{format_bytes(max(candidate.peak_bytes))}</td><td>{format_bytes(candidate.swap_bytes)}</td>"
            f"<td>{candidate.bubble_fraction:.0%}</td></tr>"
            for rank, candidate in enumerate(self.candidates[:10])
        )
        return (
            f"<p>{escape(repr(self))}</p><p>{escape(self.explain())}</p><table><thead><tr><th>rank</th><th>mode</th>"
            "<th>microbatch forward / backward</th><th>packs forward / backward</th><th>step</th><th>peak memory</th>"
            f"<th>swapped</th><th>idle</th></tr></thead><tbody>{rows}</tbody></table>"
        )


def _moves_state_alone(plan: Plan) -> bool:
    """Whether what is computed stays where it is, and weights until their last use."""
    packs = plan.backward_packs
    stays = set(plan.forward_packs) == set(plan.resident_packs) == set(plan.kept_packs)
    stashed = {pack.start for pack in packs[1:]} == set(plan.device_stash)
    alike = len(plan.device_updates) in (0, len(packs))
    if len(packs) == 1:
        return plan.mode is Mode.PP or plan.num_devices == 1  # else every device has its own, and gradients meet
    return plan.num_devices == 1 and stays and stashed and alike
