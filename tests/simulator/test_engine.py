"""Whole iterations against closed forms."""

import json
from dataclasses import replace

import pytest
import toy_profiles as toys

from harmony_lab.errors import ProgramError
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.program import Op, OpKind, Program, Stream, TensorKind
from harmony_lab.simulator.engine import makespan_s, run

ONE_PACK = Plan.parse("pp minibatch=8 forward=2[] backward=2[0:4] devices=0")
LINK, LAYER_BYTES, UPDATE_S = 1e9, 1_000_000, 0.005
FORWARD_S, RECOMPUTE_S, BACKWARD_S = 0.01, 0.011, 0.02  # of a layer and sample


def test_one_device_alone_takes_the_sum_of_its_work() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=10_000_000, link=LINK)
    trace = run(lower(ONE_PACK, profile, machine), profile, machine)
    weights = 4e6 / LINK
    x = 2 * profile.batch_input_bytes(0, 4, 1) / LINK
    computing = 4 * 4 * 2 * (RECOMPUTE_S + BACKWARD_S)
    gradients, update = 4e6 / LINK, 4 * UPDATE_S
    assert trace.makespan_s == pytest.approx(weights + x + computing + gradients + update)


def staying(prefetch: int) -> Plan:
    """Four packs of two layers, on one device; activations stay there."""
    packs = "0:2,2:4,4:6"
    return Plan.parse(
        f"pp minibatch=8 forward=2[{packs}] backward=2[{packs},6:8] devices=0 prefetch={prefetch} stash=2,4,6"
    )


COMPUTING = 8 * (6 * FORWARD_S + 8 * (RECOMPUTE_S + BACKWARD_S))  # of 8 samples


def test_without_prefetch_one_device_takes_the_sum_of_fetching_computing_and_giving_back() -> None:
    profile, machine = toys.profile(8), toys.gpus(1, memory_bytes=100_000_000, link=LINK)
    weights = (8 + 6) * LAYER_BYTES / LINK
    inputs = 3 * profile.batch_input_bytes(0, 8, 8) / LINK  # first pack twice, last pack once
    gradients = 8 * LAYER_BYTES / LINK
    expected = weights + inputs + COMPUTING + gradients + 2 * UPDATE_S  # only the last pack's update is left over
    assert makespan_s(lower(staying(0), profile, machine), profile, machine) == pytest.approx(expected)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_prefetch_hides_all_but_the_first_fetch_and_the_last_gradients_behind_computing(prefetch: int) -> None:
    profile, machine = toys.profile(8), toys.gpus(1, memory_bytes=100_000_000, link=LINK)
    first = 2 * LAYER_BYTES / LINK + profile.batch_input_bytes(0, 2, 2) / LINK
    last = 2 * LAYER_BYTES / LINK + 2 * UPDATE_S
    made = makespan_s(lower(staying(prefetch), profile, machine), profile, machine)
    assert made == pytest.approx(first + COMPUTING + last)


def test_values_do_not_wait_behind_the_weights_of_the_next_pack() -> None:
    """Weights take as long as computing three of a pack's four microbatches; boundaries' values are on the host."""
    profile = toys.profile(8)
    link = 2 * LAYER_BYTES / (3 * 2 * 2 * FORWARD_S)
    machine = toys.gpus(1, memory_bytes=100_000_000, link=link)
    ends = 4 * LAYER_BYTES / link + 2 * UPDATE_S  # the first pack's weights, the last one's gradients
    made = makespan_s(lower(staying(1).with_(device_stash=()), profile, machine), profile, machine)
    assert COMPUTING + ends < made < 1.03 * (COMPUTING + ends)


def test_two_devices_work_on_different_microbatches_at_the_same_time() -> None:
    """Short packs on one device, the long last one on the other, which is never idle::

    d0  FFFF.R.....BR......BR......BR......B     F forward, R recompute, B backward
    d1   LLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLL      L forward and backward of the last pack
    """
    profile = toys.profile(8, update_s=0.0)
    machine = toys.gpus(2, memory_bytes=100_000_000, link=1e15, peer_link=1e15)
    plan = Plan.parse("pp minibatch=8 forward=2[0:2] backward=2[0:2,2:8] devices=0,1")
    forward, last = 2 * 2 * FORWARD_S, 6 * 2 * (RECOMPUTE_S + BACKWARD_S)
    made = makespan_s(lower(plan, profile, machine), profile, machine)
    assert made == pytest.approx(forward + 4 * last + 2 * 2 * BACKWARD_S)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_devices_that_share_the_samples_share_the_time(num_devices: int) -> None:
    profile = toys.profile(4, update_s=0.0)
    machine = toys.gpus(num_devices, memory_bytes=100_000_000, link=1e15, peer_link=1e15)
    plan = ONE_PACK.with_(mode="dp", devices=range(num_devices))
    computing = 8 / num_devices * 4 * (RECOMPUTE_S + BACKWARD_S)
    assert makespan_s(lower(plan, profile, machine), profile, machine) == pytest.approx(computing)


