"""What one would have without a plan: traffic in closed form, and memory on demand as a plain model of it says."""

import random
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import toy_profiles as toys

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.machine import HOST, Machine
from harmony_lab.planner import paging
from harmony_lab.planner.baseline_programs import Iteration, Needs, in_memory_program, paged_program, pipeline_units
from harmony_lab.planner.baseline_tables import LayerTables
from harmony_lab.planner.baselines import BASELINES, Baseline, baselines
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.codes import FORWARD, WEIGHT
from harmony_lab.planner.emit import FULL, STATUS, columns, construction, emit, free, read, wait, write
from harmony_lab.planner.pack import PackCosts, partitions
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.simulator.engine import run

WEIGHTS = 1_000_000  # of a layer
TWO_LAYERS = 2_600_000  # weights and gradients of one layer and what it computes; not those of two


def stateless(num_layers: int, **fields: object) -> Profile:
    """An optimizer without state, and activations that are nothing beside the weights."""
    profile = toys.profile(num_layers, weight_bytes=WEIGHTS, activation_bytes=400, **fields)
    return replace(profile, layers=tuple(replace(layer, optimizer_state_bytes=0) for layer in profile.layers))


def iteration(profile: Profile, machine: Machine, minibatch: int, size: int, **fields: object) -> Iteration:
    tables = LayerTables(profile, PackCosts(profile))
    fields = {"recomputes": False, **fields}
    return Iteration(tables=tables, machine=machine, minibatch_size=minibatch, size=size, **fields)


def paged(
    profile: Profile,
    machine: Machine,
    minibatch: int,
    size: int,
    *,
    order: str = "dp",
    recomputes: bool = False,
    clips: bool = False,
) -> Program:
    given = iteration(profile, machine, minibatch, size, recomputes=recomputes, clips=clips)
    if order != "dp":
        count, costs = machine.num_devices, given.tables.costs
        found = partitions(costs, 0, len(profile), size, forward=False, budget_bytes=None, counts=(count,))
        units = pipeline_units(costs, found[count], minibatch, size, gpipe=order == "gpipe")
        given = replace(given, stages=found[count], units=units)
    program = paged_program(given)
    assert isinstance(program, Program)
    check(program)
    return program


def swapped(program: Program, profile: Profile, machine: Machine, *kinds: TensorKind) -> int:
    moved = run(program, profile, machine).moved_bytes
    return sum(n for (source, to, kind), n in moved.items() if kind in kinds and -1 in (source, to))


# -- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("num_devices", "microbatches"), [(1, 1), (1, 4), (2, 2), (3, 3)])
def test_data_parallel_paging_moves_weights_and_gradients_for_every_microbatch(
    num_devices: int, microbatches: int, recomputes: bool
) -> None:
    """(4m + 2) N |W|, less what is still there where forward, backward and update meet: 2m + 2 layers a device."""
    num_layers, size = 9, 2
    profile, machine = stateless(num_layers), toys.gpus(num_devices, memory_bytes=TWO_LAYERS)
    minibatch = num_devices * microbatches * size
    program = paged(profile, machine, minibatch, size, order="dp", recomputes=recomputes)
    layers = (4 * microbatches + 2) * num_layers - 2 * microbatches - 2
    expected = num_devices * layers * WEIGHTS
    assert swapped(program, profile, machine, TensorKind.WEIGHT, TensorKind.GRADIENT) == expected


@pytest.mark.parametrize(("num_devices", "microbatches"), [(1, 3), (2, 4), (3, 2)])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_pipelines_page_their_stages_for_every_microbatch(order: str, num_devices: int, microbatches: int) -> None:
    """(4m + 2) |W| in all, less the turns: one in GPipe, two per microbatch that is not ahead in 1F1B, the update's."""
    of_stage, size = 4, 1
    profile = stateless(of_stage * num_devices)
    machine = toys.gpus(num_devices, memory_bytes=TWO_LAYERS)
    program = paged(profile, machine, microbatches * size, size, order=order, recomputes=True)
    expected = 0
    for position in range(num_devices):
        ahead = min(num_devices - 1 - position, microbatches)
        turns = 1 if order == "gpipe" else 2 * (microbatches - ahead) - 1 if ahead < microbatches else 1
        expected += (4 * microbatches + 2) * of_stage - turns - 3
    assert swapped(program, profile, machine, TensorKind.WEIGHT, TensorKind.GRADIENT) == expected * WEIGHTS


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize(("num_devices", "microbatches"), [(1, 3), (2, 2), (3, 1)])
def test_zero_infinitys_order_streams_weights_twice_for_every_microbatch(
    num_devices: int, microbatches: int, peers: bool
) -> None:
    num_layers = 5
    profile = stateless(num_layers)
    machine = replace(toys.gpus(num_devices, memory_bytes=30 * WEIGHTS), peer_transfers=peers)
    minibatch = num_devices * microbatches * 8
    (found,) = baselines(profile, machine, minibatch, names=["zero-infinity order"])
    assert found.microbatch_size == 8
    copies = 1 if peers else num_devices  # over the host's link
    others = num_devices - 1 if peers else 0
    assert found.swap_bytes_by_kind[TensorKind.WEIGHT] == 2 * microbatches * copies * num_layers * WEIGHTS
    assert found.swap_bytes_by_kind[TensorKind.GRADIENT] == microbatches * copies * num_layers * WEIGHTS
    assert found.peer_bytes == (2 + 2) * microbatches * others * num_layers * WEIGHTS
    assert TensorKind.OPTIMIZER not in found.swap_bytes_by_kind


