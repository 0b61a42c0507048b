"""Packs: consecutive layers, how they tile a model, their text form, and microbatches."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Pack", "joined", "microbatches", "parse_packs", "parse_pairs", "tiling"]


class Pack(NamedTuple):
    """Consecutive layers [start, stop) that swap in and out together."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def microbatches(start: int, stop: int, size: int) -> tuple[tuple[int, int], ...]:
    """Samples [start, stop) in microbatches of ``size``; the last may be smaller."""
    return tuple((first, min(first + size, stop)) for first in range(start, stop, size))


def tiling(name: str, packs: Sequence[Pack], start: int, stop: int) -> Iterable[str]:
    edge = start
    for pack in packs:
        if pack.start != edge:
            yield f"{name} must tile layers {start}:{stop} without gap or overlap: after {edge} comes pack {pack}"
        if pack.stop <= pack.start:
            yield f"{name}: pack {pack} holds no layer"
        edge = pack.stop
    if edge != stop:
        yield f"{name} must end at layer {stop}, the last pack ends at {edge}"


def parse_packs(text: str) -> tuple[int, tuple[Pack, ...]]:
    match = re.fullmatch(r"(\d+)\[((?:\d+:\d+)?(?:,\d+:\d+)*)\]", text)
    if match is None:
        raise ValueError(f"a microbatch size and packs were expected, got {text!r}")
    size, packs = match.groups()
    return int(size), parse_pairs(packs)


def parse_pairs(text: str) -> tuple[Pack, ...]:
    pairs = [pack.split(":") for pack in text.split(",") if pack]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"packs were expected, got {text!r}")
    return tuple(Pack(int(start), int(stop)) for start, stop in pairs)


def joined(values: Iterable[object]) -> str:
    return ",".join(map(str, values))
