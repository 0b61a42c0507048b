"""PackOptimizer: the user's own torch.optim optimizer, stepping a part of its parameters at a time."""

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence

__all__ = ["PackOptimizer"]

_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step, over all parameters together",
    "SparseAdam": "it takes sparse gradients, gradients here are dense",
}


class PackOptimizer:
    """Steps the parameters it is given gradients for; groups, state and learning rate schedulers stay the user's.

    Raises ``HarmonyError`` for optimizers that cannot step a part of their parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: LayerSequence) -> None:
        name = type(optimizer).__name__
        reason = next((_REFUSED[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _REFUSED), None)
        if reason is None and _needs_closure(optimizer):
            reason = "its step() needs a closure"
        if reason is not None:
            raise HarmonyError(
                f"{name} cannot update a model pack by pack: {reason}. Use an optimizer that treats each parameter by "
                "itself, such as torch.optim.AdamW or SGD"
            )
        self._optimizer = optimizer
        self._layers = layers

    def begin(self) -> None:
        """Before a step: forget gradients that are left over, as ``optimizer.zero_grad()`` does."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the parameters of these names."""
        parameters = [self._layers.tensors[name] for name in gradients]
        try:
            for parameter, gradient in zip(parameters, gradients.values(), strict=True):
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for parameter in parameters:
                parameter.grad = None


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    return False
