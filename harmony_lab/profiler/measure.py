"""profile: run each kind of layer alone on a device, at several microbatch sizes, and record what it costs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from harmony_lab.costs import Cost, LayerCost, Profile, SharedParameter
from harmony_lab.errors import HarmonyError, PlanDoesNotFitError
from harmony_lab.layers import LayerSequence, padded
from harmony_lab.machine import Machine
from harmony_lab.profiler.bench import Bench
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.updates import UpdateCost, UpdateCosts
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.units import format_bytes

__all__ = ["profile"]

ProgressCallback = Callable[[int, int, str], None]

_MOST_SIZES = 6


def profile(
    layers: LayerSequence,
    machine: Machine,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    microbatch_sizes: Sequence[int] | None = None,
    minibatch_size: int | None = None,
    trials: int = 3,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure every kind of layer on the machine's first device, and its update on the host.

    One layer is on the device at a time, with random inputs of the right shape (what comes from the batch is the
    example batch's), so a model larger than the device is profiled in place.  Parameters, gradients, buffers, the
    optimizer and the random state stay as they are, and nothing is left on the device.

    ``microbatch_sizes``: what to measure; the profile interpolates between them.  By default 1, 2, 4, ... up to
    ``minibatch_size`` (the example batch's), six at most, ending where a layer no longer fits into the device.
    ``trials``: seconds are the median of that many.  ``progress(done, total, what)`` is called along the way.

    Raises ``PlanDoesNotFitError`` for a layer that does not fit even with the smallest microbatch, ``HarmonyError``
    for an optimizer that cannot be measured, and whatever a layer raises.
    """
    if optimizer is not None:
        PackOptimizer(optimizer, layers)  # refuses by name what cannot train a model pack by pack
    if trials < 1:
        raise HarmonyError(f"trials must be 1 or more, got {trials}")
    sizes = _sizes(microbatch_sizes, layers.example_sizes["batch"] if minibatch_size is None else minibatch_size)
    target = Target.of(machine.devices[0])
    kinds = _kinds(layers)
    representatives = {kind: kinds.index(kind) for kind in sorted(set(kinds))}
    steps = _Steps(progress, len(sizes) * len(representatives) + len(layers))
    with target.keeping_random_state():
        with _threads(target.num_threads):
            costs = _costs(layers, machine, target, sizes, representatives, trials, steps)
        with _threads(machine.host.update_threads):
            measured = UpdateCosts(layers, optimizer, trials)
            updates = []
            for index, layer in enumerate(layers.layers):
                steps.begin(f"update of {layer.name}")
                updates.append(measured.of(index))
    steps.end()
    return Profile(
        model=type(layers.model).__name__,
        fingerprint=layers.fingerprint,
        device=target.description,
        microbatch_sizes=tuple(costs),
        layers=tuple(
            _layer_cost(layers, index, kind, update, tuple(by_kind[kind] for by_kind in costs.values()))
            for index, (kind, update) in enumerate(zip(kinds, updates, strict=True))
        ),
        boundaries=layers.boundaries,
        batch=layers.batch,
        shared=tuple(_shared(layers)),
        couples_samples=layers.couples_samples,
        serial_buffers=tuple(name for name, decay in layers.buffer_decay.items() if decay is None),
        update_threads=machine.host.update_threads,
    )


# -- what to measure ----------------------------------------------------------------------------------------------


def _sizes(given: Sequence[int] | None, largest: int) -> tuple[int, ...]:
    """Ascending microbatch sizes, the smallest 1 unless the user chose them."""
    if given is not None:
        sizes = tuple(sorted(set(given)))
        if not sizes or sizes[0] < 1:
            raise HarmonyError(f"microbatch_sizes must be one or more sizes from 1 up, got {list(given)}")
        return sizes
    if largest < 1:
        raise HarmonyError(f"minibatch_size must be 1 or more, got {largest}")
    doublings = math.ceil(math.log2(largest))
    count = min(doublings + 1, _MOST_SIZES)
    exponents = [round(i * doublings / max(1, count - 1)) for i in range(count)]
    return tuple(sorted({min(2**exponent, largest) for exponent in exponents}))


