"""Arguments: what the command line and the notebook's magics read in the same way."""

import argparse

from harmony_lab.machine import Machine
from harmony_lab.plan import Mode
from harmony_lab.units import parse_bytes, parse_rate

__all__ = ["add_emulated", "add_mode", "emulated", "num_bytes", "positive", "rate"]

_EMULATED_MEMORY = "64MiB"


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, got {text!r}")
    return number


def num_bytes(text: str) -> int:
    """``"64MiB"``."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """``"2GB/s"``."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_emulated(parser: argparse.ArgumentParser, memory_default: str = _EMULATED_MEMORY) -> None:
    """``--devices``, ``--memory`` and ``--link`` of emulated devices."""
    parser.add_argument("--devices", type=positive, default=2, help="number of emulated devices (default 2)")
    parser.add_argument(
        "--memory", type=num_bytes, metavar="SIZE", help=f"per device, as 64MiB (default {memory_default})"
    )
    parser.add_argument("--link", type=rate, metavar="RATE", default=2e9, help="shared host link, as 2GB/s (default)")


def emulated(options: argparse.Namespace) -> Machine:
    """The machine that ``add_emulated``'s options describe."""
    return Machine.emulated(options.devices, memory=options.memory or _EMULATED_MEMORY, link=options.link)


def add_mode(parser: argparse.ArgumentParser) -> None:
    """``--mode``."""
    parser.add_argument("--mode", type=Mode, choices=tuple(Mode), help="only plans of this mode (default both)")
