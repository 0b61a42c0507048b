"""outlook: about how long candidates take, fast enough to look at thousands; compiled.

A candidate is followed pack by pack and microbatch by microbatch through each device's streams, as ``lowering`` would
lay it out, but alone on links at fixed rates and without a ledger of memory.  It orders candidates; what is said of
a plan comes from the simulator.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harmony_lab.compiled import Bool, Float, Floats, Int, Ints, compiled

__all__ = ["Setting", "Sized", "cut", "forecast", "refine", "slide", "survey"]


_HOPELESS = 1.005  # a candidate whose bound is so much above the best forecast is not looked at,
_FEW = 400  # but where there are no more than these


class Sized(NamedTuple):
    """Costs by size z (``sizes[z]`` samples) and layer or boundary; seconds are summed from the first layer on.

    ``forward_need`` and ``backward_need``: bytes of pack [start, stop) at [z, start, stop].  ``forward_reach``,
    ``backward_reach``: the last stop of a pack that fits, the start itself where none does.
    """

    sizes: Ints
    forward_s: Floats
    recompute_s: Floats
    backward_s: Floats
    value_bytes: Ints
    gradient_bytes: Ints
    forward_need: Ints
    backward_need: Ints
    forward_reach: Ints
    backward_reach: Ints
    weight_bytes: Ints  # [start, stop]
    parameter_gradient_bytes: Ints
    update_s: Floats


class Setting(NamedTuple):
    """The machine and the switches.  ``chain``: devices that packs go round (1 in DP); ``replicas``: devices that each
    run every pack (1 in PP); ``share``: samples of each.  Rates: of one device's transfers."""

    chain: int
    replicas: int
    share: int
    prefetch: int
    peers: int
    budget_bytes: int
    down: float
    up: float
    peer: float
    release_s: float


