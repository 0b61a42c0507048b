"""outlook: about how long candidates take, fast enough to look at thousands; compiled.

A candidate is followed pack by pack and microbatch by microbatch through each device's streams, as ``lowering`` would
lay it out, but alone on links at fixed rates and without a ledger of memory.  It orders candidates; what is said of
a plan comes from the simulator.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harmony_lab.compiled import Bool, Float, Floats, Int, Ints, compiled

__all__ = ["Setting", "Sized", "Transfer", "forecast"]

_COMPUTE, _BEFORE, _STATE_IN, _VALUES_IN, _PEERS_IN, _STATE_OUT, _VALUES_OUT, _OUT_BEFORE, _REDUCED = range(9)
"""Until when a device's streams are busy; before: with computing but for the last microbatch, or with values out."""
_NUM_CLOCKS = 9


class Sized(NamedTuple):
    """Costs by size z (``sizes[z]`` samples) and layer or boundary; seconds are summed from the first layer on, as the
    machine's kernels take them.

    ``forward_need`` and ``backward_need``: bytes of pack [start, stop) at [z, start, stop].  ``forward_reach``,
    ``backward_reach``: the last stop of a pack that fits, the start itself where none does.
    """

    sizes: Ints
    forward_s: Floats
    recompute_s: Floats
    backward_s: Floats
    both_s: Floats  # recompute and backward
    value_bytes: Ints
    gradient_bytes: Ints
    forward_need: Ints
    backward_need: Ints
    forward_reach: Ints
    backward_reach: Ints
    weight_bytes: Ints  # [start, stop]
    parameter_gradient_bytes: Ints
    update_s: Floats


class Transfer(NamedTuple):
    """What one takes beside links: a core so long, and so long for each byte; and until it starts."""

    core_s: float
    byte_s: float
    waking_s: float


class Setting(NamedTuple):
    """The machine and the switches.  ``chain``: devices that packs go round (1 in DP); ``replicas``: devices that each
    run every pack (1 in PP); ``share``: samples of each.  Rates: of one device's transfers; ``peer``: by device of the
    chain, from the one before.  ``op_s``: of each computing op beside its kernels, ``compute_s`` of that of cores;
    ``threads``: of the host's ``num_cores``, each device computes on so many; 0: on none."""

    chain: int
    replicas: int
    share: int
    prefetch: int
    peers: int
    budget_bytes: int
    down: float
    up: float
    peer: Floats
    release_s: float
    op_s: float
    compute_s: float
    transfer: Transfer
    threads: int
    num_cores: int


