"""How microbatch losses add up to the minibatch's: the reduction at the end of the graph, and what it counts.

A mean over samples, or over targets that are not ignored, is a weighted mean of the microbatches' means; a sum is a
sum. The reduction is read off the graph, from the loss upwards, through scaling by constants and sums of losses alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerCall
from harmony_lab.profiler.extract import whole_graph
from harmony_lab.profiler.graph import DataFlow, argument, describe, op_name, size_factor

__all__ = ["LossReduction", "count_samples", "reduction_of", "weigh"]

_MEAN, _SUM = 1, 2  # torch's enum of reductions
_PASS = ("view", "reshape", "to", "_to_copy", "alias", "clone", "contiguous", "squeeze", "neg")
_TARGET_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
# Position of the reduction argument.
_REDUCED_LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "kl_div": 2,
    "soft_margin_loss": 2,
    "hinge_embedding_loss": 3,
    "cosine_embedding_loss": 4,
    "margin_ranking_loss": 4,
    "triplet_margin_loss": 7,
    "poisson_nll_loss": 5,
}


@dataclass(frozen=True, slots=True)
class LossReduction:
    """``kind`` "mean" or "sum"; a mean counts samples, or targets that are not ``ignore``, or the node ``count``."""

    kind: str
    targets: fx.Node | None = None
    ignore: int = -100
    class_weight: fx.Node | None = None
    count: fx.Node | None = None

    def guards(self, flow: DataFlow) -> dict[fx.Node, tuple[fx.Node, int]]:
        """Mean losses whose targets may all be ignored in a microbatch, which then counts 0 and must be 0, not 0 /
        0.
        """
        if self.targets is None:
            return {}
        losses = [
            node
            for node in flow.trunk
            if _family(node) in _TARGET_LOSSES and argument(node, 1, "target") is self.targets
        ]
        return dict.fromkeys(losses, (self.targets, self.ignore))


_SAMPLES = LossReduction("mean")
_TOTAL = LossReduction("sum")


def count_samples(batched: str) -> Callable[[Mapping[str, Any]], float]:
    """Weight of a microbatch: its number of samples, read off the batch tensor of that name."""
    return lambda batch: float(batch[batched].shape[0])


def reduction_of(flow: DataFlow) -> LossReduction:
    """The loss's reduction; raises ``DecomposeError`` where it is not recognised."""
    return _follow(flow, flow.captured.loss)


def _family(node: fx.Node) -> str:
    return op_name(node).removeprefix("aten.").split(".")[0].rstrip("_")


def _follow(flow: DataFlow, node: fx.Node) -> LossReduction:
    name = _family(node)
    operands = [
        value for value in node.args if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
    ]
    if name in _TARGET_LOSSES:
        return _of_targets(flow, node)
    if name in _REDUCED_LOSSES:
        reduction = argument(node, _REDUCED_LOSSES[name], "reduction", _MEAN)
        if reduction != 0:
            return _SAMPLES if reduction == _MEAN else _TOTAL
    elif name == "mean" and _over_samples(flow, operands[0], node):
        return _SAMPLES
    elif name == "sum" and _over_samples(flow, operands[0], node):
        return _TOTAL
    elif name == "div" and _shape(node) == ():
        return _of_quotient(flow, node)
    elif name in ("mul", "add", "sub") and operands:
        found = {_follow(flow, operand) for operand in operands if operand in flow.trunk}
        if len(found) == 1 and (name == "mul") <= (len([o for o in operands if o in flow.trunk]) == 1):
            constants = [operand for operand in operands if operand not in flow.trunk]
            if name == "mul" and all(_is_constant(flow, constant) for constant in constants):
                return found.pop()
            if name != "mul" and not constants and len(operands) == len(node.args[:2]):
                return found.pop()
    elif name in _PASS and operands:
        return _follow(flow, operands[0])
    raise _not_recognised(node)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _over_samples(flow: DataFlow, before: fx.Node, after: fx.Node) -> bool:
    """Whether a reduction takes the batch dimension, evenly, to nothing."""
    factors = [size_factor(length, flow.captured.symbol) for length in _shape(before)]
    return (
        _shape(after) == ()
        and sum(factor is not None and factor[0] > 0 for factor in factors) == 1
        and None not in factors
    )


