"""lowering: emits the ops of one iteration, microbatch by microbatch; compiled.

``Chain`` holds everything that a plan, a profile and a machine say, as arrays (``chain`` makes it); ``lower_units``
turns it into ops.  Stages are the packs of an iteration in order; a task is a stage on a device, with its microbatches
as units.  Boundary b is where layer b begins.
"""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.machine import HOST
from harmony_lab.planner.emit import (
    BLOCKS,
    DEVICE,
    FIRST,
    KIND,
    LAST,
    LAST_READ,
    NUM_BYTES,
    OPS,
    READ_BEFORE,
    READER,
    START,
    STATUS,
    STOP,
    Construction,
    emit,
    free,
    read,
    temporary,
    wait,
    write,
)
from harmony_lab.program import OP_CODES, STREAM_CODES, TENSOR_CODES, OpKind, Stream, TensorKind

__all__ = ["Chain", "lower_units"]

# Constants that are arguments of compiled functions are int64: with plain ones each would be compiled anew.
FORWARD, RECOMPUTE, BACKWARD, UPDATE, SWAP_IN, SWAP_OUT, SEND, RECV, ALL_REDUCE, FREE = (
    np.int64(OP_CODES[kind]) for kind in OpKind
)
ON_COMPUTE, ON_SWAP_IN, ON_SWAP_OUT, ON_PEER_IN, ON_PEER_OUT, ON_HOST, ON_MEMORY = (
    np.int64(STREAM_CODES[stream]) for stream in Stream
)
WEIGHT, BUFFER, GRADIENT, INPUT, ACTIVATION, ACTIVATION_GRADIENT, SAVED, WORKSPACE, OPTIMIZER = (
    np.int64(TENSOR_CODES[kind]) for kind in TensorKind
)
HOST_DEVICE, NONE, ZERO = np.int64(HOST), np.int64(-1), np.int64(0)

# columns of Chain's tables
NUM_SIZES, MOST_UNITS, PREFETCH, PEERS, JUST_IN_TIME, NUM_ON_HOST = 0, 1, 2, 3, 4, 5  # of options
STAGE_START, STAGE_STOP, IS_BACKWARD, IS_FUSED, WEIGHT_BYTES, BUFFER_BYTES, GRADIENT_BYTES = 0, 1, 2, 3, 4, 5, 6
UPDATES_BUFFERS, TASK_END, KEEPS_END, TWIN, IS_KEPT, USERS_END, NUM_COMPLETE, HOST_ORDER = 7, 8, 9, 10, 11, 12, 13, 14
TASK_STAGE, TASK_DEVICE, UNIT_END, NEXT_TASK, NO_PREFETCH = 0, 1, 2, 3, 4  # of tasks
FETCHED, STATE_WEIGHT, STATE_BUFFER, STATE_GRADIENT, LAST_BACKWARD = 5, 6, 7, 8, 9
UNIT_TASK, UNIT_FIRST, UNIT_LAST, UNIT_SIZE = 0, 1, 2, 3  # of units
OFFERED, SENT, VALUE_HERE, GRADIENT_HERE, GRADIENT_ON_HOST, SAVED_HERE, INPUT_HERE = 4, 5, 6, 7, 8, 9, 10
BATCH_BYTES, FORWARD_WORKSPACE, SAVED_BYTES, RECOMPUTE_WORKSPACE, BACKWARD_WORKSPACE = 0, 1, 2, 3, 4  # of cells
VALUE_BYTES, VALUE_GRADIENT_BYTES = 0, 1  # of values
IS_STASHED, ON_DEVICE, PRODUCER, CONSUMER = 0, 1, 2, 3  # of boundaries
COMPUTED, COMPUTED_BEFORE, OUT, OUT_BEFORE, GRADIENT_OUT, GRADIENT_OUT_BEFORE = (
    0,
    1,
    2,
    3,
    4,
    5,
)  # of devices: newest ops
REDUCED, CURRENT, BUFFERS_OUT = 6, 7, 8
NUM_COLUMNS = {"stages": 15, "tasks": 10, "units": 11, "cells": 5, "values": 2, "boundaries": 4, "devices": 9}


