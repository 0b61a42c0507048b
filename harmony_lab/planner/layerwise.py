"""layerwise: an iteration as plain PyTorch runs it: layer by layer, a microbatch after the other, memory by the pager.

Every layer runs on the device that has it: with data parallelism on all, each with its share of the minibatch, in a
pipeline on one.  Gradients add up over the microbatches; the optimizer's step for all layers follows, on the devices.
Compiled; ``baselines`` makes the tables.

An iteration that ``ENDS_EMPTY`` is one that the runtime can run: in the end all that was changed goes to the host.  It
keeps to the rules of the host's one store and of autograd: an update comes after all replicas have fetched what it
changes; gradients of a parameter that layers on several devices share meet where the first of them is updated; a
layer's output is there twice, for the next layer and as what autograd saved; the optimizer's temporaries are counted.

One that ``CLIPS`` looks at all gradients before the first update, for their norm, as ``clip_grad_norm_`` does; they are
scaled in the update.  One that ``LEAVES`` its gradients updates nothing: the next adds to them.
"""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.planner.codes import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    HOST_DEVICE,
    NONE,
    ON_SWAP_OUT,
    RECOMPUTE,
    SWAP_OUT,
    UPDATE,
    ZERO,
)
from harmony_lab.planner.emit import STATUS, Construction, emit, free, read, wait, write
from harmony_lab.planner.exchange import drop_received, gather_gradients, hold_received, pass_on, reduce_gradients
from harmony_lab.planner.paging import (
    COMPUTED,
    DEVICE,
    FETCHED,
    NUM_BYTES,
    NUM_HELD,
    REDUCED_FIRST,
    REDUCED_LAST,
    Pager,
    begin,
    bring,
    change,
    compute,
    drop,
    exists,
    flush,
    fresh,
    hold,
)

__all__ = ["Layerwise", "data_parallel", "pipeline"]

NUM_LAYERS, NUM_REPLICAS, NUM_MICROBATCHES, FIRST_TRAINABLE, RECOMPUTES = 0, 1, 2, 3, 4  # of options
ENDS_EMPTY, CLIPS, LEAVES = 5, 6, 7
# Pages are numbered: of state by (slot, replica, layer), then those of samples by (slot, replica, layer, microbatch).
WEIGHTS, BUFFERS, GRADIENTS, OPTIMIZER_STATE = 0, 1, 2, 3
INPUTS, VALUES, VALUE_GRADIENTS, SAVED_VALUES = 4, 5, 6, 7  # VALUES: of the boundary where the layer begins
FIRST_SAMPLE, LAST_SAMPLE, SIZE = 0, 1, 2  # of microbatches
FORWARD_WORKSPACE, SAVING_WORKSPACE, BACKWARD_WORKSPACE, OUTPUT_BYTES, PASSED_BYTES = 0, 1, 2, 3, 4  # of cells


class Layerwise(NamedTuple):
    """What is to be run.  A replica is a copy of the model: one per device with data parallelism, one in a pipeline.

    ``microbatches``: by replica; the first of a replica that has fewer than others are empty.  ``cells``: by (size,
    layer); ``PASSED_BYTES`` is of the gradients of a layer's inputs.  ``owners``: by layer, earlier layers on the same
    device whose parameters it shares; -1 fills up.  ``tied``: rows of pages of gradients of layers on different devices
    that share some; where the iteration ends empty, that of the first layer, then each of the others and the page that
    it becomes on the first one's device.  ``update_workspace``: by layer.
    """

    options: Ints
    microbatches: Ints
    cells: Ints
    updates_buffers: Ints
    owners: Ints
    tied: Ints
    update_workspace: Ints


# -- orders -----------------------------------------------------------------------------------------------------------


@compiled
def data_parallel(c: Construction, p: Pager, r: Layerwise) -> None:
    """All replicas side by side; gradients are reduced as soon as the last microbatch's backward has made them."""
    num_layers, num_replicas, count = r.options[NUM_LAYERS], r.options[NUM_REPLICAS], r.options[NUM_MICROBATCHES]
    for j in range(count):
        for layer in range(num_layers):
            for q in range(num_replicas):
                _forward(c, p, r, q, layer, j)
            if c.counts[STATUS] != 0:
                return
        for layer in range(num_layers - 1, r.options[FIRST_TRAINABLE] - 1, -1):
            for q in range(num_replicas):
                _backward(c, p, r, q, layer, j)
            if j + 1 == count and num_replicas > 1 and not r.options[LEAVES]:
                _reduce_replicas(c, p, r, layer)
            if c.counts[STATUS] != 0:
                return
    _end(c, p, r)


