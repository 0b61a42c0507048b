"""One layer as a graph of its own, with parameters, buffers, inputs and batch lifted to arguments."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LOSS_TOTALS, LayerCall
from harmony_lab.profiler.capture import Source
from harmony_lab.profiler.graph import DataFlow
from harmony_lab.profiler.layer_ops import (
    count_targets,
    device_of,
    samples_apart,
    samples_together,
    share_of_mean,
    share_of_sum,
    size_of,
    zero_without_targets,
)
from harmony_lab.profiler.loss import LossReduction
from harmony_lab.profiler.nodes import describe, is_batch_norm, op_name, size_factor
from harmony_lab.profiler.random_nodes import stand_in

__all__ = ["TOTALS", "Extracted", "GraphFunction", "LossEdits", "Region", "digest", "extract", "gather", "whole_graph"]

TOTALS = LOSS_TOTALS
"""Name of the batch entry that layers with a loss of several terms read: see ``layer_ops.share_of_mean``."""


class GraphFunction:
    """A ``LayerFunction`` that runs a graph; ``text`` is its canonical form, equal for equal computations."""

    def __init__(self, module: fx.GraphModule, text: str) -> None:
        self.module = module
        self.text = text

    def __call__(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        call: LayerCall,
    ) -> tuple[Any, ...]:
        return self.module.forward(*parameters, *buffers, *inputs, *batch, call)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Region:
    """The nodes one layer computes, in order, and the nodes it reads: state, batch and earlier layers' values."""

    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    batch: tuple[str, ...]
    inputs: tuple[fx.Node, ...]


def gather(flow: DataFlow, trunk: Iterable[fx.Node], extra: Sequence[fx.Node] = ()) -> Region:
    """What a layer of these trunk nodes computes: they, and every cheap node and size that they need."""
    own = set(trunk)
    values = set(flow.trunk) - own
    pending = [*own, *extra]
    inside: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in inside:
            inside.add(node)
            if node not in values:
                # An earlier layer's write to an input has happened in that layer: only what is read comes in.
                arguments = set(node.all_input_nodes)
                pending += [need for need in flow.needs[node] if need in arguments or need not in values]
    nodes = sorted(inside, key=flow.index.__getitem__)
    sources = flow.captured.sources
    read = [need for node in nodes if node not in values for need in flow.needs[node]] + list(extra)
    return Region(
        nodes=tuple(node for node in nodes if node not in values and node not in sources),
        inputs=tuple(node for node in nodes if node in values),
        parameters=_names(sources, read, "parameter"),
        buffers=_names(sources, read, "buffer"),
        batch=_names(sources, read, "batch"),
    )


def _names(sources: Mapping[fx.Node, Source], read: Iterable[fx.Node], role: str) -> tuple[str, ...]:
    """Sources of that role in the order in which a layer reads them, which is the same for equal layers."""
    return tuple(dict.fromkeys(sources[node].name for node in read if node in sources and sources[node].role == role))


@dataclass(frozen=True, kw_only=True)
class LossEdits:
    """What is done to losses.  ``guards``: (targets, ignored value) of losses that are 0 where no target counts.
    ``terms``: number, from 1, and reduction of the nodes that are scaled to their share of the minibatch.
    """

    guards: Mapping[fx.Node, tuple[fx.Node, int]]
    terms: Mapping[fx.Node, tuple[int, LossReduction]]

    @classmethod
    def of(cls, flow: DataFlow, reduction: LossReduction) -> "LossEdits":
        numbered = {term.node: (number, term.reduction) for number, term in enumerate(reduction.terms, 1)}
        return cls(guards=reduction.guards(flow), terms=numbered)


_NO_EDITS = LossEdits(guards={}, terms={})


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """A layer's graph.  ``random`` are its random nodes in order."""

    function: GraphFunction
    random: tuple[fx.Node, ...]


def extract(
    flow: DataFlow,
    region: Region,
    outputs: Sequence[fx.Node],
    first_random: int = 0,
    edits: LossEdits = _NO_EDITS,
) -> Extracted:
    """Build the graph of a region.  ``first_random``: ordinal of its first random op in the whole model."""
    return _Builder(flow, region, edits).build(outputs, first_random)


