"""What emulated devices take beside kernels and links: measured, kept in the profile, simulated."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import toy_profiles as toys
from small_layers import mlp

from harmony_lab.costs import Emulation, Profile
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.profiler import emulation
from harmony_lab.profiler.measure import _costs_of, profile
from harmony_lab.program import OpKind
from harmony_lab.simulator.engine import run

EMULATION = Emulation(compute_s=0.002, transfer_s=0.003, waking_s=0.0005, copied_bytes_per_s=1e9, kernels_slowed=1.5)
PLAN = Plan.parse("pp minibatch=2 forward=2[] backward=2[0:4] devices=0")


def test_a_profile_of_emulated_devices_knows_what_running_them_adds() -> None:
    found = profile(mlp(), Machine.emulated(2), microbatch_sizes=(2,), trials=1, cache=False)
    assert found.emulation is not None
    assert found.emulation.compute_s >= 0
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


def test_real_devices_are_simulated_without() -> None:
    machine = toys.gpus(2, memory_bytes=10**9)
    plan = PLAN.with_(mode="dp", devices=(0, 1))
    costs = toys.profile(4)
    program = lower(plan, costs, machine)
    transfers = [number for number in range(len(program.ops)) if program.transfers(number)]
    plain, emulated = (run(program, given, machine) for given in (costs, replace(costs, emulation=EMULATION)))
    assert emulated.end_s[transfers].tolist() == plain.end_s[transfers].tolist()


@pytest.mark.parametrize(
    ("slower", "like"),
    [
        (emulation._with_slower_ops, EMULATION._replace(compute_s=0.006)),
        (emulation._with_slower_kernels, EMULATION._replace(kernels_slowed=3.0)),
    ],
)
def test_several_devices_are_slowed_until_the_simulator_agrees(
    slower: Callable[[Emulation, float], Emulation], like: Emulation
) -> None:
    traces, costs = emulation._run(2, emulation._USUAL, _costs_of)
    as_if_measured = run(traces[0].program, replace(costs, emulation=like), traces[0].machine)
    found = emulation._slowed([as_if_measured], costs, partial(slower, EMULATION))
    assert found == pytest.approx(like, rel=0.01)


def test_devices_wait_for_each_other_in_what_slows_them() -> None:
    """What several devices lose is mostly waiting for whichever is late: a program without waiting would not see it."""
    traces, _ = emulation._run(2, emulation._TINY, _costs_of)
    program = traces[0].program
    forwards = [op for op in program.ops if op.kind is OpKind.FORWARD]
    awaited = {(op.device, program.ops[other].device) for op in forwards for other in op.after}
    assert {(0, 1), (1, 0)} <= awaited