@compiled
def pipeline(c: Construction, p: Pager, r: Layerwise, units: Ints) -> None:
    """Rows of ``units``: first layer, stop layer, microbatch, whether backward; in an order in which they can run."""
    for i in range(len(units)):
        start, stop, j, is_backward = units[i]
        if is_backward:
            for layer in range(stop - 1, max(start, r.options[FIRST_TRAINABLE]) - 1, -1):
                _backward(c, p, r, ZERO, layer, j)
        else:
            for layer in range(start, stop):
                _forward(c, p, r, ZERO, layer, j)
        if c.counts[STATUS] != 0:
            return
    for i in range(0 if r.options[ENDS_EMPTY] else len(r.tied)):
        reduce_gradients(c, p, r.tied[i, : (r.tied[i] >= 0).sum()])
    _end(c, p, r)


@compiled
def _end(c: Construction, p: Pager, r: Layerwise) -> None:
    """What follows the last backward."""
    num_layers, num_replicas = r.options[NUM_LAYERS], r.options[NUM_REPLICAS]
    looked = p.devices[:0, COMPUTED].copy()
    if r.options[CLIPS] and not r.options[LEAVES]:
        for layer in range(num_layers):
            for q in range(num_replicas):
                _look(c, p, r, q, layer)
        if num_replicas == 1:  # replicas have all gradients each
            looked = p.devices[:, COMPUTED].copy()
    for layer in range(0 if r.options[LEAVES] else num_layers):
        for q in range(num_replicas if r.options[ENDS_EMPTY] and num_replicas > 1 else 0):
            _bring_to_update(c, p, r, q, layer)
        for q in range(num_replicas):
            _update(c, p, r, q, layer, looked)
    if r.options[ENDS_EMPTY]:
        flush(c, p)


# -- pages ------------------------------------------------------------------------------------------------------------


@compiled
def _state(r: Layerwise, slot: Int, q: Int, layer: Int) -> Int:
    return (slot * r.options[NUM_REPLICAS] + q) * (r.options[NUM_LAYERS] + 1) + layer


@compiled
def _of_sample(r: Layerwise, slot: Int, q: Int, layer: Int, j: Int) -> Int:
    rows = r.options[NUM_REPLICAS] * (r.options[NUM_LAYERS] + 1)
    row = ((slot - INPUTS) * r.options[NUM_REPLICAS] + q) * (r.options[NUM_LAYERS] + 1) + layer
    return INPUTS * rows + row * r.options[NUM_MICROBATCHES] + j


@compiled
def _device(p: Pager, r: Layerwise, q: Int, layer: Int) -> Int:
    return p.pages[_state(r, WEIGHTS, q, layer), DEVICE]


@compiled
def _goes_on_here(p: Pager, r: Layerwise, q: Int, layer: Int) -> Bool:
    """Whether the next layer is on the same device."""
    following = layer + 1
    return following < r.options[NUM_LAYERS] and _device(p, r, q, layer) == _device(p, r, q, following)


@compiled
def _hold_layer(p: Pager, r: Layerwise, q: Int, layer: Int, j: Int) -> None:
    """A layer's weights and inputs."""
    hold(p, _state(r, WEIGHTS, q, layer))
    for owner in r.owners[layer]:
        if owner >= 0:
            hold(p, _state(r, WEIGHTS, q, owner))
    hold(p, _state(r, BUFFERS, q, layer))
    hold(p, _of_sample(r, INPUTS, q, layer, j))
    hold(p, _of_sample(r, VALUES, q, layer, j))


# -- computing --------------------------------------------------------------------------------------------------------