class Chain(NamedTuple):
    """What is to be lowered, and where lowering stands; -1: none.

    ``X_END``: the rows of X that belong to a row end there, they begin where those of the row before end.  Sizes number
    the different microbatch sizes.

    Of stages: ``KEEPS_END`` and ``USERS_END`` cut ``keeps`` (boundaries whose values a forward stage keeps) and
    ``users`` (stages whose update needs a stage's gradients).  ``TWIN``: of a backward stage, the forward stage of the
    same pack whose weights stay, and the other way round.  ``IS_KEPT``: its forward keeps what backward needs.  Of
    boundaries: whether the host (``IS_STASHED``) or the device (``ON_DEVICE``) keeps its values for backward, the
    forward stage that computes them, the backward stage that starts there.
    """

    options: Ints
    stages: Ints
    tasks: Ints
    units: Ints
    cells: Ints  # row stage · num_sizes + size
    values: Ints  # row boundary · num_sizes + size
    boundaries: Ints
    keeps: Ints
    users: Ints
    devices: Ints
    host_values: Ints  # row boundary · most_units + unit of its producer: block on the host
    host_gradients: Ints  # row stage, a column per device: block on the host


@compiled
def _reset(k: Chain) -> None:
    """Nothing lowered yet."""
    k.options[NUM_ON_HOST] = 0
    k.stages[:, NUM_COMPLETE:] = 0
    k.tasks[:, FETCHED] = 0
    k.tasks[:, FETCHED + 1 :] = NONE
    k.units[:, OFFERED:] = NONE
    k.devices[:] = NONE
    k.host_values[:] = NONE
    k.host_gradients[:] = NONE


@compiled
def lower_units(c: Construction, k: Chain, order: Ints) -> None:
    """Emit everything, units in the given order.  Ends early where ``c`` says why."""
    _reset(k)
    for task in range(len(k.tasks)):
        if k.devices[k.tasks[task, TASK_DEVICE], CURRENT] < 0:
            k.devices[k.tasks[task, TASK_DEVICE], CURRENT] = k.tasks[task, TASK_STAGE]
            _fetch_state(c, k, task, NONE)
    for i in range(len(order)):
        unit = order[i]
        task = k.units[unit, UNIT_TASK]
        k.devices[k.tasks[task, TASK_DEVICE], CURRENT] = k.tasks[task, TASK_STAGE]
        _unit(c, k, unit)
        if c.counts[STATUS] != 0:
            return
    if not k.options[JUST_IN_TIME]:
        for i in range(k.options[NUM_ON_HOST]):
            _update(c, k, k.stages[i, HOST_ORDER])


@compiled
def _begins(table: Ints, row: Int, column: Int) -> Int:
    return table[row - 1, column] if row > 0 else 0


@compiled
def _first_task(k: Chain, stage: Int) -> Int:
    return _begins(k.stages, stage, TASK_END)


@compiled
def _first_unit(k: Chain, task: Int) -> Int:
    return _begins(k.tasks, task, UNIT_END)


@compiled
def _is_first(k: Chain, unit: Int) -> Bool:
    return unit == 0 or k.units[unit - 1, UNIT_TASK] != k.units[unit, UNIT_TASK]


@compiled
def _is_last(k: Chain, unit: Int) -> Bool:
    return unit + 1 == len(k.units) or k.units[unit + 1, UNIT_TASK] != k.units[unit, UNIT_TASK]


