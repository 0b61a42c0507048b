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
from harmony_lab.errors import HarmonyError, ProgramError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Machine
from harmony_lab.planner.baseline_programs import Iteration, Needs, pipeline_units, runnable_program
from harmony_lab.planner.baseline_tables import LayerTables
from harmony_lab.planner.baselines import BASELINES, baselines
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.pack import PackCosts, partitions
from harmony_lab.precision import Precision
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.precision import in_precision
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.roles import Role
from harmony_lab.runtime.runnable import require_runnable
from harmony_lab.runtime.runner import Runner, step_seed
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace

MINIBATCH, SIZE = 32, 8


def batch_of(name: str, seed: int) -> Any:
    if name == "batchnorm":
        return models.mlp_batch(MINIBATCH, seed=seed)
    return models.gpt2_batch(MINIBATCH, length=4, seed=seed)


@cache
def subject(name: str) -> tuple[LayerSequence, Profile]:
    """GPT-2 has a parameter that its first and last layer share, and dropout."""
    torch.manual_seed(0)
    model = normalizing() if name == "batchnorm" else models.gpt2(layers=2, dropout=0.1)
    loss = (nn.CrossEntropyLoss(),) if name == "batchnorm" else ()
    layers = decompose(model, batch_of(name, 0), *loss)
    if name == "gpt2 in bf16":
        layers = in_precision(layers, Precision.BF16, shadows=False)
    return layers, timeless(profile(layers, machine(1), adam(model), microbatch_sizes=(4, 8, 16), trials=1))


def timeless(measured: Profile) -> Profile:
    """With seconds that are the same on any machine: pipelines are cut by them."""
    return replace(
        measured,
        layers=tuple(
            replace(
                layer,
                costs=tuple(cost._replace(forward_s=1e-4, recompute_s=1e-4, backward_s=2e-4) for cost in layer.costs),
            )
            for layer in measured.layers
        ),
    )


def normalizing() -> nn.Module:
    """The second and third layer share a parameter."""
    parts = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(3)]
    parts[2][0].weight = parts[1][0].weight
    return nn.Sequential(*parts, nn.Linear(8, 5))


def machine(num_devices: int, memory: str | int = "64MiB") -> Machine:
    return Machine.emulated(num_devices, memory=memory, link="1e12")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def tight(name: str, order: str, num_devices: int, *, recomputes: bool, clips: bool = False) -> tuple[Machine, Program]:
    """With no more memory than the largest op needs."""
    memory = 1
    wanted: dict[str, Any] = {"recomputes": recomputes, "on_demand": True, "clips": clips}
    while isinstance(found := made(name, order, machine(num_devices, memory), **wanted), Needs):
        memory = max(found.num_bytes, memory + 1)
    check(found)
    return machine(num_devices, memory), found


def made(
    name: str,
    order: str,
    devices: Machine,
    *,
    recomputes: bool,
    on_demand: bool,
    clips: bool = False,
    role: Role = Role.ALONE,
) -> Program | Needs:
    _, costs = subject(name)
    tables = LayerTables(costs, PackCosts(costs))
    pipeline: dict[str, Any] = {}
    if order != "dp":
        count = devices.num_devices
        found = partitions(tables.costs, 0, len(costs), SIZE, forward=False, budget_bytes=None, counts=(count,))
        stages = found[count]
        units = pipeline_units(tables.costs, stages, MINIBATCH, SIZE, gpipe=order == "gpipe")
        pipeline = {"stages": stages, "units": units}
    iteration = Iteration(
        tables=tables,
        machine=devices,
        minibatch_size=MINIBATCH,
        size=SIZE,
        recomputes=recomputes,
        clips=clips,
        **pipeline,
    )
    return runnable_program(iteration, on_demand=on_demand, role=role)


