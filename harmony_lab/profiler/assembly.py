"""Assembly: a captured graph, cut into segments, becomes a LayerSequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import Layer, LayerSequence, TensorSpec
from harmony_lab.profiler.batch import BatchStructure
from harmony_lab.profiler.capture import Captured
from harmony_lab.profiler.cut import Segment
from harmony_lab.profiler.extract import TOTALS, GraphFunction, LossEdits, Region, digest, extract, gather
from harmony_lab.profiler.graph import DataFlow
from harmony_lab.profiler.loss import LossReduction
from harmony_lab.profiler.loss_weight import totals_of, totals_spec, weigh
from harmony_lab.profiler.nodes import argument, describe, is_batch_norm, op_name
from harmony_lab.profiler.randomness import BatchDim
from harmony_lab.profiler.repeat import refuse_changed
from harmony_lab.profiler.samples import meetings
from harmony_lab.profiler.state import batch_specs, dtype_name, state_specs

__all__ = ["Assembly"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A layer in the making."""

    segment: Segment
    trunk: tuple[fx.Node, ...]
    region: Region
    outputs: tuple[fx.Node, ...]


class Assembly:
    """Puts the layers of one captured model together."""

    def __init__(
        self,
        model: nn.Module,
        structure: BatchStructure,
        flow: DataFlow,
        segments: Sequence[Segment],
        reduction: LossReduction,
    ) -> None:
        self.model = model
        self.structure = structure
        self.flow = flow
        self.captured: Captured = flow.captured
        self.reduction = reduction
        self.batched = next(spec.name for spec in structure.tensors if spec.batched)
        self._totals = totals_of(flow, reduction, self.batched) if reduction.terms else None
        self.place = self._placement(segments)
        self.pieces = self._pieces(segments)
        self._check_recompute_repeats()
        self._check_no_value_changes_later()

    def sequence(self, example_batch: Any) -> LayerSequence:
        layers, texts = self._layers()
        state, buffer_state = state_specs(layers, self.captured.tensors)
        boundaries = self._boundaries()
        specs = [*state.values(), *buffer_state.values()]
        return LayerSequence(
            model=self.model,
            layers=layers,
            boundaries=boundaries,
            batch=(*batch_specs(self.structure), *([totals_spec(self.reduction)] if self.reduction.terms else [])),
            state=state,
            buffer_state=buffer_state,
            tensors={spec.name: self.captured.tensors[spec.name] for spec in specs},
            flatten_batch=self._flatten,
            example_sizes={"batch": self.structure.num_samples},
            loss_weight=weigh(self.flow, self.reduction, self.batched),
            loss_reduction=self.reduction.kind,
            couples_samples=tuple(self.pieces[index].segment.name for index in self.batch_norms()),
            buffer_decay=self._decay(),
            random_ops=tuple(self._drawn(node) for node in self.flow.random),
            fingerprint=digest("\n\n".join([*texts, *map(repr, specs)])),
            example_batch=example_batch,
        )

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _placement(self, segments: Sequence[Segment]) -> dict[fx.Node, int]:
        """Layer of every trunk node; the parts of a list of tensors stay where the list is made."""
        place: dict[fx.Node, int] = {}
        for layer, segment in enumerate(segments):
            for node in self.flow.trunk[segment.start : segment.stop]:
                whole = node.args[0] if op_name(node) == "getitem" else None
                place[node] = place.get(whole, layer) if isinstance(whole, fx.Node) else layer
        return place

    def _pieces(self, segments: Sequence[Segment]) -> list[_Piece]:
        trunks: list[list[fx.Node]] = [[] for _ in segments]
        for node, layer in self.place.items():
            trunks[layer].append(node)
        regions = [self._region(trunk) for trunk in trunks]
        wanted = {value for region in regions for value in region.inputs} | {self.captured.loss}
        return [
            _Piece(segment, tuple(trunk), region, tuple(node for node in trunk if node in wanted))
            for segment, trunk, region in zip(segments, trunks, regions, strict=True)
        ]

    def _region(self, trunk: Sequence[fx.Node]) -> Region:
        region = gather(self.flow, trunk)
        scales = any(term.node in trunk for term in self.reduction.terms)
        return replace(region, batch=(*region.batch, TOTALS)) if scales else region

    def _drawn(self, node: fx.Node) -> BatchDim:
        """Where the samples are in what a random op draws; of no matter for one that nothing needs."""
        return self.flow.batch_dim(node) if node in self.place else self.flow.located[node] or BatchDim(None, 1)

    def _check_recompute_repeats(self) -> None:
        for piece in self.pieces:
            name = next((self.flow.stale[node] for node in piece.outputs if node in self.flow.stale), None)
            if name is not None:
                raise DecomposeError(
                    f"the output of {piece.segment.name} depends on buffer {name}, which the forward pass itself "
                    "updates: backward recomputes the forward pass and would see the updated value; keep that state "
                    "outside the model, or compute the loss without it"
                )

    def _check_no_value_changes_later(self) -> None:
        """A value that one layer writes in place and a later one reads must come from the one that wrote it."""
        writers = [(node, layer) for node, layer in self.place.items() if self.flow.writes[node]]
        for layer, piece in enumerate(self.pieces):
            for value in piece.region.inputs:
                for writer, between in writers:
                    if self.place[value] < between < layer and self.flow.writes[writer] & self.flow.roots[value]:
                        raise DecomposeError(
                            f"in-place op {describe(writer)} changes a value of an earlier layer that a later one "
                            f"reads too ({describe(value)}): make it out of place (inplace=False), or move the cut "
                            "with cut=[...]"
                        )

    # -- layers ---------------------------------------------------------------------------------------------------

    def _layers(self) -> tuple[tuple[Layer, ...], list[str]]:
        kinds: dict[str, tuple[int, GraphFunction]] = {}
        layers, texts = [], []
        ordinals = {node: ordinal for ordinal, node in enumerate(self.flow.random)}
        edits = LossEdits.of(self.flow, self.reduction)
        for piece in self.pieces:
            random = [ordinals[node] for node in piece.trunk if node in ordinals] or [0]
            extracted = extract(self.flow, piece.region, piece.outputs, random[0], edits)
            text = extracted.function.text
            kind, function = kinds.setdefault(text, (len(kinds), extracted.function))
            texts.append(text)
            layers.append(
                Layer(
                    name=piece.segment.name,
                    kind=kind,
                    parameters=piece.region.parameters,
                    buffers=piece.region.buffers,
                    updated_buffers=self._updated_by(piece),
                    inputs=tuple(node.name for node in piece.region.inputs),
                    batch_inputs=piece.region.batch,
                    outputs=tuple(node.name for node in piece.outputs),
                    function=function,
                    first_random_op=random[0],
                    num_random_ops=random[-1] - random[0] + 1 if extracted.random else 0,
                )
            )
        return tuple(layers), texts

    def _updated_by(self, piece: _Piece) -> tuple[str, ...]:
        written = frozenset().union(*(self.flow.writes[node] for node in piece.trunk), ())
        names = {self.captured.sources[root].name for root in written if root in self.captured.sources}
        return tuple(name for name in piece.region.buffers if name in names)

    def _boundaries(self) -> tuple[tuple[TensorSpec, ...], ...]:
        last = {value: layer for layer, piece in enumerate(self.pieces) for value in piece.region.inputs}
        last[self.captured.loss] = len(self.pieces)
        specs = {value: self._value_spec(value) for value in last}
        ordered = sorted(last, key=self.flow.index.__getitem__)
        return tuple(
            tuple(specs[value] for value in ordered if self.place[value] < boundary <= last[value])
            for boundary in range(len(self.pieces) + 1)
        )

    def _value_spec(self, node: fx.Node) -> TensorSpec:
        tensor = node.meta["val"]
        dim, rows, _ = self.flow.batch_dim(node)
        shape = tuple(rows if position == dim else int(length) for position, length in enumerate(tensor.shape))
        return TensorSpec(
            name=node.name,
            shape=shape,
            dtype=dtype_name(tensor.dtype),
            item_bytes=tensor.dtype.itemsize,
            batch_dim=dim,
            requires_grad=node in self.flow.differentiable,
        )

    # -- batches, and what samples and microbatches share -----------------------------------------------------------

    def _flatten(self, batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        tensors, sizes = self.structure.flatten(batch)
        refuse_changed(self.captured.numbers)
        low, high = self.captured.min_samples, self.captured.max_samples
        if sizes["batch"] < low or (high is not None and sizes["batch"] > high):
            limit = f"{low} or more" if high is None else f"{low} to {high}"
            raise DecomposeError(
                f"the batch has {sizes['batch']} samples, but the model itself works for {limit}: give it as many"
            )
        return (tensors if self._totals is None else {**tensors, TOTALS: self._totals(tensors)}), sizes

    def batch_norms(self) -> list[int]:
        """Layers whose samples share the statistics of their microbatch."""
        return [i for i, piece in enumerate(self.pieces) if any(is_batch_norm(node) for node in piece.trunk)]

    def suspects(self) -> dict[int, fx.Node]:
        """Layers in which samples may meet beside that, each with the first op in which they may."""
        captured, tail = self.captured, self.reduction.tail
        nodes = meetings(self.flow.live, self.flow.located, captured.symbol, tail)
        found: dict[int, fx.Node] = {}
        for layer, piece in enumerate(self.pieces):
            inside = {*piece.trunk, *piece.region.nodes}
            first = next((node for node in nodes if node in inside), None)
            if first is not None:
                found[layer] = first
        return found

    def _decay(self) -> Mapping[str, float | None]:
        decay: dict[str, float | None] = {}
        for node in self.flow.trunk:
            for root in self.flow.writes[node]:
                source = self.captured.sources.get(root)
                if source is not None and source.role == "buffer":
                    factor, before = _decay_of(node), decay.get(source.name, 1.0)
                    decay[source.name] = None if factor is None or before is None else factor * before
        return decay


def _decay_of(node: fx.Node) -> float | None:
    """The factor d where a write maps buffer b to d * b + something that does not depend on b."""
    if is_batch_norm(node):
        return 1.0 - float(argument(node, 6, "momentum"))
    added = op_name(node).startswith("aten.add_.") and not isinstance(argument(node, 1, "other"), fx.Node)
    return 1.0 if added else None
