"""Nodes of a captured graph, one at a time: op, arguments, module, and sizes that grow with the number of samples."""

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

__all__ = [
    "USERS_LINE",
    "argument",
    "describe",
    "growing_dims",
    "is_batch_norm",
    "module_path",
    "op_family",
    "op_name",
    "size_factor",
    "tensor_inputs",
    "uses_number_of_samples",
]


USERS_LINE = "users_line"
"""Under this key a node's custom metadata has the line of the user's code that made it."""


def op_name(node: fx.Node) -> str:
    """``aten.relu_.default``, or a Python function's name."""
    if isinstance(node.target, OpOverload | HigherOrderOperator):
        return str(node.target)
    return getattr(node.target, "__name__", "")


def op_family(node: fx.Node) -> str:
    """``relu`` of ``aten.relu_.default``: the op whatever its overload, in place or not."""
    return op_name(node).removeprefix("aten.").split(".")[0].rstrip("_")


def module_path(node: fx.Node) -> list[str]:
    """Modules the node ran in, outermost first, named as in the user's model; later calls of one module end in @n."""
    path = []
    for key, (name, _) in node.meta.get("nn_module_stack", {}).items():
        if name.startswith("model."):
            call = "@" + key.rsplit("@", 1)[1] if "@" in key else ""
            path.append(name.removeprefix("model.") + call)
    return path


def describe(node: fx.Node) -> str:
    """The op, its module and the user's line, for errors."""
    path = module_path(node)
    text = op_name(node) + (f" in module {path[-1]}" if path else "")
    line = (node.meta.get("custom") or {}).get(USERS_LINE)
    if line:
        return f"{text} ({line})"
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return text + (f" ({trace[-2].rstrip(',')}: {trace[-1]})" if len(trace) >= 2 else "")


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """A call's argument, given by position or name or left at its default."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_batch_norm(node: fx.Node) -> bool:
    """A batch norm that uses the microbatch's statistics, so that samples influence each other."""
    return op_name(node).startswith("aten.batch_norm") and bool(argument(node, 5, "training", False))


def size_factor(value: Any, symbol: Any) -> tuple[int, int] | None:
    """(a, b) where a size is a * samples + b."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return 0, value
    if not isinstance(value, torch.SymInt) or value.node.expr.free_symbols - {symbol}:
        return None
    return _linear(value.node.expr, symbol)


def uses_number_of_samples(argument: Any, symbol: Any) -> bool:
    """Whether a call's argument is a number that grows with the number of samples."""
    if not isinstance(argument, fx.Node) or isinstance(argument.meta.get("val"), torch.Tensor):
        return False
    value = argument.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat) and symbol in value.node.expr.free_symbols


@cache
def _linear(expression: Any, symbol: Any) -> tuple[int, int] | None:
    at = {samples: int(expression.subs(symbol, samples)) for samples in (2, 3, 5, 64)}
    slope = at[3] - at[2]
    offset = at[2] - 2 * slope
    return (slope, offset) if all(at[n] == slope * n + offset for n in at) else None


def growing_dims(node: fx.Node, symbol: Any) -> list[tuple[int, int]] | None:
    """(dimension, rows per sample) of every dimension of a node's tensor that grows with the number of samples.

    None where it has no tensor, or a length that is no multiple of the number of samples.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    found = []
    for dim, length in enumerate(value.shape):
        factor = size_factor(length, symbol)
        if factor is None or (factor[0] != 0 and (factor[0] < 0 or factor[1] != 0)):
            return None
        if factor[0] != 0:
            found.append((dim, factor[0]))
    return found


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads; a part of a list of tensors reads what the list is made of."""
    if op_name(node) == "getitem" and isinstance(node.args[0], fx.Node):
        return tensor_inputs(node.args[0])
    return [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
