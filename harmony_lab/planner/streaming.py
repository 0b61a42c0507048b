"""streaming: an iteration in the order of ZeRO-Infinity (Rajbhandari et al., 2021): data parallel, weights on the host.

For every microbatch, each layer's weights come for its forward and once more for its backward, which computes the
forward again; the next layer's come meanwhile.  Gradients leave for the host with every microbatch; the optimizer's
step follows there when all are in.  Compiled; ``baselines`` makes the tables::

    swap-in    W0 W1 W2      W2   W1   W0   W0 W1 ...
    compute       F0 F1 F2      B2   B1   B0   F0 ...     (B: recompute and backward)
    swap-out                       G2   G1   G0
"""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Bool, Int, Ints, compiled
from harmony_lab.planner.codes import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    ALL_REDUCE,
    BACKWARD,
    BUFFER,
    FORWARD,
    FREE,
    GRADIENT,
    HOST_DEVICE,
    INPUT,
    NONE,
    ON_COMPUTE,
    ON_HOST,
    ON_MEMORY,
    ON_PEER_IN,
    ON_PEER_OUT,
    ON_SWAP_IN,
    ON_SWAP_OUT,
    RECOMPUTE,
    RECV,
    SAVED,
    SEND,
    SWAP_IN,
    SWAP_OUT,
    UPDATE,
    WEIGHT,
    WORKSPACE,
    ZERO,
)
from harmony_lab.planner.emit import OPS, STATUS, WRITER, Construction, emit, free, read, temporary, wait, write

__all__ = ["Streaming", "stream", "streaming"]

NUM_LAYERS, NUM_MICROBATCHES, FIRST_TRAINABLE, THROUGH_PEERS, STASHES, PREFETCHES, CLIPS = 0, 1, 2, 3, 4, 5, 6
FIRST_SAMPLE, LAST_SAMPLE, SIZE = 0, 1, 2  # of microbatches
WEIGHT_BYTES, BUFFER_BYTES, GRADIENT_BYTES, UPDATES_BUFFERS = 0, 1, 2, 3  # of layers
INPUT_BYTES, VALUE_BYTES, VALUE_GRADIENT_BYTES, SAVED_BYTES = 0, 1, 2, 3  # of cells
FORWARD_WORKSPACE, SAVING_WORKSPACE, BACKWARD_WORKSPACE = 4, 5, 6
WEIGHTS_HERE, BUFFERS_HERE, INPUTS_HERE = 0, 1, 2  # of fetched
COMPUTED, OUTPUT_HERE, GRADIENT_HERE = 0, 1, 2  # of devices


class Streaming(NamedTuple):
    """What is to be run, and where it stands; -1: none.

    Options: ``THROUGH_PEERS``: one device fetches weights and the others have them from it, gradients are reduced and
    leave once; else each for itself.  ``STASHES``: layers' inputs wait on the host for backward, else on the device.
    ``CLIPS``: updates wait for all gradients.
    ``microbatches``: by device; the first of a device that has fewer than others are empty.  ``cells``: by (size,
    boundary).  ``owners``: by layer, earlier layers whose parameters it shares; -1 fills up.
    """

    options: Ints
    microbatches: Ints
    layers: Ints
    cells: Ints
    owners: Ints
    fetched: Ints  # by device and turn
    devices: Ints
    values: Ints  # by device and boundary: the block there
    stash: Ints  # by device and boundary: the block on the host
    gradients: Ints  # by layer: blocks on the host


def streaming(options: Ints, microbatches: Ints, layers: Ints, cells: Ints, owners: Ints) -> Streaming:
    """Nothing run yet."""
    num_layers, count = options[:2].tolist()
    num_devices = len(microbatches)
    return Streaming(
        options,
        microbatches,
        layers,
        cells,
        owners,
        np.full((num_devices, 2, 3), -1),
        np.full((num_devices, 3), -1),
        np.full((num_devices, num_layers + 1), -1),
        np.full((num_devices, num_layers + 1), -1),
        np.full((num_layers, num_devices * count), -1),
    )


