"""Arguments: what the command line and the notebook's magics read in the same way."""

import argparse
import re
from dataclasses import replace

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode
from harmony_lab.precision import Precision
from harmony_lab.units import parse_bytes, parse_rate

__all__ = [
    "add_emulated",
    "add_machine",
    "add_mode",
    "add_precision",
    "asked_machine",
    "changed",
    "described",
    "emulated",
    "num_bytes",
    "positive",
    "preset_with",
    "rate",
]

_EMULATED_DEVICES = 2
_LEAST_BYTES = 2**20  # that somebody means who gives no unit
_EMULATED_MEMORY = "64MiB"
_EMULATED_LINK = "2GB/s"


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
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text.strip().isdecimal() and size < _LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text} without a unit is {text} bytes; with one, as {text}MiB or {text}GiB")
    return size


def rate(text: str) -> float:
    """``"2GB/s"``."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_emulated(parser: argparse.ArgumentParser, memory_default: str = _EMULATED_MEMORY) -> None:
    """``--devices``, ``--memory`` and ``--link`` of emulated devices; None where not given."""
    parser.add_argument(
        "--devices", type=positive, metavar="N", help=f"number of devices (default {_EMULATED_DEVICES})"
    )
    parser.add_argument(
        "--memory", type=num_bytes, metavar="SIZE", help=f"per device, as 64MiB (default {memory_default})"
    )
    parser.add_argument("--link", type=rate, metavar="RATE", help="shared host link, as 2GB/s (default)")


def described(options: argparse.Namespace) -> bool:
    """Whether any of ``add_emulated``'s options was given."""
    return (options.devices, options.memory, options.link) != (None, None, None)


def changed(machine: Machine, options: argparse.Namespace) -> Machine:
    """The machine with what ``add_emulated``'s options change: fewer devices, other memory, other links."""
    fewer = machine.with_(num_devices=options.devices)
    made = fewer.with_(memory=options.memory, link=options.link)
    return made if made == fewer else replace(made, name=f"{made.name}, changed")


def emulated(options: argparse.Namespace) -> Machine:
    """The machine that ``add_emulated``'s options describe."""
    return Machine.emulated(
        options.devices or _EMULATED_DEVICES,
        memory=options.memory or _EMULATED_MEMORY,
        link=options.link or _EMULATED_LINK,
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """What the command ``machine`` takes: a preset's name or a description, and ``--measure``."""
    parser.add_argument("preset", nargs="*", metavar="PRESET", help="GPUs such as 4x4090 (default: those found here)")
    add_emulated(parser)
    parser.add_argument("--emulated", action="store_true", help="emulated devices even where there are GPUs")
    parser.add_argument("--measure", action="store_true", help="measure what every link carries, alone and all at once")


def asked_machine(options: argparse.Namespace) -> Machine:
    """The machine that ``add_machine``'s options name or describe; without any, what is found here."""
    preset = " ".join(options.preset)
    if options.preset:
        if options.measure:
            raise HarmonyError(
                f"the links of {preset!r} cannot be measured, it is only described: leave the name out to measure what "
                "is here, or leave --measure out"
            )
        return preset_with(preset, options)
    return emulated(options) if described(options) or options.emulated else Machine.detect()


def preset_with(preset: str, options: argparse.Namespace) -> Machine:
    """A machine by its name, ``changed``."""
    machine = Machine.preset(preset)
    if options.devices is not None and options.devices > machine.num_devices:
        raise HarmonyError(
            f"{preset!r} has {machine.num_devices} of --devices {options.devices}: write how many there are into the "
            f"name, such as {options.devices}x{re.sub(r'^[0-9]+ *x *', '', preset)}"
        )
    return changed(machine, options)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """``--precision``."""
    parser.add_argument(
        "--precision", type=_precision, choices=tuple(Precision), default=Precision.FP32, help="default fp32"
    )


def add_mode(parser: argparse.ArgumentParser) -> None:
    """``--mode``."""
    parser.add_argument("--mode", type=_mode, choices=tuple(Mode), help="only plans of this mode (default both)")


def _precision(text: str) -> Precision:
    try:
        return Precision.of(text)
    except HarmonyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _mode(text: str) -> Mode:
    if text not in tuple(Mode):
        raise argparse.ArgumentTypeError(f"{' or '.join(Mode)} was expected, got {text!r}")
    return Mode(text)
