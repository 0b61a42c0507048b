"""Switches: which settings a search may choose from."""

from dataclasses import dataclass

from harmony_lab.errors import PlanError

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

    def __post_init__(self) -> None:
        empty = [name for name in ("prefetch", "peer_transfers") if not getattr(self, name)]
        if empty:
            raise PlanError("nothing to choose from", [f"Switches.{name} must hold a value or more" for name in empty])
