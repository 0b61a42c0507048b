"""Chaos shows a missing dependency: with any one wait removed, training breaks; with all of them, it never does."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import models
import pytest
import torch
from torch import nn

from harmony_lab.bench import chaos
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.program import Op, OpKind, Program
from harmony_lab.runtime.runner import Runner

PLAN = Plan.parse("pp minibatch=6 forward=2[0:2,2:3] backward=2[0:2,2:3,3:5] devices=0,1")
SEEDS = 12


@pytest.fixture(scope="module")
def setting() -> tuple[LayerSequence, nn.Module, Machine, Program]:
    model = models.dropout_mlp(width=8, blocks=5)
    inputs = torch.randn(2, 8)
    layers = decompose(model, (inputs, inputs), nn.MSELoss())
    machine = Machine.emulated(2, memory="1MiB", link="1e12")
    costs = profile(layers, machine, torch.optim.SGD(model.parameters()), microbatch_sizes=(1, 2), trials=1)
    return layers, model, machine, lower(PLAN, costs, machine)


def _edges(program: Program, first: OpKind, second: OpKind) -> Iterator[tuple[int, int]]:
    """Edges between ops of these kinds where the second uses what the first has written."""
    for number, op in enumerate(program.ops):
        for other in op.after:
            before = program.ops[other]
            if op.kind is second and before.kind is first and (set(before.writes) & {*op.reads, *op.frees}):
                yield number, other


def _without(program: Program, number: int, edge: int) -> Program:
    ops: list[Op] = list(program.ops)
    ops[number] = ops[number]._replace(after=tuple(other for other in ops[number].after if other != edge))
    return replace(program, ops=tuple(ops))


def _outcome(
    setting: tuple[LayerSequence, nn.Module, Machine, Program], program: Program, seed: int, *, interleaves: bool = True
) -> str:
    """The parameters after two steps as text, or how it failed."""
    layers, model, machine, _ = setting
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    try:
        with Runner(layers, optimizer, machine, lambda _: program, chaos_seed=seed, interleaves=interleaves) as runner:
            for _ in range(2):
                runner.step((torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator)))
        return str([parameter.detach().tolist() for parameter in model.parameters()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.load_state_dict(start)


def test_with_every_wait_in_place_the_numbers_are_the_same_under_any_chaos(
    setting: tuple[LayerSequence, nn.Module, Machine, Program],
) -> None:
    outcomes = {
        _outcome(setting, setting[3], seed, interleaves=interleaves)
        for interleaves, seeds in ((True, SEEDS), (False, 3))
        for seed in range(seeds)
    }
    assert len(outcomes) == 1
    assert "Error" not in outcomes.pop()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (OpKind.SWAP_IN, OpKind.FORWARD),
        (OpKind.FORWARD, OpKind.SWAP_OUT),
        (OpKind.SWAP_OUT, OpKind.UPDATE),
        (OpKind.FORWARD, OpKind.SEND),
        (OpKind.RECV, OpKind.BACKWARD),
    ],
)
def test_chaos_shows_a_removed_wait(
    setting: tuple[LayerSequence, nn.Module, Machine, Program], first: OpKind, second: OpKind
) -> None:
    """Of the waits of that kind at least one has nothing else, such as time, that keeps it."""
    right = _outcome(setting, setting[3], 0)
    edges = list(_edges(setting[3], first, second))
    assert edges
    broken = (_without(setting[3], number, edge) for number, edge in edges)
    assert any(_outcome(setting, program, seed) != right for program in broken for seed in range(SEEDS))


def test_chaos_shows_weights_that_come_in_before_they_are_updated() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    layers = decompose(model, (torch.randn(2, 8), torch.randn(2, 8)), nn.MSELoss())
    machine = Machine.emulated(2, memory="1MiB", link="1e12")
    costs = profile(layers, machine, torch.optim.SGD(model.parameters()), microbatch_sizes=(1, 2), trials=1)
    plan = PLAN.with_(just_in_time_update=False, overlapped_update=True)
    program, start = lower(plan, costs, machine), copy.deepcopy(model.state_dict())
    batch = torch.randn(6, 8), torch.randn(6, 8)

    def outcome(of: Program, seed: int) -> list[list[float]]:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Runner(
            layers, optimizer, machine, lower, lower_leaving=lambda _: of, chaos_seed=seed, interleaves=True
        ) as runner:
            for _ in range(2):
                runner.step(batch, leave_updates=True)
        return [parameter.detach().flatten().tolist() for parameter in model.parameters()]

    right = outcome(program, 0)
    edges = [
        (number, other)
        for number, op in enumerate(program.ops)
        for other in op.after
        if op.kind is OpKind.SWAP_IN and program.ops[other].kind is OpKind.UPDATE
    ]
    assert len(edges) >= 3
    assert all(outcome(program, seed) == right for seed in range(SEEDS))
    assert any(outcome(_without(program, *edge), seed) != right for edge in edges for seed in range(SEEDS))


def test_random_plans_train_as_plain_pytorch_in_any_order() -> None:
    """Of 3 to 12 layers, with every switch; ``harmony-lab bench runtime`` runs twenty times as many."""
    assert chaos.failures(100) == {}
