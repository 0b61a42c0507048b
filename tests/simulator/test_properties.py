"""What holds when any plan of any model runs on any machine: drawn at random."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import random_settings
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from random_settings import setting

from harmony_lab.costs import LayerCost, Profile
from harmony_lab.machine import HOST, Backend, Machine
from harmony_lab.planner.bounds import candidate_bound, problem_bound
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.program import OpKind, Program, Stream, TensorKind
from harmony_lab.simulator.engine import makespan_s, run

SEEDS = st.integers(0, 2**32)
COMPUTING = (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD)
MOVING = (OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.RECV, OpKind.ALL_REDUCE)


def each(num_examples: int) -> settings:
    return settings(max_examples=num_examples, deadline=None)


def predecessors(program: Program) -> list[set[int]]:
    """What each op waits for: its edges and the op before it on its stream."""
    newest: dict[tuple[int, Stream], int] = {}
    found = []
    for number, op in enumerate(program.ops):
        before = newest.get((op.device, op.stream))
        found.append({*op.after} | ({before} if before is not None else set()))
        newest[op.device, op.stream] = number
    return found


@each(70)
@given(seed=SEEDS)
def test_every_op_starts_as_soon_as_all_that_it_waits_for_has_ended(seed: int) -> None:
    """So no edge is broken and no two ops of a stream overlap."""
    _, profile, machine, program = setting(seed)
    trace = run(program, profile, machine)
    for number, waits in enumerate(predecessors(program)):
        assert trace.start_s[number] == max((trace.end_s[other] for other in waits), default=0.0)
        assert trace.end_s[number] >= trace.start_s[number]
    assert trace.makespan_s == trace.end_s.max() == makespan_s(program, profile, machine)


@each(70)
@given(seed=SEEDS)
def test_every_op_takes_at_least_its_seconds_and_its_bytes_over_the_slowest_link(seed: int) -> None:
    _, profile, machine, program = setting(seed)
    trace = run(program, profile, machine)
    took = trace.end_s - trace.start_s
    own_cores = machine.devices[0].backend is Backend.CUDA
    for number, op in enumerate(program.ops):
        release_s = machine.devices[op.device].release_s * any(
            program.blocks[block].kind is TensorKind.WEIGHT for block in op.frees
        )
        if op.kind in COMPUTING:
            seconds = profiled_s(profile, program, number) + release_s
            assert took[number] == pytest.approx(seconds) if own_cores else took[number] >= seconds * (1 - 1e-9)
        elif op.kind in MOVING:
            least = [0.0]
            for source, destination, _, num_bytes in program.transfers(number):
                route = machine.route(source, destination)
                rate = min(machine.capacities[hop] for hop in route)
                least.append(num_bytes / rate + machine.latency_s(route))
            assert took[number] >= (max(least) + release_s) * (1 - 1e-9) - 1e-12
        elif op.kind in (OpKind.SEND, OpKind.FREE):
            assert took[number] == pytest.approx(release_s)


def profiled_s(profile: Profile, program: Program, number: int) -> float:
    op = program.ops[number]
    size = op.samples[1] - op.samples[0]
    saves = TensorKind.SAVED in {program.blocks[block].kind for block in op.writes}
    name = "backward_s" if op.kind is OpKind.BACKWARD else "recompute_s" if saves else "forward_s"
    return sum(getattr(profile.cost(layer, size), name) for layer in range(*op.layers))


@each(70)
@given(seed=SEEDS)
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(seed: int) -> None:
    _, profile, machine, program = setting(seed)
    trace = run(program, profile, machine)
    moved: Counter[tuple[int, int, TensorKind]] = Counter()
    for number, op in enumerate(program.ops):
        transfers = program.transfers(number)
        for source, destination, kind, num_bytes in transfers:
            moved[source, destination, kind] += num_bytes
        carried = sum(transfer.num_bytes for transfer in transfers)
        match op.kind:
            case OpKind.SWAP_IN | OpKind.RECV:
                assert carried == sum(program.blocks[block].num_bytes for block in op.writes)
            case OpKind.SWAP_OUT:
                assert carried == sum(program.blocks[block].num_bytes for block in op.reads)
            case OpKind.ALL_REDUCE:
                pass  # below
            case _:
                assert carried == 0
    assert {key: n for key, n in moved.items() if n} == trace.moved_bytes
    reduced = sum(
        n for (source, to, kind), n in moved.items() if kind is TensorKind.GRADIENT and HOST not in (source, to)
    )
    devices = len({op.device for op in program.ops if op.kind is OpKind.ALL_REDUCE})
    assert reduced == 2 * max(0, devices - 1) * (profile_gradients(program) if devices else 0)
    load: Counter[object] = Counter()
    for (hop, _), num_bytes in trace.link_bytes.items():
        load[hop] += num_bytes
    assert all(n <= machine.capacities[hop] * trace.makespan_s * (1 + 1e-9) for hop, n in load.items())


def profile_gradients(program: Program) -> int:
    """Gradient bytes of all packs, of one device."""
    on_devices = [b for b in program.blocks if b.kind is TensorKind.GRADIENT and b.device != HOST]
    return sum({block.layers: block.num_bytes for block in on_devices}.values())


@each(120)
@given(seed=SEEDS)
def test_no_simulation_is_faster_than_the_bounds_of_its_plan_and_problem(seed: int) -> None:
    plan, profile, machine, program = setting(seed)
    profile = replace(profile, emulation=random_settings.random_emulation(random.Random(seed)))
    costs, makespan = PackCosts(profile), makespan_s(program, profile, machine)
    least = candidate_bound(plan, costs, machine)
    assert 0 < least <= makespan * (1 + 1e-9)
    of_all = problem_bound(costs, machine, plan.minibatch_size, modes=[plan.mode])
    assert 0 < of_all <= makespan * (1 + 1e-9)


@each(70)
@given(seed=SEEDS)
def test_no_plan_without_overlap_is_faster_than_the_bound_for_those(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_settings.random_profile(rng, rng.randint(3, 9))
    drawn = toys.random_plan(rng, len(profile), random_settings.NUM_DEVICES)
    plan = drawn.with_(
        prefetch=0,
        peer_transfers=True,
        devices=range(drawn.num_devices),
        mirrored=False,
        resident_packs=(),
        kept_packs=(),
        device_stash=(),
        device_updates=(),
    )
    link, peer_link = 10 ** rng.uniform(5, 8), 10 ** rng.uniform(5, 8)
    machine = toys.gpus(plan.num_devices, memory_bytes=random_settings.PLENTY, link=link, peer_link=peer_link)
    costs = PackCosts(profile)
    of_all, serial = (
        problem_bound(costs, machine, plan.minibatch_size, modes=[plan.mode], overlapping=overlapping)
        for overlapping in (True, False)
    )
    makespan = makespan_s(lower(plan, profile, machine), profile, machine)
    assert 0 < of_all <= serial <= makespan * (1 + 1e-9)


@each(70)
@given(seed=SEEDS)
def test_memory_stays_within_what_the_program_may_need_and_returns_to_what_is_resident(seed: int) -> None:
    _, profile, machine, program = setting(seed)
    trace = run(program, profile, machine)
    for timeline, most, budget in zip(trace.memory, peak_bytes(program), machine.budgets, strict=True):
        assert (timeline.num_bytes >= 0).all()
        assert (timeline.num_bytes[-1] == timeline.num_bytes[0]).all()
        assert (np.diff(timeline.times_s) >= 0).all()
        assert timeline.total_bytes.max() == timeline.peak_bytes <= most <= budget


@each(60)
@given(seed=SEEDS)
def test_no_order_in_which_ops_may_run_needs_more_memory_than_promised(seed: int) -> None:
    program = setting(seed).program
    most = peak_bytes(program)
    waiting = predecessors(program)
    rng = random.Random(seed)
    for favour in ("start", "end", "any"):
        alive, ended, started = Counter[int](), set[int](), set[int]()
        while len(ended) < len(program.ops):
            ready = [k for k, waits in enumerate(waiting) if k not in started and waits <= ended]
            running = sorted(started - ended)
            starts = ready and (not running or favour == "start" or (favour == "any" and rng.random() < 0.5))
            number = rng.choice(ready if starts else running)
            (started if starts else ended).add(number)
            op = program.ops[number]
            for block in op.writes if starts else op.frees:
                kind_bytes = program.blocks[block].num_bytes
                alive[program.blocks[block].device] += kind_bytes if starts else -kind_bytes
            assert all(alive[device] <= most[device] for device in range(program.num_devices))
        assert all(alive[device] == 0 for device in range(program.num_devices))


@each(60)
@given(seed=SEEDS)
def test_a_program_from_text_runs_like_the_one_that_was_lowered(seed: int) -> None:
    """One is made of tuples, the other of arrays."""
    _, profile, machine, program = setting(seed)
    made, read = (run(p, profile, machine) for p in (program, Program.parse(str(program))))
    assert made.start_s.tolist() == read.start_s.tolist()
    assert made.end_s.tolist() == read.end_s.tolist()
    assert made.moved_bytes == read.moved_bytes
    for one, other in zip(made.memory, read.memory, strict=True):
        assert one.times_s.tolist() == other.times_s.tolist()
        assert one.num_bytes.tolist() == other.num_bytes.tolist()


# -- other machines ------------------------------------------------------------------------------------------------


def with_links(machine: Machine, rng: random.Random, most: float) -> Machine:
    """Every link faster, by up to that factor."""
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * rng.uniform(1, most)) for link in machine.links)
    return replace(machine, links=links)


@each(60)
@given(seed=SEEDS)
def test_where_no_two_transfers_share_a_link_faster_links_delay_no_op(seed: int) -> None:
    """Each device hangs from the host by itself and copies to no other; updates have the host's cores to themselves.

    Then every op takes a time of its own, and the longest chain of ops cannot grow.  Where transfers share links it
    can: one that gets faster may come in time to slow down another that more depends on.
    """
    plan, profile, machine, program = setting(seed, switches=0, peers=False, backend=Backend.CUDA)
    faster = with_links(machine, random.Random(seed), 10)
    assert str(lower(plan, profile, faster)) == str(program)
    before, after = run(program, profile, machine), run(program, profile, faster)
    assert (after.end_s <= before.end_s * (1 + 1e-9)).all()


@each(60)
@given(seed=SEEDS, factor=st.sampled_from((0.125, 2.0, 64.0)))
def test_a_world_in_which_all_is_faster_by_a_factor_runs_the_same_program_faster_by_it(
    seed: int, factor: float
) -> None:
    plan, profile, machine, program = setting(seed)
    fabric, memory = machine.fabric_bytes_per_s, machine.host.memory_bytes_per_s
    quick = replace(
        machine,
        links=tuple(
            replace(link, bytes_per_s=link.bytes_per_s * factor, latency_s=link.latency_s / factor)
            for link in machine.links
        ),
        devices=tuple(replace(device, release_s=device.release_s / factor) for device in machine.devices),
        fabric_bytes_per_s=None if fabric is None else fabric * factor,
        bridges=tuple(replace(bridge, bytes_per_s=bridge.bytes_per_s * factor) for bridge in machine.bridges),
        host=replace(machine.host, memory_bytes_per_s=None if memory is None else memory * factor),
    )
    quick_profile = replace(profile, layers=tuple(_faster(layer, factor) for layer in profile.layers))
    assert str(lower(plan, quick_profile, quick)) == str(program)
    slow, fast = makespan_s(program, profile, machine), makespan_s(program, quick_profile, quick)
    assert fast * factor == pytest.approx(slow, rel=1e-9)


def _faster(layer: LayerCost, factor: float) -> LayerCost:
    costs = tuple(
        cost._replace(
            forward_s=cost.forward_s / factor,
            recompute_s=cost.recompute_s / factor,
            backward_s=cost.backward_s / factor,
        )
        for cost in layer.costs
    )
    return replace(layer, costs=costs, update_s=layer.update_s / factor)
