"""Samples in a captured graph: which rows of each tensor are which sample's, and where samples may meet.

A tensor with one dimension that grows with the number of samples holds, along it, one or more *blocks*, each of which
has some rows of every sample: ``(blocks, samples, rows)``.  ``x.view(n * length, width)`` is one block of ``length``
rows per sample; ``cat([x, y])`` is two blocks of one row.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.nodes import (
    argument,
    describe,
    growing_dims,
    is_batch_norm,
    op_family,
    tensor_inputs,
    uses_number_of_samples,
)
from harmony_lab.profiler.randomness import BatchDim

__all__ = ["Located", "batch_dim", "locate", "meetings"]

Located = Mapping[fx.Node, BatchDim | None]
"""Where the samples are in each tensor; None where that is not known, or is no single dimension."""

_NO_SAMPLES = BatchDim(None, 1)
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "_reshape_alias")
_PARTS = ("slice", "narrow")
_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")


# -- where samples are ------------------------------------------------------------------------------------------------


def locate(nodes: Iterable[fx.Node], symbol: Any) -> dict[fx.Node, BatchDim | None]:
    found: dict[fx.Node, BatchDim | None] = {}
    for node in nodes:
        growing = growing_dims(node, symbol)
        if growing is None or len(growing) > 1:
            found[node] = None
        elif not growing:
            found[node] = _NO_SAMPLES
        else:
            (dim, rows), *_ = growing
            blocks = 1 if rows == 1 else _blocks(node, dim, rows, found, symbol)
            found[node] = None if blocks is None else BatchDim(dim, rows, blocks)
    return found


def batch_dim(node: fx.Node, located: Located, symbol: Any) -> BatchDim:
    """Where the samples are in a node's tensor; raises ``DecomposeError`` where that is not known."""
    found = located[node]
    if found is None:
        shape = tuple(str(length) for length in node.meta["val"].shape)
        raise DecomposeError(
            f"the tensor of {describe(node)} has shape {shape}, in which the samples ({symbol} of them) are not laid "
            "out along one dimension in a known way; pass cut=[...] with names of modules between which only ordinary "
            "activations flow"
        )
    return found


def _blocks(node: fx.Node, dim: int, rows: int, located: Located, symbol: Any) -> int | None:
    """How many blocks a tensor with several rows per sample has."""
    family = op_family(node)
    inputs = tensor_inputs(node)
    if family in _RESHAPES:
        return _reshaped(inputs[0], node, dim, rows, located)
    if family in ("cat", "concat", "concatenate") and argument(node, 1, "dim", 0) % node.meta["val"].ndim == dim:
        return _joined(node.args[0], located)
    if family == "repeat":
        source, times = located[inputs[0]], argument(node, 1, "repeats")[dim]
        return source.blocks * times if source is not None and isinstance(times, int) else None
    if family == "repeat_interleave":
        source = located[inputs[0]]
        return source.blocks if source is not None else None
    if family in _PARTS or (family == "getitem" and op_family(node.args[0]) in _SPLITS):  # type: ignore[arg-type]
        return _part(located[inputs[0]], rows)
    alike = {located[source] for source in inputs if _num_rows(source, symbol) == rows}
    blocks = {source.blocks for source in alike if source is not None}
    return blocks.pop() if None not in alike and len(blocks) == 1 else None


def _num_rows(node: fx.Node, symbol: Any) -> int:
    """Rows per sample, in however many dimensions."""
    return math.prod(rows for _, rows in growing_dims(node, symbol) or ())


