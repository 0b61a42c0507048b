"""Losses that are no mean or sum over samples: what in them couples the samples of a batch, said with what to do."""

from collections.abc import Iterable

import torch
from torch import fx

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.graph import DataFlow
from harmony_lab.profiler.nodes import describe, growing_dims, op_family, size_factor

__all__ = ["IN_ONE_MICROBATCH", "enters_samples", "not_recognised"]

IN_ONE_MICROBATCH = (
    'Pass loss_reduction="mean" to train on the mean of the losses that the microbatches have each among their own '
    "samples; with a plan of one microbatch (both microbatch sizes that of the minibatch) this is the loss as written"
)

_ADDS_UP = ("mean", "sum", "mse_loss", "l1_loss", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "smooth_l1_loss")
_ROOTS = ("sqrt", "rsqrt", "log", "exp", "pow", "square", "reciprocal", "log1p", "tanh", "sigmoid", "abs", "clamp")


def not_recognised(flow: DataFlow, node: fx.Node) -> DecomposeError:
    """The error for a loss that was read from its end up to this node."""
    meeting = next(iter(_meetings(flow, node)), None)
    name = op_family(node)
    varying = [operand for operand in node.all_input_nodes if _is_varying_scalar(flow, operand)]
    if meeting is not None:
        what = (
            f"samples of a batch meet in {describe(meeting)}, which takes them together in another way than a mean or "
            "a sum does"
        )
        cure = "Use a loss that looks at each sample alone and then takes the mean"
    elif name in ("mul", "div") and any(_counts_samples(flow, operand) for operand in node.all_input_nodes):
        what = f"it is scaled by the number of samples in {describe(node)}"
        cure = "Use a mean or a sum over samples"
    elif name in ("mul", "div") and len(varying) > 1:
        what = f"{describe(node)} is a {'product' if name == 'mul' else 'ratio'} of two results that all samples enter"
        cure = "Multiply or divide for each sample, before the mean"
    elif name in _ROOTS and varying:
        what = f"{describe(node)} is taken of a result that all samples enter: {name} of a mean is no mean of {name}"
        cure = f"Train on what is inside ({name} changes the size of its gradient, not where it is least), or take "
        cure += f"{name} for each sample, before the mean"
    else:
        what = f"it ends in {describe(node)}, from which it does not follow how losses of microbatches combine"
        cure = "Use a mean or a sum over samples"
    return DecomposeError(
        f"the loss is no mean or sum over samples, so the losses of microbatches do not make up the loss of the "
        f'minibatch: {what}. {cure}. If it is a mean or a sum after all, say so: loss_reduction="mean" or "sum". '
        f"{IN_ONE_MICROBATCH}"
    )


def enters_samples(flow: DataFlow, node: fx.Node) -> bool:
    """Whether what a node computes depends on the microbatch: on the batch, its number of samples, or chance."""
    captured = flow.captured
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        source = captured.sources.get(current)
        size = size_factor(current.meta.get("val"), captured.symbol)
        batch = source is not None and source.role == "batch"
        changing = source is not None and source.name in flow.updated
        if batch or changing or (size is not None and size[0] != 0) or current in flow.random:
            return True
        pending += flow.needs[current]
    return False


def _meetings(flow: DataFlow, node: fx.Node) -> Iterable[fx.Node]:
    """The nodes at and above one in which a dimension of samples ends, but for means and sums."""
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in seen or not _is_varying(flow, current):
            continue
        seen.add(current)
        symbol = flow.captured.symbol
        ends = growing_dims(current, symbol) == [] and any(growing_dims(n, symbol) for n in current.all_input_nodes)
        if ends and not _adds_up(flow, current):
            yield current
        elif not ends:
            pending += current.all_input_nodes


def _adds_up(flow: DataFlow, node: fx.Node) -> bool:
    """Whether a node takes all samples to a single number by a mean or a sum."""
    return op_family(node) in _ADDS_UP and node.meta["val"].ndim == 0


def _is_varying(flow: DataFlow, node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and enters_samples(flow, node)


def _is_varying_scalar(flow: DataFlow, node: fx.Node) -> bool:
    return _is_varying(flow, node) and node.meta["val"].ndim == 0


def _counts_samples(flow: DataFlow, node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return False
    return isinstance(value, torch.SymInt | torch.SymFloat) and flow.captured.symbol in value.node.expr.free_symbols
