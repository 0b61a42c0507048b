"""Layers from modules that are run in sequence, for models that cannot be captured as a graph.

Each layer calls its modules with the parameters and buffers it is given (``torch.func.functional_call``).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import Layer, LayerSequence, TensorSpec
from harmony_lab.profiler.batch import BatchStructure
from harmony_lab.profiler.extract import digest
from harmony_lab.profiler.module_function import Group, LossCount, ModulesFunction, loss_count, weight_of
from harmony_lab.profiler.module_probe import Probe, probe, shapes_of
from harmony_lab.profiler.randomness import BatchDim
from harmony_lab.profiler.state import batch_specs, state_specs

__all__ = ["decompose_modules", "sequential_groups"]


def sequential_groups(model: nn.Sequential) -> list[list[nn.Module]]:
    """Children of a Sequential, those without parameters with their predecessor."""
    groups: list[list[nn.Module]] = []
    for child in model:
        if groups and (not any(True for _ in child.parameters()) or not any(_parameters(groups[-1]))):
            groups[-1].append(child)
        else:
            groups.append([child])
    return groups


def _parameters(modules: Iterable[nn.Module]) -> list[bool]:
    return [True for module in modules for _ in module.parameters()]


def decompose_modules(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Module]],
    example_batch: Any,
    structure: BatchStructure,
    loss_fn: Callable[..., Any],
    loss_reduction: str | None,
) -> LayerSequence:
    """One layer per group of modules; the loss joins the last."""
    count = loss_count(loss_fn) if loss_reduction is None else LossCount(loss_reduction)
    names, tensors = _named_state(model, loss_fn)
    functions = []
    for index, modules in enumerate(groups):
        last = index == len(groups) - 1
        chain = [*modules, loss_fn] if last and isinstance(loss_fn, nn.Module) else [*modules]
        functions.append(ModulesFunction(_group(model, chain, names), loss_fn if last else None, count))
    probes = probe(functions, tensors, structure)
    return _assemble(model, functions, probes, tensors, example_batch, structure, count)


def _named_state(model: nn.Module, loss_fn: Any) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if isinstance(loss_fn, nn.Module):
        tensors |= {
            f"loss_fn.{name}": tensor for name, tensor in [*loss_fn.named_parameters(), *loss_fn.named_buffers()]
        }
    return {id(tensor): name for name, tensor in reversed(tensors.items())}, tensors


def _group(model: nn.Module, modules: Sequence[nn.Module], names: Mapping[int, str]) -> Group:
    paths = {id(module): name for name, module in model.named_modules()}
    parameters: dict[str, int] = {}
    buffers: dict[str, int] = {}
    local = []
    for module in modules:
        own: dict[str, tuple[str, int]] = {}
        for role, found, table in (
            ("parameter", module.named_parameters(), parameters),
            ("buffer", module.named_buffers(), buffers),
        ):
            for name, tensor in found:
                if id(tensor) not in names:
                    raise DecomposeError(
                        f"layers: {role} {name} of {type(module).__name__} is not part of the model; "
                        "every module in layers=[...] must be a module of the model that is passed"
                    )
                own[name] = (role, table.setdefault(names[id(tensor)], len(table)))
        local.append(own)
    shown = [paths.get(id(module)) or type(module).__name__ for module in modules]
    return Group(shown[0], tuple(modules), tuple(parameters), tuple(buffers), tuple(local))


def _assemble(
    model: nn.Module,
    functions: Sequence[ModulesFunction],
    probes: Sequence[Sequence[Probe]],
    tensors: Mapping[str, torch.Tensor],
    example_batch: Any,
    structure: BatchStructure,
    count: LossCount,
) -> LayerSequence:
    values, random_ops = shapes_of(functions, probes, tensors)
    layers, texts = _layers(functions, probes[0], values, random_ops, [spec.name for spec in structure.tensors])
    state, buffer_state = state_specs(layers, tensors)
    batched = next(spec.name for spec in structure.tensors if spec.batched)
    return LayerSequence(
        model=model,
        layers=layers,
        boundaries=((), *(tuple(specs) for specs in values)),
        batch=batch_specs(structure),
        state=state,
        buffer_state=buffer_state,
        tensors={name: tensors[name] for name in (*state, *buffer_state)},
        flatten_batch=structure.flatten,
        example_sizes={"batch": structure.num_samples},
        loss_weight=weight_of(count, batched),
        loss_reduction=count.reduction,
        couples_samples=tuple(f.group.name for f in functions if any(_batch_norms(f.group.modules))),
        buffer_decay=_decay(functions, probes[0]),
        random_ops=tuple(op for ops in random_ops for op in ops),
        fingerprint=digest(
            "\n\n".join([_numbered("\n\n".join(texts)), *map(repr, [*state.values(), *buffer_state.values()])])
        ),
        example_batch=example_batch,
    )


def _layers(
    functions: Sequence[ModulesFunction],
    probes: Sequence[Probe],
    values: Sequence[Sequence[TensorSpec]],
    random_ops: Sequence[tuple[BatchDim, ...]],
    batch_names: list[str],
) -> tuple[tuple[Layer, ...], list[str]]:
    kinds: dict[str, tuple[int, ModulesFunction]] = {}
    layers, texts, first_random = [], [], 0
    for index, (function, shown, ops) in enumerate(zip(functions, probes, random_ops, strict=True)):
        function.random_ops = ops
        group = function.group
        given = values[index - 1] if index else []
        shapes = [(spec.shape, spec.dtype, spec.batch_dim, spec.requires_grad) for spec in given]
        text = "\n".join(
            [*map(_module_text, group.modules), repr(shapes), repr(ops), repr(index == 0), repr(group.local)]
        )
        text += f"\nloss {id(function.loss_fn)}" if function.loss_fn is not None else ""
        kind, shared = kinds.setdefault(text, (len(kinds), function))
        texts.append(text)
        batch = batch_names[: function.num_input_batch]
        batch += batch_names[functions[0].num_input_batch :] if function.loss_fn is not None else []
        layers.append(
            Layer(
                name=group.name,
                kind=kind,
                parameters=group.parameters,
                buffers=group.buffers,
                updated_buffers=shown.updated,
                inputs=tuple(spec.name for spec in given),
                batch_inputs=tuple(batch),
                outputs=tuple(spec.name for spec in values[index]),
                function=shared,
                first_random_op=first_random,
                num_random_ops=len(ops),
            )
        )
        first_random += len(ops)
    return tuple(layers), texts


def _module_text(module: nn.Module) -> str:
    """Class, settings and state of a module and its children: equal texts compute equally."""
    hidden = ("_parameters", "_buffers", "_modules")
    settings = [
        f"{name}={_setting_text(value)}"
        for name, value in sorted(vars(module).items())
        if name not in hidden and not (isinstance(value, dict) and not value)  # no hooks
    ]
    state = [
        f"{name} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for name, t in module.named_parameters(recurse=False)
    ]
    state += [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in module.named_buffers(recurse=False)]
    children = [f"{name}: {_module_text(child)}" for name, child in module.named_children()]
    return f"{type(module).__module__}.{type(module).__qualname__}({settings} {state} {children})"


def _setting_text(value: Any) -> str:
    if isinstance(value, bool | int | float | str | torch.dtype | torch.Size) or value is None:
        return repr(value)
    if isinstance(value, tuple | list | set | frozenset):
        return f"{type(value).__name__}({', '.join(_setting_text(item) for item in value)})"
    return f"object {id(value)}"  # equal only to itself


def _numbered(text: str) -> str:
    """The same text with objects numbered as they appear, so that it is the same in every process."""
    numbers: dict[str, int] = {}
    return re.sub(r"\b(object|loss) (\d+)", lambda m: f"{m[1]} {numbers.setdefault(m[2], len(numbers))}", text)


def _batch_norms(modules: Iterable[nn.Module]) -> list[_BatchNorm]:
    found = (inner for module in modules for inner in module.modules())
    return [inner for inner in found if isinstance(inner, _BatchNorm) and inner.training]


def _decay(functions: Sequence[ModulesFunction], probes: Sequence[Probe]) -> dict[str, float | None]:
    decay: dict[str, float | None] = {name: None for probe in probes for name in probe.updated}
    for function in functions:
        group = function.group
        for module, local in zip(group.modules, group.local, strict=True):
            for path, inner in module.named_modules():
                if isinstance(inner, _BatchNorm) and inner.momentum is not None:
                    factors = {
                        "running_mean": 1 - inner.momentum,
                        "running_var": 1 - inner.momentum,
                        "num_batches_tracked": 1.0,
                    }
                    for name, factor in factors.items():
                        place = local.get(f"{path}.{name}".removeprefix("."))
                        if place is not None and group.buffers[place[1]] in decay:
                            decay[group.buffers[place[1]]] = factor
    return decay
