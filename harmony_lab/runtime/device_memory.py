"""DeviceMemory: one stretch of memory per device, and one on the host, which the blocks of all steps lie in; blocks
without a place there (``places``) have memory of their own while they live."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from harmony_lab.layers import LayerSequence, padded
from harmony_lab.machine import HOST
from harmony_lab.places import Places, left_gradients, place
from harmony_lab.program import Program, TensorKind
from harmony_lab.runtime.absent import NONE_ABSENT, absent_parameters
from harmony_lab.runtime.arena import Arena
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.device_updates import DeviceUpdates
from harmony_lab.runtime.layout import Layout, Layouts
from harmony_lab.runtime.loose import loose_blocks

__all__ = ["BlockMemories", "BlockMemory", "DeviceMemory", "Flat", "Shapes", "Values"]

Values = dict[str, Tensor]
"""Content of an INPUT, ACTIVATION or ACTIVATION_GRADIENT block: tensors by name."""
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True)
class Flat:
    """Content of a WEIGHT, GRADIENT or BUFFER block: its bytes, and as what tensors they are read."""

    memory: Tensor
    views: Mapping[str, Tensor]


_Left = tuple[tuple[int, int], int]
"""Layers, and which of their gradients: devices that do not reach each other bring one each."""


class DeviceMemory:
    """Kept from step to step, as large as the programs need, until one needs more or has room for less.

    ``shared``: whether blocks may lie where others lay; without, what is read too late is what was there, or poison.
    """

    def __init__(self, backend: Backend, *, shared: bool = True) -> None:
        self.shared = shared
        self.backend = backend
        self._memory: dict[int, Tensor] = {}
        self._arena = Arena(0)  # the host's
        self._left: dict[_Left, Arena] = {}
        self._leaves = False
        self._pins = True  # until the system refuses, which is told once
        self._users: WeakSet[BlockMemory] = WeakSet()

    @property
    def num_bytes(self) -> dict[int, int]:
        """By device, and of the host (``HOST``)."""
        return {device: memory.nbytes for device, memory in self._memory.items()}

    def join(self, user: "BlockMemory") -> None:
        """That one is told when memory goes."""
        self._users.add(user)

    def trim(self, device: int, least_bytes: int, most_bytes: int | None) -> None:
        """Give that device's memory back if it has too few bytes, or too many."""
        memory = self._memory.get(device)
        if memory is None:
            return
        if memory.nbytes < least_bytes or (most_bytes is not None and memory.nbytes > most_bytes):
            self._give_back(device)

    def of(self, device: int, num_bytes: int) -> Tensor:
        """That device's memory, at least so many bytes of it; with any content."""
        self.trim(device, num_bytes, None)
        memory = self._memory.get(device)
        if memory is None:
            if device == HOST:
                self._arena = self._on_host(num_bytes)
                memory = self._arena.memory
            else:
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.backend.torch_device(device))
            self._memory[device] = memory
        return memory

    def left(self, key: _Left, num_bytes: int) -> Tensor:
        """Memory of the host for gradients that a step leaves for the next one, the same for all programs."""
        arena = self._left.get(key)
        if arena is None:
            arena = self._left[key] = self._on_host(num_bytes)
        return arena.memory

    @property
    def left_bytes(self) -> int:
        """Of the host's memory, what is kept for that."""
        return sum(arena.num_bytes for arena in self._left.values())

    def _on_host(self, num_bytes: int) -> Arena:
        arena = Arena(num_bytes)
        if self.backend.pins_host_memory:
            self._pins &= arena.pin("gradients and activations", warns=self._pins)
        return arena

    def expect(self, *, leaves: bool) -> None:
        """Before a step that leaves its updates to the next one, or none.  Those that do have their gradients elsewhere
        than others: memory of the host is given back where the one kind follows the other, so that it never holds both.
        """
        if leaves != self._leaves:
            self._leaves = leaves
            self._give_back_host()

    def close(self) -> None:
        """Give all of it back."""
        for device in list(self._memory):
            self._give_back(device)
        self._give_back_host()

    def _give_back_host(self) -> None:
        for arena in self._left.values():
            arena.unpin()
        self._left.clear()
        self._give_back(HOST)

    def _give_back(self, device: int) -> None:
        for user in self._users:
            user.forget(device)
        self._memory.pop(device, None)
        if device == HOST:
            self._arena.unpin()
            self._arena = Arena(0)


