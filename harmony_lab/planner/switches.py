"""Switches: which settings a search may choose from."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from harmony_lab.errors import PlanError
from harmony_lab.plan import Plan
from harmony_lab.planner.staying import stays

__all__ = ["Switches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Which settings a search may choose from.

    ``staying``: whether what fits may stay on the devices (``Plan.resident_packs``, ``kept_packs``, ``device_stash``).
    ``device_updates``: whether of what stays the optimizer's state may be, so that devices update for themselves.
    ``deferred_updates``: updates wait for all gradients, as clipping by their norm needs, and are made on the host
    beside the next iteration's forward (``Plan.overlapped_update``).

    Raises ``PlanError`` where there is nothing to choose from.
    """

    prefetch: tuple[int, ...] = (1,)
    peer_transfers: tuple[bool, ...] = (True,)
    staying: bool = True
    device_updates: bool = True
    deferred_updates: bool = False

    @property
    def updates_on_devices(self) -> bool:
        return self.staying and self.device_updates and not self.deferred_updates

    def allow(self, plan: Plan) -> bool:
        """Whether the plan could be chosen: it uses nothing but these settings."""
        return (
            plan.prefetch in self.prefetch
            and plan.peer_transfers in self.peer_transfers
            and (self.staying or not stays(plan))
            and (self.updates_on_devices or not plan.device_updates)
            and plan.just_in_time_update != self.deferred_updates
        )

    def __post_init__(self) -> None:
        violations = list(self._violations())
        if violations:
            raise PlanError("nothing to choose from", violations)

    def _violations(self) -> Iterator[str]:
        for name, given, kind, like in (
            ("prefetch", self.prefetch, int, "numbers of packs from 0 up, such as (0, 1)"),
            ("peer_transfers", self.peer_transfers, bool, "True, False or both, such as (True,)"),
        ):
            if not isinstance(given, Collection) or any(type(one) is not kind or one < 0 for one in given):
                yield f"Switches.{name} must be {like}, got {given!r}"
            elif not given:
                yield f"Switches.{name} must hold a value or more"
