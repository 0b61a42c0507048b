"""probe_links: what the links of a machine really carry, alone and all at once, and whether peer copies arrive."""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations, permutations
from typing import Protocol

import torch
from torch import Tensor

from harmony_lab.machine import HOST, Backend, Bridge, Link, Machine
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.link_rates import LinkProbe, LinkRate
from harmony_lab.program import TensorKind
from harmony_lab.runtime.backend import Copy
from harmony_lab.runtime.emulated import EmulatedBackend

__all__ = ["LinkProbe", "LinkRate", "Mover", "probe_links"]

_TRIALS = 5
_PROBE_S = 0.02  # as long as a copy should take
_SMALLEST_BYTES, _LARGEST_BYTES = 2**16, 2**26
_APART = 0.8  # two devices share a link when together each gets less than this share of what it gets alone

Pair = tuple[int, int]  # (source, destination): device indices or HOST


class Mover(Protocol):
    """Copies, measured."""

    pins: tuple[bool | None, ...]
    """The kinds of host memory there are, the one that training uses first."""

    def move(self, pairs: Sequence[Pair], pinned: bool | None) -> list[tuple[float, bool]]:
        """(bytes per second, whether the data is right) of copies that all start at once."""


def probe_links(machine: Machine) -> LinkProbe:
    """Measure the links of a machine: each device with the host and back, alone and all at once, from pinned host
    memory and not, and every pair of devices.

    The ``machine`` of the result has the rates measured, of the slower direction: of each device's own link what it
    reaches alone, of a switch's what its devices reach together.  Where devices hang from the host directly but slow
    each other down, they are put behind a switch; where both directions of several devices slow each other down, that
    is the host's memory.  If copies between all devices are faster than the devices' links, there is a fabric; if those
    between some are, in both directions, these have bridges.  If copies between two others bring wrong data, all
    transfers between devices without a bridge go through the host.

    Takes a second or two for four devices; nothing else should run on them.  Raises ``HarmonyError`` for a device that
    is not here.
    """
    if machine.devices[0].backend is Backend.EMULATED:
        return probe_with(_EmulatedMover(machine), machine)
    mover = _CudaMover(machine)
    try:
        return probe_with(mover, machine)
    finally:
        mover.give_back()


def probe_with(mover: Mover, machine: Machine) -> LinkProbe:
    """The same with copies made by ``mover``."""
    probing = _Probing(mover, machine)
    everyone = range(machine.num_devices)
    for pinned in mover.pins:
        for pairs in _with_host(everyone):
            for pair in pairs:
                probing.measure([pair], pinned)
            if len(pairs) > 1:
                probing.measure(pairs, pinned)
    if machine.num_devices > 1:
        probing.measure(_both_ways(everyone), mover.pins[0])
    for pair in permutations(everyone, 2):
        probing.measure([pair], None)
    return LinkProbe(machine=probing.machine(), rates=tuple(probing.rates))


def _with_host(devices: Iterable[int]) -> tuple[list[Pair], list[Pair]]:
    return [(HOST, device) for device in devices], [(device, HOST) for device in devices]


def _both_ways(devices: Iterable[int]) -> list[Pair]:
    return [pair for pairs in _with_host(list(devices)) for pair in pairs]


