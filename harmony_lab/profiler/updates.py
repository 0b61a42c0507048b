"""What updating each layer costs, in bytes of optimizer state and temporaries and in seconds on the host: measured on
stand-ins."""

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence, StateSpec
from harmony_lab.runtime.memory import MemoryTracker

__all__ = ["TimedSteps", "UpdateClock", "UpdateCost", "UpdateCosts", "Updated", "spread_of"]

_LARGEST_STAND_IN_BYTES = 16 * 2**20  # beyond, seconds are proportional
_LARGEST_CACHE_BYTES = 64 * 2**20

Updated = tuple[int, StateSpec]  # (number of the parameter group, parameter)


class UpdateCost(NamedTuple):
    """``spread``: as in ``Cost``.  ``workspace_bytes``: as in ``LayerCost``."""

    state_bytes: int
    seconds: float
    spread: float | None = None
    workspace_bytes: int | None = None


class UpdateClock(Protocol):
    """How long a step takes."""

    largest_stand_in_bytes: int

    def __call__(self, step: Callable[[], Any]) -> tuple[float, float | None]:
        """(seconds, spread) of ``step``, which ran once before."""


class TimedSteps:
    """Runs steps and times them, with cold caches: a step of training comes back to a layer after all the others."""

    largest_stand_in_bytes = _LARGEST_STAND_IN_BYTES

    def __init__(self, layers: LayerSequence, trials: int) -> None:
        self._trials = trials
        self._others = torch.zeros(min(_LARGEST_CACHE_BYTES, 4 * layers.trainable_bytes), dtype=torch.uint8)

    def __call__(self, step: Callable[[], Any]) -> tuple[float, float | None]:
        seconds = []
        for _ in range(self._trials):
            self._others.add_(1)
            start_s = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds), spread_of(seconds)


def spread_of(seconds: Sequence[float]) -> float | None:
    """Half of what the trials are apart, as a share of their median; None for a single one."""
    if len(seconds) < 2:
        return None
    return (max(seconds) - min(seconds)) / 2 / statistics.median(seconds)


