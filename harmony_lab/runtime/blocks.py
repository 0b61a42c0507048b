"""Blocks: what the blocks of a Program hold while it runs, counted against the devices' budgets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST
from harmony_lab.program import Block, Op, Program, TensorKind
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.execution import SavedLayer
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.ledger import Account, Ledger
from harmony_lab.runtime.memory import MemoryTracker

__all__ = ["Blocks", "ComputeMemory", "Flat", "Saved", "Values", "computing"]

Values = dict[str, Tensor]
"""Content of an INPUT, ACTIVATION or ACTIVATION_GRADIENT block: tensors by name."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Content of a WEIGHT, GRADIENT or BUFFER block: its bytes, and as what tensors they are read."""

    memory: Tensor
    views: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Saved:
    """Content of a SAVED block; its tensors are counted as long as they live."""

    layers: list[SavedLayer]
    memory: "ComputeMemory"


class ComputeMemory:
    """What one compute op allocates on a device."""

    def __init__(self, ledger: Ledger, op: Op) -> None:
        self.account = Account(ledger, op)
        self.tracker = MemoryTracker(self.account.allocated, self.account.released)

    def hand_over(self, kind: TensorKind, tensors: Iterable[Tensor]) -> None:
        """These tensors, allocated by the op, are a block's content from now on."""
        with self.account.handing_over(kind):
            for tensor in tensors:
                self.tracker.forget(tensor)


@contextmanager
def computing(ledger: Ledger, op: Op) -> Iterator[ComputeMemory]:
    """Counts what torch ops allocate in here as that op's workspace, except what becomes a block's content."""
    memory = ComputeMemory(ledger, op)
    try:
        with memory.tracker:
            yield memory
    except BaseException:
        memory.account.close()
        raise


class Blocks:
    """The living blocks of one step.  Each is written once and freed once; the program's edges say when."""

    def __init__(
        self, program: Program, layers: LayerSequence, layouts: Layouts, backend: Backend, ledgers: Sequence[Ledger]
    ) -> None:
        self._program = program
        self._layers = layers
        self._layouts = layouts
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
                f"%{index} {self._program.blocks[index]} is used before it is written or after it is freed"
            ) from None

    # -- writing --------------------------------------------------------------------------------------------------

    def allocate_flat(self, index: int, op: Op) -> Flat:
        """Memory, with any content, for a WEIGHT, GRADIENT or BUFFER block."""
        block = self._program.blocks[index]
        layout = self._layouts.of(block.kind, block.layers)
        memory = self._allocate(block, {"": (torch.Size([layout.num_bytes]), torch.uint8)}, op)[""]
        flat = Flat(memory, layout.views(memory))
        if block.kind is TensorKind.WEIGHT:
            for name, view in flat.views.items():
                view.requires_grad_(self._layers.state[name].trainable)
        self._put(index, flat, memory.nbytes)
        return flat

    def allocate_values(self, index: int, op: Op, like: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Values:
        """Memory, with any content, for tensors of these shapes and dtypes."""
        values = self._allocate(self._program.blocks[index], like, op)
        self._put(index, values, sum(tensor.nbytes for tensor in values.values()))
        return values

    def adopt_values(self, index: int, values: Values, memory: ComputeMemory) -> None:
        """What a compute op has made is that block's content."""
        memory.hand_over(self._program.blocks[index].kind, values.values())
        self._put(index, values, sum(tensor.nbytes for tensor in values.values()))

    def adopt_saved(self, index: int, layers: list[SavedLayer], memory: ComputeMemory) -> None:
        """What is still alive of a compute op's memory is what its layers keep for backward."""
        memory.account.become(TensorKind.SAVED)
        self._content[index] = Saved(layers, memory)

    def reserve(self, index: int) -> None:
        """A WORKSPACE block has no content: its room is for what is counted op by op."""
        self._content[index] = None

    def _allocate(
        self, block: Block, like: Mapping[str, tuple[torch.Size, torch.dtype]], purpose: Op
    ) -> dict[str, Tensor]:
        if block.device == HOST:
            pin = self._backend.pins_host_memory
            return {name: torch.empty(shape, dtype=dtype, pin_memory=pin) for name, (shape, dtype) in like.items()}
        num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in like.values())
        ledger, device = self._ledgers[block.device], self._backend.torch_device(block.device)
        ledger.allocated(block.kind, num_bytes, purpose)
        try:
            return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in like.items()}
        except BaseException:
            ledger.released(block.kind, num_bytes)
            raise

    def _put(self, index: int, content: Flat | Values, num_bytes: int) -> None:
        self._content[index] = content
        block = self._program.blocks[index]
        assert num_bytes == block.num_bytes, (
            f"%{index} {block} was planned with {block.num_bytes} bytes, has {num_bytes}"
        )

    # -- freeing --------------------------------------------------------------------------------------------------

    def free(self, index: int) -> None:
        try:
            content = self._content.pop(index)
        except KeyError:
            raise _misused(f"%{index} {self._program.blocks[index]} is freed before it is written or twice") from None
        self._release(self._program.blocks[index], content)

    def clear(self) -> None:
        """Free whatever is left."""
        while self._content:
            index, content = self._content.popitem()
            self._release(self._program.blocks[index], content)

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
