"""emit: appends ops to a program under construction, derives their edges and keeps every device's ledger.

Edges follow from what an op reads, writes and frees.  Order between streams is known through vector clocks (Fidge,
Mattern): ``clock[s]`` of an op is how many ops of stream s must have ended before it ends, itself included.  An edge is
added only where the clocks do not imply it.

The ledger promises memory in the order of the list.  An op that allocates more than is left takes over what earlier ops
free, and from then on every allocating op of that device comes after those frees; so whatever the timing, what is alive
when op k starts is at most what the ledger says (see ``program``).

An op is staged by any number of ``read``, ``free``, ``write``, ``temporary`` and ``wait``, then ended by ``emit``.  All
of it is compiled; ``Construction`` is its memory, of fixed size: ``status`` tells when it did not suffice.
"""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.program import BlockColumns, OpColumns, Stream

__all__ = [
    "BLOCKS",
    "BUDGET",
    "DOES_NOT_FIT",
    "FAILED_BYTES",
    "FAILED_DEVICE",
    "FAILED_OP",
    "FULL",
    "GIVEN_UP",
    "OPS",
    "RESIDENT",
    "STATUS",
    "Construction",
    "columns",
    "construction",
    "emit",
    "free",
    "read",
    "resident",
    "temporary",
    "wait",
    "write",
]

NUM_STREAMS = len(Stream)
_NONE, ZERO = np.int64(-1), np.int64(0)

# positions in ``counts``
OPS, BLOCKS, READS, FREES, AFTERS = 0, 1, 2, 3, 4
STAGED_READS, STAGED_FREES, STAGED_WRITES = 5, 6, 7
STATUS, FAILED_DEVICE, FAILED_BYTES, FAILED_OP, ALLOW_OVERRUN = 8, 9, 10, 11, 12
RESIDENT = 13
GIVEN_UP = 14  # packs that were fetched ahead and no longer will be
_NUM_COUNTS = 15

FULL, DOES_NOT_FIT = 1, 2  # values of counts[STATUS]
_STAGED_MOST = 4096  # reads and frees of one op, at least


# columns of Construction's tables
KIND, DEVICE, STREAM, START, STOP, FIRST, LAST = 0, 1, 2, 3, 4, 5, 6  # of ops; of blocks likewise, but for STREAM
READS_END, WRITES_END, FREES_END, AFTER_END, WHERE, POSITION = 7, 8, 9, 10, 11, 12
NUM_BYTES, WRITER, LAST_READ = 2, 7, 8  # of blocks
READ, READER, READ_BEFORE, FREED, AFTER = 0, 1, 2, 3, 4  # of lists
NEWEST, AWAITED = 0, 1  # of streams
BUDGET, USED, FREEING, HEAD, TAIL = 0, 1, 2, 3, 4  # of devices
TO_READ, TO_FREE, EDGES = 0, 1, 2  # of what is staged


class Construction(NamedTuple):
    """A program under construction."""

    counts: Ints
    ops: Ints
    blocks: Ints
    lists: Ints  # what ops read, free and come after; readers of a block are a linked list
    clocks: Ints  # by op and stream
    streams: Ints  # the newest op; while an op is staged, the latest that it must come after
    devices: Ints
    needs: Ints  # by device and stream, the latest op that an allocation must come after
    pending: Ints  # by device, a queue of (op that frees, bytes)
    staged: Ints  # what the op being staged reads and frees, and its edges


def construction(budgets: tuple[int, ...], num_ops: int, *, allow_overrun: bool = False) -> Construction:
    """Room for about ``num_ops`` ops."""
    num_devices = len(budgets)
    num_streams = (num_devices + 1) * NUM_STREAMS
    counts = np.zeros(_NUM_COUNTS, dtype=np.int64)
    counts[ALLOW_OVERRUN] = int(allow_overrun)
    devices = np.zeros((num_devices, 5), dtype=np.int64)
    devices[:, BUDGET] = budgets
    devices[:, FREEING] = _NONE
    return Construction(
        counts,
        np.empty((num_ops, 13), dtype=np.int64),
        np.empty((3 * num_ops, 9), dtype=np.int64),
        np.empty((6 * num_ops + _STAGED_MOST, 5), dtype=np.int64),
        np.empty((num_ops, num_streams), dtype=np.int64),
        np.full((num_streams, 2), _NONE, dtype=np.int64),
        devices,
        np.full((num_devices, num_streams), _NONE, dtype=np.int64),
        np.empty((num_devices, num_ops, 2), dtype=np.int64),
        np.empty((num_ops + _STAGED_MOST, 3), dtype=np.int64),
    )


@compiled
def resident(c: Construction, kind: Int, device: Int, start: Int, stop: Int, num_bytes: Int) -> Int:
    """A block that is there before the first op; none after an op has been staged.  Returns its index."""
    block = write(c, kind, device, start, stop, ZERO, ZERO, num_bytes)
    c.blocks[block, WRITER] = _NONE
    c.counts[STAGED_WRITES] = 0
    c.counts[RESIDENT] = c.counts[BLOCKS]
    if device >= 0:
        c.devices[device, USED] += num_bytes
    return block


