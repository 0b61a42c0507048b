"""paging: device memory on demand: what an op needs is fetched when it is its turn, the least recently used makes room.

A page is one tensor on one device: a layer's weights, buffers, gradients or optimizer state, or for one microbatch what
crosses a boundary or is saved for backward.  It leaves in one piece; it is copied to the host only if it has changed
since it last came from there.  Compiled; ``emit`` does the ops, and counts memory once more.

An op is made by ``begin``; ``hold`` for each page it reads; ``bring`` with the bytes it needs beside them; then
``fresh`` for pages it writes, ``change`` and ``drop`` for pages it holds, and ``compute``.
"""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.planner.codes import (
    BUFFER,
    FREE,
    HOST_DEVICE,
    NONE,
    ON_COMPUTE,
    ON_MEMORY,
    ON_SWAP_IN,
    ON_SWAP_OUT,
    OPTIMIZER,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT,
    WORKSPACE,
)
from harmony_lab.planner.emit import (
    DOES_NOT_FIT,
    FAILED_BYTES,
    FAILED_DEVICE,
    FAILED_OP,
    STATUS,
    Construction,
    emit,
    free,
    read,
    resident,
    temporary,
    wait,
    write,
)

__all__ = [
    "Pager",
    "begin",
    "bring",
    "change",
    "compute",
    "drop",
    "exists",
    "find",
    "flush",
    "fresh",
    "hold",
    "make_room",
    "pager",
    "settle",
]

# columns of pages
KIND, DEVICE, START, STOP, FIRST, LAST, NUM_BYTES = 0, 1, 2, 3, 4, 5, 6
BLOCK, HOST_BLOCK, IS_CHANGED, STORED, OLDER, NEWER, HELD = 7, 8, 9, 10, 11, 12, 13
REDUCED_FIRST, REDUCED_LAST = 14, 15  # the ops that reduce these gradients between devices
FETCHED = 16  # the op that last brought it to its device
NUM_PAGE_COLUMNS = 17
CAPACITY, IN_USE, OLDEST, NEWEST, COMPUTED, PEAK = 0, 1, 2, 3, 4, 5  # of devices
NUMBER, ON_DEMAND, NUM_HELD, NUM_DROPPED = 0, 1, 2, 3  # of counts
_MOST_HELD = 256


class Pager(NamedTuple):
    """Pages, and per device those that are there, from the oldest to the newest use; -1: none.

    ``STORED``: the op that last brought a page to the host's store.  ``COMPUTED``: a device's newest compute op.
    ``PEAK``: the most bytes that a device has needed.
    """

    pages: Ints
    devices: Ints
    counts: Ints
    held: Ints
    dropped: Ints


def pager(pages: Ints, capacities: Ints, *, on_demand: bool) -> Pager:
    """No page is anywhere.  ``on_demand``: pages move when an op needs them, not while the ops before it run."""
    pages[:, [BLOCK, HOST_BLOCK, STORED, OLDER, NEWER, HELD, REDUCED_FIRST, FETCHED]] = -1
    pages[:, [IS_CHANGED, REDUCED_LAST]] = 0, -2
    devices = np.full((len(capacities), 6), -1, dtype=np.int64)
    devices[:, CAPACITY] = capacities
    devices[:, [IN_USE, PEAK]] = 0
    counts = np.array([0, int(on_demand), 0, 0], dtype=np.int64)
    return Pager(pages, devices, counts, np.zeros(_MOST_HELD, np.int64), np.zeros(_MOST_HELD, np.int64))


@compiled
def settle(c: Construction, p: Pager, page: Int, is_changed: Int) -> None:
    """The page is on its device before the first op."""
    row = p.pages[page]
    row[BLOCK] = resident(c, row[KIND], row[DEVICE], row[START], row[STOP], row[NUM_BYTES])
    row[IS_CHANGED] = is_changed
    _enter(p, page)


