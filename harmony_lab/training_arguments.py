"""What training is asked for, looked at before anything is made of it."""

from numbers import Integral, Real
from typing import Any

from harmony_lab.errors import HarmonyError

__all__ = ["check_count", "check_training"]


def check_training(
    *,
    steps: Any = 1,
    record_every: Any = 1,
    accumulate: Any = 1,
    first_step: Any = 0,
    max_grad_norm: Any = None,
    on_step: Any = None,
) -> None:
    """Raise ``HarmonyError`` for a number that is none, or not in its range, and for a callback that is none."""
    check_count("steps", steps)
    check_count("record_every", record_every)
    check_count("accumulate", accumulate)
    check_count("first_step", first_step, least=0)
    if max_grad_norm is not None and not (_is_number(max_grad_norm, Real) and max_grad_norm > 0):
        raise HarmonyError(f"max_grad_norm must be a number above 0, or None to clip nothing, got {max_grad_norm!r}")
    if on_step is not None and not callable(on_step):
        raise HarmonyError(f"on_step must be a function of a StepRecord, or None, got {on_step!r}")


def check_count(name: str, given: Any, *, least: int = 1) -> None:
    if not _is_number(given, Integral) or given < least:
        raise HarmonyError(f"{name} must be a whole number of at least {least}, got {given!r}")


def _is_number(given: Any, kind: type) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)