class Plain:
    """Gradient accumulation over the same microbatches."""

    def __init__(self, name: str) -> None:
        self.layers, _ = subject(name)
        self.name, self.model = name, copy.deepcopy(self.layers.model)
        self.optimizer = adam(self.model)
        self.norm: float | None = None

    def step(self, step: int, *batches: Any, max_norm: float | None = None) -> float:
        self.optimizer.zero_grad()
        total, share = 0.0, SIZE / MINIBATCH / len(batches)
        for number, batch in enumerate(batches):
            for first in range(0, MINIBATCH, SIZE):
                before, last = number * MINIBATCH, first + SIZE
                low = torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=self.name == "gpt2 in bf16")
                samples = before + first, before + last
                with low, reproducible_randomness(self.layers, step_seed(0, step), samples=samples):
                    if self.name != "batchnorm":
                        part = {key: value[first:last] for key, value in batch.items()}
                        loss = self.model(**part, use_cache=False).loss
                    else:
                        loss = nn.functional.cross_entropy(self.model(batch[0][first:last]), batch[1][first:last])
                (loss * share).backward()
                total += loss.item() * share
        if max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
        self.optimizer.step()
        return total

    def assert_same(self, optimizer: torch.optim.Optimizer) -> None:
        ours, theirs = self.layers.model.state_dict(), self.model.state_dict()
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-4, atol=2e-5)
        states = [made.state_dict()["state"] for made in (optimizer, self.optimizer)]
        torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=2e-6)


def train(
    name: str,
    program: Program,
    devices: Machine,
    *,
    steps: int = 3,
    max_grad_norm: float | None = None,
    several: dict[Role, Program] | None = None,
    **options: Any,
) -> None:
    """``several``: programs of minibatches, of which three make a step."""
    layers, costs = subject(name)
    start = copy.deepcopy(layers.model.state_dict())
    plain, optimizer = Plain(name), adam(layers.model)
    roles = {role: lambda size, role=role: several[role] for role in several or {}}
    run_roles = [Role.ADDING, Role.ADDING, Role.LAST] if several else [Role.ALONE]
    try:
        with Runner(
            layers, optimizer, devices, lambda size: program, max_grad_norm=max_grad_norm, lower_as=roles, **options
        ) as runner:
            traces = recorded(runner)
            for step in range(steps):
                batches = [batch_of(name, 10 * number + step + 10) for number in range(len(run_roles))]
                expected = plain.step(step, *batches, max_norm=max_grad_norm)
                assert runner.accumulate(batches) == pytest.approx(expected, rel=1e-5)
                plain.assert_same(optimizer)
                assert runner.last_norm == (None if max_grad_norm is None else pytest.approx(plain.norm, rel=1e-5))
                assert max_grad_norm is None or plain.norm > max_grad_norm
                for role, measured in zip(run_roles, traces, strict=True):
                    assert_as_predicted(measured, (several or {Role.ALONE: program})[role], costs, devices, step)
                traces.clear()
                assert not any(runner.device_bytes)
    finally:
        layers.model.load_state_dict(start)


def recorded(runner: Runner) -> list[Trace]:
    """What every program that it runs measures."""
    traces: list[Trace] = []
    inner = runner._executor.run

    def run_and_record(*arguments: Any) -> tuple[float, Trace]:
        loss, trace = inner(*arguments)
        traces.append(trace)
        return loss, trace

    runner._executor.run = run_and_record
    return traces


def assert_as_predicted(measured: Trace, program: Program, costs: Profile, devices: Machine, step: int) -> None:
    if step:  # the first makes the optimizer's state
        assert measured.moved_bytes == run(program, costs, devices).moved_bytes
    for peak, bound, budget in zip(measured.peak_bytes, peak_bytes(program), devices.budgets, strict=True):
        assert peak <= bound <= budget


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
    ("gpt2 in bf16", "dp", 2, False, INTERLEAVED),
    ("gpt2 in bf16", "gpipe", 2, True, CHAOS),
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
    expected |= {TensorKind.BUFFER} if name == "batchnorm" else {TensorKind.GRADIENT}
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


