"""Worker: tasks on a thread that exists only while there are any; a newer task replaces a waiting one of its name."""

import threading
from collections.abc import Callable

__all__ = ["Worker"]

Task = Callable[[], None]


class Worker:
    """Runs tasks one at a time, in the order in which their names were submitted.

    A task submitted while one of the same name waits takes its place: of ten moves of a slider, the first and the last
    run.  ``on_error`` is told, on the thread, of what a task raises.  ``pause_s``: rest between tasks, so that a fast
    source of events does not flood the page.  ``delay_s``: rest before each, in which a newer task may still take its
    place.
    """

    def __init__(
        self, name: str, on_error: Callable[[Exception], None], *, pause_s: float = 0.0, delay_s: float = 0.0
    ) -> None:
        self._name = name
        self._on_error = on_error
        self._pause_s = pause_s
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._waiting: dict[str, Task] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, name: str, task: Task) -> None:
        """Run ``task`` soon, instead of any other of that name that waits; does nothing once closed."""
        with self._changed:
            if self._closed:
                return
            self._waiting[name] = task
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Drop what waits and take no more; the thread ends with the task that runs."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception as error:
                self._on_error(error)
            if self._pause_s:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self._pause_s)

    def _next(self) -> Task | None:
        with self._changed:
            if self._waiting and self._delay_s:
                self._changed.wait_for(lambda: self._closed, self._delay_s)
            if not self._waiting:
                self._thread = None
                self._changed.notify_all()
                return None
            return self._waiting.pop(next(iter(self._waiting)))
