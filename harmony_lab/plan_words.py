"""The words of a plan's text form: what each may say, and the knobs it stands for."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from harmony_lab.packs import parse_packs, parse_pairs
from harmony_lab.precision import Precision

__all__ = ["WORDS", "Word", "knobs_of"]


class Word(NamedTuple):
    """``read`` gives the values of ``knobs``; it raises ``ValueError`` for a text that is not what is ``expected``."""

    knobs: tuple[str, ...]
    expected: str
    read: Callable[[str], tuple[Any, ...]]


def _count(text: str) -> tuple[int]:
    if not text.isdecimal():
        raise ValueError(text)
    return (int(text),)


def _indices(text: str) -> tuple[tuple[int, ...]]:
    return (tuple(_count(part)[0] for part in text.split(",") if part),)


def _switch(text: str) -> tuple[bool]:
    return ({"on": True, "off": False}[text],)


def _update(text: str) -> tuple[bool, bool]:
    return {"jit": (True, False), "end": (False, False), "next": (False, True)}[text]


def _pairs(text: str) -> tuple[Any]:
    return (parse_pairs(text),)


_WHOLE, _ON_OR_OFF, _PACKS = "takes a whole number", "is on or off", "takes packs like 0:3,3:6"
_SIZE_AND_PACKS = "takes a microbatch size and packs like 4[0:3,3:6]"

WORDS = {
    "minibatch": Word(("minibatch_size",), _WHOLE, _count),
    "forward": Word(("forward_microbatch_size", "forward_packs"), _SIZE_AND_PACKS, parse_packs),
    "backward": Word(("backward_microbatch_size", "backward_packs"), _SIZE_AND_PACKS, parse_packs),
    "devices": Word(("devices",), "takes whole numbers like 0,1", _indices),
    "prefetch": Word(("prefetch",), _WHOLE, _count),
    "peer": Word(("peer_transfers",), _ON_OR_OFF, _switch),
    "update": Word(("just_in_time_update", "overlapped_update"), "is jit, end or next", _update),
    "precision": Word(("precision",), "is fp32 or bf16", lambda text: (Precision(text),)),
    "mirrored": Word(("mirrored",), _ON_OR_OFF, _switch),
    "resident": Word(("resident_packs",), _PACKS, _pairs),
    "kept": Word(("kept_packs",), _PACKS, _pairs),
    "stash": Word(("device_stash",), "takes layers like 2,4", _indices),
    "optimizer": Word(("device_updates",), _PACKS, _pairs),
}


def knobs_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values by knob, of some given by the words of the text form; and what is wrong with them.

    A word's value is its text, or, where it stands for one knob, that knob's own value.
    """
    found: dict[str, Any] = {}
    violations = []
    for name, value in given.items():
        try:
            knobs = _read(name, value)
        except (ValueError, KeyError):
            violations.append(f"{name}= {WORDS[name].expected}, got {value!r}")
            continue
        violations += [f"{knob} is given twice, by its name and by its word" for knob in knobs if knob in found]
        found |= knobs
    return found, violations


def _read(name: str, value: Any) -> dict[str, Any]:
    word = WORDS.get(name)
    if word is None:
        return {name: value}
    if isinstance(value, str):
        return dict(zip(word.knobs, word.read(value), strict=True))
    if len(word.knobs) > 1:
        raise ValueError(value)
    return {word.knobs[0]: value}
