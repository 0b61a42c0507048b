"""Which SAVED blocks are loose: they leave the device before backward, or something that forward read does and comes
back elsewhere."""

import numpy as np

from harmony_lab.machine import HOST
from harmony_lab.order import all_uses, pairs
from harmony_lab.program import OP_CODES, TENSOR_CODES, OpKind, Program, TensorKind

__all__ = ["loose_blocks"]

_READ = [TENSOR_CODES[kind] for kind in (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.INPUT, TensorKind.ACTIVATION)]
_COMPUTED = [OP_CODES[kind] for kind in (OpKind.FORWARD, OpKind.RECOMPUTE)]


def loose_blocks(program: Program) -> frozenset[int]:
    """Of those that forward or recompute write."""
    ops, blocks = program.op_columns, program.block_columns
    writes, reads, frees = all_uses(program)
    last = len(ops.kind)
    freed = np.full(len(blocks.kind), last)
    freed[frees.block] = frees.op
    of_saved = (blocks.kind[writes.block] == TENSOR_CODES[TensorKind.SAVED]) & np.isin(ops.kind[writes.op], _COMPUTED)
    by_op = dict(pairs(writes.op, writes.block, of_saved))
    if not by_op:
        return frozenset()
    used = np.full(len(blocks.kind), -1)  # by backward
    backward = ops.kind[reads.op] == OP_CODES[OpKind.BACKWARD]
    used[reads.block[backward]] = reads.op[backward]
    loose = {block for block in by_op.values() if used[block] < 0}
    needed = np.isin(ops.kind[reads.op], _COMPUTED) & np.isin(blocks.kind[reads.block], _READ)
    needed &= blocks.device[reads.block] != HOST
    for op, block in pairs(reads.op, reads.block, needed):
        if op in by_op and freed[block] < used[by_op[op]] and _comes_back(program, block, used[by_op[op]]):
            loose.add(by_op[op])
    return frozenset(loose)


def _comes_back(program: Program, block: int, backward: int) -> bool:
    """Whether that op reads another block of the same content."""
    return any(
        other != block and program.blocks[other] == program.blocks[block] for other in program.ops[backward].reads
    )
