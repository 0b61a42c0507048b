"""TracedCell: the training steps that a cell takes, and what was measured of the last one of every trainer."""

from collections.abc import Callable, Iterable
from typing import Any

from harmony_lab.trace import Trace

__all__ = ["TracedCell"]


class TracedCell:
    """Made before the cell runs; ``traces`` is asked after.

    ``found``: the Trainers and Labs there are, asked before and after.
    """

    def __init__(self, found: Callable[[], Iterable[Any]]) -> None:
        self._found = found
        self._before = {id(thing): (thing, _trace(thing), getattr(thing, "run", None)) for thing in found()}

    def traces(self) -> list[Trace]:
        """The measured iterations of trainers and runs that took a step since.

        A Lab's run that is under way is waited for; where one fails that the cell launched, or waited for, its
        ``TrainingError`` is raised.
        """
        traces: list[Trace] = []
        for thing in self._found():
            _, old, run_before = self._before.get(id(thing), (None, None, None))
            run = getattr(thing, "run", None)
            if run is not None and (run.active or run is not run_before):
                run.wait()
            trace = _trace(thing)
            if trace is not None and trace is not old and not any(trace is other for other in traces):
                traces.append(trace)
        return traces


def _trace(thing: Any) -> Trace | None:
    """Of a Trainer its own, of a Lab its run's."""
    if hasattr(thing, "last_trace"):
        trace: Trace | None = thing.last_trace
        return trace
    return None if thing.run is None else thing.run.trace
