"""staying: what is left of the devices' memory spent on what need then not move, or be computed, twice.

The same packs forward and backward, each on one device (``Plan.mirrored`` in PP).  In the order of what they save per
byte, boundaries' values stay, then weights, then all that backward needs; of each as many packs as fit, those that run
last forward first: they wait least.  Then the optimizer's state, of the first layers' packs first, as their update ends
the iteration: of as many as fit or fewer, as the host updates others at the same time.
"""

from collections.abc import Callable, Iterator, Sequence

from harmony_lab.plan import Mode, Pack, Plan

__all__ = ["bare", "mirror", "shifted", "stayed", "staying", "stays", "updating"]

Seconds = Callable[[Plan], float | None]
_AS_FAST = 1 + 1e-9  # what stays need not gain time where nothing waits for what it saves: it moves less all the same


def mirror(plan: Plan) -> Plan:
    """The plan with its backward packs for forward too, where each has its device."""
    return plan.with_(
        forward_packs=plan.backward_packs[:-1],
        forward_microbatch_size=plan.backward_microbatch_size,
        mirrored=plan.mode is Mode.PP and plan.num_devices > 1,
    )


def stays(plan: Plan) -> bool:
    """Whether anything of the plan stays on the devices."""
    return bool(plan.mirrored or plan.device_stash or plan.resident_packs or plan.device_updates)


def bare(plan: Plan) -> Plan:
    """The plan with nothing that stays."""
    return plan.with_(device_stash=(), resident_packs=(), kept_packs=(), device_updates=())


def stayed(plan: Plan) -> Plan:
    """The plan with all that ``staying`` can leave on the devices, whether it fits or not: no variant does less."""
    return _saved(plan, plan.forward_packs)


def staying(plan: Plan, seconds: Seconds, updatable: Sequence[Pack] = ()) -> Iterator[tuple[Plan, float]]:
    """Ever faster plans, or as fast ones that move less.

    ``seconds``: of a plan's iteration, None where it does not fit.  ``plan``: as ``mirror`` gives it.  ``updatable``:
    packs that devices may update (``compose.updatable``).
    """
    best = seconds(plan)
    if best is None:
        return
    yield plan, best
    for stay in (_values, _weights, _saved):
        for found in _as_many(stay, plan, best, seconds, plan.forward_packs[::-1], as_fast=_AS_FAST):
            plan, best = found
            yield found
    yield from _as_many(_updates, plan, best, seconds, updatable, or_fewer=True)


def shifted(plan: Plan) -> Iterator[Plan]:
    """One edge between packs moved by a layer, for a plan with the same packs forward and backward; the same packs
    stay; none for another."""
    if plan.forward_packs != plan.backward_packs[:-1]:
        return
    edges = [pack.start for pack in plan.backward_packs] + [plan.num_layers]
    for number in range(1, len(edges) - 1):
        for step in (-1, 1):
            moved = edges.copy()
            moved[number] += step
            if moved[number - 1] < moved[number] < moved[number + 1]:
                packs = tuple(map(Pack, moved, moved[1:]))
                now = dict(zip(plan.backward_packs, packs, strict=True))
                begins = dict(zip(edges, moved, strict=True))
                yield plan.with_(
                    forward_packs=packs[:-1],
                    backward_packs=packs,
                    device_stash=tuple(begins[edge] for edge in plan.device_stash),
                    resident_packs=tuple(now[pack] for pack in plan.resident_packs),
                    kept_packs=tuple(now[pack] for pack in plan.kept_packs),
                    device_updates=tuple(now[pack] for pack in plan.device_updates),
                )


def updating(plan: Plan, seconds: Seconds, updatable: Sequence[Pack]) -> Iterator[tuple[Plan, float]]:
    """As ``staying``, for the optimizer's state alone, of any plan."""
    best = seconds(plan)
    if best is not None:
        yield plan, best
        yield from _as_many(_updates, plan, best, seconds, updatable, or_fewer=True)


def _as_many(
    stay: Callable[[Plan, tuple[Pack, ...]], Plan],
    plan: Plan,
    best: float,
    seconds: Seconds,
    packs: Sequence[Pack],
    *,
    as_fast: float = 1.0,
    or_fewer: bool = False,
) -> Iterator[tuple[Plan, float]]:
    """With as many of the first of these packs as fit, where that takes less than ``as_fast`` times as long; of fewer
    the number that is best among those near it, as far as that is looked for."""

    def of_first(number: int) -> Plan:
        return stay(plan, tuple(sorted(packs[:number])))

    low, high, number = 0, len(packs), 0
    while low < high:
        middle = (low + high + 1) // 2
        found = seconds(of_first(middle))
        if found is None:
            high = middle - 1
            continue
        low = middle
        if found < best * as_fast:
            yield of_first(middle), found
            best, number = min(best, found), middle
    step = min(2, (low + 1) // 2) if or_fewer else 0
    while step:
        for other in (number - step, number + step):
            found = seconds(of_first(other)) if 0 < other < low else None
            if found is not None and found < best:
                yield of_first(other), found
                best, number = found, other
                break
        else:
            step //= 2


def _values(plan: Plan, packs: tuple[Pack, ...]) -> Plan:
    boundaries = [pack.start for pack in packs if pack.start > 0]
    last = plan.fused_pack.start
    if plan.forward_devices(last - 1) == plan.backward_devices(plan.fused_pack):
        boundaries.append(last)
    return plan.with_(device_stash=tuple(boundaries))


def _weights(plan: Plan, packs: tuple[Pack, ...]) -> Plan:
    return plan.with_(resident_packs=packs)


def _updates(plan: Plan, packs: tuple[Pack, ...]) -> Plan:
    return plan.with_(device_updates=packs)


def _saved(plan: Plan, packs: tuple[Pack, ...]) -> Plan:
    resident = [pack for pack in plan.forward_packs if pack in packs or pack in plan.resident_packs]
    return plan.with_(resident_packs=tuple(resident), kept_packs=packs)
