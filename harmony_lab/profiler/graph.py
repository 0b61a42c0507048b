"""Data flow of a captured graph: aliases, writes, what depends on parameters, and what the loss needs.

Nodes fall into four classes.  A *size* is an integer expression of the number of samples.  A *cheap* node depends on no
parameter, no updated buffer and no random draw (masks, position tables): every layer that needs it computes it
itself.  A *trunk* node is everything else; trunk nodes, in graph order, are what is cut into layers.  *Sources* are
placeholders.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.capture import Captured

__all__ = ["DataFlow", "analyze", "argument", "describe", "is_batch_norm", "module_path", "op_name", "size_factor"]

_ASSERTIONS = ("_assert", "sym_constrain_range")
# Ops that write running statistics without saying so in their schema: position of the flag and of what is written.
_BATCH_NORM = {"aten::batch_norm": 5, "aten::instance_norm": 5}
_RUNNING_STATISTICS = (3, 4)
_GETITEM = "getitem"


@dataclass(frozen=True, kw_only=True)
class DataFlow:
    """What is known of each node of a captured graph.

    ``index``: position.  ``roots``: the nodes whose storage a node's tensors may share.  ``needs``: nodes that must
    have run before it: its arguments and whatever wrote to them earlier.  ``writes``: the roots it writes to.
    ``trunk``: live trunk nodes in order.  ``random``: every random node in order, live or not.
    ``updated``: names of buffers that are written.  ``differentiable``: nodes a gradient flows through.
    ``stale``: nodes that depend on an updated buffer, and its name.
    """

    captured: Captured
    index: Mapping[fx.Node, int]
    roots: Mapping[fx.Node, frozenset[fx.Node]]
    needs: Mapping[fx.Node, tuple[fx.Node, ...]]
    writes: Mapping[fx.Node, frozenset[fx.Node]]
    trunk: tuple[fx.Node, ...]
    random: tuple[fx.Node, ...]
    updated: frozenset[str]
    differentiable: frozenset[fx.Node]
    stale: Mapping[fx.Node, str]

    def batch_dim(self, node: fx.Node) -> tuple[int | None, int]:
        """(dimension that grows with the number of samples, rows per sample) of a node's tensor; (None, 1) without one.

        Raises ``DecomposeError`` where the shape is no such function of the number of samples.
        """
        return batch_dim(node, self.captured.symbol)


def op_name(node: fx.Node) -> str:
    """``aten.relu_.default``, or a Python function's name."""
    if isinstance(node.target, OpOverload | HigherOrderOperator):
        return str(node.target)
    return getattr(node.target, "__name__", "")


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
    at = {samples: int(value.node.expr.subs(symbol, samples)) for samples in (2, 3, 5, 64)}
    slope = at[3] - at[2]
    offset = at[2] - 2 * slope
    return (slope, offset) if all(at[n] == slope * n + offset for n in at) else None


def batch_dim(node: fx.Node, symbol: Any) -> tuple[int | None, int]:
    found: tuple[int | None, int] = (None, 1)
    for dim, length in enumerate(node.meta["val"].shape):
        factor = size_factor(length, symbol)
        if factor is None or (factor[0] != 0 and (factor[1] != 0 or factor[0] < 0 or found[0] is not None)):
            shape = tuple(str(length) for length in node.meta["val"].shape)
            raise DecomposeError(
                f"the tensor of {describe(node)} has shape {shape}, which is not one dimension that grows with the "
                f"number of samples ({symbol}); pass cut=[...] with names of modules between which only ordinary "
                "activations flow"
            )
        if factor[0] != 0:
            found = (dim, factor[0])
    return found