def _reshaped(source: fx.Node, node: fx.Node, dim: int, rows: int, located: Located) -> int | None:
    """The elements stay in order: those of one sample within a block stay together if the new rows divide them."""
    before = located[source]
    if before is None or before.dim is None:
        return None
    outer, inner = before.blocks * _extent(source, 0, before.dim), before.rows // before.blocks
    inner *= _extent(source, before.dim + 1, None)
    outside, inside = _extent(node, 0, dim), _extent(node, dim + 1, None)
    if inside == 0 or inner % inside or outer % outside or (outer // outside) * (inner // inside) != rows:
        return None
    return outer // outside


def _extent(node: fx.Node, start: int, stop: int | None) -> int:
    return math.prod(int(length) for length in node.meta["val"].shape[start:stop])


def _joined(parts: Any, located: Located) -> int | None:
    found = [located[part] for part in parts]
    known = [part for part in found if part is not None]
    if len(known) < len(found) or len({part.rows // part.blocks for part in known}) != 1:
        return None
    return sum(part.blocks for part in known)


def _part(whole: BatchDim | None, rows: int) -> int | None:
    """Of a slice or one piece of a split, along whatever dimension."""
    if whole is None:
        return None
    if whole.rows == rows:
        return whole.blocks
    return rows if whole.rows == whole.blocks else None


# -- where samples meet -----------------------------------------------------------------------------------------------

# Ops whose `dim` says where something is, not along what to compute.
_MOVES = ("transpose", "permute", "movedim", "swapaxes", "swapdims", "t", "select", "unbind", "expand", "sym_size")
_PLACES = (*_RESHAPES, *_PARTS, *_SPLITS, *_MOVES, "cat", "stack", "repeat_interleave")
_COPIES = ("to", "_to_copy", "alias", "expand", "clone", "contiguous")
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow")
_VALUELESS = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")


def meetings(nodes: Iterable[fx.Node], located: Located, symbol: Any, apart: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes in which what one sample gives may reach another, but for batch norm and the nodes ``apart``.

    Too many rather than too few: whether samples do meet there is for a run to tell.
    """
    varying: set[fx.Node] = set()
    found = []
    for node in nodes:
        inputs = [source for source in tensor_inputs(node) if source in varying]
        placeholder = node.op == "placeholder" and bool(growing_dims(node, symbol))
        if placeholder or (inputs and op_family(node) not in _VALUELESS):
            varying.add(node)
        if inputs and node not in apart and not is_batch_norm(node) and _may_meet(node, inputs, located, symbol):
            found.append(node)
    return found


def _may_meet(node: fx.Node, inputs: list[fx.Node], located: Located, symbol: Any) -> bool:
    if op_family(node) in _VALUELESS:
        return False
    if op_family(node) in _ARITHMETIC and any(uses_number_of_samples(value, symbol) for value in node.args):
        return True
    growing = growing_dims(node, symbol)
    grows_before = any(growing_dims(source, symbol) != [] for source in inputs)
    if isinstance(node.meta.get("val"), torch.Tensor) and grows_before and (growing is None or len(growing) != 1):
        return True
    return any(
        _mixes(node, source, place.dim) for source in inputs if (place := located[source]) and place.dim is not None
    )


def _mixes(node: fx.Node, source: fx.Node, dim: int) -> bool:
    """Whether an op computes along that dimension of one of its inputs."""
    family, rank = op_family(node), int(source.meta["val"].ndim)
    first = bool(node.args) and node.args[0] is source
    if family == "index":
        indices = argument(node, 1, "indices")
        return first and dim < len(indices) and indices[dim] is not None and not _counts_up(indices[dim])
    if family == "scaled_dot_product_attention":
        return dim >= rank - 2
    if family in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        expected = 0 if argument(node, _last_argument(node), "batch_first") else 1
        return first and rank == 3 and dim != expected
    if family == "linear":
        return first and dim == rank - 1
    if family in ("layer_norm", "rms_norm"):
        return first and dim >= rank - len(argument(node, 1, "normalized_shape"))
    if family in ("group_norm", "instance_norm") or family.startswith("conv"):
        return first and dim != 0
    if "pool" in family or family.startswith("upsample"):
        spatial = next((int(letter) for letter in family if letter.isdigit()), 0)
        return first and dim >= rank - spatial
    return first and family not in _PLACES and dim in _dims_computed_along(node, rank)


def _last_argument(node: fx.Node) -> int:
    assert isinstance(node.target, OpOverload)
    return len(node.target._schema.arguments) - 1


def _dims_computed_along(node: fx.Node, rank: int) -> set[int]:
    if not isinstance(node.target, OpOverload):
        return set()
    dims: set[int] = set()
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name in ("dim", "dims"):
            given = argument(node, position, parameter.name, parameter.default_value)
            listed = given if isinstance(given, list | tuple) else [given]
            dims |= {dim % rank for dim in listed if isinstance(dim, int) and rank}
    return dims


def _counts_up(index: Any) -> bool:
    """Whether an index is 0, 1, 2, ...: each sample picks from its own."""
    while isinstance(index, fx.Node) and (op_family(index) in (*_RESHAPES, *_COPIES) or _is_whole(index)):
        index = index.args[0]
    return isinstance(index, fx.Node) and op_family(index) == "arange"


def _is_whole(node: fx.Node) -> bool:
    """A slice that leaves nothing out, as ``x[:, None]`` makes."""
    whole = node.args[0] if op_family(node) == "slice" else None
    return isinstance(whole, fx.Node) and whole.meta["val"].shape == node.meta["val"].shape
