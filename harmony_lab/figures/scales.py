"""Scales: the unit an axis is drawn in, and round ticks along it."""

from math import floor, log10
from typing import NamedTuple

__all__ = ["Unit", "byte_unit", "ticks", "time_unit"]


class Unit(NamedTuple):
    """Values are divided by ``size`` and carry ``name``."""

    size: float
    name: str


def time_unit(longest_s: float) -> Unit:
    """The unit in which an axis up to that many seconds reads well."""
    if longest_s >= 2:
        return Unit(1.0, "s")
    return Unit(1e-3, "ms") if longest_s >= 2e-3 else Unit(1e-6, "µs")


def byte_unit(most_bytes: float) -> Unit:
    """The unit in which an axis up to that many bytes reads well."""
    for exponent, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most_bytes >= 2 * 1024**exponent:
            return Unit(float(1024**exponent), name)
    return Unit(1.0, "B")


def ticks(stop: float, *, most: int = 8) -> list[tuple[float, str]]:
    """Round values from 0 up to ``stop``, at most ``most`` steps of 1, 2 or 5 times a power of ten, with their text."""
    if stop <= 0:
        return [(0.0, "0")]
    power: float = 10.0 ** floor(log10(stop / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * most >= stop * (1 - 1e-9))
    decimals = max(0, -floor(log10(step) + 1e-9))
    return [(i * step, f"{i * step:.{decimals}f}") for i in range(int(stop / step * (1 + 1e-9)) + 1)]
