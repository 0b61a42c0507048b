"""Partitions of a row of layers into contiguous packs that minimise the slowest, for every number of packs at once.

Dynamic programming from the last layer to the first.  With B(m, s) the least bottleneck of m packs from layer s on::

    B(m, s) = min over t of max(time of pack [s, t), B(m - 1, t)),   [s, t) within memory

A pack's time only grows with t, so t need not go on once that alone is no better than what has been found: about
R² · log(packs) steps for R layers.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from harmony_lab.compiled import Bool, Float, Floats, Int, Ints, compiled
from harmony_lab.plan import Pack

__all__ = ["best_partitions", "cut", "furthest_stops"]

_NONE = 2**62  # a bottleneck where there is no partition
_TICKS_PER_S = 1e12  # whole numbers, so that equal layers take equal times whatever their place


def best_partitions(
    seconds: np.ndarray, fits: np.ndarray, start: int, stop: int, counts: Collection[int]
) -> dict[int, tuple[Pack, ...]]:
    """Partitions of layers [start, stop) into exactly so many packs, for each of ``counts`` that there is one.

    ``seconds``: of each layer.  ``fits[start, stop]``: whether that pack may be.  Where many partitions have the least
    bottleneck, the one whose packs from first to last come nearest to equal shares of what is left.
    """
    wanted = np.array(sorted({count for count in counts if 1 <= count <= stop - start}), dtype=np.int64)
    if not wanted.size:
        return {}
    ticks = np.zeros(len(seconds) + 1, dtype=np.int64)
    np.cumsum(np.rint(seconds * _TICKS_PER_S).astype(np.int64), out=ticks[1:])
    edges = np.empty((len(wanted), wanted[-1] + 1), dtype=np.int64)
    _cut(ticks, fits, furthest_stops(fits), start, stop, wanted, edges)
    return {
        count: _packs(row[: count + 1])
        for count, row in zip(wanted.tolist(), edges.tolist(), strict=True)
        if row[0] == start
    }


def furthest_stops(fits: np.ndarray) -> Ints:
    """For each start, the last stop for which that pack fits; the start itself where no pack does."""
    num_layers = len(fits) - 1
    last = num_layers - np.argmax(fits[:num_layers, ::-1], axis=1)
    return np.where(fits[:num_layers].any(axis=1), last, np.arange(num_layers))


def _packs(edges: Sequence[int]) -> tuple[Pack, ...]:
    return tuple(Pack(first, last) for first, last in pairwise(edges))


@compiled
def _cut(ticks: Ints, fits: Ints, furthest: Ints, start: int, stop: int, counts: Ints, edges: Ints) -> None:
    """Fill a row of ``edges`` per count, -1 where there is no such partition."""
    best = _bottlenecks(ticks, fits, furthest, start, stop, counts[-1])
    for row in range(len(counts)):
        limit = best[counts[row], start]
        if limit == _NONE:
            edges[row, 0] = -1
            continue
        first = start
        edges[row, 0] = start
        for left in range(counts[row], 1, -1):
            share = ticks[first] + (ticks[stop] - ticks[first]) // left
            nearest = _NONE
            cut = first + 1
            for last in range(first + 1, min(furthest[first], stop - left + 1) + 1):
                if ticks[last] - ticks[first] > limit:
                    break
                if fits[first, last] and best[left - 1, last] <= limit and abs(ticks[last] - share) < nearest:
                    nearest = abs(ticks[last] - share)
                    cut = last
            first = cut
            edges[row, counts[row] - left + 1] = cut
        edges[row, counts[row]] = stop


@compiled
def _bottlenecks(ticks: Ints, fits: Ints, furthest: Ints, start: int, stop: int, most: int) -> Ints:
    """[packs, first layer]: B of the module's docstring."""
    best = np.full((most + 1, stop + 1), _NONE, dtype=np.int64)
    for first in range(start, stop):
        if fits[first, stop]:
            best[1, first] = ticks[stop] - ticks[first]
    for left in range(2, most + 1):
        for first in range(start, stop - left + 1):
            found = _NONE
            for last in range(first + 1, min(furthest[first], stop - left + 1) + 1):
                taken = ticks[last] - ticks[first]
                if taken >= found:
                    break
                if fits[first, last]:
                    found = min(found, max(taken, best[left - 1, last]))
            best[left, first] = found
    return best


# -- one number of packs, thousands of times ---------------------------------------------------------------------------


@compiled
def cut(seconds: Floats, reach: Ints, start: Int, stop: Int, count: Int, edges: Ints) -> Bool:
    """Fill ``edges[: count + 1]`` with so many packs of layers [start, stop), the slowest as fast as can be; whether
    there are such.

    ``seconds``: summed from the first layer on.  The least bottleneck is found by bisection; then what is left is
    shared evenly.
    """
    low, high = 0.0, seconds[stop] - seconds[start]
    if count > stop - start or count < 1 or _packs_within(seconds, reach, start, stop, high) > count:
        return False
    low = high / count
    if _packs_within(seconds, reach, start, stop, low) <= count:
        high = low
    for _ in range(24):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        if _packs_within(seconds, reach, start, stop, middle) <= count:
            high = middle
        else:
            low = middle
    limit = high * (1 + 1e-9)
    edges[count] = stop
    # The earliest start that each number of last packs can have, from the last one back.
    for left in range(1, count):
        last = edges[count - left + 1]
        first = last - 1
        while first > start and seconds[last] - seconds[first - 1] <= limit and reach[first - 1] >= last:
            first -= 1
        edges[count - left] = first
    edges[0] = start
    first = start
    for number in range(1, count):
        left = count - number
        share = seconds[first] + (seconds[stop] - seconds[first]) / (left + 1)
        earliest, latest = max(edges[number], first + 1), stop - left
        best = earliest
        for last in range(earliest, latest + 1):
            if seconds[last] - seconds[first] > limit or reach[first] < last:
                break
            if abs(seconds[last] - share) <= abs(seconds[best] - share):
                best = last
        edges[number] = first = best
    return True


@compiled
def _packs_within(seconds: Floats, reach: Ints, start: Int, stop: Int, limit: Float) -> Int:
    """The least number of packs none of which takes longer than that; a large one where there is none."""
    count, first = 0, start
    limit = limit * (1 + 1e-9)
    while first < stop:
        last = first + 1
        if reach[first] < last or seconds[last] - seconds[first] > limit:
            return 1 << 30
        most = min(reach[first], stop)
        while last < most and seconds[last + 1] - seconds[first] <= limit:
            last += 1
        first = last
        count += 1
    return count
