"""Moves: what the ops of a Program carry between places, as arrays; a figure looks at thousands at once."""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.machine import HOST
from harmony_lab.order import Bools, Uses
from harmony_lab.program import OP_CODES, TENSOR_CODES, BlockColumns, OpColumns, OpKind, Program, TensorKind

__all__ = ["Moves", "moves"]


class Moves(NamedTuple):
    """``Program.transfers`` of all ops, a row each: the op, device indices or ``HOST``, ``TENSOR_CODES``, bytes."""

    op: Ints
    source: Ints
    destination: Ints
    kind: Ints
    num_bytes: Ints


def moves(program: Program) -> Moves:
    """All that is moved, in no particular order."""
    ops, blocks = program.op_columns, program.block_columns
    reads, writes = Uses.of(ops.reads, ops.reads_end), Uses.of(ops.writes, ops.writes_end)
    came, went, received = (
        _of(uses, ops.kind[uses.op] == OP_CODES[kind])
        for uses, kind in ((writes, OpKind.SWAP_IN), (reads, OpKind.SWAP_OUT), (reads, OpKind.RECV))
    )
    host = np.array([HOST])
    parts = [
        _moved(came, np.broadcast_to(host, came.op.shape), ops.device[came.op], blocks),
        _moved(went, ops.device[went.op], np.broadcast_to(host, went.op.shape), blocks),
        _moved(received, blocks.device[received.block], ops.device[received.op], blocks),
        *_reduced(_of(reads, ops.kind[reads.op] == OP_CODES[OpKind.ALL_REDUCE]), ops, blocks),
    ]
    return Moves(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _of(uses: Uses, chosen: Bools) -> Uses:
    return Uses(uses.op[chosen], uses.block[chosen])


def _moved(uses: Uses, source: Ints, destination: Ints, blocks: BlockColumns) -> Moves:
    return Moves(uses.op, source, destination, blocks.kind[uses.block], blocks.num_bytes[uses.block])


def _reduced(uses: Uses, ops: OpColumns, blocks: BlockColumns) -> tuple[Moves, Moves]:
    """An op sums one shard: each peer sends its part of that, and gets the sum."""
    _, begin, row, count = np.unique(uses.op, return_index=True, return_inverse=True, return_counts=True)
    here, device = ops.device[uses.op], blocks.device[uses.block]
    own = np.flatnonzero(device == here)  # a row per op
    rank, size, total = own - begin, blocks.num_bytes[uses.block[own]], count
    edges = [size * at // np.maximum(total, 1) // 64 * 64 for at in (rank, rank + 1)]  # as ``shard_bounds``
    shard = (np.where(rank + 1 == total, size, edges[1]) - edges[0])[row]
    peer = device != here
    op, other, here, shard = uses.op[peer], device[peer], here[peer], shard[peer]
    kind = np.full(len(op), TENSOR_CODES[TensorKind.GRADIENT])
    return Moves(op, other, here, kind, shard), Moves(op, here, other, kind, shard)
