"""Lowering: what a Program moves, how it stays within budget, what it refuses."""

import random
from itertools import pairwise

import pytest
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError, PlanError
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan, microbatches
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.program import OpKind, Program, Stream, TensorKind
from harmony_lab.simulator.engine import run


def plan(mode: str = "pp", devices: tuple[int, ...] = (0, 1), **changes: object) -> Plan:
    base = Plan.parse(f"{mode} minibatch=16 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0")
    return base.with_(devices=devices, **changes)


def moved(program: Program, machine: Machine) -> dict[tuple[bool, TensorKind], int]:
    """Bytes by (towards the device?, kind), over the host link."""
    trace = run(program, toys.profile(), machine)
    totals: dict[tuple[bool, TensorKind], int] = {}
    for (source, destination, kind), num_bytes in trace.moved_bytes.items():
        if HOST in (source, destination):
            key = (source == HOST, kind)
            totals[key] = totals.get(key, 0) + num_bytes
    return totals


def test_pipeline_moves_weights_once_forward_once_backward_but_the_fused_pack_once() -> None:
    profile, machine = toys.profile(), toys.gpus(2)
    totals = moved(lower(plan(), profile, machine), machine)
    whole = profile.weight_bytes(0, 8)
    fused = profile.weight_bytes(6, 8)
    assert totals[True, TensorKind.WEIGHT] == 2 * whole - fused
    assert totals[False, TensorKind.GRADIENT] == whole
    assert (False, TensorKind.WEIGHT) not in totals


def test_data_parallel_moves_weights_to_every_device_and_reduced_gradients_once() -> None:
    profile, machine = toys.profile(), toys.gpus(2)
    program = lower(plan("dp"), profile, machine)
    totals = moved(program, machine)
    whole, fused = profile.weight_bytes(0, 8), profile.weight_bytes(6, 8)
    assert totals[True, TensorKind.WEIGHT] == 2 * (2 * whole - fused)
    assert totals[False, TensorKind.GRADIENT] == whole
    assert run(program, profile, machine).peer_bytes == 2 * (2 - 1) * whole


def test_data_parallel_without_peers_moves_every_devices_gradients() -> None:
    machine = toys.gpus(2)
    totals = moved(lower(plan("dp", peer_transfers=False), toys.profile(), machine), machine)
    assert totals[False, TensorKind.GRADIENT] == 2 * toys.profile().weight_bytes(0, 8)


def test_pack_inputs_go_out_once_and_come_back_once() -> None:
    profile, machine = toys.profile(), toys.gpus(2)
    totals = moved(lower(plan(), profile, machine), machine)
    stash = sum(profile.boundary_bytes(boundary, 16) for boundary in (2, 4))
    loss = 8 * profile.boundary_bytes(8, 2)  # one scalar for each of eight microbatches
    assert totals[False, TensorKind.ACTIVATION] == stash + loss
    assert totals[True, TensorKind.ACTIVATION] == stash


def test_with_peers_activations_cross_between_devices() -> None:
    profile, machine = toys.profile(), toys.gpus(2)
    trace = run(lower(plan(), profile, machine), profile, machine)
    between = sum(profile.boundary_bytes(boundary, 16) for boundary in (2, 4, 6))
    assert trace.peer_bytes == 2 * between  # activations one way, their gradients the other


def test_a_tied_parameter_is_updated_once_by_its_first_pack_with_both_gradients() -> None:
    profile = toys.profile(tied=True)
    program = lower(plan(), profile, toys.gpus(2))
    updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
    gradients_read = [{program.blocks[block].layers for block in op.reads} for op in updates]
    assert gradients_read == [{(6, 8)}, {(4, 6)}, {(2, 4)}, {(0, 2), (6, 8)}]
    assert [len(op.frees) for op in updates] == [0, 1, 1, 2]


def test_backward_stops_below_the_first_trainable_layer() -> None:
    program = lower(plan(), toys.profile(frozen=4), toys.gpus(2))
    backward = {op.layers for op in program.ops if op.kind is OpKind.BACKWARD}
    assert backward == {(4, 6), (6, 8)}
    assert {op.layers for op in program.ops if op.kind is OpKind.UPDATE} == {(4, 6), (6, 8)}


def test_uneven_microbatches_cover_every_sample_once_and_reslice_the_stash() -> None:
    program = lower(
        plan(minibatch_size=11, forward_microbatch_size=4, backward_microbatch_size=3), toys.profile(), toys.gpus(2)
    )
    check(program)
    first = [op.samples for op in program.ops if op.kind is OpKind.FORWARD and op.layers == (0, 2)]
    fused = [op.samples for op in program.ops if op.kind is OpKind.FORWARD and op.layers == (6, 8)]
    assert first == list(microbatches(0, 11, 4)) == [(0, 4), (4, 8), (8, 11)]
    assert fused == [(0, 3), (3, 6), (6, 9), (9, 11)]


