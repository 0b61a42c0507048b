"""Plans that were known before: what a search makes of them, and what searches tell each other."""

import random
from dataclasses import replace

import pytest
import toy_profiles as toys

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.lower import lower
from harmony_lab.planner.search import Switches, search, searching
from harmony_lab.planner.searches import Searches
from harmony_lab.simulator.engine import makespan_s

BARE = Switches(prefetch=(1,), staying=False)
PROFILE, MACHINE = toys.profile(6, overhead_s=0.002), toys.gpus(2, memory_bytes=6_000_000)


def uneven(seed: int) -> Profile:
    """Layers of different times, of which no partition is even."""
    profile, rng = toys.profile(12, overhead_s=0.004), random.Random(seed)
    layers = []
    for kind, layer in enumerate(profile.layers):
        share = rng.choice((0.3, 1, 1, 2))
        costs = [
            cost._replace(
                forward_s=cost.forward_s * share,
                recompute_s=cost.recompute_s * share,
                backward_s=cost.backward_s * share,
            )
            for cost in layer.costs
        ]
        layers.append(replace(layer, kind=kind, costs=tuple(costs)))
    return replace(profile, layers=tuple(layers))


def best_s(machine: Machine, profile: Profile, known: tuple[Plan, ...] = ()) -> tuple[float, Plan]:
    found = search(profile, machine, 16, modes=("pp",), switches=BARE, shown=2, known=known)
    return found.candidates[0].step_s, found.best


@pytest.mark.parametrize("seed", [32, 42, 62])
def test_more_memory_gives_no_slower_plan_where_the_best_for_less_is_known(seed: int) -> None:
    profile, machine = uneven(seed), toys.gpus(2 + seed % 2, memory_bytes=5_000_000, link=2e8)
    alone, knowing = [], []
    known: tuple[Plan, ...] = ()
    for factor in (1.0, 1.2, 1.5, 2.0):
        roomier = machine.with_(memory=int(factor * machine.budgets[0]))
        alone.append(best_s(roomier, profile)[0])
        step_s, plan = best_s(roomier, profile, known)
        knowing.append(step_s)
        known = (plan,)
    assert knowing == sorted(knowing, reverse=True)
    assert all(one <= other for one, other in zip(knowing, alone, strict=True))


def test_a_known_plan_is_improved_on_where_it_is_better_than_what_was_found() -> None:
    profile, machine = uneven(42), toys.gpus(2, memory_bytes=10_000_000, link=2e8)
    less = machine.with_(memory=7_500_000)
    _, plan = best_s(less, profile)
    as_it_is = makespan_s(lower(plan, profile, machine), profile, machine)
    assert as_it_is < best_s(machine, profile)[0]
    assert best_s(machine, profile, (plan,))[0] <= as_it_is


def test_searches_tell_the_next_what_they_found_best_of_each_mode() -> None:
    searches, alone = Searches(), search(PROFILE, MACHINE, 16, switches=BARE)
    assert searches.search(PROFILE, MACHINE, 16, switches=BARE).candidates == alone.candidates
    roomier = MACHINE.with_(memory=8_000_000)
    found = searches.search(PROFILE, roomier, 16, switches=BARE).candidates
    known = [next(c.plan for c in alone.candidates if c.plan.mode is mode) for mode in Mode]
    assert {*known} <= {candidate.plan for candidate in found}
    assert found == search(PROFILE, roomier, 16, switches=BARE, known=known).candidates  # the same each time
    assert [*searching(PROFILE, roomier, 16, switches=BARE, known=known)][-1].candidates == found


@pytest.mark.parametrize(
    ("changes", "switches"),
    [
        ({"minibatch_size": 8}, Switches()),
        ({"devices": (0,)}, Switches()),
        ({"mode": "dp"}, Switches()),
        ({"precision": "bf16"}, Switches()),
        ({"prefetch": 0}, Switches()),
        ({"peer_transfers": False}, Switches()),
        ({"just_in_time_update": False}, Switches()),
        ({"resident_packs": ((0, 3),), "mirrored": True}, BARE),
        ({"device_updates": ((0, 3),)}, Switches(device_updates=False)),
    ],
)
def test_known_plans_that_are_not_looked_for_are_left_out(changes: dict[str, object], switches: Switches) -> None:
    plan = Plan.parse("pp minibatch=16 forward=2[0:3] backward=2[0:3,3:6] devices=1,0").with_(**changes)
    on = MACHINE.with_(memory=10**8)
    found = search(PROFILE, on, 16, modes=("pp",), switches=switches, shown=2, known=[plan])
    assert plan not in {candidate.plan for candidate in found.candidates}
    assert str(plan) not in {rejected.description for rejected in found.rejected}


def test_known_plans_may_be_texts_and_may_not_fit() -> None:
    text = "pp minibatch=16 forward=2[0:3] backward=2[0:3,3:6] devices=1,0 prefetch=1 peer=on update=jit"
    found = search(PROFILE, MACHINE.with_(memory=10**8), 16, shown=2, known=[text])
    known = next(candidate.plan for candidate in found.candidates if str(candidate.plan) == text)
    assert known.fingerprint == PROFILE.fingerprint
    tight = search(PROFILE, MACHINE.with_(memory=3_500_000), 16, shown=2, known=[text])
    assert "its budget is 3.34 MiB" in {rejected.description: rejected.reason for rejected in tight.rejected}[text]


@pytest.mark.parametrize("known", ["dp", (3,), Plan.parse("pp minibatch=16 forward=2[] backward=2[0:6] devices=0")])
def test_what_is_no_sequence_of_plans_is_named(known: object) -> None:
    with pytest.raises(PlanError, match="known must be plans or their texts"):
        search(PROFILE, MACHINE, 16, known=known)  # type: ignore[arg-type]
