"""Lowering: what a Program moves, how it stays within budget, what it refuses."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import toy_profiles as toys

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError, PlanError
from harmony_lab.hardware import pairs_joined
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan, microbatches
from harmony_lab.planner import lower as lower_module
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.simulator.engine import run


def plan(mode: str = "pp", devices: tuple[int, ...] = (0, 1), **changes: object) -> Plan:
    base = Plan.parse(f"{mode} minibatch=16 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0")
    return base.with_(devices=devices, **changes)


def test_plan_and_machine_may_be_texts() -> None:
    profile = toys.profile()
    assert str(lower(str(plan()), profile, "2x3090")) == str(lower(plan(), profile, Machine.preset("2x3090")))


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


def test_what_does_not_fit_ahead_is_found_at_once_and_the_rest_still_comes_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packs = [f"{i}:{i + 1}" for i in range(4)] + ["4:7", "7:10"] + [f"{i}:{i + 1}" for i in range(10, 14)]
    full = f"dp minibatch=4 forward=2[{','.join(packs[:-1])}] backward=2[{','.join(packs)}] devices=0 prefetch=1"
    built = []
    once = lower_module._lowered
    monkeypatch.setattr(lower_module, "_lowered", lambda *given, **how: built.append(once(*given, **how)) or built[-1])

    def ahead(memory_bytes: int) -> set[tuple[int, int]]:
        """Packs whose weights are on their way to backward before the last recompute of the pack before begins."""
        built.clear()
        program = lower(Plan.parse(full), toys.profile(14), toys.gpus(1, memory_bytes=memory_bytes))
        check(program)
        spans = [(span.op, span.start_s) for span in run(program, toys.profile(14), toys.gpus(1)).spans()]
        again = [(op.layers, start_s) for op, start_s in spans if op.kind is OpKind.RECOMPUTE]
        own_s = dict(reversed(again))  # of the first
        coming_s = {op.layers: start_s for op, start_s in spans if _kinds(program, op.writes) == {TensorKind.WEIGHT}}
        return {mine for mine in own_s for _, start_s in again if coming_s[mine] < start_s < own_s[mine]}

    assert {(4, 7), (7, 10)} <= ahead(50_000_000)
    assert len(built) == 1
    few = ahead(6_600_000)  # three layers' weights and gradients, hardly more
    assert len(built) == 2
    assert few == {(7, 10), (2, 3), (1, 2), (0, 1), (10, 11), (11, 12)}


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


def _kinds(program: Program, blocks: Iterable[int]) -> set[TensorKind]:
    return {program.blocks[block].kind for block in blocks}


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


@pytest.mark.parametrize("mode", ["dp", "pp"])
def test_with_less_memory_the_same_ops_wait_for_more(mode: str) -> None:
    """Memory shows in edges only, until what is fetched ahead does not fit."""
    profile = toys.profile()
    loose = lower(plan(mode), profile, toys.gpus(2, memory_bytes=200_000_000))
    tight = lower(plan(mode), profile, toys.gpus(2, memory_bytes=max(peak_bytes(loose)) - 1))
    assert [op._replace(after=()) for op in tight.ops] == [op._replace(after=()) for op in loose.ops]
    assert tight.blocks == loose.blocks
    assert max(peak_bytes(tight)) < max(peak_bytes(loose))
    trace, after = (run(program, profile, toys.gpus(2)) for program in (loose, tight))
    assert after.makespan_s >= trace.makespan_s


def test_outputs_wait_until_those_before_the_last_have_left() -> None:
    """Two buffers: however slow the way out, no third output waits on the device."""
    profile = toys.profile(8, activation_bytes=400_000, layer_s=1e-5)
    machine = toys.gpus(1, memory_bytes=200_000_000, link=1e7)
    trace = run(lower(plan(devices=(0,)), profile, machine), profile, machine)
    (timeline,) = trace.memory
    alive = timeline.num_bytes[:, timeline.kinds.index(TensorKind.ACTIVATION)]
    assert alive.max() <= 4 * profile.boundary_bytes(2, 2)  # two going in, two going out


def test_packs_reduce_through_each_device_in_turn() -> None:
    program = lower(plan("dp"), toys.profile(), toys.gpus(2))
    outs = [op.device for op in program.ops if op.kind is OpKind.SWAP_OUT and _kind(program, op) is TensorKind.GRADIENT]
    assert sorted(outs) == [0, 0, 1, 1]


def _kind(program: Program, op: Op) -> TensorKind:
    return program.blocks[op.reads[0]].kind


def bridged(num_devices: int) -> Machine:
    """Devices that copy to each other over bridges between two of them, or not at all."""
    machine = toys.gpus(num_devices)
    return replace(machine, peer_transfers=False, bridges=pairs_joined(machine.devices, 1e10))


def test_values_go_over_bridges_and_between_other_devices_through_the_host() -> None:
    profile, machine = toys.profile(), bridged(4)
    program = lower(plan(devices=(0, 1, 2, 3)), profile, machine)
    check(program)
    sent = {(program.blocks[op.reads[0]].device, op.device) for op in program.ops if op.kind is OpKind.RECV}
    assert sent == {(0, 1), (2, 3)}
    trace = run(program, profile, machine)
    over = {hop.link for hop, kind in trace.link_bytes if kind is TensorKind.ACTIVATION_GRADIENT}
    assert over > {"gpu0-gpu1", "host-switch"}
    assert trace.peer_bytes < run(lower(plan(devices=(0, 1, 2, 3)), profile, toys.gpus(4)), profile, machine).peer_bytes


@pytest.mark.parametrize(("num_devices", "reduces"), [(2, True), (4, False)])
def test_gradients_are_reduced_over_bridges_where_all_devices_have_one(num_devices: int, reduces: bool) -> None:
    program = lower(plan("dp", devices=tuple(range(num_devices))), toys.profile(), bridged(num_devices))
    check(program)
    assert any(op.kind is OpKind.ALL_REDUCE for op in program.ops) == reduces


def test_weights_of_a_resident_pack_stay_until_its_backward() -> None:
    staying = plan("dp", resident_packs=((2, 4),))
    program = lower(staying, toys.profile(), toys.gpus(2, memory_bytes=200_000_000))
    check(program)
    for device in (0, 1):
        (block,) = [
            number
            for number, block in enumerate(program.blocks)
            if block.kind is TensorKind.WEIGHT and block.layers == (2, 4) and block.device == device
        ]
        users = {op.kind for op in program.ops if block in op.reads}
        assert users == {OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD}
        (last,) = [op for op in program.ops if block in op.frees]
        assert last.kind is OpKind.BACKWARD
        assert last.samples[1] == (8, 16)[device]


def test_a_kept_pack_frees_its_input_and_what_it_saved_with_each_backward() -> None:
    kept = plan("pp", mirrored=True, resident_packs=((2, 4),), kept_packs=((2, 4),))
    program = lower(kept, toys.profile(), toys.gpus(2, memory_bytes=200_000_000))
    backward = [op for op in program.ops if op.kind is OpKind.BACKWARD and op.layers == (2, 4)]
    assert len(backward) == 8
    for op in backward:
        freed = {program.blocks[block].kind: program.blocks[block] for block in op.frees}
        assert freed[TensorKind.SAVED].samples == op.samples
        assert freed[TensorKind.ACTIVATION][2:4] == ((2, 2), op.samples)
