"""Ledger: every byte that is alive on one device, by tensor kind, against a hard budget."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import numpy as np

from harmony_lab.errors import DeviceMemoryError
from harmony_lab.program import TensorKind
from harmony_lab.trace import MemoryTimeline
from harmony_lab.units import format_bytes

__all__ = ["Account", "Ledger"]

_KINDS = tuple(TensorKind)
_POSITION = {kind: position for position, kind in enumerate(_KINDS)}
_Change = tuple[float, int, int]


class Ledger:
    """Counts what is allocated and released on one device; may be used from several threads."""

    def __init__(self, name: str, budget_bytes: int) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self._lock = RLock()  # re-entered where the garbage collector frees a storage in here
        self._alive = dict.fromkeys(_KINDS, 0)
        self._total = 0
        self._clock: Callable[[], float] = time.perf_counter
        self._changes: list[_Change] = []

    @property
    def alive_bytes(self) -> int:
        return self._total

    def begin(self, clock: Callable[[], float]) -> None:
        """Start a new timeline; ``clock`` gives the seconds since its zero."""
        with self._lock:
            self._clock = clock
            self._changes = [(0.0, _POSITION[kind], count) for kind, count in self._alive.items() if count]

    def allocated(self, kind: TensorKind, num_bytes: int, purpose: object) -> None:
        """Count an allocation.

        Where it exceeds the budget: counts nothing and raises ``DeviceMemoryError``, naming ``purpose`` (an op).
        """
        with self._lock:
            if self._total + num_bytes <= self.budget_bytes:
                self._change(kind, num_bytes)
                return
            alive = {kind: count for kind, count in self._alive.items() if count}
        summary = ", ".join(f"{kind} {count}" for kind, count in alive.items())
        raise DeviceMemoryError(
            f"{self.name}: {purpose} needs {num_bytes} more bytes for {kind}, but {sum(alive.values())} of the budget "
            f"of {self.budget_bytes} bytes ({format_bytes(self.budget_bytes)}) are in use ({summary or 'nothing'}). "
            "Choose smaller packs or microbatches, or profile again if the model has changed"
        )

    def released(self, kind: TensorKind, num_bytes: int) -> None:
        with self._lock:
            self._change(kind, -num_bytes)

    def moved(self, source: TensorKind, destination: TensorKind, num_bytes: int) -> None:
        """Count living bytes under another kind."""
        with self._lock:
            self._change(source, -num_bytes)
            self._change(destination, num_bytes)

    def _change(self, kind: TensorKind, change: int) -> None:
        self._alive[kind] += change
        self._total += change
        self._changes.append((self._clock(), _POSITION[kind], change))

    @property
    def num_changes(self) -> int:
        """In the timeline by now."""
        return len(self._changes)

    def take_back(self, first: int) -> Sequence[_Change]:
        """Take out of the timeline what was released since change ``first`` after all that was allocated since."""
        with self._lock:
            kept = len(self._changes)
            while kept > first and self._changes[kept - 1][2] <= 0:
                kept -= 1
            changes, self._changes[kept:] = self._changes[kept:], []
        return changes

    def put_back(self, changes: Sequence[_Change]) -> None:
        """Into the timeline, as of now."""
        with self._lock:
            now_s = self._clock()
            self._changes += ((now_s, kind, change) for _, kind, change in changes)

    def timeline(self) -> MemoryTimeline:
        """What was alive when, since ``begin``."""
        with self._lock:
            changes = np.array(self._changes, dtype=np.float64).reshape(-1, 3)
        steps = np.zeros((len(changes) + 1, len(_KINDS)), dtype=np.int64)
        steps[np.arange(1, len(changes) + 1), changes[:, 1].astype(np.int64)] = changes[:, 2].astype(np.int64)
        times_s = np.concatenate([[0.0], changes[:, 0]])
        return MemoryTimeline(times_s=times_s, kinds=_KINDS, num_bytes=steps.cumsum(axis=0))


class Account:
    """What one compute op allocates: workspace, until some of it becomes blocks and some is kept for backward."""

    def __init__(self, ledger: Ledger, purpose: object) -> None:
        self._ledger = ledger
        self._purpose = purpose
        self._kind = TensorKind.WORKSPACE
        self._heir: TensorKind | None = None
        self._lock = RLock()
        self._alive_bytes = 0
        self._closed = False

    @property
    def alive_bytes(self) -> int:
        """Of the op's own: what was handed over is not."""
        return self._alive_bytes

    def allocated(self, num_bytes: int) -> None:
        """Raises ``DeviceMemoryError``, counting nothing."""
        self._ledger.allocated(self._kind, num_bytes, self._purpose)
        with self._lock:
            self._alive_bytes += num_bytes

    def released(self, num_bytes: int) -> None:
        with self._lock:
            if self._closed:
                return
            self._alive_bytes -= num_bytes
            if self._heir is None:
                self._ledger.released(self._kind, num_bytes)
            else:
                self._ledger.moved(self._kind, self._heir, num_bytes)

    @contextmanager
    def handing_over(self, kind: TensorKind) -> Iterator[None]:
        """What is reported released in here lives on, as a block of that kind."""
        self._heir = kind
        try:
            yield
        finally:
            self._heir = None

    def become(self, kind: TensorKind) -> None:
        """Count what is alive now, and released from now on, as that kind."""
        with self._lock:
            source, self._kind = self._kind, kind
            self._ledger.moved(source, kind, self._alive_bytes)

    def close(self) -> None:
        """The owner has dropped all of it; what is reported from now on counts no more."""
        with self._lock:
            self.released(self._alive_bytes)
            self._closed = True
