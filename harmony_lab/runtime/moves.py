"""Moves: which tensors an op copies from where to where.  Builds lists of copies; the backend carries them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harmony_lab.layers import LayerSequence, TensorSpec
from harmony_lab.machine import HOST
from harmony_lab.program import Op, Program, TensorKind, shard_bounds
from harmony_lab.runtime.backend import Backend, Copy
from harmony_lab.runtime.blocks import Blocks
from harmony_lab.runtime.buffers import BufferUpdates
from harmony_lab.runtime.device_memory import Values
from harmony_lab.runtime.device_updates import DeviceUpdates
from harmony_lab.runtime.host import PackReader
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.reduction import Shard
from harmony_lab.runtime.swapped_state import fetched, returning

__all__ = ["Left", "Stores", "batch_slice", "receive", "shards", "swap_in", "swap_out"]

_FLAT = (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.GRADIENT)
_Pairs = list[tuple[Tensor, Tensor]]
_Shapes = dict[str, tuple[torch.Size, torch.dtype]]


class Left(NamedTuple):
    """What left a device for the stores, to be put there once it has come: buffers by pack, the optimizer's state by
    parameter."""

    buffers: dict[tuple[int, int], Mapping[str, Tensor]]
    states: dict[str, dict[str, Any]]


def batch_slice(
    layers: LayerSequence, names: Sequence[str], batch: Mapping[str, Tensor], samples: tuple[int, int], num_samples: int
) -> Values:
    """Those entries of a batch of ``num_samples``, cut to the samples [start, stop)."""
    whole = (0, num_samples)
    return {name: _cut(batch[name], layers.batch_by_name[name], whole, samples) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """What a step's state comes from and goes to on the host: parameters, buffers, the optimizer's state."""

    parameters: PackReader
    buffers: BufferUpdates
    optimizer: PackOptimizer
    updates: DeviceUpdates
    backend: Backend


def swap_in(
    op: Op, program: Program, layers: LayerSequence, blocks: Blocks, stores: Stores, batch: Mapping[str, Tensor]
) -> list[Copy]:
    """Allocates what the op writes."""
    copies = []
    store = stores.parameters
    for index in op.writes:
        block = program.blocks[index]
        match block.kind:
            case TensorKind.WEIGHT:
                memory = blocks.allocate_flat(index, op).memory
                parts = store.parts_of(block.layers, blocks.absent(index))
                pairs = [(memory[at : at + part.nbytes], part) for part, at in parts]
            case TensorKind.BUFFER:
                present = store.buffers_of(block.layers)
                stores.buffers.bring_up_to_date(index, present, blocks.layout(index))
                pairs = [(blocks.allocate_flat(index, op).memory, present)]
            case TensorKind.OPTIMIZER:
                state, pairs = fetched(stores.optimizer, block.layers, stores.backend.torch_device(op.device))
                blocks.adopt_state(index, state, op)
            case TensorKind.SAVED:
                (source,) = op.reads
                pairs = blocks.come_back(index, source, op)
            case TensorKind.GRADIENT:
                (source,) = (i for i in op.reads if program.blocks[i]._replace(device=block.device) == block)
                pairs = [(blocks.allocate_flat(index, op).memory, blocks.flat(source).memory)]
            case TensorKind.INPUT:
                names = layers.batch_inputs_of(*block.layers)
                given = batch_slice(layers, names, batch, block.samples, program.minibatch_size)
                values = blocks.allocate_values(index, op, _shapes(given))
                pairs = [(values[name], part) for name, part in given.items()]
            case _:
                pairs = _assemble(index, op, program, layers, blocks)
        copies.append(Copy(HOST, op.device, block.kind, pairs))
    return copies


def _assemble(index: int, op: Op, program: Program, layers: LayerSequence, blocks: Blocks) -> _Pairs:
    """One block of values from the host blocks that hold its samples, wherever those were cut."""
    block = program.blocks[index]
    sources = [
        (program.blocks[i].samples, blocks.values(i))
        for i in op.reads
        if program.blocks[i].kind is block.kind and program.blocks[i].layers == block.layers
    ]
    specs = {spec.name: spec for spec in layers.boundaries[block.layers[0]]}
    first, last = block.samples
    parts = [
        ((max(first, start), min(last, stop)), (start, stop), source)
        for (start, stop), source in sources
        if max(first, start) < min(last, stop)
    ]
    assert sum(cut[1] - cut[0] for cut, _, _ in parts) == last - first, f"{op}: its reads do not cover {block}"
    _, samples, example = parts[0]
    shapes = {
        name: (_resized(tensor, specs[name], samples, block.samples), tensor.dtype) for name, tensor in example.items()
    }
    values = blocks.allocate_values(index, op, shapes)
    return [
        (_cut(values[name], specs[name], block.samples, cut), _cut(tensor, specs[name], samples, cut))
        for cut, samples, source in parts
        for name, tensor in source.items()
    ]


def swap_out(op: Op, program: Program, blocks: Blocks, stores: Stores) -> tuple[list[Copy], Left]:
    """Allocates the host blocks that the op writes."""
    copies = []
    left = Left({}, {})
    brings = stores.updates.brings(op.device, op.layers)
    destinations = iter(op.writes)
    for index in op.reads:
        block = program.blocks[index]
        if block.kind is TensorKind.BUFFER:
            memory = blocks.flat(index).memory
            staging = torch.empty_like(memory, device="cpu")
            left.buffers[block.layers] = blocks.layout(index).views(staging)
            pairs = [(staging, memory)]
        elif block.kind is TensorKind.WEIGHT:
            own = stores.parameters.parts_of(block.layers, blocks.absent(index), own=True) if brings else []
            pairs = _to_store(blocks.flat(index).memory, own)
        elif block.kind is TensorKind.OPTIMIZER:
            states, pairs = returning(stores.optimizer, blocks.optimizer_state(index), keeps=brings)
            left.states.update(states if brings else {})
        elif block.kind is TensorKind.SAVED:
            pairs = blocks.leave_device(index, next(destinations))
        else:
            pairs = _duplicate(index, next(destinations), op, program, blocks)
        copies.append(Copy(op.device, HOST, block.kind, pairs))
    return copies, left


def _to_store(memory: Tensor, own: Sequence[tuple[Tensor, int]]) -> _Pairs:
    """All of a block's weights to the host: ``own`` to their places in the store, the others to nowhere."""
    pairs, stop = [], 0
    for part, at in own:
        pairs += _to_nowhere(memory[stop:at])
        stop = at + part.nbytes
        pairs.append((part, memory[at:stop]))
    return pairs + _to_nowhere(memory[stop:])


