"""Moves are the transfers of all ops, for any program."""

import pytest
from figures.pipelines import pipeline_trace
from random_settings import setting

from harmony_lab.figures.moves import moves
from harmony_lab.program import TENSOR_CODES, OpKind, Program, Transfer

KINDS = {code: kind for kind, code in TENSOR_CODES.items()}


def rows(program: Program) -> list[tuple[int, Transfer]]:
    found = zip(*(column.tolist() for column in moves(program)), strict=True)
    return sorted((op, Transfer(source, to, KINDS[kind], size)) for op, source, to, kind, size in found)


@pytest.mark.parametrize("seed", range(8))
def test_moves_are_what_ops_transfer(seed: int) -> None:
    program = setting(seed).program
    assert rows(program) == sorted(
        (number, transfer) for number in range(len(program.ops)) for transfer in program.transfers(number)
    )


def test_the_settings_above_have_every_kind_of_transfer() -> None:
    kinds = {op.kind for seed in range(8) for op in setting(seed).program.ops}
    assert {OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.RECV, OpKind.ALL_REDUCE} <= kinds


def test_a_program_without_ops_moves_nothing() -> None:
    blank = Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=())
    assert rows(blank) == []
    assert rows(pipeline_trace().program)
