"""Shapes, random ops and updated buffers of modules, found by running them on a few samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerCall, TensorSpec
from harmony_lab.profiler.batch import BatchStructure, TensorTree
from harmony_lab.profiler.module_function import ModulesFunction
from harmony_lab.profiler.randomness import BatchDim, PerSampleRandomness
from harmony_lab.profiler.state import dtype_name

__all__ = ["Probe", "probe", "shapes_of"]

_PROBE_SAMPLES = (2, 3)


@dataclass(frozen=True, slots=True)
class Probe:
    """What one run of one layer showed, for one number of samples."""

    outputs: tuple[torch.Tensor, ...]
    random_shapes: tuple[tuple[int, ...], ...]
    updated: tuple[str, ...]


def probe(
    functions: Sequence[ModulesFunction], tensors: Mapping[str, torch.Tensor], structure: BatchStructure
) -> list[list[Probe]]:
    """Per number of samples, per layer; buffers are copies, so nothing of the user's changes."""
    runs = []
    for samples in _PROBE_SAMPLES:
        leaves = [
            tensor.detach().index_select(0, torch.arange(samples, device=tensor.device) % tensor.shape[0])
            if spec.batched
            else tensor
            for spec, tensor in zip(structure.tensors, structure.example, strict=True)
        ]
        inputs, targets = structure.rebuild(leaves)
        value, run = inputs, []
        for index, function in enumerate(functions):
            value, probe = _probe_layer(function, tensors, value, targets, samples, first=index == 0)
            run.append(probe)
        runs.append(run)
    return runs


def _probe_layer(
    function: ModulesFunction,
    tensors: Mapping[str, torch.Tensor],
    value: Any,
    targets: Any,
    samples: int,
    *,
    first: bool,
) -> tuple[Any, Probe]:
    group = function.group
    function.inputs = TensorTree(value)
    function.num_input_batch = len(function.inputs.tensors) if first else 0
    if function.loss_fn is not None:
        function.targets = TensorTree(targets)
    given = [tensor.clone() for _, tensor in function.inputs.tensors]
    wanted = [tensor for _, tensor in function.targets.tensors] if function.targets is not None else []
    parameters = [tensors[name] for name in group.parameters]
    buffers = [tensors[name].clone() for name in group.buffers]
    versions = [tensor._version for tensor in given]
    call = LayerCall(samples=(0, samples), sizes={"batch": samples}, seed=0, device=None)
    with torch.no_grad(), PerSampleRandomness(call, None) as randomness:
        output = function.run(parameters, buffers, function.inputs.build(given), wanted)
    function.clones_inputs = any(tensor._version != version for tensor, version in zip(given, versions, strict=True))
    # By value: batch norm writes its statistics without counting up their version.
    updated = tuple(
        name for name, new in zip(group.buffers, buffers, strict=True) if not torch.equal(new, tensors[name])
    )
    function.outputs = None if function.loss_fn is not None else TensorTree(output)
    outputs = (output,) if function.outputs is None else tuple(tensor for _, tensor in function.outputs.tensors)
    if updated:
        _check_output_does_not_move(function, parameters, buffers, call, outputs, updated)
    return output, Probe(outputs, tuple(randomness.shapes), updated)


def _check_output_does_not_move(
    function: ModulesFunction,
    parameters: Sequence[Any],
    buffers: Sequence[Any],
    call: LayerCall,
    outputs: Sequence[torch.Tensor],
    updated: Sequence[str],
) -> None:
    """Recompute runs with buffers that forward has updated: it must give the same."""
    assert function.inputs is not None
    given = [tensor.clone() for _, tensor in function.inputs.tensors]
    wanted = [tensor for _, tensor in function.targets.tensors] if function.targets is not None else []
    with torch.no_grad(), PerSampleRandomness(call, None):
        again = function.run(parameters, buffers, function.inputs.build(given), wanted)
    found = (again,) if function.outputs is None else function.outputs.match(again, "the output")
    if not all(torch.equal(a, b) for a, b in zip(outputs, found, strict=True)):
        raise DecomposeError(
            f"the output of {function.group.name} depends on buffers that its forward updates ({', '.join(updated)}): "
            "backward recomputes the forward pass and would see the updated values; keep that state outside the model"
        )


def shapes_of(
    functions: Sequence[ModulesFunction], probes: Sequence[Sequence[Probe]], tensors: Mapping[str, torch.Tensor]
) -> tuple[list[list[TensorSpec]], list[tuple[BatchDim, ...]]]:
    """What crosses from each layer to the next, and the batch dimension of each layer's random ops."""
    values: list[list[TensorSpec]] = []
    random_ops = []
    trains = False
    for index, (function, small, large) in enumerate(zip(functions, *probes, strict=True)):
        name = function.group.name
        trains = trains or any(tensors[parameter].requires_grad for parameter in function.group.parameters)
        if len(small.outputs) != len(large.outputs) or len(small.random_shapes) != len(large.random_shapes):
            raise DecomposeError(
                f"{name} computes another number of tensors or random draws for another number of samples"
            )
        specs = []
        for position, (a, b) in enumerate(zip(small.outputs, large.outputs, strict=True)):
            dim, factor, _ = _batch_dim(tuple(a.shape), tuple(b.shape), f"output {position} of {name}")
            specs.append(
                TensorSpec(
                    name="loss" if function.loss_fn is not None else f"value_{index}_{position}",
                    shape=tuple(factor if d == dim else length for d, length in enumerate(a.shape)),
                    dtype=dtype_name(a.dtype),
                    item_bytes=a.element_size(),
                    batch_dim=dim,
                    requires_grad=trains and (a.is_floating_point() or a.is_complex()),
                )
            )
        values.append(specs)
        shapes = zip(small.random_shapes, large.random_shapes, strict=True)
        random_ops.append(tuple(_batch_dim(a, b, f"a random op of {name}") for a, b in shapes))
    return values, random_ops


def _batch_dim(small: tuple[int, ...], large: tuple[int, ...], what: str) -> BatchDim:
    low, high = _PROBE_SAMPLES
    found = [dim for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if not found:
        return BatchDim(None, 1)
    factor = large[found[0]] - small[found[0]]
    if len(found) > 1 or small[found[0]] != low * factor or large[found[0]] != high * factor:
        raise DecomposeError(
            f"{what} has shape {small} for {low} samples and {large} for {high}: "
            "exactly one dimension must grow with the samples"
        )
    return BatchDim(found[0], factor)