@compiled
def _unit(c: Construction, k: Chain, unit: Int) -> None:
    """One microbatch of one pack."""
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    room = k.devices[device, COMPUTED_BEFORE if k.options[PREFETCH] > 0 else COMPUTED]
    is_first = _is_first(k, unit)
    if is_first:  # in its turn, unless it has been prefetched
        _fetch_state(c, k, task, k.devices[device, COMPUTED])
    batch = value = gradient = NONE
    if k.stages[stage, IS_BACKWARD] and k.stages[stage, IS_KEPT]:
        batch, value = k.units[unit, INPUT_HERE], k.units[unit, VALUE_HERE]
    else:
        batch = _fetch_batch(c, k, unit, stage, device, room)
        last_use = k.stages[stage, IS_BACKWARD] == 1 or k.boundaries[k.stages[stage, STAGE_START], IS_STASHED] == 0
        value = _fetch_value(c, k, unit, stage, device, last_use, room)
    if k.stages[stage, IS_BACKWARD] and not k.stages[stage, IS_FUSED]:
        gradient = _fetch_gradient(c, k, unit, stage, device, room)
    if is_first:
        _prefetch(c, k, task, device)
    if k.stages[stage, IS_BACKWARD]:
        _backward(c, k, unit, batch, value, gradient)
    else:
        _forward(c, k, unit, batch, value)
    if k.stages[stage, UPDATES_BUFFERS] and _is_last(k, unit):
        _buffers_out(c, k, task)


# -- weights and buffers ----------------------------------------------------------------------------------------------


@compiled
def _fetch_state(c: Construction, k: Chain, task: Int, after: Int) -> None:
    if k.tasks[task, FETCHED] or c.counts[STATUS] != 0:
        return
    k.tasks[task, FETCHED] = 1
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    if k.stages[stage, IS_BACKWARD] and k.stages[stage, TWIN] >= 0:  # its weights never left
        k.tasks[task, STATE_WEIGHT] = k.tasks[_task_on(k, k.stages[stage, TWIN], device), STATE_WEIGHT]
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
def _task_on(k: Chain, stage: Int, device: Int) -> Int:
    for task in range(_first_task(k, stage), k.stages[stage, TASK_END]):
        if k.tasks[task, TASK_DEVICE] == device:
            return task
    return NONE


@compiled
def _prefetch(c: Construction, k: Chain, task: Int, device: Int) -> None:
    later = k.tasks[task, NEXT_TASK]
    for _ in range(k.options[PREFETCH]):
        if later < 0 or k.tasks[later, NO_PREFETCH]:
            return
        _fetch_state(c, k, later, k.devices[device, COMPUTED])
        later = k.tasks[later, NEXT_TASK]


@compiled
def _drop_state(c: Construction, k: Chain, unit: Int) -> None:
    """The pack's last op frees its state; buffers that forward has updated stay until they are swapped out."""
    if not _is_last(k, unit):
        return
    task = k.units[unit, UNIT_TASK]
    stage = k.tasks[task, TASK_STAGE]
    if k.stages[stage, IS_BACKWARD] or k.stages[stage, TWIN] < 0:
        free(c, k.tasks[task, STATE_WEIGHT])
    if not k.stages[stage, UPDATES_BUFFERS]:
        free(c, k.tasks[task, STATE_BUFFER])


@compiled
def _buffers_out(c: Construction, k: Chain, task: Int) -> None:
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    read(c, k.tasks[task, STATE_BUFFER])
    free(c, k.tasks[task, STATE_BUFFER])
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    k.devices[device, BUFFERS_OUT] = emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, ZERO, ZERO)


# -- what comes in ----------------------------------------------------------------------------------------------------


@compiled
def _fetch_batch(c: Construction, k: Chain, unit: Int, stage: Int, device: Int, room: Int) -> Int:
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
    emit(c, SWAP_IN, device, ON_SWAP_IN, start, stop, first, last)
    return block


@compiled
def _fetch_value(c: Construction, k: Chain, unit: Int, stage: Int, device: Int, last_use: Bool, room: Int) -> Int:
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
    task = _task_on(k, source, device)
    if task < 0:
        task = _first_task(k, source)
    begin, end = _first_unit(k, task), k.tasks[task, UNIT_END]
    base = _first_unit(k, _first_task(k, source))
    piece = begin + (first - k.units[begin, UNIT_FIRST]) // (k.units[begin, UNIT_LAST] - k.units[begin, UNIT_FIRST])
    while piece < end and k.units[piece, UNIT_FIRST] < last:
        slot = boundary * k.options[MOST_UNITS] + piece - base
        read(c, k.host_values[slot])
        if last_use and k.units[piece, UNIT_LAST] <= last:
            free(c, k.host_values[slot])
            k.host_values[slot] = NONE
        piece += 1
    return _swap_in(c, ACTIVATION, boundary, device, first, last, num_bytes, room)


