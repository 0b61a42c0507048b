"""How microbatch losses add up to the minibatch's: the reduction at the end of the graph, and what it counts.

A mean over samples, or over targets that are not ignored, is a weighted mean of the microbatches' means; a sum is a
sum. The reduction is read off the graph, from the loss upwards, through scaling by constants and sums of losses alike.
A sum of terms that count different things (two classifications, each with labels of its own to ignore) has no single
weight: then each term is scaled in its layer to its share of the minibatch.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.graph import DataFlow
from harmony_lab.profiler.nodes import argument, describe, op_family, size_factor, uses_number_of_samples

__all__ = ["LossReduction", "LossTerm", "not_recognised", "reduction_of"]

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
    """``kind`` "mean" or "sum"; a mean counts samples, or targets that are not ``ignore``, or the node ``count``.

    ``terms``: of a sum of terms that count different things; then the whole, its terms scaled, is a mean over samples.
    ``tail``: the nodes from the loss up to those that reduce the samples.
    """

    kind: str
    targets: fx.Node | None = None
    ignore: int = -100
    class_weight: fx.Node | None = None
    count: fx.Node | None = None
    terms: tuple["LossTerm", ...] = ()
    tail: frozenset[fx.Node] = frozenset()

    def guards(self, flow: DataFlow) -> dict[fx.Node, tuple[fx.Node, int]]:
        """Mean losses whose targets may all be ignored in a microbatch: that counts 0 and must be 0, not 0 / 0."""
        found: dict[fx.Node, tuple[fx.Node, int]] = {}
        for reduction in (self, *(term.reduction for term in self.terms)):
            if reduction.targets is not None:
                for node in flow.trunk:
                    if op_family(node) in _TARGET_LOSSES and argument(node, 1, "target") is reduction.targets:
                        found[node] = (reduction.targets, reduction.ignore)
        return found


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A node that is a mean or a sum over the microbatch."""

    node: fx.Node
    reduction: LossReduction


_SAMPLES = LossReduction("mean")
_TOTAL = LossReduction("sum")


def reduction_of(flow: DataFlow) -> LossReduction:
    """The loss's reduction; raises ``DecomposeError`` where it is not recognised."""
    reader = _Reader(flow)
    terms = reader.terms(flow.captured.loss)
    alike = {term.reduction for term in terms}
    reduction = alike.pop() if len(alike) == 1 else LossReduction("mean", terms=tuple(terms))
    return replace(reduction, tail=frozenset(reader.seen))


