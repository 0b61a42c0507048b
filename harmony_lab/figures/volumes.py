"""Volumes: bytes moved, tabulated by layer pack or by candidate, and by direction and tensor kind."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.compiled import Ints
from harmony_lab.figures.moves import moves
from harmony_lab.figures.theme import label
from harmony_lab.machine import HOST
from harmony_lab.order import Bools, Uses
from harmony_lab.program import OP_CODES, TENSOR_CODES, OpKind, Program, TensorKind
from harmony_lab.trace import Trace

__all__ = ["Volumes", "Way", "volumes_of_candidates", "volumes_of_packs"]


_KINDS = tuple(TensorKind)
_COMPUTING = tuple(OP_CODES[kind] for kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD))
_GRADIENTS = tuple(TENSOR_CODES[kind] for kind in (TensorKind.GRADIENT, TensorKind.ACTIVATION_GRADIENT))


class Way(StrEnum):
    """Where bytes go, seen from the devices."""

    IN = "in"
    OUT = "out"
    PEER = "peer"


class Volumes(NamedTuple):
    """``num_bytes[row, column]``; a column is a direction and a tensor kind."""

    rows: tuple[str, ...]
    columns: tuple[tuple[Way, TensorKind], ...]
    num_bytes: npt.NDArray[np.int64]

    @property
    def column_labels(self) -> tuple[str, ...]:
        return tuple(f"{label(kind)} {way}" for way, kind in self.columns)


_Cells = dict[tuple[Way, TensorKind], int]


def volumes_of_candidates(names: Sequence[str], traces: Sequence[Trace]) -> Volumes:
    """A row per trace, from its moved bytes."""
    rows: dict[str, _Cells] = {}
    for name, trace in zip(names, traces, strict=True):
        cells = rows.setdefault(name, {})
        for (source, destination, kind), num_bytes in trace.moved_bytes.items():
            _add(cells, source, destination, kind, num_bytes)
    return _table(rows)


def volumes_of_packs(trace: Trace) -> Volumes:
    """A row per layer pack and direction of the pass, ``"[0:3) F"`` or ``"[0:3) B"``, in the order of the program.

    A transfer belongs to the pack that computes with what it moves: the next one to use a block that comes in, the last
    one to have used a block that goes out.
    """
    program = trace.program
    moved = moves(program)
    packs, of_op = np.unique(_packs(program), axis=0, return_inverse=True)
    cells, of_move = np.unique(
        np.column_stack([of_op[moved.op], moved.source, moved.destination, moved.kind]), axis=0, return_inverse=True
    )
    num_bytes = np.zeros(len(cells), dtype=np.int64)
    np.add.at(num_bytes, of_move, moved.num_bytes)
    rows: dict[str, _Cells] = {}
    for (pack, source, destination, kind), amount in zip(cells.tolist(), num_bytes.tolist(), strict=True):
        backward, start, stop = packs[pack].tolist()
        _add(rows.setdefault(_name(backward, start, stop), {}), source, destination, _KINDS[kind], amount)
    return _table(rows)


def _name(backward: int, first: int, second: int) -> str:
    return f"[{-first}:{-second}) B" if backward else f"[{first}:{second}) F"


def _packs(program: Program) -> Ints:
    """[ops, 3], in the order in which packs run: whether it is of a backward pack, and that one's layers, which go
    downwards and so are negative."""
    ops = program.op_columns
    count = len(ops.kind)
    arriving = np.isin(ops.kind, (OP_CODES[OpKind.SWAP_IN], OP_CODES[OpKind.RECV]))
    user = np.where(arriving, *_users(program))
    used = (user >= 0) & (user < count)
    user = np.where(used, user, 0)
    reads, writes = Uses.of(ops.reads, ops.reads_end), Uses.of(ops.writes, ops.writes_end)
    of_gradients = np.zeros(count, dtype=np.bool_)
    for uses in (reads, writes):
        of_gradients[uses.op[np.isin(program.block_columns.kind[uses.block], _GRADIENTS)]] = True
    backward = np.where(used, _backward(program)[user], of_gradients)
    own = ~used | (ops.start < ops.stop)
    start, stop = np.where(own, ops.start, ops.start[user]), np.where(own, ops.stop, ops.stop[user])
    return np.column_stack([backward, np.where(backward, -start, start), np.where(backward, -stop, stop)])


def _backward(program: Program) -> Bools:
    """By op, whether it belongs to a backward pack: the fused pack's forward does, it keeps what backward needs."""
    ops = program.op_columns
    writes = Uses.of(ops.writes, ops.writes_end)
    saving = np.zeros(len(ops.kind), dtype=np.bool_)
    saving[writes.op[program.block_columns.kind[writes.block] == TENSOR_CODES[TensorKind.SAVED]]] = True
    again = np.isin(ops.kind, (OP_CODES[OpKind.RECOMPUTE], OP_CODES[OpKind.BACKWARD]))
    found: Bools = again | (saving & (ops.kind == OP_CODES[OpKind.FORWARD]))
    return found


def _users(program: Program) -> tuple[Ints, Ints]:
    """By op: the first compute op after it to use a block that it writes, or the number of ops where none does; the
    last one before it to have used a block that it reads, or -1.
    """
    ops = program.op_columns
    count = len(ops.kind)
    reads, writes = Uses.of(ops.reads, ops.reads_end), Uses.of(ops.writes, ops.writes_end)
    computing = np.isin(ops.kind, _COMPUTING)
    keys = np.concatenate([uses.block * count + uses.op for uses in (reads, writes)])
    keys = np.append(np.sort(keys[computing[keys % count]]), -1)  # by block, then by op; the last: nothing
    after, before = np.full(count, count), np.full(count, -1)
    at = keys[np.searchsorted(keys[:-1], writes.block * count + writes.op, side="right")]
    np.minimum.at(after, writes.op, np.where(at // count == writes.block, at % count, count))
    at = keys[np.searchsorted(keys[:-1], reads.block * count + reads.op, side="left") - 1]
    np.maximum.at(before, reads.op, np.where(at // count == reads.block, at % count, -1))
    return after, before


def _add(cells: _Cells, source: int, destination: int, kind: TensorKind, num_bytes: int) -> None:
    way = Way.IN if source == HOST else Way.OUT if destination == HOST else Way.PEER
    cells[way, kind] = cells.get((way, kind), 0) + num_bytes


def _table(rows: Mapping[str, _Cells]) -> Volumes:
    present = {column for cells in rows.values() for column in cells}
    columns = tuple((way, kind) for way in Way for kind in TensorKind if (way, kind) in present)
    table = [[cells.get(column, 0) for column in columns] for cells in rows.values()]
    return Volumes(tuple(rows), columns, np.array(table, dtype=np.int64).reshape(len(rows), len(columns)))
