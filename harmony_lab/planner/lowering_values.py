"""lowering of values: what crosses a boundary, forward and as gradients back: by peer, through the host, or staying on
the device; compiled."""

from harmony_lab.compiled import Bool, Int, compiled
from harmony_lab.planner.chain_tables import (
    BATCH_BYTES,
    CONSUMER,
    GRADIENT_HERE,
    GRADIENT_ON_HOST,
    IS_BACKWARD,
    IS_FUSED,
    IS_STASHED,
    MOST_UNITS,
    NUM_SIZES,
    OFFERED,
    ON_DEVICE,
    OUT,
    OUT_BEFORE,
    PREFETCH,
    PRODUCER,
    SENDS_ON,
    SENT,
    STAGE_START,
    STAGE_STOP,
    TASK_DEVICE,
    TASK_STAGE,
    UNIT_END,
    UNIT_FIRST,
    UNIT_LAST,
    UNIT_SIZE,
    UNIT_TASK,
    VALUE_BYTES,
    VALUE_GRADIENT_BYTES,
    VALUE_HERE,
    Chain,
    first_task,
    first_unit,
    same_samples,
    task_on,
)
from harmony_lab.planner.codes import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    FREE,
    HOST_DEVICE,
    INPUT,
    NONE,
    ON_MEMORY,
    ON_PEER_IN,
    ON_PEER_OUT,
    ON_SWAP_IN,
    ON_SWAP_OUT,
    ON_VALUES_IN,
    ON_VALUES_OUT,
    RECV,
    SEND,
    SWAP_IN,
    SWAP_OUT,
)
from harmony_lab.planner.emit import (
    DEVICE,
    FIRST,
    KIND,
    LAST,
    LAST_READ,
    NUM_BYTES,
    READ_BEFORE,
    READER,
    START,
    STOP,
    Construction,
    emit,
    free,
    read,
    wait,
    write,
)

__all__ = ["fetch_batch", "fetch_gradient", "fetch_value", "gradient_on", "stays_for_backward", "to_host", "value_on"]


@compiled
def fetch_batch(c: Construction, k: Chain, unit: Int, stage: Int, device: Int, room: Int) -> Int:
    """The parts of the batch that the pack reads."""
    num_bytes = k.cells[stage * k.options[NUM_SIZES] + k.units[unit, UNIT_SIZE], BATCH_BYTES]
    if num_bytes == 0:
        return NONE
    start, stop, first, last = (
        k.stages[stage, STAGE_START],
        k.stages[stage, STAGE_STOP],
        k.units[unit, UNIT_FIRST],
        k.units[unit, UNIT_LAST],
    )
    block = write(c, INPUT, device, start, stop, first, last, num_bytes)
    wait(c, room)
    emit(c, SWAP_IN, device, _way_in(k), start, stop, first, last)
    return block


@compiled
def fetch_value(c: Construction, k: Chain, unit: Int, stage: Int, device: Int, last_use: Bool, room: Int) -> Int:
    """The values of the pack's start boundary: already there, from the peer that offers them, or from the host."""
    boundary = k.stages[stage, STAGE_START]
    num_bytes = k.values[boundary * k.options[NUM_SIZES] + k.units[unit, UNIT_SIZE], VALUE_BYTES]
    if num_bytes == 0:
        return NONE
    if k.units[unit, VALUE_HERE] >= 0:
        return k.units[unit, VALUE_HERE]
    if k.units[unit, OFFERED] >= 0 and (not k.stages[stage, IS_BACKWARD] or k.stages[stage, IS_FUSED]):
        return _receive(c, k, unit, ACTIVATION, boundary, device, num_bytes, room)
    first, last = k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    source = k.boundaries[boundary, PRODUCER]
    task = task_on(k, source, device)
    if task < 0:
        task = first_task(k, source)
    begin, end = first_unit(k, task), k.tasks[task, UNIT_END]
    base = first_unit(k, first_task(k, source))
    piece = begin + (first - k.units[begin, UNIT_FIRST]) // (k.units[begin, UNIT_LAST] - k.units[begin, UNIT_FIRST])
    while piece < end and k.units[piece, UNIT_FIRST] < last:
        slot = boundary * k.options[MOST_UNITS] + piece - base
        read(c, k.host_values[slot])
        if last_use and k.units[piece, UNIT_LAST] <= last:
            free(c, k.host_values[slot])
            k.host_values[slot] = NONE
        piece += 1
    return _swap_in(c, k, ACTIVATION, boundary, device, first, last, num_bytes, room)


