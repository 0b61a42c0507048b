"""What emulated devices take beside kernels and links: measured, kept in the profile, simulated."""

from dataclasses import replace

import pytest
import torch
import toy_profiles as toys
from small_layers import mlp

from harmony_lab.costs import Profile
from harmony_lab.emulation import Emulation
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.profiler import emulation
from harmony_lab.profiler.measure import _costs_of, profile
from harmony_lab.program import OpKind
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace

EMULATION = Emulation(compute_s=0.002, transfer_s=0.003, waking_s=0.0005, copied_bytes_per_s=1e9, kernels_slowed=1.5)
COMPUTING = (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD)
PLAN = Plan.parse("pp minibatch=2 forward=2[] backward=2[0:4] devices=0")


def test_a_profile_of_emulated_devices_knows_what_running_them_adds() -> None:
    found = profile(mlp(), Machine.emulated(2), microbatch_sizes=(2,), trials=1, cache=False)
    assert found.emulation is not None
    assert found.emulation.compute_s >= 0
    assert found.emulation.alone_s >= 0
    assert min(found.emulation.transfer_s, found.emulation.waking_s, found.emulation.copied_bytes_per_s) > 0
    assert Profile.from_json(found.to_json()) == found
    assert Profile.from_json({**found.to_json(), "emulation": None}).emulation is None


def test_it_is_measured_whatever_type_numbers_have_by_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert emulation.emulation_of(Machine.emulated(1), _costs_of, anew=True) is not None
    finally:
        torch.set_default_dtype(torch.float32)


def test_ops_of_emulated_devices_take_their_part_of_a_core_too() -> None:
    machine = Machine.emulated(1, memory="1GiB", link=1e8)
    machine = replace(machine, host=replace(machine.host, num_cores=16))
    costs = toys.profile(4)
    program = lower(PLAN, costs, machine)
    plain, emulated = (run(program, given, machine) for given in (costs, replace(costs, emulation=EMULATION)))
    for number, op in enumerate(program.ops):
        before, after = (trace.end_s[number] - trace.start_s[number] for trace in (plain, emulated))
        if program.transfers(number):
            copied_s = 0.003 + sum(part.num_bytes for part in program.transfers(number)) / 1e9
            assert after == pytest.approx(max(before, copied_s) + 0.0005), op
        else:
            assert after == pytest.approx(1.5 * before + 0.002 + 0.0005), op


def test_in_virtual_time_no_device_waits_for_the_cores_of_another() -> None:
    real_time = Machine.emulated(4, memory="1GiB", link=1e8)
    enough = replace(real_time, host=replace(real_time.host, num_cores=16))
    costs = toys.profile(4)
    program = lower(PLAN.with_(mode="dp", minibatch_size=8, devices=(0, 1, 2, 3)), costs, enough)
    plain = run(program, costs, enough)
    one_core = replace(real_time, virtual_time=True, host=replace(real_time.host, num_cores=1))
    virtual = run(program, replace(costs, emulation=EMULATION._replace(alone_s=0.001)), one_core)
    computing = [number for number, op in enumerate(program.ops) if op.device != HOST and op.kind in COMPUTING]
    assert {program.ops[number].device for number in computing} == {0, 1, 2, 3}
    for number in computing:
        before, after = (trace.end_s[number] - trace.start_s[number] for trace in (plain, virtual))
        assert after == pytest.approx(before + 0.001)


def test_real_devices_are_simulated_without() -> None:
    machine = toys.gpus(2, memory_bytes=10**9)
    plan = PLAN.with_(mode="dp", devices=(0, 1))
    costs = toys.profile(4)
    program = lower(plan, costs, machine)
    transfers = [number for number in range(len(program.ops)) if program.transfers(number)]
    plain, emulated = (run(program, given, machine) for given in (costs, replace(costs, emulation=EMULATION)))
    assert emulated.end_s[transfers].tolist() == plain.end_s[transfers].tolist()


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.3])
def test_what_several_devices_lose_is_found_however_fast_kernels_are_then(speed: float) -> None:
    """Of rounds in which all kernels, of one device and of two, took ``speed`` times what the profile says."""
    rounds, costs = emulation._run((1, 2), emulation._USUAL, _costs_of, 1)
    alone = EMULATION._replace(kernels_slowed=1.0)

    def measured(together: Emulation) -> list[tuple[Trace, ...]]:
        then = [given._replace(kernels_slowed=speed * given.kernels_slowed) for given in (alone, together)]
        pairs = zip(then, rounds[0], strict=True)
        return [tuple(run(t.program, replace(costs, emulation=given), t.machine) for given, t in pairs)]

    ops = alone._replace(compute_s=3 * alone.compute_s)
    assert emulation._slower_ops(measured(ops), costs, alone, alone) == pytest.approx(3, rel=0.01)
    kernels = ops._replace(kernels_slowed=1.2)
    assert emulation._slower_kernels(measured(kernels), costs, alone, ops) == pytest.approx(1.2, rel=0.01)


def test_devices_wait_for_each_other_in_what_slows_them() -> None:
    """What several devices lose is mostly waiting for whichever is late: a program without waiting would not see it."""
    rounds, _ = emulation._run((2,), emulation._TINY, _costs_of, 1)
    program = rounds[0][0].program
    forwards = [op for op in program.ops if op.kind is OpKind.FORWARD]
    awaited = {(op.device, program.ops[other].device) for op in forwards for other in op.after}
    assert {(0, 1), (1, 0)} <= awaited