def analyze(captured: Captured, is_random: Any) -> DataFlow:
    """``is_random(node)`` tells random ops, and raises for those that are not supported."""
    nodes = [node for node in captured.nodes if not op_name(node).removeprefix("aten.").startswith(_ASSERTIONS)]
    index = {node: position for position, node in enumerate(nodes)}
    roots = _roots(nodes, captured)
    writes = {node: frozenset(_written(node, roots)) for node in nodes}
    updated = _updated_buffers(nodes, writes, captured)
    needs = _needs(nodes, roots, writes, captured)
    random = tuple(node for node in nodes if is_random(node))
    tainted = _depends_on_state(nodes, roots, writes, needs, set(random), captured, updated)
    live = _live(nodes, needs, writes, captured)
    trunk = tuple(
        node
        for node in nodes
        if node in live
        and node.op == "call_function"
        and _is_tensor(node)
        and (node in tainted or _writes_buffer(writes[node], captured))
    )
    if captured.loss not in trunk:
        raise DecomposeError(
            "the loss does not depend on any parameter of the model: check what the model returns as its loss"
        )
    return DataFlow(
        captured=captured,
        index=index,
        roots=roots,
        needs=needs,
        writes=writes,
        trunk=trunk,
        random=random,
        updated=updated,
        differentiable=_differentiable(nodes, roots, writes, needs, captured),
        stale=_stale_on_recompute(nodes, needs, captured, updated),
    )


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor or holds tensors; integers, also those read from tensors, are not."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | list | tuple)


def _arguments(node: fx.Node, captured: Captured) -> list[fx.Node]:
    """Nodes a node reads; a size needs none, as it is computed from the number of samples."""
    if size_factor(node.meta.get("val"), captured.symbol) is not None:
        return []
    return node.all_input_nodes


def _roots(nodes: Iterable[fx.Node], captured: Captured) -> dict[fx.Node, frozenset[fx.Node]]:
    first: dict[Any, fx.Node] = {}
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        if node.op == "placeholder":
            roots[node] = frozenset({first.setdefault(captured.sources[node], node)})
            continue
        shared = [argument for argument in _aliased(node) if argument in roots]
        roots[node] = frozenset().union(*(roots[argument] for argument in shared)) if shared else frozenset({node})
    return roots


def _aliased(node: fx.Node) -> list[fx.Node]:
    """Arguments whose storage the result may share."""
    returns_input = op_name(node).startswith(("aten.dropout.", "aten.feature_dropout.")) and not (
        argument(node, 2, "train") and argument(node, 1, "p") > 0
    )
    if op_name(node) == _GETITEM or returns_input:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    names = set().union(
        *(result.alias_info.before_set for result in schema.returns if result.alias_info is not None), set()
    )
    return [
        value
        for value, parameter in _matched(node)
        if parameter.alias_info is not None and names & set(parameter.alias_info.before_set)
    ]


def _matched(node: fx.Node) -> Iterable[tuple[fx.Node, Any]]:
    """A call's node arguments with the schema's parameter; lists are flattened."""
    assert isinstance(node.target, OpOverload)
    for position, parameter in enumerate(node.target._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, fx.Node):
                yield item, parameter


