"""Failures: errors from a worker thread made fit to travel: no frames, so no tensors, travel with them."""

import traceback
from typing import NamedTuple

from harmony_lab.errors import HarmonyError

__all__ = ["Failure", "capture", "clear_frames"]

_PLAIN = (str, int, float, bool, type(None))


class Failure(NamedTuple):
    """The first error of a step.  ``where``: the op, in words."""

    where: str
    error: BaseException


def capture(where: str, error: BaseException) -> Failure:
    """The failure that this error is.

    Clears the locals of every frame the error passed through, so that what they held is freed; the traceback's text
    becomes a note.
    """
    text = "".join(traceback.format_exception(error))
    clear_frames(error)
    bare = _bare(error)
    bare.add_note(f"In the worker thread:\n{text}")
    return Failure(where, bare)


def clear_frames(error: BaseException) -> None:
    """Drop the locals of every frame that this error and those it follows from passed through, but for frames that are
    still running: whoever keeps the error (a notebook does) keeps no tensors with it.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            pending += [link.__cause__, link.__context__]


def _bare(error: BaseException) -> BaseException:
    """The same error without what could hold tensors: traceback, chain, attributes.  If need be, of another type."""
    if isinstance(error, HarmonyError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    if all(isinstance(argument, _PLAIN) for argument in error.args):
        try:
            bare = type(error).__new__(type(error), *error.args)
            bare.args = error.args
            str(bare)
            return bare
        except Exception:
            pass  # an exception class with a constructor of its own
    return RuntimeError(f"{type(error).__name__}: {error}")
