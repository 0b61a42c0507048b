"""Bench: one layer alone on a device with inputs of one microbatch size, to weigh and to time."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerCall, LayerSequence, StateSpec, TensorSpec
from harmony_lab.profiler.gauges import Target
from harmony_lab.runtime.execution import (
    SavedLayer,
    clone_updated_buffers,
    run_backward,
    run_forward,
    run_layer_with_gradient,
)

__all__ = ["Bench", "Phase", "Seconds", "Weight"]

_SEED = 0


class Phase(StrEnum):
    """The parts of one run.  ``SEED``: the gradients of the outputs are made, which belongs to no layer."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    SEED = "seed"
    BACKWARD = "backward"


class Weight(NamedTuple):
    """Bytes as in ``Cost``."""

    forward_peak_bytes: int
    saved_bytes: int
    recompute_peak_bytes: int
    backward_peak_bytes: int


class Seconds(NamedTuple):
    """As in ``Cost``."""

    forward_s: float
    recompute_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One layer with all it needs on the device, apart from the user's own tensors where those may change."""

    layers: LayerSequence
    index: int
    target: Target
    state: dict[str, Tensor]
    buffers: dict[str, Tensor]
    values: dict[str, Tensor]
    batch: dict[str, Tensor]
    call: LayerCall

    @classmethod
    def prepare(cls, layers: LayerSequence, index: int, target: Target, num_samples: int) -> "Bench":
        """Parameters with gradients, copies of buffers, random values, and the example batch's samples."""
        layer = layers.layers[index]
        device = target.device
        specs = {spec.name: spec for spec in layers.boundaries[index]}
        generator = _generator(target)
        values = {name: _value(specs[name], num_samples, target, generator) for name in dict.fromkeys(layer.inputs)}
        for spec in layers.boundaries[index + 1]:
            if spec.name not in layer.outputs:  # passes by: the planner counts it, here it takes no memory
                values.setdefault(spec.name, torch.empty(0, device=device))
        return cls(
            layers=layers,
            index=index,
            target=target,
            state={name: _parameter(layers, name, target) for name in layer.parameters},
            buffers={name: _content(layers, name, target, layers.buffer_state[name]).clone() for name in layer.buffers},
            values=values,
            batch=_batch(layers, layer.batch_inputs, num_samples, target),
            call=LayerCall(
                samples=(0, num_samples),
                sizes={**layers.example_sizes, "batch": num_samples},
                seed=_SEED,
                device=device,
            ),
        )

    def weigh(self, ended: Callable[[Phase], None] = lambda phase: None) -> Weight:
        """Peaks and what is saved.  ``ended`` is called after each phase."""
        peaks: dict[Phase, int] = {}
        saved_bytes = 0
        with self.target.gauge() as gauge:
            for phase in self._run():
                peaks[phase] = gauge.peak_bytes
                if phase is Phase.RECOMPUTE:
                    saved_bytes = gauge.alive_bytes
                if phase is not Phase.SEED:
                    gauge.restart_peak()
                ended(phase)
        return Weight(
            peaks[Phase.FORWARD], saved_bytes, peaks[Phase.RECOMPUTE], max(saved_bytes, peaks[Phase.BACKWARD])
        )

    def time(self) -> Seconds:
        """Of one run; ``weigh`` before warms up."""
        seconds: dict[Phase, float] = {}
        before_s = self._now_s()
        for phase in self._run():
            now_s = self._now_s()
            seconds[phase] = now_s - before_s
            before_s = now_s
        return Seconds(seconds[Phase.FORWARD], seconds[Phase.RECOMPUTE], seconds[Phase.BACKWARD])

    def _now_s(self) -> float:
        self.target.synchronize()
        return time.perf_counter()

    def _run(self) -> Iterator[Phase]:
        """Forward; forward with gradient; backward.  Stops for a moment at the end of each."""
        start, stop = self.index, self.index + 1
        run_forward(
            self.layers, start, stop, self.state, self.buffers, dict(self.values), self.batch, self.call, [stop]
        )
        yield Phase.FORWARD
        values = dict(self.values)
        buffers = clone_updated_buffers(self.layers, start, stop, self.buffers)
        saved = [run_layer_with_gradient(self.layers, start, self.state, buffers, values, self.batch, self.call)]
        yield Phase.RECOMPUTE
        del values, buffers
        gradients = self._output_gradients()
        yield Phase.SEED
        self._backward(saved, gradients)
        yield Phase.BACKWARD

    @property
    def _is_last(self) -> bool:
        return self.index + 1 == len(self.layers)

    def _output_gradients(self) -> dict[str, Tensor]:
        """Of the layer's own outputs: those of values that pass by are not its business."""
        if self._is_last:
            return {}
        layer, boundary = self.layers.layers[self.index], self.layers.boundaries[self.index + 1]
        generator = _generator(self.target)
        return {
            spec.name: _value(spec, self.call.sizes["batch"], self.target, generator)
            for spec in boundary
            if spec.requires_grad and spec.name in layer.outputs
        }

    def _backward(self, saved: list[SavedLayer], output_gradients: dict[str, Tensor]) -> None:
        seed = 1.0 if self._is_last else None
        run_backward(self.layers, self.index, self.index + 1, saved, output_gradients, seed_gradient=seed)


