"""Places: where in the memory of its device each block of a program lies, so that no step allocates it anew.

Blocks share bytes where the program's edges, not timing, make the one's end precede the other's start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.layers import ALIGNMENT_BYTES, TensorSpec
from harmony_lab.machine import HOST
from harmony_lab.order import Bools, Order, all_uses, most_alive_bytes
from harmony_lab.program import OP_CODES, TENSOR_CODES, BlockColumns, OpKind, Program, TensorKind

__all__ = ["Places", "Tensors", "left_gradients", "place", "waiting_at_most", "waiting_bytes"]

_MOVING = [OP_CODES[kind] for kind in (OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.RECV)]
_IN_PARTS = [TENSOR_CODES[kind] for kind in (TensorKind.SAVED, TensorKind.OPTIMIZER)]  # of which some may go before
_VALUES = [TENSOR_CODES[kind] for kind in (TensorKind.ACTIVATION, TensorKind.ACTIVATION_GRADIENT)]


class Tensors(Protocol):
    """What tells how many tensors a block is made of: a ``LayerSequence`` or a ``Profile``."""

    @property
    def boundaries(self) -> Sequence[Sequence[TensorSpec]]: ...

    def batch_inputs_of(self, start: int, stop: int) -> Sequence[str]: ...


@dataclass(frozen=True, kw_only=True)
class Places:
    """``offsets``: by block, in bytes.  ``num_bytes``: of the memory that they lie in, of each device that has some and
    of the host (``HOST``).  ``beside_bytes``: per device, the most that other blocks take at once, under any timing.
    ``left_bytes``: of the host's, beside, of gradients that are left for the next iteration, in places of their own.
    """

    offsets: dict[int, int]
    num_bytes: dict[int, int]
    beside_bytes: tuple[int, ...]
    left_bytes: int = 0

    def device_bytes(self, device: int) -> int:
        """What the device must have in all."""
        return self.num_bytes.get(device, 0) + self.beside_bytes[device]


def place(program: Program, tensors: Tensors, *, shared: bool = True) -> Places:
    """A place for every block that a transfer writes, and for gradients; not for what autograd saved or the optimizer
    keeps, on a device.

    What layers compute lies where torch puts it.  So the memory with places, which is held from the first step to the
    last, and the most that lies beside it must fit the device's budget together, also where they have their most at
    different moments.  Where they do not, blocks of that device have no places: each is allocated when it is written.

    Largest blocks first, each at the lowest offset that is free while it lives: within a few per cent of the most that
    is alive at once (greedy by size, Pisarchyk and Lee 2020).  Not ``shared``: every block has a place of its own, and
    budgets are not looked at.
    """
    order, lives = Order(program), _lives(program)
    blocks, room = program.block_columns, _room(program, tensors)
    offsets: dict[int, int] = {}
    num_bytes: dict[int, int] = {}
    placed = lives.placed.copy()
    beside_bytes = list(most_alive_bytes(program, order, ~placed))
    for device in np.unique(blocks.device[placed]).tolist():
        mine = np.flatnonzero(placed & (blocks.device == device))
        starts = _packed(mine, room[mine], lives, order) if shared else np.cumsum(room[mine]) - room[mine]
        needed = int((starts + room[mine]).max())
        if not shared or device == HOST or needed + beside_bytes[device] <= program.budgets[device]:
            offsets.update(zip(mine.tolist(), starts.tolist(), strict=True))
            num_bytes[device] = needed
        else:
            beside_bytes[device] = most_alive_bytes(program, order)[device]
    left_bytes = int(blocks.num_bytes[left_gradients(program)].sum())
    return Places(offsets=offsets, num_bytes=num_bytes, beside_bytes=tuple(beside_bytes), left_bytes=left_bytes)


def waiting_at_most(program: Program, tensors: Tensors) -> int:
    """Bytes of the host's memory that all that ever waits there would take side by side."""
    blocks = program.block_columns
    return int(_aligned(blocks.num_bytes, _tensors_in(blocks, tensors))[blocks.device == HOST].sum())


def left_gradients(program: Program) -> list[int]:
    """Blocks of the host that an iteration leaves for the updates of the next."""
    blocks, (writes, _, frees) = program.block_columns, all_uses(program)
    left = np.zeros(len(blocks.kind), dtype=np.bool_)
    left[writes.block] = True
    left[frees.block] = False
    left &= (blocks.device == HOST) & (blocks.kind == TENSOR_CODES[TensorKind.GRADIENT])
    found: list[int] = np.flatnonzero(left).tolist()
    return found