def test_kept_packs_save_their_forward_and_pay_for_keeping() -> None:
    """A forward with gradient instead of one without and a recompute."""
    profile, machine = toys.profile(8), toys.gpus(1, memory_bytes=100_000_000, link=LINK)
    plan = staying(1).with_(resident_packs=((0, 2), (4, 6)))
    kept = plan.with_(kept_packs=((4, 6),))
    before, after = (makespan_s(lower(each, profile, machine), profile, machine) for each in (plan, kept))
    assert before - after == pytest.approx(8 * 2 * FORWARD_S)


def test_memory_over_time_returns_to_zero_and_peaks_where_the_blocks_say() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=10_000_000)
    trace = run(lower(ONE_PACK, profile, machine), profile, machine)
    (timeline,) = trace.memory
    assert timeline.total_bytes[-1] == 0
    of_kind = {kind: timeline.num_bytes[:, timeline.kinds.index(kind)].max() for kind in timeline.kinds}
    assert of_kind[TensorKind.WEIGHT] == profile.weight_bytes(0, 4)
    assert of_kind[TensorKind.GRADIENT] == profile.gradient_bytes(0, 4)
    assert of_kind[TensorKind.SAVED] == 4 * profile.cost(0, 2).saved_bytes
    assert of_kind[TensorKind.INPUT] == 2 * profile.batch_input_bytes(0, 4, 2)  # two buffers


def test_the_same_program_gives_the_same_trace() -> None:
    profile, machine = toys.profile(6), toys.gpus(2)
    program = lower(Plan.parse("dp minibatch=8 forward=2[0:3] backward=2[0:3,3:6] devices=0,1"), profile, machine)
    first, second = run(program, profile, machine), run(program, profile, machine)
    assert first.start_s.tolist() == second.start_s.tolist()
    assert first.end_s.tolist() == second.end_s.tolist()


def test_an_op_that_waits_for_ever_is_named() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=10_000_000)
    program = lower(ONE_PACK, profile, machine)
    ops: list[Op] = list(program.ops)
    number = next(n for n, op in enumerate(ops) if op.kind is OpKind.BACKWARD)
    ops[number] = ops[number]._replace(after=(len(ops) - 1,))
    with pytest.raises(ProgramError, match=r"op \d+ .* never runs"):
        run(replace(program, ops=tuple(ops)), profile, machine)


def test_a_program_without_ops_takes_no_time() -> None:
    machine = toys.gpus(1)
    empty = Program(minibatch_size=1, num_layers=4, budgets=machine.budgets, blocks=(), ops=())
    trace = run(empty, toys.profile(4), machine)
    assert trace.makespan_s == 0.0
    assert trace.peak_bytes == (0,)
    only_free = replace(empty, ops=(Op(OpKind.FREE, 0, Stream.MEMORY, (0, 1), (0, 0)),))
    assert run(only_free, toys.profile(4), machine).makespan_s == 0.0


def test_a_trace_opens_in_perfetto_with_every_op_on_its_devices_stream() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=10_000_000, link=LINK)
    trace = run(lower(ONE_PACK, profile, machine), profile, machine)
    written = json.loads(json.dumps(trace.to_chrome()))
    events = written["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["args"]["op"] for event in spans] == [
        number for number, op, _, _ in trace.spans() if op.kind is not OpKind.FREE
    ]
    for event in spans:
        op = trace.program.ops[event["args"]["op"]]
        assert names[event["pid"], event["tid"]] == op.stream
        assert event["pid"] == op.device + 1
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(trace.makespan_s * 1e6)
    moved = sum(event["args"]["moved_bytes"] for event in spans)
    assert moved == sum(
        transfer.num_bytes for n in range(len(trace.program.ops)) for transfer in trace.program.transfers(n)
    )