@compiled
def forecast(
    t: Sized, p: Setting, forward: Ints, forward_z: Int, backward: Ints, backward_z: Int, rests: Ints
) -> Float:
    """Seconds of an iteration.  ``forward``, ``backward``: edges of packs; ``rests``: for each size, the size of the
    last microbatch."""
    num_forward = len(forward) - 1
    num_stages = num_forward + len(backward) - 1
    most = p.share // min(t.sizes[forward_z], t.sizes[backward_z]) + 1
    compute, compute_before = np.zeros(p.chain), np.zeros(p.chain)
    coming, peer_coming = np.zeros(p.chain), np.zeros(p.chain)
    out, out_before, reduced = np.zeros(p.chain), np.zeros(p.chain), np.zeros(p.chain)
    # Values have streams of their own where weights come meanwhile, else those of the state.
    values_in, values_out = np.zeros(p.chain), np.zeros(p.chain)
    fetched = np.zeros(num_stages + p.chain, np.bool_)
    stashed = np.zeros((len(backward), most))
    done, following = np.zeros(most), np.zeros(most)
    host = 0.0
    size_before: Int = 0
    for s in range(num_stages):
        d = s % p.chain
        is_backward, is_fused = s >= num_forward, s == num_forward
        edge: Int = num_stages - 1 - s if is_backward else 0
        if is_backward:
            start, stop, z = backward[edge], backward[edge + 1], backward_z
        else:
            start, stop, z = forward[s], forward[s + 1], forward_z
        size: Int = t.sizes[z]
        count = (p.share + size - 1) // size
        arrived = coming[d]
        if not fetched[s]:
            arrived = max(coming[d], compute[d])
            if p.prefetch == 0:
                arrived = max(arrived, max(out[d], reduced[d]))
            arrived += t.weight_bytes[start, stop] / p.down
            coming[d] = arrived
        edge_from: Int = 0
        edge_to: Int = 0
        if not is_backward:
            edge_from, edge_to = _edges_between(backward, start, stop)
        for i in range(count):
            y = z if i < count - 1 else rests[z]
            room = compute_before[d] if p.prefetch > 0 else compute[d]
            ready = arrived  # what the first computing needs; a backward's gradient may come while that goes on
            later = 0.0
            last = min(p.share, (i + 1) * size)
            if is_backward and not is_fused:
                source = (last - 1) // t.sizes[forward_z]
                seconds = t.value_bytes[y, start] / p.down
                ready = max(ready, _move(p, values_in, coming, d, max(room, stashed[edge, source]), seconds))
                if p.chain > 1 and p.peers:
                    peer_coming[d] = max(max(peer_coming[d], room), done[i]) + t.gradient_bytes[y, stop] / p.peer
                    later = peer_coming[d]
                else:
                    later = _move(p, values_in, coming, d, max(room, done[i]), t.gradient_bytes[y, stop] / p.down)
            elif s > 0:
                if p.chain > 1 and p.peers and size == size_before:
                    peer_coming[d] = max(max(peer_coming[d], room), done[i]) + t.value_bytes[y, start] / p.peer
                    ready = max(ready, peer_coming[d])
                else:
                    source = (last - 1) // size_before
                    seconds = t.value_bytes[y, start] / p.down
                    ready = max(ready, _move(p, values_in, coming, d, max(room, done[source]), seconds))
            if i == 0 and p.prefetch > 0 and s + p.chain < num_stages:
                _prefetch(t, p, forward, backward, num_forward, num_stages, s, z, start, stop, coming, compute, fetched)
            end = max(max(compute[d], ready), out_before[d])
            if is_backward:
                end = max(end + t.recompute_s[y, stop] - t.recompute_s[y, start], later)
                end += t.backward_s[y, stop] - t.backward_s[y, start]
            else:
                end += t.forward_s[y, stop] - t.forward_s[y, start]
            if i == count - 1:
                end += p.release_s
            compute_before[d], compute[d] = compute[d], end
            following[i] = end
            if is_backward:
                if s + 1 < num_stages and not (p.chain > 1 and p.peers):
                    out_before[d] = values_out[d] if p.prefetch > 0 else out[d]
                    following[i] = _move(p, values_out, out, d, end, t.gradient_bytes[y, start] / p.up)
            else:
                is_out = False
                for edge in range(edge_from, edge_to):
                    out_before[d] = values_out[d] if p.prefetch > 0 else out[d]
                    stashed[edge, i] = _move(p, values_out, out, d, end, t.value_bytes[y, backward[edge]] / p.up)
                    is_out = is_out or backward[edge] == stop
                if p.chain == 1 or not p.peers or (s + 1 == num_forward and size != t.sizes[backward_z]):
                    if not is_out:
                        out_before[d] = values_out[d] if p.prefetch > 0 else out[d]
                        _move(p, values_out, out, d, end, t.value_bytes[y, stop] / p.up)
                    following[i] = values_out[d] if p.prefetch > 0 else out[d]
        if is_backward:
            host = max(host, _gradients_out(t, p, start, stop, d, compute, out, peer_coming, reduced))
            host += t.update_s[stop] - t.update_s[start]
        done, following = following, done
        size_before = size
    return max(max(compute.max(), max(out.max(), values_out.max())), host)


@compiled
def _move(p: Setting, values: Floats, state: Floats, d: Int, earliest: Float, seconds: Float) -> Float:
    """Move values of a microbatch, no sooner than ``earliest``; while weights or gradients move the same way, both
    share the link.  Returns when they are there.

    ``values``, ``state``: until when the device's streams are busy.
    """
    if p.prefetch == 0:
        state[d] = max(state[d], earliest) + seconds
        return state[d]
    start = max(values[d], earliest)
    if state[d] > start:
        state[d] += seconds
        seconds = min(2 * seconds, state[d] - start)
    values[d] = start + seconds
    return values[d]


@compiled
def _edges_between(backward: Ints, start: Int, stop: Int) -> tuple[Int, Int]:
    """Which edges of backward packs, but for the last pack's, lie above ``start`` and up to ``stop``."""
    edge_from = np.searchsorted(backward, start + 1)
    return edge_from, min(np.searchsorted(backward, stop + 1), len(backward) - 2)


