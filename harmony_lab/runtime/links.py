"""Emulated links: transfers that take the time that fair sharing of a machine's links gives them."""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition

from harmony_lab.machine import Machine
from harmony_lab.runtime.backend import StepAborted
from harmony_lab.sharing import Flow, SharedResources

__all__ = ["EmulatedLinks"]

_NEGLIGIBLE_S = 50e-6
"""No wait is shorter: waking a thread takes longer than this."""


class EmulatedLinks:
    """The links of a machine, shared by the transfers of all threads."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._resources = SharedResources(dict[Hashable, float](machine.capacities.items()))
        self._changed = Condition()
        self._ended_s: dict[Hashable, float] = {}
        self._num_started = 0
        self._aborted = False

    def begin(self) -> None:
        """Before a step: transfers may run."""
        with self._changed:
            self._aborted = False

    def abort(self) -> None:
        """Transfers under way, and those that start later, raise ``StepAborted``."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    @contextmanager
    def carrying(self, traffic: Sequence[tuple[int, int, int]]) -> Iterator[None]:
        """Puts ``(source, destination, bytes)`` on the links, all at once; leaves when each has had its time.

        Raises ``StepAborted``.
        """
        tickets = [self._start(*part) for part in traffic]
        try:
            yield
            with self._changed:
                for key, latency_s in tickets:
                    self._wait(key, latency_s)
        finally:
            self._remove([key for key, _ in tickets])

    def _start(self, source: int, destination: int, num_bytes: int) -> tuple[int, float]:
        route = self._machine.route(source, destination)
        with self._changed:
            self._settle(time.perf_counter())
            self._num_started += 1
            self._resources.add(self._num_started, Flow(resources=route, remaining=float(num_bytes)))
            self._changed.notify_all()
            return self._num_started, self._machine.latency_s(route)

    def _wait(self, key: int, latency_s: float) -> None:
        while not self._aborted:
            now = time.perf_counter()
            self._settle(now)
            ended_s = self._ended_s.get(key)
            left_s = (self._resources.completion(key) if ended_s is None else ended_s) + latency_s - now
            if left_s < _NEGLIGIBLE_S:
                return
            self._changed.wait(left_s)
        raise StepAborted

    def _settle(self, now: float) -> None:
        """Bring flows up to ``now``; those that ended before left the links then, not when their thread wakes."""
        while (first := self._resources.next_completion()) is not None and first[0] <= now:
            ended_s, key = first
            self._resources.advance(ended_s)
            self._resources.remove(key)
            self._ended_s[key] = ended_s
        self._resources.advance(now)

    def _remove(self, keys: Sequence[int]) -> None:
        with self._changed:
            self._settle(time.perf_counter())
            for key in keys:
                if self._ended_s.pop(key, None) is None:
                    self._resources.remove(key)
            self._changed.notify_all()
