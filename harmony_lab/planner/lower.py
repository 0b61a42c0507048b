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

import numpy as np

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.chain import Lowerable, chain
from harmony_lab.planner.chain_tables import (
    BACKWARD_WORKSPACE,
    BATCH_BYTES,
    BUFFER_BYTES,
    CURRENT,
    FETCHED,
    FORWARD_WORKSPACE,
    GRADIENT_BYTES,
    IS_BACKWARD,
    IS_KEPT,
    NEXT_TASK,
    NO_PREFETCH,
    NUM_SIZES,
    RECOMPUTE_WORKSPACE,
    SAVED_BYTES,
    STAGE_START,
    STAGE_STOP,
    TASK_DEVICE,
    TASK_STAGE,
    TWIN,
    UNIT_END,
    UNIT_SIZE,
    VALUE_BYTES,
    VALUE_GRADIENT_BYTES,
    WEIGHT_BYTES,
    Chain,
)
from harmony_lab.planner.compose import validate
from harmony_lab.planner.emit import (
    DOES_NOT_FIT,
    FAILED_BYTES,
    FAILED_DEVICE,
    FAILED_OP,
    FULL,
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
    plan: Plan, profile: Profile, machine: Machine, *, allow_overrun: bool = False, costs: PackCosts | None = None
) -> Program:
    """The Program of one iteration under ``plan``.

    Raises ``PlanError`` where the plan does not suit the model or machine, and ``PlanDoesNotFitError`` where a device's
    memory does not suffice, unless ``allow_overrun``: then the Program exceeds its budgets (to be looked at, not run).
    """
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
    if built.counts[STATUS] == DOES_NOT_FIT:
        built = _with_less_fetched_ahead(made, machine, built)
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


def _with_less_fetched_ahead(made: Lowerable, machine: Machine, built: Construction) -> Construction:
    """What was fetched ahead may be what is too much: such packs are fetched in their turn, one after the other until
    all fits; if nothing fetched ahead does not help, that."""
    ahead = made.chain.tasks[:, NO_PREFETCH]
    if _give_up_hopeless(made.chain, machine):
        built = _lowered(made, machine, allow_overrun=False)
    if built.counts[STATUS] == DOES_NOT_FIT:
        given_up = ahead.copy()
        ahead[:] = 1
        without = _lowered(made, machine, allow_overrun=False)
        if without.counts[STATUS] == DOES_NOT_FIT:
            return without
        ahead[:] = given_up
        built = _lowered(made, machine, allow_overrun=False)
    while built.counts[STATUS] == DOES_NOT_FIT and _give_up_prefetch(made, int(built.counts[FAILED_DEVICE])):
        built = _lowered(made, machine, allow_overrun=False)
    return built


def _give_up_hopeless(k: Chain, machine: Machine) -> bool:
    """Have packs fetched in their turn that certainly do not fit beside what the pack before needs; whether there are
    such.

    That would be found out one by one, each time from the beginning.
    """
    tasks, stages = k.tasks, k.stages
    num_sizes = int(k.options[NUM_SIZES])
    size = k.units[np.concatenate([[0], tasks[:-1, UNIT_END]]), UNIT_SIZE]
    stage = tasks[:, TASK_STAGE]
    state = stages[stage, WEIGHT_BYTES] + stages[stage, BUFFER_BYTES]
    cells = k.cells[stage * num_sizes + size]
    first, last = (k.values[stages[stage, edge] * num_sizes + size] for edge in (STAGE_START, STAGE_STOP))
    held = state + cells[:, BATCH_BYTES] + first[:, VALUE_BYTES]
    gradients = stages[stage, GRADIENT_BYTES] + first[:, VALUE_GRADIENT_BYTES] + last[:, VALUE_GRADIENT_BYTES]
    at_once = np.maximum(cells[:, RECOMPUTE_WORKSPACE], gradients + cells[:, BACKWARD_WORKSPACE])
    backward = held + cells[:, SAVED_BYTES] + at_once
    forward = held + last[:, VALUE_BYTES] + cells[:, FORWARD_WORKSPACE]
    need = np.where(stages[stage, IS_BACKWARD] == 1, backward, forward)
    following = tasks[:, NEXT_TASK]
    comes = (following >= 0) & (stages[stage, IS_KEPT] == 0)
    comes &= (stages[stage[following], IS_BACKWARD] == 0) | (stages[stage[following], TWIN] < 0)  # else it is there
    hopeless = comes & (need + state[following] > np.array(machine.budgets)[tasks[:, TASK_DEVICE]])
    tasks[following[hopeless], NO_PREFETCH] = 1
    return bool(hopeless.any())


def _give_up_prefetch(made: Lowerable, device: int) -> bool:
    """Whether weights came to that device before their turn; then they no longer will."""
    tasks, current = made.chain.tasks, made.chain.devices[device, CURRENT]
    ahead = (tasks[:, TASK_DEVICE] == device) & (tasks[:, FETCHED] == 1) & (tasks[:, TASK_STAGE] > current)
    tasks[ahead, NO_PREFETCH] = 1
    return bool(ahead.any())


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
