"""ProgramBuilder: emits ops, derives their edges from what they read, write and free, and keeps every device's ledger.

Order between streams is known through vector clocks (Fidge, Mattern): ``clock[s]`` of an op is how many ops of stream s
must have ended before it ends, itself included.  An edge is added only where the clocks do not imply it.

The ledger promises memory in the order of the list.  An op that allocates more than is left takes over what earlier ops
free, and from then on every allocating op of that device comes after those frees; so whatever the timing, what is alive
when op k starts is at most what the ledger says (see ``program``).
"""

from collections.abc import Iterable, Sequence

from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import HOST
from harmony_lab.program import Block, Op, OpKind, Program, Stream
from harmony_lab.units import format_bytes

__all__ = ["ProgramBuilder"]


class _Ledger:
    """One device's memory as promised: ``used_bytes`` are alive or not yet known to be free."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.pending: list[tuple[int, int]] = []  # (op that frees, bytes), in list order
        self.needs: dict[int, int] = {}  # stream -> clock that every allocating op must have reached


class ProgramBuilder:
    """Collects blocks and ops.  With ``allow_overrun`` a device's budget may be exceeded; else that raises."""

    def __init__(self, budgets: Sequence[int], *, allow_overrun: bool = False) -> None:
        self.blocks: list[Block] = []
        self.ops: list[Op] = []
        self._allow_overrun = allow_overrun
        self._ledgers = [_Ledger(budget) for budget in budgets]
        self._streams: dict[tuple[int, Stream], int] = {}
        self._queues: list[list[int]] = []
        self._clocks: list[dict[int, int]] = []
        self._where: list[tuple[int, int]] = []  # (stream, position + 1) of each op
        self._writer: list[int] = []
        self._readers: list[list[int]] = []

    def users(self, block: int) -> tuple[int, ...]:
        """The ops that read that block so far."""
        return tuple(self._readers[block])

    def emit(
        self,
        kind: OpKind,
        device: int,
        stream: Stream,
        layers: tuple[int, int],
        samples: tuple[int, int] = (0, 0),
        *,
        reads: Iterable[int] = (),
        writes: Iterable[Block] = (),
        frees: Iterable[int] = (),
        temporary: Iterable[Block] = (),
        after: Iterable[int] = (),
    ) -> tuple[int, tuple[int, ...]]:
        """Append an op; returns its index and those of the blocks it writes (``temporary`` ones are freed by the op
        itself).

        It comes after the writers of what it reads and after every op that reads or writes what it frees.
        """
        number = len(self.ops)
        reads, frees = tuple(dict.fromkeys(reads)), tuple(frees)
        written = tuple(self._new_block(block, number) for block in writes)
        passing = tuple(self._new_block(block, number) for block in temporary)
        waits = [*after, *(self._writer[block] for block in reads)]
        for block in frees:
            waits += [self._writer[block], *self._readers[block]]
        stream_index = self._stream(device, stream)
        queue = self._queues[stream_index]
        clock = dict(self._clocks[queue[-1]]) if queue else {}
        edges = self._merge(clock, (op for op in waits if op != number))
        edges += self._allocate(clock, number, kind, device, layers, (*written, *passing))
        queue.append(number)
        clock[stream_index] = len(queue)
        self._clocks.append(clock)
        self._where.append((stream_index, len(queue)))
        for block in reads:
            self._readers[block].append(number)
        frees = (*frees, *passing)
        self._release(number, frees)
        self.ops.append(
            Op(kind, device, stream, layers, samples, reads, (*written, *passing), frees, tuple(sorted(set(edges))))
        )
        return number, written

    def program(self, minibatch_size: int, num_layers: int) -> Program:
        return Program(
            minibatch_size=minibatch_size,
            num_layers=num_layers,
            budgets=tuple(ledger.budget_bytes for ledger in self._ledgers),
            blocks=tuple(self.blocks),
            ops=tuple(self.ops),
        )

    # -- edges ------------------------------------------------------------------------------------------------------

    def _stream(self, device: int, stream: Stream) -> int:
        key = (device, stream)
        if key not in self._streams:
            self._streams[key] = len(self._queues)
            self._queues.append([])
        return self._streams[key]

    def _merge(self, clock: dict[int, int], waits: Iterable[int]) -> list[int]:
        """Advance ``clock`` past the ops in ``waits``; returns those that it did not know, latest first."""
        edges = []
        for op in sorted(set(waits), reverse=True):
            stream, position = self._where[op]
            if clock.get(stream, 0) < position:
                edges.append(op)
                for other, count in self._clocks[op].items():
                    if clock.get(other, 0) < count:
                        clock[other] = count
        return edges

    # -- memory -----------------------------------------------------------------------------------------------------

    def _new_block(self, block: Block, writer: int) -> int:
        self.blocks.append(block)
        self._writer.append(writer)
        self._readers.append([])
        return len(self.blocks) - 1

    def _allocate(
        self,
        clock: dict[int, int],
        number: int,
        kind: OpKind,
        device: int,
        layers: tuple[int, int],
        blocks: Sequence[int],
    ) -> list[int]:
        needed = sum(self.blocks[block].num_bytes for block in blocks if self.blocks[block].device == device)
        if device == HOST or not needed:
            return []
        ledger = self._ledgers[device]
        taken = []
        while ledger.used_bytes + needed > ledger.budget_bytes and ledger.pending:
            op, num_bytes = ledger.pending.pop(0)
            ledger.used_bytes -= num_bytes
            taken.append(op)
            stream, position = self._where[op]
            ledger.needs[stream] = max(ledger.needs.get(stream, 0), position)
        ledger.used_bytes += needed
        if ledger.used_bytes > ledger.budget_bytes and not self._allow_overrun:
            raise PlanDoesNotFitError(
                f"{kind} of layers {layers[0]}:{layers[1]} (op {number}) needs {format_bytes(ledger.used_bytes)} on "
                f"device {device} at once, its budget is {format_bytes(ledger.budget_bytes)}; use smaller packs "
                "or microbatches",
                device=device,
                needed_bytes=ledger.used_bytes,
                budget_bytes=ledger.budget_bytes,
            )
        required = [self._queues[stream][position - 1] for stream, position in ledger.needs.items()]
        return self._merge(clock, required)

    def _release(self, number: int, blocks: Sequence[int]) -> None:
        freed: dict[int, int] = {}
        for block in blocks:
            device = self.blocks[block].device
            if device != HOST:
                freed[device] = freed.get(device, 0) + self.blocks[block].num_bytes
        for device, num_bytes in freed.items():
            self._ledgers[device].pending.append((number, num_bytes))
