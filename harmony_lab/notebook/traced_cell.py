"""TracedCell: the training steps that a cell takes, and what was measured of the last one of every trainer."""

from collections.abc import Callable, Iterable
from typing import Any

from harmony_lab.trace import Trace

__all__ = ["traces_of"]


def traces_of(execute: Callable[[], None], found: Callable[[], Iterable[Any]]) -> list[Trace]:
    """Run ``execute``; the measured iterations of trainers and runs that took a step in it.

    ``found``: the Trainers and Labs there are, asked before and after.  A Lab's run that is under way is waited for.
    """
    before = {id(thing): (thing, _trace(thing)) for thing in found()}
    execute()
    traces: list[Trace] = []
    for thing in found():
        if hasattr(thing, "run") and thing.run is not None and thing.run.active:
            thing.run.wait()
        trace = _trace(thing)
        old = before.get(id(thing), (None, None))[1]
        if trace is not None and trace is not old and not any(trace is other for other in traces):
            traces.append(trace)
    return traces


def _trace(thing: Any) -> Trace | None:
    """Of a Trainer its own, of a Lab its run's."""
    if hasattr(thing, "last_trace"):
        trace: Trace | None = thing.last_trace
        return trace
    return None if thing.run is None else thing.run.trace
