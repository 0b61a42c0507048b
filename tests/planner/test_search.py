"""The search finds good plans, explains itself and refuses what cannot fit."""

import random

import pytest
import toy_profiles as toys

from harmony_lab.errors import PlanDoesNotFitError, PlanError
from harmony_lab.plan import Plan
from harmony_lab.planner.bounds import candidate_bound
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.search import search
from harmony_lab.simulator.engine import run


def test_the_best_plan_is_valid_and_no_faster_than_the_bound() -> None:
    profile, machine = toys.profile(8, overhead_s=0.002), toys.gpus(2)
    result = search(profile, machine, 16)
    program = lower(result.best, profile, machine)
    check(program)
    assert run(program, profile, machine).makespan_s == result.candidates[0].step_s
    assert result.candidates[0].step_s >= result.lower_bound_s > 0
    steps = [candidate.step_s for candidate in result.candidates]
    assert steps == sorted(steps)


def test_the_search_beats_random_plans() -> None:
    profile, machine = toys.profile(6, overhead_s=0.003), toys.gpus(2, link=2e8)
    best = search(profile, machine, 12).candidates[0].step_s
    rng = random.Random(1)
    for _ in range(120):
        plan = toys.random_plan(rng, 6, max_devices=2).with_(minibatch_size=12)
        try:
            step = run(lower(plan, profile, machine), profile, machine).makespan_s
        except PlanDoesNotFitError:
            continue
        assert best <= step * 1.02, plan


def test_both_modes_and_unequal_microbatch_sizes_are_looked_at() -> None:
    result = search(toys.profile(8, overhead_s=0.01), toys.gpus(2, memory_bytes=5_000_000), 16)
    plans = [candidate.plan for candidate in result.candidates]
    assert {str(plan.mode) for plan in plans} == {"dp", "pp"}
    assert any(plan.forward_microbatch_size != plan.backward_microbatch_size for plan in plans)


def test_samples_that_influence_each_other_keep_microbatch_sizes_equal() -> None:
    from dataclasses import replace

    profile = replace(toys.profile(8), couples_samples=("norm",))
    result = search(profile, toys.gpus(2), 16)
    assert all(c.plan.forward_microbatch_size == c.plan.backward_microbatch_size for c in result.candidates)


def test_one_layer_larger_than_the_device_is_named_with_bytes_and_budget() -> None:
    with pytest.raises(PlanDoesNotFitError) as caught:
        search(toys.profile(8), toys.gpus(2, memory_bytes=1_500_000), 16)
    message = str(caught.value)
    assert all(part in message for part in ("layer7", "1.43 MiB", "977 KiB weights"))
    assert caught.value.needed_bytes > caught.value.budget_bytes == 1_500_000


def test_microbatches_too_large_are_rejected_with_the_reason() -> None:
    result = search(toys.profile(8, activation_bytes=100_000), toys.gpus(2, memory_bytes=5_000_000), 16)
    reasons = {rejected.description: rejected.reason for rejected in result.rejected}
    assert "alone needs" in reasons["pp, backward microbatches of 8"]


def test_the_bound_of_a_candidate_never_exceeds_its_simulation() -> None:
    rng = random.Random(3)
    for _ in range(60):
        profile, machine = (
            toys.profile(6, tied=rng.random() < 0.5),
            toys.gpus(3, memory_bytes=25_000_000, link=10 ** rng.uniform(7, 9.5)),
        )
        plan = toys.random_plan(rng, 6)
        simulated = run(lower(plan, profile, machine), profile, machine).makespan_s
        assert candidate_bound(plan, PackCosts(profile), machine) <= simulated * (1 + 1e-9)


def test_progress_can_end_the_search() -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(toys.profile(6), toys.gpus(1), 8, progress=stop)


def test_what_binds_follows_the_machine() -> None:
    profile = toys.profile(8)
    assert "What binds is computing" in search(profile, toys.gpus(1), 16).explain()
    assert "What binds is the link host-switch" in search(profile, toys.gpus(1, link=2e6), 16).explain()


def test_the_frame_has_a_row_per_candidate_with_text_that_parses() -> None:
    result = search(toys.profile(6), toys.gpus(2), 8)
    frame = result.to_frame()
    assert len(frame) == len(result.candidates)
    assert Plan.parse(frame.plan[0]) == result.best
    assert (frame.samples_per_s * frame.step_s).round(6).eq(8).all()


def test_no_microbatch_is_left_smaller_than_what_was_measured() -> None:
    from dataclasses import replace

    profile = toys.profile(6)
    layers = tuple(replace(layer, costs=layer.costs[1:]) for layer in profile.layers)
    from_two = replace(profile, layers=layers, microbatch_sizes=profile.microbatch_sizes[1:])
    result = search(from_two, toys.gpus(2), 9, modes=("pp",))
    assert {candidate.plan.backward_microbatch_size for candidate in result.candidates} <= {3, 5, 6, 7}
    with pytest.raises(PlanError, match="a microbatch has 1 samples"):
        lower(result.best.with_(forward_microbatch_size=8, backward_microbatch_size=8), from_two, toys.gpus(2))
