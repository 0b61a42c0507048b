"""order: what of a Program must precede what, worked out anew with vector clocks, who uses which block, and what can be
alive at once."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.compiled import Int, Ints, compiled
from harmony_lab.machine import HOST
from harmony_lab.program import Program, Stream

__all__ = ["Bools", "Order", "Uses", "alive_bytes", "all_uses", "most_alive_bytes", "op_name", "pairs"]

Bools = npt.NDArray[np.bool_]


class Order:
    """Which op must have ended before which: ``clocks[k, s]`` ops of stream s precede the end of op k, itself
    included."""

    def __init__(self, program: Program) -> None:
        ops = program.op_columns
        _, self.stream_of = np.unique((ops.device + 1) * len(Stream) + ops.stream, return_inverse=True)
        self.clocks, self.position = _clocks(
            ops.after, ops.after_end, self.stream_of, int(self.stream_of.max(initial=0))
        )

    def precedes(self, first: npt.ArrayLike, second: npt.ArrayLike) -> Bools:
        """Whether each of ``first`` always ends before its partner in ``second`` starts."""
        first, second = np.asarray(first), np.asarray(second)
        known = self.clocks[second, self.stream_of[first]] >= self.position[first]
        found: Bools = (first != second) & known
        return found


@compiled
def _clocks(after: Ints, after_end: Ints, stream_of: Ints, last_stream: Int) -> tuple[Ints, Ints]:
    count = len(stream_of)
    clocks = np.zeros((count, last_stream + 1), np.int64)
    position = np.zeros(count, np.int64)
    newest = np.full(last_stream + 1, -1)
    begin = 0
    for op in range(count):
        row = clocks[op]
        stream = stream_of[op]
        if newest[stream] >= 0:
            row[:] = clocks[newest[stream]]
        for i in range(begin, after_end[op]):
            for s in range(last_stream + 1):
                row[s] = max(row[s], clocks[after[i], s])
        row[stream] += 1
        position[op] = row[stream]
        newest[stream] = op
        begin = after_end[op]
    return clocks, position


class Uses(NamedTuple):
    """Pairs (op, block) of one kind of use, in the order of ops."""

    op: Ints
    block: Ints

    @classmethod
    def of(cls, blocks: Ints, ends: Ints) -> "Uses":
        return cls(np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)), blocks)

    def of_block(self, block: int) -> list[int]:
        ops: list[int] = self.op[self.block == block].tolist()
        return ops


def op_name(program: Program, number: int) -> str:
    return f"op {number} ({program.ops[number]})"


def pairs(first: Ints, second: Ints, chosen: Bools) -> Iterator[tuple[int, int]]:
    return zip(first[chosen].tolist(), second[chosen].tolist(), strict=True)


def all_uses(program: Program) -> tuple[Uses, Uses, Uses]:
    """Writes, reads and frees."""
    ops = program.op_columns
    return (
        Uses.of(ops.writes, ops.writes_end),
        Uses.of(ops.reads, ops.reads_end),
        Uses.of(ops.frees, ops.frees_end),
    )


def most_alive_bytes(program: Program, order: Order, chosen: Bools | None = None) -> tuple[int, ...]:
    """Per device, the most of the chosen blocks (by default of all) that can be alive at once under any timing."""
    alive = zip(alive_bytes(program, order, chosen), _resident_bytes(program, chosen).tolist(), strict=True)
    return tuple(int(of_ops.max(initial=resident)) for of_ops, resident in alive)


def alive_bytes(program: Program, order: Order, chosen: Bools | None = None) -> list[Ints]:
    """Per device and op: the most of the chosen blocks that can be alive when that op runs, see ``program``; 0 for ops
    that allocate none of them there."""
    blocks = program.block_columns
    counted = blocks.device != HOST
    if chosen is not None:
        counted &= chosen
    count = len(program.op_columns.kind)
    allocated = np.zeros((program.num_devices, count), dtype=np.int64)
    freed = np.zeros((program.num_devices, count), dtype=np.int64)
    writes, _, frees = all_uses(program)
    for uses, totals in ((writes, allocated), (frees, freed)):
        mine = counted[uses.block]
        block = uses.block[mine]
        np.add.at(totals, (blocks.device[block], uses.op[mine]), blocks.num_bytes[block])
    known_free = np.zeros_like(freed)
    for column in range(order.clocks.shape[1]):
        members = np.flatnonzero(order.stream_of == column)
        before = np.zeros((program.num_devices, len(members) + 1), dtype=np.int64)
        np.cumsum(freed[:, members], axis=1, out=before[:, 1:])
        if before.any():
            clock = order.clocks[:, column] - (order.stream_of == column)  # what precedes the start, not the end
            known_free += before[:, clock]
    alive = np.cumsum(allocated, axis=1) - known_free + _resident_bytes(program, chosen)[:, None]
    return list(np.where(allocated > 0, alive, 0))


def _resident_bytes(program: Program, chosen: Bools | None) -> Ints:
    """Per device."""
    blocks, resident = program.block_columns, np.array(program.resident, dtype=np.int64)
    resident = resident[blocks.device[resident] != HOST]
    if chosen is not None:
        resident = resident[chosen[resident]]
    num_bytes = np.zeros(program.num_devices, dtype=np.int64)
    np.add.at(num_bytes, blocks.device[resident], blocks.num_bytes[resident])
    return num_bytes
