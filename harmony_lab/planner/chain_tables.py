"""chain tables: what a plan, a profile and a machine say, as arrays that compiled functions read, and where lowering
stands.

Stages are the packs of an iteration in order; a task is a stage on a device, with its microbatches as units.  Boundary
b is where layer b begins.
"""

from typing import NamedTuple

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.planner.codes import NONE

__all__ = [
    "BACKWARD_WORKSPACE",
    "BATCH_BYTES",
    "BUFFERS_OUT",
    "BUFFER_BYTES",
    "COMPUTED",
    "COMPUTED_BEFORE",
    "CONSUMER",
    "CURRENT",
    "FETCHED",
    "FORWARD_WORKSPACE",
    "GRADIENT_BYTES",
    "GRADIENT_HERE",
    "GRADIENT_ON_HOST",
    "GRADIENT_OUT",
    "GRADIENT_OUT_BEFORE",
    "HOST_ORDER",
    "INPUT_HERE",
    "IS_BACKWARD",
    "IS_FUSED",
    "IS_KEPT",
    "IS_STASHED",
    "JUST_IN_TIME",
    "KEEPS_END",
    "LAST_BACKWARD",
    "MOST_UNITS",
    "NEXT_TASK",
    "NO_PREFETCH",
    "NUM_COLUMNS",
    "NUM_COMPLETE",
    "NUM_ON_HOST",
    "NUM_SIZES",
    "OFFERED",
    "ON_DEVICE",
    "OPTIMIZER_BYTES",
    "OUT",
    "OUT_BEFORE",
    "PEERS",
    "PREFETCH",
    "PRODUCER",
    "RECOMPUTE_WORKSPACE",
    "REDUCED",
    "SAVED_BYTES",
    "SAVED_HERE",
    "SENDS_ON",
    "SENT",
    "STAGE_START",
    "STAGE_STOP",
    "STATE_BUFFER",
    "STATE_GRADIENT",
    "STATE_OPTIMIZER",
    "STATE_WEIGHT",
    "TASK_DEVICE",
    "TASK_END",
    "TASK_STAGE",
    "TWIN",
    "UNIT_END",
    "UNIT_FIRST",
    "UNIT_LAST",
    "UNIT_SIZE",
    "UNIT_TASK",
    "UPDATED",
    "UPDATES_BUFFERS",
    "UPDATES_HERE",
    "UPDATE_WORKSPACE",
    "USERS_END",
    "VALUE_BYTES",
    "VALUE_GRADIENT_BYTES",
    "VALUE_HERE",
    "WEIGHT_BYTES",
    "Chain",
    "begins",
    "computed",
    "first_task",
    "first_unit",
    "is_first",
    "is_last",
    "reset",
    "root_task",
    "same_samples",
    "task_on",
]

# columns of Chain's tables
NUM_SIZES, MOST_UNITS, PREFETCH, PEERS, JUST_IN_TIME, NUM_ON_HOST = 0, 1, 2, 3, 4, 5  # of options
STAGE_START, STAGE_STOP, IS_BACKWARD, IS_FUSED, WEIGHT_BYTES, BUFFER_BYTES, GRADIENT_BYTES = 0, 1, 2, 3, 4, 5, 6
UPDATES_BUFFERS, TASK_END, KEEPS_END, TWIN, IS_KEPT, USERS_END = 7, 8, 9, 10, 11, 12
UPDATES_HERE, OPTIMIZER_BYTES, UPDATE_WORKSPACE, NUM_COMPLETE, HOST_ORDER, STATE_OPTIMIZER = 13, 14, 15, 16, 17, 18
UPDATED = 19
TASK_STAGE, TASK_DEVICE, UNIT_END, NEXT_TASK, NO_PREFETCH, SENDS_ON = 0, 1, 2, 3, 4, 5  # of tasks
FETCHED, STATE_WEIGHT, STATE_BUFFER, STATE_GRADIENT, LAST_BACKWARD = 6, 7, 8, 9, 10
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
NUM_COLUMNS = {"stages": 20, "tasks": 11, "units": 11, "cells": 5, "values": 2, "boundaries": 4, "devices": 9}


