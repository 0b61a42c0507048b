"""Ops, and the blocks of memory that they work on: one at a time, and as columns of numbers.

What they mean is told in ``harmony_lab.program``.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar, overload

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.machine import HOST

__all__ = [
    "OP_CODES",
    "STREAM_CODES",
    "TENSOR_CODES",
    "Block",
    "BlockColumns",
    "Op",
    "OpColumns",
    "OpKind",
    "Rows",
    "Stream",
    "TensorKind",
    "Transfer",
]


class OpKind(StrEnum):
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    UPDATE = "update"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    SEND = "send"
    RECV = "recv"
    ALL_REDUCE = "all_reduce"
    FREE = "free"


class Stream(StrEnum):
    COMPUTE = "compute"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    VALUES_IN = "values_in"  # microbatches' values, where they need not wait behind the weights of a whole pack
    VALUES_OUT = "values_out"
    PEER_IN = "peer_in"
    PEER_OUT = "peer_out"
    HOST = "host"  # of the host: updates
    MEMORY = "memory"  # frees; holds nothing up


class TensorKind(StrEnum):
    WEIGHT = "weight"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    INPUT = "input"  # parts of the batch
    ACTIVATION = "activation"  # what crosses a boundary, also while kept for backward
    ACTIVATION_GRADIENT = "activation_gradient"
    SAVED = "saved"  # what a pack's forward keeps for its backward
    WORKSPACE = "workspace"  # temporaries inside one op
    OPTIMIZER = "optimizer"  # the optimizer's state, where a device updates


class Block(NamedTuple):
    """Memory on one device (or ``HOST``) with one content.

    ``layers``: the pack whose weights, buffers, gradients or inputs these are; (b, b) for what crosses boundary b.
    ``samples``: the part of the minibatch it belongs to; (0, 0) for state.
    """

    kind: TensorKind
    device: int
    layers: tuple[int, int]
    samples: tuple[int, int]
    num_bytes: int

    def __str__(self) -> str:
        layers = f"@{self.layers[0]}" if self.layers[0] == self.layers[1] else f"[{self.layers[0]}:{self.layers[1]}]"
        return f"{self.kind}{layers}{_of_samples(self.samples)} on {_place(self.device)}"


class Op(NamedTuple):
    """One op; ``reads``, ``writes`` and ``frees`` are block indices, ``after`` op indices, all ascending."""

    kind: OpKind
    device: int
    stream: Stream
    layers: tuple[int, int]
    samples: tuple[int, int]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        layers = f"[{self.layers[0]}:{self.layers[1]}]"
        return f"{self.kind} {layers}{_of_samples(self.samples)} on {_place(self.device)}.{self.stream}"


def _place(device: int) -> str:
    return "host" if device == HOST else f"d{device}"


def _of_samples(samples: tuple[int, int]) -> str:
    return "" if samples == (0, 0) else f" samples {samples[0]}:{samples[1]}"


class Transfer(NamedTuple):
    """Bytes of one kind that one op moves between two places (device indices or ``HOST``)."""

    source: int
    destination: int
    kind: TensorKind
    num_bytes: int


_OP_KINDS, _STREAMS, _TENSOR_KINDS = tuple(OpKind), tuple(Stream), tuple(TensorKind)
OP_CODES = {kind: code for code, kind in enumerate(_OP_KINDS)}
STREAM_CODES = {stream: code for code, stream in enumerate(_STREAMS)}
TENSOR_CODES = {kind: code for code, kind in enumerate(_TENSOR_KINDS)}


class BlockColumns(NamedTuple):
    """Blocks as arrays, a row each; ``kind`` by ``TENSOR_CODES``."""

    kind: Ints
    device: Ints
    start: Ints  # layers
    stop: Ints
    first: Ints  # samples
    last: Ints
    num_bytes: Ints

    def rows(self) -> tuple[Block, ...]:
        kinds = [_TENSOR_KINDS[code] for code in self.kind.tolist()]
        layers = zip(self.start.tolist(), self.stop.tolist(), strict=True)
        samples = zip(self.first.tolist(), self.last.tolist(), strict=True)
        return tuple(map(Block, kinds, self.device.tolist(), layers, samples, self.num_bytes.tolist()))

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "BlockColumns":
        return cls(
            _array([TENSOR_CODES[block.kind] for block in blocks]),
            _array([block.device for block in blocks]),
            _array([block.layers[0] for block in blocks]),
            _array([block.layers[1] for block in blocks]),
            _array([block.samples[0] for block in blocks]),
            _array([block.samples[1] for block in blocks]),
            _array([block.num_bytes for block in blocks]),
        )


class OpColumns(NamedTuple):
    """Ops as arrays, a row each; ``kind`` and ``stream`` by ``OP_CODES`` and ``STREAM_CODES``.

    Op k reads ``reads[reads_end[k - 1] : reads_end[k]]``; the other lists likewise.
    """

    kind: Ints
    device: Ints
    stream: Ints
    start: Ints
    stop: Ints
    first: Ints
    last: Ints
    reads: Ints
    reads_end: Ints
    writes: Ints
    writes_end: Ints
    frees: Ints
    frees_end: Ints
    after: Ints
    after_end: Ints

    def rows(self) -> tuple[Op, ...]:
        kinds = [_OP_KINDS[code] for code in self.kind.tolist()]
        streams = [_STREAMS[code] for code in self.stream.tolist()]
        layers = zip(self.start.tolist(), self.stop.tolist(), strict=True)
        samples = zip(self.first.tolist(), self.last.tolist(), strict=True)
        lists = (
            _split(self.reads, self.reads_end),
            _split(self.writes, self.writes_end),
            _split(self.frees, self.frees_end),
            _split(self.after, self.after_end),
        )
        return tuple(map(Op, kinds, self.device.tolist(), streams, layers, samples, *lists))

    @classmethod
    def of(cls, ops: Sequence[Op]) -> "OpColumns":
        lists: list[Ints] = []
        for name in ("reads", "writes", "frees", "after"):
            values = [getattr(op, name) for op in ops]
            lists += [_array([i for row in values for i in row]), np.cumsum(_array([len(row) for row in values]))]
        return cls(
            _array([OP_CODES[op.kind] for op in ops]),
            _array([op.device for op in ops]),
            _array([STREAM_CODES[op.stream] for op in ops]),
            *(_array([op.layers[i] for op in ops]) for i in range(2)),
            *(_array([op.samples[i] for op in ops]) for i in range(2)),
            *lists,
        )


def _array(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _split(values: Ints, ends: Ints) -> Iterator[tuple[int, ...]]:
    flat = values.tolist()
    return (tuple(flat[start:stop]) for start, stop in pairwise([0, *ends.tolist()]))


Row = TypeVar("Row", bound=Block | Op)
Columns = TypeVar("Columns", bound=BlockColumns | OpColumns)


class Rows(Sequence[Row], Generic[Columns, Row]):
    """Blocks or ops as a sequence that is made from columns when it is first looked at."""

    def __init__(self, columns: Columns, make: Callable[[], tuple[Row, ...]]) -> None:
        self.columns = columns
        self._make = make

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        return self._make()

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self.columns.kind)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._rows == tuple(other)

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)