@compiled
def _prefetch(
    t: Sized,
    p: Setting,
    forward: Ints,
    backward: Ints,
    num_forward: Int,
    num_stages: Int,
    s: Int,
    z: Int,
    start: Int,
    stop: Int,
    coming: Floats,
    compute: Floats,
    fetched: NDArray[np.bool_],
) -> None:
    """Fetch the weights of the device's next pack, if they fit beside this one."""
    later = s + p.chain
    if later < num_forward:
        num_bytes = t.weight_bytes[forward[later], forward[later + 1]]
    else:
        num_bytes = t.weight_bytes[backward[num_stages - 1 - later], backward[num_stages - later]]
    need = t.forward_need[z, start, stop] if s < num_forward else t.backward_need[z, start, stop]
    if need + num_bytes <= p.budget_bytes:
        d = s % p.chain
        coming[d] = max(coming[d], compute[d]) + num_bytes / p.down
        fetched[later] = True


@compiled
def _gradients_out(
    t: Sized,
    p: Setting,
    start: Int,
    stop: Int,
    d: Int,
    compute: Floats,
    out: Floats,
    peer_coming: Floats,
    reduced: Floats,
) -> Float:
    """When a pack's gradients are on the host."""
    seconds = t.parameter_gradient_bytes[start, stop] / p.up
    ready = compute[d]
    if p.replicas > 1 and p.peers:
        shards = 2 * (p.replicas - 1) / p.replicas
        peer_coming[d] = max(peer_coming[d], ready) + shards * t.parameter_gradient_bytes[start, stop] / p.peer
        reduced[d] = ready = peer_coming[d]
        if p.prefetch > 0:  # one device takes them out, in turn; if nothing overlaps, all wait for it in the end
            seconds /= p.replicas
    out[d] = max(out[d], ready) + seconds
    return out[d]


# -- partitions -------------------------------------------------------------------------------------------------------


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


# -- many candidates --------------------------------------------------------------------------------------------------


