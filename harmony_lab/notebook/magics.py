"""The ``%harmony`` magic, and how a Lab and a Run are shown once the extension is loaded."""

import argparse
import shlex
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from harmony_lab.errors import HarmonyError
from harmony_lab.notebook.views import Views, named

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["load", "unload"]

_HELP = """Plan and run the training of models that are larger than the devices at hand.

    %harmony machine                      the devices, memory and links found here
    %harmony profile MODEL BATCH          seconds and bytes of every layer (without names: of the Lab's model)
    %harmony lab MODEL BATCH OPTIMIZER    a new Lab and its dashboard (without names: the Lab there is)
    %harmony plan                         the ranking of the Lab's plans
    %harmony launch LOADER                train with the chosen plan; returns at once
    %harmony stop                         stop training after the current step
    %harmony report FILE                  write one HTML file with everything

MODEL, BATCH, OPTIMIZER and LOADER are names in this notebook.  Options: ``--minibatch N``, ``--loss NAME``
and ``--machine NAME`` with profile and lab, ``--steps N`` with launch, ``--lab NAME`` where there are several Labs.
Each returns what it shows: ``run = %harmony launch loader``.
"""
_MAGIC = "harmony"

_views: dict[Any, Views] = {}  # by shell


def load(ipython: Any) -> None:
    """Register the magic, its completion and the views; imports nothing heavy."""
    magic = _Magic(ipython)
    views = _views[ipython] = Views(ipython)
    views.load()

    def harmony(line: str) -> Any:
        return magic(line)

    harmony.__doc__ = _HELP
    ipython.register_magic_function(harmony, "line", _MAGIC)
    ipython.set_hook("complete_command", magic.complete, str_key=f"%{_MAGIC}")


def unload(ipython: Any) -> None:
    """Take it all away again; Labs that the user named are closed, and with them their runs."""
    _views.pop(ipython).unload()
    ipython.magics_manager.magics["line"].pop(_MAGIC, None)
    ipython.strdispatchers["complete_command"].strs.pop(f"%{_MAGIC}", None)


# -- the magic --------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Errors become one line in the cell instead of the end of the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%harmony: {message}; %harmony? shows the usage")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%harmony", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, names in _NAMES.items():
        command = commands.add_parser(name, add_help=False)
        for operand in names:
            command.add_argument(operand, nargs="?" if name in ("profile", "lab") else None)
        if name in ("profile", "lab"):
            command.add_argument("--minibatch", type=int)
            command.add_argument("--machine")
            command.add_argument("--loss")
        if name == "launch":
            command.add_argument("--steps", type=int, default=100)
        if name != "machine":
            command.add_argument("--lab", dest="lab_name")
    return parser


_NAMES: Mapping[str, Sequence[str]] = {
    "machine": (),
    "profile": ("model", "batch"),
    "plan": (),
    "lab": ("model", "batch", "optimizer"),
    "launch": ("loader",),
    "stop": (),
    "report": ("file",),
}


