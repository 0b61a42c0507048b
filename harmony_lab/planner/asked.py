"""asked: what a search is given, looked at before anything is tried."""

from collections.abc import Iterable, Iterator, Sequence

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.switches import Switches

__all__ = ["check_asked", "check_baselines", "known_plans"]


def check_asked(
    profile: Profile, minibatch_size: int, modes: Sequence[Mode | str], switches: Switches, shown: int
) -> None:
    """Raise ``PlanError`` naming everything that is of no use."""
    wrong = list(_wrong(profile, minibatch_size, modes, switches, shown))
    if wrong:
        raise PlanError("nothing to plan", wrong)


def check_baselines(minibatch_size: int, names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names, one alone being a text; raises ``PlanError`` naming everything that is of no use."""
    asked = (names,) if isinstance(names, str) else tuple(names)
    wrong = list(_miscounted("minibatch_size", minibatch_size, 1))
    if unknown := [name for name in asked if name not in known]:
        wrong.append(f"names must be some of {list(known)}, got {', '.join(map(repr, unknown))}")
    if wrong:
        raise PlanError("no baselines", wrong)
    return asked


def _miscounted(name: str, count: int, least: int) -> Iterator[str]:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        yield f"{name} must be a whole number of at least {least}, got {count!r}"


def _wrong(
    profile: Profile, minibatch_size: int, modes: Sequence[Mode | str], switches: Switches, shown: int
) -> Iterator[str]:
    yield from _miscounted("minibatch_size", minibatch_size, 1)
    yield from _miscounted("shown", shown, 0)
    if isinstance(modes, str) or not modes or any(mode not in set(Mode) for mode in modes):
        yield f"modes must be some of {[str(mode) for mode in Mode]}, got {modes!r}"
    if not isinstance(switches, Switches):
        yield f"switches must be a harmony_lab.planner.search.Switches, got {switches!r}"
    if profile.first_trainable_layer == len(profile):
        yield "the model has no trainable parameter"


def known_plans(known: Sequence[Plan | str]) -> tuple[Plan, ...]:
    """Plans or their texts as plans; raises ``PlanError``."""
    if isinstance(known, Plan | str) or not all(isinstance(plan, Plan | str) for plan in known):
        given = f"a {type(known).__name__}" if isinstance(known, Plan | str) else repr(known)
        raise PlanError("nothing to plan", [f"known must be plans or their texts, as [result.best] is, got {given}"])
    return tuple(map(Plan.of, known))
