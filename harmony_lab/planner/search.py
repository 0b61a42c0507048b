"""search: the plans worth having for a profile and a machine, best first.

As in the Harmony paper (section 4.3): for every backward microbatch size, backward packs balanced in time under the
memory cap; for every forward microbatch size likewise for forward packs; every candidate is lowered and simulated.
Candidates are taken in the order of a lower bound on their iteration; once the bound reaches the best found, the rest
cannot be better.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import HOST, Direction, Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.bounds import candidate_bound, problem_bound
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts, largest_fitting_packs
from harmony_lab.program import Stream
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["Candidate", "Rejected", "SearchResult", "search"]

Progress = Callable[[int, int, str], None]
MAX_OPS = 80_000
"""Ops simulated in one search at most; candidates beyond are reported as not simulated."""
_MORE_PACKS = 8  # numbers of packs tried above the least that fits
_SHOWN_PER_MODE = 16  # candidates simulated in each mode even if they cannot win, to choose from
_WORTHWHILE = 0.995  # a bound above this share of the best iteration promises nothing


class Candidate(NamedTuple):
    """A plan and what the simulator says of it.  ``peak_bytes``: per device, the most alive at once under any
    timing."""

    plan: Plan
    step_s: float
    peak_bytes: tuple[int, ...]
    swap_bytes: int
    peer_bytes: int
    bubble_fraction: float


class Rejected(NamedTuple):
    """Plans that were not possible, and why."""

    description: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Candidates, best first.

    ``lower_bound_s``: no plan of these modes for this minibatch can be faster.  ``best_trace``: the best plan's
    predicted iteration.  ``num_bounded``: candidates not simulated because their bound was no better than the best
    plan; ``num_skipped``: because the search had simulated enough.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    lower_bound_s: float
    best_trace: Trace
    num_bounded: int = 0
    num_skipped: int = 0

    @property
    def best(self) -> Plan:
        return self.candidates[0].plan

    @property
    def gap(self) -> float:
        """How much longer the best plan takes than the lower bound: 0.1 is 10 %."""
        return self.candidates[0].step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    def explain(self) -> str:
        """What binds the best plan, in a sentence."""
        return what_binds(self.best_trace, self.candidates[0].peak_bytes)

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


def search(
    profile: Profile,
    machine: Machine,
    minibatch_size: int,
    *,
    modes: Sequence[Mode | str] = (Mode.DP, Mode.PP),
    progress: Progress | None = None,
) -> SearchResult:
    """Plans for that minibatch on every device of the machine, best first.

    ``progress(done, total, what)`` is called after each candidate; what it raises ends the search.  Raises
    ``PlanDoesNotFitError`` where no plan fits, naming the layer that is too large, its bytes and the budget.
    """
    return _Search(profile, machine, minibatch_size, [Mode(mode) for mode in modes]).result(progress)


class _Search:
    def __init__(self, profile: Profile, machine: Machine, minibatch_size: int, modes: Sequence[Mode]) -> None:
        self.profile, self.machine, self.minibatch_size = profile, machine, minibatch_size
        self.costs = PackCosts(profile)
        self.budget = min(machine.budgets)
        self.devices = tuple(range(machine.num_devices))
        self.rejected: dict[Rejected, None] = {}
        usable = [mode for mode in modes if mode is Mode.PP or not self._dp_problem()]
        # On one device the modes are the same program.
        self.modes = usable[:1] if machine.num_devices == 1 else usable

    def _dp_problem(self) -> bool:
        problem = ""
        if self.minibatch_size < self.machine.num_devices:
            problem = f"a minibatch of {self.minibatch_size} cannot be dealt to {self.machine.num_devices} devices"
        elif self.profile.serial_buffers and self.machine.num_devices > 1:
            problem = f"buffers depend on the order of microbatches: {', '.join(self.profile.serial_buffers[:3])}"
        if problem:
            self.rejected[Rejected("dp", problem)] = None
        return bool(problem)

    def result(self, progress: Progress | None) -> SearchResult:
        plans = [list(dict.fromkeys(self._plans(mode))) for mode in self.modes]
        total = sum(map(len, plans))
        found: list[Candidate] = []
        best_trace: Trace | None = None
        num_ops = num_bounded = num_skipped = 0
        for of_mode in plans:
            ordered = sorted(((self._promise(plan), plan) for plan in of_mode), key=lambda pair: pair[0])
            for position, ((bound, _), plan) in enumerate(ordered):
                if best_trace is not None and position >= _SHOWN_PER_MODE:
                    if bound >= _WORTHWHILE * best_trace.makespan_s:
                        num_bounded += len(ordered) - position
                        break
                    if num_ops > MAX_OPS:
                        num_skipped += len(ordered) - position
                        break
                candidate, trace = self._simulate(plan)
                if candidate is not None and trace is not None:
                    found.append(candidate)
                    num_ops += len(trace.program.ops)
                    if best_trace is None or trace.makespan_s < best_trace.makespan_s:
                        best_trace = trace
                if progress is not None and best_trace is not None:
                    done = len(found) + num_bounded + num_skipped
                    progress(min(done, total), total, f"best {format_seconds(best_trace.makespan_s)}")
        if best_trace is None:
            raise self._nothing_fits()
        found.sort(key=lambda candidate: candidate.step_s)  # stable: of equals, the one with fewer launches
        if progress is not None:
            progress(total, total, f"best {format_seconds(best_trace.makespan_s)}")
        return SearchResult(
            candidates=tuple(found),
            rejected=tuple(self.rejected),
            lower_bound_s=problem_bound(self.costs, self.machine, self.minibatch_size),
            best_trace=best_trace,
            num_bounded=num_bounded,
            num_skipped=num_skipped,
        )

    def _promise(self, plan: Plan) -> tuple[float, int]:
        """What candidates are ordered by: the bound to three digits, then how many microbatches there are to launch."""
        bound = candidate_bound(plan, self.costs, self.machine)
        launches = len(plan.forward_packs) * -(-plan.minibatch_size // plan.forward_microbatch_size)
        launches += len(plan.backward_packs) * -(-plan.minibatch_size // plan.backward_microbatch_size)
        return float(f"{bound:.3g}"), launches

    def _simulate(self, plan: Plan) -> tuple[Candidate | None, Trace | None]:
        try:
            program = lower(plan, self.profile, self.machine, costs=self.costs)
        except PlanDoesNotFitError as error:
            self.rejected[Rejected(str(plan), str(error))] = None
            return None, None
        trace = run(program, self.profile, self.machine)
        candidate = Candidate(
            plan, trace.makespan_s, peak_bytes(program), trace.swap_bytes, trace.peer_bytes, trace.bubble_fraction
        )
        return candidate, trace

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _plans(self, mode: Mode) -> Iterator[Plan]:
        sizes = self._sizes(mode)
        for backward_size in sizes:
            for backward_packs in self._packs(mode, backward_size, 0, len(self.profile), forward=False, stash_at=()):
                yield from self._with_forward(mode, sizes, backward_size, backward_packs)

    def _with_forward(
        self, mode: Mode, sizes: Sequence[int], backward_size: int, backward_packs: tuple[Pack, ...]
    ) -> Iterator[Plan]:
        stop = backward_packs[-1].start
        starts = [pack.start for pack in backward_packs[1:]]
        tied = bool(self.profile.couples_samples) or not all(self.profile.splits_at(start) for start in starts)
        for size in [backward_size] if tied or stop == 0 else sizes:
            options: Iterable[tuple[Pack, ...]] = [()]
            if stop > 0:
                options = self._packs(mode, size, 0, stop, forward=True, stash_at=tuple(starts))
            for forward_packs in options:
                yield Plan(
                    mode=mode,
                    minibatch_size=self.minibatch_size,
                    forward_microbatch_size=size,
                    forward_packs=forward_packs,
                    backward_microbatch_size=backward_size,
                    backward_packs=backward_packs,
                    devices=self.devices,
                    fingerprint=self.profile.fingerprint,
                )

    def _sizes(self, mode: Mode) -> list[int]:
        """Microbatch sizes to try: the measured ones and the largest that there is use for.

        None that leaves a rest smaller than the smallest measured one; if they all do, any size between that does not.
        """
        count = self.machine.num_devices if mode is Mode.DP else 1
        shares = {self.minibatch_size // count, -(-self.minibatch_size // count)}
        smallest, largest = self.profile.microbatch_sizes[0], min(max(shares), self.profile.largest_microbatch)
        usable = [
            size
            for size in range(smallest, largest + 1)
            if all(min(share, share % size or size) >= smallest for share in shares)
        ]
        return [size for size in usable if size in {*self.profile.microbatch_sizes, largest}] or usable

    def _packs(
        self, mode: Mode, size: int, start: int, stop: int, *, forward: bool, stash_at: tuple[int, ...]
    ) -> list[tuple[Pack, ...]]:
        """Balanced packs for numbers of packs from the least that fits upwards."""
        found: list[tuple[Pack, ...]] = []
        for count in range(1, stop - start + 1):
            packs = largest_fitting_packs(
                self.costs, start, stop, count, size, forward=forward, budget_bytes=self.budget, stash_at=stash_at
            )
            if packs is not None:
                found.append(packs)
            if len(found) > _MORE_PACKS:
                break
        if not found:
            way = "forward" if forward else "backward"
            reason = self._too_large(size, start, stop, forward) or "no partition into packs fits"
            self.rejected[Rejected(f"{mode}, {way} microbatches of {size}", reason)] = None
        return found

    # -- what does not fit --------------------------------------------------------------------------------------------

    def _too_large(self, size: int, start: int, stop: int, forward: bool) -> str:
        need = self.costs.forward_bytes if forward else self.costs.backward_bytes
        worst = max(range(start, stop), key=lambda layer: need(layer, layer + 1, size))
        needed = need(worst, worst + 1, size)
        if needed <= self.budget:
            return ""
        return (
            f"layer {worst} ({self.profile.layers[worst].name}) alone needs {format_bytes(needed)} of "
            f"{format_bytes(self.budget)}"
        )

    def _nothing_fits(self) -> PlanDoesNotFitError:
        size = self.profile.microbatch_sizes[0]
        layer = max(range(len(self.profile)), key=lambda layer: self.costs.backward_bytes(layer, layer + 1, size))
        needed = self.costs.backward_bytes(layer, layer + 1, size)
        weights, gradients = self.costs.weight_bytes(layer, layer + 1), self.costs.gradient_bytes(layer, layer + 1)
        device = self.machine.budgets.index(self.budget)
        lacking = "".join(f"\n  - {rejected.description}: {rejected.reason}" for rejected in list(self.rejected)[:6])
        return PlanDoesNotFitError(
            f"no plan fits {self.machine}.  The largest layer, {layer} ({self.profile.layers[layer].name}), needs "
            f"{format_bytes(needed)} at once for a microbatch of {size} ({format_bytes(weights)} weights, "
            f"{format_bytes(gradients)} gradients, {format_bytes(needed - weights - gradients)} activations and "
            f"temporaries); the budget of {self.machine.devices[device].name} is {format_bytes(self.budget)}.  Use "
            f"devices with at least {format_bytes(needed)}, or cut the layer into smaller modules.{lacking}",
            device=device,
            needed_bytes=needed,
            budget_bytes=self.budget,
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
