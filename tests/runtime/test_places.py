"""Blocks share memory where the program's edges keep them apart, and come back to it in every step."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import random_settings
import torch
from small_layers import mlp

from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Machine
from harmony_lab.order import Order
from harmony_lab.places import Places, place
from harmony_lab.plan import Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.measure import profile
from harmony_lab.program import OpKind, Program
from harmony_lab.runtime.memory import MemoryTracker
from harmony_lab.runtime.runner import Runner

PLAN = "dp minibatch=8 forward=2[0:1,1:2,2:3,3:4] backward=2[0:1,1:2,2:3,3:4,4:5] devices=0 prefetch=1"


def lives(program: Program) -> dict[int, tuple[int, int | None]]:
    """Of every block, the op that writes it and the op that frees it."""
    writers = {block: number for number, op in enumerate(program.ops) for block in op.writes}
    freers = {block: number for number, op in enumerate(program.ops) for block in op.frees}
    return {block: (writer, freers.get(block)) for block, writer in writers.items()}


class _NoLayers:
    """Every block holds one tensor."""

    boundaries = [()] * 20

    def batch_inputs_of(self, start: int, stop: int) -> tuple[str, ...]:
        return ("x",)


@pytest.mark.parametrize("seed", range(30))
def test_blocks_that_may_live_at_once_lie_apart(seed: int) -> None:
    program = random_settings.setting(seed).program
    places = place(program, _NoLayers())  # type: ignore[arg-type]
    order, life = Order(program), lives(program)
    precedes = lambda first, second: first is not None and bool(order.precedes([first], [second])[0])  # noqa: E731
    for one, other in combinations(places.offsets, 2):
        a, b = program.blocks[one], program.blocks[other]
        start, another = places.offsets[one], places.offsets[other]
        overlap = start < another + b.num_bytes and another < start + a.num_bytes
        if a.device == b.device and overlap:
            assert precedes(life[one][1], life[other][0]) or precedes(life[other][1], life[one][0])


def setting(budget: str = "1MiB") -> tuple[LayerSequence, Machine, Program]:
    layers = mlp(depth=4, width=16, num_samples=8)
    machine = Machine.emulated(1, memory=budget, link=1e12)
    costs = profile(layers, machine, sgd(layers), microbatch_sizes=(2,), trials=1)
    return layers, machine, lower(Plan.parse(PLAN), costs, machine)


def sgd(layers: LayerSequence) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(layers.tensors.values()), lr=0.1)


def test_places_take_hardly_more_than_is_alive_at_once() -> None:
    layers, _, program = setting()
    placed = place(program, layers)
    total = sum(program.blocks[block].num_bytes for block in placed.offsets if program.blocks[block].device == 0)
    assert placed.num_bytes[0] <= 1.1 * peak_bytes(program)[0]
    assert placed.num_bytes[0] < total / 2


def test_what_has_places_and_what_lies_beside_it_fit_the_budget_together() -> None:
    without = 0
    for seed in range(40):
        program = random_settings.setting(seed).program
        places = place(program, _NoLayers())  # type: ignore[arg-type]
        alive = most = [0] * program.num_devices
        for block in program.resident:
            alive[program.blocks[block].device] += program.blocks[block].num_bytes
        for op in program.ops:
            alive, most = _after(program, places, op.writes, 1, alive, most)
            alive, most = _after(program, places, op.frees, -1, alive, most)
        for device, budget in enumerate(program.budgets):
            assert most[device] <= places.beside_bytes[device]
            assert places.device_bytes(device) <= budget
            without += device not in places.num_bytes
    assert without > 10


def _after(
    program: Program, places: Places, blocks: Sequence[int], sign: int, alive: list[int], most: list[int]
) -> tuple[list[int], list[int]]:
    """Bytes without places, by device, and the most of them so far."""
    now = list(alive)
    for block in blocks:
        if program.blocks[block].device != HOST and block not in places.offsets:
            now[program.blocks[block].device] += sign * program.blocks[block].num_bytes
    return now, [max(pair) for pair in zip(now, most, strict=True)]


def test_blocks_without_places_train_to_the_same_weights() -> None:
    trained = []
    for has_places in (True, False):
        layers, machine, program = setting()
        if not has_places:
            program = replace(program, budgets=(place(program, layers).device_bytes(0) - 1,))
        with Runner(layers, sgd(layers), machine, lambda _, program=program: program) as runner:
            losses = [runner.step(layers.example_batch) for _ in range(3)]
            memory = runner._training.memory.memory
            assert (0 in memory.num_bytes) == has_places
            assert HOST in memory.num_bytes
        trained.append([*map(torch.tensor, losses), *(tensor.detach().clone() for tensor in layers.tensors.values())])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


def test_no_program_keeps_memory_alive_that_is_given_back() -> None:
    layers, machine, program = setting()
    with Runner(layers, sgd(layers), machine, lambda _: program) as runner:
        runner.step(layers.example_batch)
        memory = runner._training.memory.memory
        runner._training.memory.of(replace(program)).prepare()  # another program in the same memory
        old = [weakref.ref(tensor.untyped_storage()) for tensor in memory._memory.values()]
        for device, num_bytes in memory.num_bytes.items():
            memory.trim(device, num_bytes + 1, None)
        assert len(old) == 2
        assert all(storage() is None for storage in old)
        runner.step(layers.example_batch)


def test_steps_after_the_first_allocate_no_memory_for_blocks() -> None:
    layers, machine, program = setting()
    with Runner(layers, sgd(layers), machine, lambda _: program) as runner:
        runner.step(layers.example_batch)
        memory = runner._training.memory.memory
        held, first = memory.num_bytes, dict(memory._memory)
        assert held.keys() == {HOST, 0}
        content = _content(runner, program)
        for _ in range(3):
            runner.step(layers.example_batch)
        assert memory.num_bytes == held
        assert all(memory._memory[device] is tensor for device, tensor in first.items())
        assert _content(runner, program) == content


def _content(runner: Runner, program: Program) -> set[int]:
    """The tensors that blocks are read as."""
    memory = runner._training.memory.of(program)
    return {id(flat.memory) for flat in memory._flat.values()} | {id(values) for values in memory._values.values()}


def test_what_ops_were_seen_to_use_is_charged_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, machine, program = setting()
    counted: list[object] = []
    count = MemoryTracker._count
    monkeypatch.setattr(MemoryTracker, "_count", lambda self, *given: (counted.append(given), count(self, *given)))
    with Runner(layers, sgd(layers), machine, lambda _: program) as runner:
        runner.step(layers.example_batch)
        assert counted
        counted.clear()
        for _ in range(2):
            runner.step(layers.example_batch)
            assert runner.last_trace is not None
            assert 0 < runner.last_trace.peak_bytes[0] <= peak_bytes(program)[0]
        assert runner.device_bytes == (0,)
    assert not counted


def test_counting_again_in_every_step_finds_the_same_peak() -> None:
    layers, machine, program = setting()
    with Runner(layers, sgd(layers), machine, lambda _: program, chaos_seed=3) as runner:
        runner.step(layers.example_batch)
        assert runner.last_trace is not None
        counted = runner.last_trace.peak_bytes
        assert not runner._training.usages._known
    assert counted <= peak_bytes(program)
    assert any(op.kind is OpKind.RECOMPUTE for op in program.ops)
