"""What a Program moves equals closed forms, in bytes, on a model of equal layers.

Of L layers with |W| bytes of weights, P backward packs of equal length, M samples and N devices; a boundary's values
take A bytes for the whole minibatch and the last pack holds w of the weights.  Nothing else moves: optimizer state
never crosses a link.
"""

import pytest
import toy_profiles as toys

from harmony_lab.machine import HOST
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.simulator.engine import run

LAYERS, SAMPLES = 12, 24
PROFILE = toys.profile(LAYERS)
LAYER = PROFILE.weight_bytes(0, 1)
ALL_WEIGHTS = PROFILE.weight_bytes(0, LAYERS)
VALUES = PROFILE.boundary_bytes(1, SAMPLES)
LOSS = PROFILE.boundary_bytes(LAYERS, 1)
BATCH = PROFILE.batch_input_bytes(0, 1, SAMPLES)
IN, OUT, PEER = "in", "out", "peer"

Volumes = dict[tuple[str, TensorKind], int]


def packs(length: int) -> tuple[Pack, ...]:
    return tuple(Pack(start, start + length) for start in range(0, LAYERS, length))


def plan(mode: str, num_devices: int, length: int = 2, size: int = 2, **changes: object) -> Plan:
    made = Plan(
        mode=Mode(mode),
        minibatch_size=SAMPLES,
        forward_microbatch_size=size,
        forward_packs=packs(length)[:-1],
        backward_microbatch_size=size,
        backward_packs=packs(length),
        devices=tuple(range(num_devices)),
    )
    return made.with_(**changes)


def lowered(of: Plan) -> Program:
    program = lower(of, PROFILE, toys.gpus(of.num_devices, memory_bytes=200_000_000))
    check(program)
    return program


def volumes(of: Plan) -> Volumes:
    """Bytes by direction and kind: those of all ops, and the same ones that the simulation has moved."""
    program = lowered(of)
    machine = toys.gpus(of.num_devices, memory_bytes=200_000_000)
    moved = run(program, PROFILE, machine).moved_bytes
    totals: Volumes = {}
    by_op: dict[tuple[int, int, TensorKind], int] = {}
    for number in range(len(program.ops)):
        for source, destination, kind, num_bytes in program.transfers(number):
            direction = IN if source == HOST else OUT if destination == HOST else PEER
            totals[direction, kind] = totals.get((direction, kind), 0) + num_bytes
            by_op[source, destination, kind] = by_op.get((source, destination, kind), 0) + num_bytes
    assert moved == by_op
    return totals


def pipeline(length: int, size: int) -> Volumes:
    """Between devices every value once and every gradient once; only what backward needs again is stashed."""
    count = LAYERS // length
    return {
        (IN, TensorKind.WEIGHT): 2 * ALL_WEIGHTS - length * LAYER,
        (OUT, TensorKind.GRADIENT): ALL_WEIGHTS,
        (IN, TensorKind.INPUT): 3 * BATCH,  # forward and recompute of the first pack, the last pack
        (OUT, TensorKind.ACTIVATION): (count - 2) * VALUES + SAMPLES // size * LOSS,
        (IN, TensorKind.ACTIVATION): (count - 2) * VALUES,
        (PEER, TensorKind.ACTIVATION): (count - 1) * VALUES,
        (PEER, TensorKind.ACTIVATION_GRADIENT): (count - 1) * VALUES,
    }


def through_host(num_devices: int, length: int, size: int) -> Volumes:
    """Every value goes out once, and comes in for the next pack and for backward."""
    count = LAYERS // length
    return {
        (IN, TensorKind.WEIGHT): num_devices * (2 * ALL_WEIGHTS - length * LAYER),
        (OUT, TensorKind.GRADIENT): num_devices * ALL_WEIGHTS,
        (IN, TensorKind.INPUT): 3 * BATCH,
        (OUT, TensorKind.ACTIVATION): (count - 1) * VALUES + SAMPLES // size * LOSS,
        (IN, TensorKind.ACTIVATION): (count - 1 + count - 2) * VALUES,
        (OUT, TensorKind.ACTIVATION_GRADIENT): (count - 1) * VALUES,
        (IN, TensorKind.ACTIVATION_GRADIENT): (count - 1) * VALUES,
    }


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize(("length", "size"), [(1, 4), (2, 2), (3, 8), (4, 1)])
def test_a_pipeline(num_devices: int, length: int, size: int) -> None:
    assert volumes(plan("pp", num_devices, length, size)) == pipeline(length, size)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize(("length", "size"), [(1, 4), (2, 2), (3, 8), (4, 1)])
