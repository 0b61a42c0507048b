"""The simulator against closed forms."""

import pytest
import toy_profiles as toys

from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.program import Block, Op, OpKind, Program, Stream, TensorKind
from harmony_lab.sharing import Flow, SharedResources, fair_rates
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace

ONE_PACK = Plan.parse("pp minibatch=8 forward=2[] backward=2[0:4] devices=0")


def swap_ins(*sizes: tuple[int, int], machine: Machine) -> Trace:
    """Independent swap-ins of (device, bytes), all at time zero."""
    blocks = tuple(Block(TensorKind.WEIGHT, device, (0, 1), (0, 0), size) for device, size in sizes)
    ops = tuple(
        Op(OpKind.SWAP_IN, device, Stream.SWAP_IN, (0, 1), (0, 0), writes=(i,)) for i, (device, _) in enumerate(sizes)
    )
    program = Program(minibatch_size=1, num_layers=4, budgets=machine.budgets, blocks=blocks, ops=ops)
    return run(program, toys.profile(4), machine)


def test_one_device_alone_takes_the_sum_of_its_work() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=10_000_000, link=1e9)
    trace = run(lower(ONE_PACK, profile, machine), profile, machine)
    weights = 4e6 / 1e9
    x = 2 * profile.batch_input_bytes(0, 4, 1) / 1e9
    computing = 4 * 4 * 2 * (0.011 + 0.02)
    gradients, update = 4e6 / 1e9, 4 * 0.005
    assert trace.makespan_s == pytest.approx(weights + x + computing + gradients + update)


def test_transfers_share_a_link_fairly() -> None:
    machine = toys.gpus(2, link=1e6, peer_link=1e9)
    trace = swap_ins((0, 1_000_000), (1, 3_000_000), machine=machine)
    assert trace.end_s.tolist() == pytest.approx([2.0, 4.0])  # half each until the first ends, then all of it


def test_a_device_with_a_slow_link_leaves_the_rest_to_the_other() -> None:
    machine = toys.gpus(2, link=1e6, peer_link=8e5)
    trace = swap_ins((0, 800_000), machine=machine)
    assert trace.makespan_s == pytest.approx(1.0)  # its own link binds
    rates = fair_rates([Flow(("up", "a"), 1.0), Flow(("up", "b"), 1.0)], {"up": 10.0, "a": 2.0, "b": 100.0})
    assert rates == pytest.approx([2.0, 8.0])


def test_a_cap_frees_capacity_for_others() -> None:
    rates = fair_rates([Flow(("r",), 1.0, cap=1.0), Flow(("r",), 1.0, cap=9.0), Flow((), 1.0, cap=3.0)], {"r": 4.0})
    assert rates == pytest.approx([1.0, 3.0, 3.0])


def test_weights_count_against_capacity() -> None:
    rates = fair_rates([Flow(("cores",), 1.0, cap=1.0, weight=2.0), Flow(("cores",), 1.0, cap=1.0)], {"cores": 2.0})
    assert rates == pytest.approx([2 / 3, 2 / 3])


def test_directions_are_independent() -> None:
    machine = toys.gpus(1, link=1e6)
    blocks = (
        Block(TensorKind.WEIGHT, 0, (0, 1), (0, 0), 1_000_000),
        Block(TensorKind.GRADIENT, 0, (1, 2), (0, 0), 1_000_000),
        Block(TensorKind.GRADIENT, HOST, (1, 2), (0, 0), 1_000_000),
    )
    ops = (
        Op(OpKind.SWAP_IN, 0, Stream.SWAP_IN, (0, 1), (0, 0), writes=(0,)),
        Op(OpKind.SWAP_OUT, 0, Stream.SWAP_OUT, (1, 2), (0, 0), reads=(1,), writes=(2,)),
    )
    program = Program(minibatch_size=1, num_layers=4, budgets=machine.budgets, blocks=blocks, ops=ops)
    assert run(program, toys.profile(4), machine).end_s.tolist() == pytest.approx([1.0, 1.0])


def test_peer_transfers_stay_off_the_uplink() -> None:
    machine = toys.gpus(2)
    assert [hop.link for hop in machine.route(0, 1)] == ["switch-gpu0", "switch-gpu1"]
    assert [hop.link for hop in machine.route(HOST, 1)] == ["host-switch", "switch-gpu1"]


def test_emulated_devices_share_the_hosts_cores() -> None:
    from dataclasses import replace

    from harmony_lab.machine import Backend, Host

    machine = toys.gpus(2, memory_bytes=30_000_000, link=1e15, peer_link=1e15)
    devices = tuple(replace(device, backend=Backend.EMULATED) for device in machine.devices)
    profile = toys.profile(4, update_s=0.0)
    plan = ONE_PACK.with_(mode="dp", devices=(0, 1))

    def makespan(cores: int) -> float:
        on = replace(machine, devices=devices, host=Host(memory_bytes=2**34, num_cores=cores))
        return run(lower(plan, profile, on), profile, on).makespan_s

    assert makespan(1) == pytest.approx(2 * makespan(2), rel=1e-6)


def test_a_faster_link_or_more_memory_never_hurts_a_plan() -> None:
    profile = toys.profile(8)
    plan = Plan.parse("pp minibatch=8 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0,1")
    steps = []
    for link in (1e7, 1e8, 1e9):
        machine = toys.gpus(2, link=link)
        steps.append(run(lower(plan, profile, machine), profile, machine).makespan_s)
    assert steps == sorted(steps, reverse=True)


def test_memory_over_time_returns_to_zero_and_peaks_where_the_blocks_say() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=10_000_000)
    trace = run(lower(ONE_PACK, profile, machine), profile, machine)
    (timeline,) = trace.memory
    assert timeline.total_bytes[-1] == 0
    weights = timeline.num_bytes[:, timeline.kinds.index(TensorKind.WEIGHT)]
    assert weights.max() == profile.weight_bytes(0, 4)


def test_the_same_program_gives_the_same_trace() -> None:
    profile, machine = toys.profile(6), toys.gpus(2)
    program = lower(Plan.parse("dp minibatch=8 forward=2[0:3] backward=2[0:3,3:6] devices=0,1"), profile, machine)
    first, second = run(program, profile, machine), run(program, profile, machine)
    assert first.start_s.tolist() == second.start_s.tolist()
    assert first.end_s.tolist() == second.end_s.tolist()


def test_shared_resources_move_flows_in_time() -> None:
    shared = SharedResources({"link": 10.0})
    shared.add("a", Flow(("link",), 10.0))
    shared.advance(0.5)
    shared.add("b", Flow(("link",), 10.0))
    assert shared.next_completion() == (pytest.approx(1.5), "a")
    shared.advance(1.5)
    shared.remove("a")
    assert shared.next_completion() == (pytest.approx(2.0), "b")
