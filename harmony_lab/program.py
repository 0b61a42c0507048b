"""Program: what happens in one iteration, on which stream and after what.

A Program is a list of ops over *blocks* of memory.  The rules that give it meaning, for simulator and runtime alike:

- Ops of one (device, stream) run one at a time, in list order.  Ops of different streams run concurrently.
- An op starts when the op before it on its stream and every op in ``after`` have ended.  ``after`` points backwards in
  the list only, so a Program cannot deadlock.
- An op's ``writes`` are allocated when it starts and hold their content when it ends.  Its ``frees`` are released when
  it ends.
- ``resident`` blocks are there before the first op.  For each on a device, one block of the same tensor is never freed:
  what an iteration finds it leaves for the next.  On the host these are gradients: of the iteration before, for its
  updates, or the sums of minibatches before.
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
    One that reads gradients alone looks at them for the norm of all, and adds others' of the same parameters to them.
``FREE``
    Releases blocks that several ops read last.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.ops import (
    OP_CODES,
    STREAM_CODES,
    TENSOR_CODES,
    Block,
    BlockColumns,
    Op,
    OpColumns,
    OpKind,
    Rows,
    Stream,
    TensorKind,
    Transfer,
)
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
        ways = [way for peer in peers for way in ((peer, op.device), (op.device, peer))]
        return tuple(Transfer(*way, kind, stop - start) for way in ways)

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
