"""StepRecord: what is told of a step, for logging; who wants to hear of steps, and who takes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harmony_lab.trace import Trace

__all__ = ["StepHooks", "StepRecord", "StepTrainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step.  ``step`` counts from 1.  ``grad_norm``: None unless gradients are clipped.  ``trace``: what was
    measured, of several minibatches in the one with updates."""

    step: int
    loss: float
    seconds: float
    num_samples: int
    grad_norm: float | None
    trace: Trace | None = field(default=None, repr=False, compare=False)


class StepHooks:
    """Callbacks, called in the order in which they were added."""

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[[StepRecord], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: Callable[[StepRecord], None]) -> Callable[[], None]:
        """The function returned takes it away again."""
        key = object()
        self._callbacks[key] = callback

        def remove() -> None:
            self._callbacks.pop(key, None)

        return remove

    def call(self, record: StepRecord) -> None:
        """What a callback raises arrives here, and those after it are not called."""
        for callback in list(self._callbacks.values()):
            callback(record)


class StepTrainer(Protocol):
    """What a run needs of a trainer.  ``notes``: what is worth knowing before the first step."""

    notes: tuple[str, ...]

    @property
    def predicted(self) -> Trace: ...

    @property
    def last_trace(self) -> Trace | None: ...

    @property
    def last_norm(self) -> float | None: ...

    def step(self, batch: Any, *, leave_updates: bool = False) -> float: ...

    def accumulate(self, batches: Sequence[Any], *, leave_updates: bool = False) -> float: ...

    def finish(self) -> None: ...

    def cancel(self) -> bool: ...

    def close(self) -> None: ...
