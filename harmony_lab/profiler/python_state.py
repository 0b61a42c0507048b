"""Python state: numbers outside tensors that a forward pass can read, and which of them it changes.

Found by looking, at the first call of every Python function that runs, at what its code can reach: attributes,
globals, closures, and the elements of lists and dictionaries in them.  Globals of installed packages are left out.
"""

import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from harmony_lab.profiler.call_log import is_installed, is_users_file

__all__ = ["KeptAttributes", "Number", "StateWatch"]

_SCALARS = (bool, int, float, str, type(None))
_DEPTH = 3
_MOST_ITEMS = 256
_MISSING = object()
_NOT_LOOKED_INTO = frozenset({*sys.stdlib_module_names, "torch"})
_INTERNAL = ("_parameters", "_buffers", "_modules")
_SWITCHED = ("training", "use_cache", "gradient_checkpointing")  # means something else to a graph, or nothing


@dataclass(frozen=True, slots=True)
class Number:
    """A number, flag or text in Python: ``name`` as the user would write it, ``key`` under which code asks for it."""

    name: str
    holder: Any
    key: Any
    asked_by: str
    value: Any

    def now(self) -> Any:
        try:
            return _held(self.holder, self.key)
        except (KeyError, IndexError, ValueError):
            return _MISSING

    @property
    def changed(self) -> bool:
        now = self.now()
        return now is not self.value and (type(now) is not type(self.value) or now != self.value)


class StateWatch:
    """Use ``with watch.watching():`` around one run of modules and functions, given with their names."""

    def __init__(self, parts: Iterable[tuple[str, Any]]) -> None:
        self._numbers: dict[tuple[int, Any], Number] = {}
        self._asked: set[str] = set()
        self._codes: set[CodeType] = set()
        self._seen: dict[int, Any] = {}
        for name, part in parts:
            if isinstance(part, nn.Module):
                self._attributes(part, name, _DEPTH)
                for kind in type(part).__mro__:
                    self._class(kind)
                    self._of_class(part, name, kind)
            else:
                self._inside(part, name, name, _DEPTH)

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            if before is None or callable(before):
                sys.setprofile(before)
            else:  # cProfile's, as under %prun
                sys.setprofile(None)
                before.enable()

    def changed(self) -> list[str]:
        """Names of what the run changed."""
        return list(dict.fromkeys(number.name for number in self._asked_for() if number.changed))

    def read(self) -> list[Number]:
        """What the run may have read and did not change."""
        return [number for number in self._asked_for() if not number.changed]

    def _asked_for(self) -> list[Number]:
        return [number for number in self._numbers.values() if number.asked_by in self._asked]

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in self._codes:
            self._codes.add(code)
            if is_users_file(code.co_filename):
                self._asked.update(code.co_names, code.co_freevars)
                for name in () if is_installed(code.co_filename) else code.co_names:
                    if name in frame.f_globals:
                        self._item(frame.f_globals, name, name, name, _DEPTH)

    # -- what can be reached --------------------------------------------------------------------------------------

    def _item(self, holder: Any, key: Any, name: str, asked_by: str, depth: int) -> None:
        value = _held(holder, key)
        if type(value) in _SCALARS:
            self._numbers.setdefault((id(holder), key), Number(name, holder, key, asked_by, value))
        else:
            self._inside(value, name, asked_by, depth - 1)

    def _inside(self, value: Any, name: str, asked_by: str, depth: int) -> None:
        kind = type(value)  # not isinstance, which some objects answer by running code
        if depth <= 0 or id(value) in self._seen or issubclass(kind, (torch.Tensor, type, ModuleType)):
            return
        if issubclass(kind, (list, tuple)):
            self._seen[id(value)] = value
            length = list.__len__(value) if issubclass(kind, list) else tuple.__len__(value)
            for index in range(min(length, _MOST_ITEMS)):
                self._item(value, index, f"{name}[{index}]", asked_by, depth)
        elif issubclass(kind, dict):
            self._seen[id(value)] = value
            for key in list(dict.keys(value))[:_MOST_ITEMS]:
                shown = repr(key) if type(key) in _SCALARS else type(key).__name__
                self._item(value, key, f"{name}[{shown}]", asked_by, depth)
        elif issubclass(kind, MethodType):
            self._inside(value.__self__, type(value.__self__).__name__, asked_by, depth)
        elif issubclass(kind, FunctionType):
            self._closure(value, depth)
        elif issubclass(kind, SimpleNamespace) or kind.__module__.partition(".")[0] not in _NOT_LOOKED_INTO:
            self._attributes(value, name, depth)

    def _closure(self, function: FunctionType, depth: int) -> None:
        self._seen[id(function)] = function
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                self._item(cell, None, name, name, depth)

    def _class(self, kind: type) -> None:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<notebook>"
        if id(kind) in self._seen or not is_users_file(file) or kind is object:
            return
        self._seen[id(kind)] = kind
        for key in vars(kind):
            if not key.startswith("__") or isinstance(vars(kind)[key], FunctionType):
                self._item(vars(kind), key, f"{kind.__name__}.{key}", key, _DEPTH)

    def _of_class(self, module: nn.Module, name: str, kind: type) -> None:
        """What a module has from its class, until it is given one of its own (``model.beta = 0``)."""
        for key, value in vars(kind).items() if id(kind) in self._seen else ():
            if type(value) in _SCALARS and key not in module.__dict__ and key not in (*_INTERNAL, *_SWITCHED):
                held = ChainMap(module.__dict__, vars(kind))  # type: ignore[arg-type] # only read
                self._numbers[id(held), key] = Number(f"{name}.{key}".lstrip("."), held, key, key, value)

    def _attributes(self, value: Any, name: str, depth: int) -> None:
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict):
            return
        self._seen[id(value)] = value
        for key in list(held):
            if isinstance(key, str) and key not in _INTERNAL and key not in _SWITCHED:
                self._item(held, key, f"{name}.{key}".lstrip("."), key, depth)