@compiled
def find(c: Construction, p: Pager, page: Int) -> None:
    """The page is on the host before the first op."""
    row = p.pages[page]
    row[HOST_BLOCK] = resident(c, row[KIND], HOST_DEVICE, row[START], row[STOP], row[NUM_BYTES])


# -- what is where, and since when ----------------------------------------------------------------------------------


@compiled
def _enter(p: Pager, page: Int) -> None:
    """A page is on its device now: the newest."""
    p.devices[p.pages[page, DEVICE], IN_USE] += p.pages[page, NUM_BYTES]
    _append(p, page)


@compiled
def _append(p: Pager, page: Int) -> None:
    device = p.devices[p.pages[page, DEVICE]]
    before = device[NEWEST]
    p.pages[page, OLDER], p.pages[page, NEWER] = before, NONE
    if before >= 0:
        p.pages[before, NEWER] = page
    else:
        device[OLDEST] = page
    device[NEWEST] = page


@compiled
def _unlink(p: Pager, page: Int) -> None:
    device = p.devices[p.pages[page, DEVICE]]
    older, newer = p.pages[page, OLDER], p.pages[page, NEWER]
    if older >= 0:
        p.pages[older, NEWER] = newer
    else:
        device[OLDEST] = newer
    if newer >= 0:
        p.pages[newer, OLDER] = older
    else:
        device[NEWEST] = older


@compiled
def _leave(p: Pager, page: Int) -> None:
    _unlink(p, page)
    p.devices[p.pages[page, DEVICE], IN_USE] -= p.pages[page, NUM_BYTES]
    p.pages[page, BLOCK] = NONE


# -- moving -----------------------------------------------------------------------------------------------------------


@compiled
def make_room(c: Construction, p: Pager, device: Int, num_bytes: Int) -> None:
    """Pages that the op under way does not hold leave until so much is free; if that is not enough, ``c`` says so."""
    row = p.devices[device]
    while row[IN_USE] + num_bytes > row[CAPACITY]:
        page = row[OLDEST]
        if page < 0 or p.pages[page, HELD] == p.counts[NUMBER]:
            if c.counts[STATUS] == 0:
                c.counts[STATUS], c.counts[FAILED_DEVICE] = DOES_NOT_FIT, device
                c.counts[FAILED_BYTES] = row[IN_USE] + num_bytes
                c.counts[FAILED_OP] = p.pages[p.held[0], START] if p.counts[NUM_HELD] > 0 else NONE  # there is none yet
            return
        _evict(c, p, page)
    row[PEAK] = max(row[PEAK], row[IN_USE] + num_bytes)


@compiled
def _is_stored(kind: Int) -> bool:
    """Whether the host has a place for such pages; others get a block there when they leave."""
    return kind in (WEIGHT, BUFFER, OPTIMIZER)


@compiled
def _evict(c: Construction, p: Pager, page: Int) -> None:
    row = p.pages[page]
    device, start, stop, first, last = row[DEVICE], row[START], row[STOP], row[FIRST], row[LAST]
    free(c, row[BLOCK])
    if p.counts[ON_DEMAND]:
        wait(c, p.devices[device, COMPUTED])
    if row[IS_CHANGED]:
        read(c, row[BLOCK])
        if not _is_stored(row[KIND]):
            row[HOST_BLOCK] = write(c, row[KIND], HOST_DEVICE, start, stop, first, last, row[NUM_BYTES])
        row[STORED] = emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, first, last)
        row[IS_CHANGED] = 0
    else:
        emit(c, FREE, device, ON_MEMORY, start, stop, first, last)
    _leave(p, page)


@compiled
def _fetch(c: Construction, p: Pager, page: Int) -> None:
    row = p.pages[page]
    device, start, stop, first, last = row[DEVICE], row[START], row[STOP], row[FIRST], row[LAST]
    make_room(c, p, device, row[NUM_BYTES])
    if row[HOST_BLOCK] >= 0:
        read(c, row[HOST_BLOCK])
    row[BLOCK] = write(c, row[KIND], device, start, stop, first, last, row[NUM_BYTES])
    wait(c, row[STORED])
    if p.counts[ON_DEMAND]:
        wait(c, p.devices[device, COMPUTED])
    row[FETCHED] = emit(c, SWAP_IN, device, ON_SWAP_IN, start, stop, first, last)
    _enter(p, page)


