"""Listeners: callbacks that watch something on whatever thread it happens."""

import logging
import threading
from collections.abc import Callable

__all__ = ["Listeners"]

_log = logging.getLogger("harmony_lab")


class Listeners:
    """Callbacks that are told of events by name, on whatever thread the event happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[str], None]] = {}

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._callbacks)

    def clear(self) -> None:
        """Let all callbacks go."""
        with self._lock:
            self._callbacks.clear()

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Add a callback; the function returned takes it away again."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback

        def unsubscribe() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return unsubscribe

    def notify(self, event: str) -> None:
        with self._lock:
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            try:
                callback(event)
            except Exception:  # a listener only watches: its fault must not end the training it watches
                _log.exception("a listener failed on event %r", event)