def _held(holder: Any, key: Any) -> Any:
    """What is there, without code of its own that a subclass may run when asked."""
    kind = type(holder)
    if kind is CellType:
        return holder.cell_contents
    for plain in (dict, list, tuple):
        if issubclass(kind, plain):
            return plain.__getitem__(holder, key)
    return holder[key]  # of a class


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


class KeptAttributes:
    """The attributes of a model's modules, lists and dictionaries among them, to be put back as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._content: list[tuple[Any, Any]] = []
        for module in model.modules():
            self._held.append((vars(module), dict(vars(module))))
            for value in vars(module).values():
                if type(value) in (list, dict, set):
                    self._content.append((value, value.copy()))

    def put_back(self) -> None:
        for held, before in self._held:
            if not _same(held, before):
                held.clear()
                held.update(before)
        for value, before in self._content:
            _refill(value, before)

    def fake_tensors(self) -> list[FakeTensor]:
        """Those that are there now."""
        values = [value for held, _ in self._held for value in held.values()]
        return [item for value in values for item in _items(value) if isinstance(item, FakeTensor)]

    def drop_fake_tensors(self) -> None:
        """Put back attributes, lists and dictionaries that hold tensors of a run without data."""
        for held, before in self._held:
            for key in [key for key, value in held.items() if _holds_fake(value)]:
                held.pop(key)
                held.update({key: before[key]} if key in before else {})
        for value, before in self._content:
            if _holds_fake(value):
                _refill(value, before)


def _holds_fake(value: Any) -> bool:
    return any(isinstance(item, FakeTensor) for item in _items(value))


def _items(value: Any) -> list[Any]:
    if type(value) in (list, dict, set):
        return list(value.values() if isinstance(value, dict) else value)
    return [value]


def _refill(value: Any, before: Any) -> None:
    if _same(value, before):
        return
    value.clear()
    if isinstance(value, list):
        value.extend(before)
    else:
        value.update(before)


def _same(value: Any, before: Any) -> bool:
    if len(value) != len(before):
        return False
    if isinstance(value, set):
        return bool(value == before)
    pairs = zip(value, before, strict=True)
    if isinstance(value, dict):
        return all(a == b and value[a] is before[b] for a, b in pairs)
    return all(a is b for a, b in pairs)
