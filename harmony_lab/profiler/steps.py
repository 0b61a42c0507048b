"""Steps: how far profiling is, and how long it will take, for the user's progress callback."""

import time
from collections.abc import Callable

from harmony_lab.units import format_seconds

__all__ = ["ProgressCallback", "Steps"]

ProgressCallback = Callable[[int, int, str], None]
"""progress(done, total, what): steps done, of how many, and the one that begins now, in words."""


class Steps:
    """Counts steps that take as long as their ``weight`` says, relative to each other.

    What the callback raises ends the work.
    """

    def __init__(
        self,
        progress: ProgressCallback | None,
        num_steps: int,
        total_weight: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._progress = progress
        self._num_steps = num_steps
        self._weight_left = total_weight
        self._clock = clock
        self._num_begun = 0
        self._weight_done = 0.0
        self._weight_begun = 0.0
        self._start_s = clock()

    def begin(self, what: str, weight: float) -> None:
        """The step before is over."""
        self._weight_done += self._weight_begun
        self._weight_left -= self._weight_begun
        self._weight_begun = weight
        if self._progress is not None:
            self._progress(min(self._num_begun, self._num_steps - 1), self._num_steps, what + self._left())
        self._num_begun += 1

    def only(self, num_steps: int, weight: float) -> None:
        """So many steps are left, whatever was planned."""
        self._num_begun = self._num_steps - num_steps
        self._weight_done += self._weight_begun
        self._weight_begun = 0.0
        self._weight_left = weight

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._num_steps, self._num_steps, "profile")

    def _left(self) -> str:
        if self._weight_done <= 0:
            return ""
        left_s = (self._clock() - self._start_s) / self._weight_done * max(0.0, self._weight_left)
        return f"; about {format_seconds(left_s)} left"
