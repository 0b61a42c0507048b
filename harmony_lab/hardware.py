"""Hardware: what a machine is made of: devices, the host, and what bytes travel over."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from harmony_lab.units import format_rate

__all__ = [
    "HOST_MEMORY",
    "MOST_DEVICES",
    "ROOT",
    "Backend",
    "Bridge",
    "Device",
    "Direction",
    "Hop",
    "Host",
    "Link",
    "bridge_problems",
    "describe_links",
    "device_problems",
    "free_host_bytes",
    "margin_bytes",
    "pairs_joined",
    "this_host",
]

ROOT: Final = "host"
"""The node that links hang from."""
MOST_DEVICES: Final = 64
"""Of a machine described by a text or a number: what plans are made for has one to eight."""


class Backend(StrEnum):
    """What a device is made of."""

    EMULATED = "emulated"  # host memory with a byte budget, computing on the host's cores
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    ``memory_bytes`` is what plans may use at once: the card's memory less its context and the allocator's margin.
    ``parent`` is the name of the node it hangs from: ``"host"`` or a switch.  ``compute_threads``: host threads that an
    emulated device computes with.  ``model``: the product's name, where it is one.  ``release_s``: seconds a device
    needs after each pack to give its memory back.  ``memory_bytes_per_s``: how fast its memory is, where that is known.
    """

    name: str
    memory_bytes: int
    parent: str = ROOT
    backend: Backend = Backend.EMULATED
    ordinal: int = 0  # torch's index of the device, for real ones
    compute_threads: int = 1
    model: str = ""
    release_s: float = 0.0
    memory_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host: memory that swapped tensors live in, cores that update weights (and run emulated devices).

    ``memory_bytes_per_s``: what all transfers from and to that memory get of it together, both directions in one sum;
    None: more than the links carry.  Updates take nothing of it: how long they take was measured in the same memory.
    ``assumed``: nobody measured or gave how much memory there is.
    """

    memory_bytes: int
    num_cores: int
    update_threads: int = 1
    memory_bytes_per_s: float | None = None
    assumed: bool = False


class Direction(StrEnum):
    DOWN = "down"  # away from the host
    UP = "up"  # towards the host
    BOTH = "both"  # of what reading and writing share


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A full-duplex link from ``child`` (a device or a switch) up to ``parent``; rates are per direction."""

    child: str
    parent: str
    bytes_per_s: float
    latency_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.parent}-{self.child}"


def describe_links(links: Sequence[Link], num_devices: int) -> str:
    """The links to the host, whose they are, and what slower ones the devices have to them."""
    to_host = [link for link in links if link.parent == ROOT]
    slowest = min((link.bytes_per_s for link in to_host), default=0.0)
    slower = {format_rate(link.bytes_per_s) for link in links if link.bytes_per_s < slowest}
    shared = len(to_host) < num_devices
    count = f"{len(to_host)} " if shared and len(to_host) > 1 else ""
    kind = "shared host link" if shared else "own host link" if num_devices > 1 else "host link"
    rates = "/".join(sorted({format_rate(link.bytes_per_s) for link in to_host}))
    own = f", {'/'.join(sorted(slower))} from there to a device" if slower else ""
    return f"{count}{kind}{'s' if len(to_host) > 1 else ''} {rates} per direction{own}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """A full-duplex way between two devices beside the tree, as an NVLink bridge is; the rate is per direction.

    Where more than two are joined, there is one for each two of them.
    """

    first: str
    second: str
    bytes_per_s: float

    @property
    def name(self) -> str:
        return f"{self.first}-{self.second}"


@dataclass(frozen=True, slots=True)
class Hop:
    """One link in one direction: the unit that transfers share.  On a bridge, down leads from the first device to the
    second."""

    link: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.link}:{self.direction}"


HOST_MEMORY: Final = Hop("host memory", Direction.BOTH)
"""What every transfer from or to the host takes, where the memory's rate is a limit; twice if it goes through."""


def margin_bytes(free_bytes: int) -> int:
    """What of a card's free memory is left to the framework's context and allocator."""
    return max(free_bytes // 10, 256 * 2**20)


def pairs_joined(devices: Sequence[Device], bytes_per_s: float) -> tuple[Bridge, ...]:
    """A bridge between the first two devices, the next two and so on; an odd one has none."""
    pairs = zip(devices[::2], devices[1::2], strict=False)
    return tuple(Bridge(first=a.name, second=b.name, bytes_per_s=bytes_per_s) for a, b in pairs)


def device_problems(devices: Sequence[Device], *, virtual_time: bool) -> list[str]:
    """What is wrong with a machine's devices."""
    names = [device.name for device in devices]
    problems = [] if devices else ["a machine needs at least one device"]
    if len(set(names)) != len(names):
        problems.append(f"device names must differ, got {names}")
    problems += [f"{device.name}: memory_bytes must be above 0" for device in devices if device.memory_bytes <= 0]
    problems += [f"{device.name}: release_s must be 0 or more" for device in devices if not device.release_s >= 0]
    real = [device.name for device in devices if device.backend is not Backend.EMULATED]
    if virtual_time and real:
        problems.append(f"virtual_time is for emulated devices, {', '.join(real)} are real: leave it out")
    return problems


def bridge_problems(bridges: Sequence[Bridge], devices: Sequence[str]) -> list[str]:
    """What is wrong with bridges between devices of those names."""
    ends = [frozenset((bridge.first, bridge.second)) for bridge in bridges]
    problems = ["two devices may have one bridge only"] if len(set(ends)) != len(ends) else []
    for bridge, pair in zip(bridges, ends, strict=True):
        if len(pair) != 2 or not pair <= set(devices):
            problems.append(f"bridge {bridge.name}: first and second must be two of the devices, by name")
        if bridge.bytes_per_s <= 0:
            problems.append(f"bridge {bridge.name}: bytes_per_s must be above 0")
    return problems


def free_host_bytes() -> int:
    """What the system can still give, where it tells: all that is free without psutil, caches not counted."""
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def this_host(memory_bytes: int | None) -> Host:
    """This computer, with that much memory or else what is free of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(memory_bytes=memory_bytes or free_host_bytes(), num_cores=cores)
