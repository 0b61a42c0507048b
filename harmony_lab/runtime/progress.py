"""UpdateProgress: which layers' weights a step has updated by now, and whether it may begin to."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from harmony_lab.runtime.backend import StepAborted

__all__ = ["UpdateProgress"]

_Layers = tuple[int, int]


class UpdateProgress:
    """Written by the threads that update, read by any.

    Some layers updated and others not is what a step must not leave behind, so it is cancelled before its first update
    or not at all: one of ``begin`` and ``cancel`` comes first, and the other does nothing then.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._done: list[_Layers] = []
        self._under_way: list[_Layers] = []
        self._cancelled = False
        self._finished = False

    @contextmanager
    def updating(self, layers: _Layers) -> Iterator[None]:
        """The weights of layers [start, stop) change in here; after an error they count as half done."""
        self.begin(layers)
        yield
        self.end(layers)

    def begin(self, layers: _Layers) -> None:
        """Raises ``StepAborted`` once the step is cancelled."""
        with self._lock:
            if self._cancelled:
                raise StepAborted
            self._under_way.append(layers)

    def end(self, layers: _Layers) -> None:
        """The weights on the host are the updated ones."""
        with self._lock:
            self._under_way.remove(layers)
            self._done.append(layers)

    def cancel(self) -> bool:
        """Allow no update any more, unless one has begun; whether that is so now."""
        with self._lock:
            if not self._done and not self._under_way and not self._finished:
                self._cancelled = True
            return self._cancelled

    def finish(self) -> None:
        """The step has done all but its updates, which the next one makes: it cannot be cancelled any more.

        Raises ``StepAborted`` where it was.
        """
        with self._lock:
            if self._cancelled:
                raise StepAborted
            self._finished = True

    @property
    def cancelled(self) -> bool:
        with self._lock:
            return self._cancelled

    @property
    def unfinished(self) -> list[_Layers]:
        """Layers whose update may be incomplete."""
        with self._lock:
            return sorted(self._under_way)

    @property
    def any(self) -> bool:
        with self._lock:
            return bool(self._done or self._under_way)

    def __str__(self) -> str:
        with self._lock:
            done, half = list(self._done), sorted(self._under_way)
        if not done and not half:
            return "No weights were updated: training can go on from where it was."
        names = ", ".join(f"{start}:{stop}" for start, stop in done) or "none"
        text = f"Weights of these layers were already updated in this step: {names}."
        if half:
            text += f" The update of layers {', '.join(f'{start}:{stop}' for start, stop in half)} may be incomplete."
        return f"{text} Others were not."
