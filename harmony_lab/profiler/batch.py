"""The structure of a batch: which tensors it holds, under which names, and how to put it together again."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from harmony_lab.errors import DecomposeError

__all__ = ["BatchStructure", "BatchTensor", "TensorTree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensor:
    """A tensor of the batch.  ``batched``: dimension 0 counts samples; else the tensor is the same for all of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool


@dataclass(frozen=True, slots=True)
class _Tensor:
    index: int


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any


@dataclass(frozen=True, slots=True)
class _Container:
    """A container that ``build`` makes from its children; ``kind`` and ``keys`` are what another batch must share."""

    kind: str
    keys: tuple[Any, ...]
    children: tuple[Any, ...]
    build: Callable[[list[Any]], Any]


class TensorTree:
    """Tensors in nested mappings, sequences and dataclasses: which there are, and how to put others in their place.

    ``tensors``: name and tensor of each in the example, in order.
    """

    def __init__(self, example: Any, top_names: Sequence[str] = ()) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._tree = _describe(example, "", tuple(top_names), self.tensors)

    def build(self, tensors: Sequence[Any]) -> Any:
        return _build(self._tree, tensors)

    def match(self, value: Any, where: str) -> list[torch.Tensor]:
        """The tensors of a value of the same structure; raises ``DecomposeError`` for another."""
        return list(_match(self._tree, value, where))


class BatchStructure:
    """How an example batch is put together; flattens later batches and refuses those that differ.

    ``tensors`` in order; ``num_samples`` of the example: the length that most tensors have in dimension 0.
    """

    def __init__(self, example: Any, top_names: Sequence[str] = ()) -> None:
        self._tree = TensorTree(example, top_names)
        found = self._tree.tensors
        lengths = Counter(tensor.shape[0] for _, tensor in found if tensor.ndim)
        self.num_samples = lengths.most_common(1)[0][0] if lengths else 0  # ties: the first tensor's
        if self.num_samples == 0:
            raise DecomposeError(
                "the example batch holds no tensor with samples in dimension 0: give a batch as the model is trained "
                "on, such as {'input_ids': tensor of (samples, length), 'labels': ...}"
            )
        self.tensors = tuple(
            BatchTensor(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                batched=bool(tensor.ndim) and tensor.shape[0] == self.num_samples,
            )
            for name, tensor in found
        )
        self.example = tuple(tensor for _, tensor in found)

    def describe(self) -> str:
        """Its tensors in words."""
        shapes = ("x".join(map(str, spec.shape)) or "a number" for spec in self.tensors)
        return ", ".join(f"{spec.name}: {shape}" for spec, shape in zip(self.tensors, shapes, strict=True))

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The batch again, of other tensors."""
        return self._tree.build(tensors)

    def flatten(self, batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Tensors by name and ``{"batch": number of samples}``.

        Raises ``DecomposeError`` for a batch of another structure or size.
        """
        found = self._tree.match(batch, "the batch")
        samples = next(
            (tensor.shape[0] for spec, tensor in zip(self.tensors, found, strict=True) if spec.batched and tensor.ndim),
            0,
        )
        if samples == 0:
            raise DecomposeError("the batch has no samples (dimension 0 has length 0): skip empty batches")
        problems: list[str] = []
        for spec, tensor in zip(self.tensors, found, strict=True):
            problems += _differences(spec, tensor, samples)
        if problems:
            raise DecomposeError(
                "this batch does not fit the example batch the model was decomposed with: " + "; ".join(problems)
            )
        return {spec.name: tensor for spec, tensor in zip(self.tensors, found, strict=True)}, {"batch": samples}


def _differences(spec: BatchTensor, tensor: torch.Tensor, samples: int) -> Iterator[str]:
    if tensor.dtype != spec.dtype:
        yield f"{spec.name} is {tensor.dtype}, expected {spec.dtype}: convert it"
    expected = (samples, *spec.shape[1:]) if spec.batched else spec.shape
    if tensor.ndim != len(expected):
        yield f"{spec.name} has {tensor.ndim} dimensions, expected {len(expected)}"
        return
    for dim, (length, want) in enumerate(zip(tensor.shape, expected, strict=True)):
        if length != want and dim == 0 and spec.batched:
            yield f"{spec.name} has {length} samples where another tensor has {want}"
        elif length != want:
            yield (
                f"{spec.name} has length {length} in dimension {dim}, expected {want} (only the number of samples "
                f"may vary): pad or trim to {want}, or decompose again with an example batch of length {length}"
            )