@compiled
def _fetch_gradient(c: Construction, k: Chain, unit: Int, stage: Int, device: Int, room: Int) -> Int:
    """The gradients of the values at the pack's stop boundary."""
    boundary = k.stages[stage, STAGE_STOP]
    num_bytes = k.values[boundary * k.options[NUM_SIZES] + k.units[unit, UNIT_SIZE], VALUE_GRADIENT_BYTES]
    if num_bytes == 0:
        return NONE
    if k.units[unit, GRADIENT_HERE] >= 0:
        return k.units[unit, GRADIENT_HERE]
    if k.units[unit, OFFERED] >= 0:
        return _receive(c, k, unit, ACTIVATION_GRADIENT, boundary, device, num_bytes, room)
    piece = _same_samples(k, unit, stage - 1)
    read(c, k.units[piece, GRADIENT_ON_HOST])
    free(c, k.units[piece, GRADIENT_ON_HOST])
    return _swap_in(
        c, ACTIVATION_GRADIENT, boundary, device, k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST], num_bytes, room
    )


@compiled
def _swap_in(
    c: Construction, kind: Int, boundary: Int, device: Int, first: Int, last: Int, num_bytes: Int, room: Int
) -> Int:
    block = write(c, kind, device, boundary, boundary, first, last, num_bytes)
    wait(c, room)
    emit(c, SWAP_IN, device, ON_SWAP_IN, boundary, boundary, first, last)
    return block


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
def _same_samples(k: Chain, unit: Int, stage: Int) -> Int:
    """The unit of another stage that has the same samples, of the same device where it can be; -1: none."""
    first, last = k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    task = _task_on(k, stage, k.tasks[k.units[unit, UNIT_TASK], TASK_DEVICE])
    if task < 0:
        task = _first_task(k, stage)
    begin = _first_unit(k, task)
    if first < k.units[begin, UNIT_FIRST]:
        return NONE
    other = begin + (first - k.units[begin, UNIT_FIRST]) // (k.units[begin, UNIT_LAST] - k.units[begin, UNIT_FIRST])
    if other < k.tasks[task, UNIT_END] and k.units[other, UNIT_FIRST] == first and k.units[other, UNIT_LAST] == last:
        return other
    return NONE


# -- computing --------------------------------------------------------------------------------------------------------


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
def _computed(k: Chain, device: Int, op: Int) -> None:
    k.devices[device, COMPUTED_BEFORE] = k.devices[device, COMPUTED]
    k.devices[device, COMPUTED] = op


@compiled
def _forward(c: Construction, k: Chain, unit: Int, batch: Int, value: Int) -> None:
    task = k.units[unit, UNIT_TASK]
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    size, first, last = k.units[unit, UNIT_SIZE], k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    cell = stage * k.options[NUM_SIZES] + size
    _read_inputs(c, k, unit, batch, value)
    workspace = k.cells[cell, FORWARD_WORKSPACE]
    if k.stages[stage, IS_KEPT]:
        later = _same_samples(k, unit, k.stages[stage, TWIN])
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
    begin, end = _begins(k.stages, stage, KEEPS_END), k.stages[stage, KEEPS_END]
    written = c.counts[BLOCKS]
    for i in range(begin, end):
        b = k.keeps[i]
        write(c, ACTIVATION, device, b, b, first, last, k.values[b * k.options[NUM_SIZES] + size, VALUE_BYTES])
    if not k.stages[stage, IS_KEPT]:
        free(c, batch)
        if not _stays_for_backward(k, unit, stage, device, value):
            free(c, value)
    _drop_state(c, k, unit)
    wait(c, k.devices[device, OUT_BEFORE])
    op = _compute(c, k, unit, FORWARD, batch, value, workspace)
    _computed(k, device, op)
    for i in range(begin, end):
        _value_on(c, k, unit, k.keeps[i], written + i - begin)