@pytest.mark.parametrize("name", ["dp, in memory", "pp, in memory", "dp, paged", "pp 1f1b, paged"])
def test_with_enough_memory_nothing_is_swapped_but_the_batch_and_the_loss(name: str) -> None:
    profile, machine = toys.profile(6), toys.gpus(2, memory_bytes=100 * WEIGHTS)
    (found,) = baselines(profile, machine, 16, names=[name])
    assert found.fits
    check(found.program)
    moved = set(found.swap_bytes_by_kind)
    assert moved == {TensorKind.INPUT, TensorKind.ACTIVATION}
    losses = sum(op.kind is OpKind.SWAP_OUT for op in found.program.ops)
    assert found.swap_bytes_by_kind[TensorKind.ACTIVATION] == 4 * losses
    assert found.swap_bytes_by_kind[TensorKind.INPUT] == 2 * profile.batch_input_bytes(0, 6, 16)
    state = 6 * 3 * WEIGHTS // (1 if name.startswith("dp") else 2)  # weights and twice that of optimizer state
    first = run(found.program, profile, machine).memory
    assert [int(timeline.total_bytes[0]) for timeline in first] == [state, state]
    assert [int(timeline.total_bytes[-1]) for timeline in first] == [state, state]


def test_in_memory_counts_weights_gradients_state_and_what_is_saved() -> None:
    num_layers, size = 4, 2
    profile, machine = toys.profile(num_layers), toys.gpus(1, memory_bytes=10**9)
    program = in_memory_program(iteration(profile, machine, size, size))
    assert isinstance(program, Program)
    check(program)
    (peak,) = run(program, profile, machine).peak_bytes
    state = num_layers * 4 * WEIGHTS
    assert state < peak < state + profile.activation_bytes(size) + 40_000  # of workspace
    short = toys.gpus(1, memory_bytes=peak - 1)
    lacking = in_memory_program(iteration(profile, short, size, size))
    assert isinstance(lacking, Needs)
    assert lacking.num_bytes >= peak


def test_clipping_fetches_every_gradient_once_more() -> None:
    """Of the first layer both are on the device after backward, and without looks when it is updated."""
    num_layers, profile, machine = 4, stateless(4), toys.gpus(1, memory_bytes=TWO_LAYERS)
    moved = [run(paged(profile, machine, 8, 8, clips=clips), profile, machine).moved_bytes for clips in (False, True)]
    more = {way: moved[1][way] - moved[0][way] for way in moved[1] if moved[1][way] != moved[0][way]}
    out, back = (0, HOST), (HOST, 0)
    gradients = {(*out, TensorKind.GRADIENT): WEIGHTS, (*back, TensorKind.GRADIENT): num_layers * WEIGHTS}
    assert more == {**gradients, (*back, TensorKind.WEIGHT): WEIGHTS}


# -- always -----------------------------------------------------------------------------------------------------------


def random_case(rng: random.Random) -> tuple[Profile, Machine, int]:
    num_layers = rng.randint(3, 9)
    profile = toys.profile(
        num_layers,
        tied=rng.random() < 0.4,
        buffers=rng.random() < 0.4,
        frozen=rng.choice((0, 0, 1, 2)),
        activation_bytes=rng.choice((1_000, 10_000, 60_000)),
    )
    machine = toys.gpus(rng.randint(1, 3), memory_bytes=rng.choice((3_300_000, 5_000_000, 8_000_000, 60_000_000)))
    return profile, replace(machine, peer_transfers=rng.random() < 0.7), rng.randint(1, 17)