CLIPPED = [
    ("gpt2", "dp", 2, True, INTERLEAVED),
    ("gpt2", "gpipe", 2, False, CHAOS),
    ("gpt2", "1f1b", 1, True, THREADS),
    ("gpt2 in bf16", "1f1b", 2, False, INTERLEAVED),
    ("batchnorm", "gpipe", 2, False, CHAOS),
]


@pytest.mark.parametrize(("name", "order", "num_devices", "recomputes", "options"), CLIPPED)
def test_paged_training_clips_by_the_norm_of_all_gradients(
    name: str, order: str, num_devices: int, recomputes: bool, options: dict[str, Any]
) -> None:
    devices, program = tight(name, order, num_devices, recomputes=recomputes, clips=True)
    train(name, program, devices, max_grad_norm=0.05, **options)


def test_which_block_is_which_does_not_matter_to_gradients_that_meet() -> None:
    devices, program = tight("gpt2", "gpipe", 2, recomputes=False, clips=True)
    last = len(program.blocks) - 1
    ops = [
        op._replace(**{name: tuple(last - i for i in getattr(op, name)[::-1]) for name in ("reads", "writes", "frees")})
        for op in program.ops
    ]
    reversed_blocks = replace(program, blocks=tuple(program.blocks)[::-1], ops=tuple(ops))
    check(reversed_blocks)
    train("gpt2", reversed_blocks, devices, max_grad_norm=0.05, **INTERLEAVED)


SEVERAL = [
    ("gpt2", "dp", 2, False, 0.05, INTERLEAVED),
    ("gpt2", "gpipe", 2, True, None, CHAOS),
    ("gpt2", "1f1b", 2, False, 0.05, THREADS),
    ("batchnorm", "dp", 2, True, None, CHAOS),
]


@pytest.mark.parametrize(("name", "order", "num_devices", "recomputes", "max_norm", "options"), SEVERAL)
def test_several_minibatches_make_one_update_of_paged_training(
    name: str, order: str, num_devices: int, recomputes: bool, max_norm: float | None, options: dict[str, Any]
) -> None:
    clips = max_norm is not None
    devices, program = tight(name, order, num_devices, recomputes=recomputes, clips=clips)
    wanted: dict[str, Any] = {"recomputes": recomputes, "on_demand": True, "clips": clips}
    several = {role: made(name, order, devices, role=role, **wanted) for role in (Role.ADDING, Role.LAST)}
    for one in several.values():
        assert isinstance(one, Program)
        check(one)
    train(name, program, devices, several=several, max_grad_norm=max_norm, **options)


def test_training_in_memory_clips_and_adds_up_minibatches_too() -> None:
    wanted: dict[str, Any] = {"recomputes": False, "on_demand": False, "clips": True}
    several = {role: made("gpt2", "1f1b", machine(2), role=role, **wanted) for role in Role if role is not Role.LEAVING}
    for one in several.values():
        assert isinstance(one, Program)
        check(one)
    assert {TensorKind.GRADIENT} == brought_out(several[Role.ADDING]) - {TensorKind.ACTIVATION}
    train("gpt2", several[Role.ALONE], machine(2), several=several, max_grad_norm=0.05, **CHAOS)


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
    found = baselines(costs, devices, MINIBATCH, runnable=True, clipped=True)
    assert [baseline.name for baseline in found] == list(BASELINES)
    start, plain, expected = copy.deepcopy(layers.model.state_dict()), Plain("gpt2"), []
    batches = [batch_of("gpt2", seed) for seed in range(2)]
    for step, minibatches in enumerate((batches[:1], batches, batches[1:])):
        expected.append(plain.step(step, *minibatches, max_norm=0.05))
    for baseline in found:
        options: dict[str, Any] = {"lower_as": baseline.lower_as, "max_grad_norm": 0.05, "interleaves": True}
        with Runner(layers, adam(layers.model), devices, baseline.lower, **options) as runner:
            losses = [runner.accumulate(batches[:1]), runner.accumulate(batches), runner.accumulate(batches[1:])]
            measured = runner.last_trace
        assert losses == pytest.approx(expected, rel=1e-5)
        assert runner.last_norm == pytest.approx(plain.norm, rel=1e-5)
        assert measured is not None
        assert (measured.swap_bytes, measured.peer_bytes) == (baseline.swap_bytes, baseline.peer_bytes)
        assert all(here <= there for here, there in zip(measured.peak_bytes, baseline.peak_bytes, strict=True))
        layers.model.load_state_dict(start)