def waiting_bytes(program: Program, places: Places) -> tuple[int, int]:
    """Of the host's memory with places: bytes that gradients come to lie in, and those that only others do."""
    blocks = program.block_columns
    gradient = np.flatnonzero((blocks.device == HOST) & (blocks.kind == TENSOR_CODES[TensorKind.GRADIENT])).tolist()
    covered = reached = 0
    spans = ((places.offsets[block], int(blocks.num_bytes[block])) for block in gradient if block in places.offsets)
    for start, size in sorted(spans):
        covered += max(0, start + size - max(start, reached))
        reached = max(reached, start + size)
    return covered + places.left_bytes, places.num_bytes.get(HOST, 0) - covered


@dataclass(frozen=True, slots=True)
class _Lives:
    """By block: whether it gets a place, the op that writes it and the one that frees it; -1: none does."""

    placed: Bools
    writer: Ints
    freer: Ints


def _lives(program: Program) -> _Lives:
    ops, blocks = program.op_columns, program.block_columns
    writes, _, frees = all_uses(program)
    writer, freer = np.full((2, len(blocks.kind)), -1, dtype=np.int64)
    writer[writes.block], freer[frees.block] = writes.op, frees.op
    by = ops.kind[writes.op]
    adds_up = (by == OP_CODES[OpKind.BACKWARD]) & (blocks.kind[writes.block] == TENSOR_CODES[TensorKind.GRADIENT])
    placed = np.zeros(len(writer), dtype=np.bool_)
    placed[writes.block[np.isin(by, _MOVING) | adds_up]] = True
    placed &= ~np.isin(blocks.kind, _IN_PARTS) | (blocks.device == HOST)
    placed[left_gradients(program)] = False
    return _Lives(placed, writer, freer)


def _room(program: Program, tensors: Tensors) -> Ints:
    """Bytes of each block with each of its tensors aligned."""
    blocks = program.block_columns
    counts = _tensors_in(blocks, tensors)
    for block in np.flatnonzero(blocks.kind == TENSOR_CODES[TensorKind.INPUT]).tolist():
        counts[block] = len(tensors.batch_inputs_of(int(blocks.start[block]), int(blocks.stop[block])))
    return _aligned(blocks.num_bytes, counts)


def _tensors_in(blocks: BlockColumns, tensors: Tensors) -> Ints:
    """How many each block holds, but for those of the batch, which are on devices only."""
    of_boundary = np.array([len(boundary) for boundary in tensors.boundaries], dtype=np.int64)
    counts = np.ones(len(blocks.kind), dtype=np.int64)
    values = np.isin(blocks.kind, _VALUES)
    counts[values] = of_boundary[blocks.start[values]]
    return counts


def _aligned(num_bytes: Ints, counts: Ints) -> Ints:
    aligned: Ints = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    beside: Ints = np.maximum(0, counts - 1) * ALIGNMENT_BYTES
    return aligned + beside


def _packed(blocks: Ints, sizes: Ints, lives: _Lives, order: Order) -> Ints:
    by_size = np.argsort(-sizes, kind="stable")
    writer, freer = lives.writer[blocks], lives.freer[blocks]
    return _pack(by_size, sizes, writer, freer, order.clocks, order.stream_of, order.position)


@compiled
def _pack(by_size: Ints, sizes: Ints, writer: Ints, freer: Ints, clocks: Ints, stream_of: Ints, position: Ints) -> Ints:
    starts = np.zeros(len(sizes), np.int64)
    by_start = np.zeros(len(sizes), np.int64)  # those that have a place
    count = 0
    for block in by_size:
        start = 0
        for i in range(count):
            other = by_start[i]
            if _precedes(freer[other], writer[block], clocks, stream_of, position):
                continue
            if _precedes(freer[block], writer[other], clocks, stream_of, position):
                continue
            if starts[other] - start >= sizes[block]:
                break
            start = max(start, starts[other] + sizes[other])
        starts[block] = start
        i = count
        while i > 0 and starts[by_start[i - 1]] > start:
            by_start[i] = by_start[i - 1]
            i -= 1
        by_start[i] = block
        count += 1
    return starts


@compiled
def _precedes(first: Int, second: Int, clocks: Ints, stream_of: Ints, position: Ints) -> Bool:
    """Whether op ``first`` (-1: none, the step's end) ends before ``second`` starts, whatever the timing."""
    return first >= 0 and first != second and clocks[second, stream_of[first]] >= position[first]
