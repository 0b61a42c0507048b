"""lowering of state: a pack's weights and buffers come, stay and go; compiled."""

from harmony_lab.compiled import Int, compiled
from harmony_lab.planner.chain_tables import (
    BUFFER_BYTES,
    BUFFERS_OUT,
    COMPUTED,
    FETCHED,
    GRADIENT_OUT,
    IS_BACKWARD,
    NEXT_TASK,
    NO_PREFETCH,
    OUT,
    PREFETCH,
    REDUCED,
    STAGE_START,
    STAGE_STOP,
    STATE_BUFFER,
    STATE_WEIGHT,
    TASK_DEVICE,
    TASK_STAGE,
    TWIN,
    UNIT_TASK,
    UPDATES_BUFFERS,
    UPDATES_HERE,
    WEIGHT_BYTES,
    Chain,
    is_last,
    root_task,
    task_on,
)
from harmony_lab.planner.codes import (
    BUFFER,
    ON_SWAP_IN,
    ON_SWAP_OUT,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT,
    ZERO,
)
from harmony_lab.planner.emit import (
    STATUS,
    Construction,
    emit,
    free,
    read,
    wait,
    write,
)

__all__ = ["buffers_out", "drop_state", "fetch_state", "prefetch"]


@compiled
def fetch_state(c: Construction, k: Chain, task: Int, after: Int) -> None:
    if k.tasks[task, FETCHED] or c.counts[STATUS] != 0:
        return
    k.tasks[task, FETCHED] = 1
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    if k.stages[stage, IS_BACKWARD] and k.stages[stage, TWIN] >= 0:  # its weights never left
        k.tasks[task, STATE_WEIGHT] = k.tasks[task_on(k, k.stages[stage, TWIN], device), STATE_WEIGHT]
    elif k.stages[stage, WEIGHT_BYTES] > 0:
        k.tasks[task, STATE_WEIGHT] = write(c, WEIGHT, device, start, stop, ZERO, ZERO, k.stages[stage, WEIGHT_BYTES])
    if k.stages[stage, BUFFER_BYTES] > 0:
        k.tasks[task, STATE_BUFFER] = write(c, BUFFER, device, start, stop, ZERO, ZERO, k.stages[stage, BUFFER_BYTES])
    elif k.tasks[task, STATE_WEIGHT] < 0 or (k.stages[stage, IS_BACKWARD] and k.stages[stage, TWIN] >= 0):
        return
    wait(c, after)
    if k.options[PREFETCH] == 0:  # not before what the packs before made has left
        wait(c, k.devices[device, OUT])
        wait(c, k.devices[device, GRADIENT_OUT])
        wait(c, k.devices[device, REDUCED])
        wait(c, k.devices[device, BUFFERS_OUT])
    emit(c, SWAP_IN, device, ON_SWAP_IN, start, stop, ZERO, ZERO)


@compiled
def prefetch(c: Construction, k: Chain, task: Int, device: Int) -> None:
    later = k.tasks[task, NEXT_TASK]
    for _ in range(k.options[PREFETCH]):
        if later < 0 or k.tasks[later, NO_PREFETCH]:
            return
        fetch_state(c, k, later, k.devices[device, COMPUTED])
        later = k.tasks[later, NEXT_TASK]


@compiled
def drop_state(c: Construction, k: Chain, unit: Int) -> None:
    """The pack's last op frees its state; buffers that forward has updated stay until they are swapped out, weights
    that are updated here until then."""
    if not is_last(k, unit):
        return
    task = k.units[unit, UNIT_TASK]
    stage = k.tasks[task, TASK_STAGE]
    is_updated = k.stages[stage, UPDATES_HERE] == 1 and task == root_task(k, stage)
    if not is_updated and (k.stages[stage, IS_BACKWARD] or k.stages[stage, TWIN] < 0):
        free(c, k.tasks[task, STATE_WEIGHT])
    if not k.stages[stage, UPDATES_BUFFERS]:
        free(c, k.tasks[task, STATE_BUFFER])


@compiled
def buffers_out(c: Construction, k: Chain, task: Int) -> None:
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    read(c, k.tasks[task, STATE_BUFFER])
    free(c, k.tasks[task, STATE_BUFFER])
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    k.devices[device, BUFFERS_OUT] = emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, ZERO, ZERO)
