"""Copies of what is trained, and its loss in plain PyTorch: of the whole model, or of a shortened one."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.profiler.recipe import recipe_of
from harmony_lab.runtime.optimizer import move_state

__all__ = ["Copy", "PlainLoss", "copied", "copied_layers"]

PlainLoss = Callable[[Mapping[str, Tensor], tuple[int, int], int], Tensor]
"""Of the tensors of a microbatch by name, the samples of the minibatch that it is, and the seed of the step."""
_ON_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Layers over tensors of their own, the optimizer over the same, and the loss over the same."""

    layers: LayerSequence
    optimizer: torch.optim.Optimizer
    loss: PlainLoss


def copied(layers: LayerSequence, optimizer: torch.optim.Optimizer) -> Copy:
    """The loss is that of a copy of the user's own model."""
    memo: dict[int, Any] = {}
    recipe = recipe_of(layers).copied(memo)
    tensors = {name: memo.get(id(tensor), tensor) for name, tensor in layers.tensors.items()}
    made = replace(layers, model=recipe.model, tensors=tensors, recipe=recipe)

    def loss(batch: Mapping[str, Tensor], samples: tuple[int, int], seed: int) -> Tensor:
        with reproducible_randomness(layers, seed, samples):
            return recipe.plain_loss(batch)

    return Copy(layers=made, optimizer=_copied_optimizer(optimizer, memo), loss=loss)


def _copied_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Over the parameters that ``memo`` has for its own, with their state.

    An optimizer copies its groups and state alone.  What a class keeps beside them comes with it, but for functions
    that were set on this instance: a learning rate scheduler's would step the original.
    """
    made = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(made) and not inspect.isroutine(value):
            setattr(made, name, copy.deepcopy(value, memo))
    for group in made.param_groups:
        for parameter in group["params"]:
            move_state(made, group, parameter, _ON_HOST)  # some may be on the devices that update
    return made


def copied_layers(layers: LayerSequence, optimizer: torch.optim.Optimizer) -> Copy:
    """Of these layers alone, though the optimizer has more; their loss is found by running one after the other."""
    tensors = {
        name: nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.detach().clone()
        for name, tensor in layers.tensors.items()
    }
    made = replace(layers, tensors=tensors)
    memo: dict[int, Any] = {id(layers.tensors[name]): tensor for name, tensor in tensors.items()}

    def loss(batch: Mapping[str, Tensor], samples: tuple[int, int], seed: int) -> Tensor:
        return _loss(made, batch, samples, seed)

    return Copy(layers=made, optimizer=_optimizer_of_part(optimizer, memo), loss=loss)


def _optimizer_of_part(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Over copies of some of the parameters; of the others nothing is copied, one without elements stands for them."""
    other = nn.Parameter(torch.empty(0))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if id(parameter) not in memo:
            memo[id(parameter)] = other
            if parameter in optimizer.state:
                memo[id(optimizer.state[parameter])] = {}
    made = _copied_optimizer(optimizer, memo)
    made.state.pop(other, None)
    for group in made.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not other]
    return made


def _loss(layers: LayerSequence, batch: Mapping[str, Tensor], samples: tuple[int, int], seed: int) -> Tensor:
    state = {name: layers.tensors[name].to(getattr(torch, spec.device_dtype)) for name, spec in layers.state.items()}
    call = LayerCall(samples=samples, sizes={"batch": samples[1] - samples[0]}, seed=seed, device=_ON_HOST)
    values: dict[str, Tensor] = {}
    for layer in layers.layers:
        outputs = layer.function(
            [state[name] for name in layer.parameters],
            [layers.tensors[name] for name in layer.buffers],
            [values[name] for name in layer.inputs],
            [batch[name] for name in layer.batch_inputs],
            replace(call, first_random_op=layer.first_random_op),
        )
        values.update(zip(layer.outputs, outputs, strict=True))
    (loss,) = layers.boundaries[-1]
    return values[loss.name]
