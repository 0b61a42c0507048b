"""Weights of microbatch losses, computed on the host from the batch; and what scales the terms of a mixed loss."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from harmony_lab.layers import LayerCall, TensorSpec
from harmony_lab.profiler.extract import TOTALS, whole_graph
from harmony_lab.profiler.graph import DataFlow
from harmony_lab.profiler.loss import LossReduction
from harmony_lab.profiler.loss_refusals import not_recognised

__all__ = ["Weight", "totals_of", "totals_spec", "weigh"]

Weight = Callable[[Mapping[str, Any]], float]
"""Of the batch tensors of one microbatch, by name."""


def weigh(flow: DataFlow, reduction: LossReduction, batched: str) -> Weight:
    """The weight of a microbatch's loss.  ``batched``: name of a batch tensor with samples."""
    if reduction.kind == "sum":
        return lambda batch: 1.0
    counted = reduction.targets if reduction.targets is not None else reduction.count
    if counted is None:
        return lambda batch: float(batch[batched].shape[0])
    nodes = [counted, *([reduction.class_weight] if reduction.class_weight is not None else [])]
    if any(node in flow.trunk for node in nodes):
        raise not_recognised(flow, flow.captured.loss)
    counted_values = _on_host(flow, counted, batched)
    if reduction.targets is None:
        return lambda batch: float(counted_values(batch).sum())
    if reduction.class_weight is None:
        return lambda batch: float((counted_values(batch) != reduction.ignore).sum())
    weights = _on_host(flow, reduction.class_weight, batched)

    def weight(batch: Mapping[str, Any]) -> float:
        targets = counted_values(batch)
        return float(weights(batch)[targets[targets != reduction.ignore]].sum())

    return weight


def _on_host(flow: DataFlow, node: fx.Node, batched: str) -> Callable[[Mapping[str, Any]], Tensor]:
    buffer_names, batch_names, function = whole_graph(flow, node)
    tensors = flow.captured.tensors

    def compute(batch: Mapping[str, Any]) -> Tensor:
        samples = batch[batched].shape[0]
        call = LayerCall(samples=(0, samples), sizes={"batch": samples}, seed=0, device=batch[batched].device)
        with torch.no_grad():
            result, *_ = function(
                (), [tensors[name] for name in buffer_names], (), [batch[name] for name in batch_names], call
            )
        return result  # type: ignore[no-any-return]

    return compute


# -- losses of several terms ----------------------------------------------------------------------------------------


def totals_spec(reduction: LossReduction) -> TensorSpec:
    """An entry of the batch that is the same for all microbatches: samples, then what each term counts."""
    return TensorSpec(name=TOTALS, shape=(1 + len(reduction.terms),), dtype="float32", item_bytes=4, batch_dim=None)


def totals_of(flow: DataFlow, reduction: LossReduction, batched: str) -> Callable[[Mapping[str, Any]], Tensor]:
    """The totals of a whole minibatch, from its tensors."""
    weights = [weigh(flow, term.reduction, batched) for term in reduction.terms]

    def totals(batch: Mapping[str, Any]) -> Tensor:
        samples = float(batch[batched].shape[0])
        return torch.tensor([samples, *(weight(batch) for weight in weights)], device=batch[batched].device)

    return totals
