"""What a line of the ``%harmony`` magic may go on with, for the Tab key."""

import re
from collections.abc import Mapping
from typing import Any

from harmony_lab.notebook.magic_words import COMMANDS, parsers

__all__ = ["completions"]

_COUNT = re.compile(r"\d+x", re.IGNORECASE)


def completions(line: str, symbol: str, namespace: Mapping[str, Any]) -> list[str]:
    """Commands first, then options, what the option before takes, machines, and names of the notebook.

    ``symbol``: the part of the last word that IPython puts them in the place of.
    """
    words = line.split()
    before = words if line.endswith(" ") else words[:-1]
    if len(before) < 2:
        return list(COMMANDS)
    command = parsers()[1].get(before[1])
    options = {} if command is None else command._option_string_actions
    taking = options.get(before[-1])
    if taking is not None and taking.choices is not None:
        return [str(choice) for choice in taking.choices]
    if taking is not None and taking.dest == "machine":
        return _machines(symbol, namespace)
    if words[-1].startswith("-") and not line.endswith(" "):
        return list(options) if symbol.startswith("-") else [option.lstrip("-") for option in options]
    names = [name for name in namespace if not name.startswith("_")]
    return [*options, *(_machines(symbol, namespace) if before[1] == "machine" else names)]


def _machines(symbol: str, namespace: Mapping[str, Any]) -> list[str]:
    """Presets, as many of each GPU as were begun to be asked for, and machines of the notebook."""
    from harmony_lab.gpus import GPUS
    from harmony_lab.machine import Machine

    count = _COUNT.match(symbol)
    presets = [f"{count[0] if count else ''}{gpu}" for gpu in GPUS]
    return [*presets, *(name for name, value in namespace.items() if isinstance(value, Machine))]