@compiled
def stream(c: Construction, s: Streaming) -> None:
    num_layers, trainable = s.options[NUM_LAYERS], s.options[FIRST_TRAINABLE]
    turns = 2 * num_layers - trainable  # of a microbatch: forward, then backward of what is trained
    last_turn = s.options[NUM_MICROBATCHES] * turns - 1
    for turn in range(last_turn + 1):
        if turn == 0 or not s.options[PREFETCHES]:
            _fetch(c, s, turn, turns)
        if turn < last_turn and s.options[PREFETCHES]:
            _fetch(c, s, turn + 1, turns)
        j, layer, is_backward = _place(s, turn, turns)
        for device in range(len(s.devices)):
            if _takes_part(s, device, j):
                if is_backward:
                    _backward(c, s, turn, device, layer, j)
                else:
                    _forward(c, s, turn, device, layer, j)
        if is_backward and s.layers[layer, GRADIENT_BYTES] > 0:
            _gradients_out(c, s, layer, j)
        if c.counts[STATUS] != 0:
            return
    if s.options[CLIPS]:  # the first update waits for all gradients
        for block in s.gradients.flat:
            if block >= 0:
                wait(c, c.blocks[block, WRITER])
    for layer in range(trainable, num_layers):
        if s.layers[layer, GRADIENT_BYTES] > 0:
            _update(c, s, layer)


@compiled
def _place(s: Streaming, turn: Int, turns: Int) -> tuple[Int, Int, Bool]:
    """Microbatch, layer and whether backward."""
    at, num_layers = turn % turns, s.options[NUM_LAYERS]
    return turn // turns, (at if at < num_layers else 2 * num_layers - 1 - at), at >= num_layers


@compiled
def _takes_part(s: Streaming, device: Int, j: Int) -> Bool:
    return s.microbatches[device, j, FIRST_SAMPLE] < s.microbatches[device, j, LAST_SAMPLE]


@compiled
def _first_device(s: Streaming, layer: Int, j: Int) -> Int:
    """Of those that take part, each layer's that fetches for all: they take turns."""
    num_devices = len(s.devices)
    for i in range(num_devices):
        device = (layer + i) % num_devices
        if _takes_part(s, device, j):
            return device
    return NONE


# -- what comes in ----------------------------------------------------------------------------------------------------


@compiled
def _fetch(c: Construction, s: Streaming, turn: Int, turns: Int) -> None:
    j, layer, is_backward = _place(s, turn, turns)
    before, num_devices = NONE, len(s.devices)
    root = _first_device(s, layer, j)
    for i in range(num_devices):
        device = (root + i) % num_devices
        if _takes_part(s, device, j):
            _fetch_weights(c, s, turn, device, layer, before)
            _fetch_samples(c, s, turn, device, layer, j, is_backward)
            if s.options[THROUGH_PEERS]:
                before = device


@compiled
def _fetch_weights(c: Construction, s: Streaming, turn: Int, device: Int, layer: Int, before: Int) -> None:
    """A layer's weights and buffers; weights from the device before, if there is one, passed on along a chain."""
    here, after = s.fetched[device, turn % 2], s.devices[device, COMPUTED]
    here[:] = NONE
    following, num_bytes = layer + 1, s.layers[layer, WEIGHT_BYTES]
    if num_bytes > 0 and before >= 0:
        offered = s.fetched[before, turn % 2, WEIGHTS_HERE]
        read(c, offered)
        sent = emit(c, SEND, before, ON_PEER_OUT, layer, following, ZERO, ZERO)
        read(c, offered)
        wait(c, sent)
        wait(c, after)
        here[WEIGHTS_HERE] = write(c, WEIGHT, device, layer, following, ZERO, ZERO, num_bytes)
        emit(c, RECV, device, ON_PEER_IN, layer, following, ZERO, ZERO)
    elif num_bytes > 0:
        wait(c, after)
        here[WEIGHTS_HERE] = write(c, WEIGHT, device, layer, following, ZERO, ZERO, num_bytes)
        emit(c, SWAP_IN, device, ON_SWAP_IN, layer, following, ZERO, ZERO)
    if s.layers[layer, BUFFER_BYTES] > 0:
        wait(c, after)
        here[BUFFERS_HERE] = write(c, BUFFER, device, layer, following, ZERO, ZERO, s.layers[layer, BUFFER_BYTES])
        emit(c, SWAP_IN, device, ON_SWAP_IN, layer, following, ZERO, ZERO)


