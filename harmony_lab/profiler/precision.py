"""in_precision: layers that compute in another precision, under torch's autocast, with the types that then cross
boundaries."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import Layer, LayerCall, LayerFunction, LayerSequence, StateSpec, TensorSpec
from harmony_lab.machine import Backend, Machine
from harmony_lab.precision import Precision
from harmony_lab.profiler.bench import Bench
from harmony_lab.profiler.extract import GraphFunction
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.module_function import ModulesFunction
from harmony_lab.profiler.nodes import op_name
from harmony_lab.profiler.state import dtype_name

__all__ = ["AutocastFunction", "in_precision", "plain_precision"]

_SAMPLES = 2  # batch norm refuses a single one
_DTYPE = torch.bfloat16
_SHADOWED = "float32"

# Ops that autocast runs in bf16, on the CPU as on GPUs: what they read may be bf16 already.
_LOW = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention"),
    *(f"{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3)),
}
# Ops that only look at a tensor in another way.
_VIEWS = {"t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "expand", "detach", "numpy_T"}
_LOW_MODULES = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_Key = tuple[Any, ...]


def in_precision(
    layers: LayerSequence,
    precision: Precision | str,
    machine: Machine | str | None = None,
    *,
    shadows: bool = True,
) -> LayerSequence:
    """The same layers over the same tensors, computing in that precision (see ``harmony_lab.precision``).

    ``machine``: where they will run, or torch's type of device, such as ``"cuda"``; by default the CPU, or what they
    were made for.  The types in which values cross boundaries follow autocast's lists for that type of device.
    ``shadows``: without, devices get the fp32 weights themselves, which autocast casts wherever it uses them, as in
    plain PyTorch; so they can update them, as ``planner.baselines`` do.

    Raises ``HarmonyError`` where a layer cannot run so, naming it.
    """
    precision = Precision.of(precision)
    plain = layers if layers.in_fp32 is None else layers.in_fp32
    if precision is Precision.FP32:
        return plain
    device = torch.device(_device_type(machine) or layers.device_type or "cpu")
    if (layers.precision, layers.device_type, layers.has_shadows) == (precision, device.type, shadows):
        return layers
    state = {name: _with_shadow(spec) if shadows else spec for name, spec in plain.state.items()}
    functions: dict[int, AutocastFunction] = {}
    cast = [replace(layer, function=_function(layer, state, functions)) for layer in plain.layers]
    changed = replace(
        plain, layers=tuple(cast), state=state, precision=precision, in_fp32=plain, device_type=device.type
    )
    return replace(changed, boundaries=_boundaries(changed, device))


def _device_type(machine: Machine | str | None) -> str | None:
    if isinstance(machine, Machine):
        return "cuda" if any(device.backend is Backend.CUDA for device in machine.devices) else "cpu"
    return machine


def _with_shadow(spec: StateSpec) -> StateSpec:
    return replace(spec, shadow=dtype_name(_DTYPE)) if spec.dtype == _SHADOWED else spec


# -- layers -------------------------------------------------------------------------------------------------------


class _InFp32(torch.autograd.Function):
    """A bf16 weight as fp32; its gradient stays fp32, where a cast's would be rounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(frozen=True, slots=True, eq=False)
class AutocastFunction:
    """A ``LayerFunction`` under autocast.  ``widened``: which parameters it reads as fp32."""

    inner: LayerFunction
    widened: tuple[bool, ...]

    def __call__(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        call: LayerCall,
    ) -> tuple[Any, ...]:
        read = [
            _InFp32.apply(weight) if widened and weight.dtype is _DTYPE else weight  # type: ignore[no-untyped-call]
            for weight, widened in zip(parameters, self.widened, strict=True)
        ]
        with torch.autocast(torch.device(call.device).type, _DTYPE, cache_enabled=False):
            return self.inner(read, buffers, inputs, batch, call)


def _function(layer: Layer, state: Mapping[str, StateSpec], known: dict[int, AutocastFunction]) -> AutocastFunction:
    """One for all layers of a kind."""
    function = layer.function
    if layer.kind not in known:
        if isinstance(function, GraphFunction):
            narrow = _narrow_in_graph(function.module.graph, len(layer.parameters))
        elif isinstance(function, ModulesFunction):
            narrow = _narrow_in_modules(function)
        else:
            narrow = set()
        shadowed = [bool(state[name].shadow) for name in layer.parameters]
        known[layer.kind] = AutocastFunction(function, tuple(s and i not in narrow for i, s in enumerate(shadowed)))
    return known[layer.kind]


