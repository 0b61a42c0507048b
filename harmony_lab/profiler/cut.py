"""Where to cut a computation into layers: at modules that are called one after another, else where little crosses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise, takewhile

from torch import nn

from harmony_lab.errors import DecomposeError

__all__ = ["Segment", "Step", "choose_segments"]

_MIN_SHARE = 0.01  # a list of modules with less of the model's parameters is part of a layer, not a list of layers
_LARGE_SHARE = 0.2  # a layer with more of the model's parameters is cut further, if it is
_MOSTLY = 0.8  # to this share a list of modules itself (a stage of a ResNet or Swin)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the computation: the modules it runs in, outermost first, and the parameters it reads."""

    path: tuple[str, ...]
    parameters: frozenset[str]


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [start, stop), a layer."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    start: int
    stop: int
    parameters: frozenset[str]


def choose_segments(
    model: nn.Module,
    steps: Sequence[Step],
    crossing_bytes: Callable[[], Sequence[int]],
    cut: Sequence[str] | None = None,
) -> tuple[Segment, ...]:
    """Contiguous segments that cover all steps.  ``crossing_bytes()``: of the values alive before each step.

    Without ``cut``: one segment per child of the outermost ModuleLists and Sequentials whose children run one after
    another (of the model itself where it has none), one for what comes before, between and after; segments without
    parameters join their neighbour.  A model without modules to cut at is cut between parameters where no more bytes
    cross than before.  With ``cut``: at the first step of each named module.
    """
    if cut is not None:
        starts = {0: ""} | {_first_step(model, steps, name): name for name in cut}
        return tuple(_segments(steps, starts))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    starts = {0: ""}
    for container in _containers(model, steps, sizes):
        children = _children(steps, container)
        for child in children:
            if child.parameters:
                starts[child.start] = child.name
        starts.setdefault(children[-1].stop, "")
    segments = _merged(steps, list(_segments(steps, starts)))
    if len(segments) == 1:
        segments = list(_segments(steps, dict.fromkeys([0, *_narrow_places(steps, crossing_bytes())], "")))
    return tuple(segments)


def _narrow_places(steps: Sequence[Step], crossing_bytes: Sequence[int]) -> Iterator[int]:
    """The place between each two steps that read parameters where the least crosses, if it is no more than before."""
    readers = [index for index, step in enumerate(steps) if step.parameters]
    before = None
    for first, last in pairwise(readers):
        place = min(range(first + 1, last + 1), key=lambda index: (crossing_bytes[index], -index))
        if before is None or crossing_bytes[place] <= before:
            yield place
        before = crossing_bytes[place]


def _children(steps: Sequence[Step], container: str) -> list[_Child]:
    """The container's children in the order they run; empty when they do not run one after another."""
    found: dict[str, _Child] = {}
    for index, step in enumerate(steps):
        for name in step.path:
            if name.rpartition(".")[0] == container and name:
                old = found.get(name, _Child(name, index, index, frozenset()))
                found[name] = _Child(name, old.start, index + 1, old.parameters | step.parameters)
                break
    children = list(found.values())
    apart = all(a.stop <= b.start for a, b in pairwise(children))
    return children if apart and sum(bool(child.parameters) for child in children) >= 2 else []


def _containers(model: nn.Module, steps: Sequence[Step], sizes: Mapping[str, int]) -> list[str]:
    """Names of the modules at whose children to cut."""
    chosen: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and _children(steps, name):
            outer = [other for other in chosen if _inside(name, other)]
            if _share(sizes, name) >= _MIN_SHARE and (not outer or _divides(sizes, name, max(outer, key=len))):
                chosen.append(name)
    return chosen or list(_only_container(model, steps))


def _inside(name: str, container: str) -> bool:
    return not container or name.startswith(f"{container}.")


def _divides(sizes: Mapping[str, int], name: str, outer: str) -> bool:
    """Whether a list of modules within a child of ``outer`` is that child, or most of one that is large."""
    child = f"{outer}.{name.removeprefix(outer).strip('.').partition('.')[0]}".strip(".")
    return child == name or (
        _share(sizes, child) >= _LARGE_SHARE and _share(sizes, name) >= _MOSTLY * _share(sizes, child)
    )


def _share(sizes: Mapping[str, int], name: str) -> float:
    """The share of the model's parameters in a module."""
    own = sum(size for parameter, size in sizes.items() if _inside(parameter, name))
    return own / max(1, sum(sizes.values()))


def _only_container(model: nn.Module, steps: Sequence[Step]) -> Iterator[str]:
    """The model, or the one child that holds everything, whose children run one after another."""
    name, module = "", model
    while True:
        if _children(steps, name):
            yield name
            return
        below = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
        if len(below) != 1:
            return
        name, module = f"{name}.{below[0][0]}".removeprefix("."), below[0][1]


def _segments(steps: Sequence[Step], starts: Mapping[int, str]) -> Iterator[Segment]:
    begins = sorted(start for start in starts if start < len(steps))
    for start, stop in zip(begins, [*begins[1:], len(steps)], strict=True):
        yield Segment(starts[start] or _name(steps[start:stop]), start, stop)


def _name(steps: Sequence[Step]) -> str:
    """The modules that own what a segment reads: one or two, or what they are part of; else the first module.

    What is read in no module of its own goes by the names of the parameters.
    """
    owners = list(dict.fromkeys(step.path[-1] for step in steps if step.path and step.parameters))
    owners = owners or list(dict.fromkeys(step.path[-1] for step in steps if step.path))[:1]
    owners = owners or list(dict.fromkeys(name for step in steps for name in sorted(step.parameters))) or ["loss"]
    if len(owners) <= 2:
        return " + ".join(owners)
    columns = zip(*(owner.split(".") for owner in owners), strict=False)
    common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return ".".join(common) if common else " + ".join([*owners[:2], "..."])


def _merged(steps: Sequence[Step], segments: list[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for segment in segments:
        idle = not any(step.parameters for step in steps[segment.start : segment.stop])
        first_is_idle = len(merged) == 1 and not any(step.parameters for step in steps[: merged[0].stop])
        if merged and idle:
            merged[-1] = Segment(merged[-1].name, merged[-1].start, segment.stop)
        elif first_is_idle:
            merged[-1] = Segment(segment.name, merged[-1].start, segment.stop)
        else:
            merged.append(segment)
    return merged


def _first_step(model: nn.Module, steps: Sequence[Step], wanted: str) -> int:
    for index, step in enumerate(steps):
        for name in step.path:
            if name == wanted or name.startswith(f"{wanted}."):
                return index
    names = [name for name, _ in model.named_modules() if name]
    close = ", ".join(get_close_matches(wanted, names, n=3, cutoff=0.4)) or ", ".join(names[:5])
    if wanted in names:
        raise DecomposeError(f"cut: module {wanted} computes nothing that the loss needs; cut at a module that does")
    raise DecomposeError(f"cut: the model has no module {wanted!r}; close names: {close}")
