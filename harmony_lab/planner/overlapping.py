"""overlapping: updates at the end of an iteration become updates beside the forward of the next one.

Where all gradients must be there before the first update, as clipping by their norm asks for, an iteration that ends
with its updates leaves the devices idle meanwhile.  Here an iteration begins with those of the one before, first layers
first, and a pack's weights come in as soon as they are updated::

    host     | update 0:2 | update 2:4 | update 4:6 |
    swap in               | 0:2 |      | 2:4 |      | 4:6 |
    compute                     | forward 0:2 | forward 2:4 | ...     | backward 0:2 |
    swap out                                                     ...          | gradients 0:2 |

The gradients that updates read are on the host before the first op, and those that an iteration brings out stay there.
"""

from dataclasses import replace

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.machine import HOST
from harmony_lab.order import Uses
from harmony_lab.program import (
    OP_CODES,
    TENSOR_CODES,
    BlockColumns,
    OpColumns,
    OpKind,
    Program,
    Rows,
    TensorKind,
)

__all__ = ["overlapping"]


def overlapping(program: Program) -> Program:
    """The iteration between two others, of a program that updates at its end."""
    ops, blocks = program.op_columns, program.block_columns
    updates = np.flatnonzero((ops.kind == OP_CODES[OpKind.UPDATE]) & (ops.device == HOST))
    if not updates.size:
        return program
    updates = updates[np.argsort(ops.start[updates], kind="stable")]
    others = np.setdiff1d(np.arange(len(ops.kind)), updates)
    order = np.concatenate([updates, others])
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))

    reads, reads_end = _in_order(ops.reads, ops.reads_end, order)
    count = len(updates)
    before, inverse = np.unique(reads[: reads_end[count - 1]], return_inverse=True)
    reads[: reads_end[count - 1]] = len(blocks.kind) + inverse
    writes, writes_end = _in_order(ops.writes, ops.writes_end, order)
    freed, freed_end = _freed(inverse, reads_end[:count], len(blocks.kind))
    frees, frees_end = _in_order(ops.frees, ops.frees_end, others)
    after, after_end = _in_order(ops.after, ops.after_end, others)
    last = _last_updates(program, updates, others)
    places = np.concatenate([[0], after_end])[:-1][last >= 0]
    waits = np.insert(position[after], places, last[last >= 0])
    columns = OpColumns(
        kind=ops.kind[order],
        device=ops.device[order],
        stream=ops.stream[order],
        start=ops.start[order],
        stop=ops.stop[order],
        first=ops.first[order],
        last=ops.last[order],
        reads=reads,
        reads_end=reads_end,
        writes=writes,
        writes_end=writes_end,
        frees=np.concatenate([freed, frees]),
        frees_end=np.concatenate([freed_end, len(freed) + frees_end]),
        after=waits,
        after_end=np.concatenate([np.zeros(count, dtype=np.int64), after_end + np.cumsum(last >= 0)]),
    )
    all_blocks = BlockColumns(*(np.concatenate([column, column[before]]) for column in blocks))
    resident = tuple(range(len(blocks.kind), len(blocks.kind) + len(before)))
    return replace(
        program,
        blocks=Rows(all_blocks, all_blocks.rows),
        ops=Rows(columns, columns.rows),
        resident=(*program.resident, *resident),
    )


def _in_order(values: Ints, ends: Ints, order: Ints) -> tuple[Ints, Ints]:
    """The lists of these ops, in that order."""
    lengths = np.diff(ends, prepend=0)[order]
    new_ends = np.cumsum(lengths)
    shift = (ends - np.diff(ends, prepend=0))[order] - (new_ends - lengths)
    return values[np.arange(lengths.sum()) + np.repeat(shift, lengths)], new_ends


def _freed(read: Ints, ends: Ints, first_block: int) -> tuple[Ints, Ints]:
    """What each update frees of the gradients before: those that no later one reads."""
    by = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    last_reader = np.zeros(int(read.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(last_reader, read, by)
    order = np.argsort(last_reader, kind="stable")
    return first_block + order, np.cumsum(np.bincount(last_reader, minlength=len(ends)))


def _last_updates(program: Program, updates: Ints, others: Ints) -> Ints:
    """Of the other ops, the last of the updates that each must wait for; -1: none.

    Whoever fetches weights waits for all updates that change some of them: those that read a gradient of these layers.
    Not again where what is before it on its stream does.
    """
    ops, blocks = program.op_columns, program.block_columns
    writes = Uses.of(ops.writes, ops.writes_end)
    fetched = (blocks.kind[writes.block] == TENSOR_CODES[TensorKind.WEIGHT]) & (blocks.device[writes.block] != HOST)
    fetched &= ops.kind[writes.op] == OP_CODES[OpKind.SWAP_IN]
    ends = np.zeros(program.num_layers, dtype=np.int64) - 1  # by layer, the last update that changes weights of it
    for number, update in enumerate(updates.tolist()):
        ends[ops.start[update] : ops.stop[update]] = number
        begin = ops.reads_end[update - 1] if update else 0
        for block in ops.reads[begin : ops.reads_end[update]].tolist():
            ends[blocks.start[block] : blocks.stop[block]] = number
    last = np.full(len(ops.kind), -1, dtype=np.int64)
    waited: dict[tuple[int, int], int] = {}
    for op, block in zip(writes.op[fetched].tolist(), writes.block[fetched].tolist(), strict=True):
        needed = int(ends[blocks.start[block] : blocks.stop[block]].max(initial=-1))
        queue = int(ops.device[op]), int(ops.stream[op])
        if needed > waited.get(queue, -1):
            last[op] = waited[queue] = needed
    return last[others]
