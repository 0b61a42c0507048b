"""Volumes: bytes moved, tabulated by layer pack or by candidate, and by direction and tensor kind."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.figures.theme import label
from harmony_lab.machine import HOST
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.trace import Trace

__all__ = ["Volumes", "Way", "volumes_of_candidates", "volumes_of_packs"]


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
    uses = _uses(program)
    rows: dict[str, _Cells] = {}
    for number in range(len(program.ops)):
        transfers = program.transfers(number)
        if not transfers:
            continue
        cells = rows.setdefault(_pack(program, number, uses), {})
        for source, destination, kind, num_bytes in transfers:
            _add(cells, source, destination, kind, num_bytes)
    return _table(dict(sorted(rows.items(), key=lambda row: _position(row[0]))))


def _position(name: str) -> tuple[bool, int, int]:
    """Forward packs upwards, then backward packs downwards: the order in which they run."""
    bounds, phase = name.split(") ")
    start, stop = map(int, bounds[1:].split(":"))
    return (False, start, stop) if phase == "F" else (True, -start, -stop)


def _is_backward(program: Program, op: Op) -> bool:
    """Whether the op belongs to a backward pack: the fused pack's forward does, it keeps what backward needs."""
    if op.kind is OpKind.FORWARD:
        return any(program.blocks[b].kind is TensorKind.SAVED for b in op.writes)
    return op.kind in (OpKind.RECOMPUTE, OpKind.BACKWARD)


def _uses(program: Program) -> Mapping[int, list[int]]:
    """Block → the compute ops that read or write it, in order."""
    uses: dict[int, list[int]] = {}
    for number, op in enumerate(program.ops):
        if op.kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD):
            for block in {*op.reads, *op.writes}:
                uses.setdefault(block, []).append(number)
    return uses


def _pack(program: Program, number: int, uses: Mapping[int, list[int]]) -> str:
    op = program.ops[number]
    arriving = op.kind in (OpKind.SWAP_IN, OpKind.RECV)
    users = [user for block in (op.writes if arriving else op.reads) for user in uses.get(block, ())]
    if arriving:
        user = min((user for user in users if user > number), default=None)
    else:
        user = max((user for user in users if user < number), default=None)
    if user is None:
        kinds = {program.blocks[b].kind for b in (*op.reads, *op.writes)}
        backward = not kinds.isdisjoint((TensorKind.GRADIENT, TensorKind.ACTIVATION_GRADIENT))
        layers = op.layers
    else:
        backward = _is_backward(program, program.ops[user])
        layers = op.layers if op.layers[0] < op.layers[1] else program.ops[user].layers
    return f"[{layers[0]}:{layers[1]}) {'B' if backward else 'F'}"


def _add(cells: _Cells, source: int, destination: int, kind: TensorKind, num_bytes: int) -> None:
    way = Way.IN if source == HOST else Way.OUT if destination == HOST else Way.PEER
    cells[way, kind] = cells.get((way, kind), 0) + num_bytes


def _table(rows: Mapping[str, _Cells]) -> Volumes:
    present = {column for cells in rows.values() for column in cells}
    columns = tuple((way, kind) for way in Way for kind in TensorKind if (way, kind) in present)
    table = [[cells.get(column, 0) for column in columns] for cells in rows.values()]
    return Volumes(tuple(rows), columns, np.array(table, dtype=np.int64).reshape(len(rows), len(columns)))