def _children(value: Any) -> tuple[str, tuple[Any, ...], list[Any], Callable[[list[Any]], Any]] | None:
    """(kind, keys, children, build) of a container; None for anything else."""
    if isinstance(value, Mapping):
        keys = tuple(value)
        return "mapping", keys, [value[key] for key in keys], lambda items: dict(zip(keys, items, strict=True))
    if isinstance(value, list):
        return "sequence", tuple(range(len(value))), list(value), list
    if isinstance(value, tuple):
        make: Any = type(value)
        fields_of_tuple = getattr(make, "_fields", None)
        if fields_of_tuple is not None:
            return make.__qualname__, fields_of_tuple, list(value), lambda items: make(*items)
        return "sequence", tuple(range(len(value))), list(value), tuple
    if is_dataclass(value) and not isinstance(value, type):
        record = type(value)
        names = tuple(field.name for field in fields(value) if field.init)
        items = [getattr(value, name) for name in names]
        return record.__qualname__, names, items, lambda items: record(**dict(zip(names, items, strict=True)))
    return None


def _describe(value: Any, name: str, top_names: tuple[str, ...], found: list[tuple[str, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        found.append((name or "input", value))
        return _Tensor(len(found) - 1)
    container = _children(value)
    if container is None:
        _refuse_cache(value, name)
        return _Constant(value)
    kind, keys, items, build = container
    labels = top_names if len(top_names) == len(keys) else keys
    children = tuple(
        _describe(item, f"{name}.{label}" if name else str(label), (), found)
        for label, item in zip(labels, items, strict=True)
    )
    return _Container(kind, keys, children, build)


def _refuse_cache(value: Any, name: str) -> None:
    """A cache of keys and values grows in forward: recompute, another forward, would find another."""
    kinds = [kind.__name__ for kind in type(value).__mro__]
    if any(kind.endswith("Cache") for kind in kinds):
        raise DecomposeError(
            f"{name or 'the batch'} is a key-value cache ({kinds[0]}), which grows in forward, so that recompute would "
            "see another: training needs none; leave it out, and pass use_cache=False to a model that makes its own"
        )


def _build(tree: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(tree, _Tensor):
        return tensors[tree.index]
    if isinstance(tree, _Constant):
        return tree.value
    return tree.build([_build(child, tensors) for child in tree.children])


def _parts(kind: str, keys: tuple[Any, ...]) -> int | list[Any]:
    return len(keys) if kind == "sequence" else list(keys)


def _match(tree: Any, value: Any, where: str) -> Iterator[torch.Tensor]:
    """The tensors of a batch of the same structure, in order."""
    if isinstance(tree, _Tensor):
        if not isinstance(value, torch.Tensor):
            raise DecomposeError(f"{where} is a {type(value).__name__}, expected a tensor as in the example batch")
        yield value
    elif isinstance(tree, _Constant):
        if type(value) is not type(tree.value) or (value is not tree.value and value != tree.value):
            raise DecomposeError(
                f"{where} is {value!r}, but the model was decomposed with {tree.value!r}: values that are not "
                "tensors are fixed; decompose again with an example batch that has this value"
            )
    else:
        container = _children(value)
        if container is None or container[0] != tree.kind or set(container[1]) != set(tree.keys):
            given = type(value).__name__ + ("" if container is None else f" of {_parts(container[0], container[1])}")
            wanted = f"{tree.kind} of {_parts(tree.kind, tree.keys)}"
            raise DecomposeError(f"{where} is a {given}, expected a {wanted} as in the example batch")
        items = dict(zip(container[1], container[2], strict=True))
        for key, child in zip(tree.keys, tree.children, strict=True):
            yield from _match(child, items[key], f"{where}[{key!r}]")
