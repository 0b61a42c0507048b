"""Costing: what measured and estimated profiles share: kinds, microbatch sizes, what fits, the Profile itself."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harmony_lab.costs import Cost, LayerCost, Profile, SharedParameter
from harmony_lab.emulation import Emulation
from harmony_lab.errors import HarmonyError, PlanDoesNotFitError
from harmony_lab.layers import LayerSequence, padded
from harmony_lab.machine import Machine
from harmony_lab.profiler.bench import Weight
from harmony_lab.profiler.updates import UpdateCost
from harmony_lab.units import format_bytes

__all__ = ["Room", "Sizes", "assemble", "costs_by_size", "kinds_of", "parameter_bytes"]

_MOST_SIZES = 6
_MOST_TRIES = 3


def kinds_of(layers: LayerSequence) -> list[int]:
    """The kind of each layer, told apart also by what is trained, which changes what backward does, and by types."""
    numbers: dict[tuple[Any, ...], int] = {}
    kinds = []
    for index, layer in enumerate(layers.layers):
        specs = {spec.name: spec for spec in layers.boundaries[index]}
        key = (
            layer.kind,
            tuple(layers.state[name].trainable for name in layer.parameters),
            tuple((specs[name].requires_grad, specs[name].dtype) for name in layer.inputs),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


# -- microbatch sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ascending microbatch sizes.  ``chosen``: by us, not by the user."""

    values: tuple[int, ...]
    chosen: bool

    @classmethod
    def of(cls, given: Sequence[int] | None, minibatch_size: int) -> "Sizes":
        """The user's, or 1, 2, 4, ... up to the minibatch, six at most.  Raises ``HarmonyError``."""
        if given is not None:
            sizes = tuple(sorted(set(given)))
            if not sizes or sizes[0] < 1:
                raise HarmonyError(f"microbatch_sizes must be one or more sizes from 1 up, got {list(given)}")
            return cls(sizes, False)
        if minibatch_size < 1:
            raise HarmonyError(f"minibatch_size must be 1 or more, got {minibatch_size}")
        doublings = math.ceil(math.log2(minibatch_size))
        count = min(doublings + 1, _MOST_SIZES)
        exponents = [round(i * doublings / max(1, count - 1)) for i in range(count)]
        return cls(tuple(sorted({min(2**exponent, minibatch_size) for exponent in exponents})), True)


@dataclass(frozen=True, slots=True)
class Room:
    """The device that most fits into: its index, name and budget."""

    device: int
    name: str
    budget_bytes: int

    @classmethod
    def of(cls, machine: Machine) -> "Room":
        budget = max(machine.budgets)
        device = machine.budgets.index(budget)
        return cls(device, machine.devices[device].name, budget)

    def check(self, layers: LayerSequence, index: int, size: int, weight: Weight) -> None:
        """Raises ``PlanDoesNotFitError`` where a layer alone, with what it reads, does not fit."""
        parts = _parts(layers, index, size, weight)
        needed = sum(parts.values())
        if needed <= self.budget_bytes:
            return
        listed = ", ".join(f"{what} {format_bytes(num_bytes)}" for what, num_bytes in parts.items() if num_bytes)
        raise PlanDoesNotFitError(
            f"layer {layers.layers[index].name} does not fit into {self.name}: with a microbatch of {size} it needs "
            f"{needed} bytes ({format_bytes(needed)}: {listed}), the budget is {self.budget_bytes} bytes "
            f"({format_bytes(self.budget_bytes)}). Use a device with more memory, or cut the model into smaller layers",
            device=self.device,
            needed_bytes=needed,
            budget_bytes=self.budget_bytes,
        )


def _parts(layers: LayerSequence, index: int, size: int, weight: Weight) -> dict[str, int]:
    """What must be on a device at once to run one layer."""
    layer = layers.layers[index]
    inputs = {spec.name: spec for spec in layers.boundaries[index]}
    specs = [inputs[name] for name in set(layer.inputs)]
    specs += [layers.batch_by_name[name] for name in set(layer.batch_inputs)]
    return {
        "parameters": parameter_bytes(layers, index),
        "gradients": _gradient_bytes(layers, index),
        "buffers": _buffer_bytes(layers, layer.buffers),
        "inputs": sum(spec.num_bytes(size) for spec in specs),
        "activations and temporaries": max(weight),
    }


