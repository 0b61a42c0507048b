"""CallLog: what a forward pass asks of torch, call by call, so that two runs of it can be compared."""

import hashlib
import linecache
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from harmony_lab.profiler.nodes import USERS_LINE

__all__ = ["Call", "CallLog", "Difference", "Record", "first_difference", "is_installed", "is_users_file"]

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_DRAWS = ("rand", "normal", "uniform", "bernoulli", "exponential", "multinomial", "dropout")
_LARGEST_DIGEST = 1 << 20  # elements of a constant that are compared


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the function, its arguments without and with which results of earlier calls they are, the line."""

    function: str
    arguments: tuple[Any, ...]
    origins: tuple[Any, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part: the line of the user's code, and what it did in each."""

    where: str
    first: str
    second: str


class CallLog(TorchFunctionMode):
    """While active, records every call that gives a tensor or may change one.

    ``names``: of the tensors that are there before, by id.  ``lengths``: lines that ask for ``len`` of a tensor whose
    length is the number of samples, which makes it a constant.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.lengths: list[str] = []
        self._origins: dict[int, Any] = dict(names)
        self._varying: set[int] = set(names)
        self._last_node: fx.Node | None = None
        self._kept: list[Any] = []  # so that no id is used twice

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *(item for pair in sorted(kwargs.items()) for item in pair))
        origins = tuple(self._origin(tensor) for tensor in _tensors(given))
        where = _users_line()
        if _name(func) == "__len__" and isinstance(args[0].shape[0], torch.SymInt):
            self.lengths.append(where)
        result = func(*args, **kwargs)
        self._mark_nodes(where)
        made = _tensors(result)
        if made or result is None:
            call = Call(_name(func), tuple(_text(item) for item in given), origins, where)
            if any(draw in call.function for draw in _DRAWS) or any(id(t) in self._varying for t in _tensors(given)):
                self._varying.update(map(id, made or _tensors(given)[:1]))  # what an assignment writes to
            self._origins.update((id(tensor), (len(self.calls), place)) for place, tensor in enumerate(made))
            self._kept.append((given, made))
            self.calls.append(call)
        return result

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made in this run from nothing that was given, and without chance."""
        return id(tensor) in self._origins and id(tensor) not in self._varying

    def let_go(self) -> Iterator[FakeTensor]:
        """Give away the tensors without data that the run has seen, after which no other can be compared with it."""
        while self._kept:
            yield from (tensor for tensor in _tensors(self._kept.pop()) if isinstance(tensor, FakeTensor))

    def _mark_nodes(self, line: str) -> None:
        """Tell the line to the nodes that the call has made, where it is captured: torch only keeps it in modules."""
        mode = get_proxy_mode()
        if mode is None:
            return
        last = None
        for node in reversed(mode.tracer.graph.nodes):
            if node is self._last_node or USERS_LINE in node.meta.get("custom", {}):
                break
            node.meta["custom"] = {**node.meta.get("custom", {}), USERS_LINE: line}
            last = last or node
        self._last_node = last or self._last_node

    def _origin(self, tensor: torch.Tensor) -> Any:
        return self._origins[id(tensor)] if id(tensor) in self._origins else _content(tensor)


class Record:
    """The logs of all runs; no attribute is set, since torch.export puts back those of a module that a run has set."""

    def __init__(self) -> None:
        self._logs = [CallLog({})]

    @property
    def log(self) -> CallLog:
        """Of the last run."""
        return self._logs[-1]

    def begin(self, names: dict[int, str]) -> CallLog:
        """The log of a run that begins; ``names``: see ``CallLog``."""
        self._logs.append(CallLog(names))
        return self.log

    def forget(self) -> list[FakeTensor]:
        """Let go of what the runs have computed with; returns those without data that something else holds on to."""
        seen = [weakref.ref(tensor) for log in self._logs for tensor in log.let_go()]
        return list({id(tensor): tensor for ref in seen if (tensor := ref()) is not None}.values())


def first_difference(first: CallLog, second: CallLog, *, by_origin: bool) -> Difference | None:
    """Where two runs part, if they do.  ``by_origin``: also where the same call is made with other tensors."""
    for a, b in zip(first.calls, second.calls, strict=False):
        if (a.function, a.arguments) != (b.function, b.arguments):
            return Difference(a.where or b.where, _shown(a, b), _shown(b, a))
        if by_origin and a.origins != b.origins:
            return Difference(a.where, f"{a.function} of one tensor", f"{b.function} of another")
    if len(first.calls) == len(second.calls):
        return None
    more, less = sorted((first, second), key=lambda log: -len(log.calls))
    extra = more.calls[len(less.calls)]
    sides = (extra.function, "no such call")
    return Difference(extra.where, *(sides if more is first else sides[::-1]))


def is_users_file(filename: str) -> bool:
    """Whether code of that file is neither torch's nor Python's own nor of this package's capture."""
    return not filename.startswith(_NOT_THE_USERS) and (
        is_installed(filename) or not filename.startswith(_STANDARD_LIBRARY)
    )


def is_installed(filename: str) -> bool:
    """Whether the file is of an installed package."""
    return "site-packages" in filename or "dist-packages" in filename


def _shown(call: Call, other: Call) -> str:
    """The call with the arguments in which it differs."""
    if call.function != other.function or len(call.arguments) != len(other.arguments):
        return call.function
    differing = [str(a) for a, b in zip(call.arguments, other.arguments, strict=True) if a != b]
    return f"{call.function} with {', '.join(differing[:3])}"


def _name(func: Any) -> str:
    name = getattr(func, "__name__", None) or type(func).__name__
    owner = getattr(func, "__self__", None) if name in ("__get__", "__set__") else None
    return getattr(owner, "__name__", name)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _text(value: Any) -> Any:
    """Equal for equal arguments, whether sizes are symbols or numbers."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(_text(length) for length in value.shape)}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return repr(value.node.hint)
    if isinstance(value, dict):
        return tuple((key, _text(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_text(item) for item in value)
    if isinstance(value, slice):
        return "slice", _text(value.start), _text(value.stop), _text(value.step)
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        return repr(value)
    return type(value).__name__


def _content(tensor: torch.Tensor) -> str:
    """Of a tensor that was not there before and that no recorded call has made, such as one read from numpy."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    if not plain or tensor.numel() > _LARGEST_DIGEST or tensor.untyped_storage().size() == 0:
        return "a constant"
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _users_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename) and code.co_filename != "<string>":
            return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}: {_source(frame)}'
        frame = frame.f_back  # type: ignore[assignment] # None above the outermost
    return ""
