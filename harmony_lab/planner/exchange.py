"""exchange: what layers on different devices give each other, page by page; memory by the pager.  Compiled."""

from harmony_lab.compiled import Int, Ints, compiled
from harmony_lab.planner.codes import ALL_REDUCE, ON_PEER_IN, ON_PEER_OUT, RECV, SEND, ZERO
from harmony_lab.planner.emit import OPS, STATUS, Construction, emit, free, read, wait
from harmony_lab.planner.paging import (
    BLOCK,
    COMPUTED,
    DEVICE,
    NUM_BYTES,
    REDUCED_FIRST,
    REDUCED_LAST,
    START,
    STOP,
    Pager,
    begin,
    bring,
    change,
    drop,
    exists,
    fresh,
    hold,
    make_room,
)

__all__ = ["drop_received", "gather_gradients", "hold_received", "pass_on", "reduce_gradients"]


@compiled
def pass_on(
    c: Construction, p: Pager, block: Int, device: Int, boundary: Int, page: Int, first: Int, last: Int
) -> None:
    """Send a block to the device of that page, which it becomes."""
    receiver = p.pages[page, DEVICE]
    read(c, block)
    sent = emit(c, SEND, device, ON_PEER_OUT, boundary, boundary, first, last)
    begin(p)
    make_room(c, p, receiver, p.pages[page, NUM_BYTES])
    read(c, block)
    free(c, block)
    wait(c, sent)
    fresh(c, p, page)
    emit(c, RECV, receiver, ON_PEER_IN, boundary, boundary, first, last)


@compiled
def gather_gradients(c: Construction, p: Pager, rows: Ints, first: Int) -> None:
    """Send gradients to where others of the same parameter, those of the page ``first``, are; ``rows``: of
    ``Layerwise.tied``."""
    for tied in rows:
        for i in range(1, (tied >= 0).sum() if tied[0] == first else 0, 2):
            page, copy = tied[i], p.pages[tied[i + 1]]
            device, receiver, start, stop = p.pages[page, DEVICE], copy[DEVICE], copy[START], copy[STOP]
            begin(p)
            hold(p, page)
            bring(c, p, device, ZERO)
            if c.counts[STATUS] != 0:
                return
            read(c, p.pages[page, BLOCK])
            wait(c, p.devices[device, COMPUTED])
            sent = emit(c, SEND, device, ON_PEER_OUT, start, stop, ZERO, ZERO)
            make_room(c, p, receiver, copy[NUM_BYTES])
            read(c, p.pages[page, BLOCK])
            wait(c, sent)
            fresh(c, p, tied[i + 1])
            emit(c, RECV, receiver, ON_PEER_IN, start, stop, ZERO, ZERO)


@compiled
def hold_received(p: Pager, rows: Ints, first: Int) -> None:
    """Of what was sent to there, what is there."""
    for tied in rows:
        for i in range(2, (tied >= 0).sum() if tied[0] == first else 0, 2):
            if exists(p, tied[i]):
                hold(p, tied[i])


@compiled
def drop_received(p: Pager, rows: Ints, first: Int) -> None:
    for tied in rows:
        for i in range(2, (tied >= 0).sum() if tied[0] == first else 0, 2):
            if exists(p, tied[i]):
                drop(p, tied[i])


@compiled
def reduce_gradients(c: Construction, p: Pager, pages: Ints) -> None:
    """Leave the sum of these gradients on every device that has some."""
    for page in pages:
        if not exists(p, page):
            return
        begin(p)
        hold(p, page)
        bring(c, p, p.pages[page, DEVICE], ZERO)
    if c.counts[STATUS] != 0:
        return
    first = c.counts[OPS]
    for page in pages:
        for other in pages:
            block = p.pages[other, BLOCK]
            read(c, block)
            wait(c, p.devices[p.pages[other, DEVICE], COMPUTED])
        change(c, p, page)
        row = p.pages[page]
        emit(c, ALL_REDUCE, row[DEVICE], ON_PEER_IN, row[START], row[STOP], ZERO, ZERO)
    for page in pages:
        if p.pages[page, REDUCED_FIRST] < 0:
            p.pages[page, REDUCED_FIRST] = first
        p.pages[page, REDUCED_LAST] = c.counts[OPS] - 1
