"""Leftovers: tensors without data that a run of the model has put into caches outside it, taken out again.

A function that keeps what it computes (functools.cache, a dictionary in a global) keeps it also from a run on tensors
that have no data, and would give it to the user's next step.  Who holds such a tensor is asked of Python's garbage
collector, which sees into every cache.
"""

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import CellType, FrameType, FunctionType
from typing import Any

from harmony_lab.profiler.call_log import is_users_file
from harmony_lab.warning import warn

__all__ = ["take_out"]

_FUNCTION_CACHE = type(lru_cache(lambda: None))
_DICTIONARIES = (dict, OrderedDict, defaultdict)  # others may not let go of what they hold
_DEPTH = 3  # of tuples in tuples


def take_out(tensors: Sequence[Any], but_from: Iterable[Any] = ()) -> None:
    """Take those tensors, but for some, out of every list, dictionary, set and functools cache.

    Warns of variables that hold one: what they held before is not known.
    """
    needed = set(map(id, but_from))
    tensors = [tensor for tensor in tensors if id(tensor) not in needed]
    if not tensors:
        return
    named = sorted(set(_take_out(tensors, _DEPTH)))
    if named:
        warn(
            f"the model's forward, run on tensors without data, has put one into {', '.join(named[:5])}: set that back "
            "before the model is used, and keep such tensors in buffers of the model",
        )


def _take_out(things: Sequence[Any], depth: int) -> list[str]:
    """Names of variables that still hold one of them."""
    ids = set(map(id, things))
    named, tuples = [], []
    for holder in gc.get_referrers(*things):
        if holder is things or isinstance(holder, FrameType):
            continue
        if isinstance(holder, _FUNCTION_CACHE):
            holder.cache_clear()
        elif type(holder) in _DICTIONARIES:
            keys = [key for key, value in holder.items() if id(value) in ids]
            owner = _owner(holder)
            named += [f"{owner}.{key}" for key in keys if owner]
            for key in keys if owner is None else ():
                del holder[key]
        elif type(holder) is list:
            holder[:] = [item for item in holder if id(item) not in ids]
        elif type(holder) is set:
            holder.difference_update([item for item in holder if id(item) in ids])
        elif isinstance(holder, tuple):
            tuples.append(holder)
        elif isinstance(holder, CellType):
            named += _functions_with(holder)
        elif not _is_of_capture(holder):
            named += [f"{type(holder).__name__}.{key}" for key, value in _variables(holder) if id(value) in ids]
    return named + (_take_out(tuples, depth - 1) if tuples and depth else [])


def _owner(variables: dict[Any, Any]) -> str | None:
    """Whose variables those are: of a module, a class or an object, "" for torch's; None for a dictionary."""
    if "__builtins__" in variables:
        return str(variables.get("__name__", "__main__"))
    for holder in gc.get_referrers(variables):
        if isinstance(holder, type):
            return holder.__name__
        if _variables_of(holder) is variables:
            return "" if _is_of_capture(holder) else type(holder).__name__
    return None


def _functions_with(cell: CellType) -> list[str]:
    """As a user would name the variable of an enclosing function."""
    closures = [found for found in gc.get_referrers(cell) if isinstance(found, tuple)]
    functions = [found for found in gc.get_referrers(*closures) if isinstance(found, FunctionType)] if closures else []
    return [
        f"{name} of {function.__qualname__}"
        for function in functions
        for name, other in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if other is cell and not _is_of_capture(function)
    ]


def _is_of_capture(thing: Any) -> bool:
    """What is torch's or ours, and holds such tensors for as long as a model is captured."""
    if isinstance(thing, FunctionType):
        return not is_users_file(thing.__code__.co_filename)
    return type(thing).__module__.partition(".")[0] in ("torch", __name__.partition(".")[0])


def _variables(holder: Any) -> list[tuple[str, Any]]:
    found = _variables_of(holder)
    return list(found.items()) if isinstance(found, dict) else []


def _variables_of(holder: Any) -> Any:
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
