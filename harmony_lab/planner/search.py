"""search: the plans worth having for a profile and a machine, best first.

The four-tuple is the Harmony paper's (section 4.3).  Candidates are ordered by a forecast (``candidates``), the most
promising are lowered and simulated; of the best of these, neighbours are tried, and variants in which what fits stays
on the devices (``staying``), as far as their lower bound (``bounds``) is below the best of their mode.
"""

from collections.abc import Callable, Iterator, Sequence

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, HostMemoryError, PlanDoesNotFitError, PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.asked import known_plans
from harmony_lab.planner.exploration import Exploration, rank
from harmony_lab.planner.result import Candidate, Rejected, SearchResult
from harmony_lab.planner.switches import Switches
from harmony_lab.units import format_seconds

__all__ = ["Candidate", "Rejected", "SearchResult", "Switches", "search", "searching"]

Progress = Callable[[int, int, str], None]


def search(
    profile: Profile | Sequence[Profile],
    machine: Machine | str,
    minibatch_size: int,
    *,
    modes: Sequence[Mode | str] = (Mode.DP, Mode.PP),
    switches: Switches | None = None,
    shown: int = 16,
    progress: Progress | None = None,
    known: Sequence[Plan | str] = (),
) -> SearchResult:
    """Plans for that minibatch on every device of the machine, best first.

    ``profile``: one, or several of the same layers in different precisions, whose plans are then ranked together.
    ``shown``: how many candidates of each mode to simulate at least, where there are as many promising ones; their
    variants and neighbours are simulated beside them.  ``progress(done, total, what)`` is
    called after each candidate; what it raises ends the search.  ``known``: plans, or their texts, such as the best of
    a search for less memory: those that a search like this one could give compete too, and are improved on where
    nothing better is found.  Raises ``PlanDoesNotFitError`` where no plan fits, naming the layer that is too large, its
    bytes and the budget.
    """
    machine, known = Machine.of(machine), known_plans(known)
    if not isinstance(profile, Profile):
        return _in_all(profile, machine, minibatch_size, modes, switches, shown, progress, known)
    run = Exploration(profile, machine, minibatch_size, modes, switches or Switches(), shown, known)
    for _ in run.advance():
        if progress is not None:
            progress(run.done, run.done + run.left, f"best {format_seconds(run.best_s)}")
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
    known: Sequence[Plan],
) -> SearchResult:
    """One ranking of the plans found with each profile; one with which nothing fits is told among what was rejected."""
    if not isinstance(profiles, Sequence) or not all(isinstance(profile, Profile) for profile in profiles):
        raise HarmonyError(
            f"search takes a Profile, or several, got a {type(profiles).__name__}: profile(layers, machine) makes one, "
            "load_profile(path) reads one"
        )
    if len({profile.precision for profile in profiles}) < len(profiles) or not profiles:
        given = ", ".join(str(profile.precision) for profile in profiles) or "none"
        raise PlanError("nothing to plan", [f"profiles must be of different precisions, at least one, got {given}"])
    results: list[SearchResult] = []
    failed: list[tuple[Profile, HarmonyError]] = []
    counted = _Counted(progress, len(profiles))
    for profile in profiles:
        counted.next()
        try:
            results.append(
                search(
                    profile,
                    machine,
                    minibatch_size,
                    modes=modes,
                    switches=switches,
                    shown=shown,
                    progress=counted,
                    known=known,
                )
            )
        except (PlanDoesNotFitError, HostMemoryError) as error:
            failed.append((profile, error))
    if not results:
        raise failed[-1][1]
    rejected = [Rejected(f"precision={profile.precision}", str(error)) for profile, error in failed]
    return SearchResult(
        candidates=tuple(sorted((c for found in results for c in found.candidates), key=rank)),
        rejected=(*rejected, *(item for found in results for item in found.rejected)),
        lower_bound_s=min(found.lower_bound_s for found in results),
        num_bounded=sum(found.num_bounded for found in results),
        num_skipped=sum(found.num_skipped for found in results),
    )


class _Counted:
    """Progress of several searches as that of one; those to come are taken to have as many candidates."""

    def __init__(self, progress: Progress | None, num_searches: int) -> None:
        self._progress, self._num_left = progress, num_searches
        self._before = self._done = 0

    def next(self) -> None:
        self._before += self._done
        self._done, self._num_left = 0, self._num_left - 1

    def __call__(self, done: int, total: int, what: str) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(self._before + done, self._before + total * (1 + self._num_left), what)


def searching(
    profile: Profile,
    machine: Machine | str,
    minibatch_size: int,
    *,
    modes: Sequence[Mode | str] = (Mode.DP, Mode.PP),
    switches: Switches | None = None,
    shown: int = 16,
    known: Sequence[Plan | str] = (),
) -> Iterator[SearchResult]:
    """As ``search``, giving what has been found so far after every candidate; nothing where no plan fits."""
    options = switches or Switches()
    run = Exploration(profile, Machine.of(machine), minibatch_size, modes, options, shown, known_plans(known))
    for _ in run.advance():
        yield run.result()