def _kinds(layers: LayerSequence) -> list[int]:
    """The kind of each layer, told apart also by what is trained: that changes what backward does."""
    numbers: dict[tuple[Any, ...], int] = {}
    kinds = []
    for index, layer in enumerate(layers.layers):
        specs = {spec.name: spec for spec in layers.boundaries[index]}
        key = (
            layer.kind,
            tuple(layers.state[name].trainable for name in layer.parameters),
            tuple(specs[name].requires_grad for name in layer.inputs),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


class _Steps:
    """Counts finished steps for the user's progress callback."""

    def __init__(self, progress: ProgressCallback | None, total: int) -> None:
        self._progress = progress
        self._begun = 0
        self._total = total

    def begin(self, what: str) -> None:
        if self._progress is not None:
            self._progress(self._begun, self._total, what)
        self._begun += 1

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total, "profile")


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Compute with that many of the host's threads, then with as many as before."""
    before = torch.get_num_threads()
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        yield
    finally:
        torch.set_num_threads(before)


# -- costs --------------------------------------------------------------------------------------------------------


def _costs(
    layers: LayerSequence,
    machine: Machine,
    target: Target,
    sizes: Sequence[int],
    representatives: Mapping[int, int],
    trials: int,
    steps: _Steps,
) -> dict[int, dict[int, Cost]]:
    """Costs by microbatch size and kind, up to the last size with which every kind fits."""
    costs: dict[int, dict[int, Cost]] = {}
    for size in sizes:
        by_kind: dict[int, Cost] = {}
        for kind, index in representatives.items():
            steps.begin(f"{layers.layers[index].name}, microbatch of {size}")
            try:
                by_kind[kind] = _cost(layers, index, machine, target, size, trials)
            except (PlanDoesNotFitError, torch.OutOfMemoryError):
                if not costs:
                    raise
                return costs
        costs[size] = by_kind
    return costs


def _cost(layers: LayerSequence, index: int, machine: Machine, target: Target, size: int, trials: int) -> Cost:
    """Raises ``PlanDoesNotFitError`` where the layer alone, with what it reads, fits into none of the devices."""
    bench = Bench.prepare(layers, index, target, size)
    weight = bench.weigh()
    parts = {
        "parameters": _parameter_bytes(layers, index),
        "gradients": _gradient_bytes(layers, index),
        "buffers": _buffer_bytes(layers, layers.layers[index].buffers),
        "inputs": bench.input_bytes,
        "activations and temporaries": max(weight),
    }
    needed, budget = sum(parts.values()), max(machine.budgets)
    if needed > budget:
        device = machine.budgets.index(budget)
        listed = ", ".join(f"{what} {format_bytes(num_bytes)}" for what, num_bytes in parts.items() if num_bytes)
        raise PlanDoesNotFitError(
            f"layer {layers.layers[index].name} does not fit into {machine.devices[device].name}: with a microbatch of "
            f"{size} it needs {needed} bytes ({format_bytes(needed)}: {listed}), the budget is {budget} bytes "
            f"({format_bytes(budget)}). Use a device with more memory, or cut the model into smaller layers",
            device=device,
            needed_bytes=needed,
            budget_bytes=budget,
        )
    return Cost(*bench.time(trials), *weight)


def _layer_cost(layers: LayerSequence, index: int, kind: int, update: UpdateCost, costs: tuple[Cost, ...]) -> LayerCost:
    layer = layers.layers[index]
    return LayerCost(
        name=layer.name,
        kind=kind,
        parameter_bytes=_parameter_bytes(layers, index),
        gradient_bytes=_gradient_bytes(layers, index),
        buffer_bytes=_buffer_bytes(layers, layer.buffers),
        updated_buffer_bytes=_buffer_bytes(layers, layer.updated_buffers),
        optimizer_state_bytes=update.state_bytes,
        update_s=update.seconds,
        batch_inputs=layer.batch_inputs,
        costs=costs,
    )


def _parameter_bytes(layers: LayerSequence, index: int) -> int:
    return sum(padded(layers.state[name].num_bytes) for name in set(layers.layers[index].parameters))


def _gradient_bytes(layers: LayerSequence, index: int) -> int:
    specs = [layers.state[name] for name in set(layers.layers[index].parameters)]
    return sum(padded(spec.num_bytes) for spec in specs if spec.trainable)


def _buffer_bytes(layers: LayerSequence, names: Sequence[str]) -> int:
    return sum(padded(layers.buffer_state[name].num_bytes) for name in set(names))


def _shared(layers: LayerSequence) -> Iterator[SharedParameter]:
    for is_buffer, specs in ((False, layers.state), (True, layers.buffer_state)):
        for spec in specs.values():
            if len(spec.layers) > 1:
                num_bytes = padded(spec.num_bytes)
                yield SharedParameter(
                    name=spec.name,
                    num_bytes=num_bytes,
                    gradient_bytes=num_bytes if spec.trainable and not is_buffer else 0,
                    layers=spec.layers,
                    is_buffer=is_buffer,
                )
