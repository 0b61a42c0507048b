"""Blocks: what the blocks of a Program hold while it runs, counted against the devices' budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.program import Block, Op
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.compute_memory import ComputeMemory
from harmony_lab.runtime.device_memory import BlockMemory, Flat, Shapes, Values
from harmony_lab.runtime.execution import SavedLayer
from harmony_lab.runtime.ledger import Ledger

__all__ = ["Blocks", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """Content of a SAVED block; its tensors are counted as long as they live."""

    layers: list[SavedLayer]
    memory: ComputeMemory


class Blocks:
    """The living blocks of one step.  Each is written once and freed once; the program's edges say when."""

    def __init__(self, memory: BlockMemory, backend: Backend, ledgers: Sequence[Ledger]) -> None:
        self._blocks = memory.blocks
        self._memory = memory
        self._backend = backend
        self._ledgers = ledgers
        self._content: dict[int, Flat | Values | Saved | None] = {}

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

    def _read(self, index: int) -> Flat | Values | Saved | None:
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

    def adopt_saved(self, index: int, layers: list[SavedLayer], memory: ComputeMemory) -> None:
        """What is still alive of a compute op's memory is what its layers keep for backward."""
        memory.keep()
        self._content[index] = Saved(layers, memory)

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

    def _release(self, block: Block, content: Flat | Values | Saved | None) -> None:
        if isinstance(content, Saved):
            content.layers.clear()
            content.memory.account.close()
        elif content is not None:
            tensors = [content.memory] if isinstance(content, Flat) else list(content.values())
            self._backend.released(tensors)
            if block.device != HOST:
                self._ledgers[block.device].released(block.kind, sum(tensor.nbytes for tensor in tensors))


def _misused(violation: str) -> ProgramError:
    return ProgramError(
        "the program broke its own rules while running; harmony_lab.check would have refused it", [violation]
    )
