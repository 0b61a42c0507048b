"""SearchResult: the plans that a search has found, what it says of them and why others were not possible."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.machine import HOST, Direction, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.program import Stream
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["Candidate", "Rejected", "SearchResult", "what_binds"]


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
        """How much longer the best plan takes than the lower bound: 0.1 is 10 %."""
        return self.candidates[0].step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    def explain(self) -> str:
        """What binds the best plan, in a sentence; and whether it is plain training."""
        sentence = what_binds(self.best_trace, self.candidates[0].peak_bytes)
        if len(self.best.backward_packs) == 1:
            sentence += (
                "  The whole model is one pack: weights come in once, gradients go out once, nothing else moves."
            )
        return sentence

    def to_frame(self) -> "pandas.DataFrame":
        """A row per candidate, best first."""
        import pandas

        return pandas.DataFrame(
            {
                "rank": rank,
                "plan": str(candidate.plan),
                "mode": str(candidate.plan.mode),
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

    def __repr__(self) -> str:
        best = self.candidates[0]
        return (
            f"SearchResult: {len(self.candidates)} candidates, best {format_seconds(best.step_s)} an iteration "
            f"({self.gap:.0%} above the lower bound): {best.plan}"
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


def what_binds(trace: Trace, peaks: Sequence[int]) -> str:
    """One sentence: what is busiest, and the fullest device."""
    machine = trace.machine
    shares = [trace.busy_fraction(device, Stream.COMPUTE) for device in range(machine.num_devices)]
    compute = sum(shares) / len(shares)
    busiest, most = "", 0.0
    for hop, capacity in machine.capacities.items():
        moved = sum(num_bytes for (other, _), num_bytes in trace.link_bytes.items() if other == hop)
        share = moved / capacity / trace.makespan_s if trace.makespan_s else 0.0
        if share > most:
            way = "to the devices" if hop.direction is Direction.DOWN else "from the devices"
            busiest, most = f"link {hop.link} {way}", share
    host = trace.busy_fraction(HOST, Stream.HOST)
    reasons = {f"computing ({compute:.0%} of the time)": compute, f"the {busiest} ({most:.0%} busy)": most}
    reasons[f"the update on the host ({host:.0%} of the time)"] = host
    first, second, *_ = sorted(reasons, key=lambda reason: -reasons[reason])
    fullest = max(range(len(peaks)), key=lambda device: peaks[device] / machine.budgets[device])
    return (
        f"What binds is {first}, then {second}; {machine.devices[fullest].name} needs up to "
        f"{format_bytes(peaks[fullest])} of {format_bytes(machine.budgets[fullest])}."
    )