@compiled
def _forward(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int, j: Int) -> None:
    first, last = r.microbatches[q, j, FIRST_SAMPLE], r.microbatches[q, j, LAST_SAMPLE]
    if first == last or c.counts[STATUS] != 0:
        return
    device, cell = _device(p, r, q, layer), r.cells[r.microbatches[q, j, SIZE], layer]
    trains = layer >= r.options[FIRST_TRAINABLE]
    saves = trains and (r.options[RECOMPUTES] == 0 or layer + 1 == r.options[NUM_LAYERS])
    saved = _of_sample(r, SAVED_VALUES, q, layer, j)
    workspace = cell[SAVING_WORKSPACE] if saves else cell[FORWARD_WORKSPACE]
    begin(p)
    _hold_layer(p, r, q, layer, j)
    bring(c, p, device, cell[OUTPUT_BYTES] + workspace + (p.pages[saved, NUM_BYTES] if saves else 0))
    if c.counts[STATUS] != 0:
        return
    if saves:
        fresh(c, p, saved)
    output, following = NONE, layer + 1
    if _goes_on_here(p, r, q, layer):
        fresh(c, p, _of_sample(r, VALUES, q, following, j))
    elif cell[OUTPUT_BYTES] > 0:
        output = write(c, ACTIVATION, device, following, following, first, last, cell[OUTPUT_BYTES])
    if r.updates_buffers[layer]:
        change(c, p, _state(r, BUFFERS, q, layer))
    if not trains:
        drop(p, _of_sample(r, INPUTS, q, layer, j))
        drop(p, _of_sample(r, VALUES, q, layer, j))
    compute(c, p, FORWARD, device, layer, first, last, workspace)
    if output >= 0 and following < r.options[NUM_LAYERS]:
        pass_on(c, p, output, device, following, _of_sample(r, VALUES, q, following, j), first, last)
    elif output >= 0:  # the loss
        read(c, output)
        write(c, ACTIVATION, HOST_DEVICE, following, following, first, last, cell[OUTPUT_BYTES])
        free(c, output)
        emit(c, SWAP_OUT, device, ON_SWAP_OUT, following, following, first, last)


@compiled
def _recompute(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int, j: Int) -> None:
    device, cell = _device(p, r, q, layer), r.cells[r.microbatches[q, j, SIZE], layer]
    saved = _of_sample(r, SAVED_VALUES, q, layer, j)
    begin(p)
    _hold_layer(p, r, q, layer, j)
    bring(c, p, device, cell[SAVING_WORKSPACE] + p.pages[saved, NUM_BYTES])
    if c.counts[STATUS] != 0:
        return
    fresh(c, p, saved)
    first, last = r.microbatches[q, j, FIRST_SAMPLE], r.microbatches[q, j, LAST_SAMPLE]
    compute(c, p, RECOMPUTE, device, layer, first, last, cell[SAVING_WORKSPACE])


@compiled
def _backward(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int, j: Int) -> None:
    first, last = r.microbatches[q, j, FIRST_SAMPLE], r.microbatches[q, j, LAST_SAMPLE]
    if first == last or c.counts[STATUS] != 0:
        return
    recomputes, following = r.options[RECOMPUTES], layer + 1
    if recomputes and following < r.options[NUM_LAYERS]:
        _recompute(c, p, r, q, layer, j)
    device, cell = _device(p, r, q, layer), r.cells[r.microbatches[q, j, SIZE], layer]
    begin(p)
    _hold_layer(p, r, q, layer, j)
    hold(p, _of_sample(r, SAVED_VALUES, q, layer, j))
    if following < r.options[NUM_LAYERS]:
        hold(p, _of_sample(r, VALUE_GRADIENTS, q, following, j))
    shares_output = not recomputes and not r.options[ENDS_EMPTY]
    keeps_output = shares_output and _goes_on_here(p, r, q, layer)  # autograd saved it, once for both layers
    if keeps_output:
        hold(p, _of_sample(r, VALUES, q, following, j))
    new_bytes = _hold_gradients(p, r, q, layer)
    passes = layer > r.options[FIRST_TRAINABLE]
    bring(c, p, device, new_bytes + cell[BACKWARD_WORKSPACE] + (cell[PASSED_BYTES] if passes else 0))
    if c.counts[STATUS] != 0:
        return
    _add_gradients(c, p, r, q, layer)
    before = layer - 1
    passed = NONE
    if passes and _goes_on_here(p, r, q, before):
        fresh(c, p, _of_sample(r, VALUE_GRADIENTS, q, layer, j))
    elif passes and cell[PASSED_BYTES] > 0:
        passed = write(c, ACTIVATION_GRADIENT, device, layer, layer, first, last, cell[PASSED_BYTES])
    drop(p, _of_sample(r, INPUTS, q, layer, j))
    drop(p, _of_sample(r, SAVED_VALUES, q, layer, j))
    if following < r.options[NUM_LAYERS]:
        drop(p, _of_sample(r, VALUE_GRADIENTS, q, following, j))
    if keeps_output:
        drop(p, _of_sample(r, VALUES, q, following, j))
    if not shares_output or not passes or not _goes_on_here(p, r, q, before):
        drop(p, _of_sample(r, VALUES, q, layer, j))
    compute(c, p, BACKWARD, device, layer, first, last, cell[BACKWARD_WORKSPACE])
    if passed >= 0:
        pass_on(c, p, passed, device, layer, _of_sample(r, VALUE_GRADIENTS, q, layer, j), first, last)