class _Probing:
    """Measurements and what follows from them."""

    def __init__(self, mover: Mover, machine: Machine) -> None:
        self._mover = mover
        self._given = machine
        self._together: dict[tuple[Pair, ...], list[float]] = {}  # with the host memory that training uses
        self.rates: list[LinkRate] = []

    def measure(self, pairs: Sequence[Pair], pinned: bool | None) -> list[float]:
        moved = self._mover.move(pairs, pinned)
        self.rates += [
            LinkRate(
                source=source,
                destination=destination,
                at_once=len(pairs),
                pinned=pinned,
                bytes_per_s=rate,
                verified=verified,
            )
            for (source, destination), (rate, verified) in zip(pairs, moved, strict=True)
        ]
        rates = [rate for rate, _ in moved]
        if pinned == self._mover.pins[0] or HOST not in pairs[0]:
            self._together.setdefault(tuple(pairs), rates)
        return rates

    def machine(self) -> Machine:
        """The machine with what was measured."""
        given = self._given
        parents = self._tree()
        latencies = {link.child: link.latency_s for link in given.links}
        links = tuple(
            Link(child=child, parent=parent, bytes_per_s=self._rate(self._below(child, parents)))
            for child, parent in parents.items()
        )
        between = {
            (item.source, item.destination): item for item in self.rates if HOST not in (item.source, item.destination)
        }
        fabric = min((item.bytes_per_s for item in between.values()), default=0.0)
        ports = {link.child: link.bytes_per_s for link in links}
        slowest_port = min(ports[device.name] for device in given.devices)
        right = given.peer_transfers and all(item.verified for item in between.values())
        has_fabric = right and (given.fabric_bytes_per_s is not None or _APART * fabric > slowest_port)
        bridges = () if has_fabric else self._bridges(between, ports)
        bridged = {frozenset((bridge.first, bridge.second)) for bridge in bridges}
        others = [item for pair, item in between.items() if frozenset(self._names(pair)) not in bridged]
        peers = given.peer_transfers and all(item.verified for item in others)
        return replace(
            given,
            host=replace(given.host, memory_bytes_per_s=self._memory_rate()),
            devices=tuple(replace(device, parent=parents[device.name]) for device in given.devices),
            links=tuple(replace(link, latency_s=latencies.get(link.child, 0.0)) for link in links),
            peer_transfers=peers,
            fabric_bytes_per_s=fabric if has_fabric else None,
            bridges=bridges,
        )

    def _bridges(self, between: Mapping[Pair, LinkRate], ports: Mapping[str, float]) -> tuple[Bridge, ...]:
        """Between devices that copy to each other faster than their links could, and those that are known to be."""
        known = {frozenset((bridge.first, bridge.second)) for bridge in self._given.bridges}
        found = []
        for pair in combinations(range(self._given.num_devices), 2):
            ways = between[pair], between[pair[::-1]]
            rate = min(way.bytes_per_s for way in ways)
            names = self._names(pair)
            is_bridge = frozenset(names) in known or _APART * rate > min(ports[name] for name in names)
            if is_bridge and all(way.verified for way in ways):
                found.append(Bridge(first=names[0], second=names[1], bytes_per_s=rate))
        return tuple(found)

    def _names(self, pair: Pair) -> tuple[str, str]:
        first, second = pair
        return self._given.devices[first].name, self._given.devices[second].name

    def _memory_rate(self) -> float | None:
        """What the host's memory gives both directions together; None where each alone needs no more."""
        everyone = range(self._given.num_devices)
        if len(everyone) == 1:
            return self._given.host.memory_bytes_per_s
        together = sum(self._rates_of(_both_ways(everyone)))
        alone = sum(sum(self._rates_of(pairs)) for pairs in _with_host(everyone))
        return together if together < _APART * alone else None

    def _rate(self, group: Sequence[int]) -> float:
        """What these devices move together, in the slower direction."""
        return min(sum(self._rates_of(pairs)) for pairs in _with_host(group))

    def _rates_of(self, pairs: Sequence[Pair]) -> list[float]:
        return self._together.get(tuple(pairs)) or self.measure(pairs, self._mover.pins[0])

    # -- which links are shared -----------------------------------------------------------------------------------

    def _tree(self) -> dict[str, str]:
        """Parents by child: as given, with switches where flat links turn out to be shared."""
        parents = {link.child: link.parent for link in self._given.links}
        if all(device.parent == "host" for device in self._given.devices):
            for number, group in enumerate(self._sharing_groups()):
                parents[f"switch{number}"] = "host"
                parents |= {self._given.devices[index].name: f"switch{number}" for index in group}
        roots = [child for child, parent in parents.items() if parent == "host"]
        everyone = range(self._given.num_devices)
        reachable = sum(self._rate(self._below(root, parents)) for root in roots)
        if len(roots) > 1 and self._rate(everyone) < _APART * reachable:
            parents |= {**dict.fromkeys(roots, "hub"), "hub": "host"}
        return parents

    def _below(self, node: str, parents: Mapping[str, str]) -> list[int]:
        """The devices that reach the host through a node."""

        def above(name: str) -> Iterator[str]:
            while name in parents:
                yield name
                name = parents[name]

        return [index for index, device in enumerate(self._given.devices) if node in above(device.name)]

    def _sharing_groups(self) -> list[list[int]]:
        """Devices that slow each other down, two or more together."""
        leader = list(range(self._given.num_devices))
        for a, b in combinations(range(self._given.num_devices), 2):
            if leader[a] != leader[b] and self._share(a, b):
                leader = [leader[a] if other == leader[b] else other for other in leader]
        groups: dict[int, list[int]] = {}
        for index, first in enumerate(leader):
            groups.setdefault(first, []).append(index)
        return [group for group in groups.values() if len(group) > 1]

    def _share(self, a: int, b: int) -> bool:
        return any(
            together < _APART * self._rates_of([pair])[0]
            for pairs in _with_host((a, b))
            for pair, together in zip(pairs, self._rates_of(pairs), strict=True)
        )


