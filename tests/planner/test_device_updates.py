"""Updates on devices as a choice: where memory is left, priced by the simulator, told in words."""

from dataclasses import replace

import pytest
import toy_profiles as toys

from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.bounds import problem_bound
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.explain import ablation
from harmony_lab.planner.limits import host_memory, state_on_devices
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.result import Candidate, SearchResult
from harmony_lab.planner.search import Switches, search
from harmony_lab.program import OpKind, TensorKind
from harmony_lab.simulator.engine import run

SLOW_HOST = toys.profile(6, update_s=0.5)
PLACES = "forward=2[0:2,2:4] backward=2[0:2,2:4,4:6]"


def gpus(num_devices: int, memory_bytes: int) -> Machine:
    """Devices that update far faster than the host."""
    made = toys.gpus(num_devices, memory_bytes=memory_bytes)
    return replace(made, devices=tuple(replace(device, memory_bytes_per_s=1e11) for device in made.devices))


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("memory_bytes", [6_000_000, 12_000_000, 10**8])
def test_the_search_updates_on_devices_what_fits_and_is_never_slower_for_it(
    num_devices: int, memory_bytes: int
) -> None:
    machine = gpus(num_devices, memory_bytes)
    found, without = (
        search(SLOW_HOST, machine, 8, switches=Switches(device_updates=on), shown=4) for on in (True, False)
    )
    assert found.candidates[0].step_s <= without.candidates[0].step_s
    assert found.lower_bound_s <= found.candidates[0].step_s
    assert not any(candidate.plan.device_updates for candidate in without.candidates)
    program = lower(found.best, SLOW_HOST, machine)
    check(program)
    assert max(peak_bytes(program)) <= memory_bytes
    if memory_bytes > 6_000_000:
        assert found.best.device_updates
        assert found.candidates[0].step_s < 0.9 * without.candidates[0].step_s


def test_with_enough_memory_a_plan_is_as_fast_as_its_computing_and_is_told_to_be_plain_training() -> None:
    machine = gpus(1, 10**9)
    text = f"pp minibatch=8 {PLACES} devices=0 resident=0:2,2:4 kept=0:2,2:4 stash=2,4 optimizer=0:2,2:4,4:6"
    plan = Plan.parse(text)
    trace = run(lower(plan, SLOW_HOST, machine), SLOW_HOST, machine)
    weights = SLOW_HOST.weight_bytes(0, 6)
    moved = {key: num_bytes for key, num_bytes in trace.moved_bytes.items() if num_bytes > 1000}
    assert moved == {(HOST, 0, TensorKind.WEIGHT): weights, (0, HOST, TensorKind.WEIGHT): weights}
    computing = 8 * 6 * 0.01 * (1.1 + 2)  # forward with gradient, backward
    assert trace.makespan_s == pytest.approx(computing, rel=0.01)
    told = SearchResult(
        candidates=(Candidate(plan, trace.makespan_s, SLOW_HOST, machine),), rejected=(), lower_bound_s=computing
    ).explain()
    assert "as in plain training: weights come in once, updated weights go out once, nothing else moves" in told


def test_the_ablation_tells_what_updates_on_devices_buy() -> None:
    machine = gpus(2, 10**8)
    plan = Plan.parse(f"dp minibatch=8 {PLACES} devices=0,1 optimizer=0:2,2:4,4:6")
    found = ablation(plan, SLOW_HOST, machine)
    row = found["updates on devices"]
    assert row.plan == plan.with_(device_updates=())
    assert row.loss is not None
    assert row.loss > 1
    assert all(
        found[name].step_s is not None for name in ("just-in-time update", "peer transfers", "packing", "staying")
    )


def test_the_host_need_not_hold_state_that_is_on_devices() -> None:
    machine = gpus(2, 10**8)
    plan = Plan.parse(f"dp minibatch=8 {PLACES} devices=0,1 optimizer=0:2,4:6")
    program = lower(plan, SLOW_HOST, machine)
    assert state_on_devices(program) == SLOW_HOST.optimizer_bytes(0, 2) + SLOW_HOST.optimizer_bytes(4, 6)
    trace = run(program, SLOW_HOST, machine)
    assert host_memory(trace.program, SLOW_HOST, trace.machine).optimizer_state_bytes == SLOW_HOST.optimizer_bytes(2, 4)


def test_what_devices_update_is_reduced_on_one_of_them_and_written_back_once() -> None:
    plan = Plan.parse(f"dp minibatch=8 {PLACES} devices=0,1 optimizer=0:2,2:4,4:6")
    program = lower(plan, SLOW_HOST, gpus(2, 10**8))
    updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
    assert sorted(op.layers for op in updates) == [(0, 2), (2, 4), (4, 6)]
    assert {op.device for op in updates} == {0, 1}  # packs take turns
    outs = [op for op in program.ops if op.kind is OpKind.SWAP_OUT and op.samples == (0, 0)]
    assert [(op.device, op.layers) for op in outs] == [(op.device, op.layers) for op in updates]


def test_the_bound_leaves_to_the_host_what_devices_have_no_memory_for() -> None:
    costs = PackCosts(SLOW_HOST)
    state = SLOW_HOST.optimizer_state_bytes
    on_host, half, none = (
        problem_bound(costs, gpus(1, memory), 1, device_updates=on)
        for memory, on in ((state, False), (state // 2, True), (state, True))
    )
    assert on_host == pytest.approx(6 * 0.5)
    assert half == pytest.approx(on_host / 2)
    assert none < half


def test_packs_that_share_parameters_or_train_nothing_are_no_choice() -> None:
    plan = Plan.parse(f"pp minibatch=8 {PLACES} devices=0,1")
    assert updatable(plan, toys.profile(6, tied=True)) == ((2, 4),)
    assert updatable(plan, toys.profile(6, frozen=3)) == ((2, 4), (4, 6))
    assert updatable(plan.with_(just_in_time_update=False), SLOW_HOST) == ()
    assert updatable(plan.with_(mode="dp", peer_transfers=False), SLOW_HOST) == ()
