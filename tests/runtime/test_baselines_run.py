"""Baselines that are made to run train like plain PyTorch, move what the simulator says and stay within budgets."""

import copy
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import models
import pytest
import torch
from plain_training import breaking
from torch import nn

from harmony_lab.costs import Profile
from harmony_lab.errors import ProgramError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Machine
from harmony_lab.planner.baseline_programs import Needs, pipeline_units, runnable_program
from harmony_lab.planner.baseline_tables import LayerTables
from harmony_lab.planner.baselines import BASELINES, baselines
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.pack import PackCosts, partitions
from harmony_lab.precision import Precision
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.runtime.runner import Runner, step_seed
from harmony_lab.simulator.engine import run

MINIBATCH, SIZE = 32, 8


def batch_of(name: str, seed: int) -> Any:
    return (
        models.gpt2_batch(MINIBATCH, length=4, seed=seed) if name == "gpt2" else models.mlp_batch(MINIBATCH, seed=seed)
    )


@cache
def subject(name: str) -> tuple[LayerSequence, Profile]:
    """GPT-2 has a parameter that its first and last layer share, and dropout."""
    torch.manual_seed(0)
    model = models.gpt2(layers=2, dropout=0.1) if name == "gpt2" else normalizing()
    loss = () if name == "gpt2" else (nn.CrossEntropyLoss(),)
    layers = decompose(model, batch_of(name, 0), *loss)
    return layers, profile(layers, machine(1), adam(model), microbatch_sizes=(4, 8, 16), trials=1)


def normalizing() -> nn.Module:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*parts, nn.Linear(8, 5))


def machine(num_devices: int, memory: str | int = "64MiB") -> Machine:
    return Machine.emulated(num_devices, memory=memory, link="1e12")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def tight(name: str, order: str, num_devices: int, *, recomputes: bool) -> tuple[Machine, Program]:
    """With no more memory than the largest op needs."""
    memory = 1
    while isinstance(
        found := made(name, order, machine(num_devices, memory), recomputes=recomputes, on_demand=True), Needs
    ):
        memory = max(found.num_bytes, memory + 1)
    check(found)
    return machine(num_devices, memory), found


def made(name: str, order: str, devices: Machine, *, recomputes: bool, on_demand: bool) -> Program | Needs:
    _, costs = subject(name)
    tables = LayerTables(costs, PackCosts(costs))
    stages, units = (), None
    if order != "dp":
        count = devices.num_devices
        found = partitions(tables.costs, 0, len(costs), SIZE, forward=False, budget_bytes=None, counts=(count,))
        stages = found[count]
        units = pipeline_units(tables.costs, stages, MINIBATCH, SIZE, gpipe=order == "gpipe")
    return runnable_program(tables, devices, MINIBATCH, SIZE, recomputes, stages, units, on_demand=on_demand)


class Plain:
    """Gradient accumulation over the same microbatches."""

    def __init__(self, name: str) -> None:
        self.layers, _ = subject(name)
        self.name, self.model = name, copy.deepcopy(self.layers.model)
        self.optimizer = adam(self.model)

    def step(self, step: int, batch: Any) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for first in range(0, MINIBATCH, SIZE):
            last = first + SIZE
            with reproducible_randomness(self.layers, step_seed(0, step), samples=(first, last)):
                if self.name == "gpt2":
                    part = {key: value[first:last] for key, value in batch.items()}
                    loss = self.model(**part, use_cache=False).loss
                else:
                    loss = nn.functional.cross_entropy(self.model(batch[0][first:last]), batch[1][first:last])
            (loss * SIZE / MINIBATCH).backward()
            total += loss.item() * SIZE / MINIBATCH
        self.optimizer.step()
        return total

    def assert_same(self, optimizer: torch.optim.Optimizer) -> None:
        ours, theirs = self.layers.model.state_dict(), self.model.state_dict()
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-4, atol=2e-5)
        states = [made.state_dict()["state"] for made in (optimizer, self.optimizer)]
        torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=2e-6)


