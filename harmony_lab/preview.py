"""Preview: a plan and what it would do, also where it does not fit; and plans made from knobs."""

from dataclasses import dataclass
from typing import Any

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.plan import Pack, Plan
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import balanced_packs
from harmony_lab.program import Program
from harmony_lab.trace import Trace
from harmony_lab.trainer import simulate

__all__ = ["Preview", "preview", "repacked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A plan with what it would do.  One that does not fit is simulated too: ``problem`` says what exceeds what."""

    plan: Plan
    program: Program
    trace: Trace
    problem: str | None = None

    @property
    def fits(self) -> bool:
        return self.problem is None


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
    **knobs: Any,
) -> Plan:
    """``plan`` with so many packs, balanced in time, and other ``knobs`` of ``Plan``.

    Without a number packs stay as they are; forward packs that no longer end where the fused pack starts are balanced,
    as many as they were.  Counts beyond one layer per pack are taken as one layer per pack.  Raises ``PlanError`` for
    knobs that break invariants.
    """
    turned = plan.with_(**knobs)
    backward = turned.backward_packs
    if num_backward_packs is not None:
        size = turned.backward_microbatch_size
        backward = _packs(profile, turned.num_layers, num_backward_packs, size, forward=False)
    forward, fused = turned.forward_packs, backward[-1].start
    if num_forward_packs is not None or fused != turned.fused_pack.start:
        count = len(forward) if num_forward_packs is None else num_forward_packs
        forward = _packs(profile, fused, count, turned.forward_microbatch_size, forward=True)
    return turned.with_(forward_packs=forward, backward_packs=backward)


def _packs(profile: Profile, stop: int, count: int, microbatch_size: int, *, forward: bool) -> tuple[Pack, ...]:
    """The layers before ``stop`` in about ``count`` packs; none where there is no layer."""
    if stop == 0:
        return ()
    return balanced_packs(profile, 0, stop, max(1, min(count, stop)), microbatch_size, forward=forward)