def whole_graph(flow: DataFlow, wanted: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...], GraphFunction]:
    """(names of buffers, names of batch tensors, function) that computes one cheap node from the batch alone."""
    region = gather(flow, (), (wanted,))
    assert not region.inputs, "a cheap node depends on no trunk node"
    return region.buffers, region.batch, extract(flow, region, (wanted,)).function


def _batch_norm(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Refuses one value per channel, which has no variance, as the module does; a graph has lost that check."""
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    normed: torch.Tensor = torch.ops.aten.batch_norm.default(x, *args)
    return normed


class _Builder:
    """Copies a region's nodes into a new graph and writes its canonical text along the way."""

    def __init__(self, flow: DataFlow, region: Region, edits: LossEdits) -> None:
        self.flow = flow
        self.region = region
        self.edits = edits
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.lifted: dict[Source, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.device: fx.Node | None = None
        self.ordinals = {node: ordinal for ordinal, node in enumerate(flow.random)}
        self.random: list[fx.Node] = []

    def build(self, outputs: Sequence[fx.Node], first_random: int) -> Extracted:
        self._placeholders()
        for node in self.region.nodes:
            self.copies[node] = self._copy(node, first_random)
        results = self.graph.output(tuple(self._laid_out(samples_together, node) for node in outputs))
        self.graph.lint()
        text = self._text(results)
        module = fx.GraphModule(self.root, self.graph, class_name="Layer")
        return Extracted(function=GraphFunction(module, text), random=tuple(self.random))

    def _placeholders(self) -> None:
        captured, region = self.flow.captured, self.region
        lifted = self.lifted
        for role, names in (("parameter", region.parameters), ("buffer", region.buffers)):
            for name in names:
                lifted[Source(role, name)] = self.graph.placeholder(f"{role}_{len(lifted)}")
        for position, value in enumerate(region.inputs):
            self.copies[value] = self.graph.placeholder(f"input_{position}")
        for position, name in enumerate(region.batch):
            lifted[Source("batch", name)] = self.graph.placeholder(f"batch_{position}")
        self.call = self.graph.placeholder("call")
        for node, source in captured.sources.items():
            if source in lifted:
                self.copies[node] = lifted[source]
                lifted[source].meta.update(val=node.meta["val"], grad=node in self.flow.differentiable)
        for value in region.inputs:
            self.copies[value].meta.update(val=value.meta["val"], grad=value in self.flow.differentiable)
        for value in region.inputs:
            self.copies[value] = self._laid_out(samples_apart, value)
        self._protect_what_is_written()

    def _laid_out(self, function: Any, value: fx.Node) -> fx.Node:
        """What crosses to another layer has the samples one after the other."""
        place = self.flow.located.get(value)
        if place is None or place.blocks == 1:
            return self.copies[value]
        return self.graph.call_function(function, (self.copies[value], self.call, place.dim, place.blocks))

    def _protect_what_is_written(self) -> None:
        """In-place ops on what the layer was given work on a copy: recompute needs it as it was."""
        flow, captured = self.flow, self.flow.captured
        written = frozenset().union(*(flow.writes[node] for node in self.region.nodes), ())
        given = [node for node in self.copies if node.op == "placeholder" and captured.sources[node].role == "batch"]
        for group in (given, list(self.region.inputs)):
            touched = [node for node in group if flow.roots[node] & written]
            if len({self.copies[node] for node in touched}) > 1 and group is not given:
                raise DecomposeError(
                    f"an in-place op changes {describe(touched[0])}, which shares memory with "
                    f"{describe(touched[1])}, and both cross a cut between layers: make the op out of place "
                    "(inplace=False), or move the cut with cut=[...]"
                )
            clones: dict[fx.Node, fx.Node] = {}
            for node in touched:
                lifted = self.copies[node]
                if lifted not in clones:
                    clones[lifted] = self.graph.call_function(torch.ops.aten.clone.default, (lifted,))
                self.copies[node] = clones[lifted]

    def _copy(self, node: fx.Node, first_random: int) -> fx.Node:
        value = node.meta.get("val")
        size = size_factor(value, self.flow.captured.symbol)
        if size is not None:
            return self.graph.call_function(size_of, (self.call, *size))
        if node.op == "get_attr":
            return self._region(node)
        if node in self.ordinals:
            self.random.append(node)
            function, args, kwargs = stand_in(node)
            op = self.ordinals[node] - first_random
            args = (self.call, op, self.flow.batch_dim(node), *self._mapped(args))
            return self.graph.call_function(function, args, self._mapped(kwargs))
        assert node.op == "call_function", f"unexpected {node.op} in a captured graph"
        target = _batch_norm if is_batch_norm(node) else node.target
        copy = self.graph.call_function(target, self._mapped(node.args), self._mapped(node.kwargs))  # type: ignore[arg-type]
        if node in self.edits.guards:
            targets, ignored = self.edits.guards[node]
            copy = self.graph.call_function(zero_without_targets, (copy, self.copies[targets], ignored))
        return self._scaled(copy, *self.edits.terms[node]) if node in self.edits.terms else copy

    def _scaled(self, loss: fx.Node, number: int, reduction: LossReduction) -> fx.Node:
        """A term of the loss, as its share of the minibatch."""
        totals = self.lifted[Source("batch", TOTALS)]
        if reduction.kind == "sum":
            return self.graph.call_function(share_of_sum, (loss, self.call, totals))
        if reduction.targets is not None:
            weight = self.copies[reduction.class_weight] if reduction.class_weight is not None else None
            targets = (self.copies[reduction.targets], reduction.ignore, weight)
            count = self.graph.call_function(count_targets, targets)
        elif reduction.count is not None:
            count = self.copies[reduction.count]
        else:
            return loss
        return self.graph.call_function(share_of_mean, (loss, self.call, totals, number, count))

    def _region(self, node: fx.Node) -> fx.Node:
        """A nested graph (torch.no_grad, autocast, control flow) comes along under a name of this layer."""
        name = f"region_{sum(1 for _ in self.root.children())}"
        region = getattr(self.flow.captured.modules, str(node.target))
        _refuse_device_constants(region, node)
        self.root.add_module(name, region)
        return self.graph.get_attr(name)

    def _mapped(self, value: Any) -> Any:
        """Arguments with nodes replaced by their copies and devices by the device of the call."""
        return fx.node.map_aggregate(value, self._mapped_leaf)

    def _mapped_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return self.copies[leaf]
        if isinstance(leaf, torch.device):
            if self.device is None:
                with self.graph.inserting_after(self.call):
                    self.device = self.graph.call_function(device_of, (self.call,))
            return self.device
        return leaf

    def _text(self, results: fx.Node) -> str:
        """Ops, constants, shapes and what needs a gradient, with names that depend on nothing but the order."""
        names: dict[fx.Node, str] = {}
        lines = []
        for node in self.graph.nodes:
            names[node] = f"%{len(names)}"
            if node.op == "placeholder":
                what = f"{node.name} {self._tensor_text(node)}" if "val" in node.meta else node.name
            elif node.op == "get_attr":
                what = getattr(self.root, str(node.target)).print_readable(print_output=False)
            else:
                args, kwargs = (fx.node.map_arg(part, lambda n: _Name(names[n])) for part in (node.args, node.kwargs))
                what = f"{op_name(node) or node.op}({args}, {kwargs})"
            lines.append(f"{names[node]} = {what}")
        return "\n".join(lines)

    def _tensor_text(self, node: fx.Node) -> str:
        tensor = node.meta["val"]
        shape = ", ".join(str(length).replace(str(self.flow.captured.symbol), "n") for length in tensor.shape)
        return f"{tensor.dtype} ({shape})" + (" with gradient" if node.meta["grad"] else "")


class _Name(str):
    """A node's canonical name, printed without quotes."""

    __slots__ = ()

    __repr__ = str.__str__


def _refuse_device_constants(region: fx.GraphModule, node: fx.Node) -> None:
    """A nested graph has its devices fixed, and the layer may run on another."""
    for inner in region.graph.nodes:
        found: list[Any] = []
        fx.node.map_aggregate((inner.args, inner.kwargs), found.append)
        asserts = op_name(inner).startswith("aten._assert")
        if (
            not asserts
            and any(isinstance(leaf, torch.device) for leaf in found)
            and not isinstance(inner.target, HigherOrderOperator)
        ):
            raise DecomposeError(
                f"{describe(inner)} creates a tensor on a fixed device inside a region of its own "
                f"({describe(node)}): create it on the device of another tensor, or outside the torch.no_grad, "
                "autocast or control-flow region"
            )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
