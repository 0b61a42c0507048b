"""What updating each layer costs on the host, in bytes of optimizer state and in seconds: measured on stand-ins."""

import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence, StateSpec

__all__ = ["UpdateCost", "UpdateCosts"]

_LARGEST_STAND_IN_BYTES = 16 * 2**20  # beyond, seconds and bytes are proportional


class UpdateCost(NamedTuple):
    state_bytes: int
    seconds: float


class UpdateCosts:
    """Measures the user's class of optimizer, with the user's hyperparameters, on parameters of the layers' shapes.

    The user's own optimizer and parameters are only read.  Layers whose parameters are alike are measured once.
    """

    def __init__(self, layers: LayerSequence, optimizer: torch.optim.Optimizer | None, trials: int) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._trials = trials
        self._groups: dict[int, int] = {}  # number of the parameter group, by the parameter's identity
        if optimizer is not None:
            for number, group in enumerate(optimizer.param_groups):
                self._groups.update((id(parameter), number) for parameter in group["params"])
        self._known: dict[tuple[Any, ...], UpdateCost] = {(): UpdateCost(0, 0.0)}

    def of(self, index: int) -> UpdateCost:
        """Of what layer ``index`` updates: its trainable parameters that no earlier layer shares."""
        updated = []
        for name in dict.fromkeys(self._layers.layers[index].parameters):
            spec, group = self._layers.state[name], self._groups.get(id(self._layers.tensors[name]))
            if spec.trainable and group is not None and spec.layers[0] == index:
                updated.append((group, spec))
        key = tuple((group, spec.shape, spec.dtype) for group, spec in updated)
        if key not in self._known:
            self._known[key] = self._measure(updated)
        return self._known[key]

    def _measure(self, updated: Sequence[tuple[int, StateSpec]]) -> UpdateCost:
        total_bytes = sum(spec.num_bytes for _, spec in updated)
        share = min(1.0, _LARGEST_STAND_IN_BYTES / max(1, total_bytes))
        stand_ins = [_stand_in(spec, share) for _, spec in updated]
        stand_in_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stand_ins)
        optimizer = self._rebuild([group for group, _ in updated], stand_ins)
        seconds = []
        for _ in range(1 + self._trials):  # the first one makes the state
            start_s = time.perf_counter()
            self._step(optimizer)
            seconds.append(time.perf_counter() - start_s)
        state_bytes = sum(
            _state_bytes(optimizer.state[tensor], spec.num_bytes / max(1, tensor.numel() * tensor.element_size()))
            for tensor, (_, spec) in zip(stand_ins, updated, strict=True)
        )
        return UpdateCost(state_bytes, statistics.median(seconds[1:]) * total_bytes / max(1, stand_in_bytes))

    def _rebuild(self, groups: Sequence[int], stand_ins: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        assert self._optimizer is not None
        kind = type(self._optimizer)
        members: dict[int, list[torch.Tensor]] = {}
        for number, tensor in zip(groups, stand_ins, strict=True):
            members.setdefault(number, []).append(tensor)
        given = [
            {**{k: v for k, v in self._optimizer.param_groups[number].items() if k != "params"}, "params": tensors}
            for number, tensors in members.items()
        ]
        try:
            build: Any = kind  # a subclass may take other arguments than Optimizer does
            rebuilt: torch.optim.Optimizer = build(given, **_arguments(kind, self._optimizer.defaults))
        except (TypeError, ValueError, KeyError, AssertionError) as error:
            raise self._refused(error) from error
        return rebuilt

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> HarmonyError:
        name = type(self._optimizer).__name__
        return HarmonyError(
            f"the updates of {name} could not be measured: a {name} like yours, made of its hyperparameters for other "
            f"parameters, failed with {type(error).__name__}: {error}. An optimizer whose hyperparameters are all in "
            "its `defaults` and whose step() needs no closure works, such as torch.optim.AdamW or SGD"
        )


def _arguments(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that the optimizer's constructor takes: some keep more in ``defaults`` than they accept."""
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return dict(defaults)
    return {name: value for name, value in defaults.items() if name in accepted}


def _stand_in(spec: StateSpec, share: float) -> torch.Tensor:
    """A parameter with a gradient, of that shape; with a share below 1, fewer rows."""
    shape = list(spec.shape)
    if shape and share < 1:
        shape[0] = max(1, int(shape[0] * share))
    dtype = getattr(torch, spec.dtype)
    tensor = torch.full(shape, 0.1, dtype=dtype).requires_grad_()
    tensor.grad = torch.full(shape, 0.01, dtype=dtype)
    return tensor


def _state_bytes(state: Mapping[str, Any], scale: float) -> int:
    """Bytes of one parameter's state; scalars (such as the step) do not grow with the parameter."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(
        round(tensor.numel() * tensor.element_size() * (scale if tensor.numel() > 1 else 1)) for tensor in tensors
    )
