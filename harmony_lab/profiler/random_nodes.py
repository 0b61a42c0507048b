"""Random ops of a captured graph: which nodes are random, and the per-sample function that stands in for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler import randomness
from harmony_lab.profiler.nodes import argument, describe, op_name

__all__ = ["StandIn", "is_random", "stand_in"]


class StandIn(NamedTuple):
    """Call ``function(call, op, batch_dim, *args, **kwargs)`` in place of a random node."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _dropout(node: fx.Node) -> StandIn:
    inplace = op_name(node).split(".")[1].endswith("_")
    function = randomness.feature_dropout if "feature" in op_name(node) else randomness.dropout
    return StandIn(function, node.args[:2], {"inplace": True} if inplace else {})


def _attention(node: fx.Node) -> StandIn:
    return StandIn(randomness.attention, node.args, dict(node.kwargs))


def _in_place(method: str) -> Callable[[fx.Node], StandIn]:
    return lambda node: StandIn(randomness.refilled, (node.args[0], method, *node.args[1:]), _without_generator(node))


def _like(method: str) -> Callable[[fx.Node], StandIn]:
    return lambda node: StandIn(randomness.drawn_like, (node.args[0], method), _without_generator(node))


def _factory(method: str) -> Callable[[fx.Node], StandIn]:
    return lambda node: StandIn(randomness.drawn, (node.args[0], method), _without_generator(node))


def _bernoulli(node: fx.Node) -> StandIn:
    return StandIn(randomness.bernoulli, node.args, {})


def _without_generator(node: fx.Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name != "generator"}


_STAND_INS: dict[str, Callable[[fx.Node], StandIn]] = {
    "aten.dropout.default": _dropout,
    "aten.dropout_.default": _dropout,
    "aten.feature_dropout.default": _dropout,
    "aten.feature_dropout_.default": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli_.float": _in_place("bernoulli_"),
    "aten.uniform_.default": _in_place("uniform_"),
    "aten.normal_.default": _in_place("normal_"),
    "aten.exponential_.default": _in_place("exponential_"),
    "aten.rand_like.default": _like("uniform_"),
    "aten.randn_like.default": _like("normal_"),
    "aten.rand.default": _factory("uniform_"),
    "aten.randn.default": _factory("normal_"),
}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers; raises ``DecomposeError`` for an op that cannot be drawn per sample."""
    if isinstance(node.target, HigherOrderOperator):
        _refuse_random_region(node)
        return False
    if not isinstance(node.target, OpOverload) or not _draws(node):
        return False
    if op_name(node) not in _STAND_INS:
        raise DecomposeError(
            f"random op {describe(node)} is not supported: its draw cannot be repeated in recompute; supported are "
            "dropout, dropout1d/2d/3d, attention with dropout, bernoulli, rand, randn, uniform_, normal_ and "
            "exponential_. Replace it by one of these, or pass its result in with the batch"
        )
    return True


def stand_in(node: fx.Node) -> StandIn:
    return _STAND_INS[op_name(node)](node)


def _draws(node: fx.Node) -> bool:
    name = op_name(node).split(".")[1]
    if name in ("dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "feature_alpha_dropout"):
        return bool(argument(node, 2, "train")) and argument(node, 1, "p") > 0
    if name == "scaled_dot_product_attention":
        return bool(argument(node, 4, "dropout_p", 0.0) > 0)
    if name in ("rrelu", "rrelu_"):
        return bool(argument(node, 3, "training", False))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        values = {parameter.name: argument(node, i, parameter.name) for i, parameter in enumerate(_parameters(node))}
        return bool(values["train"]) and values["dropout"] > 0
    assert isinstance(node.target, OpOverload)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _parameters(node: fx.Node) -> Any:
    assert isinstance(node.target, OpOverload)
    return node.target._schema.arguments


def _refuse_random_region(node: fx.Node) -> None:
    for value in node.all_input_nodes:
        region = value.meta.get("val")
        owner = value.graph.owning_module
        if value.op == "get_attr" and owner is not None:
            region = getattr(owner, str(value.target), None)
        if not isinstance(region, fx.GraphModule):
            continue
        for inner in region.graph.nodes:
            if isinstance(inner.target, HigherOrderOperator):
                _refuse_random_region(inner)
            elif isinstance(inner.target, OpOverload) and _draws(inner):
                raise DecomposeError(
                    f"random op {describe(inner)} lies inside a region of its own (torch.no_grad, autocast or control "
                    "flow), where it cannot be drawn per sample: move it out of that region"
                )
