"""BufferUpdates: what forward wrote to buffers such as BatchNorm's statistics, merged over devices after a step."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.order import Order
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.runtime.layout import Layout

__all__ = ["BufferUpdates", "check_buffers"]


class BufferUpdates:
    """The devices' versions of updated buffers, until ``apply`` writes them to the user's own.

    Until then the step's recomputes see the buffers as they were, and a step that fails leaves them whole.

    Each microbatch maps a buffer b to d·b + f(microbatch).  A device that starts from r0 and runs k microbatches ends
    with d^k·r0 + F, so running its microbatches after others that led to r gives d^k·(r - r0) + (its version).
    """

    def __init__(self, program: Program, layers: LayerSequence) -> None:
        self._program = program
        self._layers = layers
        self._versions: dict[str, dict[int, Tensor]] = {}
        self.written = not any(layer.updated_buffers for layer in layers.layers)
        self._again = {} if self.written else _updated_again(program)

    def add(self, device: int, pack: tuple[int, int], buffers: Mapping[str, Tensor]) -> None:
        """A device's buffers after its microbatches of a pack, in host memory."""
        for name in self._layers.updated_buffers_of(*pack):
            self._versions.setdefault(name, {})[device] = buffers[name]

    def bring_up_to_date(self, block: int, flat: Tensor, layout: Layout) -> None:
        """Where that block is of buffers that its device has updated before and goes on to update, write the device's
        versions over the user's in ``flat``, its content."""
        device = self._again.get(block)
        if device is None:
            return
        for name, present in layout.views(flat).items():
            version = self._versions.get(name, {}).get(device)
            if version is not None:
                present.copy_(version)

    def apply(self) -> None:
        """Write the merged versions: all of them, or none where merging fails."""
        order = _device_order(self._program)
        with torch.no_grad():
            merged = {
                name: self._merge(name, sorted(versions, key=order.__getitem__))
                for name, versions in self._versions.items()
            }
            for name, value in merged.items():
                self._layers.tensors[name].copy_(value)
        self.written = True

    def _merge(self, name: str, devices: Sequence[int]) -> Tensor:
        versions, before = self._versions[name], self._layers.tensors[name]
        merged = versions[devices[0]]
        for device in devices[1:]:
            decay = self._layers.buffer_decay[name]
            assert decay is not None
            change = merged - before
            if decay != 1.0:
                change = change * decay ** self._num_microbatches(device, name)
            merged = change + versions[device]
        return merged

    def _num_microbatches(self, device: int, name: str) -> int:
        layer = _updating_layers(self._layers, name)[0]
        return sum(
            op.kind is OpKind.FORWARD and op.device == device and op.layers[0] <= layer < op.layers[1]
            for op in self._program.ops
        )


def check_buffers(program: Program, layers: LayerSequence) -> None:
    """Raises ``ProgramError`` where a program would update a buffer in a way that cannot be merged."""
    devices: dict[str, list[int]] = {}
    violations: dict[str, None] = {}
    again = _updated_again(program)
    for device, pack in _buffer_moves(program, without=again if _in_turn(program, again) else {}):
        for name in layers.updated_buffers_of(*pack):
            devices.setdefault(name, []).append(device)
            updating = _updating_layers(layers, name)
            if not all(pack[0] <= layer < pack[1] for layer in updating):
                names = ", ".join(f"{layer} ({layers.layers[layer].name})" for layer in updating)
                violations[
                    f"buffer {name!r} is updated by layers {names}, which are not all in one pack, so microbatches "
                    "would not update it in their order: choose packs that hold these layers together, or give each "
                    "place a module of its own"
                ] = None
    for name, used in devices.items():
        if len(set(used)) < len(used):
            violations[
                f"buffer {name!r} is updated by several packs or groups on device {used[0]} in one iteration"
            ] = None
        if len(used) > 1 and layers.buffer_decay.get(name) is None:
            violations[f"buffer {name!r} depends on the order of microbatches, and several devices update it"] = None
    if violations:
        raise ProgramError("this program updates buffers in a way that cannot be merged", list(violations))


def _buffer_moves(program: Program, *, without: Mapping[int, int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(device, pack) of every swap-out of buffers, but for those blocks."""
    for _, index in _swapped_out(program):
        if index not in without:
            yield program.blocks[index].device, program.blocks[index].layers


def _swapped_out(program: Program) -> Iterator[tuple[int, int]]:
    """(op, block) of every swap-out of buffers."""
    for number, op in enumerate(program.ops):
        if op.kind is OpKind.SWAP_OUT:
            for index in op.reads:
                if program.blocks[index].kind is TensorKind.BUFFER:
                    yield number, index


def _updated_again(program: Program) -> dict[int, int]:
    """Blocks of buffers that leave their device after others of the same have left it; their devices."""
    seen: set[tuple[int, tuple[int, int]]] = set()
    again: dict[int, int] = {}
    for _, index in _swapped_out(program):
        block = program.blocks[index]
        if (block.device, block.layers) in seen:
            again[index] = block.device
        seen.add((block.device, block.layers))
    return again


def _in_turn(program: Program, again: Mapping[int, int]) -> bool:
    """Whether each of these is fetched after the one before it has left."""
    if not again:
        return True
    order, last = Order(program), dict[tuple[int, tuple[int, int]], int]()
    fetches = {index: number for number, op in enumerate(program.ops) for index in op.writes if index in again}
    for number, index in _swapped_out(program):
        key = program.blocks[index].device, program.blocks[index].layers
        if index in again and (key not in last or not order.precedes(last[key], fetches[index])):
            return False
        last[key] = number
    return True


def _updating_layers(layers: LayerSequence, name: str) -> list[int]:
    return [index for index, layer in enumerate(layers.layers) if name in layer.updated_buffers]


def _device_order(program: Program) -> dict[int, int]:
    """Devices by the first sample they run forward on: the order in which one device would have met the samples."""
    first: dict[int, int] = {}
    for op in program.ops:
        if op.kind is OpKind.FORWARD:
            first[op.device] = min(op.samples[0], first.get(op.device, op.samples[0]))
    return first
