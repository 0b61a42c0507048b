"""A layer made of modules: called one after another with the state that the layer is given."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerCall
from harmony_lab.profiler.batch import TensorTree
from harmony_lab.profiler.capture import loss_of
from harmony_lab.profiler.layer_ops import zero_without_targets
from harmony_lab.profiler.randomness import BatchDim, PerSampleRandomness

__all__ = ["Group", "LossCount", "ModulesFunction", "loss_count", "weight_of"]


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one layer.  ``state`` per module: local name -> position in (parameters, buffers)."""

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    local: tuple[dict[str, tuple[str, int]], ...]


@dataclass(frozen=True, slots=True)
class LossCount:
    """What a minibatch's loss is a mean or a sum of."""

    reduction: str
    ignore: int | None = None
    class_weight: torch.Tensor | None = None


_one_at_a_time = threading.Lock()
"""A functional call lends tensors to a module for its time, so two devices must not call at once."""


class ModulesFunction:
    """A ``LayerFunction`` that calls modules one after another; the last layer's also calls the loss."""

    def __init__(self, group: Group, loss_fn: Callable[..., Any] | None, count: LossCount) -> None:
        self.group = group
        self.loss_fn = loss_fn
        self.count = count
        self.inputs: TensorTree | None = None
        self.outputs: TensorTree | None = None
        self.targets: TensorTree | None = None
        self.num_input_batch = 0
        self.clones_inputs = False
        self.random_ops: tuple[BatchDim, ...] = ()

    def __call__(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        call: LayerCall,
    ) -> tuple[Any, ...]:
        assert self.inputs is not None
        given = [*inputs, *batch[: self.num_input_batch]]
        if self.clones_inputs:
            given = [tensor.clone() for tensor in given]
        randomness = PerSampleRandomness(call, self.random_ops) if self.random_ops else nullcontext()
        with _one_at_a_time, randomness:
            value = self.run(parameters, buffers, self.inputs.build(given), batch[self.num_input_batch :])
        return (
            (value,) if self.outputs is None else tuple(self.outputs.match(value, f"the output of {self.group.name}"))
        )

    def run(self, parameters: Sequence[Any], buffers: Sequence[Any], value: Any, targets: Sequence[Any]) -> Any:
        state = {"parameter": parameters, "buffer": buffers}
        for position, (module, local) in enumerate(zip(self.group.modules, self.group.local, strict=True)):
            own = {name: state[role][index] for name, (role, index) in local.items()}
            if module is self.loss_fn:
                value = self._loss(lambda *args, m=module, o=own: functional_call(m, o, args), value, targets)
            elif position == 0 and self.num_input_batch and isinstance(value, tuple):
                value = functional_call(module, own, value)
            elif position == 0 and self.num_input_batch and isinstance(value, Mapping):
                value = functional_call(module, own, (), dict(value))
            else:
                value = functional_call(module, own, (value,))
        if self.loss_fn is not None and not isinstance(self.loss_fn, nn.Module):
            value = self._loss(self.loss_fn, value, targets)
        return value

    def _loss(self, loss_fn: Callable[..., Any], value: Any, targets: Sequence[Any]) -> torch.Tensor:
        assert self.targets is not None
        wanted = self.targets.build(targets)
        loss = loss_of(loss_fn(value, wanted))
        return loss if self.count.ignore is None else zero_without_targets(loss, wanted, self.count.ignore)


def loss_count(loss_fn: Callable[..., Any]) -> LossCount:
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and loss_fn.reduction == "mean":
        return LossCount("mean", loss_fn.ignore_index, loss_fn.weight)
    reduction = getattr(loss_fn, "reduction", None)
    if isinstance(loss_fn, nn.modules.loss._Loss) and reduction in ("mean", "sum"):
        return LossCount(reduction)
    if loss_fn in (functional.cross_entropy, functional.nll_loss):
        return LossCount("mean", -100)
    if loss_fn in (functional.mse_loss, functional.l1_loss, functional.binary_cross_entropy_with_logits):
        return LossCount("mean")
    raise DecomposeError(
        "it does not follow from this loss_fn how losses of microbatches combine. "
        'Pass loss_reduction="mean" if the loss is a mean over samples, or loss_reduction="sum" if it is a sum'
    )


def weight_of(count: LossCount, batched: str) -> Callable[[Mapping[str, Any]], float]:
    def samples(batch: Mapping[str, Any]) -> float:
        return 1.0 if count.reduction == "sum" else float(batch[batched].shape[0])

    if count.ignore is None:
        return samples

    def targets(batch: Mapping[str, Any]) -> float:
        wanted = batch["targets"]
        if wanted.is_floating_point():  # probabilities: none is ignored
            return samples(batch)
        counted = wanted[wanted != count.ignore]
        return float(counted.numel() if count.class_weight is None else count.class_weight[counted].sum())

    return targets