# -- copies -------------------------------------------------------------------------------------------------------


class _EmulatedMover:
    """Copies over the links of emulated devices, as training makes them."""

    pins: tuple[bool | None, ...] = (None,)

    def __init__(self, machine: Machine) -> None:
        self._backend = EmulatedBackend(machine)
        slowest = min(link.bytes_per_s for link in machine.links)
        self._num_bytes = _rounded(min(slowest * _PROBE_S, *machine.budgets))

    def move(self, pairs: Sequence[Pair], pinned: bool | None) -> list[tuple[float, bool]]:
        blocks = [(_pattern(self._num_bytes), torch.zeros(self._num_bytes, dtype=torch.uint8)) for _ in pairs]
        self._backend.begin()
        return _timed(pairs, blocks, self._copy)

    def _copy(self, pair: Pair, given: Tensor, arrived: Tensor) -> None:
        self._backend.transfer([Copy(*pair, TensorKind.WEIGHT, [(arrived, given)])])


class _CudaMover:
    """Copies between CUDA devices and the host."""

    pins: tuple[bool | None, ...] = (True, False)

    def __init__(self, machine: Machine) -> None:
        self._targets = [Target.of(device) for device in machine.devices]
        self._devices = [target.device for target in self._targets]
        self._num_bytes = _rounded(min(_LARGEST_BYTES, *(budget // 4 for budget in machine.budgets)))

    def move(self, pairs: Sequence[Pair], pinned: bool | None) -> list[tuple[float, bool]]:
        blocks = []
        for source, destination in pairs:
            nothing = torch.zeros(self._num_bytes, dtype=torch.uint8)
            pattern = _pattern(self._num_bytes)
            blocks.append((self._at(pattern, source, pinned), self._at(nothing, destination, pinned)))
        return _timed(pairs, blocks, self._copy)

    def give_back(self) -> None:
        """The memory that blocks have taken on the devices."""
        for target in self._targets:
            target.give_back()

    def _at(self, tensor: Tensor, place: int, pinned: bool | None) -> Tensor:
        if place != HOST:
            return tensor.to(self._devices[place])
        return tensor.pin_memory() if pinned else tensor

    def _copy(self, pair: Pair, given: Tensor, arrived: Tensor) -> None:
        device = next(place for place in reversed(pair) if place != HOST)
        with torch.cuda.device(self._devices[device]), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            arrived.copy_(given, non_blocking=True)
            torch.cuda.current_stream().synchronize()


def _timed(
    pairs: Sequence[Pair],
    blocks: Sequence[tuple[Tensor, Tensor]],
    copy: Callable[[Pair, Tensor, Tensor], None],
) -> list[tuple[float, bool]]:
    """Copies in one thread each, started together several times: the median rate of each, and whether data arrived.

    The first round warms up.
    """
    start = threading.Barrier(len(pairs))

    def run(pair: Pair, given: Tensor, arrived: Tensor) -> tuple[float, bool]:
        seconds = []
        try:
            for _ in range(1 + _TRIALS):
                start.wait()
                before_s = time.perf_counter()
                copy(pair, given, arrived)
                seconds.append(time.perf_counter() - before_s)
        except BaseException:
            start.abort()  # the others must not wait for this one
            raise
        return given.nbytes / statistics.median(seconds[1:]), torch.equal(arrived.cpu(), given.cpu())

    with ThreadPoolExecutor(len(pairs)) as threads:
        running = [threads.submit(run, pair, *block) for pair, block in zip(pairs, blocks, strict=True)]
    return [future.result() for future in running]


def _pattern(num_bytes: int) -> Tensor:
    """Bytes that differ from zero and from each other over any power of two."""
    return torch.arange(num_bytes).remainder_(251).add_(1).to(torch.uint8)


def _rounded(num_bytes: float) -> int:
    return max(_SMALLEST_BYTES, min(_LARGEST_BYTES, int(num_bytes)))
