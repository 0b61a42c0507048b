"""search: the plans worth having for a profile and a machine, best first.

The four-tuple is the Harmony paper's (section 4.3).  Candidates are ordered by a forecast (``candidates``), the most
promising are lowered and simulated, and of the best of these variants are tried in which what fits stays on the devices
(``staying``).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, HostMemoryError, PlanDoesNotFitError, PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.bounds import problem_bound
from harmony_lab.planner.candidates import Candidates
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.limits import host_problem
from harmony_lab.planner.lower import lower
from harmony_lab.planner.neighbours import neighbours
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.result import Candidate, Rejected, SearchResult
from harmony_lab.planner.staying import mirror, staying, updating
from harmony_lab.simulator.engine import makespan_s
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["Candidate", "Rejected", "SearchResult", "Switches", "search", "searching"]

Progress = Callable[[int, int, str], None]
MAX_OPS = 100_000
"""Ops simulated at most for candidates, beyond each mode's two most promising, and again for what stays on devices."""
_ALWAYS = 2
_FREE_OPS = 3_000  # simulated for every setting, however few candidates are to be shown
_FREE_OPS_OF_FEW = 40_000  # where there are no more candidates than those at hand
_AT_HAND = 300  # candidates at hand for that
_HOST_TRIES = 6  # plans for which the host has no memory, before the search gives up where it has found none
_NEIGHBOURS_OPS, _FEWEST_NEIGHBOURS = 8_000, 40  # simulated to search on from the best plans, if that is so many plans
_STARTS, _STARTS_OF_FEW = 6, 20  # plans in turn whose neighbours are no better, before the search ends
_SPARE = 3  # times as many candidates are at hand as are to be simulated, for those that do not fit
_RETRIES = 8  # with less and less memory to pack into, where what looked promising did not fit with all that goes on
_UPDATING_OPS = 25_000  # simulated to find what devices could update
_STAYING_FROM, _ALSO_FROM = 3, 60  # plans whose variants are tried: the best of each mode, and promising ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Which settings a search may choose from.

    ``staying``: whether what fits may stay on the devices (``Plan.resident_packs``, ``kept_packs``, ``device_stash``).
    ``device_updates``: whether of what stays the optimizer's state may be, so that devices update for themselves.

    Raises ``PlanError`` where there is nothing to choose from.
    """

    prefetch: tuple[int, ...] = (1,)
    peer_transfers: tuple[bool, ...] = (True,)
    staying: bool = True
    device_updates: bool = True

    def __post_init__(self) -> None:
        empty = [name for name in ("prefetch", "peer_transfers") if not getattr(self, name)]
        if empty:
            raise PlanError("nothing to choose from", [f"Switches.{name} must hold a value or more" for name in empty])


def search(
    profile: Profile | Sequence[Profile],
    machine: Machine,
    minibatch_size: int,
    *,
    modes: Sequence[Mode | str] = (Mode.DP, Mode.PP),
    switches: Switches | None = None,
    shown: int = 16,
    progress: Progress | None = None,
) -> SearchResult:
    """Plans for that minibatch on every device of the machine, best first.

    ``profile``: one, or several of the same layers in different precisions, whose plans are then ranked together.
    ``shown``: how many candidates of each mode to simulate at least, where there are as many promising ones; their
    variants and neighbours are simulated beside them.  ``progress(done, total, what)`` is
    called after each candidate; what it raises ends the search.  Raises ``PlanDoesNotFitError`` where no plan fits,
    naming the layer that is too large, its bytes and the budget.
    """
    if not isinstance(profile, Profile):
        return _in_all(profile, machine, minibatch_size, modes, switches, shown, progress)
    run = _Search(profile, machine, minibatch_size, modes, switches or Switches(), shown)
    for _ in run.advance():
        if progress is not None:
            progress(run.done, max(run.total, run.done), f"best {format_seconds(run.best_s)}")
    if not run.found:
        raise run.nothing_fits()
    if progress is not None:
        progress(run.done, run.done, f"best {format_seconds(run.best_s)}")
    return run.result()


def _in_all(
    profiles: Sequence[Profile],
    machine: Machine,
    minibatch_size: int,
    modes: Sequence[Mode | str],
    switches: Switches | None,
    shown: int,
    progress: Progress | None,
) -> SearchResult:
    """One ranking of the plans found with each profile; one with which nothing fits is told among what was rejected."""
    if len({profile.precision for profile in profiles}) < len(profiles) or not profiles:
        given = ", ".join(str(profile.precision) for profile in profiles) or "none"
        raise PlanError("nothing to plan", [f"profiles must be of different precisions, at least one, got {given}"])
    results: list[SearchResult] = []
    failed: list[tuple[Profile, HarmonyError]] = []
    for profile in profiles:
        try:
            results.append(
                search(profile, machine, minibatch_size, modes=modes, switches=switches, shown=shown, progress=progress)
            )
        except (PlanDoesNotFitError, HostMemoryError) as error:
            failed.append((profile, error))
    if not results:
        raise failed[-1][1]
    rejected = [Rejected(f"precision={profile.precision}", str(error)) for profile, error in failed]
    return SearchResult(
        candidates=tuple(sorted((c for found in results for c in found.candidates), key=_rank)),
        rejected=(*rejected, *(item for found in results for item in found.rejected)),
        lower_bound_s=min(found.lower_bound_s for found in results),
        num_bounded=sum(found.num_bounded for found in results),
        num_skipped=sum(found.num_skipped for found in results),
    )


def searching(
    profile: Profile,
    machine: Machine,
    minibatch_size: int,
    *,
    modes: Sequence[Mode | str] = (Mode.DP, Mode.PP),
    switches: Switches | None = None,
    shown: int = 16,
) -> Iterator[SearchResult]:
    """As ``search``, giving what has been found so far after every candidate; nothing where no plan fits."""
    run = _Search(profile, machine, minibatch_size, modes, switches or Switches(), shown)
    for _ in run.advance():
        yield run.result()


def _rank(candidate: Candidate) -> tuple[float, int]:
    """The fastest first; of equally fast ones that where more stays on devices, so that less moves."""
    plan = candidate.plan
    num_staying = len(plan.device_stash) + len(plan.resident_packs) + len(plan.kept_packs)
    return float(f"{candidate.step_s:.9g}"), -num_staying


class _Search:
    def __init__(
        self,
        profile: Profile,
        machine: Machine,
        minibatch_size: int,
        modes: Sequence[Mode | str],
        switches: Switches,
        shown: int,
    ) -> None:
        _check_arguments(profile, minibatch_size, modes)
        self.profile, self.machine, self.minibatch_size = profile, machine, minibatch_size
        self.switches, self.shown = switches, max(shown, _ALWAYS)
        self.costs = PackCosts(profile)
        self.found: dict[Plan, Candidate] = {}
        self.rejected: dict[Rejected, None] = {}
        self.last_ops = 0
        self.done = self.total = self.num_ops = self.num_bounded = self.num_skipped = 0
        self.lower_bound_s, self.best_s = 0.0, math.inf
        self.host_problem = ""
        self.num_host_problems = 0
        self.excess_bytes = 0  # of the candidate that was furthest from fitting
        usable = [mode for mode in map(Mode, modes) if mode is Mode.PP or not self._dp_problem()]
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

    def advance(self) -> Iterator[float]:
        """Look at one candidate after the other; gives the seconds of each."""
        settings = [
            (mode, prefetch, peers)
            for mode in self.modes
            for prefetch in self.switches.prefetch
            for peers in self.switches.peer_transfers
        ]
        self.total = len(settings) * self.shown
        self.lower_bound_s = problem_bound(
            self.costs,
            self.machine,
            self.minibatch_size,
            modes=self.modes,
            overlapping=max(self.switches.prefetch) > 0 or self.switches.staying,
            peers_only=all(self.switches.peer_transfers),
            device_updates=self.switches.staying and self.switches.device_updates,
        )
        for setting in settings:
            yield from self._of_setting(*setting)
        if self.switches.staying and self.found:
            best = self._best_of_each_mode()
            yield from self._that_stay()
            if self.switches.device_updates:
                yield from self._that_update(best)

    def result(self) -> SearchResult:
        """What has been found so far."""
        return SearchResult(
            candidates=tuple(sorted(self.found.values(), key=_rank)),
            rejected=tuple(self.rejected),
            lower_bound_s=self.lower_bound_s,
            num_bounded=self.num_bounded,
            num_skipped=self.num_skipped,
        )

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _of_setting(self, mode: Mode, prefetch: int, peers: bool) -> Iterator[float]:
        budget, margin = min(self.machine.budgets), 0
        for attempt in range(_RETRIES):
            self.excess_bytes = 0
            options = Candidates(
                self.costs,
                self.machine,
                self.minibatch_size,
                mode,
                prefetch=prefetch,
                peers=peers,
                budget_bytes=budget - margin,
            )
            promising = options.best(max(_SPARE * self.shown, _AT_HAND))
            spent = self.num_ops
            self.num_bounded += options.num_looked_at - len(promising)
            if attempt == 0:
                self.rejected |= dict.fromkeys(options.rejected)
            fitting = 0
            for position, four in enumerate(promising):
                if self.num_host_problems >= _HOST_TRIES and not self.found:  # whatever the packs
                    return
                free = _FREE_OPS_OF_FEW if options.num_looked_at <= _AT_HAND else _FREE_OPS
                enough = fitting >= self.shown and self.num_ops - spent > free
                if enough or (fitting >= _ALWAYS and self.num_ops > MAX_OPS):
                    self.num_skipped += len(promising) - position
                    break
                seconds = self._simulated(options.plan(four))
                if seconds is not None:
                    fitting += 1
                    yield seconds
            if 2 * fitting >= min(self.shown, len(promising)):
                yield from self._searched_on(options, fitting, self.num_ops - spent)
                return
            margin += max(self.excess_bytes, budget // 100) << attempt

    def _searched_on(self, options: Candidates, num_simulated: int, num_ops: int) -> Iterator[float]:
        """From the best plans of a setting on to their neighbours, where programs are small: the best that has not been
        tried from, until a few in turn lead to nothing better."""
        is_small = options.num_looked_at <= _AT_HAND
        budget, starts = (_FREE_OPS_OF_FEW, _STARTS_OF_FEW) if is_small else (_NEIGHBOURS_OPS, _STARTS)
        if not num_simulated or num_ops * _FEWEST_NEIGHBOURS > budget * num_simulated:
            return
        limit = self.num_ops + budget
        tried_from: set[Plan] = set()
        idle = 0
        while idle < starts:
            of_setting = [
                found
                for plan, found in self.found.items()
                if (plan.mode, plan.prefetch, plan.peer_transfers) == (options.mode, options.prefetch, options.peers)
            ]
            best_s = min(found.step_s for found in of_setting)
            left = [found for found in of_setting if found.plan not in tried_from]
            if not left:
                return
            start = min(left, key=lambda found: found.step_s)
            tried_from.add(start.plan)
            idle += 1
            for plan in neighbours(start.plan, options.forward_sizes, options.backward_sizes):
                if options.equal_sizes and plan.forward_microbatch_size != plan.backward_microbatch_size:
                    continue
                seconds = self._simulated(plan)
                if self.num_ops > limit:
                    return
                if seconds is not None and seconds < best_s:
                    best_s, idle = seconds, 0
                    yield seconds

    def _that_stay(self) -> Iterator[float]:
        """Variants in which what fits stays on the devices: of the best plans found, then of what looks promising."""
        spent = self.num_ops
        for start in self._to_stay():
            for _, seconds in staying(start, self._simulated):
                yield seconds
            if self.num_ops - spent > MAX_OPS:
                return

    def _that_update(self, before: Sequence[Plan]) -> Iterator[float]:
        """Variants in which devices update what fits: of the best plans by now and of those ``before`` anything stayed,
        also with the same packs forward and backward and what else fits then."""
        limit = self.num_ops + _UPDATING_OPS
        alike = [mirror(plan) for plan in before]
        for start in dict.fromkeys((*self._best_of_each_mode(), *before, *alike)):
            if self.num_ops > limit:
                return
            best = None
            for best in updating(start, self._simulated, updatable(start, self.profile, self.machine)):
                yield best[1]
            if best is not None and start in alike and best[0].device_updates:
                for _, seconds in staying(best[0], self._simulated):
                    yield seconds

    def _best_of_each_mode(self) -> list[Plan]:
        best = sorted(self.found.values(), key=lambda candidate: candidate.step_s)
        by_mode = [[candidate.plan for candidate in best if candidate.plan.mode is mode] for mode in self.modes]
        return [plan for of_mode in by_mode for plan in of_mode[:_STAYING_FROM]]

    def _to_stay(self) -> Iterator[Plan]:
        yield from dict.fromkeys(mirror(plan) for plan in self._best_of_each_mode() if plan.forward_packs)
        promising = []
        for mode in self.modes:
            options = Candidates(
                self.costs,
                self.machine,
                self.minibatch_size,
                mode,
                prefetch=max(self.switches.prefetch),
                peers=max(self.switches.peer_transfers),
                budget_bytes=min(self.machine.budgets),
            )
            promising += [(four.seconds, mirror(options.plan(four))) for four in options.mirrored()]
        for _, plan in sorted(promising, key=lambda pair: pair[0])[:_ALSO_FROM]:
            yield plan

    def _simulated(self, plan: Plan) -> float | None:
        known = self.found.get(plan)
        if known is not None:
            return known.step_s
        self.done += 1
        try:
            program = lower(plan, self.profile, self.machine, costs=self.costs)
        except PlanDoesNotFitError as error:
            self.excess_bytes = max(self.excess_bytes, error.needed_bytes - error.budget_bytes)
            self.num_ops += self.last_ops // 2  # about what was lowered until it did not fit
            self.rejected[Rejected(str(plan), str(error))] = None
            return None
        except PlanError as error:
            self.rejected[Rejected(str(plan), str(error))] = None
            return None
        problem = host_problem(plan, self.profile, self.machine, program=program)
        if problem:
            self.host_problem = problem
            self.num_host_problems += 1
            self.rejected[Rejected(str(plan), problem)] = None
            return None
        self.last_ops = len(program.ops)
        self.num_ops += self.last_ops
        seconds = makespan_s(program, self.profile, self.machine)
        self.found[plan] = Candidate(plan, seconds, self.profile, self.machine)
        self.best_s = min(self.best_s, seconds)
        return seconds

    # -- what does not fit --------------------------------------------------------------------------------------------

    def nothing_fits(self) -> HarmonyError:
        if self.host_problem:
            return HostMemoryError(
                f"no plan fits {self.machine}: {self.host_problem}",
                needed_bytes=self.profile.state_bytes,
                available_bytes=self.machine.host.memory_bytes,
            )
        if not self.modes:
            return PlanError("nothing to plan", [f"{one.description}: {one.reason}" for one in self.rejected])
        size = self.profile.microbatch_sizes[0]
        layer = max(range(len(self.profile)), key=lambda layer: self.costs.backward_bytes(layer, layer + 1, size))
        needed = self.costs.backward_bytes(layer, layer + 1, size)
        weights, gradients = self.costs.weight_bytes(layer, layer + 1), self.costs.gradient_bytes(layer, layer + 1)
        budget = min(self.machine.budgets)
        device = self.machine.budgets.index(budget)
        cure = f"Use devices with at least {format_bytes(needed)}, or cut the layer into smaller modules."
        if needed <= budget:
            cure = "So it fits alone, but not with what else its packs need at once: see below."
        lacking = "".join(f"\n  - {rejected.description}: {rejected.reason}" for rejected in list(self.rejected)[:6])
        return PlanDoesNotFitError(
            f"no plan fits {self.machine}.  The largest layer, {layer} ({self.profile.layers[layer].name}), needs "
            f"{format_bytes(needed)} at once for a microbatch of {size} ({format_bytes(weights)} weights, "
            f"{format_bytes(gradients)} gradients, {format_bytes(needed - weights - gradients)} activations and "
            f"temporaries); the budget of {self.machine.devices[device].name} is {format_bytes(budget)}.  {cure}"
            f"{lacking}",
            device=device,
            needed_bytes=needed,
            budget_bytes=budget,
        )


def _check_arguments(profile: Profile, minibatch_size: int, modes: Sequence[Mode | str]) -> None:
    if isinstance(minibatch_size, bool) or not isinstance(minibatch_size, int) or minibatch_size < 1:
        raise PlanError(
            "nothing to plan", [f"minibatch_size must be a whole number of at least 1, got {minibatch_size!r}"]
        )
    unknown = [mode for mode in modes if mode not in set(Mode)]
    if isinstance(modes, str) or unknown or not modes:
        raise PlanError("nothing to plan", [f"modes must be some of {[str(mode) for mode in Mode]}, got {modes!r}"])
    if profile.first_trainable_layer == len(profile):
        raise PlanError("nothing to plan", ["the model has no trainable parameter"])
