"""Bench: one layer alone on a device with inputs of one microbatch size, to weigh and to time."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

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
    run_with_gradient,
)

__all__ = ["Bench"]

_SEED = 0


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
        generator = _generator(device)
        specs = {spec.name: spec for spec in layers.boundaries[index]}
        return cls(
            layers=layers,
            index=index,
            target=target,
            state={name: _parameter(layers, name, device) for name in layer.parameters},
            buffers={name: _content(layers, name, device, layers.buffer_state[name]).clone() for name in layer.buffers},
            values={name: _value(specs[name], num_samples, device, generator) for name in dict.fromkeys(layer.inputs)},
            batch=_batch(layers, layer.batch_inputs, num_samples, device),
            call=LayerCall(
                samples=(0, num_samples),
                sizes={**layers.example_sizes, "batch": num_samples},
                seed=_SEED,
                device=device,
            ),
        )

    @property
    def input_bytes(self) -> int:
        """Of values and batch."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.values.values(), *self.batch.values()))

    def weigh(self) -> tuple[int, int, int, int]:
        """Bytes as in ``Cost``: peak of forward, saved, peak of the forward that saves, peak of backward."""
        with self.target.gauge() as gauge:
            self._forward()
            forward_bytes = gauge.peak_bytes
        with self.target.gauge() as gauge:
            values = dict(self.values)
            buffers = clone_updated_buffers(self.layers, self.index, self.index + 1, self.buffers)
            saved = [
                run_layer_with_gradient(self.layers, self.index, self.state, buffers, values, self.batch, self.call)
            ]
            saved_bytes, recompute_bytes = gauge.alive_bytes, gauge.peak_bytes
            del values, buffers
            gauge.restart_peak()
            self._backward(saved, self._output_gradients())
            return forward_bytes, saved_bytes, recompute_bytes, max(saved_bytes, gauge.peak_bytes)

    def time(self, trials: int) -> tuple[float, float, float]:
        """Median seconds of forward, of the forward that saves and of backward; ``weigh`` before warms up."""
        with self.target.as_when_training():
            seconds = [self._time_once() for _ in range(trials)]
        forward_s, recompute_s, backward_s = (statistics.median(column) for column in zip(*seconds, strict=True))
        return forward_s, recompute_s, backward_s

    def _time_once(self) -> tuple[float, float, float]:
        times_s = [self._now_s()]
        self._forward()
        times_s.append(self._now_s())
        buffers = clone_updated_buffers(self.layers, self.index, self.index + 1, self.buffers)
        start, stop = self.index, self.index + 1
        _, saved = run_with_gradient(
            self.layers, start, stop, self.state, buffers, dict(self.values), self.batch, self.call, []
        )
        times_s.append(self._now_s())
        gradients = self._output_gradients()
        before_s = self._now_s()
        self._backward(saved, gradients)
        return times_s[1] - times_s[0], times_s[2] - times_s[1], self._now_s() - before_s

    def _now_s(self) -> float:
        self.target.synchronize()
        return time.perf_counter()

    def _forward(self) -> None:
        start, stop = self.index, self.index + 1
        run_forward(
            self.layers, start, stop, self.state, self.buffers, dict(self.values), self.batch, self.call, [stop]
        )

    @property
    def _is_last(self) -> bool:
        return self.index == len(self.layers) - 1

    def _output_gradients(self) -> dict[str, Tensor]:
        if self._is_last:
            return {}
        layer, boundary = self.layers.layers[self.index], self.layers.boundaries[self.index + 1]
        generator = _generator(self.target.device)
        return {
            spec.name: _value(spec, self.call.sizes["batch"], self.target.device, generator)
            for spec in boundary
            if spec.requires_grad and spec.name in layer.outputs
        }

    def _backward(self, saved: list[SavedLayer], output_gradients: dict[str, Tensor]) -> None:
        seed = 1.0 if self._is_last else None
        run_backward(self.layers, self.index, self.index + 1, saved, output_gradients, seed_gradient=seed)


# -- tensors ------------------------------------------------------------------------------------------------------


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(_SEED)


def _content(layers: LayerSequence, name: str, device: torch.device, spec: StateSpec) -> Tensor:
    """The user's tensor on the device; one without data is made up."""
    tensor: Tensor = layers.tensors[name]
    if tensor.is_meta:
        return torch.full(spec.shape, 0.02, device=device).to(tensor.dtype)
    return tensor.detach().to(device)


def _parameter(layers: LayerSequence, name: str, device: torch.device) -> Tensor:
    """A leaf beside the user's own parameter, with a gradient of its own."""
    spec = layers.state[name]
    leaf = _content(layers, name, device, spec).requires_grad_(spec.trainable)
    if spec.trainable:
        leaf.grad = torch.zeros_like(leaf)
    return leaf


def _value(spec: TensorSpec, num_samples: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Small normal numbers; ones for booleans and zeros for integers, which are valid masks and positions."""
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] *= num_samples
    tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.normal_(0, 0.1, generator=generator)
    return tensor.fill_(tensor.dtype is torch.bool)


def _batch(layers: LayerSequence, names: tuple[str, ...], num_samples: int, device: torch.device) -> dict[str, Tensor]:
    """The example batch's first samples, from the start again where it has too few."""
    if not names:
        return {}
    if layers.example_batch is None:
        raise HarmonyError("these layers come without an example batch, which a profile needs for valid inputs")
    tensors: Mapping[str, Tensor] = layers.flatten_batch(layers.example_batch)[0]
    return {
        name: _samples(tensors[name], layers.batch_by_name[name], num_samples).to(device, copy=True) for name in names
    }


def _samples(tensor: Tensor, spec: TensorSpec, num_samples: int) -> Tensor:
    tensor = tensor.detach()
    if spec.batch_dim is None:
        return tensor
    rows = torch.arange(spec.shape[spec.batch_dim] * num_samples, device=tensor.device)
    return tensor.index_select(spec.batch_dim, rows % tensor.shape[spec.batch_dim])
