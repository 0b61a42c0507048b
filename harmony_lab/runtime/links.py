"""Emulated links: transfers that take the time that fair sharing of a machine's links gives them."""

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock
from typing import NamedTuple

from harmony_lab.machine import HOST, Machine
from harmony_lab.runtime.backend import StepAborted
from harmony_lab.sharing import Flow, SharedResources

__all__ = ["EmulatedLinks"]

_NEGLIGIBLE_S = 50e-6
"""No wait is shorter: waking a thread takes longer than this."""
_UNNOTICED_S = 2e-6
"""A transfer this short would be late by far more than it takes: it is left off the links."""


class _Waiting(NamedTuple):
    """A thread that sleeps until ``wakes_s``, or until it is told that its transfer ends ``sooner``."""

    sooner: Condition
    latency_s: float
    wakes_s: float


class EmulatedLinks:
    """The links of a machine, shared by the transfers of all threads.  Not ``timed``: they take no time."""

    def __init__(self, machine: Machine, *, timed: bool = True) -> None:
        self._timed = timed
        self._capacity = machine.capacities
        self._resources = SharedResources(dict[Hashable, float](machine.capacities.items()))
        places = (HOST, *range(machine.num_devices))
        routes = {(a, b): machine.route(a, b) for a in places for b in places if a != b}
        self._routes = {pair: (route, machine.latency_s(route)) for pair, route in routes.items()}
        self._lock = Lock()
        self._waiting: dict[Hashable, _Waiting] = {}
        self._ended_s: dict[Hashable, float] = {}
        self._num_started = 0
        self._aborted = False

    def begin(self) -> None:
        """Before a step: transfers may run."""
        with self._lock:
            self._aborted = False

    def abort(self) -> None:
        """Transfers under way, and those that start later, raise ``StepAborted``."""
        with self._lock:
            self._aborted = True
            for waiting in self._waiting.values():
                waiting.sooner.notify()

    @contextmanager
    def carrying(self, traffic: Sequence[tuple[int, int, int]]) -> Iterator[None]:
        """Puts ``(source, destination, bytes)`` on the links, all at once; leaves when each has had its time.

        Raises ``StepAborted``.
        """
        noticed = [part for part in traffic if self._timed and self._least_s(*part) > _UNNOTICED_S]
        tickets = [self._start(*part) for part in noticed]
        try:
            yield
            with self._lock:
                for key, latency_s in tickets:
                    self._wait(key, latency_s)
        finally:
            self._remove([key for key, _ in tickets])

    def _least_s(self, source: int, destination: int, num_bytes: int) -> float:
        """What a transfer takes where it has its links to itself."""
        route, latency_s = self._routes[source, destination]
        return latency_s + num_bytes / min((self._capacity[hop] for hop in route), default=math.inf)

    def _start(self, source: int, destination: int, num_bytes: int) -> tuple[int, float]:
        route, latency_s = self._routes[source, destination]
        with self._lock:
            self._settle(time.perf_counter())
            self._num_started += 1
            # Others get slower by this: they find out when they wake, at the end that they had in view.
            self._resources.add(self._num_started, Flow(resources=route, remaining=float(num_bytes)))
            return self._num_started, latency_s

    def _wait(self, key: int, latency_s: float) -> None:
        while not self._aborted:
            now = time.perf_counter()
            self._settle(now)
            end_s = self._end_s(key) + latency_s
            if end_s - now < _NEGLIGIBLE_S:
                return
            waiting = self._waiting[key] = _Waiting(Condition(self._lock), latency_s, end_s)
            try:
                waiting.sooner.wait(end_s - now)
            finally:
                del self._waiting[key]
        raise StepAborted

    def _end_s(self, key: Hashable) -> float:
        """Of a flow: when it has ended, or will if nothing changes."""
        ended_s = self._ended_s.get(key)
        return self._resources.completion(key) if ended_s is None else ended_s

    def _settle(self, now: float) -> None:
        """Bring flows up to ``now``; those that ended before left the links then, not when their thread wakes."""
        while (first := self._resources.next_completion()) is not None and first[0] <= now:
            ended_s, key = first
            self._resources.advance(ended_s)
            self._resources.remove(key)
            self._ended_s[key] = ended_s
        self._resources.advance(now)

    def _remove(self, keys: Sequence[int]) -> None:
        """Wakes those that end sooner by it, no others: every thread that wakes takes a core from one that computes."""
        with self._lock:
            self._settle(time.perf_counter())
            for key in keys:
                if self._ended_s.pop(key, None) is None:
                    self._resources.remove(key)
            for flow, waiting in self._waiting.items():
                if self._end_s(flow) + waiting.latency_s < waiting.wakes_s - _NEGLIGIBLE_S:
                    waiting.sooner.notify()