@compiled
def wait(c: Construction, op: Int) -> None:
    """The op being staged comes after that one; negative, or one for which there was no room: after none."""
    if 0 <= op < c.counts[OPS]:
        where = c.ops[op, WHERE]
        c.streams[where, AWAITED] = max(c.streams[where, AWAITED], op)


@compiled
def read(c: Construction, block: Int) -> None:
    """The op being staged reads that block; negative: none."""
    if block < 0:
        return
    count = c.counts[STAGED_READS]
    if count == len(c.staged):
        c.counts[STATUS] = FULL
        return
    for i in range(count):
        if c.staged[i, TO_READ] == block:
            return
    c.staged[count, TO_READ] = block
    c.counts[STAGED_READS] = count + 1
    wait(c, c.blocks[block, WRITER])


@compiled
def free(c: Construction, block: Int) -> None:
    """The op being staged frees that block, after all its users; negative: none."""
    if block < 0:
        return
    count = c.counts[STAGED_FREES]
    if count == len(c.staged):
        c.counts[STATUS] = FULL
        return
    c.staged[count, TO_FREE] = block
    c.counts[STAGED_FREES] = count + 1
    wait(c, c.blocks[block, WRITER])
    link = c.blocks[block, LAST_READ]
    while link >= 0:
        wait(c, c.lists[link, READER])
        link = c.lists[link, READ_BEFORE]


@compiled
def write(c: Construction, kind: Int, device: Int, start: Int, stop: Int, first: Int, last: Int, num_bytes: Int) -> Int:
    """The op being staged writes a new block; returns its index."""
    block = c.counts[BLOCKS]
    row = c.blocks[block]
    row[KIND], row[DEVICE], row[NUM_BYTES] = kind, device, num_bytes
    row[START], row[STOP], row[FIRST], row[LAST] = start, stop, first, last
    row[WRITER], row[LAST_READ] = c.counts[OPS], _NONE
    if block + 1 < len(c.blocks):
        c.counts[BLOCKS] = block + 1
        c.counts[STAGED_WRITES] += 1
    else:
        c.counts[STATUS] = FULL
    return block


@compiled
def temporary(
    c: Construction, kind: Int, device: Int, start: Int, stop: Int, first: Int, last: Int, num_bytes: Int
) -> None:
    """The op being staged needs a block while it runs; the last thing to be staged."""
    block = write(c, kind, device, start, stop, first, last, num_bytes)
    count = c.counts[STAGED_FREES]
    if count == len(c.staged):
        c.counts[STATUS] = FULL
        return
    c.staged[count, TO_FREE] = block
    c.counts[STAGED_FREES] = count + 1


@compiled
def emit(c: Construction, kind: Int, device: Int, stream: Int, start: Int, stop: Int, first: Int, last: Int) -> Int:
    """End the staged op; returns its index."""
    number = c.counts[OPS]
    num_streams = len(c.streams)
    if not _has_room(c, number, num_streams):
        c.counts[STATUS] = FULL
        _forget_staged(c)
        return number
    where = (device + 1) * NUM_STREAMS + stream
    before = c.streams[where, NEWEST]
    position = 1
    clock = c.clocks[number]
    clock[:] = 0
    if before >= 0:
        clock[:] = c.clocks[before]
        position = c.ops[before, POSITION] + 1
    num_edges = _merge(c, number, c.streams[:, AWAITED], ZERO)
    c.streams[:, AWAITED] = _NONE
    if device >= 0:
        num_edges = _allocate(c, number, device, num_edges)
    clock[where] = position
    c.streams[where, NEWEST] = number
    op = c.ops[number]
    op[KIND], op[DEVICE], op[STREAM], op[WHERE], op[POSITION] = kind, device, stream, where, position
    op[START], op[STOP], op[FIRST], op[LAST] = start, stop, first, last
    _record_lists(c, number, num_edges)
    c.counts[OPS] = number + 1
    _forget_staged(c)
    return number


@compiled
def _has_room(c: Construction, number: Int, num_streams: Int) -> Bool:
    size = len(c.lists)
    return (
        number + 1 < len(c.ops)
        and c.counts[READS] + c.counts[STAGED_READS] <= size
        and c.counts[FREES] + c.counts[STAGED_FREES] <= size
        and c.counts[AFTERS] + 2 * num_streams <= size
    )


@compiled
def _forget_staged(c: Construction) -> None:
    c.counts[STAGED_READS] = 0
    c.counts[STAGED_FREES] = 0
    c.counts[STAGED_WRITES] = 0


