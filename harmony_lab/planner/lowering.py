"""lowering: emits the ops of one iteration, microbatch by microbatch; compiled.

``Chain`` holds everything that a plan, a profile and a machine say, as arrays (``chain`` makes it); ``lower_units``
turns it into ops.  Stages are the packs of an iteration in order; a task is a stage on a device, with its microbatches
as units.  Boundary b is where layer b begins.
"""

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.planner.chain_tables import (
    BACKWARD_WORKSPACE,
    BUFFER_BYTES,
    COMPUTED,
    COMPUTED_BEFORE,
    CURRENT,
    FETCHED,
    FORWARD_WORKSPACE,
    GRADIENT_BYTES,
    GRADIENT_OUT_BEFORE,
    HOST_ORDER,
    INPUT_HERE,
    IS_BACKWARD,
    IS_FUSED,
    IS_KEPT,
    IS_STASHED,
    JUST_IN_TIME,
    KEEPS_END,
    NO_PREFETCH,
    NUM_ON_HOST,
    NUM_SIZES,
    OPTIMIZER_BYTES,
    OUT_BEFORE,
    PREFETCH,
    RECOMPUTE_WORKSPACE,
    SAVED_BYTES,
    SAVED_HERE,
    STAGE_START,
    STAGE_STOP,
    STATE_BUFFER,
    STATE_GRADIENT,
    STATE_OPTIMIZER,
    STATE_WEIGHT,
    TASK_DEVICE,
    TASK_STAGE,
    TWIN,
    UNIT_FIRST,
    UNIT_LAST,
    UNIT_SIZE,
    UNIT_TASK,
    UPDATES_BUFFERS,
    UPDATES_HERE,
    VALUE_BYTES,
    VALUE_GRADIENT_BYTES,
    VALUE_HERE,
    WEIGHT_BYTES,
    Chain,
    begins,
    computed,
    is_first,
    is_last,
    reset,
    root_task,
    same_samples,
)
from harmony_lab.planner.codes import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    GRADIENT,
    NONE,
    ON_COMPUTE,
    OPTIMIZER,
    RECOMPUTE,
    SAVED,
    WORKSPACE,
    ZERO,
)
from harmony_lab.planner.emit import (
    BLOCKS,
    BUDGET,
    DOES_NOT_FIT,
    FAILED_BYTES,
    FAILED_DEVICE,
    GIVEN_UP,
    STATUS,
    Construction,
    emit,
    free,
    read,
    resident,
    temporary,
    wait,
    write,
)
from harmony_lab.planner.lowering_gradients import (
    complete,
    update,
)
from harmony_lab.planner.lowering_state import (
    buffers_out,
    drop_state,
    fetch_state,
    prefetch,
)
from harmony_lab.planner.lowering_values import (
    fetch_batch,
    fetch_gradient,
    fetch_value,
    gradient_on,
    stays_for_backward,
    to_host,
    value_on,
)

__all__ = ["lower_units"]


@compiled
def lower_units(c: Construction, k: Chain, order: Ints) -> None:
    """Emit everything, units in the given order.  Ends early where ``c`` says why.

    Where weights that came before their turn may be what is too much, they will no longer, and the rest is emitted as
    if all fitted: so that one pass finds all such weights.  It ends as one that does not fit.
    """
    reset(k)
    _hold_optimizer(c, k)
    for task in range(len(k.tasks)):
        if k.devices[k.tasks[task, TASK_DEVICE], CURRENT] < 0:
            k.devices[k.tasks[task, TASK_DEVICE], CURRENT] = k.tasks[task, TASK_STAGE]
            fetch_state(c, k, task, NONE)
    for i in range(len(order)):
        unit = order[i]
        task = k.units[unit, UNIT_TASK]
        k.devices[k.tasks[task, TASK_DEVICE], CURRENT] = k.tasks[task, TASK_STAGE]
        _unit(c, k, unit)
        if c.counts[STATUS] == DOES_NOT_FIT and _give_up_prefetch(c, k):
            c.counts[STATUS] = 0
        if c.counts[STATUS] != 0:
            return
    if not k.options[JUST_IN_TIME]:
        for i in range(k.options[NUM_ON_HOST]):
            update(c, k, k.stages[i, HOST_ORDER])
    if c.counts[GIVEN_UP] > 0 and c.counts[STATUS] == 0:
        c.counts[STATUS] = DOES_NOT_FIT


