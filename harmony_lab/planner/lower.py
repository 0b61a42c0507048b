"""lower: a Plan as a Program, ops on streams with edges for data, order and memory.

One pack's group of microbatches on one device, weights prefetched for the next::

    swap-in     W0     W1                  W2 ...
    values-in      x0    x1    x2    x3    ...
    compute           F0   F1    F2    F3  (next pack)
    values-out           y0   y1    y2    y3

Values have streams of their own, so that a microbatch does not wait behind the weights of a whole pack; both share the
link.  Without prefetch nothing comes meanwhile, and all of it is in one stream.

Everything is buffered twice and no more: inputs of microbatch n wait until n - 2 has been computed, its outputs until
those of n - 2 have left, weights of the pack after next until the present pack's are dropped.  So a device holds what
it can use and no more.
"""

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.chain import Lowerable, chain
from harmony_lab.planner.compose import validate
from harmony_lab.planner.emit import (
    DOES_NOT_FIT,
    FAILED_BYTES,
    FAILED_DEVICE,
    FAILED_OP,
    FULL,
    GIVEN_UP,
    KIND,
    RESIDENT,
    START,
    STATUS,
    STOP,
    Construction,
    columns,
    construction,
)
from harmony_lab.planner.lowering import lower_units
from harmony_lab.planner.overlapping import overlapping
from harmony_lab.planner.pack import PackCosts
from harmony_lab.program import OpKind, Program
from harmony_lab.units import format_bytes

__all__ = ["lower", "lower_forward"]

_OPS_PER_UNIT = 8  # about; where it is more, memory for twice as many is taken
_OP_KINDS = tuple(OpKind)


def lower(
    plan: Plan | str,
    profile: Profile,
    machine: Machine | str,
    *,
    allow_overrun: bool = False,
    costs: PackCosts | None = None,
) -> Program:
    """The Program of one iteration under ``plan``; it and the machine may be given as their texts.

    Raises ``PlanError`` where the plan does not suit the model or machine, and ``PlanDoesNotFitError`` where a device's
    memory does not suffice, unless ``allow_overrun``: then the Program exceeds its budgets (to be looked at, not run).
    """
    plan, machine = Plan.of(plan), Machine.of(machine)
    validate(plan, profile, machine)
    made = chain(plan, profile, machine, costs or PackCosts(profile))
    return _program(plan, made, machine, allow_overrun)


def lower_forward(plan: Plan, profile: Profile, machine: Machine) -> Program:
    """The Program that evaluates one minibatch under ``plan``: the forward of every pack, no gradient, no buffer
    updated.

    Raises what ``lower`` does.
    """
    validate(plan, profile, machine)
    return _program(plan, chain(plan, profile, machine, PackCosts(profile), evaluating=True), machine, False)


def _program(plan: Plan, made: Lowerable, machine: Machine, allow_overrun: bool) -> Program:
    built = _lowered(made, machine, allow_overrun=False)
    while built.counts[STATUS] == DOES_NOT_FIT and built.counts[GIVEN_UP]:  # again, with less fetched ahead
        built = _lowered(made, machine, allow_overrun=False)
    if built.counts[STATUS] == DOES_NOT_FIT:
        if not allow_overrun:
            raise _does_not_fit(built, machine)
        built = _lowered(made, machine, allow_overrun=True)
    resident = tuple(range(int(built.counts[RESIDENT])))
    program = Program.of_columns(
        plan.minibatch_size, plan.num_layers, machine.budgets, *columns(built), resident=resident
    )
    return overlapping(program) if plan.overlapped_update else program


def _lowered(made: Lowerable, machine: Machine, *, allow_overrun: bool) -> Construction:
    room = _OPS_PER_UNIT * len(made.order) + 8 * len(made.chain.tasks) + 64
    while True:
        built = construction(machine.budgets, room, allow_overrun=allow_overrun)
        lower_units(built, made.chain, made.order)
        if built.counts[STATUS] != FULL:
            return built
        room *= 2


def _does_not_fit(built: Construction, machine: Machine) -> PlanDoesNotFitError:
    number, device = int(built.counts[FAILED_OP]), int(built.counts[FAILED_DEVICE])
    needed, budget = int(built.counts[FAILED_BYTES]), machine.budgets[device]
    kind, layers = _OP_KINDS[int(built.ops[number, KIND])], f"{built.ops[number, START]}:{built.ops[number, STOP]}"
    return PlanDoesNotFitError(
        f"{kind} of layers {layers} (op {number}) needs {format_bytes(needed)} on device {device} at once, its budget "
        f"is {format_bytes(budget)}; use smaller packs or microbatches",
        device=device,
        needed_bytes=needed,
        budget_bytes=budget,
    )