@compiled
def _record_lists(c: Construction, number: Int, num_edges: Int) -> None:
    """What the op reads, frees and comes after, and what follows from that."""
    for i in range(1, num_edges):  # ascending
        edge, j = c.staged[i, EDGES], i
        while j > 0 and c.staged[j - 1, EDGES] > edge:
            c.staged[j, EDGES] = c.staged[j - 1, EDGES]
            j -= 1
        c.staged[j, EDGES] = edge
    end = c.counts[AFTERS]
    for i in range(num_edges):
        c.lists[end + i, AFTER] = c.staged[i, EDGES]
    c.counts[AFTERS] = end + num_edges
    end = c.counts[READS]
    for i in range(c.counts[STAGED_READS]):
        block = c.staged[i, TO_READ]
        c.lists[end + i, READ] = block
        c.lists[end + i, READER] = number
        c.lists[end + i, READ_BEFORE] = c.blocks[block, LAST_READ]
        c.blocks[block, LAST_READ] = end + i
    c.counts[READS] = end + c.counts[STAGED_READS]
    end = c.counts[FREES]
    for i in range(c.counts[STAGED_FREES]):
        block = c.staged[i, TO_FREE]
        c.lists[end + i, FREED] = block
        device = c.blocks[block, DEVICE]
        if device >= 0:
            c.devices[device, FREEING] = max(c.devices[device, FREEING], 0) + c.blocks[block, NUM_BYTES]
    c.counts[FREES] = end + c.counts[STAGED_FREES]
    op = c.ops[number]
    op[READS_END], op[WRITES_END] = c.counts[READS], c.counts[BLOCKS]
    op[FREES_END], op[AFTER_END] = c.counts[FREES], c.counts[AFTERS]
    for device in range(len(c.devices)):
        if c.devices[device, FREEING] >= 0:
            slot = c.devices[device, TAIL]
            c.pending[device, slot, 0], c.pending[device, slot, 1] = number, c.devices[device, FREEING]
            c.devices[device, TAIL] = slot + 1
            c.devices[device, FREEING] = _NONE


@compiled
def _merge(c: Construction, number: Int, latest: Ints, num_edges: Int) -> Int:
    """Advance the op's clock past ``latest``, an op per stream; those that it did not know become edges, latest
    first."""
    clock = c.clocks[number]
    bound = number
    while True:
        op = _NONE
        for candidate in latest:
            if op < candidate < bound:
                op = candidate
        if op < 0:
            return num_edges
        bound = op
        if clock[c.ops[op, WHERE]] < c.ops[op, POSITION]:
            c.staged[num_edges, EDGES] = op
            num_edges += 1
            for s in range(len(clock)):
                clock[s] = max(clock[s], c.clocks[op, s])


@compiled
def _allocate(c: Construction, number: Int, device: Int, num_edges: Int) -> Int:
    """Promise memory for what the op writes on its device; what must be free for that comes before it."""
    needed = 0
    for block in range(c.counts[BLOCKS] - c.counts[STAGED_WRITES], c.counts[BLOCKS]):
        if c.blocks[block, DEVICE] == device:
            needed += c.blocks[block, NUM_BYTES]
    if needed == 0:
        return num_edges
    ledger = c.devices[device]
    while ledger[USED] + needed > ledger[BUDGET] and ledger[HEAD] < ledger[TAIL]:
        op, num_bytes = c.pending[device, ledger[HEAD]]
        ledger[HEAD] += 1
        ledger[USED] -= num_bytes
        where = c.ops[op, WHERE]
        c.needs[device, where] = max(c.needs[device, where], op)
    ledger[USED] += needed
    if ledger[USED] > ledger[BUDGET] and c.counts[ALLOW_OVERRUN] == 0:
        worse = c.counts[STATUS] == DOES_NOT_FIT and c.counts[FAILED_DEVICE] == device
        if c.counts[STATUS] == 0 or (worse and ledger[USED] > c.counts[FAILED_BYTES]):
            c.counts[STATUS], c.counts[FAILED_OP] = DOES_NOT_FIT, number
            c.counts[FAILED_DEVICE], c.counts[FAILED_BYTES] = device, ledger[USED]
    return _merge(c, number, c.needs[device], num_edges)


def columns(c: Construction) -> tuple[BlockColumns, OpColumns]:
    """What has been constructed, as a program keeps it."""
    ops, blocks = c.ops[: c.counts[OPS]].T.copy(), c.blocks[: c.counts[BLOCKS]].T.copy()
    given = c.counts[RESIDENT]
    lists = [c.lists[: c.counts[count], column].copy() for count, column in ((READS, READ), (FREES, FREED))]
    after = c.lists[: c.counts[AFTERS], AFTER].copy()
    return (
        BlockColumns(*(blocks[column] for column in (KIND, DEVICE, START, STOP, FIRST, LAST, NUM_BYTES))),
        OpColumns(
            kind=ops[KIND],
            device=ops[DEVICE],
            stream=ops[STREAM],
            start=ops[START],
            stop=ops[STOP],
            first=ops[FIRST],
            last=ops[LAST],
            reads=lists[0],
            reads_end=ops[READS_END],
            writes=np.arange(given, c.counts[BLOCKS]),
            writes_end=ops[WRITES_END] - given,
            frees=lists[1],
            frees_end=ops[FREES_END],
            after=after,
            after_end=ops[AFTER_END],
        ),
    )
