"""Machine: devices, the host and the links between them.

Links form a tree, as PCIe does: each device hangs from the host or from a switch, and what devices send to the host
shares the links above them::

    memory ── host ══ uplink ══ switch ── gpu0 ┐        a peer transfer goes gpu0 → switch → gpu1, off the uplink,
                                   └───── gpu1 ┘bridge  or over the bridge where two devices are joined by one
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import permutations
from typing import Any

from harmony_lab.errors import HarmonyError
from harmony_lab.hardware import (
    HOST_MEMORY,
    MOST_DEVICES,
    ROOT,
    Backend,
    Bridge,
    Device,
    Direction,
    Hop,
    Host,
    Link,
    bridge_problems,
    describe_links,
    device_problems,
    margin_bytes,
    pairs_joined,
    this_host,
)
from harmony_lab.units import format_bytes, format_rate, parse_bytes, parse_rate

__all__ = ["HOST", "HOST_MEMORY", "Backend", "Bridge", "Device", "Direction", "Hop", "Host", "Link", "Machine"]

SCHEMA_VERSION = 4  # since 2: bridges, the rate of the host's memory; 3: what of the host is assumed; 4: virtual time
HOST = -1
"""The index that stands for the host where a device index is expected."""
_PCIE3_X16 = 12e9  # bytes per second that copies reach on a link of 15.75 GB/s


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices, host and links.  ``peer_transfers`` tells whether all devices can copy to each other directly.

    ``fabric_bytes_per_s``: of each device's own port, per direction, on a fabric between the devices (NVLink), where
    there is one: peer transfers take it and leave the links alone.  ``bridges``: between two devices, which always copy
    to each other directly and over their bridge.  ``virtual_time``: emulated devices take what as many real ones would
    take, on a clock of their own (``runtime.virtual``).

    Raises ``HarmonyError`` where the links do not form a tree that reaches every device.
    """

    name: str
    devices: tuple[Device, ...]
    host: Host
    links: tuple[Link, ...]
    peer_transfers: bool = True
    fabric_bytes_per_s: float | None = None
    bridges: tuple[Bridge, ...] = ()
    virtual_time: bool = False
    _link_above: Mapping[str, Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_link_above", {link.child: link for link in self.links})
        if problems := self._problems():
            raise HarmonyError("this machine is not well formed: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        names = [device.name for device in self.devices]
        problems = device_problems(self.devices, virtual_time=self.virtual_time)
        if len(self._link_above) != len(self.links):
            problems.append("each device or switch may hang from one link only")
        problems += [f"link {link.name}: bytes_per_s must be above 0" for link in self.links if link.bytes_per_s <= 0]
        if self.fabric_bytes_per_s is not None and self.fabric_bytes_per_s <= 0:
            problems.append("fabric_bytes_per_s must be above 0, or None where there is no fabric")
        if self.host.memory_bytes_per_s is not None and self.host.memory_bytes_per_s <= 0:
            problems.append("the host's memory_bytes_per_s must be above 0, or None where it is no limit")
        lost = [device.name for device in self.devices if not self._leads_to_host(device.name)]
        problems += [f"{name}: no chain of links leads to the host" for name in lost]
        return problems + bridge_problems(self.bridges, names)

    def _leads_to_host(self, node: str) -> bool:
        for _ in range(len(self.links) + 1):
            if node == ROOT:
                return True
            if node not in self._link_above:
                return False
            node = self._link_above[node].parent
        return False

    # -- routes ---------------------------------------------------------------------------------------------------

    def _links_up(self, node: str) -> Iterator[Link]:
        while node != ROOT:
            link = self._link_above[node]
            yield link
            node = link.parent

    def route(self, source: int, destination: int) -> tuple[Hop, ...]:
        """The hops of a transfer between devices, or to or from ``HOST``.

        Devices that cannot copy to each other go through the host: up the whole tree, in and out of the host's memory,
        then down.
        """
        if source == destination:
            return ()
        if (source, destination) in self._bridged:
            return (self._bridged[source, destination],)
        directly = HOST not in (source, destination) and self.peer_transfers
        if directly and self.fabric_bytes_per_s is not None:
            return self._port(source, Direction.UP), self._port(destination, Direction.DOWN)
        up = [] if source == HOST else list(self._links_up(self.devices[source].name))
        down = [] if destination == HOST else list(self._links_up(self.devices[destination].name))
        while directly and up and down and up[-1] == down[-1]:
            up.pop()
            down.pop()
        memory = [] if directly or self.host.memory_bytes_per_s is None else [HOST_MEMORY]
        return (
            *(Hop(link.name, Direction.UP) for link in up),
            *(memory if HOST in (source, destination) else 2 * memory),
            *(Hop(link.name, Direction.DOWN) for link in reversed(down)),
        )

    def reaches(self, source: int, destination: int) -> bool:
        """Whether one device copies to another without the host."""
        return self.peer_transfers or (source, destination) in self._bridged

    @cached_property
    def all_reach(self) -> bool:
        """Whether every device copies to every other without the host."""
        return all(self.reaches(*pair) for pair in permutations(range(self.num_devices), 2))

    @cached_property
    def _bridged(self) -> dict[tuple[int, int], Hop]:
        """The way over a bridge, by source and destination."""
        number = {device.name: index for index, device in enumerate(self.devices)}
        found = {}
        for bridge in self.bridges:
            first, second = number[bridge.first], number[bridge.second]
            found[first, second] = Hop(bridge.name, Direction.DOWN)
            found[second, first] = Hop(bridge.name, Direction.UP)
        return found

    def _port(self, device: int, direction: Direction) -> Hop:
        return Hop(f"fabric-{self.devices[device].name}", direction)

    @cached_property
    def capacities(self) -> dict[Hop, float]:
        """Bytes per second of every link and direction."""
        ways = Direction.DOWN, Direction.UP
        duplex: tuple[Link | Bridge, ...] = (*self.links, *self.bridges)
        rates = {Hop(link.name, way): link.bytes_per_s for link in duplex for way in ways}
        if self.fabric_bytes_per_s is not None and self.peer_transfers:
            for device in range(self.num_devices):
                rates |= {self._port(device, way): self.fabric_bytes_per_s for way in ways}
        if self.host.memory_bytes_per_s is not None:
            rates[HOST_MEMORY] = self.host.memory_bytes_per_s
        return rates

    def latency_s(self, route: Sequence[Hop]) -> float:
        latency = {link.name: link.latency_s for link in self.links}
        return sum(latency.get(hop.link, 0.0) for hop in route)

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(device.memory_bytes for device in self.devices)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    # -- making one -----------------------------------------------------------------------------------------------

    @classmethod
    def emulated(
        cls,
        num_devices: int = 2,
        *,
        memory: str | int = "64MiB",
        link: str | float = "2GB/s",
        peer_link: str | float | None = None,
        host_memory: str | int | None = None,
        peer_transfers: bool = True,
        bridge: str | float | None = None,
        host_memory_rate: str | float | None = None,
        virtual_time: bool = False,
    ) -> "Machine":
        """Devices made of host memory: each has a hard budget, and they share one link to the host.

        ``memory``: bytes per device.  ``link``: the shared host link, per direction.  ``peer_link``: each device's own
        link to the switch, by default as fast as ``link``.  ``bridge``: of bridges that join devices two by two, per
        direction; by default none.  ``host_memory_rate``: see ``Host.memory_bytes_per_s``.  ``virtual_time``: as there.
        """
        if not isinstance(num_devices, int) or not 1 <= num_devices <= MOST_DEVICES:
            raise HarmonyError(f"a machine has 1 to {MOST_DEVICES} emulated devices, got num_devices={num_devices!r}")
        rate = parse_rate(link)
        peer_rate = rate if peer_link is None else parse_rate(peer_link)
        host = this_host(None if host_memory is None else parse_bytes(host_memory))
        if host_memory_rate is not None:
            host = replace(host, memory_bytes_per_s=parse_rate(host_memory_rate))
        size, threads = parse_bytes(memory), max(1, host.num_cores // num_devices)
        devices = tuple(
            Device(name=f"emu{i}", memory_bytes=size, parent="switch", ordinal=i, compute_threads=threads)
            for i in range(num_devices)
        )
        links = (
            Link(child="switch", parent=ROOT, bytes_per_s=rate),
            *(Link(child=device.name, parent="switch", bytes_per_s=peer_rate) for device in devices),
        )
        return cls(
            name=f"{num_devices} emulated",
            devices=devices,
            host=host,
            links=links,
            peer_transfers=peer_transfers,
            bridges=() if bridge is None else pairs_joined(devices, parse_rate(bridge)),
            virtual_time=virtual_time,
        )

    @classmethod
    def preset(cls, text: str) -> "Machine":
        """A machine that need not be at hand, such as ``"4x1080ti"`` or ``"8x4090, pcie4 x8 behind 2 switches"``; see
        ``presets.preset_machine``.
        """
        from harmony_lab.presets import preset_machine

        return preset_machine(text)

    @classmethod
    def of(cls, machine: "Machine | str") -> "Machine":
        """The machine itself, or the one that a text describes, as ``preset`` takes it."""
        if isinstance(machine, str):
            return cls.preset(machine)
        if not isinstance(machine, cls):
            raise HarmonyError(
                f"a machine is expected, a harmony_lab.Machine or a text like '4x4090', got a {type(machine).__name__}"
            )
        return machine

    @classmethod
    def detect(cls) -> "Machine":
        """The CUDA GPUs of this computer, with what is free on them now; without any, two emulated devices.

        Every GPU is taken to have a PCIe 3.0 x16 link of its own to the host; ``harmony_lab.probe_links`` measures what
        the links carry, which are shared and which devices are bridged, and gives the machine with that.  A tenth of
        each card's free memory, at least 256 MiB, is left to the framework's context and allocator.
        """
        import torch

        from harmony_lab.gpus import memory_rate

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return cls.emulated()
        devices = []
        for ordinal in range(count):
            free, _ = torch.cuda.mem_get_info(ordinal)
            name = f"gpu{ordinal}"
            usable = free - margin_bytes(free)
            model = torch.cuda.get_device_name(ordinal)
            devices.append(
                Device(
                    name=name,
                    memory_bytes=usable,
                    backend=Backend.CUDA,
                    ordinal=ordinal,
                    model=model,
                    memory_bytes_per_s=memory_rate(model),
                )
            )
        peers = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
        return cls(
            name=f"{count} × {torch.cuda.get_device_name(0)}",
            devices=tuple(devices),
            host=this_host(None),
            links=tuple(Link(child=d.name, parent=ROOT, bytes_per_s=_PCIE3_X16, latency_s=1e-5) for d in devices),
            peer_transfers=peers and count > 1,
        )

    def with_(
        self, *, num_devices: int | None = None, memory: str | int | None = None, link: str | float | None = None
    ) -> "Machine":
        """The same machine with another number of devices, memory per device or host link rate."""
        machine = self
        if num_devices is not None and num_devices != self.num_devices:
            if not 1 <= num_devices <= self.num_devices:
                raise HarmonyError(
                    f"{self.name} has {self.num_devices} devices; num_devices={num_devices} is not among them"
                )
            kept = self.devices[:num_devices]
            gone = {device.name for device in self.devices[num_devices:]}
            machine = replace(
                machine,
                name=f"{num_devices} of {self.name}",
                devices=kept,
                links=tuple(x for x in self.links if x.child not in gone),
                bridges=tuple(x for x in self.bridges if not gone & {x.first, x.second}),
            )
        if memory is not None:
            size = parse_bytes(memory)
            machine = replace(machine, devices=tuple(replace(d, memory_bytes=size) for d in machine.devices))
        if link is not None:
            rate = parse_rate(link)
            machine = replace(
                machine,
                links=tuple(replace(x, bytes_per_s=rate) if x.parent == ROOT else x for x in machine.links),
            )
        return machine

    # -- on disk and on screen ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``from_json`` reads it back."""
        return {
            "schema": "harmony_lab.machine",
            "version": SCHEMA_VERSION,
            "name": self.name,
            "devices": [{**_fields(d), "backend": str(d.backend)} for d in self.devices],
            "host": _fields(self.host),
            "links": [_fields(link) for link in self.links],
            "peer_transfers": self.peer_transfers,
            "fabric_bytes_per_s": self.fabric_bytes_per_s,
            "bridges": [_fields(bridge) for bridge in self.bridges],
            "virtual_time": self.virtual_time,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Machine":
        """Raises ``HarmonyError`` for another kind of file or a newer schema version."""
        check_schema(data, "harmony_lab.machine", SCHEMA_VERSION)
        return cls(
            name=data["name"],
            devices=tuple(Device(**{**d, "backend": Backend(d["backend"])}) for d in data["devices"]),
            host=Host(**data["host"]),
            links=tuple(Link(**link) for link in data["links"]),
            peer_transfers=data["peer_transfers"],
            fabric_bytes_per_s=data.get("fabric_bytes_per_s"),
            bridges=tuple(Bridge(**bridge) for bridge in data.get("bridges", ())),
            virtual_time=data.get("virtual_time", False),
        )

    def __repr__(self) -> str:
        return f"<Machine {self}>"

    def _repr_html_(self) -> str:
        rates = [f"{link.name}: {format_rate(link.bytes_per_s)}" for link in self.links]
        rates += [f"bridge {bridge.name}: {format_rate(bridge.bytes_per_s)}" for bridge in self.bridges]
        if self.fabric_bytes_per_s is not None:
            rates.append(f"fabric between devices: {format_rate(self.fabric_bytes_per_s)} a device")
        facts = {
            "devices": ", ".join(f"{device.name} {format_bytes(device.memory_bytes)}" for device in self.devices),
            "links, per direction": ", ".join(rates),
            "between devices": self.peers_words,
            "host memory": self.host_words,
        }
        rows = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
        return f"<p>{escape(str(self))}</p><table><tbody>{rows}</tbody></table>"

    @property
    def peers_words(self) -> str:
        """How devices copy to each other."""
        if self.all_reach:
            return "directly"
        return "directly where bridged, else through the host" if self.bridges else "through the host"

    @property
    def host_words(self) -> str:
        """How much memory the host has, how fast it is where that is a limit, and whether that is only assumed."""
        rate = self.host.memory_bytes_per_s
        limit = "" if rate is None else f", {format_rate(rate)} in and out together"
        return format_bytes(self.host.memory_bytes) + (" (assumed)" if self.host.assumed else "") + limit

    def __str__(self) -> str:
        memory = sorted({format_bytes(device.memory_bytes) for device in self.devices})
        count = f"{self.num_devices} device" + ("s" if self.num_devices > 1 else "")
        rest = f", host memory {format_rate(limit)}" if (limit := self.host.memory_bytes_per_s) is not None else ""
        if self.bridges:
            rest += f", bridges {' '.join(bridge.name for bridge in self.bridges)}"
        rest += ", in virtual time" if self.virtual_time else ""
        return f"{self.name}: {count} of {'/'.join(memory)}, {describe_links(self.links, self.num_devices)}{rest}"


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def check_schema(data: Mapping[str, Any], schema: str, version: int) -> None:
    """Raise ``HarmonyError`` unless ``data`` is of that schema, at most that version."""
    if data.get("schema") != schema:
        raise HarmonyError(f"a {schema} file was expected, got schema {data.get('schema')!r}")
    if not 1 <= int(data.get("version", 0)) <= version:
        raise HarmonyError(
            f"{schema} version {data.get('version')!r} cannot be read here (this is version {version}); "
            "update harmony_lab or write the file again"
        )
