"""Blocks share memory where the program's edges keep them apart, and come back to it in every step."""

from itertools import combinations

import pytest
import random_settings
import torch
from small_layers import mlp

from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.planner.order import Order
from harmony_lab.profiler.measure import profile
from harmony_lab.program import OpKind, Program
from harmony_lab.runtime.memory import MemoryTracker
from harmony_lab.runtime.places import place
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


def test_steps_after_the_first_allocate_no_memory_for_blocks() -> None:
    layers, machine, program = setting()
    with Runner(layers, sgd(layers), machine, lambda _: program) as runner:
        runner.step(layers.example_batch)
        memory = runner._training.memory.memory
        held, first = memory.num_bytes, {id(tensor) for tensor in memory._memory.values()}
        content = _content(runner, program)
        for _ in range(3):
            runner.step(layers.example_batch)
        assert memory.num_allocations == 2  # the device's and the host's
        assert memory.num_bytes == held
        assert {id(tensor) for tensor in memory._memory.values()} == first
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
