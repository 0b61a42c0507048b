"""What holds for every plan of every model on every machine: drawn at random."""

import random
from collections import Counter
from dataclasses import replace

import random_settings
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from random_settings import NUM_DEVICES, Setting, random_machine, random_profile, setting, with_memory

from harmony_lab.errors import HostMemoryError, PlanDoesNotFitError
from harmony_lab.machine import HOST
from harmony_lab.plan import Mode
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.limits import host_memory
from harmony_lab.planner.lower import lower, lower_forward
from harmony_lab.planner.search import search
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.simulator.engine import makespan_s, run

SEEDS = st.integers(0, 2**32)
COMPUTING = (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD)


def each(num_examples: int) -> settings:
    return settings(max_examples=num_examples, deadline=None)


@each(120)
@given(seed=SEEDS)
def test_a_lowered_plan_is_valid_and_its_text_reads_back(seed: int) -> None:
    program = setting(seed).program
    check(program)
    again = Program.parse(str(program))
    assert again == program
    assert str(again) == str(program)


@each(70)
@given(seed=SEEDS)
def test_every_sample_passes_every_layer_once_forward_and_once_backward(seed: int) -> None:
    plan, profile, _, program = setting(seed)
    last = plan.fused_pack.start
    done: dict[OpKind, Counter[tuple[int, int]]] = {kind: Counter() for kind in COMPUTING}
    saving: Counter[tuple[int, int]] = Counter()  # forwards with gradient
    for op in program.ops:
        if op.kind in COMPUTING:
            cells = [(layer, sample) for layer in range(*op.layers) for sample in range(*op.samples)]
            done[op.kind].update(cells)
            if TensorKind.SAVED in {program.blocks[block].kind for block in op.writes}:
                saving.update(cells)
    samples = range(plan.minibatch_size)
    bottom = min(pack.start for pack in plan.backward_packs if pack.stop > profile.first_trainable_layer)
    kept = {layer for pack in plan.kept_packs for layer in range(*pack) if layer >= bottom}
    trained = {(layer, sample) for layer in range(bottom, len(profile)) for sample in samples}
    assert done[OpKind.FORWARD] == Counter((layer, sample) for layer in range(len(profile)) for sample in samples)
    assert done[OpKind.BACKWARD] == saving == Counter(trained)
    assert done[OpKind.RECOMPUTE] == Counter(
        (layer, sample) for layer, sample in trained if layer < last and layer not in kept
    )


@each(70)
@given(seed=SEEDS)
def test_every_trainable_parameter_is_updated_once_with_the_gradients_of_all_its_readers(seed: int) -> None:
    _, profile, _, program = setting(seed)
    updated: Counter[int] = Counter()
    for op in program.ops:
        if op.kind is OpKind.UPDATE:
            updated.update(layer for layer in range(*op.layers) if profile.layers[layer].gradient_bytes)
            given_layers = {layer for block in op.reads for layer in range(*program.blocks[block].layers)}
            for shared in profile.shared:
                if min(shared.layers) in range(*op.layers):
                    assert {*shared.layers} <= given_layers
    assert updated == Counter(layer for layer, cost in enumerate(profile.layers) if cost.gradient_bytes)


@each(70)
@given(seed=SEEDS)
def test_samples_of_a_boundary_go_out_once_and_whole(seed: int) -> None:
    plan, profile, _, program = setting(seed)
    for kind in (TensorKind.ACTIVATION, TensorKind.ACTIVATION_GRADIENT):
        out = Counter(
            (block.layers[0], sample)
            for block in program.blocks
            if block.kind is kind and block.device == HOST
            for sample in range(*block.samples)
        )
        assert set(out.values()) <= {1}
    for block in program.blocks:
        start, stop = block.layers
        count = block.samples[1] - block.samples[0]
        match block.kind:
            case TensorKind.ACTIVATION:
                assert block.num_bytes == profile.boundary_bytes(start, count)
            case TensorKind.ACTIVATION_GRADIENT:
                assert block.num_bytes == profile.boundary_gradient_bytes(start, count)
            case TensorKind.WEIGHT:
                assert block.num_bytes == profile.weight_bytes(start, stop)
            case TensorKind.GRADIENT:
                assert block.num_bytes == profile.gradient_bytes(start, stop)
            case TensorKind.BUFFER:
                assert block.num_bytes == profile.buffer_bytes(start, stop)
            case TensorKind.INPUT:
                assert block.num_bytes == profile.batch_input_bytes(start, stop, count)
            case TensorKind.SAVED | TensorKind.WORKSPACE:
                assert block.device in plan.devices


@each(60)
@given(seed=SEEDS)
def test_every_op_that_computes_has_on_its_device_what_its_layers_and_samples_need(seed: int) -> None:
    _, profile, _, program = setting(seed)
    for op in program.ops:
        if op.kind in COMPUTING:
            start, stop = op.layers
            count = op.samples[1] - op.samples[0]
            has = {program.blocks[block][:4] for block in op.reads}
            needs = {
                (TensorKind.WEIGHT, op.layers, (0, 0)): profile.weight_bytes(start, stop),
                (TensorKind.BUFFER, op.layers, (0, 0)): profile.buffer_bytes(start, stop),
                (TensorKind.INPUT, op.layers, op.samples): profile.batch_input_bytes(start, stop, count),
                (TensorKind.ACTIVATION, (start, start), op.samples): profile.boundary_bytes(start, count),
            }
            if op.kind is OpKind.BACKWARD:
                inner = stop < len(profile)
                passed = profile.boundary_gradient_bytes(stop, count) if inner else 0
                needs[TensorKind.ACTIVATION_GRADIENT, (stop, stop), op.samples] = passed
                needs[TensorKind.SAVED, op.layers, op.samples] = 1  # also where it is empty
                has |= {program.blocks[block][:4] for block in op.writes}
                needs[TensorKind.GRADIENT, op.layers, (0, 0)] = profile.gradient_bytes(start, stop)
            for (kind, layers, samples), num_bytes in needs.items():
                assert num_bytes == 0 or (kind, op.device, layers, samples) in has


