"""What if: another machine than the Lab's, by varying it or by a preset's name, and its best plan; no widgets."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, Direction, Machine
from harmony_lab.precision import Precision

__all__ = ["Profiles", "Superseded", "WhatIf", "host_rate", "varied", "while_wanted"]


class WhatIf(NamedTuple):
    """A machine asked for: ``preset`` names one (empty: the Lab's own), the others change it; None leaves as it is."""

    preset: str = ""
    num_devices: int | None = None
    memory_bytes: int | None = None
    link_bytes_per_s: float | None = None

    def machine(self, own: Machine) -> Machine:
        """Raises ``HarmonyError`` for a preset that cannot be read."""
        base = Machine.preset(self.preset) if self.preset.strip() else own
        return varied(
            base, num_devices=self.num_devices, memory_bytes=self.memory_bytes, link_bytes_per_s=self.link_bytes_per_s
        )


def varied(
    machine: Machine,
    *,
    num_devices: int | None = None,
    memory_bytes: int | None = None,
    link_bytes_per_s: float | None = None,
) -> Machine:
    """``machine`` with fewer or more devices, each with so much memory, and host links of that rate.

    Devices that are added are like the first and hang from where it does, without bridges; emulated ones share the
    host's cores.
    """
    count = machine.num_devices if num_devices is None else num_devices
    if count < 1:
        raise HarmonyError(f"a machine needs at least one device, got {count}")
    changed = machine.with_(num_devices=min(count, machine.num_devices))
    first = machine.devices[0]
    own = next(link for link in machine.links if link.child == first.name)
    taken = {device.name for device in machine.devices}
    for number in range(changed.num_devices, count):
        name = f"{first.name.rstrip('0123456789')}{number}"
        assert name not in taken
        changed = replace(
            changed,
            devices=(*changed.devices, replace(first, name=name, ordinal=number)),
            links=(*changed.links, replace(own, child=name)),
        )
    changed = changed.with_(memory=memory_bytes, link=link_bytes_per_s)
    return changed if changed == machine else replace(changed, name=f"{machine.name}, changed")


def host_rate(machine: Machine) -> float:
    """Bytes per second towards the first device over the narrowest link that hangs from the host."""
    hops = [hop for hop in machine.route(HOST, 0) if hop.direction is Direction.DOWN]
    return machine.capacities[hops[0]]


class Profiles:
    """Costs of one model on the devices asked for: measured on the Lab's own, estimated on presets, each once.

    ``estimate`` takes a GPU's name and a precision.
    """

    def __init__(self, estimate: Callable[[str, Precision], Profile]) -> None:
        self._estimate = estimate
        self._known: dict[tuple[str, Precision], Profile] = {}

    def of(self, machine: Machine, own: Machine, measured: Profile) -> Profile:
        model = machine.devices[0].model
        if model == own.devices[0].model and machine.devices[0].backend is own.devices[0].backend:
            return measured
        key = model, measured.precision
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]


class Superseded(Exception):
    """A newer question was asked while this one was being answered."""


def while_wanted(wanted: Callable[[], bool]) -> Callable[[int, int, str], None]:
    """A progress callback that breaks a search off once nobody waits for it."""

    def progress(_done: int, _total: int, _text: str) -> None:
        if not wanted():
            raise Superseded

    return progress
