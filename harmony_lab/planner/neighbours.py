"""neighbours: plans one step away from a plan, to search on from what the simulator found best."""

from collections.abc import Iterator, Sequence

from harmony_lab.plan import Pack, Plan

__all__ = ["neighbours"]


def neighbours(plan: Plan, forward_sizes: Sequence[int], backward_sizes: Sequence[int]) -> Iterator[Plan]:
    """One edge moved by a layer, taken out or put in; or one microbatch size to the next.

    The first edge of the last backward pack is the end of forward's too.  Edges are given up where that leaves a pack
    empty; what would not be a plan is left out.
    """
    forward, backward = _edges(plan.forward_packs), _edges(plan.backward_packs)
    fused = plan.fused_pack.start
    inner = {*forward[1:-1]}
    ends = {*backward[1:-1]} - {fused}
    for changed in _changes(inner, 1, fused):
        yield _with(plan, changed, ends, fused)
    for changed in _changes(ends, 1, fused):
        yield _with(plan, inner, changed, fused)
    for start in (0, fused - 1, fused + 1, *sorted(ends)):
        if 0 <= start < plan.num_layers and start != fused:
            yield _with(plan, {e for e in inner if e < start}, {e for e in ends if e < start}, start)
    if not fused:
        for start in range(1, plan.num_layers):
            yield _with(plan, set(), set(), start)
    for name, sizes in (("forward_microbatch_size", forward_sizes), ("backward_microbatch_size", backward_sizes)):
        size = getattr(plan, name)
        for other in (
            max((s for s in sizes if s < size), default=size),
            min((s for s in sizes if s > size), default=size),
        ):
            if other != size:
                yield plan.with_(**{name: other})


def _edges(packs: Sequence[Pack]) -> list[int]:
    return [pack.start for pack in packs] + [packs[-1].stop] if packs else []


def _changes(edges: set[int], first: int, end: int) -> Iterator[set[int]]:
    """One edge moved, taken out or put in, all within [first, end)."""
    for edge in sorted(edges):
        for other in (edge - 1, edge + 1):
            if first <= other < end and other not in edges:
                yield edges - {edge} | {other}
        yield edges - {edge}
    for edge in range(first, end):
        if edge not in edges:
            yield edges | {edge}


def _with(plan: Plan, inner: set[int], ends: set[int], fused: int) -> Plan:
    backward = [0, *sorted(ends), *([fused] if fused else []), plan.num_layers]
    forward = [0, *sorted(inner), fused] if fused else []
    return plan.with_(
        forward_packs=tuple(map(Pack, forward, forward[1:])), backward_packs=tuple(map(Pack, backward, backward[1:]))
    )
