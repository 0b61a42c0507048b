"""Preview: a plan and what it would do, also where it does not fit; and plans made from knobs."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError, PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import balanced_packs
from harmony_lab.program import Program
from harmony_lab.trace import Trace
from harmony_lab.trainer import simulate

__all__ = ["Preview", "Staying", "can_stay", "cuts_of", "preview", "recut", "repacked"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Preview:
    """A plan with what it would do.  One that does not fit is simulated too: ``problem`` says what exceeds what."""

    plan: Plan
    program: Program
    trace: Trace
    problem: str | None = None

    @property
    def fits(self) -> bool:
        return self.problem is None

    def __repr__(self) -> str:
        fits = "" if self.fits else "; does not fit"
        return f"<Preview of {self.plan}{fits}\n {self.trace}>"

    def _repr_html_(self) -> str:
        problem = "" if self.problem is None else f"<p><b>This plan does not fit.</b> {escape(self.problem)}</p>"
        return f"{self.plan._repr_html_()}{problem}{self.trace._repr_html_()}"


def preview(plan: Plan, profile: Profile, machine: Machine) -> Preview:
    """Lower and simulate a plan.  Raises ``PlanError`` for one that does not suit the model or the machine."""
    problem = None
    try:
        program = lower(plan, profile, machine)
    except PlanDoesNotFitError as error:
        problem = str(error)
        program = lower(plan, profile, machine, allow_overrun=True)
    return Preview(plan=plan, program=program, trace=simulate(program, profile, machine), problem=problem)


def repacked(
    plan: Plan,
    profile: Profile,
    *,
    num_forward_packs: int | None = None,
    num_backward_packs: int | None = None,
    num_resident_packs: int | None = None,
    num_kept_packs: int | None = None,
    num_stashed: int | None = None,
    num_device_updates: int | None = None,
    **knobs: Any,
) -> Plan:
    """``plan`` with so many packs, balanced in time, so many of what may stay on the devices, and other ``knobs``.

    Without a number packs stay as they are; forward packs that no longer end where the fused pack starts are balanced,
    as many as they were, or follow the backward packs where they were the same and something stays on the devices.
    Counts beyond one layer per pack are taken as one layer per pack.  What stays are the last of those that can, as
    many as did; of packs that devices update the first, whose update ends the iteration.  Raises ``PlanError`` for
    knobs that break invariants.
    """
    bare = _bare(plan, knobs)
    backward = bare.backward_packs
    if num_backward_packs is not None:
        size = bare.backward_microbatch_size
        backward = _packs(profile, bare.num_layers, num_backward_packs, size, forward=False)
    forward, fused = bare.forward_packs, backward[-1].start
    if num_forward_packs is not None or fused != bare.fused_pack.start or backward != bare.backward_packs:
        if num_forward_packs is None and _in_step(plan):
            forward = backward[:-1]
        elif num_forward_packs is not None or fused != bare.fused_pack.start:
            count = len(forward) if num_forward_packs is None else num_forward_packs
            forward = _packs(profile, fused, count, bare.forward_microbatch_size, forward=True)
    bare = bare.with_(forward_packs=forward, backward_packs=backward)
    stays = _staying(bare, plan, num_resident_packs, num_kept_packs, num_stashed)
    return stays.with_(device_updates=_updated(stays, plan, profile, num_device_updates))


class Staying(NamedTuple):
    """What can stay on the devices under a plan, in the order of the layers (see ``Plan``)."""

    resident_packs: tuple[Pack, ...]
    kept_packs: tuple[Pack, ...]
    device_stash: tuple[int, ...]


def can_stay(plan: Plan) -> Staying:
    """All that can, whether or not there is room; ``kept_packs``: if all of ``resident_packs`` do."""
    backward = set(plan.backward_packs)
    resident = tuple(
        pack
        for pack in plan.forward_packs
        if pack in backward and plan.forward_devices(pack.start) == plan.backward_devices(pack)
    )
    if plan.forward_microbatch_size != plan.backward_microbatch_size:
        return Staying(resident, (), ())
    starts = sorted(pack.start for pack in plan.backward_packs if pack.start > 0)
    return Staying(resident, resident, tuple(start for start in starts if _can_stash(plan, start)))


def _can_stash(plan: Plan, boundary: int) -> bool:
    try:
        plan.with_(device_stash=(boundary,), kept_packs=(), resident_packs=())
    except PlanError:
        return False
    return True


def _bare(plan: Plan, changes: dict[str, Any]) -> Plan:
    """``plan`` with those changes and nothing that stays on the devices; in dp nothing is mirrored."""
    if plan.mirrored and Mode(changes.get("mode", plan.mode)) is Mode.DP:
        changes = {**changes, "mirrored": False}
    return plan.with_(resident_packs=(), kept_packs=(), device_stash=(), device_updates=()).with_(**changes)


def _in_step(plan: Plan) -> bool:
    """Whether forward and backward packs are the same, so that something stays on the devices."""
    stays = plan.mirrored or plan.resident_packs or plan.device_stash
    return bool(stays) and plan.forward_packs == plan.backward_packs[:-1]


def _staying(
    bare: Plan,
    before: Plan,
    num_resident: int | None = None,
    num_kept: int | None = None,
    num_stashed: int | None = None,
) -> Plan:
    """``bare`` with what stayed ``before``, or the last so many of what can."""
    possible = can_stay(bare)
    resident = _last(possible.resident_packs, before.resident_packs, num_resident)
    kept = _last(resident if possible.kept_packs else (), before.kept_packs, num_kept)
    stash = _last(possible.device_stash, before.device_stash, num_stashed)
    return bare.with_(resident_packs=resident, kept_packs=kept, device_stash=stash)


def _updated(bare: Plan, before: Plan, profile: Profile, count: int | None) -> tuple[Pack, ...]:
    """The packs that devices updated ``before``, or the first so many of those that they can."""
    possible = updatable(bare, profile)
    if count is None and set(before.device_updates) <= set(possible):
        return before.device_updates
    return possible[: len(before.device_updates) if count is None else count]


def _last(possible: tuple[Any, ...], before: tuple[Any, ...], count: int | None) -> tuple[Any, ...]:
    if count is None and set(before) <= set(possible):
        return before
    wanted = len(before) if count is None else count
    return possible[max(0, len(possible) - wanted) :]


def _packs(profile: Profile, stop: int, count: int, microbatch_size: int, *, forward: bool) -> tuple[Pack, ...]:
    """The layers before ``stop`` in about ``count`` packs; none where there is no layer."""
    if stop == 0:
        return ()
    return balanced_packs(profile, 0, stop, max(1, min(count, stop)), microbatch_size, forward=forward)


def cuts_of(packs: Iterable[Pack]) -> tuple[int, ...]:
    """The layers before which packs are cut: where all but the first start."""
    return tuple(pack.start for pack in packs)[1:]


def recut(plan: Plan, *, forward_cuts: Iterable[int] | None = None, backward_cuts: Iterable[int] | None = None) -> Plan:
    """``plan`` with packs cut before those layers; without cuts, packs stay.

    Where the fused pack's start moves, forward packs keep the cuts before it and end there, or follow the backward
    packs as in ``repacked``, which also tells what stays on the devices; packs that are still there are updated where
    they were.  Raises ``PlanError`` for a
    cut that is not inside what is to be cut.
    """
    backward = plan.backward_packs
    if backward_cuts is not None:
        backward = _between("backward", backward_cuts, plan.num_layers)
    fused = backward[-1].start
    if forward_cuts is not None:
        forward = _between("forward", forward_cuts, fused)
    elif _in_step(plan):
        forward = backward[:-1]
    else:
        forward = _between("forward", [cut for cut in cuts_of(plan.forward_packs) if cut < fused], fused)
    stays = _staying(_bare(plan, {"forward_packs": forward, "backward_packs": backward}), plan)
    return stays.with_(device_updates=tuple(pack for pack in plan.device_updates if pack in backward))


def _between(way: str, cuts: Iterable[int], stop: int) -> tuple[Pack, ...]:
    inner = sorted(set(cuts))
    outside = [cut for cut in inner if not 0 < cut < stop]
    if outside:
        inside = f"layers 1 to {stop - 1} can start one" if stop > 1 else "there is nothing to cut"
        raise PlanError(
            f"{way} packs cannot be cut there", [f"no pack can start before layer {cut}: {inside}" for cut in outside]
        )
    return tuple(Pack(*edges) for edges in pairwise([0, *inner, stop])) if stop else ()
