"""DeviceUpdates: which layers a program's devices update, whose result the host gets, and where their state waits."""

from dataclasses import dataclass

from harmony_lab.machine import HOST
from harmony_lab.program import OpKind, Program, TensorKind

__all__ = ["DeviceUpdates"]

_Layers = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUpdates:
    """``owners``: by the layers of an update, the first device that makes it.  Others may make it too, each for itself
    with the same gradients: what they bring back is thrown away.

    ``swaps_state``: the optimizer's state comes from the host within the iteration and goes back there, else it stays
    on the one device that updates.
    """

    owners: dict[_Layers, int]
    swaps_state: bool

    @classmethod
    def of(cls, program: Program) -> "DeviceUpdates":
        owners: dict[_Layers, int] = {}
        swaps_state = False
        for op in program.ops:
            if op.kind is OpKind.UPDATE and op.device != HOST:
                swaps_state |= owners.setdefault(op.layers, op.device) != op.device
            elif op.kind is OpKind.SWAP_IN:
                swaps_state |= any(program.blocks[block].kind is TensorKind.OPTIMIZER for block in op.writes)
        return cls(owners=owners, swaps_state=swaps_state)

    def brings(self, device: int, layers: _Layers) -> bool:
        """Whether what that device has changed of layers [start, stop) becomes the host's."""
        return self.owners.get(layers, device) == device
