"""check: whether a Program can be run as it is, whatever the timing; every violation at once, naming the ops.

Independent of how the Program was made: order is worked out anew with vector clocks, one row per op, one column per
stream.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.order import Order, Uses, alive_bytes, all_uses, most_alive_bytes, op_name, pairs
from harmony_lab.planner.stores import store_violations
from harmony_lab.program import OP_CODES, TENSOR_CODES, BlockColumns, OpColumns, OpKind, Program, TensorKind
from harmony_lab.units import format_bytes

__all__ = ["check", "peak_bytes"]

_SHOWN = 20  # violations beyond these say nothing new


def check(program: Program) -> None:
    """Raise ``ProgramError`` unless every block is written before it is read and freed once, every transfer is matched,
    updates come after every read of the weights they change, or before all of them, what a device changes is not lost,
    no device's budget can be exceeded by any interleaving, what is resident is so in the end, and no op waits for a
    later one.
    """
    violations = list(_edges(program))
    if not violations:  # the rest needs a well-formed graph
        order = Order(program)
        violations += [*_blocks(program, order), *_matches(program, order), *_updates(program, order)]
        violations += [*store_violations(program, order), *_budgets(program, order)]
    if violations:
        more = len(violations) - _SHOWN
        shown = violations[:_SHOWN] + ([f"… and {more} more"] if more > 0 else [])
        raise ProgramError("this program cannot be run", shown)


def peak_bytes(program: Program) -> tuple[int, ...]:
    """Per device, the most that can be alive at once under any timing."""
    return most_alive_bytes(program, Order(program))


def _edges(program: Program) -> Iterator[str]:
    ops = program.op_columns
    count, blocks = len(ops.kind), len(program.block_columns.kind)
    waits = Uses.of(ops.after, ops.after_end)
    for number, other in pairs(waits.op, waits.block, (waits.block < 0) | (waits.block >= waits.op)):
        if not 0 <= other < count:
            yield f"{op_name(program, number)} waits for op {other}, which does not exist"
        else:
            yield f"{op_name(program, number)} waits for {op_name(program, other)}, which comes later: a deadlock"
    for uses in all_uses(program):
        for number, block in pairs(uses.op, uses.block, (uses.block < 0) | (uses.block >= blocks)):
            yield f"{op_name(program, number)} names block %{block}, which does not exist"
    for block in program.resident:
        if not 0 <= block < blocks:
            yield f"resident block %{block} does not exist"
    for number in np.flatnonzero((ops.device < HOST) | (ops.device >= program.num_devices)).tolist():
        yield f"{op_name(program, number)} runs on device {ops.device[number]}, there are {program.num_devices}"


def _blocks(program: Program, order: Order) -> Iterator[str]:
    columns = program.block_columns
    writes, reads, frees = all_uses(program)
    count = len(columns.kind)

    def what(block: int) -> str:
        return f"block %{block} ({program.blocks[block]})"

    written = np.bincount(writes.block, minlength=count)
    due = np.ones(count, dtype=np.int64)
    due[list(program.resident)] = 0
    for block in np.flatnonzero(written != due).tolist():
        names = ", ".join(op_name(program, op) for op in writes.of_block(block)) or "no op"
        whom = "one op" if due[block] else "no op, as it is resident"
        yield f"{what(block)} must be written by {whom}, it is written by {names}"
    writer = np.zeros(count, dtype=np.int64)
    writer[writes.block] = writes.op
    once, good = written == 1, written == due
    early = once[reads.block] & ~order.precedes(writer[reads.block], reads.op)
    for reader, block in pairs(reads.op, reads.block, early):
        by = op_name(program, int(writer[block]))
        yield f"{op_name(program, reader)} may read {what(block)} before {by} has written it"
    freed = np.bincount(frees.block, minlength=count)
    for block in np.flatnonzero(good & (freed > 1)).tolist():
        names = " and by ".join(op_name(program, op) for op in frees.of_block(block))
        yield f"{what(block)} is freed twice: by {names}"
    left, gone = _left(program, np.flatnonzero(good & (freed == 0)))
    for block in left:
        if columns.device[block] != HOST:
            yield f"{what(block)} is never freed; {op_name(program, int(writer[block]))} allocates it"
    for block in gone:
        if columns.device[block] != HOST:
            yield f"{what(block)} is resident, but in the end there is none"
    freer = np.zeros(count, dtype=np.int64)
    freer[frees.block] = frees.op
    for uses in (writes, reads):
        ends = freer[uses.block]
        chosen = good[uses.block] & (freed[uses.block] == 1) & (uses.op != ends) & ~order.precedes(uses.op, ends)
        for user, block in pairs(uses.op, uses.block, chosen):
            by = op_name(program, int(freer[block]))
            yield f"{by} may free {what(block)} while {op_name(program, user)} still uses it"
    yield from _accumulation(program, order, writes, reads)


def _left(program: Program, unfreed: Ints) -> tuple[list[int], list[int]]:
    """Blocks that are there in the end without having been resident, and resident ones that have no successor."""
    blocks = program.block_columns
    tensors = list(zip(*(column.tolist() for column in blocks), strict=True))
    due = Counter(tensors[block] for block in program.resident)
    left = []
    for block in unfreed.tolist():
        if due[tensors[block]]:
            due[tensors[block]] -= 1
        else:
            left.append(block)
    gone = []
    for block in program.resident:
        if due[tensors[block]]:
            due[tensors[block]] -= 1
            gone.append(block)
    return left, gone


_CHANGING = ((OpKind.BACKWARD,), (OpKind.ALL_REDUCE,), (OpKind.SWAP_OUT, OpKind.SEND, OpKind.RECV, OpKind.UPDATE))


def _accumulation(program: Program, order: Order, writes: Uses, reads: Uses) -> Iterator[str]:
    """Backward ops add to gradients: whoever else reads those must come after all of them.

    Adding first, then reducing, then the rest: each after all before it.
    """
    kinds, columns = program.op_columns.kind, program.block_columns
    op, block = np.concatenate([writes.op, reads.op]), np.concatenate([writes.block, reads.block])
    mine = (columns.kind[block] == TENSOR_CODES[TensorKind.GRADIENT]) & (columns.device[block] != HOST)
    by_block = np.argsort(block[mine], kind="stable")
    op, block = op[mine][by_block], block[mine][by_block]
    for users in np.split(np.arange(len(op)), np.flatnonzero(np.diff(block)) + 1):
        changing: list[int] = []
        for group in _CHANGING:
            members = np.unique(op[users][np.isin(kinds[op[users]], [OP_CODES[kind] for kind in group])])
            late = ~order.precedes(np.array(changing, dtype=np.int64)[:, None], members[None, :])
            for before, member in zip(*np.nonzero(late), strict=True):
                what = f"block %{block[users[0]]} ({program.blocks[int(block[users[0]])]})"
                yield (
                    f"{op_name(program, int(members[member]))} may read {what} before "
                    f"{op_name(program, changing[before])} has changed it"
                )
            changing += members.tolist()


def _matches(program: Program, order: Order) -> Iterator[str]:
    """Transfers: sent and received once, same content at both ends, everything that a swap-in needs on the host."""
    ops, blocks = program.op_columns, program.block_columns
    _, reads, _ = all_uses(program)
    sending, receiving = (ops.kind[reads.op] == OP_CODES[kind] for kind in (OpKind.SEND, OpKind.RECV))
    send_of = np.full(len(blocks.kind), -1)
    send_of[reads.block[sending]] = reads.op[sending]
    receives = np.bincount(reads.block[receiving], minlength=len(blocks.kind))
    for number, block in pairs(reads.op, reads.block, sending & (receives[reads.block] == 0)):
        yield f"{op_name(program, number)} sends block %{block} ({program.blocks[block]}), which no op receives"
    sent = send_of[reads.block]
    unsent = receiving & ((sent < 0) | (sent > reads.op) | (receives[reads.block] > 1))
    for number, block in pairs(reads.op, reads.block, unsent):
        yield f"{op_name(program, number)} receives block %{block} ({program.blocks[block]}), which no op sends"
    early = receiving & ~unsent & ~order.precedes(np.maximum(sent, 0), reads.op)
    for number, block in pairs(reads.op, reads.block, early):
        sender = op_name(program, int(send_of[block]))
        yield f"{op_name(program, number)} must wait for {sender}, which sends what it receives"
    numbers = _wrong_copies(ops, blocks)
    for number in numbers[numbers >= 0].tolist():
        op = program.ops[number]
        given, into = (
            ", ".join(str(program.blocks[b]._replace(device=0)) for b in indices) or "nothing"
            for indices in (op.reads, op.writes)
        )
        if op.kind is OpKind.SWAP_IN:
            given = ", ".join(str(program.blocks[b]) for b in op.reads) or "nothing"
            target = program.blocks[op.writes[0]]
            yield f"{op_name(program, number)} needs all of {target} from the host, it is given {given}"
        else:
            yield f"{op_name(program, number)} copies {given} into {into}"


_RECV, _SWAP_OUT, _SWAP_IN = (OP_CODES[kind] for kind in (OpKind.RECV, OpKind.SWAP_OUT, OpKind.SWAP_IN))
_WEIGHT, _BUFFER, _INPUT, _OPTIMIZER = (
    TENSOR_CODES[k] for k in (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.INPUT, TensorKind.OPTIMIZER)
)


@compiled
def _wrong_copies(ops: OpColumns, blocks: BlockColumns) -> Ints:
    """Numbers of the ops whose copies do not match; -1 fills up."""
    wrong = np.full(len(ops.kind), -1)
    for op in range(len(ops.kind)):
        kind = ops.kind[op]
        reads = ops.reads[ops.reads_end[op - 1] if op > 0 else 0 : ops.reads_end[op]]
        writes = ops.writes[ops.writes_end[op - 1] if op > 0 else 0 : ops.writes_end[op]]
        good = True
        if kind == _SWAP_IN:
            for block in writes:
                from_store = blocks.kind[block] in (_WEIGHT, _BUFFER, _INPUT, _OPTIMIZER)
                good = good and (from_store or _covered(blocks, reads, block))
        elif kind == _RECV or (kind == _SWAP_OUT and (len(writes) > 0 or not _all_state(blocks, reads))):
            good = len(reads) == len(writes)
            for i in range(min(len(reads), len(writes))):
                good = good and _same_tensor(blocks, reads[i], writes[i]) and _same_samples(blocks, reads[i], writes[i])
                good = good and blocks.num_bytes[reads[i]] == blocks.num_bytes[writes[i]]
        if not good:
            wrong[op] = op
    return wrong


@compiled
def _all_state(blocks: BlockColumns, reads: Ints) -> Bool:
    for block in reads:  # noqa: SIM110 - compiled
        if blocks.kind[block] not in (_WEIGHT, _BUFFER, _OPTIMIZER):
            return False
    return True


@compiled
def _same_tensor(blocks: BlockColumns, one: Int, other: Int) -> Bool:
    return (
        blocks.kind[one] == blocks.kind[other]
        and blocks.start[one] == blocks.start[other]
        and blocks.stop[one] == blocks.stop[other]
    )


@compiled
def _same_samples(blocks: BlockColumns, one: Int, other: Int) -> Bool:
    return blocks.first[one] == blocks.first[other] and blocks.last[one] == blocks.last[other]


@compiled
def _covered(blocks: BlockColumns, pieces: Ints, target: Int) -> Bool:
    """Whether the pieces are of the same tensor and hold all its samples."""
    for block in pieces:
        if not _same_tensor(blocks, block, target):
            return False
    edge, grown = blocks.first[target], True
    while grown and edge < blocks.last[target]:
        grown = False
        for block in pieces:
            if blocks.first[block] <= edge < blocks.last[block]:
                edge, grown = blocks.last[block], True
    return edge >= blocks.last[target]


def _updates(program: Program, order: Order) -> Iterator[str]:
    """Weights on the host may change only after their last swap-in, or all of them before their first, for what the
    iteration before has left to update."""
    ops = program.op_columns
    writes, _, _ = all_uses(program)
    readers = np.unique(writes.op[program.block_columns.kind[writes.block] == _WEIGHT])
    readers = readers[ops.kind[readers] == _SWAP_IN]
    updates = np.flatnonzero((ops.kind == OP_CODES[OpKind.UPDATE]) & (ops.device == HOST))
    overlap = (ops.start[readers] < ops.stop[updates][:, None]) & (ops.start[updates][:, None] < ops.stop[readers])
    precede = (~overlap | order.precedes(updates[:, None], readers[None, :])).all(axis=1)
    wrong = overlap & ~order.precedes(readers[None, :], updates[:, None]) & ~precede[:, None]
    for update, reader in zip(*np.nonzero(wrong), strict=True):
        late, early = op_name(program, int(updates[update])), op_name(program, int(readers[reader]))
        yield f"{late} may change weights that {early} still reads"


def _budgets(program: Program, order: Order) -> Iterator[str]:
    for device, (alive, budget) in enumerate(zip(alive_bytes(program, order), program.budgets, strict=True)):
        over = np.flatnonzero(alive > budget)
        if over.size:
            worst = int(over[np.argmax(alive[over])])
            yield (
                f"device {device} may need {format_bytes(int(alive[worst]))} of its {format_bytes(budget)} when "
                f"{op_name(program, worst)} runs ({over.size} ops exceed the budget)"
            )