@each(60)
@given(seed=SEEDS)
def test_on_the_host_only_losses_stay_on_devices_only_optimizer_state(seed: int) -> None:
    plan, _, _, program = setting(seed)
    freed = {block for op in program.ops for block in op.frees} | {*program.resident}
    left = [block for number, block in enumerate(program.blocks) if number not in freed]
    assert {program.blocks[block].kind for block in program.resident} <= {TensorKind.OPTIMIZER}
    assert all(block[:3] == (TensorKind.ACTIVATION, HOST, (plan.num_layers,) * 2) for block in left)
    assert sorted(sample for block in left for sample in range(*block.samples)) == list(range(plan.minibatch_size))


@each(60)
@given(seed=SEEDS)
def test_without_prefetch_nothing_is_fetched_while_its_device_computes_or_sends_what_came_before(seed: int) -> None:
    plan, profile, machine, _ = setting(seed)
    program = lower(plan.with_(prefetch=0), profile, machine)
    trace = run(program, profile, machine)
    free_at: Counter[int] = Counter()  # by device, when all that it computed so far has ended
    left_at: Counter[int] = Counter()
    for number, op in enumerate(program.ops):
        kinds = {program.blocks[block].kind for block in op.writes}
        if op.kind in (OpKind.SWAP_IN, OpKind.RECV):
            assert trace.start_s[number] >= free_at[op.device]
            if TensorKind.WEIGHT in kinds:
                assert trace.start_s[number] >= left_at[op.device]
        elif op.kind in COMPUTING:
            free_at[op.device] = max(free_at[op.device], trace.end_s[number])
        elif op.kind in (OpKind.ALL_REDUCE, OpKind.SWAP_OUT):
            left_at[op.device] = max(left_at[op.device], trace.end_s[number])


@each(60)
@given(seed=SEEDS)
def test_evaluating_passes_every_sample_through_every_layer_once_and_trains_nothing(seed: int) -> None:
    plan, profile, machine, _ = setting(seed)
    on = random_settings.with_memory(machine, (random_settings.PLENTY,) * machine.num_devices)
    program = lower_forward(plan, profile, on)
    check(program)
    kinds = {op.kind for op in program.ops}
    assert not kinds & {OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.UPDATE, OpKind.ALL_REDUCE}
    done = Counter(
        (layer, sample)
        for op in program.ops
        if op.kind is OpKind.FORWARD
        for layer in range(*op.layers)
        for sample in range(*op.samples)
    )
    assert done == Counter((layer, s) for layer in range(len(profile)) for s in range(plan.minibatch_size))
    outward = {program.blocks[b].kind for op in program.ops if op.kind is OpKind.SWAP_OUT for b in op.reads}
    assert outward == {TensorKind.ACTIVATION}


def test_settings_are_of_all_kinds() -> None:
    """What the tests above draw covers what they are to cover."""
    made: list[Setting] = [setting(seed) for seed in range(120)]
    kinds = {op.kind for each in made for op in each.program.ops}
    assert kinds == set(OpKind)
    assert any(each.plan.kept_packs for each in made)
    assert any(each.plan.device_stash for each in made)
    assert {each.plan.mode for each in made if each.plan.device_updates} == set(Mode)
    assert any(each.plan.resident_packs and not each.plan.mirrored for each in made)
    assert any(each.profile.shared for each in made)
    assert any(max(each.machine.budgets) < random_settings.PLENTY for each in made)
    assert any(each.profile.first_trainable_layer for each in made)
    assert any(each.plan.forward_microbatch_size != each.plan.backward_microbatch_size for each in made)


@each(15)
@given(seed=SEEDS)
def test_a_search_never_gives_a_plan_that_cannot_run(seed: int) -> None:
    rng = random.Random(seed)
    profile, on = random_profile(rng, rng.randint(3, 7)), random_machine(rng)
    needed = peak_bytes(lower(toys.random_plan(rng, len(profile), NUM_DEVICES), profile, on))
    tight = with_memory(on, tuple(max(1, int(rng.uniform(0.4, 1.2) * num_bytes)) for num_bytes in needed))
    tight = replace(tight, host=replace(tight.host, memory_bytes=round(rng.uniform(1, 4) * profile.state_bytes)))
    try:
        result = search(profile, tight, rng.randint(3, 8), shown=2)
    except (PlanDoesNotFitError, HostMemoryError):
        return
    for candidate in result.candidates[:6]:
        program = lower(candidate.plan, profile, tight)
        check(program)
        assert all(peak <= budget for peak, budget in zip(peak_bytes(program), tight.budgets, strict=True))
        assert host_memory(program, profile, tight).host_bytes <= tight.host.memory_bytes
        assert makespan_s(program, profile, tight) == candidate.step_s >= result.lower_bound_s * (1 - 1e-9)