@compiled
def forecast(
    t: Sized, p: Setting, forward: Ints, forward_z: Int, backward: Ints, backward_z: Int, rests: Ints, limit: Float
) -> Float:
    """Seconds of an iteration.  ``forward``, ``backward``: edges of packs; ``rests``: for each size, the size of the
    last microbatch.  Once it is clear that these are more than ``limit``, a lower bound on them that is more too."""
    num_forward = len(forward) - 1
    num_stages = num_forward + len(backward) - 1
    most = p.share // min(t.sizes[forward_z], t.sizes[backward_z]) + 1
    clocks = np.zeros((p.chain, _NUM_CLOCKS))
    fetched = np.zeros(num_stages + p.chain, np.bool_)
    stashed, stash_s = np.zeros((len(backward), most)), np.zeros(len(backward))
    done, following = np.zeros(most), np.zeros(most)
    by_peers = p.chain > 1 and p.peers > 0
    turn_s, left_s = np.zeros(num_stages), np.zeros(p.chain)  # what stages, and devices, do in turn at least
    for s in range(num_stages):
        if s < num_forward:
            start, stop, z, seconds = forward[s], forward[s + 1], forward_z, t.forward_s
        else:
            edge = num_stages - 1 - s
            start, stop, z, seconds = backward[edge], backward[edge + 1], backward_z, t.both_s
        others, y = (p.share - 1) // t.sizes[z], rests[z]
        turn_s[s] = others * (seconds[z, stop] - seconds[z, start]) + seconds[y, stop] - seconds[y, start]
        turn_s[s] += (others + 1) * (1 if s < num_forward else 2) * p.op_s
        turn_s[s] += p.release_s + (
            _move_s(p.transfer, t.weight_bytes[start, stop], p.down) if p.prefetch == 0 else 0.0
        )
        left_s[s % p.chain] += turn_s[s]
    on_cores_s = _on_cores_s(t, p, forward, forward_z, backward, backward_z) if p.threads > 0 else 0.0
    least_s = max(left_s.max(), on_cores_s)
    if least_s > limit:
        return least_s
    host = 0.0
    size_before: Int = 0
    for s in range(num_stages):
        d = s % p.chain
        at = clocks[d]
        is_backward = s >= num_forward
        edge = num_stages - 1 - s if is_backward else 0
        edge_from: Int = 0
        edge_to: Int = 0
        if is_backward:
            start, stop, z = backward[edge], backward[edge + 1], backward_z
        else:
            start, stop, z = forward[s], forward[s + 1], forward_z
            edge_from, edge_to = _edges_between(backward, start, stop)
        size: Int = t.sizes[z]
        count = (p.share + size - 1) // size
        if p.prefetch == 0 or not fetched[s]:
            at[_STATE_IN] = max(at[_STATE_IN], at[_COMPUTE])
            if p.prefetch == 0:
                at[_STATE_IN] = max(at[_STATE_IN], max(at[_STATE_OUT], at[_REDUCED]))
            at[_STATE_IN] += _move_s(p.transfer, t.weight_bytes[start, stop], p.down)
        arrived = at[_STATE_IN]
        ahead_s = _ahead_s(t, p, forward, backward, s, z, start, stop, fetched) if p.prefetch > 0 else 0.0
        from_stash = s > num_forward
        value_by_peer = by_peers and not from_stash and size == size_before
        to_host = (not by_peers or (s + 1 == num_forward and size != t.sizes[backward_z])) and s + 1 < num_stages
        is_out = edge_to > edge_from and backward[edge_to - 1] == stop
        for part in range(2):
            y, first, last = (z, 0, count - 1) if part == 0 else (rests[z], count - 1, count)
            value_s, gradient_s, out_s, second_s = 0.0, -1.0, -1.0, 0.0
            if s > 0:
                value_s = _move_s(p.transfer, t.value_bytes[y, start], p.peer[d] if value_by_peer else p.down)
            if is_backward:
                if from_stash:
                    gradient_s = _move_s(p.transfer, t.gradient_bytes[y, stop], p.peer[d] if by_peers else p.down)
                first_s = t.recompute_s[y, stop] - t.recompute_s[y, start] + p.op_s
                second_s = t.backward_s[y, stop] - t.backward_s[y, start] + p.op_s
                if to_host:
                    out_s = _move_s(p.transfer, t.gradient_bytes[y, start], p.up)
            else:
                first_s = t.forward_s[y, stop] - t.forward_s[y, start] + p.op_s
                if to_host and not is_out:
                    out_s = _move_s(p.transfer, t.value_bytes[y, stop], p.up)
                for number in range(edge_from, edge_to):
                    stash_s[number] = _move_s(p.transfer, t.value_bytes[y, backward[number]], p.up)
            _follow(
                at,
                first,
                last,
                p.share,
                size,
                p.prefetch > 0,
                arrived,
                ahead_s,
                stashed[edge] if from_stash else done,
                (t.sizes[forward_z] if from_stash else size_before) if s > 0 else 0,
                value_s,
                value_by_peer,
                done,
                gradient_s,
                by_peers,
                first_s,
                second_s + (p.release_s if last == count else 0.0),
                stashed,
                stash_s,
                edge_from,
                edge_to,
                out_s,
                to_host,
                following,
            )
        left_s[d] -= turn_s[s]
        if at[_COMPUTE] + left_s[d] > limit:
            return at[_COMPUTE] + left_s[d]
        if is_backward:
            host = max(host, _gradients_out(t, p, start, stop, at)) + t.update_s[stop] - t.update_s[start] + p.op_s
        done, following = following, done
        size_before = size
    for d in range(p.chain):
        host = max(host, max(clocks[d, _COMPUTE], max(clocks[d, _STATE_OUT], clocks[d, _VALUES_OUT])))
    return max(host, on_cores_s)


