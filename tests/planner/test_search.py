"""The search finds good plans, explains itself and refuses what cannot fit."""

import random
from dataclasses import replace
from typing import Any

import pytest
import toy_profiles as toys

from harmony_lab.costs import ForwardCost
from harmony_lab.errors import PlanDoesNotFitError, PlanError
from harmony_lab.hardware import pairs_joined
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.bounds import candidate_bound, problem_bound
from harmony_lab.planner.candidates import Candidates
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.search import Switches, search, searching
from harmony_lab.simulator.engine import run


def test_the_best_plan_is_valid_and_no_faster_than_the_bound() -> None:
    profile, machine = toys.profile(8, overhead_s=0.002), toys.gpus(2)
    result = search(profile, machine, 16)
    program = lower(result.best, profile, machine)
    check(program)
    assert run(program, profile, machine).makespan_s == result.candidates[0].step_s
    assert result.candidates[0].step_s >= result.lower_bound_s > 0
    steps = [float(f"{candidate.step_s:.9g}") for candidate in result.candidates]
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


def test_bounds_and_forecasts_count_what_goes_in_and_out_of_the_hosts_memory() -> None:
    profile, on = toys.profile(8), toys.gpus(4, memory_bytes=12_000_000, link=1e9)
    rate = 2e6
    slow = replace(on, host=replace(on.host, memory_bytes_per_s=rate))
    result = search(profile, slow, 16)
    weights, gradients = profile.weight_bytes(0, 8), sum(layer.gradient_bytes for layer in profile.layers)
    assert result.lower_bound_s == pytest.approx((weights + gradients) / rate)
    moved_s = result.best_trace.swap_bytes / rate
    assert result.lower_bound_s <= moved_s <= result.candidates[0].step_s
    free = Candidates(PackCosts(profile), on, 16, Mode.PP, prefetch=1, peers=True, budget_bytes=12_000_000).setting
    shared = Candidates(PackCosts(profile), slow, 16, Mode.PP, prefetch=1, peers=True, budget_bytes=12_000_000).setting
    assert (free.down, free.up) == (1e9 / 4, 1e9 / 4)
    assert (shared.down, shared.up) == pytest.approx((rate / 4 * 2 / 3, rate / 4 / 3))


def test_bounds_know_that_gradients_leave_after_all_weights_have_come() -> None:
    profile, rate = toys.profile(8), 1e6
    moved_bytes = profile.weight_bytes(0, 8) + profile.gradient_bytes(0, 8)
    bound = problem_bound(PackCosts(profile), toys.gpus(2, memory_bytes=12_000_000, link=rate), 4)
    assert bound == pytest.approx(moved_bytes / rate)


def test_forecasts_know_which_devices_have_a_bridge() -> None:
    on = toys.gpus(4, link=1e9)
    bridged = replace(on, peer_transfers=False, bridges=pairs_joined(on.devices, 5e9))
    made = {
        mode: Candidates(PackCosts(toys.profile(8)), bridged, 16, mode, prefetch=1, peers=True, budget_bytes=10**7)
        for mode in Mode
    }
    assert made[Mode.PP].setting.peer == pytest.approx([1e9 / 8, 5e9, 1e9 / 8, 5e9])  # up and then down, at a quarter
    assert (made[Mode.PP].setting.peers, made[Mode.DP].setting.peers) == (1, 0)


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
    profile = toys.profile(6)
    layers = tuple(replace(layer, costs=layer.costs[1:]) for layer in profile.layers)
    from_two = replace(profile, layers=layers, microbatch_sizes=profile.microbatch_sizes[1:])
    result = search(from_two, toys.gpus(2), 9, modes=("pp",))
    assert {candidate.plan.backward_microbatch_size for candidate in result.candidates} <= {3, 5, 6, 7}
    with pytest.raises(PlanError, match="a microbatch has 1 samples"):
        lower(result.best.with_(forward_microbatch_size=8, backward_microbatch_size=8), from_two, toys.gpus(2))


def test_the_search_gives_what_it_has_found_so_far_and_ends_with_its_result() -> None:
    profile, machine = toys.profile(6, overhead_s=0.002), toys.gpus(2)
    steps = [result.candidates[0].step_s for result in searching(profile, machine, 8)]
    assert len(steps) > 10
    assert steps == sorted(steps, reverse=True)
    final = search(profile, machine, 8)
    assert final.candidates[0].step_s == steps[-1]
    assert search(profile, machine, 8).candidates == final.candidates


def test_with_enough_memory_nothing_but_weights_and_gradients_moves_and_the_result_says_so() -> None:
    profile = toys.profile(8)
    machine = toys.gpus(1, memory_bytes=10**9)
    result = search(profile, machine, 8, switches=Switches(device_updates=False))
    trace = run(lower(result.best, profile, machine), profile, machine)
    batch = profile.batch_input_bytes(0, 8, 8)
    weights = profile.weight_bytes(0, 8)
    assert trace.swap_bytes <= 2 * weights + 2 * batch + 8 * profile.boundary_bytes(8, 1)
    assert "plain training" in result.explain()
    two = search(profile, toys.gpus(2, memory_bytes=10**9), 8, modes=("dp",))
    assert "plain training" not in two.explain()


def test_the_bound_counts_frozen_layers_at_the_sizes_that_only_their_forward_has() -> None:
    profile = toys.profile(6, frozen=3, overhead_s=0.05)
    forward = ForwardCost(*(0,) * len(ForwardCost._fields))._replace(forward_s=0.06)
    layers = tuple(replace(layer, forward_costs=(forward,)) for layer in profile.layers)
    wide = replace(profile, layers=layers, forward_only_sizes=(64,))
    result = search(wide, toys.gpus(1, memory_bytes=10**9, link=1e12), 64)
    assert result.lower_bound_s <= result.candidates[0].step_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefetch": ()}, r"Switches\.prefetch must hold a value or more"),
        ({"prefetch": 1}, "prefetch must be numbers of packs from 0 up, such as .*, got 1"),
        ({"prefetch": (0, -1)}, "prefetch must be numbers of packs"),
        ({"prefetch": ("1",)}, "prefetch must be numbers of packs"),
        ({"peer_transfers": (1,)}, "peer_transfers must be True, False or both"),
    ],
)
def test_switches_hold_something_to_choose_from(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Switches(**given)


def test_everything_that_a_search_cannot_use_is_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        search(toys.profile(4), toys.gpus(2), 0, modes=("tp",), switches=(0, 1), shown="all")  # type: ignore[arg-type]
    assert {line.split()[0] for line in caught.value.violations} == {"minibatch_size", "modes", "switches", "shown"}


def test_a_minibatch_that_cannot_be_dealt_is_the_reason_given() -> None:
    with pytest.raises(PlanError, match="a minibatch of 2 cannot be dealt to 4 devices"):
        search(toys.profile(4), toys.gpus(4), 2, modes=("dp",))