@compiled
def _stays_for_backward(k: Chain, unit: Int, stage: Int, device: Int, value: Int) -> Bool:
    """Whether the pack's input waits on this device for the backward pack that starts there; then it is noted."""
    boundary = k.stages[stage, STAGE_START]
    if value < 0 or not k.boundaries[boundary, ON_DEVICE] or k.boundaries[boundary, CONSUMER] < 0:
        return False
    later = _same_samples(k, unit, k.boundaries[boundary, CONSUMER])
    k.units[later, VALUE_HERE] = value
    return True


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
    is_first = _is_first(k, unit)
    saved = k.units[unit, SAVED_HERE]
    if saved < 0:
        saved = _forward_that_saves(c, k, unit, batch, value)
    _read_inputs(c, k, unit, batch, value)
    read(c, saved)
    read(c, gradient)
    accumulated = k.tasks[task, STATE_GRADIENT]
    read(c, accumulated)
    if is_first and k.stages[stage, GRADIENT_BYTES] > 0:
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
    _drop_state(c, k, unit)
    wait(c, k.devices[device, OUT_BEFORE])
    if is_first:
        wait(c, k.devices[device, GRADIENT_OUT_BEFORE])
    op = _compute(c, k, unit, BACKWARD, batch, value, k.cells[stage * k.options[NUM_SIZES] + size, BACKWARD_WORKSPACE])
    _computed(k, device, op)
    if passed >= 0:
        _gradient_on(c, k, unit, start, passed)
    if k.stages[stage, GRADIENT_BYTES] > 0 and _is_last(k, unit):
        _complete(c, k, task, op)


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
    _to_host(c, k, loss, True)
    return saved


# -- what goes on -----------------------------------------------------------------------------------------------------


@compiled
def _receiver(k: Chain, unit: Int) -> Int:
    """The unit of the next pack that fetches this unit's output directly; -1 where it goes through the host."""
    stage = k.tasks[k.units[unit, UNIT_TASK], TASK_STAGE] + 1
    if (
        stage == len(k.stages)
        or not k.options[PEERS]
        or _task_on(k, stage, k.tasks[k.units[unit, UNIT_TASK], TASK_DEVICE]) >= 0
    ):
        return NONE
    return _same_samples(k, unit, stage)


@compiled
def _value_on(c: Construction, k: Chain, unit: Int, boundary: Int, block: Int) -> None:
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
    host = _to_host(c, k, block, receiver < 0)
    base = _first_unit(k, _first_task(k, stage))
    k.host_values[boundary * k.options[MOST_UNITS] + unit - base] = host


@compiled
def _kept_here(k: Chain, unit: Int, stage: Int, device: Int, boundary: Int, block: Int) -> Bool:
    """Whether the values wait on this device for the pack that needs them next; then that is noted."""
    following = stage + 1 if boundary == k.stages[stage, STAGE_STOP] else k.boundaries[boundary, CONSUMER]
    if _task_on(k, following, device) < 0:
        return False
    k.units[_same_samples(k, unit, following), VALUE_HERE] = block
    return True


@compiled
def _gradient_on(c: Construction, k: Chain, unit: Int, boundary: Int, block: Int) -> None:
    """Gradients of the values at a backward pack's start boundary, for the next backward pack."""
    task = k.units[unit, UNIT_TASK]
    following = k.tasks[task, TASK_STAGE] + 1
    if k.boundaries[boundary, ON_DEVICE] and _task_on(k, following, k.tasks[task, TASK_DEVICE]) >= 0:
        k.units[_same_samples(k, unit, following), GRADIENT_HERE] = block
        return
    receiver = _receiver(k, unit)
    if receiver >= 0:
        _offer(c, k, unit, receiver, boundary, block)
    else:
        k.units[unit, GRADIENT_ON_HOST] = _to_host(c, k, block, True)


@compiled
def _offer(c: Construction, k: Chain, unit: Int, receiver: Int, boundary: Int, block: Int) -> None:
    device = k.tasks[k.units[unit, UNIT_TASK], TASK_DEVICE]
    read(c, block)
    k.units[receiver, SENT] = emit(
        c, SEND, device, ON_PEER_OUT, boundary, boundary, k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    )
    k.units[receiver, OFFERED] = block