@compiled
def _move_s(x: Transfer, num_bytes: Int, rate: Float) -> Float:
    """Of a transfer: over links at that rate, while a core copies."""
    return max(num_bytes / rate, x.core_s + num_bytes * x.byte_s) + x.waking_s


@compiled
def _on_cores_s(t: Sized, p: Setting, forward: Ints, forward_z: Int, backward: Ints, backward_z: Int) -> Float:
    """If the host's cores were always busy, with all that devices compute and move, and with the updates."""
    by_peers = p.chain > 1 and p.peers > 0
    num_layers = backward[-1]
    kernels_s, num_bytes = 0.0, 0.0
    num_ops: Int = 0
    num_moves: Int = 0
    part, count = p.share / t.sizes[forward_z], (p.share + t.sizes[forward_z] - 1) // t.sizes[forward_z]
    for s in range(len(forward) - 1):
        start, stop = forward[s], forward[s + 1]
        edge_from, edge_to = _edges_between(backward, start, stop)
        goes_out = not by_peers and (edge_to == edge_from or backward[edge_to - 1] != stop)
        num_ops += count
        num_moves += 1 + count * ((s > 0) + edge_to - edge_from + goes_out)
        num_bytes += t.weight_bytes[start, stop] + part * t.value_bytes[forward_z, start] * (s > 0)
        num_bytes += part * t.value_bytes[forward_z, stop] * goes_out
        for number in range(edge_from, edge_to):
            num_bytes += part * t.value_bytes[forward_z, backward[number]]
        kernels_s += part * (t.forward_s[forward_z, stop] - t.forward_s[forward_z, start])
    part, count = p.share / t.sizes[backward_z], (p.share + t.sizes[backward_z] - 1) // t.sizes[backward_z]
    ways = 1 if by_peers else 2  # of the gradients of what comes in
    for edge in range(len(backward) - 1):
        first, last = backward[edge], backward[edge + 1]
        num_ops += 2 * count
        num_moves += 2 + count * (1 + ways) * (edge > 0)
        num_bytes += t.weight_bytes[first, last] + t.parameter_gradient_bytes[first, last]
        comes_in = t.value_bytes[backward_z, first] + ways * t.gradient_bytes[backward_z, first]
        num_bytes += part * comes_in * (edge > 0)
    kernels_s += part * t.both_s[backward_z, num_layers]
    devices_s = p.threads * (kernels_s + num_ops * p.compute_s)
    devices_s += num_moves * p.transfer.core_s + num_bytes * p.transfer.byte_s
    return (p.replicas * devices_s + t.update_s[num_layers]) / p.num_cores


@compiled
def _follow(
    at: Floats,
    first: Int,
    last: Int,
    share: Int,
    size: Int,
    overlaps: Bool,
    arrived: Float,
    ahead_s: Float,
    source: Floats,
    source_size: Int,
    value_s: Float,
    value_by_peer: Bool,
    done: Floats,
    gradient_s: Float,
    gradient_by_peer: Bool,
    first_s: Float,
    second_s: Float,
    stashed: NDArray[np.float64],
    stash_s: Floats,
    edge_from: Int,
    edge_to: Int,
    out_s: Float,
    to_host: Bool,
    following: Floats,
) -> None:
    """Microbatches [first, last) of a pack, each in the same seconds; the device's streams are busy until ``at``.

    Its input is there since ``source`` (in microbatches of ``source_size``; 0: no transfer), the gradient of its output
    since ``done`` (less than 0 seconds: none); fills ``stashed`` and ``following``.
    """
    compute, before, peers_in = at[_COMPUTE], at[_BEFORE], at[_PEERS_IN]
    # Values have streams of their own where weights come meanwhile, else those of the state.
    state_in, values_in = at[_STATE_IN], at[_VALUES_IN] if overlaps else at[_STATE_IN]
    state_out, values_out = at[_STATE_OUT], at[_VALUES_OUT] if overlaps else at[_STATE_OUT]
    out_before = at[_OUT_BEFORE]
    number, upto = 0, source_size
    for i in range(first, last):
        room = before if overlaps else compute
        ready = arrived  # what the first computing needs; a backward's gradient may come while that goes on
        later = 0.0
        if value_by_peer:
            peers_in = max(max(peers_in, room), source[i]) + value_s
            ready = max(ready, peers_in)
        elif source_size > 0:
            while upto < min(share, (i + 1) * size):
                number, upto = number + 1, upto + source_size
            values_in, state_in = _move(values_in, state_in, max(room, source[number]), value_s)
            ready = max(ready, values_in)
        if gradient_s >= 0.0:
            if gradient_by_peer:
                later = peers_in = max(max(peers_in, room), done[i]) + gradient_s
            else:
                values_in, state_in = _move(values_in, state_in, max(room, done[i]), gradient_s)
                later = values_in
        if i == 0 and ahead_s > 0.0:
            state_in = max(state_in, compute) + ahead_s
        end = max(max(max(compute, ready), out_before) + first_s, later) + second_s
        before, compute = compute, end
        for edge in range(edge_from, edge_to):
            out_before = values_out
            values_out, state_out = _move(values_out, state_out, end, stash_s[edge])
            stashed[edge, i] = values_out
        if out_s >= 0.0:
            out_before = values_out
            values_out, state_out = _move(values_out, state_out, end, out_s)
        following[i] = values_out if to_host else end
    at[_COMPUTE], at[_BEFORE], at[_PEERS_IN], at[_OUT_BEFORE] = compute, before, peers_in, out_before
    at[_STATE_IN], at[_VALUES_IN] = state_in if overlaps else values_in, values_in
    at[_STATE_OUT], at[_VALUES_OUT] = state_out if overlaps else values_out, values_out


