"""OptimizerPlaces: where the optimizer's state of each pack is, on the host or on the device that updates the pack."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from harmony_lab.machine import HOST
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.compute_memory import ComputeMemory
from harmony_lab.runtime.device_updates import DeviceUpdates
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.state_room import StateRoom

__all__ = ["OptimizerPlaces"]

_Place = tuple[int, tuple[int, int]]  # device, layers
_ON_HOST = torch.device("cpu")


class OptimizerPlaces:
    """Counts on each device's ledger what is kept of its memory for state, from step to step.

    ``settle`` is called between steps; then compute ops of different packs may call the rest at once.
    """

    def __init__(self, optimizer: PackOptimizer, backend: Backend, ledgers: list[Ledger]) -> None:
        self._optimizer = optimizer
        self._backend = backend
        self._ledgers = ledgers
        self._held: dict[_Place, StateRoom] = {}
        self._of_program: tuple[Program | None, dict[_Place, int] | None] = (None, None)

    @property
    def optimizer(self) -> PackOptimizer:
        return self._optimizer

    @property
    def num_bytes(self) -> int:
        """Of the optimizer's state that is on devices."""
        return sum(self._optimizer.state_bytes_of(layers) for _, layers in self._held)

    def settle(self, program: Program, device_bytes: Callable[[int], int]) -> None:
        """Bring every pack's state to where the program updates the pack.  One that updates nothing leaves it where it
        is, if there is room beside ``device_bytes``, what it needs of each device.

        Raises ``DeviceMemoryError`` where a device has no room.
        """
        wanted = self._wanted_by(program)
        if wanted is None:
            held_bytes = enumerate(self.held_beside(program))
            if all(device_bytes(device) + held <= program.budgets[device] for device, held in held_bytes):
                return
        self._move(wanted or {})

    def bring_back(self) -> None:
        """All to the host."""
        self._move({})

    def held_beside(self, program: Program) -> tuple[int, ...]:
        """Per device, bytes held for state that the program does not know of, since it updates nothing."""
        held = [0] * len(self._ledgers)
        if self._wanted_by(program) is None:
            for (device, _), room in self._held.items():
                held[device] += room.held_bytes
        return tuple(held)

    def _wanted_by(self, program: Program) -> dict[_Place, int] | None:
        """None: the program updates nothing."""
        if self._of_program[0] is not program:
            updates = any(op.kind is OpKind.UPDATE for op in program.ops)
            self._of_program = program, _places(program) if updates else None
        return self._of_program[1]

    def _move(self, wanted: dict[_Place, int]) -> None:
        for place in [place for place in self._held if place not in wanted]:
            device, layers = place
            self._optimizer.move_state(layers, _ON_HOST)
            self._ledgers[device].released(TensorKind.OPTIMIZER, self._held.pop(place).held_bytes)
        for place, num_bytes in wanted.items():
            device, layers = place
            needed = max(num_bytes, self._optimizer.state_bytes_of(layers))
            room = self._held.setdefault(place, StateRoom())
            if needed > room.held_bytes:
                self._ledgers[device].allocated(TensorKind.OPTIMIZER, needed - room.held_bytes, _named(layers))
                room.held_bytes = needed
            self._optimizer.move_state(layers, self._backend.torch_device(device))

    def is_complete(self, op: Op) -> bool:
        """Whether that update makes no state that is not there yet."""
        room = self._held.get((op.device, op.layers))
        return room is None or not room.held_bytes or self._optimizer.has_state(op.layers)

    def updating(self, op: Op, memory: ComputeMemory) -> AbstractContextManager[None]:
        """An update on a device, see ``StateRoom``."""
        room = self._held.setdefault((op.device, op.layers), StateRoom())
        return room.updating(op, self._ledgers[op.device], memory, lambda: self._optimizer.state_bytes_of(op.layers))


def _places(program: Program) -> dict[_Place, int]:
    """Bytes that the program keeps for state, by the device and layers of the updates on devices; none where it brings
    the state from the host."""
    if DeviceUpdates.of(program).swaps_state:
        return {}
    updates = (op for op in program.ops if op.kind is OpKind.UPDATE and op.device != HOST)
    places: dict[_Place, int] = dict.fromkeys(((op.device, op.layers) for op in updates), 0)
    for block in (program.blocks[index] for index in program.resident):
        if block.device != HOST:
            places[block.device, block.layers] += block.num_bytes
    return places


def _named(layers: tuple[int, int]) -> str:
    return f"the optimizer's state of layers {layers[0]}:{layers[1]}"
