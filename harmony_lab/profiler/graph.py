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
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.capture import Captured
from harmony_lab.profiler.nodes import argument, describe, is_batch_norm, op_name, size_factor
from harmony_lab.profiler.randomness import BatchDim
from harmony_lab.profiler.samples import Located, batch_dim, locate

__all__ = ["DataFlow", "analyze"]

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
    ``live``: nodes that the loss or an update of a buffer needs, in order.  ``trunk``: live trunk nodes in order.
    ``random``: every random node in order, live or not.  ``updated``: names of buffers that are written.
    ``differentiable``: nodes a gradient flows through.  ``stale``: nodes that depend on an updated buffer, and its
    name.  ``located``: where the samples are.
    """

    captured: Captured
    index: Mapping[fx.Node, int]
    roots: Mapping[fx.Node, frozenset[fx.Node]]
    needs: Mapping[fx.Node, tuple[fx.Node, ...]]
    writes: Mapping[fx.Node, frozenset[fx.Node]]
    live: tuple[fx.Node, ...]
    trunk: tuple[fx.Node, ...]
    random: tuple[fx.Node, ...]
    updated: frozenset[str]
    differentiable: frozenset[fx.Node]
    stale: Mapping[fx.Node, str]
    located: Located

    def batch_dim(self, node: fx.Node) -> BatchDim:
        """Raises ``DecomposeError`` where the samples lie in the node's tensor in no known way."""
        return batch_dim(node, self.located, self.captured.symbol)


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
    _refuse_sizes_from_data(live)
    trunk = tuple(
        node
        for node in live
        if node.op == "call_function"
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
        live=live,
        trunk=trunk,
        random=random,
        updated=updated,
        differentiable=_differentiable(nodes, roots, writes, needs, captured),
        stale=_stale_on_recompute(nodes, needs, captured, updated),
        located=locate(nodes, captured.symbol),
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
    if isinstance(node.target, HigherOrderOperator):
        return _written_in_regions(node, roots)
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


def _written_in_regions(node: fx.Node, roots: Mapping[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    """What the regions of a higher-order op (``torch.no_grad()``, a branch) write of the values they are given."""
    given = [
        value for argument in node.args for value in (argument if isinstance(argument, list | tuple) else (argument,))
    ]
    written: set[fx.Node] = set()
    for value in given:
        if not (isinstance(value, fx.Node) and value.op == "get_attr" and value.graph.owning_module is not None):
            continue
        region = getattr(value.graph.owning_module, str(value.target), None)
        if not isinstance(region, fx.GraphModule):
            continue
        inner: dict[fx.Node, frozenset[fx.Node]] = {}
        writes: set[fx.Node] = set()
        for inside in region.graph.nodes:
            shared = (
                [argument for argument in _aliased(inside) if argument in inner] if inside.op != "placeholder" else []
            )
            inner[inside] = frozenset().union(*(inner[argument] for argument in shared)) or frozenset({inside})
            writes |= _written(inside, inner)
        parameters = [inside for inside in region.graph.nodes if inside.op == "placeholder"]
        for parameter, operand in zip(parameters, given[len(given) - len(parameters) :], strict=True):
            if parameter in writes and isinstance(operand, fx.Node):
                written |= roots[operand]
    return written


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
        for read in list(wanted):
            for root in roots[read]:
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
) -> tuple[fx.Node, ...]:
    """What the loss or an update of a buffer needs, in order."""
    pending = [captured.loss, *(node for node in nodes if _writes_buffer(writes[node], captured))]
    live: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += needs[node]
    return tuple(node for node in nodes if node in live)


def _refuse_sizes_from_data(live: Iterable[fx.Node]) -> None:
    """Sizes that follow from values, not from shapes: nothing can be planned for them."""
    for node in live:
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        if any(isinstance(length, torch.SymInt) and free_unbacked_symbols(length) for length in shape):
            raise DecomposeError(
                f"the size of what {describe(node)} returns depends on the data, so its memory cannot be planned: use "
                "an op whose result has a fixed size, such as a mask (torch.where, ignore_index for a loss) or a fixed "
                "capacity per expert (topk)"
            )


def _differentiable(
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, frozenset[fx.Node]],
    writes: Mapping[fx.Node, frozenset[fx.Node]],
    needs: Mapping[fx.Node, tuple[fx.Node, ...]],
    captured: Captured,
) -> frozenset[fx.Node]:
    """Nodes through which a gradient flows to a trainable parameter."""
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for root in roots[node]:
            sharing.setdefault(root, []).append(node)
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
                found.update(other for other in sharing[root] if _holds_floats(other))
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
