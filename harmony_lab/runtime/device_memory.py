"""DeviceMemory: one stretch of memory per device, and one on the host, which the blocks of all steps lie in."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_lab.layers import LayerSequence, padded
from harmony_lab.machine import HOST
from harmony_lab.program import Program, TensorKind
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.places import Places, place

__all__ = ["BlockMemories", "BlockMemory", "DeviceMemory", "Flat", "Shapes", "Values"]

Values = dict[str, Tensor]
"""Content of an INPUT, ACTIVATION or ACTIVATION_GRADIENT block: tensors by name."""
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True)
class Flat:
    """Content of a WEIGHT, GRADIENT or BUFFER block: its bytes, and as what tensors they are read."""

    memory: Tensor
    views: Mapping[str, Tensor]


class DeviceMemory:
    """Grows to what the largest program needs, between steps, and is kept until it is forgotten.

    ``num_allocations``: how often memory was asked for.  ``shared``: whether blocks may lie where others lay; without,
    what is read too late is what was there, or poison.
    """

    def __init__(self, backend: Backend, *, shared: bool = True) -> None:
        self.shared = shared
        self.num_allocations = 0
        self._backend = backend
        self._memory: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> dict[int, int]:
        """By device, and of the host (``HOST``)."""
        return {device: memory.nbytes for device, memory in self._memory.items()}

    def of(self, device: int, num_bytes: int) -> Tensor:
        """That device's memory, at least so many bytes of it; with any content."""
        memory = self._memory.get(device)
        if memory is None or memory.nbytes < num_bytes:
            self._memory.pop(device, None)
            on_host = device == HOST
            where = torch.device("cpu") if on_host else self._backend.torch_device(device)
            pin = on_host and self._backend.pins_host_memory
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=pin)
            self._memory[device] = memory
            self.num_allocations += 1
        return memory


class BlockMemory:
    """The memory of a program's blocks.  Tensors over it are made once and come back in every step."""

    def __init__(self, program: Program, layers: LayerSequence, layouts: Layouts, memory: DeviceMemory) -> None:
        self.blocks = tuple(program.blocks)
        self.kinds = [block.kind for block in self.blocks]
        self._layers = layers
        self._layouts = layouts
        self._places: Places = place(program, layers, shared=memory.shared)
        self._device_memory = memory
        self._memory: dict[int, Tensor] = {}
        self._flat: dict[int, Flat] = {}
        self._values: dict[int, Values] = {}

    def prepare(self) -> None:
        """Before a step: get hold of the memory."""
        found = {device: self._device_memory.of(device, size) for device, size in self._places.num_bytes.items()}
        if any(self._memory.get(device) is not memory for device, memory in found.items()):
            self._memory = found
            self._flat.clear()
            self._values.clear()

    def flat(self, index: int) -> Flat:
        """With any content."""
        flat = self._flat.get(index)
        if flat is None:
            block = self.blocks[index]
            layout = self._layouts.of(block.kind, block.layers)
            memory = self._part(index, 0, layout.num_bytes).data
            flat = self._flat[index] = Flat(memory, layout.views(memory))
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
            self._values[index] = values
        return values

    def _part(self, index: int, offset: int, num_bytes: int) -> Tensor:
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


def _alike(values: Values, like: Shapes) -> bool:
    return values.keys() == like.keys() and all(
        values[name].shape == shape and values[name].dtype == dtype for name, (shape, dtype) in like.items()
    )
