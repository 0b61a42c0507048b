"""Schedules: the programs that a plan comes to, by the role of a minibatch in its step, and the memory they take."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from harmony_lab.costs import Profile
from harmony_lab.forecast import Forecast, forecast
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.program import Program
from harmony_lab.roles import Role
from harmony_lab.training_plan import plan_as

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Schedules", "forecast_of_several"]


class Schedules:
    """Of minibatches of any size.  ``waiting``: of programs that make updates, see ``updating_after``.  ``kept_bytes``
    asks what of the host's memory is kept from step to step by now."""

    def __init__(
        self,
        plan: Plan,
        layers: LayerSequence,
        optimizer: "Optimizer",
        profile: Profile,
        machine: Machine,
        *,
        waiting: Mapping[str, bool],
        kept_bytes: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._layers = layers
        self._optimizer = optimizer
        self._profile = profile
        self._machine = machine
        self._waiting = waiting
        self._kept_bytes = kept_bytes
        self._made: dict[tuple[Plan, bool], Program] = {}
        self._known_to_fit: set[int] = set()

    @property
    def lower_as(self) -> dict[Role, Callable[[int], Program]]:
        """``of``, for each role that there is under the plan."""
        return {role: partial(self.of, role) for role in Role if role is not Role.LEAVING or self.leaves}

    @property
    def leaves(self) -> bool:
        """Whether steps may leave their updates to the next one."""
        return self._plan.overlapped_update

    def of(self, role: Role, minibatch_size: int) -> Program:
        """Raises ``HostMemoryError`` for a minibatch that is larger than the plan's, where the host has no room."""
        whole = minibatch_size == self._plan.minibatch_size
        plan = plan_as(role, self._plan if whole else self._plan.for_minibatch(minibatch_size))
        waits = role in (Role.ALONE, Role.LAST) and any(self._waiting.values())
        program = self._made.get((plan, waits))
        if program is None:
            program = self._made[plan, waits] = self._lowered(plan, self._waiting if waits else {})
        self.require_room(program, self._layers, adding=program if role in (Role.ADDING, Role.LAST) else None)
        return program

    def require_room(self, program: Program, layers: LayerSequence, *, adding: Program | None = None) -> None:
        """Raises ``HostMemoryError`` where the host has none for a minibatch that is larger than the plan's."""
        if program.minibatch_size > self._plan.minibatch_size:
            found = forecast(program, layers, self._optimizer, self._profile, self._machine, adding=adding)
            replace(found, present_bytes=found.present_bytes + self._kept_bytes()).require()

    def as_planned(self) -> Program:
        """Of one minibatch as the plan has it, that leaves its updates if some may."""
        return self.of(Role.LEAVING if self.leaves else Role.ALONE, self._plan.minibatch_size)

    def forecast(self, *, accumulate: int) -> Forecast:
        """What steps of so many minibatches take, whether they leave their updates or not."""
        if accumulate == 1:
            return forecast(self.as_planned(), self._layers, self._optimizer, self._profile, self._machine)
        given = self._plan, self._layers, self._optimizer, self._profile, self._machine
        return forecast_of_several(lambda role: self.of(role, self._plan.minibatch_size), *given)

    def require_memory(self, *, accumulate: int) -> None:
        """Raises ``HostMemoryError`` where such steps do not fit the host."""
        several = min(accumulate, 2)  # gradients are added up in the same place however many there are
        if several not in self._known_to_fit:
            self.forecast(accumulate=several).require()
            self._known_to_fit.add(several)

    def _lowered(self, plan: Plan, waiting: Mapping[str, bool]) -> Program:
        from harmony_lab.runtime.buffers import check_buffers
        from harmony_lab.runtime.ordering import updating_after

        program = updating_after(lower(plan, self._profile, self._machine), **waiting)
        check(program)
        check_buffers(program, self._layers)
        return program


def forecast_of_several(
    of: Callable[[Role], Program],
    plan: Plan,
    layers: LayerSequence,
    optimizer: "Optimizer",
    profile: Profile,
    machine: Machine,
) -> Forecast:
    """Of steps of several minibatches, ``of`` each role a program, whether they leave their updates or not."""
    adding = of(Role.ADDING)
    updating = [of(role) for role in (Role.LAST, Role.LEAVING) if role is Role.LAST or plan.overlapped_update]
    found = (forecast(program, layers, optimizer, profile, machine, adding=adding) for program in updating)
    return max(found, key=lambda one: one.host_bytes)
