"""exploration: candidates looked at one by one, in the order of what they promise, until enough has been seen."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, PlanDoesNotFitError, PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.asked import check_asked
from harmony_lab.planner.bounds import candidate_bound, problem_bound
from harmony_lab.planner.candidates import Candidates
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.limits import host_problem
from harmony_lab.planner.lower import lower
from harmony_lab.planner.neighbours import neighbours
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.result import Candidate, Rejected, SearchResult
from harmony_lab.planner.staying import bare, mirror, shifted, stayed, staying, stays, updating
from harmony_lab.planner.switches import Switches
from harmony_lab.planner.unfitting import what_does_not_fit
from harmony_lab.simulator.engine import makespan_s

__all__ = ["MAX_OPS", "Exploration", "rank"]

MAX_OPS = 100_000
"""Ops simulated at most for candidates, beyond each mode's two most promising, and again for what stays on devices."""
_ALWAYS = 2
_FREE_OPS = 1_500  # simulated for every setting, for each candidate that is to be shown
_FREE_OPS_OF_FEW = 40_000  # where there are no more candidates than those at hand
_AT_HAND = 300  # candidates at hand for that
_HOST_TRIES = 6  # plans for which the host has no memory, before the search gives up where it has found none
_NEIGHBOURS_OPS, _FEWEST_NEIGHBOURS = 4_000, 40  # the same to search on from the best plans, if those are so many plans
_STARTS, _STARTS_OF_FEW = 6, 20  # plans in turn whose neighbours are no better, before the search ends
_SPARE = 3  # times as many candidates are at hand as are to be simulated, for those that do not fit
_RETRIES = 8  # with less and less memory to pack into, where what looked promising did not fit with all that goes on
_NO_BETTER = 1 + 1e-9
_UPDATING_OPS = 25_000  # simulated to find what devices could update
_LESS, _OF_LESS = (0.84, 0.7), 4  # shares of the memory, and how many of the most promising plans for so much
_SHIFTED = 6  # numbers of packs of each mode, the best first, whose edges are moved while packs stay
_STAYING_FROM, _ALSO_FROM = 3, 60  # plans whose variants are tried: the best of each mode, and promising ones


def rank(candidate: Candidate) -> tuple[float, int]:
    """The fastest first; of equally fast ones that where more stays on devices, so that less moves."""
    return float(f"{candidate.step_s:.9g}"), -_num_staying(candidate.plan)


def _num_staying(plan: Plan) -> int:
    return len(plan.device_stash) + len(plan.resident_packs) + len(plan.kept_packs)


