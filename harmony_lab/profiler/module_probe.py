"""Shapes, random ops and updated buffers of modules, found by running them on a few samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerCall, TensorSpec
from harmony_lab.profiler.batch import BatchStructure, TensorTree
from harmony_lab.profiler.module_function import ModulesFunction
from harmony_lab.profiler.randomness import BatchDim, PerSampleRandomness
from harmony_lab.profiler.repeat import check_modules_repeat
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
    buffers = [tensors[name].clone() for name in group.buffers]
    given = [[tensor.clone() for _, tensor in function.inputs.tensors] for _ in range(2)]
    versions = [tensor._version for tensor in given[0]]
    parameters = [tensors[name] for name in group.parameters]
    (output, shapes), (again, _) = _two_runs(function, parameters, buffers, given, samples)
    function.clones_inputs = any(tensor._version != version for tensor, version in zip(given[0], versions, strict=True))
    # By value: batch norm writes its statistics without counting up their version.
    updated = tuple(
        name for name, new in zip(group.buffers, buffers, strict=True) if not torch.equal(new, tensors[name])
    )
    function.outputs = None if function.loss_fn is not None else TensorTree(output)
    outputs = (output,) if function.outputs is None else tuple(tensor for _, tensor in function.outputs.tensors)
    found = (again,) if function.outputs is None else function.outputs.match(again, "the output")
    if not all(_equal(a, b) for a, b in zip(outputs, found, strict=True)):
        raise DecomposeError(
            f"the output of {group.name} depends on what its forward changes"
            + (f" (buffers {', '.join(updated)})" if updated else "")
            + ": backward recomputes the forward pass and would see another value; keep that state outside the model"
        )
    return output, Probe(outputs, shapes, updated)


def _two_runs(
    function: ModulesFunction,
    parameters: Sequence[Any],
    buffers: Sequence[Any],
    given: Sequence[Sequence[Any]],
    samples: int,
) -> tuple[tuple[Any, tuple[tuple[int, ...], ...]], ...]:
    """Twice an output and the shapes of random draws; as recompute, the second run sees buffers that are updated."""
    wanted = [tensor for _, tensor in function.targets.tensors] if function.targets is not None else []
    call = LayerCall(samples=(0, samples), sizes={"batch": samples}, seed=0, device=None)
    inputs = iter(given)

    def run() -> tuple[Any, tuple[tuple[int, ...], ...]]:
        assert function.inputs is not None
        with torch.no_grad(), PerSampleRandomness(call, None) as randomness:
            output = function.run(parameters, buffers, function.inputs.build(next(inputs)), wanted)
        return output, tuple(randomness.shapes)

    named = {"parameter": [parameters], "buffer": [buffers], "input": given, "target": [wanted]}
    names = {
        id(tensor): f"{role} {place}"
        for role, lists in named.items()
        for listed in lists
        for place, tensor in enumerate(listed)
    }
    return check_modules_repeat(function.group.name, list(_parts(function)), names, run)


def _parts(function: ModulesFunction) -> Iterator[tuple[str, Any]]:
    """The modules of a layer and its loss, with names."""
    for position, root in enumerate(function.group.modules):
        prefix = function.group.name if position == 0 else type(root).__name__
        for path, module in root.named_modules():
            yield f"{prefix}.{path}".rstrip("."), module
    if function.loss_fn is not None and not isinstance(function.loss_fn, nn.Module):
        yield "loss_fn", function.loss_fn


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit on the host; a GPU may add up in another order."""
    tolerance = 0.0 if a.device.type == "cpu" else 1e-4
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


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