class Chain(NamedTuple):
    """What is to be lowered, and where lowering stands; -1: none.

    ``X_END``: the rows of X that belong to a row end there, they begin where those of the row before end.  Sizes number
    the different microbatch sizes.

    Of stages: ``KEEPS_END`` and ``USERS_END`` cut ``keeps`` (boundaries whose values a forward stage keeps) and
    ``users`` (stages whose update needs a stage's gradients).  ``TWIN``: of a backward stage, the forward stage of the
    same pack whose weights stay, and the other way round.  ``IS_KEPT``: its forward keeps what backward needs.
    ``UPDATES_HERE``: of a backward stage, a device updates its weights, with an optimizer's state that stays there.
    ``UPDATED``: the host's op that does.  ``PEERS``: all devices copy to each other without the host; ``SENDS_ON``: a
    task's to the one that runs the next stage.  Of boundaries: whether the host (``IS_STASHED``) or the device
    (``ON_DEVICE``) keeps its values for backward, the forward stage that computes them, the backward stage that starts
    there.
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
def reset(k: Chain) -> None:
    """Nothing lowered yet."""
    k.options[NUM_ON_HOST] = 0
    k.stages[:, NUM_COMPLETE:] = 0
    k.stages[:, UPDATED] = NONE
    k.tasks[:, FETCHED] = 0
    k.tasks[:, FETCHED + 1 :] = NONE
    k.units[:, OFFERED:] = NONE
    k.devices[:] = NONE
    k.host_values[:] = NONE
    k.host_gradients[:] = NONE


@compiled
def begins(table: Ints, row: Int, column: Int) -> Int:
    return table[row - 1, column] if row > 0 else 0


@compiled
def computed(k: Chain, device: Int, op: Int) -> None:
    """That op is the device's newest computing."""
    k.devices[device, COMPUTED_BEFORE] = k.devices[device, COMPUTED]
    k.devices[device, COMPUTED] = op


@compiled
def first_task(k: Chain, stage: Int) -> Int:
    return begins(k.stages, stage, TASK_END)


@compiled
def root_task(k: Chain, stage: Int) -> Int:
    """The task that brings out what all the stage's devices have found: stages take turns, so that every device's link
    carries some."""
    begin = first_task(k, stage)
    return begin + stage % (k.stages[stage, TASK_END] - begin)


@compiled
def first_unit(k: Chain, task: Int) -> Int:
    return begins(k.tasks, task, UNIT_END)


@compiled
def is_first(k: Chain, unit: Int) -> Bool:
    return unit == 0 or k.units[unit - 1, UNIT_TASK] != k.units[unit, UNIT_TASK]


@compiled
def is_last(k: Chain, unit: Int) -> Bool:
    return unit + 1 == len(k.units) or k.units[unit + 1, UNIT_TASK] != k.units[unit, UNIT_TASK]


@compiled
def task_on(k: Chain, stage: Int, device: Int) -> Int:
    for task in range(first_task(k, stage), k.stages[stage, TASK_END]):
        if k.tasks[task, TASK_DEVICE] == device:
            return task
    return NONE


@compiled
def same_samples(k: Chain, unit: Int, stage: Int) -> Int:
    """The unit of another stage that has the same samples, of the same device where it can be; -1: none."""
    first, last = k.units[unit, UNIT_FIRST], k.units[unit, UNIT_LAST]
    task = task_on(k, stage, k.tasks[k.units[unit, UNIT_TASK], TASK_DEVICE])
    if task < 0:
        task = first_task(k, stage)
    begin = first_unit(k, task)
    if first < k.units[begin, UNIT_FIRST]:
        return NONE
    other = begin + (first - k.units[begin, UNIT_FIRST]) // (k.units[begin, UNIT_LAST] - k.units[begin, UNIT_FIRST])
    if other < k.tasks[task, UNIT_END] and k.units[other, UNIT_FIRST] == first and k.units[other, UNIT_LAST] == last:
        return other
    return NONE