def _to_nowhere(memory: Tensor) -> _Pairs:
    return [(torch.empty_like(memory, device="cpu"), memory)] if memory.nbytes else []


def receive(op: Op, program: Program, blocks: Blocks) -> list[Copy]:
    """Allocates what the op writes."""
    copies = []
    for source, destination in zip(op.reads, op.writes, strict=True):
        pairs = _duplicate(source, destination, op, program, blocks)
        block = program.blocks[source]
        copies.append(Copy(block.device, op.device, block.kind, pairs))
    return copies


def _duplicate(source: int, destination: int, op: Op, program: Program, blocks: Blocks) -> _Pairs:
    """Allocate a block with the shape of another."""
    if program.blocks[source].kind in _FLAT:
        return [(blocks.allocate_flat(destination, op).memory, blocks.flat(source).memory)]
    given = blocks.values(source)
    values = blocks.allocate_values(destination, op, _shapes(given))
    return [(values[name], tensor) for name, tensor in given.items()]


def shards(op: Op, program: Program, blocks: Blocks) -> list[Shard]:
    """The part of a pack's gradients that this op's device sums up, on every device."""
    parts = [program.blocks[index] for index in op.reads]
    rank = next(i for i, block in enumerate(parts) if block.device == op.device)
    start, stop = shard_bounds(parts[rank].num_bytes, len(parts), rank)
    layout = blocks.layout(op.reads[rank])
    return [
        Shard(block.device, layout.spans(blocks.flat(index).memory, start, stop))
        for index, block in zip(op.reads, parts, strict=True)
    ]


def _cut(tensor: Tensor, spec: TensorSpec, samples: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """The part of a tensor over ``samples`` that belongs to the samples ``wanted``."""
    if spec.batch_dim is None:
        return tensor
    per_sample = tensor.shape[spec.batch_dim] // (samples[1] - samples[0])
    return tensor.narrow(spec.batch_dim, (wanted[0] - samples[0]) * per_sample, (wanted[1] - wanted[0]) * per_sample)


def _resized(tensor: Tensor, spec: TensorSpec, samples: tuple[int, int], wanted: tuple[int, int]) -> torch.Size:
    """The shape that a tensor over ``samples`` has over the samples ``wanted``."""
    shape = list(tensor.shape)
    if spec.batch_dim is None:
        assert samples == wanted, (
            f"{spec.name} has no batch dimension and cannot be cut from samples {samples} to {wanted}"
        )
    else:
        shape[spec.batch_dim] = shape[spec.batch_dim] // (samples[1] - samples[0]) * (wanted[1] - wanted[0])
    return torch.Size(shape)


def _shapes(values: Values) -> _Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in values.items()}