class BlockMemory:
    """The memory of a program's blocks.  Tensors over it are made once and come back in every step."""

    def __init__(self, program: Program, layers: LayerSequence, layouts: Layouts, memory: DeviceMemory) -> None:
        self.blocks = tuple(program.blocks)
        self.kinds = [block.kind for block in self.blocks]
        self.updates = DeviceUpdates.of(program)
        self.loose = loose_blocks(program)
        self._absent = absent_parameters(program, layers, layouts)
        self._layers = layers
        self._layouts = layouts
        self._places: Places = place(program, layers, shared=memory.shared)
        self._left = _left(program)
        self._budgets = program.budgets
        self._device_memory = memory
        self._memory: dict[int, Tensor] = {}
        self._flat: dict[int, Flat] = {}
        self._values: dict[int, Values] = {}
        memory.join(self)

    def device_bytes(self, device: int) -> int:
        """What the program needs of that device's memory in all."""
        return self._places.device_bytes(device)

    def trim(self, held_bytes: Sequence[int]) -> None:
        """Give memory of other programs back where it leaves too little room for this one's.  ``held_bytes``: per
        device, what is taken beside the program."""
        for device, (budget, held) in enumerate(zip(self._budgets, held_bytes, strict=True)):
            room = budget - self._places.beside_bytes[device] - held if self._device_memory.shared else None
            self._device_memory.trim(device, self._places.num_bytes.get(device, 0), room)

    def prepare(self) -> None:
        """Before a step: get hold of the memory."""
        self._memory = {device: self._device_memory.of(device, size) for device, size in self._places.num_bytes.items()}

    def forget(self, device: int) -> None:
        """That device's memory is given back."""
        self._memory.pop(device, None)
        for content in (self._flat, self._values):
            for index in [index for index in content if self.blocks[index].device == device]:
                content.pop(index)

    def layout(self, index: int) -> Layout:
        """Of a WEIGHT, GRADIENT or BUFFER block."""
        block = self.blocks[index]
        return self._layouts.of(block.kind, block.layers, self.absent(index))

    def absent(self, index: int) -> frozenset[str]:
        """The parameters that a block of a layer lacks, see ``absent``."""
        return self._absent.get(index, NONE_ABSENT)

    def flat(self, index: int) -> Flat:
        """With any content."""
        flat = self._flat.get(index)
        if flat is None:
            block = self.blocks[index]
            layout = self.layout(index)
            memory = self._part(index, 0, layout.num_bytes).data
            flat = Flat(memory, layout.views(memory))
            if self._has_place(index):
                self._flat[index] = flat
            if block.kind is TensorKind.WEIGHT:
                for name, view in flat.views.items():
                    spec = self._layers.state[name]
                    view.requires_grad_(spec.trainable)
                    if spec.shadow and spec.trainable:
                        view.grad_dtype = None  # that of the GRADIENT block, which is of the master's type
        return flat

    def values(self, index: int, like: Shapes) -> Values:
        """Tensors of these shapes and dtypes, with any content."""
        values = self._values.get(index)
        if values is None or not _alike(values, like):
            values, offset = {}, 0
            for name, (shape, dtype) in like.items():
                num_bytes = shape.numel() * dtype.itemsize
                # data: a version counter of its own, so that writing to one block is not taken for writing to all
                values[name] = self._part(index, offset, num_bytes).view(dtype).view(shape).data
                offset += padded(num_bytes)
            if self._has_place(index):
                self._values[index] = values
        return values

    def saved_on_host(self, index: int, num_bytes: int) -> Tensor:
        """Bytes of the host for what autograd saved: the block's place, unless there is more of it than was planned."""
        planned = self.blocks[index].num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8) if num_bytes > planned else self._part(index, 0, planned)

    def _has_place(self, index: int) -> bool:
        return index in self._places.offsets or index in self._left

    def _part(self, index: int, offset: int, num_bytes: int) -> Tensor:
        """Of the block's place; where it has none, memory of its own, which goes with the last tensor over it."""
        if not self._has_place(index):
            where = self._device_memory.backend.torch_device(self.blocks[index].device)
            return torch.empty(num_bytes, dtype=torch.uint8, device=where)
        if index in self._left:
            return self._device_memory.left(self._left[index], num_bytes)
        start = self._places.offsets[index] + offset
        return self._memory[self.blocks[index].device][start : start + num_bytes]


class BlockMemories:
    """The BlockMemory of each program that a sequence of layers runs."""

    def __init__(self, layers: LayerSequence, layouts: Layouts, memory: DeviceMemory) -> None:
        self.memory = memory
        self._layers = layers
        self._layouts = layouts
        self._made: dict[int, tuple[Program, BlockMemory]] = {}

    def of(self, program: Program) -> BlockMemory:
        """Made once, and kept with the program."""
        known = self._made.get(id(program))
        if known is None:
            known = self._made[id(program)] = program, BlockMemory(program, self._layers, self._layouts, self.memory)
        return known[1]

    def over(self, layers: LayerSequence, layouts: Layouts) -> "BlockMemories":
        """Of other layers, in the same memory."""
        return BlockMemories(layers, layouts, self.memory)


def _left(program: Program) -> dict[int, _Left]:
    """The gradients that are left on the host for the next step."""
    counts: dict[tuple[int, int], int] = {}
    left: dict[int, _Left] = {}
    for index in left_gradients(program):
        layers = program.blocks[index].layers
        left[index] = layers, counts.get(layers, 0)
        counts[layers] = counts.get(layers, 0) + 1
    return left


def _alike(values: Values, like: Shapes) -> bool:
    return values.keys() == like.keys() and all(
        values[name].shape == shape and values[name].dtype == dtype for name, (shape, dtype) in like.items()
    )
