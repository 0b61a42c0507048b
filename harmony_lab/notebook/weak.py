"""Weak callbacks: ipywidgets keeps every open widget, and a widget its callbacks; what they act on may still go."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls the bound method for as long as its object lives, then does nothing."""
    reference = WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call
