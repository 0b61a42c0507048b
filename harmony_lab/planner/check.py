"""check: whether a Program can be run as it is, whatever the timing; every violation at once, naming the ops.

Independent of how the Program was made: order is worked out anew with vector clocks, one row per op, one column per
stream.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.units import format_bytes

__all__ = ["check", "peak_bytes"]

Ints = npt.NDArray[np.int64]
_SHOWN = 20  # violations beyond these say nothing new
_FROM_HOST_STORE = (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.INPUT)


def check(program: Program) -> None:
    """Raise ``ProgramError`` unless every block is written before it is read and freed once, every transfer is matched,
    updates come after every read of the weights they change, no device's budget can be exceeded by any interleaving,
    and no op waits for a later one.
    """
    violations = list(_edges(program))
    if not violations:  # the rest needs a well-formed graph
        order = _Order(program)
        violations += [*_blocks(program, order), *_matches(program), *_updates(program, order)]
        violations += _budgets(program, order)
    if violations:
        more = len(violations) - _SHOWN
        shown = violations[:_SHOWN] + ([f"… and {more} more"] if more > 0 else [])
        raise ProgramError("this program cannot be run", shown)


def peak_bytes(program: Program) -> tuple[int, ...]:
    """Per device, the most that can be alive at once under any timing."""
    order = _Order(program)
    return tuple(int(alive.max(initial=0)) for alive in _alive_bytes(program, order))


class _Order:
    """Which op must have ended before which: ``clocks[k, s]`` ops of stream s precede the end of op k, itself
    included."""

    def __init__(self, program: Program) -> None:
        self.streams = {key: column for column, key in enumerate(program.queues)}
        count = len(program.ops)
        self.clocks: Ints = np.zeros((count, max(1, len(self.streams))), dtype=np.int64)
        self.stream_of: Ints = np.zeros(count, dtype=np.int64)
        self.position: Ints = np.zeros(count, dtype=np.int64)
        before: dict[int, int] = {}
        for number, op in enumerate(program.ops):
            column = self.streams[op.device, op.stream]
            row = self.clocks[number]
            waits = op.after if column not in before else (*op.after, before[column])
            for other in waits:
                np.maximum(row, self.clocks[other], out=row)
            row[column] += 1
            self.stream_of[number], self.position[number] = column, row[column]
            before[column] = number

    def precedes(self, first: int, second: int) -> bool:
        """Whether ``first`` always ends before ``second`` starts."""
        return first != second and bool(self.clocks[second, self.stream_of[first]] >= self.position[first])


def _name(program: Program, number: int) -> str:
    return f"op {number} ({program.ops[number]})"


def _edges(program: Program) -> Iterator[str]:
    count, blocks = len(program.ops), len(program.blocks)
    for number, op in enumerate(program.ops):
        for other in op.after:
            if not 0 <= other < count:
                yield f"{_name(program, number)} waits for op {other}, which does not exist"
            elif other >= number:
                yield f"{_name(program, number)} waits for {_name(program, other)}, which comes later: a deadlock"
        for block in (*op.reads, *op.writes, *op.frees):
            if not 0 <= block < blocks:
                yield f"{_name(program, number)} names block %{block}, which does not exist"
        if op.device != HOST and not 0 <= op.device < program.num_devices:
            yield f"{_name(program, number)} runs on device {op.device}, there are {program.num_devices}"


def _users(program: Program) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    writers: list[list[int]] = [[] for _ in program.blocks]
    readers: list[list[int]] = [[] for _ in program.blocks]
    freers: list[list[int]] = [[] for _ in program.blocks]
    for number, op in enumerate(program.ops):
        for users, blocks in ((writers, op.writes), (readers, op.reads), (freers, op.frees)):
            for block in blocks:
                users[block].append(number)
    return writers, readers, freers


def _blocks(program: Program, order: _Order) -> Iterator[str]:
    writers, readers, freers = _users(program)
    for index, block in enumerate(program.blocks):
        what = f"block %{index} ({block})"
        if len(writers[index]) != 1:
            names = ", ".join(_name(program, op) for op in writers[index]) or "no op"
            yield f"{what} must be written by one op, it is written by {names}"
            continue
        (writer,) = writers[index]
        for reader in readers[index]:
            if not order.precedes(writer, reader):
                yield f"{_name(program, reader)} may read {what} before {_name(program, writer)} has written it"
        if len(freers[index]) > 1:
            yield f"{what} is freed twice: by {' and by '.join(_name(program, op) for op in freers[index])}"
        elif not freers[index]:
            if block.device != HOST:
                yield f"{what} is never freed; {_name(program, writer)} allocates it"
        else:
            (freer,) = freers[index]
            for user in {writer, *readers[index]} - {freer}:
                if not order.precedes(user, freer):
                    yield f"{_name(program, freer)} may free {what} while {_name(program, user)} still uses it"
        yield from _accumulation(program, order, index, writer, readers[index])


def _accumulation(program: Program, order: _Order, index: int, writer: int, readers: list[int]) -> Iterator[str]:
    """Backward ops add to gradients: whoever else reads those must come after all of them."""
    block = program.blocks[index]
    if block.kind is not TensorKind.GRADIENT or block.device == HOST:
        return
    changing: list[int] = []  # adding first, then reducing, then the rest: each after all before it
    for kinds in ((OpKind.BACKWARD,), (OpKind.ALL_REDUCE,), (OpKind.SWAP_OUT, OpKind.SEND, OpKind.RECV)):
        members = [op for op in sorted({writer, *readers}) if program.ops[op].kind in kinds]
        for reader in members:
            for op in changing:
                if not order.precedes(op, reader):
                    late = f"before {_name(program, op)} has changed it"
                    yield f"{_name(program, reader)} may read block %{index} ({block}) {late}"
        changing += members


def _matches(program: Program) -> Iterator[str]:
    offered: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        match op.kind:
            case OpKind.SEND:
                offered.update(dict.fromkeys(op.reads, number))
            case OpKind.RECV:
                yield from _received(program, number, op, offered)
            case OpKind.SWAP_OUT:
                yield from _same_content(program, number, op)
            case OpKind.SWAP_IN:
                yield from _swapped_in(program, number, op)
    for block, number in offered.items():
        yield f"{_name(program, number)} sends block %{block} ({program.blocks[block]}), which no op receives"


def _received(program: Program, number: int, op: Op, offered: dict[int, int]) -> Iterator[str]:
    for block in op.reads:
        send = offered.pop(block, None)
        if send is None:
            yield f"{_name(program, number)} receives block %{block} ({program.blocks[block]}), which no op sends"
        elif send not in op.after:
            yield f"{_name(program, number)} must wait for {_name(program, send)}, which sends what it receives"
    yield from _same_content(program, number, op)


def _same_content(program: Program, number: int, op: Op) -> Iterator[str]:
    if op.kind is OpKind.SWAP_OUT and all(program.blocks[b].kind is TensorKind.BUFFER for b in op.reads):
        return
    sources, targets = ([program.blocks[b]._replace(device=0) for b in blocks] for blocks in (op.reads, op.writes))
    if sources != targets:
        given, into = (", ".join(map(str, blocks)) or "nothing" for blocks in (sources, targets))
        yield f"{_name(program, number)} copies {given} into {into}"


def _swapped_in(program: Program, number: int, op: Op) -> Iterator[str]:
    for target in (program.blocks[b] for b in op.writes):
        if target.kind in _FROM_HOST_STORE:
            continue
        pieces = [program.blocks[b] for b in op.reads]
        covered = _covers([p.samples for p in pieces], target.samples)
        if not covered or any((p.kind, p.layers) != (target.kind, target.layers) for p in pieces):
            given = ", ".join(map(str, pieces)) or "nothing"
            yield f"{_name(program, number)} needs all of {target} from the host, it is given {given}"


def _covers(parts: Iterable[tuple[int, int]], whole: tuple[int, int]) -> bool:
    edge = whole[0]
    for start, stop in sorted(parts):
        if start > edge:
            return False
        edge = max(edge, stop)
    return edge >= whole[1]


def _updates(program: Program, order: _Order) -> Iterator[str]:
    """Weights on the host may change only after their last swap-in."""
    reads = [
        (number, op.layers)
        for number, op in enumerate(program.ops)
        if op.kind is OpKind.SWAP_IN and any(program.blocks[b].kind is TensorKind.WEIGHT for b in op.writes)
    ]
    for number, op in enumerate(program.ops):
        if op.kind is OpKind.UPDATE:
            for reader, (start, stop) in reads:
                if start < op.layers[1] and op.layers[0] < stop and not order.precedes(reader, number):
                    yield f"{_name(program, number)} may change weights that {_name(program, reader)} still reads"


def _alive_bytes(program: Program, order: _Order) -> list[Ints]:
    """Per device and op: the most that can be alive when that op runs, see ``program``; 0 for ops that allocate nothing
    there."""
    count = len(program.ops)
    allocated = np.zeros((program.num_devices, count), dtype=np.int64)
    freed = np.zeros((program.num_devices, count), dtype=np.int64)
    for number, op in enumerate(program.ops):
        for indices, totals in ((op.writes, allocated), (op.frees, freed)):
            for index in indices:
                block = program.blocks[index]
                if block.device != HOST:
                    totals[block.device, number] += block.num_bytes
    known_free = np.zeros_like(freed)
    for column in range(order.clocks.shape[1]):
        members = np.flatnonzero(order.stream_of == column)
        before = np.zeros((program.num_devices, len(members) + 1), dtype=np.int64)
        np.cumsum(freed[:, members], axis=1, out=before[:, 1:])
        clock = order.clocks[:, column] - (order.stream_of == column)  # what precedes the start, not the end
        known_free += before[:, clock]
    return list(np.where(allocated > 0, np.cumsum(allocated, axis=1) - known_free, 0))


def _budgets(program: Program, order: _Order) -> Iterator[str]:
    for device, (alive, budget) in enumerate(zip(_alive_bytes(program, order), program.budgets, strict=True)):
        over = np.flatnonzero(alive > budget)
        if over.size:
            worst = int(over[np.argmax(alive[over])])
            yield (
                f"device {device} may need {format_bytes(int(alive[worst]))} of its {format_bytes(budget)} when "
                f"{_name(program, worst)} runs ({over.size} ops exceed the budget)"
            )
