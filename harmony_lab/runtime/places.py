"""Places: where in the memory of its device each block of a program lies, so that no step allocates it anew.

Blocks share bytes where the program's edges, not timing, make the one's end precede the other's start.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harmony_lab.layers import ALIGNMENT_BYTES, LayerSequence, padded
from harmony_lab.program import Block, OpKind, Program, TensorKind

__all__ = ["Places", "place"]

_MOVING = frozenset({OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.RECV})
_Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Places:
    """``offsets``: by block, in bytes.  ``num_bytes``: of each device's memory and of the host's (``HOST``)."""

    offsets: dict[int, int]
    num_bytes: dict[int, int]


def place(program: Program, layers: LayerSequence, *, shared: bool = True) -> Places:
    """A place for every block that a transfer writes, and for gradients.

    What layers compute lies where torch puts it.  Largest blocks first, each at the lowest offset that is free while it
    lives: within a few per cent of the most that is alive at once (greedy by size, Pisarchyk and Lee 2020).
    Not ``shared``: every block has a place of its own.
    """
    lives = _Lives(program)
    offsets: dict[int, int] = {}
    num_bytes: dict[int, int] = {}
    for device in sorted({program.blocks[block].device for block in lives.blocks.tolist()}):
        mine = np.array([b for b in lives.blocks.tolist() if program.blocks[b].device == device])
        sizes = np.array([_room(program.blocks[block], layers) for block in mine.tolist()])
        starts = _pack(lives, mine, sizes) if shared else np.cumsum(sizes) - sizes
        offsets.update(zip(mine.tolist(), starts.tolist(), strict=True))
        num_bytes[device] = int((starts + sizes).max())
    return Places(offsets=offsets, num_bytes=num_bytes)


def _pack(lives: "_Lives", blocks: _Ints, sizes: _Ints) -> _Ints:
    starts = np.zeros(len(blocks), dtype=np.int64)
    placed = np.zeros(len(blocks), dtype=np.bool_)
    for position in np.argsort(-sizes, kind="stable").tolist():
        others = np.flatnonzero(placed & ~lives.apart(blocks, int(blocks[position])))
        others = others[np.argsort(starts[others], kind="stable")]
        start = 0
        for taken, stop in zip(starts[others].tolist(), (starts[others] + sizes[others]).tolist(), strict=True):
            if taken - start >= sizes[position]:
                break
            start = max(start, stop)
        starts[position], placed[position] = start, True
    return starts


def _room(block: Block, layers: LayerSequence) -> int:
    """Bytes of a block with each of its tensors aligned."""
    match block.kind:
        case TensorKind.INPUT:
            count = len(layers.batch_inputs_of(*block.layers))
        case TensorKind.ACTIVATION | TensorKind.ACTIVATION_GRADIENT:
            count = len(layers.boundaries[block.layers[0]])
        case _:
            count = 1
    return padded(block.num_bytes) + max(0, count - 1) * ALIGNMENT_BYTES


class _Lives:
    """When blocks live: from the op that writes each to the end of the op that frees it."""

    def __init__(self, program: Program) -> None:
        self._queue, self._position, self._clocks = _clocks(program)
        count = len(program.blocks)
        self._writer = np.full(count, -1, dtype=np.int64)
        self._freer = np.full(count, -1, dtype=np.int64)
        for number, op in enumerate(program.ops):
            self._freer[list(op.frees)] = number
            self._writer[list(_placed_by(program, number))] = number
        self.blocks: _Ints = np.flatnonzero(self._writer >= 0)

    def apart(self, blocks: _Ints, block: int) -> NDArray[np.bool_]:
        """Which of these have certainly ended when that one starts, or start after it has ended."""
        ended = self._precedes(self._freer[blocks], np.full(len(blocks), self._writer[block]))
        later = self._precedes(np.full(len(blocks), self._freer[block]), self._writer[blocks])
        return ended | later

    def _precedes(self, first: _Ints, second: _Ints) -> NDArray[np.bool_]:
        """Whether op ``first`` (-1: none, the step's end) ends before ``second`` starts, whatever the timing."""
        known: NDArray[np.bool_] = self._clocks[second, self._queue[first]] > self._position[first]
        return known & (first >= 0)


def _placed_by(program: Program, number: int) -> Iterator[int]:
    op = program.ops[number]
    if op.kind in _MOVING:
        yield from op.writes
    elif op.kind is OpKind.BACKWARD:
        yield from (block for block in op.writes if program.blocks[block].kind is TensorKind.GRADIENT)


def _clocks(program: Program) -> tuple[_Ints, _Ints, _Ints]:
    """Queue and position in it of every op, and how many ops of each queue have ended when it starts."""
    count = len(program.ops)
    queue, position = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for number, members in enumerate(program.queues.values()):
        queue[list(members)], position[list(members)] = number, np.arange(len(members))
    clocks = np.zeros((count, len(program.queues)), dtype=np.int64)
    last = np.full(len(program.queues), -1, dtype=np.int64)
    for number, op in enumerate(program.ops):
        mine = int(queue[number])
        for earlier in (*op.after, int(last[mine])):
            if earlier >= 0:
                np.maximum(clocks[number], clocks[earlier], out=clocks[number])
                other = int(queue[earlier])
                clocks[number, other] = max(clocks[number, other], position[earlier] + 1)
        last[mine] = number
    return queue, position, clocks