@compiled
def flush(c: Construction, p: Pager) -> None:
    """Every page leaves, the oldest first."""
    for device in range(len(p.devices)):
        while p.devices[device, OLDEST] >= 0 and c.counts[STATUS] == 0:
            _evict(c, p, p.devices[device, OLDEST])


# -- ops --------------------------------------------------------------------------------------------------------------


@compiled
def begin(p: Pager) -> None:
    """The next op: nothing held."""
    p.counts[NUMBER] += 1
    p.counts[NUM_HELD] = 0
    p.counts[NUM_DROPPED] = 0


@compiled
def hold(p: Pager, page: Int) -> None:
    """The op reads that page (negative or empty: none), which stays until the op has run."""
    if page < 0 or p.pages[page, NUM_BYTES] == 0 or p.pages[page, HELD] == p.counts[NUMBER]:
        return
    p.held[p.counts[NUM_HELD]] = page
    p.counts[NUM_HELD] += 1
    p.pages[page, HELD] = p.counts[NUMBER]
    if p.pages[page, BLOCK] >= 0:
        _unlink(p, page)
        _append(p, page)


@compiled
def bring(c: Construction, p: Pager, device: Int, num_bytes: Int) -> None:
    """Fetch what is held and not there; make room for what else the op needs."""
    for i in range(p.counts[NUM_HELD]):
        if p.pages[p.held[i], BLOCK] < 0 and c.counts[STATUS] == 0:
            _fetch(c, p, p.held[i])
    make_room(c, p, device, num_bytes)


@compiled
def exists(p: Pager, page: Int) -> Bool:
    """Whether it has content, on its device or on the host."""
    return p.pages[page, BLOCK] >= 0 or p.pages[page, HOST_BLOCK] >= 0


@compiled
def fresh(c: Construction, p: Pager, page: Int) -> None:
    """The staged op writes that page, unless it is empty."""
    row = p.pages[page]
    if row[NUM_BYTES] > 0:
        row[BLOCK] = write(c, row[KIND], row[DEVICE], row[START], row[STOP], row[FIRST], row[LAST], row[NUM_BYTES])
        row[IS_CHANGED], row[HELD] = 1, p.counts[NUMBER]
        _enter(p, page)


@compiled
def change(c: Construction, p: Pager, page: Int) -> None:
    """The staged op changes that page; what the host has of it is out of date."""
    row = p.pages[page]
    if row[NUM_BYTES] > 0:
        free(c, row[HOST_BLOCK])
        row[HOST_BLOCK], row[IS_CHANGED] = NONE, 1


@compiled
def drop(p: Pager, page: Int) -> None:
    """Nothing needs that page once the op has run."""
    if page >= 0 and p.pages[page, NUM_BYTES] > 0:
        p.dropped[p.counts[NUM_DROPPED]] = page
        p.counts[NUM_DROPPED] += 1


@compiled
def compute(
    c: Construction, p: Pager, kind: Int, device: Int, layer: Int, first: Int, last: Int, workspace_bytes: Int
) -> None:
    """End the op."""
    for i in range(p.counts[NUM_HELD]):
        read(c, p.pages[p.held[i], BLOCK])
    for i in range(p.counts[NUM_DROPPED]):
        free(c, p.pages[p.dropped[i], BLOCK])
        free(c, p.pages[p.dropped[i], HOST_BLOCK])
    if workspace_bytes > 0:
        temporary(c, WORKSPACE, device, layer, layer + 1, first, last, workspace_bytes)
    p.devices[device, COMPUTED] = emit(c, kind, device, ON_COMPUTE, layer, layer + 1, first, last)
    for i in range(p.counts[NUM_DROPPED]):
        _leave(p, p.dropped[i])
        p.pages[p.dropped[i], HOST_BLOCK] = NONE
