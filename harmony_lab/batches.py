"""Minibatches for as many steps as are asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from harmony_lab.errors import HarmonyError

__all__ = ["endless", "listed", "several", "single", "to_train_on"]


def to_train_on(data: Any, flatten: Callable[[Any], object]) -> Iterable[Any]:
    """Batches, or a list of the one that was given in their place; ``flatten`` as in ``listed``.

    Raises ``HarmonyError`` where the one, or the first in a list, is no batch of the model's.
    """
    if not _are_several(data, flatten):
        data = [data]
    wrong = _fault(data[0], flatten) if isinstance(data, list | tuple) and data else ""
    if wrong and len(data) > 1 and all(hasattr(part, "ndim") for part in data):  # may have been meant as one
        wrong = f"the first: {wrong}; all as one: {_fault(data, flatten)}"
    if wrong:
        raise HarmonyError(f"batches as the model takes them, such as a DataLoader's, or one were expected. {wrong}")
    return cast(Iterable[Any], data)


def endless(data: Iterable[Any]) -> Iterator[Any]:
    """Batches, starting over when they are used up, if the data can."""
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
    return list(given) if _are_several(given, flatten) else [given]


def several(given: Any, flatten: Callable[[Any], object]) -> list[Any]:
    """Several batches as a list.  Raises ``HarmonyError`` where one was given in their place."""
    if not _are_several(given, flatten):
        raise HarmonyError(
            f"accumulate takes a list of minibatches, got a {type(given).__name__}: give [first, second, ...], or "
            "call step for one minibatch"
        )
    return list(given)


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


def _are_several(given: Any, flatten: Callable[[Any], object]) -> bool:
    walkable = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    if not walkable or isinstance(given, Mapping) or hasattr(given, "ndim"):
        return False
    return not _is_batch(given, flatten)


def _is_batch(given: Any, flatten: Callable[[Any], object]) -> bool:
    return not _fault(given, flatten)


def _fault(given: Any, flatten: Callable[[Any], object]) -> str:
    """Why that is no batch of the model's; nothing where it is one."""
    try:
        flatten(given)
    except HarmonyError as error:
        return str(error)
    return ""