@compiled
def fetch_gradient(c: Construction, k: Chain, unit: Int, stage: Int, device: Int, room: Int) -> Int:
    """The gradients of the values at the pack's stop boundary."""
    boundary = k.stages[stage, STAGE_STOP]
    num_bytes = k.values[boundary * k.options[NUM_SIZES] + k.units[unit, UNIT_SIZE], VALUE_GRADIENT_BYTES]
    if num_bytes == 0:
        return NONE
    if k.units[unit, GRADIENT_HERE] >= 0:
        return k.units[unit, GRADIENT_HERE]
    if k.units[unit, OFFERED] >= 0:
        return _receive(c, k, unit, ACTIVATION_GRADIENT, boundary, device, num_bytes, room)
    piece = same_samples(k, unit, stage - 1)
    read(c, k.units[piece, GRADIENT_ON_HOST])
    free(c, k.units[piece, GRADIENT_ON_HOST])
    return _swap_in(
        c,
        k,
        ACTIVATION_GRADIENT,
        boundary,
        device,
        k.units[unit, UNIT_FIRST],
        k.units[unit, UNIT_LAST],
        num_bytes,
        room,
    )


@compiled
def _swap_in(
    c: Construction, k: Chain, kind: Int, boundary: Int, device: Int, first: Int, last: Int, num_bytes: Int, room: Int
) -> Int:
    block = write(c, kind, device, boundary, boundary, first, last, num_bytes)
    wait(c, room)
    emit(c, SWAP_IN, device, _way_in(k), boundary, boundary, first, last)
    return block


@compiled
def _way_in(k: Chain) -> Int:
    """The stream of values: not that of the weights that come meanwhile; without prefetch none do."""
    return ON_VALUES_IN if k.options[PREFETCH] > 0 else ON_SWAP_IN


@compiled
def _receive(
    c: Construction,
    k: Chain,
    unit: Int,
    kind: Int,
    boundary: Int,
    device: Int,
    num_bytes: Int,
    room: Int,
) -> Int:
    first, last = k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    offered = k.units[unit, OFFERED]
    source = c.blocks[offered, DEVICE]
    kept_too = False  # on the host, for backward
    link = c.blocks[offered, LAST_READ]
    while link >= 0:
        kept_too = kept_too or c.ops[c.lists[link, READER], KIND] == SWAP_OUT
        link = c.lists[link, READ_BEFORE]
    read(c, offered)
    block = write(c, kind, device, boundary, boundary, first, last, num_bytes)
    if not kept_too:
        free(c, offered)
    wait(c, k.units[unit, SENT])
    wait(c, room)
    emit(c, RECV, device, ON_PEER_IN, boundary, boundary, first, last)
    if kept_too:
        free(c, offered)
        emit(c, FREE, source, ON_MEMORY, boundary, boundary, first, last)
    k.units[unit, OFFERED] = NONE
    return block


@compiled
def _receiver(k: Chain, unit: Int) -> Int:
    """The unit of the next pack that fetches this unit's output directly; -1 where it goes through the host."""
    stage = k.tasks[k.units[unit, UNIT_TASK], TASK_STAGE] + 1
    if (
        stage == len(k.stages)
        or not k.tasks[k.units[unit, UNIT_TASK], SENDS_ON]
        or task_on(k, stage, k.tasks[k.units[unit, UNIT_TASK], TASK_DEVICE]) >= 0
    ):
        return NONE
    return same_samples(k, unit, stage)