@compiled
def _hold_gradients(p: Pager, r: Layerwise, q: Int, layer: Int) -> Int:
    """Gradients that the layer's backward adds to; the bytes of those that there are none of yet."""
    new_bytes = ZERO
    for i in range(-1, r.owners.shape[1]):
        owner = layer if i < 0 else r.owners[layer, i]
        if owner >= 0:
            page = _state(r, GRADIENTS, q, owner)
            if exists(p, page):
                hold(p, page)
            else:
                new_bytes += p.pages[page, NUM_BYTES]
    return new_bytes


@compiled
def _add_gradients(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int) -> None:
    for i in range(-1, r.owners.shape[1]):
        owner = layer if i < 0 else r.owners[layer, i]
        if owner >= 0:
            page = _state(r, GRADIENTS, q, owner)
            if exists(p, page):
                change(c, p, page)
            else:
                fresh(c, p, page)


@compiled
def _look(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int) -> None:
    """Read a layer's gradients; those of layers on other devices that share a parameter are added to them."""
    gradients = _state(r, GRADIENTS, q, layer)
    if c.counts[STATUS] != 0 or not exists(p, gradients):
        return
    gather_gradients(c, p, _gathered(r), gradients)
    begin(p)
    hold(p, gradients)
    hold_received(p, _gathered(r), gradients)
    bring(c, p, _device(p, r, q, layer), ZERO)
    if c.counts[STATUS] != 0:
        return
    if p.counts[NUM_HELD] > 1:
        change(c, p, gradients)
    drop_received(p, _gathered(r), gradients)
    _wait_for_sum(c, p, gradients)
    compute(c, p, UPDATE, _device(p, r, q, layer), layer, ZERO, ZERO, ZERO)


@compiled
def _bring_to_update(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int) -> None:
    gradients = _state(r, GRADIENTS, q, layer)
    if c.counts[STATUS] != 0 or not exists(p, gradients):
        return
    begin(p)
    hold(p, _state(r, WEIGHTS, q, layer))
    hold(p, gradients)
    hold(p, _state(r, OPTIMIZER_STATE, q, layer))
    hold_received(p, _gathered(r), gradients)
    bring(c, p, _device(p, r, q, layer), r.update_workspace[layer])


@compiled
def _update(c: Construction, p: Pager, r: Layerwise, q: Int, layer: Int, looked: Ints) -> None:
    """``looked``: the ops that have looked at gradients last."""
    gradients = _state(r, GRADIENTS, q, layer)
    if c.counts[STATUS] != 0 or not exists(p, gradients):
        return
    if not r.options[CLIPS]:
        gather_gradients(c, p, _gathered(r), gradients)
    _bring_to_update(c, p, r, q, layer)
    if c.counts[STATUS] != 0:
        return
    change(c, p, _state(r, WEIGHTS, q, layer))
    change(c, p, _state(r, OPTIMIZER_STATE, q, layer))
    drop(p, gradients)
    drop_received(p, _gathered(r), gradients)
    _wait_for_sum(c, p, gradients)
    for op in looked:
        wait(c, op)
    for other in range(r.options[NUM_REPLICAS] if r.options[ENDS_EMPTY] else 0):
        wait(c, p.pages[_state(r, WEIGHTS, other, layer), FETCHED])
        wait(c, p.pages[_state(r, OPTIMIZER_STATE, other, layer), FETCHED])
    compute(c, p, UPDATE, _device(p, r, q, layer), layer, ZERO, ZERO, r.update_workspace[layer])


# -- gradients that meet ----------------------------------------------------------------------------------------------


@compiled
def _gathered(r: Layerwise) -> Ints:
    """Rows of ``tied`` whose gradients meet on the first one's device."""
    return r.tied[: len(r.tied) * r.options[ENDS_EMPTY]]


@compiled
def _wait_for_sum(c: Construction, p: Pager, gradients: Int) -> None:
    for op in range(p.pages[gradients, REDUCED_FIRST], p.pages[gradients, REDUCED_LAST] + 1):
        wait(c, op)


@compiled
def _reduce_replicas(c: Construction, p: Pager, r: Layerwise, layer: Int) -> None:
    pages = np.empty(r.options[NUM_REPLICAS], np.int64)
    for q in range(len(pages)):
        pages[q] = _state(r, GRADIENTS, q, layer)
    reduce_gradients(c, p, pages)