def _narrow_in_graph(graph: fx.Graph, num_parameters: int) -> set[int]:
    """Positions of parameters that only ops which autocast runs in bf16 read."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"][:num_parameters]
    return {position for position, node in enumerate(placeholders) if all(map(_runs_low, _readers(node)))}


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Of what a node is, through views."""
    for user in node.users:
        if _name(user) in _VIEWS and user.args[0] is node:
            yield from _readers(user)
        else:
            yield user


def _runs_low(node: fx.Node) -> bool:
    return _name(node) in _LOW


def _name(node: fx.Node) -> str:
    """``"linear"`` of ``aten.linear.default``; empty for what is no op of torch's."""
    namespace, _, rest = op_name(node).partition(".")
    return rest.partition(".")[0] if namespace == "aten" else ""


def _narrow_in_modules(function: ModulesFunction) -> set[int]:
    """Positions of parameters that only linear layers and convolutions own."""
    owners: dict[int, list[bool]] = {}
    for module, local in zip(function.group.modules, function.group.local, strict=True):
        for name, (role, position) in local.items():
            if role == "parameter":
                owner = module.get_submodule(name.rpartition(".")[0])
                owners.setdefault(position, []).append(type(owner) in _LOW_MODULES)
    return {position for position, low in owners.items() if all(low)}


# -- what crosses boundaries ----------------------------------------------------------------------------------------


def _boundaries(layers: LayerSequence, device: torch.device) -> tuple[tuple[TensorSpec, ...], ...]:
    """With the types that values have when the layers run on such a device, each kind run once."""
    dtypes: dict[str, str] = {}
    made: dict[_Key, tuple[str, ...]] = {}
    boundaries = [_typed(layers.boundaries[0], dtypes)]
    for index, layer in enumerate(layers.layers):
        key = (layer.kind, tuple(dtypes[name] for name in layer.inputs))
        if key not in made:
            here = replace(layers, boundaries=(*boundaries, *layers.boundaries[index + 1 :]))
            made[key] = _outputs(here, index, device)
        dtypes |= dict(zip(layer.outputs, made[key], strict=True))
        boundaries.append(_typed(layers.boundaries[index + 1], dtypes))
    return tuple(boundaries)


def _typed(specs: Iterable[TensorSpec], dtypes: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, dtype=dtypes[spec.name], item_bytes=getattr(torch, dtypes[spec.name]).itemsize) for spec in specs
    )


def _outputs(layers: LayerSequence, index: int, device: torch.device) -> tuple[str, ...]:
    """Types of what a layer returns: from shapes alone, or where these do not tell, by running it."""
    name = layers.layers[index].name
    try:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _run(layers, index, Target(device, "", None, shapes_only=True))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            return _run(layers, index, Target(device, "", None))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise HarmonyError(
            f"layer {name} cannot compute in {layers.precision}: {error}. Train in fp32, or cast what that op reads in "
            "the model to one type"
        ) from error


def _run(layers: LayerSequence, index: int, target: Target) -> tuple[str, ...]:
    layer = layers.layers[index]
    bench = Bench.prepare(layers, index, target, _SAMPLES)
    with torch.no_grad():
        outputs = layer.function(
            [bench.state[name] for name in layer.parameters],
            [bench.buffers[name] for name in layer.buffers],
            [bench.values[name] for name in layer.inputs],
            [bench.batch[name] for name in layer.batch_inputs],
            bench.call,
        )
    return tuple(dtype_name(output.dtype) for output in outputs)


# -- in plain PyTorch -------------------------------------------------------------------------------------------------


@contextmanager
def plain_precision(precision: Precision, parameters: Iterable[Tensor]) -> Iterator[Callable[[], Any]]:
    """For plain PyTorch to compute as layers in that precision do: inside, the model's fp32 parameters have the values
    of their shadows, and gradients go to them as ever; afterwards they are the masters again, to be updated.

    Gives what makes the context for a forward; backward runs outside of it.
    """
    if precision is Precision.FP32:
        yield nullcontext
        return
    masters = [(parameter, parameter.data) for parameter in parameters if dtype_name(parameter.dtype) == _SHADOWED]
    try:
        for parameter, master in masters:
            parameter.data = master.to(_DTYPE).to(master.dtype)
        yield lambda: torch.autocast("cpu", _DTYPE, cache_enabled=False)
    finally:
        for parameter, master in masters:
            parameter.data = master
