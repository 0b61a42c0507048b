"""Fair sharing of links and cores: the one model of contention, used by the simulator and by emulated devices.

A flow is work (bytes, or core-seconds) that uses a set of resources at once.  Rates are max-min fair: all flows rise
together until a resource is full or a flow reaches its own cap; those freeze, the others go on rising (progressive
filling; Bertsekas and Gallager, *Data Networks*, section 6.5).
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Floats, Ints, compiled

__all__ = ["Flow", "FlowColumns", "SharedResources", "fair_rates", "fill_rates"]


@dataclass(slots=True)
class Flow:
    """Work under way: ``remaining`` units over ``resources``, at most ``cap`` units per second.

    At rate r it takes ``weight`` · r of each resource.
    """

    resources: tuple[Hashable, ...]
    remaining: float
    cap: float = float("inf")
    weight: float = 1.0
    rate: float = 0.0


def fair_rates(flows: Iterable[Flow], capacity: Mapping[Hashable, float]) -> list[float]:
    """The max-min fair rate of each flow.  A flow with no resources runs at its cap."""
    flows = list(flows)
    numbers = {resource: number for number, resource in enumerate(capacity)}
    named = [[numbers[resource] for resource in flow.resources] for flow in flows]
    rates = np.zeros(len(flows))
    fill_rates(
        FlowColumns(
            np.arange(len(flows)),
            np.array([flow.cap for flow in flows], dtype=np.float64),
            np.array([flow.weight for flow in flows], dtype=np.float64),
            np.cumsum([len(resources) for resources in named], dtype=np.int64),
            np.array([number for resources in named for number in resources], dtype=np.int64),
            np.array(list(capacity.values()), dtype=np.float64),
        ),
        np.arange(len(flows)),
        rates,
    )
    return [float(rate) for rate in rates]


class FlowColumns(NamedTuple):
    """Flows as arrays: flow f takes ``resource[route_end[r - 1] : route_end[r]]`` with r = ``route[f]``, resources
    numbered as in ``capacity``."""

    route: Ints
    cap: Floats
    weight: Floats
    route_end: Ints
    resource: Ints
    capacity: Floats


@compiled
def fill_rates(f: FlowColumns, under_way: Ints, rate: Floats) -> None:
    """Set the rates of the flows that are under way, by progressive filling."""
    left, users = f.capacity.copy(), np.zeros(len(f.capacity))
    rising = np.zeros(len(under_way), np.int64)
    num_rising = 0
    for flow in under_way:
        begin = f.route_end[f.route[flow] - 1] if f.route[flow] > 0 else 0
        if begin == f.route_end[f.route[flow]]:
            rate[flow] = f.cap[flow]
        else:
            rising[num_rising] = flow
            num_rising += 1
    level = 0.0
    while num_rising > 0:
        users[:] = 0.0
        step = np.inf
        for flow in rising[:num_rising]:
            step = min(step, f.cap[flow] - level)
            for i in range(f.route_end[f.route[flow] - 1] if f.route[flow] > 0 else 0, f.route_end[f.route[flow]]):
                users[f.resource[i]] += f.weight[flow]
        for resource in range(len(left)):
            if users[resource] > 0:
                step = min(step, left[resource] / users[resource])
        level += step
        for resource in range(len(left)):
            left[resource] -= step * users[resource]
        still = 0
        for flow in rising[:num_rising]:
            frozen = level >= (1 - 1e-12) * f.cap[flow]
            for i in range(f.route_end[f.route[flow] - 1] if f.route[flow] > 0 else 0, f.route_end[f.route[flow]]):
                resource = f.resource[i]
                frozen = frozen or left[resource] <= 1e-12 * f.capacity[resource]
            if frozen:
                rate[flow] = level
            else:
                rising[still] = flow
                still += 1
        if still == num_rising:  # rounding kept the fullest resource just above zero
            for flow in rising[:num_rising]:
                rate[flow] = level
            return
        num_rising = still


class SharedResources:
    """Flows advancing together through time; the caller owns the clock.

    Usage: ``advance(now)``, then any number of ``add``/``remove``, then ``next_completion()``.
    """

    def __init__(self, capacity: Mapping[Hashable, float]) -> None:
        self.capacity = dict(capacity)
        self.flows: dict[Hashable, Flow] = {}
        self.now = 0.0
        self._stale = False
        self._known: dict[tuple[Hashable, ...], list[float]] = {}  # rates depend only on which kinds of flow there are

    def add(self, key: Hashable, flow: Flow) -> None:
        self.flows[key] = flow
        self._stale = True

    def remove(self, key: Hashable) -> Flow:
        self._stale = True
        return self.flows.pop(key)

    def advance(self, now: float) -> None:
        """Move every flow forward to ``now`` at the present rates."""
        self._refresh()
        elapsed = now - self.now
        if elapsed > 0:
            for flow in self.flows.values():
                flow.remaining = max(0.0, flow.remaining - flow.rate * elapsed)
            self.now = now

    def completion(self, key: Hashable) -> float:
        """When that flow ends if nothing changes."""
        self._refresh()
        flow = self.flows[key]
        return self.now if flow.remaining <= 0 else self.now + flow.remaining / flow.rate

    def next_completion(self) -> tuple[float, Hashable] | None:
        """``(time, key)`` of the flow that ends first if nothing changes; ties in order of arrival."""
        if not self.flows:
            return None
        self._refresh()
        key = min(self.flows, key=lambda key: self.flows[key].remaining / self.flows[key].rate)
        return self.completion(key), key

    def _refresh(self) -> None:
        if self._stale:
            flows = self.flows.values()
            key = tuple((flow.resources, flow.cap, flow.weight) for flow in flows)
            rates = self._known.get(key)
            if rates is None:
                rates = self._known[key] = fair_rates(flows, self.capacity)
            for flow, rate in zip(flows, rates, strict=True):
                flow.rate = rate
            self._stale = False