def costs_by_size(
    layers: LayerSequence,
    kinds: Sequence[int],
    sizes: Sizes,
    room: Room,
    cost_of: Callable[[int, int], Cost],
) -> dict[int, dict[int, Cost]]:
    """Costs by microbatch size and kind, up to the largest size with which every kind fits.

    ``cost_of(layer, size)`` raises ``PlanDoesNotFitError`` or ``torch.OutOfMemoryError`` where a layer does not fit;
    so does this where the smallest size does not.  Where the sizes are ours, the largest that fits is one of them.
    """
    first = {kind: kinds.index(kind) for kind in sorted(set(kinds))}
    costs: dict[int, dict[int, Cost]] = {}

    def fits(size: int) -> bool:
        try:
            costs[size] = {kind: cost_of(index, size) for kind, index in first.items()}
        except (PlanDoesNotFitError, torch.OutOfMemoryError):
            if not costs:
                raise
            return False
        return True

    too_large = next((size for size in _from_smallest(sizes, fits) if not fits(size)), None)
    if too_large is not None and sizes.chosen:
        for _ in range(_MOST_TRIES):
            largest = max(costs)
            guess = min(too_large - 1, *(_guess(layers, first[kind], kind, costs, room) for kind in first))
            if guess <= largest or fits(guess):
                break
            too_large = guess
    return costs


def _from_smallest(sizes: Sizes, fits: Callable[[int], bool]) -> tuple[int, ...]:
    """The sizes left after the smallest that runs: some layers (BatchNorm) refuse a single sample."""
    smallest, *others = sizes.values
    try:
        fits(smallest)
    except (ValueError, ZeroDivisionError):
        if not sizes.chosen or not others:
            raise
    return tuple(others)


def _guess(layers: LayerSequence, index: int, kind: int, costs: Mapping[int, Mapping[int, Cost]], room: Room) -> int:
    """The size at which one kind fills the device, if bytes go on growing as they did."""

    def needed(size: int) -> int:
        weight = Weight(*(int(num_bytes) for num_bytes in costs[size][kind][3:7] if num_bytes is not None))
        return sum(_parts(layers, index, size, weight).values())

    *before, largest = sorted(costs)
    held = needed(largest)
    if before:
        slope = (held - needed(before[-1])) / (largest - before[-1])
    else:
        fixed = parameter_bytes(layers, index) + _gradient_bytes(layers, index)
        slope = (held - fixed) / largest
    return largest + int((room.budget_bytes - held) / slope) if slope > 0 else largest


# -- the profile --------------------------------------------------------------------------------------------------


def assemble(
    layers: LayerSequence,
    device: str,
    kinds: Sequence[int],
    costs: Mapping[int, Mapping[int, Cost]],
    updates: Sequence[UpdateCost],
    update_threads: int,
    *,
    emulation: Emulation | None = None,
    cached: bool = False,
) -> Profile:
    """``costs``: by microbatch size and kind, ascending.  ``updates``: of each layer."""
    return Profile(
        model=type(layers.model).__name__,
        fingerprint=layers.fingerprint,
        device=device,
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
        update_threads=update_threads,
        precision=layers.precision,
        master_bytes=_master_bytes(layers),
        emulation=emulation,
        cached=cached,
    )


def _master_bytes(layers: LayerSequence) -> int:
    """Of the model's own parameters, where devices get any of them in another type."""
    specs = layers.state.values()
    return sum(padded(spec.num_bytes) for spec in specs) if any(spec.shadow for spec in specs) else 0


def _layer_cost(layers: LayerSequence, index: int, kind: int, update: UpdateCost, costs: tuple[Cost, ...]) -> LayerCost:
    layer = layers.layers[index]
    return LayerCost(
        name=layer.name,
        kind=kind,
        parameter_bytes=parameter_bytes(layers, index),
        gradient_bytes=_gradient_bytes(layers, index),
        buffer_bytes=_buffer_bytes(layers, layer.buffers),
        updated_buffer_bytes=_buffer_bytes(layers, layer.updated_buffers),
        optimizer_state_bytes=update.state_bytes,
        update_s=update.seconds,
        batch_inputs=layer.batch_inputs,
        costs=costs,
        update_spread=update.spread,
        update_workspace_bytes=update.workspace_bytes,
    )


def parameter_bytes(layers: LayerSequence, index: int) -> int:
    return sum(padded(layers.state[name].device_bytes) for name in set(layers.layers[index].parameters))


def _gradient_bytes(layers: LayerSequence, index: int) -> int:
    specs = [layers.state[name] for name in set(layers.layers[index].parameters)]
    return sum(padded(spec.num_bytes) for spec in specs if spec.trainable)


def _buffer_bytes(layers: LayerSequence, names: Sequence[str]) -> int:
    return sum(padded(layers.buffer_state[name].num_bytes) for name in set(names))


def _shared(layers: LayerSequence) -> Iterator[SharedParameter]:
    for is_buffer, specs in ((False, layers.state), (True, layers.buffer_state)):
        for spec in specs.values():
            if len(spec.layers) > 1:
                yield SharedParameter(
                    name=spec.name,
                    num_bytes=padded(spec.device_bytes),
                    gradient_bytes=padded(spec.num_bytes) if spec.trainable and not is_buffer else 0,
                    layers=spec.layers,
                    is_buffer=is_buffer,
                )
