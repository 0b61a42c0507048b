"""Minibatches for as many steps as are asked for."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from harmony_lab.errors import HarmonyError

__all__ = ["endless"]


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