@compiled
def _fetch_samples(
    c: Construction, s: Streaming, turn: Int, device: Int, layer: Int, j: Int, is_backward: Bool
) -> None:
    first, last, z = s.microbatches[device, j]
    if s.cells[z, layer, INPUT_BYTES] > 0:
        wait(c, s.devices[device, COMPUTED])
        s.fetched[device, turn % 2, INPUTS_HERE] = write(
            c, INPUT, device, layer, layer + 1, first, last, s.cells[z, layer, INPUT_BYTES]
        )
        emit(c, SWAP_IN, device, ON_SWAP_IN, layer, layer + 1, first, last)
    if is_backward and s.stash[device, layer] >= 0:
        wait(c, s.devices[device, COMPUTED])
        read(c, s.stash[device, layer])
        free(c, s.stash[device, layer])
        s.values[device, layer] = write(
            c, ACTIVATION, device, layer, layer, first, last, s.cells[z, layer, VALUE_BYTES]
        )
        emit(c, SWAP_IN, device, ON_SWAP_IN, layer, layer, first, last)
        s.stash[device, layer] = NONE


# -- computing --------------------------------------------------------------------------------------------------------


@compiled
def _read_inputs(c: Construction, s: Streaming, turn: Int, device: Int, layer: Int) -> None:
    for block in s.fetched[device, turn % 2]:
        read(c, block)
    read(c, s.values[device, layer])


@compiled
def _compute(
    c: Construction, s: Streaming, kind: Int, device: Int, layer: Int, first: Int, last: Int, workspace_bytes: Int
) -> None:
    following = layer + 1
    if workspace_bytes > 0:
        temporary(c, WORKSPACE, device, layer, following, first, last, workspace_bytes)
    s.devices[device, COMPUTED] = emit(c, kind, device, ON_COMPUTE, layer, following, first, last)


@compiled
def _forward(c: Construction, s: Streaming, turn: Int, device: Int, layer: Int, j: Int) -> None:
    first, last, z = s.microbatches[device, j]
    following, here = layer + 1, s.fetched[device, turn % 2]
    updates_buffers = s.layers[layer, UPDATES_BUFFERS] == 1
    trains, stashed = layer >= s.options[FIRST_TRAINABLE], s.stash[device, layer] >= 0
    _read_inputs(c, s, turn, device, layer)
    num_bytes, output = s.cells[z, following, VALUE_BYTES], NONE
    if num_bytes > 0:
        output = write(c, ACTIVATION, device, following, following, first, last, num_bytes)
    free(c, here[WEIGHTS_HERE])
    free(c, here[INPUTS_HERE])
    if not updates_buffers:
        free(c, here[BUFFERS_HERE])
    if not trains:
        free(c, s.values[device, layer])
    _compute(c, s, FORWARD, device, layer, first, last, s.cells[z, layer, FORWARD_WORKSPACE])
    if stashed:  # gone when it has left and been used
        free(c, s.values[device, layer])
        emit(c, FREE, device, ON_MEMORY, layer, layer, first, last)
        s.values[device, layer] = NONE
    if updates_buffers:
        read(c, here[BUFFERS_HERE])
        free(c, here[BUFFERS_HERE])
        emit(c, SWAP_OUT, device, ON_SWAP_OUT, layer, following, ZERO, ZERO)
    is_loss = following == s.options[NUM_LAYERS]
    at_turn = following + 1 == s.options[NUM_LAYERS]  # backward of the last layer follows its forward
    stashes = s.options[STASHES] == 1 and following >= s.options[FIRST_TRAINABLE] and not at_turn
    if output >= 0 and (is_loss or stashes):
        read(c, output)
        host = write(c, ACTIVATION, HOST_DEVICE, following, following, first, last, num_bytes)
        if is_loss:
            free(c, output)
        else:
            s.stash[device, following] = host
        emit(c, SWAP_OUT, device, ON_SWAP_OUT, following, following, first, last)
    s.values[device, following] = NONE if is_loss else output


