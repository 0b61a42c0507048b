"""survey: thousands of candidates forecast, and edges of the best moved; compiled."""

import numpy as np

from harmony_lab.compiled import Bool, Float, Floats, Int, Ints, compiled
from harmony_lab.planner.outlook import Setting, Sized, forecast
from harmony_lab.planner.partition import cut

__all__ = ["cut_backward", "refine", "slide", "survey"]

_HOPELESS = 1.005  # a candidate whose bound is so much above the best forecast is not looked at,
_UNPROMISING = 1.04  # and one that takes so much longer than the best is not followed to its end,
_FEW = 400  # but where there are no more than these


@compiled
def _at_least(
    t: Sized, p: Setting, forward_z: Int, backward_z: Int, stop: Int, num_forward: Int, num_backward: Int
) -> Float:
    """Seconds that any such candidate takes: every device's share of computing, and of weights where that cannot
    overlap."""
    num_layers = t.weight_bytes.shape[0] - 1
    forward_count, backward_count = p.share // t.sizes[forward_z], p.share // t.sizes[backward_z]
    forward_s, backward_s = (
        t.forward_s[forward_z, stop] * forward_count,
        t.both_s[backward_z, num_layers] * backward_count,
    )
    num_ops = num_forward * forward_count + 2 * num_backward * backward_count
    seconds = forward_s + (backward_s + (num_forward + num_backward) * p.release_s) + num_ops * p.op_s
    if p.prefetch == 0:
        seconds += (t.weight_bytes[0, num_layers] + t.weight_bytes[0, stop]) / p.down
    on_cores_s = p.threads * (forward_s + backward_s + num_ops * p.compute_s)
    return max(seconds / p.chain, p.replicas * on_cores_s / p.num_cores)


@compiled
def survey(t: Sized, p: Setting, rests: Ints, wanted: Ints, found: Floats) -> None:
    """Forecast candidates: ``found[row]`` for ``wanted[row]`` = (forward size, packs, backward size, packs, whether the
    last pack is as large as fits); infinity where there is no such partition or it is hopeless."""
    num_layers = t.weight_bytes.shape[0] - 1
    forward, backward = np.zeros(num_layers + 2, np.int64), np.zeros(num_layers + 2, np.int64)
    bounds = np.full(len(wanted), np.inf)
    found[:] = np.inf
    for row in range(len(wanted)):
        forward_z, num_forward, backward_z, num_backward, has_large = wanted[row]
        if row == 0 or not np.array_equal(wanted[row - 1, 2:], wanted[row, 2:]):
            fits = cut_backward(t, backward_z, num_backward, has_large, backward)
        stop = backward[num_backward - 1]
        if fits and (stop > 0) == (num_forward > 0):
            bounds[row] = _at_least(t, p, forward_z, backward_z, stop, num_forward, num_backward)
    best = np.inf
    for row in np.argsort(bounds):
        if bounds[row] == np.inf or (len(wanted) > _FEW and bounds[row] > best * _HOPELESS):
            return
        forward_z, num_forward, backward_z, num_backward, has_large = wanted[row]
        cut_backward(t, backward_z, num_backward, has_large, backward)
        stop = backward[num_backward - 1]
        if stop > 0 and not cut(t.forward_s[forward_z], t.forward_reach[forward_z], 0, stop, num_forward, forward):
            continue
        packs = forward[: num_forward + 1]
        limit = best * _UNPROMISING
        found[row] = forecast(t, p, packs, forward_z, backward[: num_backward + 1], backward_z, rests, limit)
        best = min(best, found[row])


@compiled
def cut_backward(t: Sized, z: Int, count: Int, has_large: Int, edges: Ints) -> Bool:
    """Fill ``edges`` with so many backward packs of equal times, with ``has_large`` the last one as large as fits: what
    it computes forward is not computed again, and its weights come once.  Whether there are such."""
    reach, num_layers = t.backward_reach[z], t.weight_bytes.shape[0] - 1
    if not has_large:
        return cut(t.both_s[z], reach, 0, num_layers, count, edges)
    start = count - 1
    while start < num_layers and reach[start] < num_layers:
        start += 1
    edges[count] = num_layers
    return start < num_layers and cut(t.both_s[z], reach, 0, start, count - 1, edges)


@compiled
def slide(
    t: Sized, p: Setting, forward: Ints, forward_z: Int, backward: Ints, backward_z: Int, rests: Ints, most: Int
) -> None:
    """Let the last pack begin where the iteration is shortest, at most ``most`` layers from where it does, the packs
    before it of equal times; changes the edges."""
    both = t.both_s[backward_z]
    forward_s, forward_reach = t.forward_s[forward_z], t.forward_reach[forward_z]
    backward_reach = t.backward_reach[backward_z]
    num_forward, num_backward, num_layers = len(forward) - 1, len(backward) - 1, backward[-1]
    packs, others = forward.copy(), backward.copy()
    best = forecast(t, p, forward, forward_z, backward, backward_z, rests, np.inf)
    middle = backward[num_backward - 1]
    for start in range(max(num_forward, middle - most), min(num_layers - 1, middle + most) + 1):
        if start == middle or backward_reach[start] < num_layers:
            continue
        if not cut(forward_s, forward_reach, 0, start, num_forward, packs):
            continue
        if not cut(both, backward_reach, 0, start, num_backward - 1, others):
            continue
        seconds = forecast(t, p, packs, forward_z, others, backward_z, rests, best)
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
    best = forecast(t, p, forward, forward_z, backward, backward_z, rests, np.inf)
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
                    seconds = forecast(t, p, forward, forward_z, backward, backward_z, rests, best)
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
