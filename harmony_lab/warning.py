"""Warnings that point at the user's line, however far inside they arise."""

import sys
import warnings

__all__ = ["warn"]

_INSIDE = {"harmony_lab", "torch", "contextlib"}  # what calls what within the package


def warn(message: str) -> None:
    """A ``UserWarning`` at the line outside this package that led to the call."""
    level, frame = 2, sys._getframe(1)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