@compiled
def _backward(c: Construction, s: Streaming, turn: Int, device: Int, layer: Int, j: Int) -> None:
    first, last, z = s.microbatches[device, j]
    following, cell = layer + 1, s.cells[z, layer]
    _read_inputs(c, s, turn, device, layer)
    saved = write(c, SAVED, device, layer, following, first, last, cell[SAVED_BYTES])
    _compute(c, s, RECOMPUTE, device, layer, first, last, cell[SAVING_WORKSPACE])
    _read_inputs(c, s, turn, device, layer)
    given = s.devices[device, OUTPUT_HERE]
    read(c, saved)
    read(c, given)
    s.devices[device, GRADIENT_HERE] = s.devices[device, OUTPUT_HERE] = NONE
    if s.layers[layer, GRADIENT_BYTES] > 0:
        s.devices[device, GRADIENT_HERE] = write(
            c, GRADIENT, device, layer, following, ZERO, ZERO, s.layers[layer, GRADIENT_BYTES]
        )
    if layer > s.options[FIRST_TRAINABLE] and cell[VALUE_GRADIENT_BYTES] > 0:
        s.devices[device, OUTPUT_HERE] = write(
            c, ACTIVATION_GRADIENT, device, layer, layer, first, last, cell[VALUE_GRADIENT_BYTES]
        )
    for block in s.fetched[device, turn % 2]:
        free(c, block)
    free(c, s.values[device, layer])
    free(c, saved)
    free(c, given)
    s.values[device, layer] = NONE
    _compute(c, s, BACKWARD, device, layer, first, last, cell[BACKWARD_WORKSPACE])


# -- gradients of parameters ------------------------------------------------------------------------------------------


@compiled
def _gradients_out(c: Construction, s: Streaming, layer: Int, j: Int) -> None:
    """A microbatch's gradients of a layer leave for the host: their sum over the devices, or each device's."""
    root, following = _first_device(s, layer, j), layer + 1
    first_op, num_ops = c.counts[OPS], 0
    if s.options[THROUGH_PEERS]:
        for device in range(len(s.devices)):
            for other in range(len(s.devices)):
                if _takes_part(s, device, j) and _takes_part(s, other, j):
                    read(c, s.devices[other, GRADIENT_HERE])
                    wait(c, s.devices[other, COMPUTED])
            if _takes_part(s, device, j):
                emit(c, ALL_REDUCE, device, ON_PEER_IN, layer, following, ZERO, ZERO)
                num_ops += 1
    for device in range(len(s.devices)):
        if not _takes_part(s, device, j):
            continue
        block = s.devices[device, GRADIENT_HERE]
        free(c, block)
        if s.options[THROUGH_PEERS] and device != root:
            emit(c, FREE, device, ON_MEMORY, layer, following, ZERO, ZERO)
            continue
        for op in range(first_op, first_op + num_ops):
            wait(c, op)
        read(c, block)
        position = 0
        while s.gradients[layer, position] >= 0:
            position += 1
        s.gradients[layer, position] = write(
            c, GRADIENT, HOST_DEVICE, layer, following, ZERO, ZERO, s.layers[layer, GRADIENT_BYTES]
        )
        emit(c, SWAP_OUT, device, ON_SWAP_OUT, layer, following, ZERO, ZERO)


@compiled
def _update(c: Construction, s: Streaming, layer: Int) -> None:
    """On the host, when every device has ended; also with the gradients of later layers that share parameters."""
    for device in range(len(s.devices)):
        wait(c, s.devices[device, COMPUTED])
    for block in s.gradients[layer]:
        read(c, block)
        free(c, block)
    for other in range(layer + 1, s.options[NUM_LAYERS]):
        for owner in s.owners[other]:
            if owner == layer:
                for block in s.gradients[other]:
                    read(c, block)
    emit(c, UPDATE, HOST_DEVICE, ON_HOST, layer, layer + 1, ZERO, ZERO)
