"""lowering of gradients: a pack's are summed over devices and applied: on the host, where they are brought, or on a
device, which brings updated weights; compiled."""

from harmony_lab.compiled import Int, compiled
from harmony_lab.planner.chain_tables import (
    GRADIENT_BYTES,
    GRADIENT_OUT,
    GRADIENT_OUT_BEFORE,
    HOST_ORDER,
    JUST_IN_TIME,
    LAST_BACKWARD,
    NUM_COMPLETE,
    NUM_ON_HOST,
    PEERS,
    PREFETCH,
    REDUCED,
    STAGE_START,
    STAGE_STOP,
    STATE_GRADIENT,
    STATE_OPTIMIZER,
    STATE_WEIGHT,
    TASK_DEVICE,
    TASK_END,
    TASK_STAGE,
    UPDATE_WORKSPACE,
    UPDATED,
    UPDATES_HERE,
    USERS_END,
    Chain,
    begins,
    computed,
    first_task,
    root_task,
)
from harmony_lab.planner.codes import (
    ALL_REDUCE,
    FREE,
    GRADIENT,
    HOST_DEVICE,
    ON_COMPUTE,
    ON_HOST,
    ON_MEMORY,
    ON_PEER_IN,
    ON_SWAP_OUT,
    SWAP_OUT,
    UPDATE,
    WORKSPACE,
    ZERO,
)
from harmony_lab.planner.emit import (
    OPS,
    Construction,
    emit,
    free,
    read,
    temporary,
    wait,
    write,
)

__all__ = ["complete", "update"]

_LEAD = 2  # packs of each device whose gradients may be on the host, or on the way there, at once


@compiled
def complete(c: Construction, k: Chain, task: Int, op: Int) -> None:
    """A device has all gradients of a pack: when every device has, reduce them; bring them out and update, or update
    here."""
    stage = k.tasks[task, TASK_STAGE]
    begin, end = first_task(k, stage), k.stages[stage, TASK_END]
    k.tasks[task, LAST_BACKWARD] = op
    k.stages[stage, NUM_COMPLETE] += 1
    complete = k.stages[stage, NUM_COMPLETE] == end - begin
    if end - begin == 1 or not k.options[PEERS]:
        _gradients_ready(c, k, task, op, op)
    elif complete:
        _all_reduce(c, k, stage, begin, end)
    if k.options[JUST_IN_TIME] and complete and not k.stages[stage, UPDATES_HERE]:
        update(c, k, stage)


@compiled
def _all_reduce(c: Construction, k: Chain, stage: Int, begin: Int, end: Int) -> None:
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    first_op = c.counts[OPS]
    for task in range(begin, end):
        for other in range(begin, end):
            read(c, k.tasks[other, STATE_GRADIENT])
            wait(c, k.tasks[other, LAST_BACKWARD])
        device = k.tasks[task, TASK_DEVICE]
        k.devices[device, REDUCED] = emit(c, ALL_REDUCE, device, ON_PEER_IN, start, stop, ZERO, ZERO)
    last_op = c.counts[OPS] - 1
    root = root_task(k, stage)
    _gradients_ready(c, k, root, first_op, last_op)
    for task in range(begin, end):
        if task != root:
            free(c, k.tasks[task, STATE_GRADIENT])
            emit(c, FREE, k.tasks[task, TASK_DEVICE], ON_MEMORY, start, stop, ZERO, ZERO)


@compiled
def _gradients_ready(c: Construction, k: Chain, task: Int, after_first: Int, after_last: Int) -> None:
    """A device has the sum of a pack's gradients, or its own part where the host sums them up."""
    if k.stages[k.tasks[task, TASK_STAGE], UPDATES_HERE]:
        _update_here(c, k, task, after_first, after_last)
    else:
        _gradients_out(c, k, task, after_first, after_last)


