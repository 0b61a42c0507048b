"""On problems small enough to try every plan, the search finds the best one."""

import random
from collections.abc import Iterator
from dataclasses import replace

import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.search import Switches, search
from harmony_lab.simulator.engine import makespan_s

CASES = 200
SEEDS = st.integers(0, 10**6)
SWITCHES = Switches(prefetch=(1,), staying=False)


def problem(rng: random.Random) -> tuple[Profile, Machine, int]:
    """Three layers of different sizes, one or two devices, links and memory that bind or do not."""
    profile = toys.profile(3, overhead_s=rng.choice((0, 0.002, 0.02)), update_s=rng.choice((0.001, 0.02)))
    layers = []
    for kind, layer in enumerate(profile.layers):
        share = rng.choice((0.3, 1, 1, 2))
        costs = tuple(
            cost._replace(
                forward_s=cost.forward_s * share,
                recompute_s=cost.recompute_s * share,
                backward_s=cost.backward_s * share,
            )
            for cost in layer.costs
        )
        num_bytes = int(layer.parameter_bytes * share) // 64 * 64
        layers.append(replace(layer, kind=kind, parameter_bytes=num_bytes, gradient_bytes=num_bytes, costs=costs))
    machine = toys.gpus(
        rng.randint(1, 2),
        memory_bytes=rng.choice((6_500_000, 8_000_000, 12_000_000)),
        link=10 ** rng.uniform(7.5, 9.5),
        peer_link=10 ** rng.uniform(8, 9.5),
    )
    return replace(profile, layers=tuple(layers)), machine, rng.randint(2, 4)


def tilings(start: int, stop: int) -> Iterator[tuple[Pack, ...]]:
    if start == stop:
        yield ()
    for edge in range(start + 1, stop + 1):
        for rest in tilings(edge, stop):
            yield (Pack(start, edge), *rest)


def every_plan(profile: Profile, machine: Machine, minibatch: int) -> Iterator[Plan]:
    for mode in Mode if machine.num_devices > 1 else (Mode.DP,):
        for backward in tilings(0, len(profile)):
            for forward in tilings(0, backward[-1].start):
                for backward_size in range(1, minibatch + 1):
                    for forward_size in range(1, minibatch + 1) if forward else (backward_size,):
                        yield Plan(
                            mode=mode,
                            minibatch_size=minibatch,
                            forward_microbatch_size=forward_size,
                            forward_packs=forward,
                            backward_microbatch_size=backward_size,
                            backward_packs=backward,
                            devices=tuple(range(machine.num_devices)),
                            fingerprint=profile.fingerprint,
                        )


def optimum(profile: Profile, machine: Machine, minibatch: int) -> float:
    costs = PackCosts(profile)
    found = []
    for plan in every_plan(profile, machine, minibatch):
        try:
            program = lower(plan, profile, machine, costs=costs)
        except PlanDoesNotFitError:
            continue
        found.append(makespan_s(program, profile, machine))
    return min(found)


def test_the_search_finds_the_optimum_of_small_problems() -> None:
    rng = random.Random(0)
    gaps = []
    for _ in range(CASES):
        profile, machine, minibatch = problem(rng)
        best = optimum(profile, machine, minibatch)
        result = search(profile, machine, minibatch, switches=SWITCHES)
        assert result.lower_bound_s <= best * (1 + 1e-9)
        gaps.append(result.candidates[0].step_s / best - 1)
    assert min(gaps) >= -1e-9
    assert max(gaps) <= 0.02
    assert sum(gap <= 1e-9 for gap in gaps) >= 0.95 * CASES


def better(machine: Machine, memory: float, bandwidth: float) -> Machine:
    """So many times the memory and the links' rates."""
    links = tuple(replace(link, bytes_per_s=bandwidth * link.bytes_per_s) for link in machine.links)
    return replace(machine.with_(memory=int(memory * machine.budgets[0])), links=links)


FACTORS = {"memory": st.floats(1, 4), "bandwidth": st.floats(1, 10)}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=SEEDS, **FACTORS)
def test_more_memory_or_bandwidth_never_makes_the_best_plan_slower(seed: int, memory: float, bandwidth: float) -> None:
    profile, machine, minibatch = problem(random.Random(seed))
    before = search(profile, machine, minibatch, switches=SWITCHES).candidates[0].step_s
    for faster in (better(machine, memory, 1), better(machine, 1, bandwidth)):
        assert search(profile, faster, minibatch, switches=SWITCHES).candidates[0].step_s <= before * (1 + 1e-9)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS, **FACTORS)
def test_nor_with_every_switch_free_where_the_best_plan_from_before_is_known(
    seed: int, memory: float, bandwidth: float
) -> None:
    profile, machine, minibatch = problem(random.Random(seed))
    free = Switches(prefetch=(0, 1))
    before = search(profile, machine, minibatch, switches=free, shown=2)
    on = better(machine, memory, bandwidth)
    after = search(profile, on, minibatch, switches=free, shown=2, known=[before.best])
    assert after.candidates[0].step_s <= before.candidates[0].step_s * (1 + 1e-9)