def test_a_pipeline_without_peers_moves_its_weights_once_all_the_same(num_devices: int, length: int, size: int) -> None:
    found = volumes(plan("pp", num_devices, length, size, peer_transfers=False))
    assert found == through_host(1, length, size)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize(("length", "size"), [(1, 2), (2, 2), (3, 2), (4, 1)])
def test_data_parallelism_that_reduces_on_the_host(num_devices: int, length: int, size: int) -> None:
    found = volumes(plan("dp", num_devices, length, size, peer_transfers=False))
    assert found == through_host(num_devices, length, size)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize(("length", "size"), [(1, 2), (2, 2), (3, 2), (4, 1)])
def test_data_parallelism_that_reduces_between_devices(num_devices: int, length: int, size: int) -> None:
    expected = through_host(num_devices, length, size)
    expected[OUT, TensorKind.GRADIENT] = ALL_WEIGHTS
    expected[PEER, TensorKind.GRADIENT] = 2 * (num_devices - 1) * ALL_WEIGHTS
    assert volumes(plan("dp", num_devices, length, size)) == expected


@pytest.mark.parametrize("mode", ["dp", "pp"])
def test_a_single_pack_comes_in_once_and_stashes_nothing(mode: str) -> None:
    assert volumes(plan(mode, 1, LAYERS, 4)) == {
        (IN, TensorKind.WEIGHT): ALL_WEIGHTS,
        (OUT, TensorKind.GRADIENT): ALL_WEIGHTS,
        (IN, TensorKind.INPUT): BATCH,
        (OUT, TensorKind.ACTIVATION): SAMPLES // 4 * LOSS,
    }


@pytest.mark.parametrize("changes", [{"prefetch": 0}, {"prefetch": 3}, {"just_in_time_update": False}])
@pytest.mark.parametrize("mode", ["dp", "pp"])
def test_when_things_happen_changes_no_volume(mode: str, changes: dict[str, object]) -> None:
    assert volumes(plan(mode, 3, **changes)) == volumes(plan(mode, 3))


def test_the_stash_follows_the_backward_packs_wherever_forward_packs_end() -> None:
    of = plan("pp", 2, forward_packs=((0, 4), (4, 9), (9, 10)))  # backward packs start at 2, 4, 6 and 8
    expected = pipeline(2, 2)
    expected[PEER, TensorKind.ACTIVATION] = 3 * VALUES  # boundaries 4, 9 and 10
    assert volumes(of) == expected


def test_microbatches_of_another_size_reach_the_last_pack_through_the_host() -> None:
    of = plan("pp", 2, forward_microbatch_size=3)  # no microbatch of 2 samples is one of 3
    expected = pipeline(2, 2)
    expected[PEER, TensorKind.ACTIVATION] -= VALUES
    expected[OUT, TensorKind.ACTIVATION] += VALUES
    expected[IN, TensorKind.ACTIVATION] += VALUES
    assert volumes(of) == expected


def test_with_one_gradient_of_parameters_shared_by_two_packs_both_go_out() -> None:
    profile = toys.profile(LAYERS, tied=True)
    machine = toys.gpus(2, memory_bytes=200_000_000)
    trace = run(lower(plan("pp", 2), profile, machine), profile, machine)
    out = sum(n for (_, to, kind), n in trace.moved_bytes.items() if to == HOST and kind is TensorKind.GRADIENT)
    assert out == profile.gradient_bytes(0, LAYERS) + profile.shared[0].gradient_bytes


# -- what stays on the device --------------------------------------------------------------------------------------


def mirrored(num_devices: int, **changes: object) -> Plan:
    return plan("pp", num_devices, mirrored=True, **changes)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("mode", ["dp", "pp"])