@compiled
def _to_host(c: Construction, k: Chain, block: Int, drop: Bool) -> Int:
    """Copy a block to the host; returns the host's."""
    row = c.blocks[block]
    device, start, stop, first, last = row[DEVICE], row[START], row[STOP], row[FIRST], row[LAST]
    read(c, block)
    host = write(c, row[KIND], HOST_DEVICE, start, stop, first, last, row[NUM_BYTES])
    if drop:
        free(c, block)
    op = emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, first, last)
    k.devices[device, OUT_BEFORE] = k.devices[device, OUT]
    k.devices[device, OUT] = op
    return host


# -- gradients of parameters ------------------------------------------------------------------------------------------


@compiled
def _complete(c: Construction, k: Chain, task: Int, op: Int) -> None:
    """A device has all gradients of a pack: when every device has, reduce them; bring them out; update."""
    stage = k.tasks[task, TASK_STAGE]
    begin, end = _first_task(k, stage), k.stages[stage, TASK_END]
    k.tasks[task, LAST_BACKWARD] = op
    k.stages[stage, NUM_COMPLETE] += 1
    complete = k.stages[stage, NUM_COMPLETE] == end - begin
    if end - begin == 1 or not k.options[PEERS]:
        _gradients_out(c, k, task, op, op)
    elif complete:
        _all_reduce(c, k, stage, begin, end)
    if k.options[JUST_IN_TIME] and complete:
        _update(c, k, stage)


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
    root = begin + stage % (end - begin)  # packs take turns, so that every device's link carries some
    _gradients_out(c, k, root, first_op, last_op)
    for task in range(begin, end):
        if task != root:
            free(c, k.tasks[task, STATE_GRADIENT])
            emit(c, FREE, k.tasks[task, TASK_DEVICE], ON_MEMORY, start, stop, ZERO, ZERO)


@compiled
def _gradients_out(c: Construction, k: Chain, task: Int, after_first: Int, after_last: Int) -> None:
    stage, device = k.tasks[task, TASK_STAGE], k.tasks[task, TASK_DEVICE]
    start, stop = k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP]
    for op in range(after_first, after_last + 1):
        wait(c, op)
    read(c, k.tasks[task, STATE_GRADIENT])
    host = write(c, GRADIENT, HOST_DEVICE, start, stop, ZERO, ZERO, k.stages[stage, GRADIENT_BYTES])
    free(c, k.tasks[task, STATE_GRADIENT])
    op = emit(c, SWAP_OUT, device, ON_SWAP_OUT, start, stop, ZERO, ZERO)
    k.devices[device, GRADIENT_OUT_BEFORE] = k.devices[device, GRADIENT_OUT]
    k.devices[device, GRADIENT_OUT] = op
    position = 0
    if k.host_gradients[stage, 0] < 0:
        k.stages[k.options[NUM_ON_HOST], HOST_ORDER] = stage
        k.options[NUM_ON_HOST] += 1
    while k.host_gradients[stage, position] >= 0:
        position += 1
    k.host_gradients[stage, position] = host


@compiled
def _update(c: Construction, k: Chain, stage: Int) -> None:
    """The optimizer's step for the parameters that the pack owns.

    Gradients of a parameter that packs share wait on the host for the pack of its first layer.
    """
    for i in range(k.options[NUM_ON_HOST]):
        other = k.stages[i, HOST_ORDER]
        begin, end = _begins(k.stages, other, USERS_END), k.stages[other, USERS_END]
        uses = False
        for j in range(begin, end):
            uses = uses or k.users[j] == stage
        if uses:
            for position in range(len(k.devices)):
                read(c, k.host_gradients[other, position])
                if k.users[end - 1] == stage:  # the last one
                    free(c, k.host_gradients[other, position])
    emit(c, UPDATE, HOST_DEVICE, ON_HOST, k.stages[stage, STAGE_START], k.stages[stage, STAGE_STOP], ZERO, ZERO)