@compiled
def value_on(c: Construction, k: Chain, unit: Int, boundary: Int, block: Int) -> None:
    """Values computed by a forward pack: sent to the device that runs the next, kept for backward, or both."""
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    is_output = boundary == k.stages[stage, STAGE_STOP]
    if k.boundaries[boundary, ON_DEVICE] and _kept_here(k, unit, stage, device, boundary, block):
        return
    receiver = _receiver(k, unit) if is_output else NONE
    if receiver >= 0:
        _offer(c, k, unit, receiver, boundary, block)
        if not k.boundaries[boundary, IS_STASHED]:
            return
    host = to_host(c, k, block, receiver < 0)
    base = first_unit(k, first_task(k, stage))
    k.host_values[boundary * k.options[MOST_UNITS] + unit - base] = host


@compiled
def _kept_here(k: Chain, unit: Int, stage: Int, device: Int, boundary: Int, block: Int) -> Bool:
    """Whether the values wait on this device for the pack that needs them next; then that is noted."""
    following = stage + 1 if boundary == k.stages[stage, STAGE_STOP] else k.boundaries[boundary, CONSUMER]
    if task_on(k, following, device) < 0:
        return False
    k.units[same_samples(k, unit, following), VALUE_HERE] = block
    return True


@compiled
def stays_for_backward(k: Chain, unit: Int, stage: Int, device: Int, value: Int) -> Bool:
    """Whether the pack's input waits on this device for the backward pack that starts there; then it is noted."""
    boundary = k.stages[stage, STAGE_START]
    if value < 0 or not k.boundaries[boundary, ON_DEVICE] or k.boundaries[boundary, CONSUMER] < 0:
        return False
    later = same_samples(k, unit, k.boundaries[boundary, CONSUMER])
    k.units[later, VALUE_HERE] = value
    return True


@compiled
def gradient_on(c: Construction, k: Chain, unit: Int, boundary: Int, block: Int) -> None:
    """Gradients of the values at a backward pack's start boundary, for the next backward pack."""
    task = k.units[unit, UNIT_TASK]
    following = k.tasks[task, TASK_STAGE] + 1
    if k.boundaries[boundary, ON_DEVICE] and task_on(k, following, k.tasks[task, TASK_DEVICE]) >= 0:
        k.units[same_samples(k, unit, following), GRADIENT_HERE] = block
        return
    receiver = _receiver(k, unit)
    if receiver >= 0:
        _offer(c, k, unit, receiver, boundary, block)
    else:
        k.units[unit, GRADIENT_ON_HOST] = to_host(c, k, block, True)


@compiled
def _offer(c: Construction, k: Chain, unit: Int, receiver: Int, boundary: Int, block: Int) -> None:
    device = k.tasks[k.units[unit, UNIT_TASK], TASK_DEVICE]
    read(c, block)
    k.units[receiver, SENT] = emit(
        c, SEND, device, ON_PEER_OUT, boundary, boundary, k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    )
    k.units[receiver, OFFERED] = block


@compiled
def to_host(c: Construction, k: Chain, block: Int, drop: Bool) -> Int:
    """Copy a block to the host; returns the host's."""
    row = c.blocks[block]
    device, start, stop, first, last = row[DEVICE], row[START], row[STOP], row[FIRST], row[LAST]
    read(c, block)
    host = write(c, row[KIND], HOST_DEVICE, start, stop, first, last, row[NUM_BYTES])
    if drop:
        free(c, block)
    way = ON_VALUES_OUT if k.options[PREFETCH] > 0 else ON_SWAP_OUT
    op = emit(c, SWAP_OUT, device, way, start, stop, first, last)
    k.devices[device, OUT_BEFORE] = k.devices[device, OUT]
    k.devices[device, OUT] = op
    return host
