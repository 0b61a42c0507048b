"""Repeat: the model's forward run again, without data, to tell what a graph would hold as it was once.

A graph repeats what the Python code did when it was captured.  Counters, chance and the clock in Python may make it do
something else in the next step: so it is run twice more on tensors that have shapes and no data, and every call of
torch is compared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functional_call

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.call_log import CallLog, Difference, Record, first_difference
from harmony_lab.profiler.nodes import describe
from harmony_lab.profiler.python_state import KeptAttributes, Number, StateWatch
from harmony_lab.profiler.refusals import refuse_python_chance
from harmony_lab.warning import warn

__all__ = ["check_modules_repeat", "check_repeats", "refuse_changed"]

T = TypeVar("T")

_CURE = (
    "Keep what changes in a buffer (register_buffer) and compute with it as a tensor, pass it with the batch, or draw "
    "it with torch (torch.rand, dropout)"
)


def check_repeats(
    training: nn.Module,
    record: Record,
    leaves: Sequence[torch.Tensor],
    program: ExportedProgram,
    export_again: Callable[[], ExportedProgram],
    kept: KeptAttributes,
) -> list[Number]:
    """What the forward may read in Python, having done the same in three runs.

    ``record`` holds the log of each run of ``training``, at first that of the run that gave the program.
    ``export_again()`` is asked only where a run without data does something else than that one did, or fails.

    Raises ``DecomposeError`` where runs differ; warns where the forward changes something in Python and yet does the
    same.
    """
    captured = record.log
    runs = _Runs(training, record, leaves, kept)
    try:
        last = runs.settled()
    except DecomposeError:
        raise
    except Exception:
        last = None
    changed = runs.changed()
    difference = None if last is None else first_difference(captured, last, by_origin=False)
    if difference is not None and changed:
        raise _refused(difference, changed)
    if difference is not None or last is None:
        kept.drop_fake_tensors()
        _compare_programs(program, export_again)
    _point_out(changed, "so will the layers always; if it is to compute something else later, they will not")
    return [] if runs.watch is None else runs.watch.read()


def check_modules_repeat(
    name: str, parts: Iterable[tuple[str, Any]], given: Mapping[int, str], run: Callable[[], T]
) -> tuple[T, T]:
    """What two runs of a layer of modules give, the first of them looked at, as are the calls of torch in both.

    ``given``: names of the tensors that it is given, by id.  Raises and warns as above: backward runs forward again.
    """
    watch, logs, results = StateWatch(parts), [], []
    for count in range(2):
        logs.append(CallLog(dict(given)))
        with refuse_python_chance(), nullcontext() if count else watch.watching(), logs[-1]:
            results.append(run())
    difference = first_difference(*logs, by_origin=True)
    if difference is not None:
        raise _refused(difference, watch.changed(), f"the forward of {name}", "Backward runs it again to recompute")
    _point_out(watch.changed(), "it must always, since backward runs it again")
    return results[0], results[1]


def _point_out(changed: Sequence[str], consequence: str) -> None:
    if changed:
        warn(
            f"the model's forward changes in Python: {', '.join(changed[:5])}. Run several times it computed the same, "
            f"and {consequence}. {_CURE}",
        )


def refuse_changed(numbers: Sequence[Number]) -> None:
    """Raise ``DecomposeError`` where a number that the graph holds has another value now; warn for flags and texts."""
    changed = [number for number in numbers if number.changed]
    if not changed:
        return
    shown = ", ".join(f"{number.name} was {number.value!r} and is {number.now()!r}" for number in changed[:5])
    message = (
        f"since the model was decomposed, Python state that its forward reads has changed: {shown}. The layers hold "
        "the old value: decompose again (make the Lab again), or keep it in a buffer or in the batch"
    )
    if any(type(number.value) in (int, float) for number in changed):
        raise DecomposeError(message)
    warn(message)


class _Runs:
    """Runs of a forward pass on tensors that have no data, under the conditions in which it is exported."""

    def __init__(
        self, training: nn.Module, record: Record, leaves: Sequence[torch.Tensor], kept: KeptAttributes
    ) -> None:
        self._training, self._record, self._kept = training, record, kept
        self.watch: StateWatch | None = None
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*training.named_parameters(), *training.named_buffers()]
        self._state: dict[str, torch.Tensor] = {name: self._mode.from_tensor(tensor) for name, tensor in tensors}
        self._leaves = [self._mode.from_tensor(leaf) for leaf in leaves]

    def settled(self) -> CallLog:
        """The last of several runs that do the same.

        Raises ``DecomposeError`` where they do not.  Two things may make a first run another: some code does once what
        it then never does again, such as to load a kernel; and some keeps what it computes from nothing that it is
        given, such as a mask, which is the same whether it is kept or computed again.
        """
        self._kept.drop_fake_tensors()
        first = self._run()
        caches = all(map(first.is_constant, self._kept.fake_tensors()))
        names = [(path.removeprefix("model").removeprefix("."), part) for path, part in self._training.named_modules()]
        self.watch = StateWatch(names)
        with self.watch.watching():
            second = self._run()
        difference = first_difference(first, second, by_origin=True)
        if difference is None:
            return second
        if caches and self._kept.fake_tensors() and not self.changed():
            self._kept.put_back()
            third = self._run()
            self._kept.put_back()
            again = first_difference(first, third, by_origin=True)
        else:
            self._kept.drop_fake_tensors()
            third = self._run()
            again = first_difference(second, third, by_origin=False)
        last = self._run()
        if again is not None or first_difference(third, last, by_origin=True) is not None:
            raise _refused(difference, self.changed())
        return last

    def changed(self) -> list[str]:
        """What the second run has changed in Python."""
        return [] if self.watch is None else self.watch.changed()

    def _run(self) -> CallLog:
        with self._mode, _compiling_state_context():
            functional_call(self._training, self._state, (self._leaves,))
        return self._record.log


def _compare_programs(program: ExportedProgram, export_again: Callable[[], ExportedProgram]) -> None:
    try:
        again = export_again()
    except DecomposeError:
        raise
    except Exception as error:
        raise DecomposeError(
            f"the model's forward can be captured once and not again ({type(error).__name__}: {str(error)[:200]}): it "
            "keeps something between calls, such as tensors in a cache outside the model. Run the model once on a "
            "batch before it is decomposed, so that the cache is full; or keep what it holds in a buffer of the model"
        ) from error
    place: dict[fx.Node, int] = {}
    for a, b in zip(program.graph.nodes, again.graph.nodes, strict=False):
        place[a] = place[b] = len(place)
        if _key(a, place) != _key(b, place):
            raise _refused(Difference(describe(a), _shown(a), _shown(b)), [])
    counts = [len(each.graph.nodes) for each in (program, again)]
    if counts[0] != counts[1]:
        raise _refused(Difference("", *(f"{count} operations" for count in counts)), [])
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor) and not torch.equal(value, again.constants[name]):
            raise _refused(Difference("", f"the constant {name} has some values", "others"), [])


def _shown(node: fx.Node) -> str:
    return node.format_node() or str(node)


def _key(node: fx.Node, place: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: f"#{place.get(argument)}")
    target = node.target if node.op == "placeholder" or callable(node.target) else ""
    return node.op, str(target), repr(arguments)


def _refused(
    difference: Difference,
    changed: Sequence[str],
    what: str = "the model's forward",
    consequence: str = "Layers would repeat what it did once",
) -> DecomposeError:
    where = f" at {difference.where}" if difference.where else ""
    state = f". It changes numbers that it keeps in Python: {', '.join(changed[:5])}" if changed else ""
    return DecomposeError(
        f"{what} does something else each time it runs{where}: {difference.first} in one run, "
        f"{difference.second} in the next{state}. {consequence}. {_CURE}"
    )
