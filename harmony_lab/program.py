"""Program: what happens in one iteration, on which stream and after what.

A Program is a list of ops over *blocks* of memory.  The rules that give it meaning, for simulator and runtime alike:

- Ops of one (device, stream) run one at a time, in list order.  Ops of different streams run concurrently.
- An op starts when the op before it on its stream and every op in ``after`` have ended.  ``after`` points backwards in
  the list only, so a Program cannot deadlock.
- An op's ``writes`` are allocated when it starts and hold their content when it ends.  Its ``frees`` are released when
  it ends.
- ``resident`` blocks are there before the first op.  For each, one block of the same tensor is never freed: what an
  iteration finds it leaves for the next.  On the host these are gradients of the iteration before, for its updates.
- Peak memory is a property of the Program, not of timing.  Ops are listed in the order in which memory was promised to
  them: when op k starts, what is resident and whatever ops up to k allocated may be alive, less what ops that must
  precede k have freed.
  The largest such sum bounds the memory of every interleaving (``planner.check``).

What each op does:

``SWAP_IN``
    Host to device.  WEIGHT, BUFFER, OPTIMIZER and INPUT (parts of the batch) come from the host's store; other kinds
    from the host blocks in ``reads``, which may be cut along the batch in other places than the block written.
``SWAP_OUT``
    Device to host: the device blocks in ``reads`` to the host blocks in ``writes``, in the same order.  WEIGHT, BUFFER
    and OPTIMIZER go to the host's store; devices that update the same layers have a store each, else there is one.
``SEND``
    Offers the device blocks in ``reads`` to a peer; takes no time by itself.
``RECV``
    Copies the peer's blocks in ``reads`` into this device's in ``writes``, in the same order, after their SEND.
``FORWARD``
    Runs layers on one microbatch without gradient and writes the ACTIVATION of boundaries: its output, and inside the
    pack what a backward pack that starts there needs.  If it writes a SAVED block, it runs with gradient and keeps what
    backward needs.
``RECOMPUTE``
    The forward of a backward pack from its kept input, with gradient; writes SAVED.
``BACKWARD``
    Consumes SAVED and the ACTIVATION_GRADIENT of its stop boundary, adds to the pack's GRADIENT block (the first
    microbatch's op writes it, zeroed) and writes the ACTIVATION_GRADIENT of its start boundary.
``ALL_REDUCE``
    Leaves on every device the sum of all devices' GRADIENT blocks, for one shard of them.
``UPDATE``
    The optimizer's step for parameters whose gradients are complete.  On the host it reads host GRADIENT blocks and
    changes the store.  On a device it reads GRADIENT blocks and changes the WEIGHT and OPTIMIZER blocks it reads; the
    runtime knows it where the WEIGHT blocks are swapped out after it, and the OPTIMIZER blocks too or all are resident.
``FREE``
    Releases blocks that several ops read last.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar, overload

import numpy as np

from harmony_lab.compiled import Ints
from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.units import format_bytes

__all__ = [
    "OP_CODES",
    "STREAM_CODES",
    "TENSOR_CODES",
    "Block",
    "BlockColumns",
    "Op",
    "OpColumns",
    "OpKind",
    "Program",
    "Rows",
    "Stream",
    "TensorKind",
    "Transfer",
    "shard_bounds",
]

_HEADER = "harmony_lab.program 1"


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
        where = "host" if self.device == HOST else f"d{self.device}"
        layers = f"@{self.layers[0]}" if self.layers[0] == self.layers[1] else f"[{self.layers[0]}:{self.layers[1]}]"
        samples = "" if self.samples == (0, 0) else f" samples {self.samples[0]}:{self.samples[1]}"
        return f"{self.kind}{layers}{samples} on {where}"


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
        where = "host" if self.device == HOST else f"d{self.device}"
        samples = "" if self.samples == (0, 0) else f" samples {self.samples[0]}:{self.samples[1]}"
        return f"{self.kind} [{self.layers[0]}:{self.layers[1]}]{samples} on {where}.{self.stream}"


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


@dataclass(frozen=True, kw_only=True)
class Program:
    """Ops over blocks; see the module's docstring.  ``planner.check`` tells whether one is valid."""

    minibatch_size: int
    num_layers: int
    budgets: tuple[int, ...]
    blocks: Sequence[Block]
    ops: Sequence[Op]
    resident: tuple[int, ...] = ()

    @classmethod
    def of_columns(
        cls,
        minibatch_size: int,
        num_layers: int,
        budgets: tuple[int, ...],
        blocks: BlockColumns,
        ops: OpColumns,
        resident: tuple[int, ...] = (),
    ) -> "Program":
        return cls(
            minibatch_size=minibatch_size,
            num_layers=num_layers,
            budgets=budgets,
            blocks=Rows(blocks, blocks.rows),
            ops=Rows(ops, ops.rows),
            resident=resident,
        )

    @property
    def num_devices(self) -> int:
        return len(self.budgets)

    @cached_property
    def op_columns(self) -> OpColumns:
        return self.ops.columns if isinstance(self.ops, Rows) else OpColumns.of(self.ops)

    @cached_property
    def block_columns(self) -> BlockColumns:
        return self.blocks.columns if isinstance(self.blocks, Rows) else BlockColumns.of(self.blocks)

    @cached_property
    def queues(self) -> dict[tuple[int, Stream], tuple[int, ...]]:
        """Op indices of every (device, stream), in order."""
        queues: dict[tuple[int, Stream], list[int]] = {}
        for index, op in enumerate(self.ops):
            queues.setdefault((op.device, op.stream), []).append(index)
        return {key: tuple(queue) for key, queue in queues.items()}

    def transfers(self, index: int) -> tuple[Transfer, ...]:
        """What that op moves over links; empty for ops that move nothing."""
        op = self.ops[index]
        match op.kind:
            case OpKind.SWAP_IN:
                moved = [(HOST, op.device, self.blocks[b]) for b in op.writes]
            case OpKind.SWAP_OUT:
                moved = [(op.device, HOST, self.blocks[b]) for b in op.reads]
            case OpKind.RECV:
                moved = [
                    (self.blocks[r].device, op.device, self.blocks[w]) for r, w in zip(op.reads, op.writes, strict=True)
                ]
            case OpKind.ALL_REDUCE:
                return self._reduction(op)
            case _:
                return ()
        return tuple(Transfer(source, destination, block.kind, block.num_bytes) for source, destination, block in moved)

    def _reduction(self, op: Op) -> tuple[Transfer, ...]:
        blocks = [self.blocks[b] for b in op.reads]
        rank = next(i for i, block in enumerate(blocks) if block.device == op.device)
        start, stop = shard_bounds(blocks[rank].num_bytes, len(blocks), rank)
        peers = [block.device for block in blocks if block.device != op.device]
        kind = TensorKind.GRADIENT
        return tuple(
            [Transfer(peer, op.device, kind, stop - start) for peer in peers]
            + [Transfer(op.device, peer, kind, stop - start) for peer in peers]
        )

    # -- text -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Lines, one per block and op; ``Program.parse`` reads them back."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        budgets = ",".join(map(str, self.budgets))
        resident = f" resident={','.join(map(str, self.resident))}" if self.resident else ""
        yield f"{_HEADER} minibatch={self.minibatch_size} layers={self.num_layers} budgets={budgets}{resident}"
        for i, block in enumerate(self.blocks):
            yield f"%{i} {block.kind} d{block.device} {_pair(block.layers)} {_pair(block.samples)} {block.num_bytes}"
        for i, op in enumerate(self.ops):
            lists = {"reads": op.reads, "writes": op.writes, "frees": op.frees, "after": op.after}
            tail = "".join(f" {name}={','.join(map(str, values))}" for name, values in lists.items() if values)
            yield f"{i} {op.kind} d{op.device}.{op.stream} {_pair(op.layers)} {_pair(op.samples)}{tail}"

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read the text form.  Raises ``ProgramError`` naming the line that is off."""
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        if not lines or not lines[0].startswith(_HEADER):
            raise ProgramError("this is not a program", [f"the first line must start with {_HEADER!r}"])
        blocks, ops = [], []
        for number, line in enumerate(lines[1:], start=2):
            try:
                if line.startswith("%"):
                    blocks.append(_parse_block(line))
                else:
                    ops.append(_parse_op(line))
            except (ValueError, IndexError, KeyError) as error:
                raise ProgramError("this is not a program", [f"line {number}: {line!r}: {error}"]) from None
        header = dict(part.split("=") for part in lines[0].split()[2:])
        return cls(
            minibatch_size=int(header["minibatch"]),
            num_layers=int(header["layers"]),
            budgets=_ints(header["budgets"]),
            blocks=tuple(blocks),
            ops=tuple(ops),
            resident=_ints(header["resident"]) if "resident" in header else (),
        )

    def __repr__(self) -> str:
        return (
            f"<Program of {len(self.ops)} ops over {len(self.blocks)} blocks: minibatch of {self.minibatch_size}, "
            f"{self.num_layers} layers, {self.num_devices} devices>"
        )

    def _repr_html_(self) -> str:
        counts: dict[OpKind, int] = {}
        for op in self.ops:
            counts[op.kind] = counts.get(op.kind, 0) + 1
        ops = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        budgets = ", ".join(format_bytes(budget) for budget in self.budgets)
        return (
            f"<p>Program: minibatch of {self.minibatch_size}, {len(self.ops)} ops ({ops}); device budgets {budgets}</p>"
        )


def shard_bounds(num_bytes: int, num_shards: int, rank: int) -> tuple[int, int]:
    """Byte range of one shard of a block in a reduction; inner bounds are multiples of 64 bytes."""
    edges = [num_bytes * i // num_shards // 64 * 64 for i in range(num_shards)] + [num_bytes]
    return edges[rank], edges[rank + 1]


def _pair(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


def _ints(text: str, separator: str = ",") -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator))


def _two(text: str) -> tuple[int, int]:
    first, second = _ints(text, ":")
    return first, second


def _parse_block(line: str) -> Block:
    _, kind, device, layers, samples, num_bytes = line.split()
    return Block(TensorKind(kind), int(device[1:]), _two(layers), _two(samples), int(num_bytes))


def _parse_op(line: str) -> Op:
    _, kind, where, layers, samples, *rest = line.split()
    device, stream = where[1:].split(".")
    lists = {name: _ints(values) for name, values in (part.split("=") for part in rest)}
    _only(lists, ("reads", "writes", "frees", "after"))
    return Op(OpKind(kind), int(device), Stream(stream), _two(layers), _two(samples), **lists)


def _only(given: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}, expected one of {', '.join(known)}")
