"""The words that ``%harmony`` takes, and its usage."""

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import NoReturn

from IPython.core.error import UsageError

from harmony_lab.arguments import add_emulated, add_machine, add_mode, add_precision, positive

__all__ = ["COMMANDS", "USAGE", "Usage", "parsers", "words"]

USAGE = """Plan and run the training of models that are larger than the devices at hand.

    %harmony machine [PRESET]             the devices, memory and links found here, or those of a preset (4x4090);
                                          with --devices N --memory SIZE --link RATE: emulated devices;
                                          with --measure: what the links really carry (its .machine plans with that)
    %harmony profile MODEL BATCH          seconds and bytes of every layer (without names: of the Lab's model)
    %harmony lab MODEL BATCH OPTIMIZER    a new Lab and its dashboard (without names: the Lab there is); with
                                          --devices N --memory SIZE --link RATE: on emulated devices, or of --machine
    %harmony plan [--mode dp]             the ranking of the Lab's plans
    %harmony compare [A B]                two plans beside each other, by rank, name or text, or baselines such as
                                          'dp, paged'; without names: the ten best and the baselines, in figures
    %harmony launch LOADER                train with the chosen plan; returns at once
    %harmony stop                         stop training; a step that has begun to update is finished first
    %harmony report FILE                  write one HTML file with everything
    %harmony free                         close every Lab and Trainer and give device memory back
    %harmony help                         this
    %%harmony trace                       run the cell; show the last training step it took, as measured

MODEL, BATCH, OPTIMIZER and LOADER are names in this notebook.  Options: --minibatch N, --loss NAME, --precision bf16
and --machine NAME or PRESET with profile and lab, --steps N and --max-grad-norm X with launch, --lab NAME where there
are several Labs.  profile takes an OPTIMIZER too; without one its costs are without updates and optimizer state.
Each returns what it shows: run = %harmony launch loader
"""


class Usage:
    """What ``%harmony help`` shows."""

    def __repr__(self) -> str:
        return USAGE


class _Parser(argparse.ArgumentParser):
    """Errors become one line in the cell instead of the end of the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%harmony: {message}; %harmony? shows the usage")


COMMANDS: Mapping[str, Sequence[str]] = {
    "machine": (),
    "profile": ("model", "batch", "optimizer"),
    "plan": (),
    "compare": ("a", "b"),
    "lab": ("model", "batch", "optimizer"),
    "launch": ("loader",),
    "stop": (),
    "report": ("file",),
    "free": (),
    "help": (),
    "trace": (),
}
_MAY_LACKCOMMANDS = ("profile", "lab", "compare")
_WITHOUT_LAB = ("machine", "free", "help", "trace")
_HELP = {"?", "-h", "--help"}


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by name."""
    parser = _Parser(prog="%harmony", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, names in COMMANDS.items():
        command = commands.add_parser(name, add_help=False, allow_abbrev=False)
        for operand in names:
            command.add_argument(operand, nargs="?" if name in _MAY_LACKCOMMANDS else None)
        if name == "machine":
            add_machine(command)
        if name == "plan":
            add_mode(command)
        if name in ("profile", "lab"):
            command.add_argument("--minibatch", type=positive)
            command.add_argument("--machine")
            add_emulated(command)
            command.add_argument("--loss")
            add_precision(command)
        if name == "launch":
            command.add_argument("--steps", type=positive, default=100)
            command.add_argument("--max-grad-norm", type=_norm)
        if name not in _WITHOUT_LAB:
            command.add_argument("--lab", dest="lab_name")
    return parser, commands.choices


def words(line: str) -> list[str]:
    """Of a line; a semicolon at its end, which keeps IPython from showing the result, is none of them.

    Whoever asks for help, ``--help`` or ``?`` after any command, is given it.
    """
    try:
        given = shlex.split(line.rstrip().rstrip(";"))
    except ValueError as error:
        raise UsageError(f"%harmony: {error}; close the quotation") from None
    return given if _HELP.isdisjoint(given) else ["help"]


def _norm(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, got {text!r}")
    return number