@compiled
def _give_up_prefetch(c: Construction, k: Chain) -> Bool:
    """Whether all would fit but for weights that came to that device before their turn; next time they will not, nor
    those after them meanwhile: of several packs' those of the last that suffice.

    Where memory does not suffice every free has been used, so that what is alive without them is known.
    """
    device = c.counts[FAILED_DEVICE]
    budget = c.devices[device, BUDGET]
    nearest: Int = NONE
    for task in range(len(k.tasks) - 1, -1, -1):
        row = k.tasks[task]
        is_ahead = row[TASK_DEVICE] == device and row[FETCHED] == 1 and row[TASK_STAGE] > k.devices[device, CURRENT]
        if is_ahead and c.counts[FAILED_BYTES] > budget:
            nearest = task
            stage = k.stages[row[TASK_STAGE]]
            c.counts[FAILED_BYTES] -= stage[BUFFER_BYTES]
            if stage[IS_BACKWARD] == 0 or stage[TWIN] < 0:  # else its weights never left
                c.counts[FAILED_BYTES] -= stage[WEIGHT_BYTES]
    if c.counts[FAILED_BYTES] > budget:
        c.counts[GIVEN_UP] = 0
        return False
    c.counts[GIVEN_UP] += 1 - k.tasks[nearest, NO_PREFETCH]
    k.tasks[nearest, NO_PREFETCH] = 1
    return True


@compiled
def _hold_optimizer(c: Construction, k: Chain) -> None:
    """The optimizer's state on the devices that update for themselves, there from step to step."""
    for stage in range(len(k.stages)):
        k.stages[stage, STATE_OPTIMIZER] = NONE
        if k.stages[stage, UPDATES_HERE] and k.stages[stage, OPTIMIZER_BYTES] > 0:
            device = k.tasks[root_task(k, stage), TASK_DEVICE]
            start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
            k.stages[stage, STATE_OPTIMIZER] = resident(
                c, OPTIMIZER, device, start, stop, k.stages[stage, OPTIMIZER_BYTES]
            )


@compiled
def _unit(c: Construction, k: Chain, unit: Int) -> None:
    """One microbatch of one pack."""
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    room = k.devices[device, COMPUTED_BEFORE if k.options[PREFETCH] > 0 else COMPUTED]
    opens = is_first(k, unit)
    if opens:  # in its turn, unless it has been prefetched
        fetch_state(c, k, task, k.devices[device, COMPUTED])
    batch = value = gradient = NONE
    if k.stages[stage, IS_BACKWARD] and k.stages[stage, IS_KEPT]:
        batch, value = k.units[unit, INPUT_HERE], k.units[unit, VALUE_HERE]
    else:
        batch = fetch_batch(c, k, unit, stage, device, room)
        last_use = k.stages[stage, IS_BACKWARD] == 1 or k.boundaries[k.stages[stage, STAGE_START], IS_STASHED] == 0
        value = fetch_value(c, k, unit, stage, device, last_use, room)
    if k.stages[stage, IS_BACKWARD] and not k.stages[stage, IS_FUSED]:
        gradient = fetch_gradient(c, k, unit, stage, device, room)
    if opens:
        prefetch(c, k, task, device)
    if k.stages[stage, IS_BACKWARD]:
        _backward(c, k, unit, batch, value, gradient)
    else:
        _forward(c, k, unit, batch, value)
    if k.stages[stage, UPDATES_BUFFERS] and is_last(k, unit):
        buffers_out(c, k, task)


@compiled
def _compute(c: Construction, k: Chain, unit: Int, kind: Int, batch: Int, value: Int, workspace_bytes: Int) -> Int:
    """End a staged compute op, which reads the pack's state and its inputs beside what has been staged."""
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop, first, last = (
        k.stages[stage, STAGE_START],
        k.stages[stage, STAGE_STOP],
        k.units[unit, UNIT_FIRST],
        k.units[unit, UNIT_LAST],
    )
    if workspace_bytes > 0:
        temporary(c, WORKSPACE, device, start, stop, first, last, workspace_bytes)
    return emit(c, kind, device, ON_COMPUTE, start, stop, first, last)


@compiled
def _read_inputs(c: Construction, k: Chain, unit: Int, batch: Int, value: Int) -> None:
    task = k.units[unit, UNIT_TASK]
    read(c, k.tasks[task, STATE_WEIGHT])
    read(c, k.tasks[task, STATE_BUFFER])
    read(c, batch)
    read(c, value)