@pytest.mark.parametrize("seed", range(12))
def test_every_baselines_program_is_valid_within_budgets_and_not_faster_than_its_work(seed: int) -> None:
    profile, machine, minibatch = random_case(random.Random(seed))
    clipped = seed % 3 == 0
    found = baselines(profile, machine, minibatch, clipped=clipped)
    assert [baseline.name for baseline in found] == list(BASELINES)
    runnable = baselines(profile, machine, minibatch, runnable=True, clipped=clipped)
    for program in (one for baseline in runnable for one in baseline.several.values()):
        check(program)
        assert all(peak <= machine.budgets[0] for peak in peak_bytes(program))
    assert not any(baseline.program.resident for baseline in runnable if baseline.fits)
    for baseline in (*found, *runnable):
        assert baseline.fits != bool(baseline.reason)
        if baseline.fits:
            check(baseline.program)
            assert all(peak <= machine.budgets[0] for peak in baseline.peak_bytes)
            assert Program.parse(str(baseline.program)) == baseline.program
            assert baseline.step_s >= shortest_s(baseline, profile, machine) * (1 - 1e-9)


def shortest_s(baseline: Baseline, profile: Profile, machine: Machine) -> float:
    """Computing dealt evenly to the devices, and what crosses the uplink at its full rate."""
    trained = range(profile.first_trainable_layer, len(profile))
    computing = sum(
        profile.cost(layer, 1).forward_s + (profile.cost(layer, 1).backward_s if layer in trained else 0.0)
        for layer in range(len(profile))
    )
    samples = sum(
        op.samples[1] - op.samples[0]
        for op in baseline.program.ops
        if op.kind is OpKind.FORWARD and op.layers == (0, 1)
    )
    moved = run(baseline.program, profile, machine).moved_bytes
    down = sum(num_bytes for (source, _, _), num_bytes in moved.items() if source == -1)
    return max(samples * computing / machine.num_devices, down / 1e9)


def test_every_sample_passes_every_layer_once_forward_and_once_backward() -> None:
    profile, machine = toys.profile(6, frozen=1), toys.gpus(2, memory_bytes=5_500_000)
    for baseline in baselines(profile, machine, 13):
        if baseline.fits:
            for kind, layers in ((OpKind.FORWARD, range(6)), (OpKind.BACKWARD, range(1, 6))):
                ops = [op for op in baseline.program.ops if op.kind is kind]
                for layer in layers:
                    samples = [s for op in ops if op.layers == (layer, layer + 1) for s in range(*op.samples)]
                    assert sorted(samples) == list(range(13)), (baseline.name, kind, layer)
                assert {op.layers[0] for op in ops} == set(layers)


def test_gradients_of_tied_layers_on_two_devices_are_reduced_and_on_one_are_one() -> None:
    profile = toys.profile(6, tied=True)
    (apart,) = baselines(profile, toys.gpus(2, memory_bytes=10**8), 8, names=["pp, in memory"])
    reductions = [op for op in apart.program.ops if op.kind is OpKind.ALL_REDUCE]
    assert [op.layers for op in reductions] == [(0, 1), (5, 6)]
    (together,) = baselines(profile, toys.gpus(1, memory_bytes=10**8), 8, names=["pp, in memory"])
    weights = [b for b in together.program.blocks if b.kind is TensorKind.WEIGHT]
    assert sum(block.num_bytes for block in weights) == profile.weight_bytes(0, 6)


def test_an_iteration_to_be_run_moves_what_the_others_leave_on_the_devices_and_gathers_tied_gradients() -> None:
    """Beside batch and loss: weights and twice as much of state in and out once, and one tied layer's gradients."""
    profile = toys.profile(6, tied=True)
    (found,) = baselines(profile, toys.gpus(2, memory_bytes=10**8), 8, names=["pp, in memory"], runnable=True)
    kinds = [op.kind for op in found.program.ops]
    assert OpKind.ALL_REDUCE not in kinds
    weights = sum(profile.weight_bytes(layer, layer + 1) for layer in range(6))
    assert found.swap_bytes_by_kind[TensorKind.WEIGHT] == 2 * weights
    assert found.swap_bytes_by_kind[TensorKind.OPTIMIZER] == 2 * profile.optimizer_state_bytes
    received = [block for op in found.program.ops if op.kind is OpKind.RECV for block in op.writes]
    gradients = [found.program.blocks[block] for block in received]
    assert [(b.device, b.layers) for b in gradients if b.kind is TensorKind.GRADIENT] == [(0, (5, 6))]


def test_what_does_not_fit_says_what_is_too_large() -> None:
    profile, machine = toys.profile(4), toys.gpus(1, memory_bytes=1_900_000)
    found = {baseline.name: baseline for baseline in baselines(profile, machine, 4)}
    assert not any(baseline.fits for baseline in found.values())
    assert "layer 3 (layer3) alone needs" in found["dp, paged"].reason
    assert "microbatches of 1, the budget of device 0 is 1.81 MiB" in found["zero-infinity order"].reason
    assert "weights, gradients, optimizer state and activations need" in found["dp, in memory"].reason
    assert str(found["dp, paged"]).startswith("dp, paged: layer 3")


