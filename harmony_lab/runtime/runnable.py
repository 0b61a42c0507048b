"""Whether the runtime can run a program: it may be a valid one that only the simulator knows."""

from collections.abc import Iterator

import numpy as np

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST
from harmony_lab.order import Order, all_uses, op_name, pairs
from harmony_lab.program import OP_CODES, TENSOR_CODES, OpKind, Program, TensorKind
from harmony_lab.runtime.device_updates import DeviceUpdates

__all__ = ["require_runnable"]


def require_runnable(program: Program, layers: LayerSequence) -> None:
    """Raise ``ProgramError`` with all that the runtime does not know."""
    lacking = [*_unknown(program, layers), *_races(program)]
    if lacking:
        raise ProgramError(
            "this program can be simulated, not run; train with a plan's program (planner.lower) or with a baseline's "
            "that was made to run, baselines(..., runnable=True)",
            lacking,
        )


def _unknown(program: Program, layers: LayerSequence) -> Iterator[str]:
    ops, blocks = program.op_columns, program.block_columns
    _, reads, _ = all_uses(program)
    stays = np.zeros(len(blocks.kind), dtype=np.bool_)
    stays[list(program.resident)] = True
    state = blocks.kind == TENSOR_CODES[TensorKind.OPTIMIZER]
    updating = (ops.kind[reads.op] == OP_CODES[OpKind.UPDATE]) & (ops.device[reads.op] != HOST)
    changed, leaves = np.zeros_like(stays), np.zeros_like(stays)
    changed[reads.block[updating]] = True
    leaves[reads.block[ops.kind[reads.op] == OP_CODES[OpKind.SWAP_OUT]]] = True
    weights = changed & (blocks.kind == TENSOR_CODES[TensorKind.WEIGHT])
    unknown = {
        "blocks but the optimizer's state that stay on a device between iterations": stays
        & ~state
        & (blocks.device != HOST),
        "some of the optimizer's state moved to a device and back while other state stays there": stays
        & state
        & bool((state & ~stays).any()),
        "weights updated on a device that do not go to the host": weights & ~leaves,
        "the optimizer's state changed on a device that neither stays there nor goes to the host": changed
        & state
        & ~stays
        & ~leaves,
    }
    yield from (f"the runtime does not know {what}" for what, where in unknown.items() if where.any())
    if changed.any() and layers.has_shadows:
        yield (
            f"updates on devices in {layers.precision}: they have copies of the weights; with the weights themselves, "
            "in_precision(..., shadows=False), they can"
        )


def _races(program: Program) -> Iterator[str]:
    """Where several devices update the same layers, what one of them brings back must not come before another has
    fetched it: there is one store."""
    updates = [op for op in program.ops if op.kind is OpKind.UPDATE and op.device != HOST]
    owners = DeviceUpdates.of(program).owners
    if all(owners[op.layers] == op.device for op in updates):
        return
    ops, blocks = program.op_columns, program.block_columns
    writes, reads, _ = all_uses(program)
    of_state = np.isin(blocks.kind, [TENSOR_CODES[kind] for kind in (TensorKind.WEIGHT, TensorKind.OPTIMIZER)])
    order = Order(program)
    coming = of_state[writes.block] & (ops.kind[writes.op] == OP_CODES[OpKind.SWAP_IN])
    fetches: dict[tuple[int, int], set[int]] = {}
    for op, block in pairs(writes.op, writes.block, coming):
        fetches.setdefault((int(blocks.kind[block]), int(blocks.start[block])), set()).add(op)
    leaving = of_state[reads.block] & (ops.kind[reads.op] == OP_CODES[OpKind.SWAP_OUT])
    for op, block in pairs(reads.op, reads.block, leaving):
        for other in sorted(fetches.get((int(blocks.kind[block]), int(blocks.start[block])), ())):
            if ops.device[other] != ops.device[op] and not order.precedes(other, op):
                yield f"{op_name(program, op)} may change on the host what {op_name(program, other)} still fetches"