@compiled
def _update_here(c: Construction, k: Chain, task: Int, after_first: Int, after_last: Int) -> None:
    """The optimizer's step on the device, after which the weights go back to the host."""
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    weights, gradients = k.tasks[task, STATE_WEIGHT], k.tasks[task, STATE_GRADIENT]
    for op in range(after_first, after_last + 1):
        wait(c, op)
    read(c, weights)
    read(c, gradients)
    read(c, k.stages[stage, STATE_OPTIMIZER])
    free(c, gradients)
    if k.stages[stage, UPDATE_WORKSPACE] > 0:
        temporary(c, WORKSPACE, device, start, stop, ZERO, ZERO, k.stages[stage, UPDATE_WORKSPACE])
    computed(k, device, emit(c, UPDATE, device, ON_COMPUTE, start, stop, ZERO, ZERO))
    read(c, weights)
    free(c, weights)
    _has_left(k, device, emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, ZERO, ZERO))


@compiled
def _has_left(k: Chain, device: Int, op: Int) -> None:
    """What a backward pack leaves in the end goes out with that op."""
    k.devices[device, GRADIENT_OUT_BEFORE] = k.devices[device, GRADIENT_OUT]
    k.devices[device, GRADIENT_OUT] = op


@compiled
def _gradients_out(c: Construction, k: Chain, task: Int, after_first: Int, after_last: Int) -> None:
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    for op in range(after_first, after_last + 1):
        wait(c, op)
    _wait_for_room(c, k, stage)
    read(c, k.tasks[task, STATE_GRADIENT])
    host = write(c, GRADIENT, HOST_DEVICE, start, stop, ZERO, ZERO, k.stages[stage, GRADIENT_BYTES])
    free(c, k.tasks[task, STATE_GRADIENT])
    _has_left(k, device, emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, ZERO, ZERO))
    position = 0
    if k.host_gradients[stage, 0] < 0:
        k.stages[k.options[NUM_ON_HOST], HOST_ORDER] = stage
        k.options[NUM_ON_HOST] += 1
    while k.host_gradients[stage, position] >= 0:
        position += 1
    k.host_gradients[stage, position] = host


@compiled
def _wait_for_room(c: Construction, k: Chain, stage: Int) -> None:
    """Until the pack a few before has been updated, so that gradients take turns in the host's memory (``places``):
    else a host that is late with its updates would need room for all.

    Not without prefetch, where a device waits for what it sends; nor for gradients that other packs' updates need too.
    """
    if not k.options[PREFETCH] or not k.options[JUST_IN_TIME]:
        return
    position = k.options[NUM_ON_HOST]
    for i in range(k.options[NUM_ON_HOST]):
        if k.stages[i, HOST_ORDER] == stage:  # another device has brought its part
            position = i
    num_parts = k.stages[stage, TASK_END] - first_task(k, stage)
    before = position - _LEAD * (len(k.devices) // num_parts)
    if before >= 0:
        other = k.stages[before, HOST_ORDER]
        begin, end = begins(k.stages, other, USERS_END), k.stages[other, USERS_END]
        if end - begin == 1 and k.users[begin] == other:
            wait(c, k.stages[other, UPDATED])


@compiled
def update(c: Construction, k: Chain, stage: Int) -> None:
    """The optimizer's step for the parameters that the pack owns.

    Gradients of a parameter that packs share wait on the host for the pack of its first layer.
    """
    for i in range(k.options[NUM_ON_HOST]):
        other = k.stages[i, HOST_ORDER]
        begin, end = begins(k.stages, other, USERS_END), k.stages[other, USERS_END]
        uses = False
        for j in range(begin, end):
            uses = uses or k.users[j] == stage
        if uses:
            for position in range(len(k.devices)):
                read(c, k.host_gradients[other, position])
                if k.users[end - 1] == stage:  # the last one
                    free(c, k.host_gradients[other, position])
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    k.stages[stage, UPDATED] = emit(c, UPDATE, HOST_DEVICE, ON_HOST, start, stop, ZERO, ZERO)