def test_updated_buffers_come_out_after_the_real_forward_only() -> None:
    program = lower(plan(), toys.profile(buffers=True), toys.gpus(2))
    check(program)
    outs = [
        op
        for op in program.ops
        if op.kind is OpKind.SWAP_OUT and TensorKind.BUFFER in {program.blocks[b].kind for b in op.reads}
    ]
    assert [op.layers for op in outs] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_prefetch_brings_the_next_packs_weights_while_this_one_computes() -> None:
    machine, profile = toys.gpus(1, memory_bytes=12_000_000, link=5e7), toys.profile()

    def idle(prefetch: int) -> float:
        trace = run(lower(plan(devices=(0,), prefetch=prefetch), profile, machine), profile, machine)
        return trace.bubble_fraction

    assert idle(1) < idle(0)


def test_prefetch_is_given_up_where_it_does_not_fit() -> None:
    profile = toys.profile()
    tight = toys.gpus(1, memory_bytes=4_600_000)  # weights and gradients of a pack are 4 MB
    program = lower(plan(devices=(0,), prefetch=1), profile, tight)
    check(program)
    assert max(peak_bytes(program)) <= 4_600_000


def test_updates_at_the_end_come_after_all_backward_work() -> None:
    program = lower(plan(just_in_time_update=False), toys.profile(), toys.gpus(2))
    check(program)
    kinds = [op.kind for op in program.ops]
    assert set(kinds[-4:]) == {OpKind.UPDATE}


def test_a_plan_too_large_is_refused_with_numbers_and_can_still_be_drawn() -> None:
    profile, small = toys.profile(), toys.gpus(2, memory_bytes=3_000_000)
    with pytest.raises(PlanDoesNotFitError, match=r"backward of layers 6:8 .* its budget is 2.86 MiB") as caught:
        lower(plan(), profile, small)
    assert caught.value.needed_bytes > caught.value.budget_bytes == 3_000_000
    drawn = lower(plan(), profile, small, allow_overrun=True)
    assert max(peak_bytes(drawn)) > 3_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": (0, 5)}, "uses device 5"),
        ({"forward_microbatch_size": 16}, "measured up to 8"),
        ({"backward_packs": ((0, 2), (2, 7)), "forward_packs": ((0, 2),)}, "for 7 layers, the model has 8"),
        ({"fingerprint": "other"}, "made for another model"),
    ],
)
def test_a_plan_that_does_not_suit_says_why(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lower(plan(**changes), toys.profile(), toys.gpus(2))


def _least_memory(full: Plan, profile: Profile) -> int:
    """The smallest budget, to 1 KB, in which that plan can be lowered."""
    low, high = 0, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            lower(full, profile, toys.gpus(3, memory_bytes=middle * 1000))
        except PlanDoesNotFitError:
            low = middle
        else:
            high = middle
    return high * 1000


@pytest.mark.parametrize("mode", ["dp", "pp"])
def test_a_smaller_last_minibatch_fits_in_the_least_memory_that_the_full_one_fits_in(mode: str) -> None:
    profile = toys.profile(8, activation_bytes=100_000)
    packs = [f"{i}:{i + 1}" for i in range(8)]
    full = Plan.parse(f"{mode} minibatch=8 forward=2[{','.join(packs[:-1])}] backward=2[{','.join(packs)}] devices=0,1")
    machine = toys.gpus(2, memory_bytes=_least_memory(full, profile))
    for size in range(1, 8):  # in dp, shares of 5 samples are 2 and 3: one device has half of the other's microbatches
        check(lower(full.for_minibatch(size), profile, machine))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), tied=st.booleans(), buffers=st.booleans(), frozen=st.integers(0, 3))
def test_every_plan_lowers_to_a_valid_program(seed: int, tied: bool, buffers: bool, frozen: int) -> None:
    rng = random.Random(seed)
    num_layers = rng.randint(4, 9)
    profile = toys.profile(num_layers, tied=tied, buffers=buffers, frozen=frozen)
    machine = toys.gpus(3, memory_bytes=rng.choice((25_000_000, 12_000_000)))
    candidate = toys.random_plan(rng, num_layers)
    try:
        program = lower(candidate, profile, machine)
    except PlanDoesNotFitError:
        return
    check(program)
    assert Program.parse(str(program)) == program
    trace = run(program, profile, machine)
    bound = peak_bytes(program)
    assert all(
        peak <= most <= budget for peak, most, budget in zip(trace.peak_bytes, bound, program.budgets, strict=True)
    )
    for queue in (q for key, q in program.queues.items() if key[1] is not Stream.MEMORY):
        assert all(trace.end_s[a] <= trace.start_s[b] for a, b in pairwise(queue))
    assert all(trace.end_s[other] <= trace.start_s[k] for k, op in enumerate(program.ops) for other in op.after)