@compiled
def _move(values: Float, state: Float, earliest: Float, seconds: Float) -> tuple[Float, Float]:
    """Move values of a microbatch, no sooner than ``earliest``; while weights or gradients move the same way, both
    share the link.

    ``values``, ``state``: until when the device's streams are busy; returns both as they are after.
    """
    start = max(values, earliest)
    if state > start:
        state += seconds
        seconds = min(2 * seconds, state - start)
    return start + seconds, state


@compiled
def _edges_between(backward: Ints, start: Int, stop: Int) -> tuple[Int, Int]:
    """Which edges of backward packs, but for the last pack's, lie above ``start`` and up to ``stop``."""
    edge_from = np.searchsorted(backward, start + 1)
    return edge_from, min(np.searchsorted(backward, stop + 1), len(backward) - 2)


@compiled
def _ahead_s(
    t: Sized,
    p: Setting,
    forward: Ints,
    backward: Ints,
    s: Int,
    z: Int,
    start: Int,
    stop: Int,
    fetched: NDArray[np.bool_],
) -> Float:
    """Seconds that the weights of the device's next pack take to come, if they fit beside this one; else 0."""
    num_forward = len(forward) - 1
    num_stages = num_forward + len(backward) - 1
    later = s + p.chain
    if later >= num_stages:
        return 0.0
    if later < num_forward:
        num_bytes = t.weight_bytes[forward[later], forward[later + 1]]
    else:
        num_bytes = t.weight_bytes[backward[num_stages - 1 - later], backward[num_stages - later]]
    need = t.forward_need[z, start, stop] if s < num_forward else t.backward_need[z, start, stop]
    if need + num_bytes > p.budget_bytes:
        return 0.0
    fetched[later] = True
    return _move_s(p.transfer, num_bytes, p.down)


@compiled
def _gradients_out(t: Sized, p: Setting, start: Int, stop: Int, at: Floats) -> Float:
    """When a pack's gradients are on the host."""
    seconds = _move_s(p.transfer, t.parameter_gradient_bytes[start, stop], p.up)
    ready = at[_COMPUTE]
    if p.replicas > 1 and p.peers:
        shards = 2 * (p.replicas - 1) / p.replicas
        num_bytes = shards * t.parameter_gradient_bytes[start, stop]
        at[_PEERS_IN] = max(at[_PEERS_IN], ready) + _move_s(p.transfer, num_bytes, p.peer[0])
        at[_REDUCED] = ready = at[_PEERS_IN]
        if p.prefetch > 0:  # one device takes them out, in turn; if nothing overlaps, all wait for it in the end
            seconds /= p.replicas
    at[_STATE_OUT] = max(at[_STATE_OUT], ready) + seconds
    return at[_STATE_OUT]
