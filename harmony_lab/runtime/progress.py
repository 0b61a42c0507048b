"""UpdateProgress: which layers' weights a step has updated by now."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["UpdateProgress"]

_Layers = tuple[int, int]


class UpdateProgress:
    """Written by the thread that updates, read by any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._done: list[_Layers] = []
        self._under_way: _Layers | None = None

    @contextmanager
    def updating(self, layers: _Layers) -> Iterator[None]:
        """The weights of layers [start, stop) change in here; after an error they count as half done."""
        with self._lock:
            self._under_way = layers
        yield
        with self._lock:
            self._under_way = None
            self._done.append(layers)

    @property
    def any(self) -> bool:
        with self._lock:
            return bool(self._done) or self._under_way is not None

    def __str__(self) -> str:
        with self._lock:
            done, half = list(self._done), self._under_way
        if not done and half is None:
            return "No weights were updated: training can go on from where it was."
        names = ", ".join(f"{start}:{stop}" for start, stop in done) or "none"
        text = f"Weights of these layers were already updated in this step: {names}."
        if half is not None:
            text += f" The update of layers {half[0]}:{half[1]} may be incomplete."
        return f"{text} Others were not."