def _is_constant(flow: DataFlow, node: fx.Node) -> bool:
    """Whether a tensor is the same for every microbatch: made of constants and buffers only."""
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            source = flow.captured.sources.get(current)
            size = size_factor(current.meta.get("val"), flow.captured.symbol)
            if (source is not None and source.role != "buffer") or (size is not None and size[0] != 0):
                return False
            pending += flow.needs[current]
    return True


def _of_targets(flow: DataFlow, node: fx.Node) -> LossReduction:
    reduction = argument(node, 3, "reduction", _MEAN)
    if reduction == _SUM:
        return _TOTAL
    targets, weight = argument(node, 1, "target"), argument(node, 2, "weight")
    if reduction != _MEAN:
        raise _not_recognised(node)
    if targets.meta["val"].is_floating_point():
        return _SAMPLES  # probabilities: none is ignored
    return LossReduction("mean", targets=targets, ignore=argument(node, 4, "ignore_index", -100), class_weight=weight)


def _of_quotient(flow: DataFlow, node: fx.Node) -> LossReduction:
    """A loss over a constant; a sum over the number of samples; a sum over a count, such as ``mask.sum()``."""
    numerator, denominator = node.args[0], node.args[1]
    assert isinstance(numerator, fx.Node)
    inner = _follow(flow, numerator)
    if not isinstance(denominator, fx.Node):
        return inner
    size = size_factor(denominator.meta.get("val"), flow.captured.symbol)
    if size is not None:
        if inner is _TOTAL and size[0] != 0 and size[1] == 0:
            return _SAMPLES
    elif _is_constant(flow, denominator):
        return inner
    elif inner is _TOTAL and denominator not in flow.trunk:
        return LossReduction("mean", count=_unclamped(denominator))
    raise _not_recognised(node)


def _unclamped(node: fx.Node) -> fx.Node:
    """The count itself below a ``clamp(min=1)`` that guards the division."""
    while _family(node) in ("clamp", "clamp_min", "maximum", "to", "_to_copy"):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def _not_recognised(node: fx.Node) -> DecomposeError:
    return DecomposeError(
        f"the loss ends in {describe(node)}, from which it does not follow how losses of microbatches combine. "
        'Pass loss_reduction="mean" if the loss is a mean over samples, or loss_reduction="sum" if it is a sum'
    )


def weigh(flow: DataFlow, reduction: LossReduction, batched: str) -> Callable[[Mapping[str, Any]], float]:
    """``weight(batch tensors of one microbatch)``, computed on the host."""
    if reduction.kind == "sum":
        return lambda batch: 1.0
    counted = reduction.targets if reduction.targets is not None else reduction.count
    if counted is None:
        return count_samples(batched)
    nodes = [counted, *([reduction.class_weight] if reduction.class_weight is not None else [])]
    if any(node in flow.trunk for node in nodes):
        raise _not_recognised(flow.captured.loss)
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


def _on_host(flow: DataFlow, node: fx.Node, batched: str) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    buffer_names, batch_names, function = whole_graph(flow, node)
    tensors = flow.captured.tensors

    def compute(batch: Mapping[str, Any]) -> torch.Tensor:
        samples = batch[batched].shape[0]
        call = LayerCall(samples=(0, samples), sizes={"batch": samples}, seed=0, device=batch[batched].device)
        with torch.no_grad():
            result, *_ = function(
                (), [tensors[name] for name in buffer_names], (), [batch[name] for name in batch_names], call
            )
        return result  # type: ignore[no-any-return]

    return compute
