"""compile_layers: the same layers as machine code, each type of them compiled once."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerCall, LayerFunction, LayerSequence, StateSpec, TensorSpec
from harmony_lab.machine import Backend, Machine
from harmony_lab.profiler.extract import GraphFunction
from harmony_lab.warning import warn

if TYPE_CHECKING:
    from harmony_lab.profiler.inductor import MachineCode

__all__ = ["CompiledFunction", "compile_layers", "compiled_in", "is_compiled", "prepare"]

_preparing: ContextVar[bool] = ContextVar("preparing", default=False)
"""Whether layers are called on the meta device to have their code made, for the device that the call names."""


def compile_layers(layers: LayerSequence) -> LayerSequence:
    """The same layers, run as code that TorchInductor (the compiler of ``torch.compile``) makes of each layer type.

    They compute the same up to rounding, with the same random masks and the same updates of buffers.  What they
    take of time and memory differs, so profile them anew: costs are kept apart from those of the layers as they were.
    (``estimate``, which runs nothing, tells those of the layers as they were.)

    Compiled is when a layer type first runs: by ``profile``, or by a ``Trainer`` before its first step; from some
    seconds to a minute per type, once for a single sample and once for all other numbers of samples, forward and
    backward.  Torch keeps the code on disk, so the next time it takes a second or two.  Needs a C++ compiler for the
    CPU, Triton for GPUs.

    A type that cannot be compiled runs as it was, and a warning says which and why.  Raises ``HarmonyError`` for layers
    that are modules (``decompose(..., layers=[...])``) and have no graph.
    """
    functions: dict[int, LayerFunction] = {}
    for layer in layers.layers:
        if id(layer.function) not in functions:
            functions[id(layer.function)] = _compiled_function(layer.name, layer.function)
    wrapped = tuple(replace(layer, function=functions[id(layer.function)]) for layer in layers.layers)
    found = replace(layers, layers=wrapped)
    if not is_compiled(found):
        raise HarmonyError(
            f"none of the {len(wrapped)} layers of {type(layers.model).__name__} can be compiled: they are modules, "
            "not graphs. Leave layers=[...] out of decompose where the model can be captured, or train them as they "
            "are (and compile layers before they are given another precision)"
        )
    return found


def is_compiled(layers: LayerSequence) -> bool:
    """Whether some of these layers are."""
    return any(compiled_in(layer.function) is not None for layer in layers.layers)


def compiled_in(function: LayerFunction) -> "CompiledFunction | None":
    """Also where another function, such as one that sets a precision, has it as its ``inner`` one."""
    inner = getattr(function, "inner", function)
    return inner if isinstance(inner, CompiledFunction) else None


def _compiled_function(name: str, function: LayerFunction) -> LayerFunction:
    if isinstance(function, CompiledFunction) or not isinstance(function, GraphFunction):
        return function
    return CompiledFunction(name, function)


class _Variant(NamedTuple):
    """What code depends on, beside the layer's type.  ``num_samples`` None: any number from 2 up."""

    num_samples: int | None
    device: torch.device
    num_threads: int
    autocast: torch.dtype | None
    arguments: tuple[Any, ...]