def test_iterations_in_the_middle_of_training_are_refused() -> None:
    (layers, costs), devices = subject("gpt2"), machine(1, "1MiB")
    (found,) = baselines(costs, devices, MINIBATCH, names=["dp, paged"])
    with (
        Runner(layers, adam(layers.model), devices, found.lower) as runner,
        pytest.raises(ProgramError, match=r"simulated, not run.*baselines\(\.\.\., runnable=True\)"),
    ):
        runner.step(batch_of("gpt2", 0))
    _, program = tight("gpt2", "dp", 1, recomputes=False)
    with pytest.raises(ProgramError, match=r"copies of the weights.*in_precision\(\.\.\., shadows=False\), they can"):
        require_runnable(program, in_precision(layers, Precision.BF16))
    shadowed = replace(costs, precision=Precision.BF16, master_bytes=1)
    (found,) = baselines(shadowed, devices, MINIBATCH, names=["dp, paged"], runnable=True)
    assert "bf16 copies of masters on the host: to run it profile in fp32" in found.reason
    with pytest.raises(HarmonyError, match=r"dp, paged has no program here: devices update"):
        found.lower(MINIBATCH)


def test_minibatches_of_other_sizes_than_a_program_is_for_are_refused() -> None:
    (layers, costs), devices = subject("gpt2"), machine(1, "1MiB")
    (found,) = baselines(costs, devices, MINIBATCH, names="dp, paged", runnable=True)
    for lower, said in (
        (found.lower, rf"dp, paged is for minibatches of {MINIBATCH}, got one of {MINIBATCH - 1}"),
        (lambda size: found.lower(MINIBATCH), rf"has {MINIBATCH - 1} samples, .* minibatches of {MINIBATCH}: give a"),
    ):
        with (
            Runner(layers, adam(layers.model), devices, lower, lower_as=found.lower_as) as runner,
            pytest.raises(HarmonyError, match=said),
        ):
            runner.step(models.gpt2_batch(MINIBATCH - 1, length=4))


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
    start = copy.deepcopy(layers.model.state_dict())
    with (
        Runner(layers, adam(layers.model), machine(2), found.lower, interleaves=True) as runner,
        pytest.raises(TrainingError, match="profile with the optimizer that you train with"),
    ):
        runner.step(batch_of("gpt2", 0))
    layers.model.load_state_dict(start)


def test_programs_that_were_not_made_to_clip_or_to_add_up_are_refused() -> None:
    layers, _ = subject("gpt2")
    start = copy.deepcopy(layers.model.state_dict())
    devices, program = tight("gpt2", "gpipe", 1, recomputes=False)
    batches = [batch_of("gpt2", 0), batch_of("gpt2", 1)]
    for options, few, said in (
        ({"max_grad_norm": 1.0}, batches[:1], r"max_grad_norm needs.*baselines\(\.\.\., runnable=True, clipped=True\)"),
        ({}, batches, r"several minibatches per update need programs of their own.*Baseline\.several"),
    ):
        with (
            Runner(layers, adam(layers.model), devices, lambda size: program, interleaves=True, **options) as runner,
            pytest.raises(TrainingError, match=said),
        ):
            runner.accumulate(few)
    layers.model.load_state_dict(start)