class UpdateCosts:
    """Asks the user's class of optimizer, with the user's hyperparameters, on parameters of the layers' shapes.

    The user's own optimizer and parameters are only read.  Layers whose parameters are alike are asked once.
    ``on_gpu``: temporaries are those of a GPU, where torch steps parameters together unless told otherwise.
    """

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: torch.optim.Optimizer | None,
        clock: UpdateClock,
        *,
        on_gpu: bool = False,
    ) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._clock = clock
        self._on_gpu = on_gpu
        self._groups: dict[int, int] = {}  # number of the parameter group, by the parameter's identity
        if optimizer is not None:
            for number, group in enumerate(optimizer.param_groups):
                self._groups.update((id(parameter), number) for parameter in group["params"])
        self._known: dict[tuple[Any, ...], UpdateCost] = {(): UpdateCost(0, 0.0, None, 0)}

    def updated_by(self, index: int) -> list[Updated]:
        """What layer ``index`` updates: its trainable parameters that no earlier layer shares."""
        updated = []
        for name in dict.fromkeys(self._layers.layers[index].parameters):
            spec, group = self._layers.state[name], self._groups.get(id(self._layers.tensors[name]))
            if spec.trainable and group is not None and spec.layers[0] == index:
                updated.append((group, spec))
        return updated

    def hyperparameters(self, group: int) -> dict[str, Any]:
        assert self._optimizer is not None
        return {name: value for name, value in self._optimizer.param_groups[group].items() if name != "params"}

    def of(self, updated: Sequence[Updated]) -> UpdateCost:
        key = tuple((group, spec.shape, spec.dtype) for group, spec in updated)
        if key not in self._known:
            self._known[key] = self._measure(updated)
        return self._known[key]

    def _measure(self, updated: Sequence[Updated]) -> UpdateCost:
        """Seconds are proportional to the bytes updated; bytes of state grow linearly with a parameter's rows."""
        total_bytes = max(1, sum(spec.num_bytes for _, spec in updated))
        share = min(1.0, self._clock.largest_stand_in_bytes / total_bytes)
        groups, specs = [group for group, _ in updated], [spec for _, spec in updated]
        stand_ins = [_stand_in(spec, _rows(spec, share)) for spec in specs]
        optimizer = self._rebuild(groups, stand_ins)
        self._step(optimizer)  # makes the state
        seconds, spread = self._clock(lambda: self._step(optimizer))
        sizes = [_state_numels(optimizer.state[tensor]) for tensor in stand_ins]
        if share < 1:
            fewer = [_stand_in(spec, max(1, _rows(spec, share) // 2)) for spec in specs]
            other = self._rebuild(groups, fewer)
            self._step(other)
            state_bytes = sum(
                _at_full_size(spec, (small, _state_numels(other.state[small])), (large, size))
                for spec, small, large, size in zip(specs, fewer, stand_ins, sizes, strict=True)
            )
        else:
            state_bytes = sum(numel * item_bytes for size in sizes for numel, item_bytes in size)
        stand_in_bytes = max(1, sum(tensor.nbytes for tensor in stand_ins))
        workspace_bytes = -(-self._temporaries(groups, stand_ins) * total_bytes // stand_in_bytes)
        return UpdateCost(state_bytes, seconds * total_bytes / stand_in_bytes, spread, workspace_bytes)

    def _temporaries(self, groups: Sequence[int], stand_ins: Sequence[torch.Tensor]) -> int:
        """The most that a step allocates at once, but for state."""
        optimizer = self._rebuild(groups, stand_ins)
        for group in optimizer.param_groups:
            is_open = group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable")
            if self._on_gpu and is_open:
                group["foreach"] = True
        self._step(optimizer)  # makes the state
        alive = [0, 0]  # now and at most

        def allocated(num_bytes: int) -> None:
            alive[0] += num_bytes
            alive[1] = max(alive)

        def released(num_bytes: int) -> None:
            alive[0] -= num_bytes

        tracker = MemoryTracker(allocated, released)
        with tracker:
            self._step(optimizer)
        return alive[1]

    def _rebuild(self, groups: Sequence[int], stand_ins: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        assert self._optimizer is not None
        kind = type(self._optimizer)
        members: dict[int, list[torch.Tensor]] = {}
        for number, tensor in zip(groups, stand_ins, strict=True):
            members.setdefault(number, []).append(tensor)
        given = [{**self.hyperparameters(number), "params": tensors} for number, tensors in members.items()]
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


# -- stand-ins ----------------------------------------------------------------------------------------------------


def _rows(spec: StateSpec, share: float) -> int:
    """That share of a parameter's first dimension; two at least where it has as many."""
    full = spec.shape[0] if spec.shape else 1
    return full if share >= 1 else min(full, max(2, int(full * share)))


def _stand_in(spec: StateSpec, rows: int) -> torch.Tensor:
    """A parameter with a gradient, of that shape but for the number of rows."""
    shape = (rows, *spec.shape[1:]) if spec.shape else ()
    dtype = getattr(torch, spec.dtype)
    tensor = torch.full(shape, 0.1, dtype=dtype).requires_grad_()
    tensor.grad = torch.full(shape, 0.01, dtype=dtype)
    return tensor


def _state_numels(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(elements, bytes per element) of each tensor in one parameter's state."""
    return [(value.numel(), value.element_size()) for value in state.values() if isinstance(value, torch.Tensor)]


def _at_full_size(
    spec: StateSpec,
    smaller: tuple[torch.Tensor, list[tuple[int, int]]],
    larger: tuple[torch.Tensor, list[tuple[int, int]]],
) -> int:
    """Bytes of the state at the parameter's own number of rows, from its stand-ins of two sizes.

    Exact for what has an element per parameter, per row (factored states), per other dimension, or one in all.
    """
    (few, sizes_few), (many, sizes_many) = smaller, larger
    if few.shape == many.shape:  # one row, or none
        return sum(numel * item_bytes for numel, item_bytes in sizes_many)
    extra = (spec.shape[0] - many.shape[0]) / (many.shape[0] - few.shape[0])
    return sum(
        round((numel + (numel - before) * extra) * item_bytes)
        for (before, _), (numel, item_bytes) in zip(sizes_few, sizes_many, strict=True)
    )
