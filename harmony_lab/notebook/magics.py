"""The ``%harmony`` magic, and how a Lab, a Run and a Trace are shown once the extension is loaded."""

import argparse
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from harmony_lab.arguments import asked_machine, changed, described, emulated, preset_with
from harmony_lab.errors import HarmonyError
from harmony_lab.lab_arguments import check_kinds
from harmony_lab.notebook.completion import completions
from harmony_lab.notebook.magic_words import COMMANDS, USAGE, Usage, parsers, words
from harmony_lab.notebook.release import free
from harmony_lab.notebook.traced_cell import TracedCell
from harmony_lab.notebook.views import Views, held, named

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["load", "unload"]

_MAGIC = "harmony"

_RANKS_SHOWN = 10

_loaded: "dict[Any, tuple[Views, _Magic]]" = {}  # by shell


def load(ipython: Any) -> None:
    """Register the magic, its completion and the views; imports nothing heavy."""
    views = Views(ipython)
    magic = _Magic(ipython, views)
    _loaded[ipython] = views, magic
    views.load()
    ipython.events.register("post_run_cell", magic.after_cell)

    def harmony(line: str, cell: str | None = None) -> Any:
        return magic(line, cell)

    harmony.__doc__ = USAGE
    ipython.register_magic_function(harmony, "line_cell", _MAGIC)
    for prefix in ("%", "%%"):
        ipython.set_hook("complete_command", magic.complete, str_key=f"{prefix}{_MAGIC}")


def unload(ipython: Any) -> None:
    """Take it all away again; Labs that the user named are closed, and with them their runs."""
    views, magic = _loaded.pop(ipython)
    ipython.events.unregister("post_run_cell", magic.after_cell)
    magic.let_go()
    views.unload()
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop(_MAGIC, None)
    for prefix in ("%", "%%"):
        ipython.strdispatchers["complete_command"].strs.pop(f"{prefix}{_MAGIC}", None)


# -- the magic --------------------------------------------------------------------------------------------------------


