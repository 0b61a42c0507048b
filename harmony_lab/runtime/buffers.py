"""BufferUpdates: what forward wrote to buffers such as BatchNorm's statistics, merged over devices after a step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.program import OpKind, Program, TensorKind

__all__ = ["BufferUpdates"]


class BufferUpdates:
    """The devices' versions of updated buffers, until ``apply`` writes them to the user's own.

    Until then the step's recomputes see the buffers as they were, and a step that fails leaves them whole.

    Each microbatch maps a buffer b to d·b + f(microbatch).  A device that starts from r0 and runs k microbatches ends
    with d^k·r0 + F, so running its microbatches after others that led to r gives d^k·(r - r0) + (its version).

    Raises ``ProgramError`` where a program would update a buffer in a way that cannot be merged.
    """

    def __init__(self, program: Program, layers: LayerSequence) -> None:
        self._program = program
        self._layers = layers
        self._versions: dict[str, dict[int, Tensor]] = {}
        if any(layer.updated_buffers for layer in layers.layers):
            self._refuse_unmergeable()

    def add(self, device: int, pack: tuple[int, int], buffers: Mapping[str, Tensor]) -> None:
        """A device's buffers after its microbatches of a pack, in host memory."""
        for name in self._layers.updated_buffers_of(*pack):
            self._versions.setdefault(name, {})[device] = buffers[name]

    def apply(self) -> None:
        """Write the merged versions."""
        order = _device_order(self._program)
        with torch.no_grad():
            for name, versions in self._versions.items():
                first, *others = sorted(versions, key=order.__getitem__)
                merged = versions[first]
                target = self._layers.tensors[name]
                for device in others:
                    decay = self._layers.buffer_decay[name]
                    assert decay is not None
                    change = merged - target
                    if decay != 1.0:
                        change = change * decay ** self._num_microbatches(device, name)
                    merged = change + versions[device]
                target.copy_(merged)

    def _num_microbatches(self, device: int, name: str) -> int:
        (layer,) = (i for i, layer in enumerate(self._layers.layers) if name in layer.updated_buffers)
        return sum(
            op.kind is OpKind.FORWARD and op.device == device and op.layers[0] <= layer < op.layers[1]
            for op in self._program.ops
        )

    def _refuse_unmergeable(self) -> None:
        devices: dict[str, list[int]] = {}
        for op in self._program.ops:
            if op.kind is OpKind.SWAP_OUT:
                for block in (self._program.blocks[index] for index in op.reads):
                    if block.kind is TensorKind.BUFFER:
                        for name in self._layers.updated_buffers_of(*block.layers):
                            devices.setdefault(name, []).append(op.device)
        violations = []
        for name, used in devices.items():
            if len(set(used)) < len(used):
                violations.append(
                    f"buffer {name!r} is updated by several packs or groups on device {used[0]} in one iteration"
                )
            if len(used) > 1 and self._layers.buffer_decay.get(name) is None:
                violations.append(
                    f"buffer {name!r} depends on the order of microbatches, and several devices update it"
                )
        if violations:
            raise ProgramError("this program updates buffers in a way that cannot be merged", violations)


def _device_order(program: Program) -> dict[int, int]:
    """Devices by the first sample they run forward on: the order in which one device would have met the samples."""
    first: dict[int, int] = {}
    for op in program.ops:
        if op.kind is OpKind.FORWARD:
            first[op.device] = min(op.samples[0], first.get(op.device, op.samples[0]))
    return first
