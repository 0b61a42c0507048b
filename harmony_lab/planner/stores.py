"""stores: what devices that update for themselves change of weights and optimizer state; part of ``check``."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from harmony_lab.compiled import Ints
from harmony_lab.machine import HOST
from harmony_lab.order import Order, Uses, all_uses, op_name, pairs
from harmony_lab.program import OP_CODES, TENSOR_CODES, BlockColumns, OpKind, Program, TensorKind

__all__ = ["store_violations"]


def store_violations(program: Program, order: Order) -> Iterator[str]:
    """What a device changes reaches its store or stays on the device, and is fetched from there before or after."""
    ops, blocks = program.op_columns, program.block_columns
    writes, reads, frees = all_uses(program)
    changed = np.isin(blocks.kind, [TENSOR_CODES[kind] for kind in (TensorKind.WEIGHT, TensorKind.OPTIMIZER)])
    out, fetched = (
        Uses(uses.op[mine], uses.block[mine])
        for uses, kind in ((reads, OpKind.SWAP_OUT), (writes, OpKind.SWAP_IN))
        for mine in (changed[uses.block] & (ops.kind[uses.op] == OP_CODES[kind]),)
    )
    yield from _races(program, order, out, fetched)
    updating = changed[reads.block] & (ops.kind[reads.op] == OP_CODES[OpKind.UPDATE]) & (ops.device[reads.op] != HOST)
    last_out = np.full(len(blocks.kind), -1)
    last_out[out.block] = out.op
    freed = np.bincount(frees.block, minlength=len(blocks.kind)) > 0
    update, block = reads.op[updating], reads.block[updating]
    lost = freed[block] & ((last_out[block] < 0) | ~order.precedes(update, np.maximum(last_out[block], 0)))
    for number, index in pairs(update, block, lost):
        yield f"what {op_name(program, number)} changes of block %{index} ({program.blocks[index]}) is lost"


def _races(program: Program, order: Order, out: Uses, fetched: Uses) -> Iterator[str]:
    """What leaves for a store that is still read, by the device itself or by others that do not update these layers:
    devices that do have a store of their own."""
    blocks = program.block_columns
    owns = _updates_for_itself(program, fetched)
    for device, kind in {(blocks.device[block], blocks.kind[block]) for block in out.block}:
        of_kind = blocks.kind == kind
        leaves, comes = (blocks.device[uses.block] == device for uses in (out, fetched))
        leaves, comes = leaves & of_kind[out.block], (comes | ~owns) & of_kind[fetched.block]
        one, other = Uses(out.op[leaves], out.block[leaves]), Uses(fetched.op[comes], fetched.block[comes])
        overlap = _overlap(blocks, one.block, other.block)
        rows, columns = np.nonzero(overlap)
        leaving, coming = one.op[rows], other.op[columns]
        for a, b in pairs(leaving, coming, ~order.precedes(leaving, coming) & ~order.precedes(coming, leaving)):
            yield f"{op_name(program, a)} may change in the store what {op_name(program, b)} still reads"


def _updates_for_itself(program: Program, fetched: Uses) -> npt.NDArray[np.bool_]:
    """Of what is fetched, whether the device that fetches it updates layers of it."""
    ops, blocks = program.op_columns, program.block_columns
    updates = np.flatnonzero((ops.kind == OP_CODES[OpKind.UPDATE]) & (ops.device != HOST))
    of_block = fetched.block[:, None]
    owns = (
        (blocks.device[of_block] == ops.device[updates])
        & (blocks.start[of_block] < ops.stop[updates])
        & (ops.start[updates] < blocks.stop[of_block])
    )
    found: npt.NDArray[np.bool_] = owns.any(axis=1)
    return found


def _overlap(blocks: BlockColumns, one: Ints, other: Ints) -> npt.NDArray[np.bool_]:
    """[i, j]: whether blocks ``one[i]`` and ``other[j]`` have layers in common."""
    found: npt.NDArray[np.bool_] = (blocks.start[one][:, None] < blocks.stop[other]) & (
        blocks.start[other] < blocks.stop[one][:, None]
    )
    return found
