"""LeftUpdates: what a step has left for the next one to update, beside its forward."""

import threading
from collections.abc import Mapping

from torch import Tensor

from harmony_lab.errors import TrainingError
from harmony_lab.runtime.failures import Failure, capture
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.progress import UpdateProgress

__all__ = ["LeftUpdates"]

_Layers = tuple[int, int]


class LeftUpdates:
    """``gradients``: of one step, complete and on the host, by the layers of each update and the parameter's name
    (``names``: all of them).

    ``scale``: what they are to be multiplied with; None: nothing.  Every update is made once, by the threads of the
    next step or by ``finish``, with the learning rates and other settings of when this was made: a scheduler may have
    gone on since.
    """

    def __init__(
        self, optimizer: PackOptimizer, gradients: Mapping[_Layers, Mapping[str, Tensor]], scale: Tensor | None
    ) -> None:
        self.progress = UpdateProgress()
        self._optimizer = optimizer
        self._settings = optimizer.settings()
        self._gradients = {layers: dict(gradients[layers]) for layers in sorted(gradients)}
        self._scale = scale
        self.names = frozenset(name for named in gradients.values() for name in named)
        self._waiting = set(self.names)
        self._changed = threading.Condition()

    def perform(self, layers: _Layers) -> None:
        """One update, if it was not made before; where that fails it is not tried again."""
        gradients = self._gradients.pop(layers, None)
        if gradients is None:
            return
        with self.progress.updating(layers):
            if self._scale is not None:
                for gradient in gradients.values():
                    gradient.mul_(self._scale.to(gradient.dtype))
            self._optimizer.step(gradients, self._settings)
        with self._changed:
            self._waiting.difference_update(gradients)
            self._changed.notify_all()

    def finish(self) -> None:
        """All that were not made yet; where one fails or is interrupted, the others all the same.  Whoever waits need
        not any more.

        Raises ``TrainingError`` with what failed first, or that interrupt.
        """
        failure: Failure | None = None
        try:
            for layers in list(self._gradients):
                try:
                    self.perform(layers)
                except BaseException as error:
                    failure = failure or capture(f"the update of layers {layers[0]}:{layers[1]}", error)
        finally:
            with self._changed:
                self._waiting.clear()
                self._changed.notify_all()
        if failure is None:
            return
        if not isinstance(failure.error, Exception):
            raise failure.error
        what = f"{failure.where}: {type(failure.error).__name__}: {failure.error}"
        raise TrainingError(f"updates stopped at {what}\n{self.describe()}") from failure.error

    @property
    def all_tried(self) -> bool:
        """Whether every update was made, or has failed."""
        return not self._gradients

    def describe(self) -> str:
        """What is wrong with them, in words; empty where nothing is."""
        if not (unfinished := self.progress.unfinished):
            return ""
        layers = ", ".join(f"{start}:{stop}" for start, stop in unfinished)
        return f"Of the step before, the update of layers {layers} may be incomplete; the others are made."

    def wait_for(self, name: str) -> None:
        """Until that parameter has been updated, if it is to be."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._waiting)