def train(name: str, program: Program, devices: Machine, *, steps: int = 3, **options: Any) -> None:
    layers, costs = subject(name)
    predicted, most = run(program, costs, devices), peak_bytes(program)
    start = copy.deepcopy(layers.model.state_dict())
    plain, optimizer = Plain(name), adam(layers.model)
    try:
        with Runner(layers, optimizer, devices, lambda size: program, **options) as runner:
            for step in range(steps):
                batch = batch_of(name, step + 10)
                assert runner.step(batch) == pytest.approx(plain.step(step, batch), rel=1e-5)
                plain.assert_same(optimizer)
                measured = runner.last_trace
                assert measured is not None
                if step:  # the first makes the optimizer's state
                    assert measured.moved_bytes == predicted.moved_bytes
                for peak, bound, budget in zip(measured.peak_bytes, most, devices.budgets, strict=True):
                    assert peak <= bound <= budget
                assert not any(runner.device_bytes)
    finally:
        layers.model.load_state_dict(start)


THREADS: dict[str, Any] = {}
CHAOS, INTERLEAVED = {"chaos_seed": 3, "steps": 2}, {"interleaves": True, "steps": 2}
PAGED = [
    ("gpt2", "dp", 1, False, THREADS),
    ("gpt2", "dp", 1, True, CHAOS),
    ("gpt2", "dp", 2, False, CHAOS),
    ("gpt2", "dp", 2, True, INTERLEAVED),
    ("gpt2", "gpipe", 1, True, INTERLEAVED),
    ("gpt2", "gpipe", 2, False, CHAOS),
    ("gpt2", "gpipe", 2, True, THREADS),
    ("gpt2", "1f1b", 2, False, INTERLEAVED),
    ("gpt2", "1f1b", 2, True, CHAOS),
    ("batchnorm", "dp", 1, False, INTERLEAVED),
    ("batchnorm", "dp", 2, True, CHAOS),
    ("batchnorm", "dp", 2, False, THREADS),
    ("batchnorm", "gpipe", 2, False, CHAOS),
    ("batchnorm", "1f1b", 2, True, INTERLEAVED),
]


@pytest.mark.parametrize(("name", "order", "num_devices", "recomputes", "options"), PAGED)
def test_paged_training_is_plain_training(
    name: str, order: str, num_devices: int, recomputes: bool, options: dict[str, Any]
) -> None:
    devices, program = tight(name, order, num_devices, recomputes=recomputes)
    expected = {TensorKind.WEIGHT, TensorKind.OPTIMIZER, TensorKind.ACTIVATION}
    expected |= {TensorKind.GRADIENT} if name == "gpt2" else {TensorKind.BUFFER}
    expected |= {TensorKind.SAVED} if not recomputes or order == "gpipe" else set()
    assert brought_out(program) >= expected
    train(name, program, devices, **options)


@pytest.mark.parametrize(("order", "options"), [("dp", CHAOS), ("1f1b", INTERLEAVED)])
def test_training_in_memory_is_plain_training_and_moves_all_state_once(order: str, options: dict[str, Any]) -> None:
    devices = machine(2)
    program = made("gpt2", order, devices, recomputes=False, on_demand=False)
    assert isinstance(program, Program)
    check(program)
    assert brought_out(program) == {TensorKind.WEIGHT, TensorKind.OPTIMIZER, TensorKind.ACTIVATION}  # and the loss
    train("gpt2", program, devices, **options)


def brought_out(program: Program) -> set[TensorKind]:
    outs = [number for number, op in enumerate(program.ops) if op.kind is OpKind.SWAP_OUT]
    return {transfer.kind for number in outs for transfer in program.transfers(number)}


def test_buffers_that_are_updated_between_two_swaps_go_on_from_where_they_were() -> None:
    _, program = tight("batchnorm", "dp", 1, recomputes=False)
    outs = [program.blocks[block] for op in program.ops if op.kind is OpKind.SWAP_OUT for block in op.reads]
    buffers = [block.layers for block in outs if block.kind is TensorKind.BUFFER]
    assert len(set(buffers)) < len(buffers)  # ``test_paged_training`` compares the statistics


def test_every_baseline_runs_as_the_simulator_says() -> None:
    layers, costs = subject("gpt2")
    devices = machine(2, "2MiB")
    found = baselines(costs, devices, MINIBATCH, runnable=True)
    assert [baseline.name for baseline in found] == list(BASELINES)
    start, expected = copy.deepcopy(layers.model.state_dict()), 0.0
    for baseline in found:
        assert baseline.program is not None
        with Runner(layers, adam(layers.model), devices, {MINIBATCH: baseline.program}.get, interleaves=True) as runner:
            runner.step(batch_of("gpt2", 0))
            loss, measured = runner.step(batch_of("gpt2", 1)), runner.last_trace
        expected = expected or loss
        assert loss == pytest.approx(expected, rel=1e-5)
        assert measured is not None
        assert (measured.swap_bytes, measured.peer_bytes) == (baseline.swap_bytes, baseline.peer_bytes)
        assert all(here <= there for here, there in zip(measured.peak_bytes, baseline.peak_bytes, strict=True))
        layers.model.load_state_dict(start)