def test_too_small_a_minibatch_cannot_be_dealt() -> None:
    found = baselines(toys.profile(4), toys.gpus(3, memory_bytes=10**8), 2)
    assert {b.name for b in found if not b.fits} == {"dp, paged", "zero-infinity order", "dp, in memory"}
    assert "cannot be dealt to 3 devices" in found[0].reason


# -- least recently used ----------------------------------------------------------------------------------------------


class PlainPager:
    """Least recently used first out, as a dictionary in order of use."""

    def __init__(self, sizes: list[int], capacity: int) -> None:
        self.sizes, self.capacity = sizes, capacity
        self.changed_by_page: OrderedDict[int, bool] = OrderedDict()
        self.log: list[tuple[str, int]] = []

    def run(self, needed: list[int], changed: list[int], workspace: int) -> bool:
        for page in needed:
            if page in self.changed_by_page:
                self.changed_by_page.move_to_end(page)
        for page in needed:
            if page not in self.changed_by_page:
                if not self.make_room(self.sizes[page], needed):
                    return False
                self.changed_by_page[page] = False
                self.log.append(("in", page))
        if not self.make_room(workspace, needed):
            return False
        for page in changed:
            self.changed_by_page[page] = True
        return True

    def make_room(self, num_bytes: int, needed: list[int]) -> bool:
        while sum(self.sizes[page] for page in self.changed_by_page) + num_bytes > self.capacity:
            oldest = next(iter(self.changed_by_page), None)
            if oldest is None or oldest in needed:
                return False
            self.log.append(("out" if self.changed_by_page.pop(oldest) else "drop", oldest))
        return True


@pytest.mark.parametrize("seed", range(20))
def test_paging_is_least_recently_used(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(10, 50) for _ in range(rng.randint(10, 14))]
    capacity = rng.randint(190, 240)
    plain = PlainPager(sizes, capacity)
    pages = np.zeros((len(sizes), paging.NUM_PAGE_COLUMNS), dtype=np.int64)
    pages[:, paging.KIND], pages[:, paging.NUM_BYTES] = WEIGHT, sizes
    pages[:, paging.START] = np.arange(len(sizes))
    pages[:, paging.STOP] = np.arange(len(sizes)) + 1
    c = construction((capacity,), 4096)
    p = paging.pager(pages, np.array([capacity]), on_demand=True)
    for _ in range(120):
        needed = rng.sample(range(len(sizes)), rng.randint(1, 3))
        changed = [page for page in needed if rng.random() < 0.4]
        workspace = rng.randint(0, 60)
        fits = plain.run(needed, changed, workspace)
        paging.begin(p)
        for page in needed:
            paging.hold(p, page)
        paging.bring(c, p, 0, workspace)
        assert (c.counts[STATUS] == 0) == fits
        if not fits:
            break
        for page in changed:
            paging.change(c, p, page)
        paging.compute(c, p, FORWARD, 0, needed[0], 0, 0, workspace)
    names = {OpKind.SWAP_IN: "in", OpKind.SWAP_OUT: "out", OpKind.FREE: "drop"}
    ops = columns(c)[1].rows()
    assert [(names[op.kind], op.layers[0]) for op in ops if op.kind in names] == plain.log
    assert len(plain.log) > 50 or not fits


def test_a_construction_that_is_full_says_so() -> None:
    c = construction((10**9,), 3)
    op = block = -1
    for _ in range(200):
        wait(c, op)
        read(c, block)
        free(c, block)
        block = write(c, WEIGHT, 0, 0, 1, 0, 0, 8)
        op = emit(c, FORWARD, 0, 0, 0, 1, 0, 0)
    assert c.counts[STATUS] == FULL
    assert len(columns(c)[1].kind) < 3


def test_unknown_names_and_minibatches_of_nothing_are_refused() -> None:
    profile, machine = toys.profile(3), toys.gpus(1, memory_bytes=10**8)
    (found,) = baselines(profile, machine, 8, names="dp, in memory")
    assert found.name == "dp, in memory"
    with pytest.raises(
        PlanError, match=r"minibatch_size must be .* at least 1, got 0(?s:.*)'pp, in memory'\], got 'foo'"
    ):
        baselines(profile, machine, 0, names=["dp, paged", "foo"])
    with pytest.raises(PlanError, match="got 'dp, paged, pp gpipe, paged'"):
        baselines(profile, machine, 8, names="dp, paged, pp gpipe, paged")
