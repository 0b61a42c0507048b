"""Programs: what a Runner runs, by the role of a minibatch in its step and by its size."""

from collections.abc import Callable, Mapping

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.program import Program
from harmony_lab.roles import Role
from harmony_lab.runtime.buffers import check_buffers

__all__ = ["Lower", "Programs"]

Lower = Callable[[int], Program]
"""The program for a minibatch of that size."""


class Programs:
    """Each made once.  ``lower``: for roles that ``lower_as`` has none for."""

    def __init__(self, layers: LayerSequence, lower: Lower, lower_as: Mapping[Role, Lower]) -> None:
        self.can_leave = Role.LEAVING in lower_as
        self._layers = layers
        self._lower = lower
        self._lower_as = lower_as
        self._made: dict[tuple[Role, int], Program] = {}

    def of(self, role: Role, minibatch_size: int) -> Program:
        program = self._made.get((role, minibatch_size))
        if program is None:
            program = self._lower_as.get(role, self._lower)(minibatch_size)
            if program.minibatch_size != minibatch_size:
                raise HarmonyError(
                    f"this batch has {minibatch_size} samples, the program for it is for minibatches of "
                    f"{program.minibatch_size}: give a lower(minibatch_size) that makes one for each size"
                )
            check_buffers(program, self._layers)
            self._made[role, minibatch_size] = program
        return program