def _written(node: fx.Node, roots: Mapping[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    if not isinstance(node.target, OpOverload):
        return set()
    written: set[fx.Node] = set()
    for value, parameter in _matched(node):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            written |= roots[value]
    flag = _BATCH_NORM.get(node.target._schema.name)
    if flag is not None and argument(node, flag, "training", argument(node, flag, "use_input_stats", False)):
        for position in _RUNNING_STATISTICS:
            value = argument(node, position, ("running_mean", "running_var")[position - _RUNNING_STATISTICS[0]])
            if isinstance(value, fx.Node):
                written |= roots[value]
    return written


def _writes_buffer(written: frozenset[fx.Node], captured: Captured) -> bool:
    return any(root in captured.sources and captured.sources[root].role == "buffer" for root in written)


def _updated_buffers(
    nodes: Iterable[fx.Node], writes: Mapping[fx.Node, frozenset[fx.Node]], captured: Captured
) -> frozenset[str]:
    updated = set()
    for node in nodes:
        for root in writes[node]:
            source = captured.sources.get(root)
            if source is None:
                continue
            if source.role == "parameter":
                raise DecomposeError(
                    f"{describe(node)} writes to parameter {source.name} during the forward pass; a layer may only "
                    "read parameters: change the parameter outside forward, or register what changes as a buffer"
                )
            if source.role == "buffer":
                updated.add(source.name)
    return frozenset(updated)


def _needs(
    nodes: Iterable[fx.Node],
    roots: Mapping[fx.Node, frozenset[fx.Node]],
    writes: Mapping[fx.Node, frozenset[fx.Node]],
    captured: Captured,
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    writers: dict[fx.Node, list[fx.Node]] = {}
    needs: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in nodes:
        wanted = dict.fromkeys(_arguments(node, captured))
        for argument in list(wanted):
            for root in roots[argument]:
                wanted.update(dict.fromkeys(writers.get(root, ())))
        needs[node] = tuple(wanted)
        for root in writes[node]:
            writers.setdefault(root, []).append(node)
    return needs


def _depends_on_state(
    nodes: list[fx.Node],
    roots: Mapping[fx.Node, frozenset[fx.Node]],
    writes: Mapping[fx.Node, frozenset[fx.Node]],
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    random: set[fx.Node],
    captured: Captured,
    updated: frozenset[str],
) -> set[fx.Node]:
    """Nodes that depend on a parameter, an updated buffer or a random draw.

    A tensor that such a node writes into counts from its creation on, and so does every view of it.
    """
    tainted = set(random)
    for node, source in captured.sources.items():
        if source.role == "parameter" or (source.name in updated and source.role == "buffer"):
            tainted.add(node)
    while True:
        before = len(tainted)
        for node in nodes:
            if any(need in tainted for need in needs[node]) or (node not in captured.sources and roots[node] & tainted):
                tainted.add(node)
            if node in tainted:
                for root in writes[node]:
                    if root in captured.sources and captured.sources[root].role == "batch":
                        raise DecomposeError(
                            f"{describe(node)} writes a computed value into the batch's {captured.sources[root].name}: "
                            "clone the input first"
                        )
                    tainted.add(root)
        if len(tainted) == before:
            return tainted


def _live(
    nodes: Iterable[fx.Node],
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    writes: Mapping[fx.Node, frozenset[fx.Node]],
    captured: Captured,
) -> set[fx.Node]:
    """What the loss or an update of a buffer needs."""
    pending = [captured.loss, *(node for node in nodes if _writes_buffer(writes[node], captured))]
    live: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += needs[node]
    return live


def _differentiable(
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, frozenset[fx.Node]],
    writes: Mapping[fx.Node, frozenset[fx.Node]],
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    captured: Captured,
) -> frozenset[fx.Node]:
    """Nodes through which a gradient flows to a trainable parameter."""
    found: set[fx.Node] = set()
    for node in nodes:
        source = captured.sources.get(node)
        if source is not None:
            if source.role == "parameter" and captured.tensors[source.name].requires_grad:
                found.add(node)
        elif op_name(node).startswith("aten.detach") or _is_no_grad_region(node):
            continue
        elif any(need in found for need in needs[node]) and _holds_floats(node):
            found.add(node)
            for root in writes[node]:
                found.update(other for other in nodes if root in roots[other] and _holds_floats(other))
    return frozenset(found)


def _holds_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, list | tuple)


def _is_no_grad_region(node: fx.Node) -> bool:
    return (
        isinstance(node.target, HigherOrderOperator) and "set_grad_enabled" in op_name(node) and node.args[0] is False
    )


def _stale_on_recompute(
    nodes: Iterable[fx.Node],
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    captured: Captured,
    updated: frozenset[str],
) -> dict[fx.Node, str]:
    """Nodes that depend on a buffer which forward updates, and that buffer: recompute would see another value."""
    found: dict[fx.Node, str] = {}
    for node in nodes:
        source = captured.sources.get(node)
        if source is not None:
            if source.role == "buffer" and source.name in updated:
                found[node] = source.name
        elif not is_batch_norm(node):  # its result does not depend on the running statistics
            for need in needs[node]:
                if need in found:
                    found[node] = found[need]
    return found