class _Reader:
    """Follows a graph from its loss upwards; ``seen`` are the nodes on the way."""

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.seen: set[fx.Node] = set()

    def terms(self, node: fx.Node) -> list[LossTerm]:
        """What the loss is a linear combination of, with constant factors."""
        self.seen.add(node)
        name = op_family(node)
        operands = [
            value
            for value in node.args
            if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        ]
        reduction = self._reduced(node, name, operands)
        if reduction is not None:
            return [LossTerm(node, reduction)]
        if name == "div" and _shape(node) == ():
            return self._quotient(node)
        if name != "div" and any(uses_number_of_samples(value, self.flow.captured.symbol) for value in node.args):
            raise not_recognised(node)
        if name == "mul" and operands:
            factors = [operand for operand in operands if operand not in self.flow.trunk]
            scaled = [operand for operand in operands if operand in self.flow.trunk]
            if len(scaled) == 1 and all(self._is_constant(factor) for factor in factors):
                return self.terms(scaled[0])
        if name in ("add", "sub") and operands and all(operand in self.flow.trunk for operand in operands):
            found = [term for operand in operands for term in self.terms(operand)]
            plain = [value for value in node.args[:2] if not isinstance(value, fx.Node)]
            if all(value == 0 or all(term.reduction.kind == "mean" for term in found) for value in plain):
                return found
        if name in _PASS and operands:
            return self.terms(operands[0])
        if name in ("sum", "mean") and op_family(operands[0]) == "stack" and _shape(node) == ():
            self.seen.add(operands[0])
            parts: Any = operands[0].args[0]
            return [term for part in parts for term in self.terms(part)]
        raise not_recognised(node)

    def _reduced(self, node: fx.Node, name: str, operands: list[fx.Node]) -> LossReduction | None:
        if name in _TARGET_LOSSES:
            return _of_targets(node)
        if name in _REDUCED_LOSSES:
            reduction = argument(node, _REDUCED_LOSSES[name], "reduction", _MEAN)
            return {_MEAN: _SAMPLES, _SUM: _TOTAL}.get(reduction)
        if name in ("mean", "sum") and self._over_samples(operands[0], node):
            return _SAMPLES if name == "mean" else _TOTAL
        return None

    def _over_samples(self, before: fx.Node, after: fx.Node) -> bool:
        """Whether a reduction takes the batch dimension, evenly, to nothing."""
        factors = [size_factor(length, self.flow.captured.symbol) for length in _shape(before)]
        return (
            _shape(after) == ()
            and sum(factor is not None and factor[0] > 0 for factor in factors) == 1
            and None not in factors
        )

    def _quotient(self, node: fx.Node) -> list[LossTerm]:
        """A loss over a constant; a sum over the number of samples; a sum over a count, such as ``mask.sum()``."""
        numerator, denominator = node.args[0], node.args[1]
        assert isinstance(numerator, fx.Node)
        inner = self.terms(numerator)
        if not isinstance(denominator, fx.Node):
            return inner
        totals = all(term.reduction == _TOTAL for term in inner)
        size = size_factor(denominator.meta.get("val"), self.flow.captured.symbol)
        if size is not None:
            if totals and size[0] != 0 and size[1] == 0:
                return [LossTerm(node, _SAMPLES)]
        elif self._is_constant(denominator):
            return inner
        elif totals and denominator not in self.flow.trunk:
            self.seen |= _with_clamps(denominator)
            return [LossTerm(node, LossReduction("mean", count=_unclamped(denominator)))]
        raise not_recognised(node)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a tensor is the same for every microbatch: made of constants and buffers only."""
        seen, pending = set(), [node]
        while pending:
            current = pending.pop()
            if current not in seen:
                seen.add(current)
                source = self.flow.captured.sources.get(current)
                size = size_factor(current.meta.get("val"), self.flow.captured.symbol)
                if (source is not None and source.role != "buffer") or (size is not None and size[0] != 0):
                    return False
                pending += self.flow.needs[current]
        return True


def _shape(node: fx.Node) -> tuple[object, ...]:
    return tuple(node.meta["val"].shape)


def _of_targets(node: fx.Node) -> LossReduction:
    reduction = argument(node, 3, "reduction", _MEAN)
    if reduction == _SUM:
        return _TOTAL
    targets, weight = argument(node, 1, "target"), argument(node, 2, "weight")
    if reduction != _MEAN:
        raise not_recognised(node)
    if targets.meta["val"].is_floating_point():
        return _SAMPLES  # probabilities: none is ignored
    return LossReduction("mean", targets=targets, ignore=argument(node, 4, "ignore_index", -100), class_weight=weight)


_CLAMPS = ("clamp", "clamp_min", "maximum", "to", "_to_copy")


def _with_clamps(node: fx.Node) -> set[fx.Node]:
    """The nodes of a count: itself, what guards the division, and the sum below."""
    found = {node}
    while op_family(node) in _CLAMPS:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
        found.add(node)
    return found


def _unclamped(node: fx.Node) -> fx.Node:
    """The count itself below a ``clamp(min=1)`` that guards the division; any other clamp changes the loss."""
    while op_family(node) in _CLAMPS:
        if op_family(node) in ("clamp", "clamp_min", "maximum"):
            least, most = argument(node, 1, "min"), argument(node, 2, "max")
            if most is not None or not isinstance(least, int | float) or least > 1:
                raise not_recognised(node)
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def not_recognised(node: fx.Node) -> DecomposeError:
    return DecomposeError(
        f"the loss ends in {describe(node)}, from which it does not follow how losses of microbatches combine. "
        'Pass loss_reduction="mean" if the loss is a mean over samples, or loss_reduction="sum" if it is a sum'
    )