def test_iterations_in_the_middle_of_training_are_refused() -> None:
    (layers, costs), devices = subject("gpt2"), machine(1, "1MiB")
    (found,) = baselines(costs, devices, MINIBATCH, names=["dp, paged"])
    assert found.program is not None
    program = found.program
    with (
        Runner(layers, adam(layers.model), devices, lambda size: program) as runner,
        pytest.raises(ProgramError, match=r"simulated, not run.*baselines\(\.\.\., runnable=True\)"),
    ):
        runner.step(batch_of("gpt2", 0))
    in_bf16 = replace(costs, precision=Precision.BF16)
    (found,) = baselines(in_bf16, devices, MINIBATCH, names=["dp, paged"], runnable=True)
    assert "copies of masters on the host: profile in fp32" in found.reason


def test_a_step_that_fails_between_swaps_leaves_nothing_behind() -> None:
    layers, _ = subject("gpt2")
    start = copy.deepcopy(layers.model.state_dict())
    calls = count()
    broken = breaking(layers, 1, lambda: 1 / 0 if next(calls) == 3 else 0)  # the last microbatch's forward
    devices, program = tight("gpt2", "gpipe", 1, recomputes=False)
    plain, optimizer = Plain("gpt2"), adam(layers.model)
    try:
        with Runner(broken, optimizer, devices, lambda size: program, chaos_seed=1) as runner:
            with pytest.raises(TrainingError, match=r"ZeroDivisionError.*\n.*No weights were updated"):
                runner.step(batch_of("gpt2", 0))
            assert not any(runner.device_bytes)
            assert runner.step(batch_of("gpt2", 0)) == pytest.approx(plain.step(0, batch_of("gpt2", 0)), rel=1e-5)
            plain.assert_same(optimizer)
    finally:
        layers.model.load_state_dict(start)


def test_what_autograd_saved_may_leave_the_host_once_it_is_back() -> None:
    devices, program = tight("gpt2", "gpipe", 1, recomputes=False)
    saved = {i for i, block in enumerate(program.blocks) if (block.kind, block.device) == (TensorKind.SAVED, HOST)}
    ops = [
        op._replace(frees=tuple(sorted({*op.frees, *saved} & {*op.reads})))
        if op.kind is OpKind.SWAP_IN
        else op._replace(frees=tuple(block for block in op.frees if block not in saved))
        for op in program.ops
    ]
    assert saved
    changed = replace(program, ops=tuple(ops))
    check(changed)
    train("gpt2", changed, devices, interleaves=True, steps=1)


def test_an_optimizer_that_was_not_profiled_is_refused() -> None:
    layers, costs = subject("gpt2")
    stateless = replace(costs, layers=tuple(replace(layer, optimizer_state_bytes=0) for layer in costs.layers))
    (found,) = baselines(stateless, machine(2), MINIBATCH, names=["dp, in memory"], runnable=True)
    assert found.program is not None
    program, start = found.program, copy.deepcopy(layers.model.state_dict())
    with (
        Runner(layers, adam(layers.model), machine(2), lambda size: program, interleaves=True) as runner,
        pytest.raises(TrainingError, match="profile with the optimizer that you train with"),
    ):
        runner.step(batch_of("gpt2", 0))
    layers.model.load_state_dict(start)


def test_devices_that_update_know_no_norm_of_all_gradients() -> None:
    layers, _ = subject("gpt2")
    start = copy.deepcopy(layers.model.state_dict())
    devices, program = tight("gpt2", "gpipe", 1, recomputes=False)
    with (
        Runner(
            layers, adam(layers.model), devices, lambda size: program, interleaves=True, max_grad_norm=1.0
        ) as runner,
        pytest.raises(TrainingError, match="max_grad_norm and several minibatches per update need updates on the host"),
    ):
        runner.step(batch_of("gpt2", 0))
    layers.model.load_state_dict(start)
