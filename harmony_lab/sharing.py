"""Fair sharing of links and cores: the one model of contention, used by the simulator and by emulated devices.

A flow is work (bytes, or core-seconds) that uses a set of resources at once.  Rates are max-min fair: all flows rise
together until a resource is full or a flow reaches its own cap; those freeze, the others go on rising (progressive
filling; Bertsekas and Gallager, *Data Networks*, section 6.5).
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Flow", "SharedResources", "fair_rates"]


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
    rates = [0.0] * len(flows)
    left = dict(capacity)
    rising = [i for i, flow in enumerate(flows) if flow.resources]
    for i, flow in enumerate(flows):
        if not flow.resources:
            rates[i] = flow.cap
    level = 0.0
    while rising:
        users: dict[Hashable, float] = {}
        for i in rising:
            for resource in flows[i].resources:
                users[resource] = users.get(resource, 0.0) + flows[i].weight
        step = min(
            min(left[resource] / weight for resource, weight in users.items()),
            min(flows[i].cap for i in rising) - level,
        )
        level += step
        full = set()
        for resource, weight in users.items():
            left[resource] -= step * weight
            if left[resource] <= 1e-12 * capacity[resource]:
                full.add(resource)
        still = []
        for i in rising:
            if level >= flows[i].cap or not full.isdisjoint(flows[i].resources):
                rates[i] = level
            else:
                still.append(i)
        if len(still) == len(rising):  # rounding kept the fullest resource just above zero
            for i in rising:
                rates[i] = level
            break
        rising = still
    return rates


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
