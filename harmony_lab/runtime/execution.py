"""Running layers: forward, forward with gradient and backward of consecutive layers, one layer at a time.

Knows no devices, streams or blocks: tensors in, tensors out.  Values travel by name in one dictionary, so a value that
only passes through (a mask, a skip connection) costs nothing until the layer that reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from harmony_lab.layers import Layer, LayerCall, LayerSequence

__all__ = [
    "Root",
    "SavedLayer",
    "clone_updated_buffers",
    "own",
    "run_backward",
    "run_forward",
    "run_layer_with_gradient",
    "run_with_gradient",
    "storage_ids",
]


_Form = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(slots=True)
class SavedLayer:
    """What a layer's forward with gradient leaves for its backward.

    ``inputs``: the leaf tensors that need a gradient.  ``outputs``: those with a gradient function; they hold what
    autograd saved.
    """

    inputs: dict[str, Tensor]
    outputs: "dict[str, Tensor | Root]"


class Root(NamedTuple):
    """An output without its memory: where backward begins, and its form."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


# -- forward ------------------------------------------------------------------------------------------------------


def run_forward(
    layers: LayerSequence,
    start: int,
    stop: int,
    state: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    values: dict[str, Tensor],
    batch: Mapping[str, Tensor],
    call: LayerCall,
    keep: Sequence[int],
) -> dict[int, dict[str, Tensor]]:
    """Layers [start, stop) without gradient; returns the values of each boundary in ``keep``, with memory of their own.

    ``values``: those of boundary ``start``; the dictionary is used up: a value is dropped as soon as neither a later
    layer nor a later boundary in ``keep`` needs it.
    """
    last_needed = _last_needed(layers, start, stop, keep)
    foreign = storage_ids(state.values(), buffers.values(), values.values(), batch.values())
    kept = {}
    with torch.no_grad():
        if start in keep:
            kept[start] = _boundary_values(layers, start, values, foreign)
        _drop(values, last_needed, start - 1)
        for index in range(start, stop):
            layer = layers.layers[index]
            inputs = [values[name] for name in layer.inputs]
            outputs = _call(layer, state, buffers, inputs, batch, call)
            values.update(zip(layer.outputs, outputs, strict=True))
            del inputs, outputs
            if index + 1 in keep:
                kept[index + 1] = _boundary_values(layers, index + 1, values, foreign)
            _drop(values, last_needed, index)
    return kept


def run_with_gradient(
    layers: LayerSequence,
    start: int,
    stop: int,
    state: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    values: dict[str, Tensor],
    batch: Mapping[str, Tensor],
    call: LayerCall,
    keep: Sequence[int],
) -> tuple[dict[int, dict[str, Tensor]], list[SavedLayer]]:
    """The same with gradient, and what backward needs, layer by layer: values are detached between layers, so that
    backward can run, and free, one layer at a time.

    Kept boundaries are copies: what autograd saved stays its own.
    """
    last_needed = _last_needed(layers, start, stop, keep)
    kept = {}
    saved = []
    if start in keep:
        kept[start] = _copies(layers, start, values)
    _drop(values, last_needed, start - 1)
    for index in range(start, stop):
        saved.append(run_layer_with_gradient(layers, index, state, buffers, values, batch, call))
        if index + 1 in keep:
            kept[index + 1] = _copies(layers, index + 1, values)
        _drop(values, last_needed, index)
    return kept, saved


def run_layer_with_gradient(
    layers: LayerSequence,
    index: int,
    state: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    values: dict[str, Tensor],
    batch: Mapping[str, Tensor],
    call: LayerCall,
) -> SavedLayer:
    """One layer with gradient: reads its inputs from ``values`` and adds its outputs, detached."""
    layer = layers.layers[index]
    differentiable = {spec.name for spec in layers.boundaries[index] if spec.requires_grad}
    leaves = {
        name: values[name].detach().requires_grad_()
        for name in dict.fromkeys(layer.inputs)
        if name in differentiable and (values[name].is_floating_point() or values[name].is_complex())
    }
    inputs = [leaves.get(name, values[name]) for name in layer.inputs]
    with torch.enable_grad():
        outputs = dict(zip(layer.outputs, _call(layer, state, buffers, inputs, batch, call), strict=True))
    values.update((name, output.detach()) for name, output in outputs.items())
    return SavedLayer(leaves, {name: output for name, output in outputs.items() if output.requires_grad})