class Exploration:
    """One search: ``advance`` looks at one candidate after the other, ``result`` tells what has been found so far.

    Raises ``PlanError`` where the arguments are of no use.
    """

    def __init__(
        self,
        profile: Profile,
        machine: Machine,
        minibatch_size: int,
        modes: Sequence[Mode | str],
        switches: Switches,
        shown: int,
        known: Sequence[Plan] = (),
    ) -> None:
        check_asked(profile, minibatch_size, modes, switches, shown)
        self.profile, self.machine, self.minibatch_size = profile, machine, minibatch_size
        self.switches, self.shown = switches, max(shown, _ALWAYS)
        self.costs = PackCosts(profile)
        self.found: dict[Plan, Candidate] = {}
        self.rejected: dict[Rejected, None] = {}
        self.last_ops = 0
        self.done = self.left = 0  # candidates, those to come as far as that is known
        self.num_ops = self.num_bounded = self.num_skipped = 0
        self.lower_bound_s = 0.0
        self.best_of: dict[Mode, float] = {}  # seconds
        self.host_problem = ""
        self.num_host_problems = 0
        self.excess_bytes = 0  # of the candidate that was furthest from fitting
        usable = [mode for mode in map(Mode, modes) if mode is Mode.PP or not self._dp_problem()]
        # On one device the modes are the same program.
        self.modes = usable[:1] if machine.num_devices == 1 else usable
        self.known = [
            plan.with_(fingerprint=plan.fingerprint or profile.fingerprint) for plan in known if self._is_allowed(plan)
        ]

    @property
    def best_s(self) -> float:
        return min(self.best_of.values(), default=math.inf)

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
        self.lower_bound_s = problem_bound(
            self.costs,
            self.machine,
            self.minibatch_size,
            modes=self.modes,
            overlapping=max(self.switches.prefetch) > 0 or self.switches.staying,
            peers_only=all(self.switches.peer_transfers),
            device_updates=self.switches.updates_on_devices,
            keeps=self.switches.staying,
        )
        for number, setting in enumerate(settings):
            self.left = (len(settings) - number) * self.shown + (_ALSO_FROM if self.switches.staying else 0)
            yield from self._of_setting(*setting)
        if self.switches.staying and self.found:
            best = self._best_of_each_mode()
            yield from self._that_stay()
            yield from self._shifted()
            if self.switches.updates_on_devices:
                yield from self._that_update(best)
        yield from self._known_before()

    def result(self) -> SearchResult:
        """What has been found so far."""
        return SearchResult(
            candidates=tuple(sorted(self.found.values(), key=rank)),
            rejected=tuple(self.rejected),
            lower_bound_s=self.lower_bound_s,
            num_bounded=self.num_bounded,
            num_skipped=self.num_skipped,
        )

    def _options(self, mode: Mode, prefetch: int, peers: bool, budget_bytes: int) -> Candidates:
        return Candidates(
            self.costs,
            self.machine,
            self.minibatch_size,
            mode,
            prefetch=prefetch,
            peers=peers,
            budget_bytes=budget_bytes,
        )

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _of_setting(self, mode: Mode, prefetch: int, peers: bool) -> Iterator[float]:
        budget, margin = min(self.machine.budgets), 0
        for attempt in range(_RETRIES):
            self.excess_bytes = 0
            options = self._options(mode, prefetch, peers, budget - margin)
            promising = options.best(max(_SPARE * self.shown, _AT_HAND))
            spent, skipped = self.num_ops, 0
            if attempt == 0:
                self.rejected |= dict.fromkeys(options.rejected)
            fitting = 0
            for position, four in enumerate(promising):
                if self.num_host_problems >= _HOST_TRIES and not self.found:  # whatever the packs
                    return
                free = _FREE_OPS_OF_FEW if options.num_looked_at <= _AT_HAND else _FREE_OPS * self.shown
                enough = fitting >= self.shown and self.num_ops - spent > free
                if enough or (fitting >= _ALWAYS and self.num_ops > MAX_OPS):
                    skipped = len(promising) - position
                    break
                seconds = self._simulated(options.plan(four))
                if seconds is not None:
                    fitting += 1
                    yield seconds
            if 2 * fitting >= min(self.shown, len(promising)):
                self.num_bounded += options.num_looked_at - len(promising)
                self.num_skipped += skipped
                spent_here = self.num_ops - spent
                if self.switches.staying:
                    yield from self._as_with_less(options)
                yield from self._searched_on(options, fitting, spent_here)
                return
            margin += max(self.excess_bytes, budget // 100) << attempt

    def _as_with_less(self, options: Candidates) -> Iterator[float]:
        """The most promising for less memory, whose packs are smaller: some are best because more is fetched ahead or
        stays, of which a forecast knows little."""
        for share in _LESS:
            less = self._options(options.mode, options.prefetch, options.peers, int(share * options.budget_bytes))
            for four in less.best(_AT_HAND)[:_OF_LESS]:
                seconds = self._simulated(less.plan(four))
                if seconds is not None:
                    yield seconds

    def _searched_on(self, options: Candidates, num_simulated: int, num_ops: int) -> Iterator[float]:
        """From the best plans of a setting on to their neighbours, where programs are small: the best that has not been
        tried from, until a few in turn lead to nothing better."""
        is_small = options.num_looked_at <= _AT_HAND
        budget, starts = (_FREE_OPS_OF_FEW, _STARTS_OF_FEW) if is_small else (_NEIGHBOURS_OPS * self.shown, _STARTS)
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
            for plan in self._neighbours(start.plan, options):
                if self._is_hopeless(plan):
                    continue
                seconds = self._simulated(plan)
                if self.num_ops > limit:
                    return
                if seconds is not None and seconds < best_s:
                    best_s, idle = seconds, 0
                    yield seconds

    def _neighbours(self, plan: Plan, options: Candidates) -> Iterator[Plan]:
        for other in neighbours(plan, options.forward_sizes, options.backward_sizes):
            if not options.equal_sizes or other.forward_microbatch_size == other.backward_microbatch_size:
                yield other

    def _that_stay(self) -> Iterator[float]:
        """Variants in which what fits stays on the devices: of the best plans found, then of what looks promising."""
        spent = self.num_ops
        starts = list(self._to_stay())
        for number, start in enumerate(starts):
            self.left = min(self.left, len(starts) - number)
            if self._is_hopeless(stayed(start)):
                continue
            for _, seconds in staying(start, self._simulated):
                yield seconds
            if self.num_ops - spent > MAX_OPS:
                return

    def _shifted(self) -> Iterator[float]:
        """On from the best plans in which something stays, of each mode and number of packs, edge by edge, as long as
        that helps."""
        best_of: dict[tuple[Mode, int], Candidate] = {}
        for found in sorted(self.found.values(), key=rank):
            if _num_staying(found.plan) and found.plan.forward_packs == found.plan.backward_packs[:-1]:
                best_of.setdefault((found.plan.mode, len(found.plan.backward_packs)), found)
        limit = self.num_ops + _NEIGHBOURS_OPS * self.shown
        for first in list(best_of.values())[: _SHIFTED * len(self.modes)]:
            best = yield from self._climbed(first, shifted, limit)
            if self.num_ops > limit:
                return
            if best is not first:  # other packs may stay now
                for _, seconds in staying(bare(best.plan), self._simulated):
                    yield seconds

    def _climbed(
        self, best: Candidate, steps: Callable[[Plan], Iterator[Plan]], limit: int
    ) -> Generator[float, None, Candidate]:
        """From a plan to the first of the ``steps`` from it that is better, and on from that; until no more than so
        many ops have been simulated."""
        start: Candidate | None = None
        while start is not best:
            start = best
            for plan in steps(start.plan):
                seconds = math.inf if self._is_hopeless(plan) else self._simulated(plan)
                if self.num_ops > limit:
                    return best
                if seconds is not None and seconds < start.step_s:
                    yield seconds
                    best = self.found[plan]
                    break
        return best

    # -- plans that were known before -----------------------------------------------------------------------------

    def _is_allowed(self, plan: Plan) -> bool:
        """Whether it is one of the plans that are looked for."""
        alike = (plan.minibatch_size, plan.num_devices) == (self.minibatch_size, self.machine.num_devices)
        alike = alike and plan.precision is self.profile.precision
        return alike and plan.mode in self.modes and self.switches.allow(plan)

    def _known_before(self) -> Iterator[float]:
        """These compete too; on from the best of each mode, where it is better than all that was found without.

        They come last, so that nothing is lost that a search without them finds.
        """
        for mode in self.modes:
            before = self.best_of.get(mode, math.inf)
            seconds = [self._simulated(plan) for plan in self.known if plan.mode is mode]
            yield from (one for one in seconds if one is not None)
            if self.best_of.get(mode, math.inf) < before / _NO_BETTER:
                yield from self._searched_around(self._best_of(mode))

    def _searched_around(self, best: Candidate) -> Iterator[float]:
        """Its neighbours, and what stays on the devices with its packs, also where these are moved."""
        plan = best.plan
        options = self._options(plan.mode, plan.prefetch, plan.peer_transfers, min(self.machine.budgets))

        def steps(start: Plan) -> Iterator[Plan]:
            return shifted(start) if stays(start) else self._neighbours(start, options)

        limit = self.num_ops + _NEIGHBOURS_OPS * self.shown
        best = yield from self._climbed(best, steps, limit)
        if self.switches.staying and best.plan.forward_packs:
            alike = mirror(bare(best.plan))
            devices = updatable(alike, self.profile, self.machine) if self.switches.updates_on_devices else ()
            for _, seconds in staying(alike, self._simulated, devices):
                yield seconds
            yield from self._climbed(self._best_of(plan.mode), steps, limit)

    def _best_of(self, mode: Mode) -> Candidate:
        return min((found for found in self.found.values() if found.plan.mode is mode), key=rank)

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
            ahead, peers = max(self.switches.prefetch), max(self.switches.peer_transfers)
            options = self._options(mode, ahead, peers, min(self.machine.budgets))
            promising += [(four.seconds, mirror(options.plan(four))) for four in options.mirrored()]
        for _, plan in sorted(promising, key=lambda pair: pair[0])[:_ALSO_FROM]:
            yield plan

    def _is_hopeless(self, plan: Plan) -> bool:
        """Whether its lower bound says that it is no better than the best of its mode, once there is enough to show."""
        if plan in self.found or len(self.found) < self.shown:
            return False
        best_s = self.best_of.get(plan.mode, math.inf)
        hopeless = candidate_bound(plan, self.costs, self.machine) > best_s * _NO_BETTER
        self.num_bounded += hopeless
        return hopeless

    def _simulated(self, plan: Plan) -> float | None:
        if self.switches.deferred_updates:
            plan = plan.with_(just_in_time_update=False, overlapped_update=True)
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
        self.best_of[plan.mode] = min(self.best_of.get(plan.mode, math.inf), seconds)
        return seconds

    def nothing_fits(self) -> HarmonyError:
        """Why nothing has been found."""
        rejected = tuple(self.rejected)
        if not self.modes:
            return PlanError("nothing to plan", [f"{one.description}: {one.reason}" for one in rejected])
        return what_does_not_fit(self.costs, self.machine, rejected, self.host_problem)