@compiled
def _at_least(t: Sized, p: Setting, forward_z: Int, backward_z: Int, stop: Int, num_packs: Int) -> Float:
    """Seconds that any such candidate takes: every device's share of computing, and of weights where that cannot
    overlap."""
    num_layers = t.weight_bytes.shape[0] - 1
    seconds = t.forward_s[forward_z, stop] * (p.share // t.sizes[forward_z])
    both = t.recompute_s[backward_z, num_layers] + t.backward_s[backward_z, num_layers]
    seconds += both * (p.share // t.sizes[backward_z]) + num_packs * p.release_s
    if p.prefetch == 0:
        seconds += (t.weight_bytes[0, num_layers] + t.weight_bytes[0, stop]) / p.down
    return seconds / p.chain


@compiled
def survey(t: Sized, p: Setting, rests: Ints, wanted: Ints, found: Floats) -> None:
    """Forecast candidates: ``found[row]`` for ``wanted[row]`` = (forward size, packs, backward size, packs); infinity
    where there is no such partition or it is hopeless."""
    num_layers = t.weight_bytes.shape[0] - 1
    forward, backward = np.zeros(num_layers + 2, np.int64), np.zeros(num_layers + 2, np.int64)
    both = t.recompute_s + t.backward_s
    bounds = np.full(len(wanted), np.inf)
    found[:] = np.inf
    for row in range(len(wanted)):
        forward_z, num_forward, backward_z, num_backward = wanted[row]
        if row == 0 or wanted[row - 1, 2] != backward_z or wanted[row - 1, 3] != num_backward:
            fits = cut(both[backward_z], t.backward_reach[backward_z], 0, num_layers, num_backward, backward)
        stop = backward[num_backward - 1]
        if fits and (stop > 0) == (num_forward > 0):
            bounds[row] = _at_least(t, p, forward_z, backward_z, stop, num_forward + num_backward)
    best = np.inf
    for row in np.argsort(bounds):
        if bounds[row] == np.inf or (len(wanted) > _FEW and bounds[row] > best * _HOPELESS):
            return
        forward_z, num_forward, backward_z, num_backward = wanted[row]
        cut(both[backward_z], t.backward_reach[backward_z], 0, num_layers, num_backward, backward)
        stop = backward[num_backward - 1]
        if stop > 0 and not cut(t.forward_s[forward_z], t.forward_reach[forward_z], 0, stop, num_forward, forward):
            continue
        packs = forward[: num_forward + 1]
        found[row] = forecast(t, p, packs, forward_z, backward[: num_backward + 1], backward_z, rests)
        best = min(best, found[row])


@compiled
def slide(
    t: Sized, p: Setting, forward: Ints, forward_z: Int, backward: Ints, backward_z: Int, rests: Ints, most: Int
) -> None:
    """Let the last pack begin where the iteration is shortest, at most ``most`` layers from where it does, the packs
    before it of equal times; changes the edges."""
    both = t.recompute_s[backward_z] + t.backward_s[backward_z]
    forward_s, forward_reach = t.forward_s[forward_z], t.forward_reach[forward_z]
    backward_reach = t.backward_reach[backward_z]
    num_forward, num_backward, num_layers = len(forward) - 1, len(backward) - 1, backward[-1]
    packs, others = forward.copy(), backward.copy()
    best = forecast(t, p, forward, forward_z, backward, backward_z, rests)
    middle = backward[num_backward - 1]
    for start in range(max(num_forward, middle - most), min(num_layers - 1, middle + most) + 1):
        if start == middle or backward_reach[start] < num_layers:
            continue
        if not cut(forward_s, forward_reach, 0, start, num_forward, packs):
            continue
        if not cut(both, backward_reach, 0, start, num_backward - 1, others):
            continue
        seconds = forecast(t, p, packs, forward_z, others, backward_z, rests)
        if seconds < best:
            best = seconds
            forward[:] = packs
            backward[:] = others


@compiled
def refine(
    t: Sized, p: Setting, forward: Ints, forward_z: Int, backward: Ints, backward_z: Int, rests: Ints, tries: Int
) -> Float:
    """Move edges by one layer as long as that helps, at most ``tries`` times; changes the edges, returns the
    forecast."""
    best = forecast(t, p, forward, forward_z, backward, backward_z, rests)
    improved = True
    while improved and tries > 0:
        improved = False
        for way in range(2):
            edges = forward if way == 0 else backward
            reach = t.forward_reach[forward_z] if way == 0 else t.backward_reach[backward_z]
            for number in range(1, len(edges) - 1):
                for step in (-1, 1):
                    is_shared = way == 1 and number == len(edges) - 2 and len(forward) > 1
                    if not _shift(edges, reach, number, step):
                        continue
                    if is_shared and not _shift_end(forward, t.forward_reach[forward_z], step):
                        edges[number] -= step
                        continue
                    tries -= 1
                    seconds = forecast(t, p, forward, forward_z, backward, backward_z, rests)
                    if seconds < best * (1 - 1e-6):
                        best = seconds
                        improved = True
                    else:
                        edges[number] -= step
                        if is_shared:
                            forward[-1] -= step
                    if tries <= 0:
                        return best
    return best


@compiled
def _shift(edges: Ints, reach: Ints, number: Int, step: Int) -> Bool:
    """Move an inner edge, if both packs beside it then fit."""
    edge = edges[number] + step
    if edge <= edges[number - 1] or edge >= edges[number + 1]:
        return False
    if reach[edges[number - 1]] < edge or reach[edge] < edges[number + 1]:
        return False
    edges[number] = edge
    return True


@compiled
def _shift_end(edges: Ints, reach: Ints, step: Int) -> Bool:
    edge = edges[-1] + step
    if edge <= edges[-2] or reach[edges[-2]] < edge:
        return False
    edges[-1] = edge
    return True