# -- tensors ------------------------------------------------------------------------------------------------------


def _generator(target: Target) -> torch.Generator | None:
    return None if target.shapes_only else torch.Generator(target.device).manual_seed(_SEED)


def _content(layers: LayerSequence, name: str, target: Target, spec: StateSpec) -> Tensor:
    """The user's tensor on the device; one without data is made up."""
    tensor: Tensor = layers.tensors[name]
    dtype = getattr(torch, spec.device_dtype)
    if target.shapes_only:
        return torch.empty(spec.shape, dtype=dtype, device=target.device)
    if tensor.is_meta:
        return torch.full(spec.shape, 0.02, device=target.device).to(dtype)
    return tensor.detach().to(target.device, dtype)


def _parameter(layers: LayerSequence, name: str, target: Target) -> Tensor:
    """A leaf beside the user's own parameter, with a gradient of its own."""
    spec = layers.state[name]
    leaf = _content(layers, name, target, spec).requires_grad_(spec.trainable)
    if spec.trainable:
        if spec.shadow:
            leaf.grad_dtype = None  # that of the gradient, which is of the master's type
        leaf.grad = torch.zeros_like(leaf, dtype=getattr(torch, spec.dtype))
    return leaf


def _value(spec: TensorSpec, num_samples: int, target: Target, generator: torch.Generator | None) -> Tensor:
    """Small normal numbers; ones for booleans and zeros for integers, which are valid masks and positions."""
    shape = _shape(spec, num_samples)
    tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=target.device)
    if target.shapes_only:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.normal_(0, 0.1, generator=generator)
    return tensor.fill_(tensor.dtype is torch.bool)


def _shape(spec: TensorSpec, num_samples: int) -> list[int]:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] *= num_samples
    return shape


def _batch(layers: LayerSequence, names: tuple[str, ...], num_samples: int, target: Target) -> dict[str, Tensor]:
    """The example batch's first samples, from the start again where it has too few."""
    if not names:
        return {}
    if target.shapes_only:
        return {name: _value(layers.batch_by_name[name], num_samples, target, None) for name in names}
    if layers.example_batch is None:
        raise HarmonyError("these layers come without an example batch, which a profile needs for valid inputs")
    tensors: Mapping[str, Tensor] = layers.flatten_batch(layers.example_batch)[0]
    return {name: _samples(tensors[name], layers.batch_by_name[name], num_samples, target) for name in names}


def _samples(tensor: Tensor, spec: TensorSpec, num_samples: int, target: Target) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_meta:
        return torch.zeros(_shape(spec, num_samples), dtype=tensor.dtype, device=target.device)
    if spec.batch_dim is not None:
        rows = torch.arange(spec.shape[spec.batch_dim] * num_samples, device=tensor.device)
        tensor = tensor.index_select(spec.batch_dim, rows % tensor.shape[spec.batch_dim])
    return tensor.to(target.device, copy=True)
