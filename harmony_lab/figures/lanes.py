"""Lanes: the rows and bars of a timeline, thinned where there are more than the eye can tell apart."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from harmony_lab.figures.moves import moves
from harmony_lab.figures.theme import label
from harmony_lab.machine import HOST, Machine
from harmony_lab.order import Uses
from harmony_lab.program import OP_CODES, STREAM_CODES, OpKind, Program, Stream
from harmony_lab.trace import Trace

__all__ = ["KINDS", "MOVING", "Lanes", "lanes", "stream_name", "stream_order", "thinned"]

KINDS: Final = tuple(OpKind)
MOVING: Final = frozenset((OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.SEND, OpKind.RECV, OpKind.ALL_REDUCE))
_STREAMS: Final = tuple(Stream)
_FINEST: Final = 2000  # bars shorter than this share of the makespan may be drawn as one
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Bars of a timeline, arrays over bars.

    ``names``: rows, top to bottom; ``owners``: the device of each.  ``kind`` indexes ``KINDS``.  ``layers`` and
    ``samples`` are [bars, 2].  A bar stands for ``num_ops`` ops, the first being
    ``number``; its duration is the sum of theirs.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]
    row: _Ints
    kind: _Ints
    start_s: _Floats
    duration_s: _Floats
    number: _Ints
    layers: _Ints
    samples: _Ints
    moved_bytes: _Ints
    num_ops: _Ints

    def __len__(self) -> int:
        return len(self.row)

    def select(self, chosen: npt.NDArray[np.bool_] | _Ints) -> "Lanes":
        """Those bars only."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _ARRAYS})


_ARRAYS: Final = ("row", "kind", "start_s", "duration_s", "number", "layers", "samples", "moved_bytes", "num_ops")


def lanes(trace: Trace) -> Lanes:
    """A row per (device, stream) with something to draw, the host's last; every op but FREE is a bar.

    A SEND takes no time by itself: it is drawn while the RECV that names it runs.
    """
    program, num_devices = trace.program, len(trace.machine.devices)
    ops = program.op_columns
    stream = np.where(ops.kind == OP_CODES[OpKind.SEND], STREAM_CODES[Stream.PEER_OUT], ops.stream)
    drawn = np.flatnonzero((ops.kind != OP_CODES[OpKind.FREE]) & (stream != STREAM_CODES[Stream.MEMORY]))
    owner = np.where(ops.device == HOST, num_devices, ops.device)
    keys, row = np.unique(owner[drawn] * len(_STREAMS) + stream[drawn], return_inverse=True)
    rows = [(HOST if key // len(_STREAMS) == num_devices else key // len(_STREAMS), key) for key in keys.tolist()]
    interval = _intervals(program)[drawn]
    start_s = trace.start_s[interval]
    return Lanes(
        names=tuple(stream_name(trace.machine, device, _STREAMS[key % len(_STREAMS)]) for device, key in rows),
        owners=tuple(device for device, _ in rows),
        row=row,
        kind=ops.kind[drawn],
        start_s=start_s,
        duration_s=trace.end_s[interval] - start_s,
        number=drawn,
        layers=np.column_stack([ops.start, ops.stop])[drawn],
        samples=np.column_stack([ops.first, ops.last])[drawn],
        moved_bytes=_moved_bytes(program)[interval],
        num_ops=np.ones(len(drawn), dtype=np.int64),
    )


def stream_order(key: tuple[int, Stream]) -> tuple[bool, int, int]:
    """Sorts streams by device, the host last, in the order of ``Stream``."""
    return key[0] == HOST, key[0], _STREAMS.index(key[1])


def stream_name(machine: Machine, device: int, stream: Stream) -> str:
    """``"gpu0 · swap in"``."""
    owner = "host" if device == HOST else machine.devices[device].name
    return f"{owner} · {'updates' if stream is Stream.HOST else label(stream)}"


def _intervals(program: Program) -> _Ints:
    """The op in whose time each op is drawn: its own, for a SEND that of the RECV that takes its blocks."""
    ops = program.op_columns
    intervals = np.arange(len(ops.kind))
    reads = Uses.of(ops.reads, ops.reads_end)
    sends, receives = (ops.kind[reads.op] == OP_CODES[kind] for kind in (OpKind.SEND, OpKind.RECV))
    sent_by = np.full(len(program.block_columns.kind), -1)
    sent_by[reads.block[sends]] = reads.op[sends]
    sender, receiver = sent_by[reads.block[receives]], reads.op[receives]
    intervals[sender[sender >= 0]] = receiver[sender >= 0]
    return intervals


def _moved_bytes(program: Program) -> _Ints:
    """By op."""
    moved = moves(program)
    num_bytes = np.zeros(len(program.ops), dtype=np.int64)
    np.add.at(num_bytes, moved.op, moved.num_bytes)
    return num_bytes


def thinned(bars: Lanes, makespan_s: float, *, limit: int) -> Lanes:
    """At most about ``limit`` bars: short ones that start close together on a row become one bar per kind.

    Busy seconds and bytes per row and kind stay what they are.
    """
    resolution_s, thin = makespan_s / _FINEST, bars
    while len(thin) > limit and resolution_s < makespan_s:
        thin = _merged(bars, resolution_s)
        resolution_s *= 2
    return thin


def _merged(bars: Lanes, resolution_s: float) -> Lanes:
    """Bars shorter than the resolution, merged per row, kind and stretch of that length; side by side in the stretch.

    A longer bar ends the stretch it starts in, so the merged ones never reach into it.
    """
    short = bars.duration_s < resolution_s
    few, bucket = bars.select(short), (bars.start_s[short] // resolution_s).astype(np.int64)
    order = np.lexsort((few.start_s, few.kind, bucket, few.row))
    few, bucket = few.select(order), bucket[order]
    cell = _starts(few.row, bucket)
    group = _starts(few.row, bucket, few.kind)
    if not len(group):
        return bars
    duration = np.add.reduceat(few.duration_s, group)
    before = np.concatenate(([0.0], np.cumsum(duration)[:-1]))
    home = np.searchsorted(cell, group, side="right") - 1  # the cell of every group
    first = np.searchsorted(group, cell)  # the first group of every cell
    begin = np.minimum.reduceat(few.start_s, cell)[home] + before - before[first][home]
    merged = replace(
        few.select(group),
        start_s=begin,
        duration_s=duration,
        layers=_hull(few.layers, group),
        samples=_hull(few.samples, group),
        moved_bytes=np.add.reduceat(few.moved_bytes, group),
        num_ops=np.add.reduceat(few.num_ops, group),
    )
    return _joined(bars.select(~short), merged)


def _starts(*keys: _Ints) -> _Ints:
    """Where runs of equal keys start."""
    if not len(keys[0]):
        return np.zeros(0, dtype=np.int64)
    changed = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return np.concatenate(([0], np.flatnonzero(changed) + 1))


def _hull(ranges: _Ints, group: _Ints) -> _Ints:
    low = np.minimum.reduceat(ranges[:, 0], group)
    return np.stack([low, np.maximum.reduceat(ranges[:, 1], group)], axis=1)


def _joined(one: Lanes, other: Lanes) -> Lanes:
    arrays: dict[str, Any] = {name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in _ARRAYS}
    both = replace(one, **arrays)
    return both.select(np.lexsort((both.start_s, both.row)))
