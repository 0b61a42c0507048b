"""Minibatches for as many steps as are asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from harmony_lab.errors import HarmonyError

__all__ = ["endless", "listed", "single"]


def endless(data: Iterable[Any]) -> Iterator[Any]:
    """Batches, starting over when they are used up, if the data can."""
    if isinstance(data, Mapping) or hasattr(data, "ndim"):
        raise HarmonyError(
            f"data must be an iterable of batches, such as a DataLoader; a single batch ({type(data).__name__}) "
            "was given: pass [batch] to train on it again and again"
        )
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise HarmonyError(f"data must be an iterable of batches, such as a DataLoader, got {type(data).__name__}")
    return _over_and_over(data)


def _over_and_over(data: Iterable[Any]) -> Iterator[Any]:
    once_only = iter(data) is data
    while True:
        empty = True
        for batch in data:
            empty = False
            yield batch
        if once_only:
            return
        if empty:
            raise HarmonyError("data yields no batch")


def listed(given: Any, flatten: Callable[[Any], object]) -> list[Any]:
    """Several batches as a list; one that was given in their place as a list of it.

    ``flatten`` raises ``HarmonyError`` for what is no batch of the model's.
    """
    several = hasattr(given, "__iter__") and not isinstance(given, Mapping) and not hasattr(given, "ndim")
    return list(given) if several and not _is_batch(given, flatten) else [given]


def single(given: Any, flatten: Callable[[Any], object]) -> Any:
    """One batch, also where a list of it was given.  Raises ``HarmonyError`` where that has several."""
    if not isinstance(given, list | tuple) or _is_batch(given, flatten):
        return given
    if not given or not all(_is_batch(batch, flatten) for batch in given):
        return given
    if len(given) > 1:
        raise HarmonyError(
            f"one minibatch was expected, got a {type(given).__name__} of {len(given)}: call it for each"
        )
    return given[0]


def _is_batch(given: Any, flatten: Callable[[Any], object]) -> bool:
    try:
        flatten(given)
    except HarmonyError:
        return False
    return True
