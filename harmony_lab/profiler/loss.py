"""How microbatch losses add up to the minibatch's: the reduction at the end of the graph, and what it counts.

A mean over samples, or over targets that are not ignored, is a weighted mean of the microbatches' means; a sum is a
sum. The reduction is read off the graph, from the loss upwards, through scaling and through sums of losses alike.  What
no sample enters, such as a penalty on parameters, is the same in every microbatch and so in their weighted mean.
A sum of terms that count different things (two classifications, each with labels of its own to ignore) has no single
weight: then each term is scaled in its layer to its share of the minibatch.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from harmony_lab.profiler.graph import DataFlow
from harmony_lab.profiler.loss_refusals import enters_samples, not_recognised
from harmony_lab.profiler.nodes import argument, op_family, size_factor, uses_number_of_samples

__all__ = ["LossReduction", "LossTerm", "reduction_of"]

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
    alike = {term.reduction for term in terms} or {_SAMPLES}
    plain = len(alike) == 1 and not (reader.adds_constant and alike == {_TOTAL})
    reduction = alike.pop() if plain else LossReduction("mean", terms=tuple(terms))
    return replace(reduction, tail=frozenset(reader.seen))


class _Reader:
    """Follows a graph from its loss upwards; ``seen`` are the nodes on the way.

    ``adds_constant``: something is added that is the same in every microbatch.
    """

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.seen: set[fx.Node] = set()
        self.adds_constant = False

    def terms(self, node: fx.Node) -> list[LossTerm]:
        """What the loss is a linear combination of, with constant factors."""
        self.seen.add(node)
        if self._is_constant(node):
            self.adds_constant = True
            return []
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
            raise not_recognised(self.flow, node)
        if name == "mul":
            scaled = [operand for operand in operands if not self._is_constant(operand)]
            if len(scaled) == 1 and scaled[0] in self.flow.trunk:
                return self.terms(scaled[0])
        if name in ("add", "sub", "rsub") and all(self._is_term(operand) for operand in operands):
            plain = [value for value in node.args[:2] if not isinstance(value, fx.Node)]
            self.adds_constant |= any(value != 0 for value in plain)
            return [term for operand in operands for term in self.terms(operand)]
        if name in _PASS and operands:
            return self.terms(operands[0])
        if name in ("sum", "mean") and op_family(operands[0]) == "stack" and _shape(node) == ():
            self.seen.add(operands[0])
            parts: Any = operands[0].args[0]
            return [term for part in parts for term in self.terms(part)]
        raise not_recognised(self.flow, node)

    def _is_term(self, node: fx.Node) -> bool:
        return node in self.flow.trunk or self._is_constant(node)

    def _reduced(self, node: fx.Node, name: str, operands: list[fx.Node]) -> LossReduction | None:
        if name in _TARGET_LOSSES:
            return self._of_targets(node)
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
        adds_constant, self.adds_constant = self.adds_constant, False
        inner = self.terms(numerator)
        totals = not self.adds_constant and all(term.reduction == _TOTAL for term in inner)
        self.adds_constant |= adds_constant
        if not isinstance(denominator, fx.Node):
            return inner
        size = size_factor(denominator.meta.get("val"), self.flow.captured.symbol)
        if size is not None:
            if totals and size[0] != 0 and size[1] == 0:
                return [LossTerm(node, _SAMPLES)]
        elif self._is_constant(denominator):
            return inner
        elif totals and denominator not in self.flow.trunk:
            self.seen |= _with_clamps(denominator)
            return [LossTerm(node, LossReduction("mean", count=self._unclamped(denominator)))]
        raise not_recognised(self.flow, node)

    def _of_targets(self, node: fx.Node) -> LossReduction:
        reduction = argument(node, 3, "reduction", _MEAN)
        if reduction == _SUM:
            return _TOTAL
        targets, weight = argument(node, 1, "target"), argument(node, 2, "weight")
        if reduction != _MEAN:
            raise not_recognised(self.flow, node)
        if targets.meta["val"].is_floating_point():
            return _SAMPLES  # probabilities: none is ignored
        ignored = argument(node, 4, "ignore_index", -100)
        return LossReduction("mean", targets=targets, ignore=ignored, class_weight=weight)

    def _unclamped(self, node: fx.Node) -> fx.Node:
        """The count itself below a ``clamp(min=1)`` that guards the division; any other clamp changes the loss."""
        while op_family(node) in _CLAMPS:
            if op_family(node) in ("clamp", "clamp_min", "maximum"):
                least, most = argument(node, 1, "min"), argument(node, 2, "max")
                if most is not None or not isinstance(least, int | float) or least > 1:
                    raise not_recognised(self.flow, node)
            assert isinstance(node.args[0], fx.Node)
            node = node.args[0]
        return node

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a tensor is the same for every microbatch: no sample, and no chance, enters it."""
        return not enters_samples(self.flow, node)


_CLAMPS = ("clamp", "clamp_min", "maximum", "to", "_to_copy")


def _shape(node: fx.Node) -> tuple[object, ...]:
    return tuple(node.meta["val"].shape)


def _with_clamps(node: fx.Node) -> set[fx.Node]:
    """The nodes of a count: itself, what guards the division, and the sum below."""
    found = {node}
    while op_family(node) in _CLAMPS:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
        found.add(node)
    return found