class CompiledFunction(GraphFunction):
    """A ``LayerFunction`` that runs a graph's machine code, made when it is first needed.

    ``name``: of the first layer of that type, for warnings.
    """

    def __init__(self, name: str, function: GraphFunction) -> None:
        super().__init__(function.module, f"compiled\n{function.text}")
        self.name = name
        self._plain = function
        self._codes: dict[_Variant, MachineCode] = {}
        self._given_up = False
        self._compiling = threading.Lock()  # two devices may need the same code at once
        nodes = [node for node in function.module.graph.nodes if node.op == "placeholder" and node.name != "call"]
        self._batch_dims = [_batch_dims(node) for node in nodes]

    def __call__(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        call: LayerCall,
    ) -> tuple[Any, ...]:
        tensors = [*parameters, *buffers, *inputs, *batch]
        if _preparing.get():
            self._prepare(tensors, call)
            return self._plain(parameters, buffers, inputs, batch, replace(call, device=torch.device("meta")))
        if self._given_up or any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._plain(parameters, buffers, inputs, batch, call)
        code = self._find(tensors, call)
        if code is None or not code.has_run:
            return self._first_run(parameters, buffers, inputs, batch, call)
        return _run(code, tensors, call)

    def _first_run(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        call: LayerCall,
    ) -> tuple[Any, ...]:
        """Of code that may turn out not to work: then the layer runs as it was, from the same buffers."""
        tensors = [*parameters, *buffers, *inputs, *batch]
        with _disable_current_modes(), torch.no_grad():  # counted by nobody: it is gone after this run
            before = [buffer.clone() for buffer in buffers]
        try:
            return _run(self._find(tensors, call) or self._compile(tensors, call), tensors, call)
        except (HarmonyError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            with _disable_current_modes(), torch.no_grad():
                for buffer, content in zip(buffers, before, strict=True):
                    buffer.copy_(content)
            outputs = self._plain(parameters, buffers, inputs, batch, call)  # raises what is the layer's own fault
            self._give_up(error)
            return outputs

    def _prepare(self, tensors: Sequence[Tensor], call: LayerCall) -> None:
        """Have the code for tensors such as these, on the meta device, and that call."""
        if not self._given_up and self._find(tensors, call) is None:
            try:
                self._compile(tensors, call)
            except Exception as error:
                try:
                    self.module.forward(*tensors, replace(call, device=torch.device("meta")))
                except Exception:
                    return  # the layer's own fault, which tells of itself where it runs
                self._give_up(error)

    def _find(self, tensors: Sequence[Tensor], call: LayerCall) -> "MachineCode | None":
        num_samples = call.sizes["batch"]
        variant = _variant(tensors, call)
        code = self._codes.get(variant)
        if code is not None and code.covers(num_samples):
            return code
        return self._codes.get(variant._replace(num_samples=num_samples))

    def _compile(self, tensors: Sequence[Tensor], call: LayerCall) -> "MachineCode":
        from harmony_lab.profiler import inductor  # loads the compiler, which takes a second

        num_samples = call.sizes["batch"]
        variant = _variant(tensors, call)
        with self._compiling:
            code = self._find(tensors, call)
            if code is not None:
                return code
            if variant in self._codes:  # made for any number of samples, which this one is beyond
                variant = variant._replace(num_samples=num_samples)
            arguments = [
                inductor.Argument(tuple(tensor.shape), stride, dtype, requires_grad, batch_dims)
                for tensor, (dtype, requires_grad, stride), batch_dims in zip(
                    tensors, variant.arguments, self._batch_dims, strict=True
                )
            ]
            any_number = variant.num_samples is None
            code = inductor.compiled(self.module, arguments, num_samples, variant.device, any_number=any_number)
            self._codes[variant] = code
        return code

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self.text = self._plain.text  # what it costs from now on is what it costs as it was
        reason = str(error).strip().splitlines() or [""]
        warn(
            f"layers like {self.name!r} cannot be compiled ({type(error).__name__}: {reason[0]}) and run as they are; "
            "profile again, for what they take is not what compiled ones were expected to take",
        )


def _run(code: "MachineCode", tensors: Sequence[Tensor], call: LayerCall) -> tuple[Any, ...]:
    origin = torch.tensor([_signed(call.seed), call.samples[0], call.first_random_op])
    return code(call.sizes["batch"], tensors, origin)


def _variant(tensors: Sequence[Tensor], call: LayerCall) -> _Variant:
    num_samples = call.sizes["batch"]
    device = torch.device(call.device)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _Variant(
        num_samples=None if num_samples > 1 else num_samples,
        device=device,
        num_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        autocast=torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        arguments=tuple(
            (tensor.dtype, trains and tensor.requires_grad, None if tensor.is_contiguous() else tensor.stride())
            for tensor in tensors
        ),
    )


def _batch_dims(placeholder: fx.Node) -> tuple[int, ...]:
    value = placeholder.meta.get("val")
    lengths = () if value is None else value.shape
    return tuple(dim for dim, length in enumerate(lengths) if not isinstance(length, int))


def _signed(word: int) -> int:
    """64 bits as a tensor holds them."""
    return word - (1 << 64) if word >> 63 else word


# -- ahead of time ----------------------------------------------------------------------------------------------------


def prepare(layers: LayerSequence, machine: Machine, sizes: Iterable[int]) -> None:
    """Compile what layers need to train with microbatches of these sizes, so that no step waits for it.

    For every layer type with contiguous inputs; inside a pack others may arise, for which code is made in the first
    step.  Does nothing for layers that are not compiled.
    """
    if not is_compiled(layers):
        return
    threads = torch.get_num_threads()
    token = _preparing.set(True)
    try:
        for index, layer in enumerate(layers.layers):
            if compiled_in(layer.function) is not None:
                for device, num_threads in _places(machine):
                    torch.set_num_threads(num_threads)
                    for size in sorted(set(sizes)):
                        _call(layers, index, device, size)
    finally:
        _preparing.reset(token)
        torch.set_num_threads(threads)


def _places(machine: Machine) -> list[tuple[torch.device, int]]:
    """Kinds of device that code differs for, each with its threads."""
    places = [
        (torch.device("cpu"), device.compute_threads)
        if device.backend is Backend.EMULATED
        else (torch.device("cuda", device.ordinal), 1)
        for device in machine.devices
    ]
    return list(dict.fromkeys(places))


def _call(layers: LayerSequence, index: int, device: torch.device, size: int) -> None:
    """Call a layer, with and without gradient, on tensors that have shapes alone."""
    layer = layers.layers[index]
    given = {spec.name: spec for spec in layers.boundaries[index]}
    arguments = (
        [_of_state(layers.state[name]) for name in layer.parameters],
        [_of_state(layers.buffer_state[name]) for name in layer.buffers],
        [_of_size(given[name], size) for name in layer.inputs],
        [_of_size(layers.batch_by_name[name], size) for name in layer.batch_inputs],
    )
    call = LayerCall(samples=(0, size), sizes={**layers.example_sizes, "batch": size}, seed=0, device=device)
    for training in (False, True):
        # The layer's own errors, and ops that need data, come up again where it really runs.
        with torch.set_grad_enabled(training), suppress(Exception):
            layer.function(*arguments, call)


def _of_state(spec: StateSpec) -> Tensor:
    dtype = getattr(torch, spec.device_dtype)
    return torch.empty(spec.shape, dtype=dtype, device="meta", requires_grad=spec.trainable)


def _of_size(spec: TensorSpec, size: int) -> Tensor:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] *= size
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta", requires_grad=spec.requires_grad)