class _Magic:
    def __init__(self, ipython: Any, views: Views) -> None:
        self._ipython = ipython
        self._views = views
        self._made: weakref.ref[Lab] | None = None  # by the magic itself: it may have no name yet
        self._kept: Lab | None = None  # it, as long as nobody else has it

    def __call__(self, line: str, cell: str | None = None) -> Any:
        """Run one command and return what it made.  A user's error is one message without a traceback."""
        if not line.strip(" ;"):
            raise UsageError(f"%harmony: say what to do: {', '.join(COMMANDS)}; %harmony? shows the usage")
        arguments = parsers()[0].parse_args(words(line))
        if (cell is not None) != (arguments.command == "trace"):
            cure = "a cell of its own starts with %%harmony trace" if cell is None else "it is written with one %"
            raise UsageError(f"%harmony {arguments.command}: {cure}; %harmony? shows the usage")
        if cell is not None:
            return self._trace(cell)
        command: Callable[[argparse.Namespace], Any] = getattr(self, f"_{arguments.command}")
        try:
            return command(arguments)
        except HarmonyError as error:
            raise UsageError(_line(error)) from None

    def after_cell(self, _: Any) -> None:
        """A Lab that the cell has named or shown is theirs from here on."""
        if self._kept is not None and self._is_held(self._kept):
            self._kept = None

    def let_go(self) -> None:
        """Close the Lab that nobody else has."""
        lab, self._kept = self._kept, None
        if lab is not None and not self._is_held(lab):
            lab.close()

    def _is_held(self, lab: "Lab") -> bool:
        others = (*self._views.open_labs(), *held(self._ipython.user_ns, ("harmony_lab.lab", "Lab")))
        return lab.closed or any(lab is other for other in others)

    def complete(self, _: Any, event: Any) -> list[str]:
        return completions(event.line, event.symbol, self._ipython.user_ns)

    def _machine(self, arguments: argparse.Namespace) -> Any:
        machine = asked_machine(arguments)
        if not arguments.measure:
            return machine
        from harmony_lab.profiler.links import probe_links

        return probe_links(machine)

    def _profile(self, arguments: argparse.Namespace) -> Any:
        if arguments.model is None:
            lab = self._lab_at_hand(arguments)
            return lab.profile or lab.measure()
        model, batch, *optimizer = self._operands(arguments, "model", "batch", "optimizer")
        from harmony_lab.profiler.decompose import decompose
        from harmony_lab.profiler.measure import profile

        layers = decompose(model, batch, self._chosen_loss(arguments))
        size = arguments.minibatch or layers.example_sizes["batch"]
        machine, precision = self._chosen_machine(arguments), arguments.precision
        used = optimizer[0] if optimizer else None
        check_kinds(used, machine, None)
        return profile(layers, machine, used, precision=precision, minibatch_size=size)

    def _lab(self, arguments: argparse.Namespace) -> Any:
        if arguments.model is None:
            return self._lab_at_hand(arguments)
        from harmony_lab.lab import Lab

        model, batch, *optimizer = self._operands(arguments, "model", "batch", "optimizer")
        if arguments.minibatch is None:
            raise UsageError("%harmony lab: how many samples has a minibatch? give --minibatch N")
        self.let_go()
        made = Lab(
            model,
            batch,
            optimizer[0] if optimizer else None,
            loss_fn=self._chosen_loss(arguments),
            minibatch_size=arguments.minibatch,
            machine=self._chosen_machine(arguments),
            precision=arguments.precision,
        )
        self._made, self._kept = weakref.ref(made), made
        return made

    def _plan(self, arguments: argparse.Namespace) -> Any:
        lab = self._lab_at_hand(arguments)
        if arguments.mode is not None:
            return lab.search(modes=(arguments.mode,))
        return lab.prepare().result

    def _compare(self, arguments: argparse.Namespace) -> Any:
        from harmony_lab.figures.comparison import Comparison

        lab = self._lab_at_hand(arguments).prepare()
        assert lab.result is not None
        assert lab.profile is not None
        if arguments.a is None:
            from harmony_lab.notebook.contenders import contenders_frame

            table = contenders_frame(lab.result, lab.profile, lab.machine, lab.minibatch_size)
            count = len(lab.result.candidates)  # of its first rows; baselines follow
            return (
                table.drop(index=range(_RANKS_SHOWN, count)).reset_index(drop=True) if count > _RANKS_SHOWN else table
            )
        if arguments.b is None:
            raise UsageError("%harmony compare: give two plans, by rank, name or text, or none to see all in figures")
        return Comparison(self._side(lab, arguments.a), self._side(lab, arguments.b))

    def _side(self, lab: "Lab", text: str) -> Any:
        """A plan by its rank, the name of a variable, its text, or ``chosen``; or a baseline by its name."""
        from harmony_lab.notebook.contenders import Contenders
        from harmony_lab.notebook.text import side
        from harmony_lab.plan import Plan

        if text.isdecimal():
            plans = [candidate.plan for candidate in lab.result.candidates] if lab.result else []
            if int(text) >= len(plans):
                raise UsageError(f"%harmony compare: there is no rank {text}; there are 0 to {len(plans) - 1}")
            return side(f"candidate {text}", lab.preview(plans[int(text)]))
        if text == "chosen" and lab.chosen is not None:
            return side("the chosen plan", lab.chosen)
        if text in Contenders.names and lab.profile is not None:
            return Contenders(lab.machine, lab.minibatch_size).side(text, lab.profile)
        if "=" in text:
            return side("the plan given", lab.preview(text))
        names = self._ipython.user_ns
        plan = names.get(text)
        if not isinstance(plan, Plan):
            what = f"a {type(plan).__name__}" if text in names else "no name in this notebook"
            raise UsageError(
                f"%harmony compare: {text!r} is {what}; give a rank, a Plan, its text, chosen, or one of "
                f"{', '.join(map(repr, Contenders.names))}"
            )
        return side(text, lab.preview(plan))

    def _launch(self, arguments: argparse.Namespace) -> Any:
        (loader,) = self._operands(arguments, "loader")
        lab = self._lab_at_hand(arguments)
        return lab.launch(loader, arguments.steps, max_grad_norm=arguments.max_grad_norm)

    def _help(self, _: argparse.Namespace) -> Any:
        return Usage()

    def _stop(self, arguments: argparse.Namespace) -> Any:
        run = self._lab_at_hand(arguments).run
        if run is None:
            raise UsageError("%harmony stop: nothing was launched yet; %harmony launch LOADER does")
        run.stop()
        return run

    def _report(self, arguments: argparse.Namespace) -> Any:
        try:
            return self._lab_at_hand(arguments).report(arguments.file)
        except OSError as error:
            why = error.strerror or error
            raise UsageError(
                f"%harmony report: cannot write {arguments.file!r}: {why}; give a file in a folder that is there"
            ) from None

    def _free(self, _: argparse.Namespace) -> Any:
        made = None if self._made is None else self._made()
        labs = {id(lab): lab for lab in (*self._views.open_labs(), made) if lab is not None and not lab.closed}
        trainers = [trainer for trainer in self._trainers() if not trainer.closed]
        return free(labs.values(), trainers, self._views.let_go)

    def _trace(self, cell: str) -> Any:
        shell = self._ipython
        source = shell.transform_cell(cell)
        name = shell.compile.cache(source, shell.execution_count, raw_code=cell)  # so that tracebacks show its lines
        code = shell.compile(shell.compile.ast_parse(source, filename=name), name, "exec")
        traced = TracedCell(lambda: [*self._trainers(), *self._views.open_labs()])
        exec(code, shell.user_ns)  # errors in here are the user's, with their traceback
        try:
            traces = traced.traces()
        except HarmonyError as error:
            raise UsageError(_line(error)) from None
        if not traces:
            raise UsageError(
                "%%harmony trace: no training step was taken in this cell; call step of an hl.Trainer that has a name, "
                "or launch a Lab"
            )
        return traces[0] if len(traces) == 1 else traces

    # -- names of the notebook ------------------------------------------------------------------------------------

    def _trainers(self) -> list[Any]:
        return list(held(self._ipython.user_ns, ("harmony_lab.trainer", "Trainer")))

    def _operands(self, arguments: argparse.Namespace, *names: str) -> list[Any]:
        """Values of the operands that were given."""
        given = [getattr(arguments, name) for name in names]
        if arguments.command == "profile" and given[1] is None:
            raise UsageError("%harmony profile: give MODEL and BATCH, or neither to profile the Lab's model")
        if arguments.command == "lab" and given[1] is None:
            raise UsageError("%harmony lab: give MODEL and BATCH, or neither to show the Lab there is")
        values = {name: self._value(value, name) for name, value in zip(names, given, strict=True) if value is not None}
        if "model" in values:
            from torch.nn import Module

            if not isinstance(values["model"], Module):
                kind = type(values["model"]).__name__
                raise UsageError(
                    f"%harmony {arguments.command}: {arguments.model!r} is a {kind}; MODEL is a torch.nn.Module"
                )
        return list(values.values())

    def _value(self, name: str, what: str) -> Any:
        namespace = self._ipython.user_ns
        if not name.isidentifier():
            raise UsageError(
                f"%harmony: {name!r} is no name, and only names are taken: {what} = {name} in a cell first"
            )
        if name not in namespace:
            raise UsageError(f"%harmony: there is no {name!r} in this notebook; define it in a cell first")
        return namespace[name]

    def _chosen_machine(self, arguments: argparse.Namespace) -> Any:
        """A machine by its name in the notebook or a preset's, or emulated as described; else what is found here."""
        from harmony_lab.machine import Machine

        if arguments.machine is None:
            return emulated(arguments) if described(arguments) else Machine.detect()
        named = self._ipython.user_ns.get(arguments.machine)
        if isinstance(named, Machine):
            return changed(named, arguments)
        try:
            return preset_with(arguments.machine, arguments)
        except HarmonyError as error:
            found = "there is none in this notebook" if named is None else f"here it is a {type(named).__name__}"
            raise UsageError(
                f"%harmony {arguments.command}: {arguments.machine!r} is no machine: {found}, and {_line(error)}"
            ) from None

    def _chosen_loss(self, arguments: argparse.Namespace) -> Any:
        if not arguments.loss:
            return None
        loss = self._value(arguments.loss, "loss")
        if not callable(loss):
            raise UsageError(
                f"%harmony {arguments.command}: {arguments.loss!r} is a {type(loss).__name__}; --loss is a function of "
                "(output, target)"
            )
        return loss

    def _lab_at_hand(self, arguments: argparse.Namespace) -> "Lab":
        if arguments.lab_name:
            from harmony_lab.lab import Lab

            given = self._value(arguments.lab_name, "lab")
            if not isinstance(given, Lab):
                raise UsageError(
                    f"%harmony {arguments.command}: {arguments.lab_name!r} is a {type(given).__name__}; --lab is a Lab"
                )
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


def _line(error: HarmonyError) -> str:
    """Its text in one line: what is wrong, then all that is."""
    first, *rest = (line.strip().removeprefix("- ") for line in str(error).splitlines())
    return f"{first} {'; '.join(rest)}".strip()