@pytest.mark.parametrize("resident", [((0, 2),), ((2, 4), (6, 8)), packs(2)[:-1]])
def test_weights_of_resident_packs_come_in_once(mode: str, num_devices: int, resident: tuple[Pack, ...]) -> None:
    base = plan(mode, num_devices, mirrored=mode == "pp")
    copies = num_devices if mode == "dp" else 1
    expected = volumes(base)
    expected[IN, TensorKind.WEIGHT] -= copies * len(resident) * 2 * LAYER
    assert volumes(base.with_(resident_packs=resident)) == expected


@pytest.mark.parametrize("mode", ["dp", "pp"])
@pytest.mark.parametrize("kept", [((0, 2),), ((2, 4), (6, 8)), packs(2)[:-1]])
def test_kept_packs_are_not_computed_again_and_their_inputs_not_stashed(mode: str, kept: tuple[Pack, ...]) -> None:
    base = plan(mode, 2, mirrored=mode == "pp", resident_packs=kept)
    expected = volumes(base)
    inputs = sum(pack[0] > 0 for pack in kept) * VALUES
    expected[IN, TensorKind.ACTIVATION] -= inputs
    if mode == "pp":  # nobody else takes them from the host
        expected[OUT, TensorKind.ACTIVATION] -= inputs
    expected[IN, TensorKind.INPUT] -= BATCH * (kept[0][0] == 0)
    of = base.with_(kept_packs=kept)
    assert volumes(of) == {key: num_bytes for key, num_bytes in expected.items() if num_bytes}
    again = {op.layers for op in lowered(of).ops if op.kind is OpKind.RECOMPUTE}
    assert again == set(packs(2)[:-1]) - set(kept)


@pytest.mark.parametrize("boundary", [2, 4, 8])
def test_a_stash_on_the_device_moves_no_bytes_between_device_and_host(boundary: int) -> None:
    base = mirrored(2)
    expected = volumes(base)
    expected[IN, TensorKind.ACTIVATION] -= VALUES
    expected[OUT, TensorKind.ACTIVATION] -= VALUES
    of = base.with_(device_stash=[boundary])
    assert volumes(of) == expected
    assert not [op for op in swaps(lowered(of)) if op.layers == (boundary, boundary)]


@pytest.mark.parametrize("mode", ["dp", "pp"])
def test_on_one_device_a_boundary_that_stays_is_handed_from_pack_to_pack(mode: str) -> None:
    base = plan(mode, 1, mirrored=mode == "pp")
    expected = volumes(base)
    of = base.with_(device_stash=[4, 10])
    expected[OUT, TensorKind.ACTIVATION] -= 2 * VALUES
    expected[IN, TensorKind.ACTIVATION] -= (2 + 1) * VALUES  # 4 for the next pack and again for backward
    expected[OUT, TensorKind.ACTIVATION_GRADIENT] -= 2 * VALUES
    expected[IN, TensorKind.ACTIVATION_GRADIENT] -= 2 * VALUES
    assert volumes(of) == expected
    assert not [op for op in swaps(lowered(of)) if op.layers in {(4, 4), (10, 10)}]


@pytest.mark.parametrize(("mode", "num_devices"), [("pp", 1), ("dp", 1), ("dp", 2)])
def test_with_everything_staying_only_weights_the_batch_and_gradients_move(mode: str, num_devices: int) -> None:
    forward = packs(2)[:-1]
    of = plan(
        mode,
        num_devices,
        mirrored=mode == "pp",
        resident_packs=forward,
        kept_packs=forward,
        device_stash=[pack.start for pack in packs(2)[1:]],
        peer_transfers=False,
    )
    assert volumes(of) == {
        (IN, TensorKind.WEIGHT): num_devices * ALL_WEIGHTS,
        (OUT, TensorKind.GRADIENT): num_devices * ALL_WEIGHTS,
        (IN, TensorKind.INPUT): 2 * BATCH,  # first and last pack
        (OUT, TensorKind.ACTIVATION): SAMPLES // 2 * LOSS,
    }
    kinds = {op.kind for op in lowered(of).ops}
    assert kinds == {OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE}


def swaps(program: Program) -> list[object]:
    return [op for op in program.ops if op.kind in {OpKind.SWAP_IN, OpKind.SWAP_OUT}]