def clone_updated_buffers(
    layers: LayerSequence, start: int, stop: int, buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """``buffers`` with copies of those that layers [start, stop) update: what a recompute may write to."""
    copies = {name: buffers[name].detach().clone() for name in layers.updated_buffers_of(start, stop)}
    return {**buffers, **copies}


def _call(
    layer: Layer,
    state: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    batch: Mapping[str, Tensor],
    call: LayerCall,
) -> tuple[Tensor, ...]:
    return layer.function(
        [state[name] for name in layer.parameters],
        [buffers[name] for name in layer.buffers],
        inputs,
        [batch[name] for name in layer.batch_inputs],
        replace(call, first_random_op=layer.first_random_op),
    )


# -- backward -----------------------------------------------------------------------------------------------------


def run_backward(
    layers: LayerSequence,
    start: int,
    stop: int,
    saved: list[SavedLayer],
    output_gradients: dict[str, Tensor],
    *,
    seed_gradient: float | None,
) -> dict[str, Tensor]:
    """Backward of layers [start, stop), last first; returns the gradients of boundary ``start``'s values that need one,
    each with memory of its own (zeros where no path leads to the loss).

    Parameters' gradients are added to ``.grad`` of the state tensors that forward ran with, in place where it is set.
    ``saved`` and ``output_gradients`` (by value name, of boundary ``stop``) are emptied as it goes.
    ``seed_gradient``: for a pack that ends with the loss, the gradient of the loss: its weight in the minibatch.
    """
    assert len(saved) == stop - start, "one SavedLayer per layer"
    foreign = storage_ids(output_gradients.values())
    gradients = dict(output_gradients)
    output_gradients.clear()
    if seed_gradient is not None:
        (loss,) = layers.boundaries[stop]
        if loss.name in saved[-1].outputs:
            gradients[loss.name] = _full_like(saved[-1].outputs[loss.name], seed_gradient)
    without_path: dict[str, _Form] = {}
    while saved:
        layer = saved.pop()
        _run_layer_backward(layer, gradients)
        _collect_gradients(layer, gradients, without_path)
        del layer
    wanted = [spec.name for spec in layers.boundaries[start] if spec.requires_grad]
    for name in wanted:
        if name not in gradients and name in without_path:
            shape, dtype, device = without_path[name]
            gradients[name] = torch.zeros(shape, dtype=dtype, device=device)
    return own({name: gradients[name] for name in wanted if name in gradients}, foreign)


def _run_layer_backward(layer: SavedLayer, gradients: dict[str, Tensor]) -> None:
    """Autograd of one layer, from the gradients of its outputs, which are dropped."""
    roots = [name for name in layer.outputs if name in gradients]
    outputs: list[Any] = [_beginning(layer.outputs[name]) for name in roots]
    output_gradients = [gradients.pop(name) for name in roots]
    layer.outputs.clear()
    if outputs:
        torch.autograd.backward(outputs, output_gradients)


def _full_like(output: "Tensor | Root", value: float) -> Tensor:
    return torch.full(output.shape, value, dtype=output.dtype, device=output.device)


def _beginning(output: "Tensor | Root") -> Tensor | GradientEdge:
    return output.edge if isinstance(output, Root) else output


def _collect_gradients(layer: SavedLayer, gradients: dict[str, Tensor], without_path: dict[str, _Form]) -> None:
    """Move the gradients of the layer's inputs to ``gradients``, added to what later layers left there."""
    for name, leaf in layer.inputs.items():
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            without_path[name] = leaf.shape, leaf.dtype, leaf.device
        else:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient


# -- values -------------------------------------------------------------------------------------------------------


def own(tensors: Mapping[str, Tensor], foreign: set[int]) -> dict[str, Tensor]:
    """The same tensors, detached and contiguous, each with a storage of its own and of exactly its size.

    Copies those that share a storage in ``foreign`` (see ``storage_ids``), or with each other, or that are part of a
    larger one.  Adds the storages of the results to ``foreign``.
    """
    owned = {}
    for name, given in tensors.items():
        tensor = given.detach()
        storage = tensor.untyped_storage()
        if (
            storage._cdata in foreign
            or storage.nbytes() != tensor.numel() * tensor.element_size()
            or not tensor.is_contiguous()
        ):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        foreign.add(tensor.untyped_storage()._cdata)
        owned[name] = tensor
    return owned


def storage_ids(*tensors: Iterable[Tensor]) -> set[int]:
    """Identities of the storages of these tensors, valid while they live."""
    return {tensor.untyped_storage()._cdata for group in tensors for tensor in group}


def _boundary_values(
    layers: LayerSequence, boundary: int, values: Mapping[str, Tensor], foreign: set[int]
) -> dict[str, Tensor]:
    return own({spec.name: values[spec.name] for spec in layers.boundaries[boundary]}, foreign)


def _copies(layers: LayerSequence, boundary: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        spec.name: values[spec.name].detach().clone(memory_format=torch.contiguous_format)
        for spec in layers.boundaries[boundary]
    }


def _last_needed(layers: LayerSequence, start: int, stop: int, keep: Sequence[int]) -> dict[str, int]:
    """The layer after which each value is needed no more (``start - 1``: not even by the first)."""
    last: dict[str, int] = {}
    for boundary in keep:
        for spec in layers.boundaries[boundary]:
            last[spec.name] = max(last.get(spec.name, start - 1), boundary - 1)
    for index in range(start, stop):
        for name in layers.layers[index].inputs:
            last[name] = max(last.get(name, start - 1), index)
    return last


def _drop(values: dict[str, Tensor], last_needed: Mapping[str, int], index: int) -> None:
    for name in [name for name in values if last_needed.get(name, index) <= index]:
        del values[name]