@compiled
def _forward(c: Construction, k: Chain, unit: Int, batch: Int, value: Int) -> None:
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    size, first, last = k.units[unit, UNIT_SIZE], k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    cell = stage * k.options[NUM_SIZES] + size
    _read_inputs(c, k, unit, batch, value)
    workspace = k.cells[cell, FORWARD_WORKSPACE]
    if k.stages[stage, IS_KEPT]:
        later = same_samples(k, unit, k.stages[stage, TWIN])
        workspace = k.cells[cell, RECOMPUTE_WORKSPACE]
        k.units[later, SAVED_HERE] = write(
            c,
            SAVED,
            device,
            k.stages[stage, STAGE_START],
            k.stages[stage, STAGE_STOP],
            first,
            last,
            k.cells[cell, SAVED_BYTES],
        )
        k.units[later, INPUT_HERE], k.units[later, VALUE_HERE] = batch, value
    begin, end = begins(k.stages, stage, KEEPS_END), k.stages[stage, KEEPS_END]
    written = c.counts[BLOCKS]
    for i in range(begin, end):
        b = k.keeps[i]
        write(c, ACTIVATION, device, b, b, first, last, k.values[b * k.options[NUM_SIZES] + size, VALUE_BYTES])
    if not k.stages[stage, IS_KEPT]:
        free(c, batch)
        if not stays_for_backward(k, unit, stage, device, value):
            free(c, value)
    drop_state(c, k, unit)
    wait(c, k.devices[device, OUT_BEFORE])
    op = _compute(c, k, unit, FORWARD, batch, value, workspace)
    computed(k, device, op)
    for i in range(begin, end):
        value_on(c, k, unit, k.keeps[i], written + i - begin)


@compiled
def _backward(c: Construction, k: Chain, unit: Int, batch: Int, value: Int, gradient: Int) -> None:
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop, first, last = (
        k.stages[stage, STAGE_START],
        k.stages[stage, STAGE_STOP],
        k.units[unit, UNIT_FIRST],
        k.units[unit, UNIT_LAST],
    )
    size = k.units[unit, UNIT_SIZE]
    opens = is_first(k, unit)
    saved = k.units[unit, SAVED_HERE]
    if saved < 0:
        saved = _forward_that_saves(c, k, unit, batch, value)
    _read_inputs(c, k, unit, batch, value)
    read(c, saved)
    read(c, gradient)
    accumulated = k.tasks[task, STATE_GRADIENT]
    read(c, accumulated)
    if opens and k.stages[stage, GRADIENT_BYTES] > 0:
        k.tasks[task, STATE_GRADIENT] = write(
            c, GRADIENT, device, start, stop, ZERO, ZERO, k.stages[stage, GRADIENT_BYTES]
        )
    passed = NONE
    gradient_bytes = k.values[start * k.options[NUM_SIZES] + size, VALUE_GRADIENT_BYTES]
    if stage + 1 < len(k.stages) and gradient_bytes > 0:
        passed = write(c, ACTIVATION_GRADIENT, device, start, start, first, last, gradient_bytes)
    free(c, batch)
    free(c, value)
    free(c, saved)
    free(c, gradient)
    drop_state(c, k, unit)
    wait(c, k.devices[device, OUT_BEFORE])
    if opens:
        wait(c, k.devices[device, GRADIENT_OUT_BEFORE])
    op = _compute(c, k, unit, BACKWARD, batch, value, k.cells[stage * k.options[NUM_SIZES] + size, BACKWARD_WORKSPACE])
    computed(k, device, op)
    if passed >= 0:
        gradient_on(c, k, unit, start, passed)
    if k.stages[stage, GRADIENT_BYTES] > 0 and is_last(k, unit):
        complete(c, k, task, op)


@compiled
def _forward_that_saves(c: Construction, k: Chain, unit: Int, batch: Int, value: Int) -> Int:
    """The forward with gradient before a backward: the fused pack's only one, with the loss; others' recompute."""
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop, first, last = (
        k.stages[stage, STAGE_START],
        k.stages[stage, STAGE_STOP],
        k.units[unit, UNIT_FIRST],
        k.units[unit, UNIT_LAST],
    )
    size = k.units[unit, UNIT_SIZE]
    cell = stage * k.options[NUM_SIZES] + size
    _read_inputs(c, k, unit, batch, value)
    saved = write(c, SAVED, device, start, stop, first, last, k.cells[cell, SAVED_BYTES])
    if not k.stages[stage, IS_FUSED]:
        _compute(c, k, unit, RECOMPUTE, batch, value, k.cells[cell, RECOMPUTE_WORKSPACE])
        return saved
    loss = write(
        c, ACTIVATION, device, stop, stop, first, last, k.values[stop * k.options[NUM_SIZES] + size, VALUE_BYTES]
    )
    _compute(c, k, unit, FORWARD, batch, value, k.cells[cell, RECOMPUTE_WORKSPACE])
    to_host(c, k, loss, True)
    return saved
