"""Blocks: what the blocks of a Program hold while it runs, counted against the devices' budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.program import Block, Op
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.compute_memory import ComputeMemory
from harmony_lab.runtime.device_memory import BlockMemory, Flat, Shapes, Values
from harmony_lab.runtime.execution import SavedLayer
from harmony_lab.runtime.kept import Kept
from harmony_lab.runtime.layout import Layout
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.swapped_state import SwappedState

__all__ = ["Blocks", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """Content of a SAVED block; its tensors are counted as long as they live.  ``kept``: where they may leave the
    device, or what they are made with may."""

    layers: list[SavedLayer]
    memory: ComputeMemory
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class SavedOnHost:
    """Content of a host SAVED block: the bytes of each slot, what they are of, and bytes that were planned but that no
    slot takes, which move too."""

    saved: Saved
    parts: list[Tensor]
    unused: Tensor


Content = Flat | Values | Saved | SavedOnHost | SwappedState | None


class Blocks:
    """The living blocks of one step.  Each is written once and freed once; the program's edges say when."""

    def __init__(self, memory: BlockMemory, backend: Backend, ledgers: Sequence[Ledger]) -> None:
        self._blocks = memory.blocks
        self._memory = memory
        self._backend = backend
        self._ledgers = ledgers
        self._content: dict[int, Content] = {}

    # -- reading --------------------------------------------------------------------------------------------------

    def flat(self, index: int) -> Flat:
        content = self._read(index)
        assert isinstance(content, Flat)
        return content

    def values(self, index: int) -> Values:
        content = self._read(index)
        assert isinstance(content, dict)
        return content

    def saved(self, index: int) -> Saved:
        content = self._read(index)
        assert isinstance(content, Saved)
        return content

    def saved_on_host(self, index: int) -> SavedOnHost:
        content = self._read(index)
        assert isinstance(content, SavedOnHost)
        return content

    def optimizer_state(self, index: int) -> SwappedState:
        content = self._read(index)
        assert isinstance(content, SwappedState)
        return content

    def absent(self, index: int) -> frozenset[str]:
        """The parameters that a WEIGHT or GRADIENT block lacks."""
        return self._memory.absent(index)

    def layout(self, index: int) -> Layout:
        return self._memory.layout(index)

    def _read(self, index: int) -> Content:
        try:
            return self._content[index]
        except KeyError:
            raise _misused(
                f"%{index} {self._blocks[index]} is used before it is written or after it is freed"
            ) from None

    # -- writing --------------------------------------------------------------------------------------------------

    def allocate_flat(self, index: int, op: Op) -> Flat:
        """Memory, with any content, for a WEIGHT, GRADIENT or BUFFER block."""
        flat = self._memory.flat(index)
        self._charge(index, flat.memory.nbytes, op)
        self._put(index, flat, flat.memory.nbytes)
        return flat

    def allocate_values(self, index: int, op: Op, like: Shapes) -> Values:
        """Memory, with any content, for tensors of these shapes and dtypes."""
        values = self._memory.values(index, like)
        num_bytes = sum(tensor.nbytes for tensor in values.values())
        self._charge(index, num_bytes, op)
        self._put(index, values, num_bytes)
        return values

    def _charge(self, index: int, num_bytes: int, purpose: Op) -> None:
        block = self._blocks[index]
        if block.device != HOST:  # whose memory was asked for before
            self._ledgers[block.device].allocated(block.kind, num_bytes, purpose)

    def adopt_values(self, index: int, values: Values, memory: ComputeMemory) -> None:
        """What a compute op has made is that block's content."""
        memory.hand_over(self._blocks[index].kind, values.values())
        self._put(index, values, sum(tensor.nbytes for tensor in values.values()))

    def adopt_saved(
        self, index: int, layers: list[SavedLayer], memory: ComputeMemory, kept: Kept | None = None
    ) -> None:
        """What is still alive of a compute op's memory is what its layers keep for backward."""
        memory.keep()
        if kept is not None:
            kept.settle(layers)
        self._content[index] = Saved(layers, memory, kept)

    def leave_device(self, index: int, host_index: int) -> list[tuple[Tensor, Tensor]]:
        """The copies that bring a SAVED block to the host, where it is from then on too."""
        saved = self.saved(index)
        kept = saved.kept
        assert kept is not None, f"%{index} {self._blocks[index]} was not made to leave its device"
        room = self._memory.saved_on_host(host_index, kept.num_bytes)
        sizes = [slot.num_bytes for slot in kept.slots]
        *parts, unused = torch.split(room, [*sizes, room.nbytes - sum(sizes)])
        self._content[host_index] = SavedOnHost(Saved([*saved.layers], saved.memory, kept), parts, unused)
        flats = [slot.flat for slot in kept.slots if slot.flat is not None]
        return [*zip(parts, flats, strict=True), (unused, self._like(unused, self._blocks[index].device))]

    def come_back(self, index: int, host_index: int, op: Op) -> list[tuple[Tensor, Tensor]]:
        """The copies that bring it to a device again."""
        there = self.saved_on_host(host_index)
        kept = there.saved.kept
        assert kept is not None
        kept.come_back(self._backend.torch_device(op.device))
        flats = [slot.flat for slot in kept.slots if slot.flat is not None]
        memory = there.saved.memory.again(op, flats)
        self._content[index] = Saved([*there.saved.layers], memory, kept)
        return [*zip(flats, there.parts, strict=True), (self._like(there.unused, op.device), there.unused)]

    def _like(self, tensor: Tensor, device: int) -> Tensor:
        return torch.empty_like(tensor, device=self._backend.torch_device(device))

    def adopt_state(self, index: int, state: SwappedState, op: Op) -> None:
        """An OPTIMIZER block; what it is planned with is held also while the state is not made yet."""
        state.room.held_bytes = max(state.num_bytes, self._blocks[index].num_bytes)
        self._charge(index, state.room.held_bytes, op)
        self._content[index] = state

    def find(self, index: int) -> Flat:
        """A block of the host that is there before the first op: zeros."""
        layout = self.layout(index)
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        flat = Flat(memory, layout.views(memory))
        self._put(index, flat, memory.nbytes)
        return flat

    def reserve(self, index: int) -> None:
        """A WORKSPACE block has no content: its room is for what is counted op by op."""
        self._content[index] = None

    def _put(self, index: int, content: Flat | Values, num_bytes: int) -> None:
        self._content[index] = content
        block = self._blocks[index]
        assert num_bytes == block.num_bytes, (
            f"%{index} {block} was planned with {block.num_bytes} bytes, has {num_bytes}"
        )

    # -- freeing --------------------------------------------------------------------------------------------------

    def free(self, index: int) -> None:
        try:
            content = self._content.pop(index)
        except KeyError:
            raise _misused(f"%{index} {self._blocks[index]} is freed before it is written or twice") from None
        self._release(self._blocks[index], content)

    def hand_over(self, index: int) -> Flat:
        """That block's content, which somebody else keeps from now on."""
        content = self.flat(index)
        del self._content[index]
        return content

    def clear(self) -> None:
        """Free whatever is left."""
        while self._content:
            index, content = self._content.popitem()
            self._release(self._blocks[index], content)

    def _release(self, block: Block, content: Content) -> None:
        if isinstance(content, Saved):
            self._release_saved(content)
        elif isinstance(content, SavedOnHost):
            content.saved.layers.clear()
            self._backend.released(content.parts)
        elif isinstance(content, SwappedState):
            self._backend.released(content.tensors)
            self._ledgers[block.device].released(block.kind, content.room.held_bytes)
        elif content is not None:
            tensors = [content.memory] if isinstance(content, Flat) else list(content.values())
            self._backend.released(tensors)
            if block.device != HOST:
                self._ledgers[block.device].released(block.kind, sum(tensor.nbytes for tensor in tensors))

    def _release_saved(self, saved: Saved) -> None:
        if saved.kept is not None:
            self._backend.released([slot.flat for slot in saved.kept.slots if slot.flat is not None])
            saved.kept.leave()
        saved.layers.clear()
        saved.memory.account.close()


def _misused(violation: str) -> ProgramError:
    return ProgramError(
        "the program broke its own rules while running; harmony_lab.check would have refused it", [violation]
    )
