"""Edges that make updates wait for all gradients or losses."""

import pytest
from plain_training import planned
from small_layers import mlp

from harmony_lab.errors import ProgramError
from harmony_lab.machine import Machine
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.runtime.ordering import updating_after

MACHINE = Machine.emulated(2, memory="64KiB", link=1e9)
PLAN = "{} minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0,1 {}"


def program(mode: str = "dp", switches: str = "update=end") -> Program:
    return planned(mlp(depth=5, num_samples=8), MACHINE, PLAN.format(mode, switches))(8)


def first_update(given: Program) -> int:
    return next(number for number, op in enumerate(given.ops) if op.kind is OpKind.UPDATE)


def writers(given: Program, kind: TensorKind, layers: tuple[int, int] | None = None) -> set[int]:
    """Ops that bring blocks of that kind to the host."""
    return {
        number
        for number, op in enumerate(given.ops)
        for block in (given.blocks[index] for index in op.writes)
        if block.device < 0 and block.kind is kind and layers in (None, block.layers)
    }


@pytest.mark.parametrize("mode", ["dp", "pp"])
@pytest.mark.parametrize("peers", ["on", "off"])
def test_the_first_update_waits_for_every_gradient_and_nothing_else_changes(mode: str, peers: str) -> None:
    given = program(mode, f"update=end peer={peers}")
    waiting = updating_after(given, all_gradients=True)
    check(waiting)
    number = first_update(given)
    gradients = writers(given, TensorKind.GRADIENT)
    assert len(gradients) >= 3
    assert not gradients <= set(given.ops[number].after)
    assert gradients <= set(waiting.ops[number].after)
    assert waiting.ops[:number] + waiting.ops[number + 1 :] == given.ops[:number] + given.ops[number + 1 :]
    assert peak_bytes(waiting) == peak_bytes(given)


@pytest.mark.parametrize("switches", ["update=jit", "update=end", "update=jit peer=off"])
def test_the_first_update_waits_for_every_loss(switches: str) -> None:
    given = program("dp", switches)
    waiting = updating_after(given, all_losses=True)
    check(waiting)
    losses = writers(given, TensorKind.ACTIVATION, (6, 6))
    assert len(losses) == 4
    assert losses <= set(waiting.ops[first_update(given)].after)


def test_just_in_time_updates_cannot_wait_for_gradients_that_come_later() -> None:
    with pytest.raises(ProgramError, match=r"comes after op .*update=end"):
        updating_after(program("dp", "update=jit"), all_gradients=True)


def test_nothing_to_wait_for_is_the_same_program() -> None:
    given = program()
    assert updating_after(given) is given