class _Magic:
    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._made: weakref.ref[Lab] | None = None  # by the magic itself: it may have no name yet

    def __call__(self, line: str) -> Any:
        """Run one command and return what it made.  A user's error is one message without a traceback."""
        if not line.strip():
            raise UsageError(f"%harmony: say what to do: {', '.join(_NAMES)}; %harmony? shows the usage")
        arguments = _parser().parse_args(shlex.split(line))
        command: Callable[[argparse.Namespace], Any] = getattr(self, f"_{arguments.command}")
        try:
            return command(arguments)
        except HarmonyError as error:
            raise UsageError(str(error)) from None

    def complete(self, _: Any, event: Any) -> list[str]:
        """Commands first, then names of the notebook."""
        words = event.line.split()
        if len(words) < 2 or (len(words) == 2 and not event.line.endswith(" ")):
            return list(_NAMES)
        return [name for name in self._ipython.user_ns if not name.startswith("_")]

    def _machine(self, _: argparse.Namespace) -> Any:
        from harmony_lab.machine import Machine

        return Machine.detect()

    def _profile(self, arguments: argparse.Namespace) -> Any:
        if arguments.model is None:
            lab = self._lab_at_hand(arguments)
            return lab.profile or lab.measure()
        model, batch = self._operands(arguments, "model", "batch")
        from harmony_lab.profiler.decompose import decompose
        from harmony_lab.profiler.measure import profile

        layers = decompose(model, batch, self._chosen_loss(arguments))
        size = arguments.minibatch or layers.example_sizes["batch"]
        return profile(layers, self._chosen_machine(arguments), None, minibatch_size=size)

    def _lab(self, arguments: argparse.Namespace) -> Any:
        if arguments.model is None:
            return self._lab_at_hand(arguments)
        from harmony_lab.lab import Lab

        model, batch, *optimizer = self._operands(arguments, "model", "batch", "optimizer")
        if arguments.minibatch is None:
            raise UsageError("%harmony lab: how many samples has a minibatch? give --minibatch N")
        made = Lab(
            model,
            batch,
            optimizer[0] if optimizer else None,
            loss_fn=self._chosen_loss(arguments),
            minibatch_size=arguments.minibatch,
            machine=self._chosen_machine(arguments),
        )
        self._made = weakref.ref(made)
        return made

    def _plan(self, arguments: argparse.Namespace) -> Any:
        return self._lab_at_hand(arguments).prepare().result

    def _launch(self, arguments: argparse.Namespace) -> Any:
        (loader,) = self._operands(arguments, "loader")
        return self._lab_at_hand(arguments).launch(loader, arguments.steps)

    def _stop(self, arguments: argparse.Namespace) -> Any:
        run = self._lab_at_hand(arguments).run
        if run is None:
            raise UsageError("%harmony stop: nothing was launched yet; %harmony launch LOADER does")
        run.stop()
        return run

    def _report(self, arguments: argparse.Namespace) -> Any:
        return self._lab_at_hand(arguments).report(arguments.file)

    # -- names of the notebook ------------------------------------------------------------------------------------

    def _operands(self, arguments: argparse.Namespace, *names: str) -> list[Any]:
        """Values of the operands that were given."""
        given = [getattr(arguments, name) for name in names]
        if arguments.command == "profile" and None in given:
            raise UsageError("%harmony profile: give MODEL and BATCH, or neither to profile the Lab's model")
        if arguments.command == "lab" and given[1] is None:
            raise UsageError("%harmony lab: give MODEL and BATCH, or neither to show the Lab there is")
        return [self._value(name) for name in given if name is not None]

    def _value(self, name: str) -> Any:
        namespace = self._ipython.user_ns
        if name not in namespace:
            raise UsageError(f"%harmony: there is no {name!r} in this notebook; define it in a cell first")
        return namespace[name]

    def _chosen_machine(self, arguments: argparse.Namespace) -> Any:
        return self._value(arguments.machine) if arguments.machine else self._machine(arguments)

    def _chosen_loss(self, arguments: argparse.Namespace) -> Any:
        return self._value(arguments.loss) if arguments.loss else None

    def _lab_at_hand(self, arguments: argparse.Namespace) -> "Lab":
        if arguments.lab_name:
            given: Lab = self._value(arguments.lab_name)
            return given
        labs = named(self._ipython.user_ns)
        made = None if self._made is None else self._made()
        if made is not None and not made.closed and made not in labs.values():
            labs["the one %harmony lab made"] = made
        if not labs:
            raise UsageError(
                "%harmony: there is no open Lab; make one: %harmony lab MODEL BATCH OPTIMIZER --minibatch N"
            )
        if len(labs) > 1:
            raise UsageError(f"%harmony: several Labs are open ({', '.join(labs)}); say which with --lab NAME")
        return next(iter(labs.values()))
