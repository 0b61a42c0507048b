"""PackOptimizer: the user's own torch.optim optimizer, stepping a part of its parameters at a time."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.runtime.separable import steps_parameters_together

__all__ = ["PackOptimizer"]

_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step, over all parameters together",
    "SparseAdam": "it takes sparse gradients, gradients here are dense",
}


class PackOptimizer:
    """Steps the parameters it is given gradients for; groups, state and learning rate schedulers stay the user's.

    Raises ``HarmonyError`` for optimizers that cannot step a part of their parameters.  One that couples parameters
    inside ``step()`` is found by trying it (see ``steps_parameters_together``).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: LayerSequence) -> None:
        name = type(optimizer).__name__
        _refuse_hooks(optimizer)
        _refuse_other_models(optimizer, layers)
        reason = next((_REFUSED[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _REFUSED), None)
        if reason is None and _needs_closure(optimizer):
            reason = "its step() needs a closure"
        if reason is None and steps_parameters_together(optimizer):
            reason = (
                "what its step() does to one parameter depends on the others, or on how often step() is called "
                "(clipping by the norm of all gradients, for example, or a count of steps kept for all of them)"
            )
        if reason is not None:
            raise HarmonyError(
                f"{name} cannot update a model pack by pack: {reason}. Use an optimizer that treats each parameter by "
                "itself, such as torch.optim.AdamW or SGD"
            )
        self._optimizer = optimizer
        self._layers = layers

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state for the model's parameters, by now."""
        states = (self._optimizer.state.get(self._layers.tensors[name], {}) for name in self._layers.state)
        return sum(getattr(value, "nbytes", 0) for state in states for value in state.values())

    def begin(self) -> None:
        """Before a step: forget gradients that are left over, as ``optimizer.zero_grad()`` does."""
        _refuse_hooks(self._optimizer)
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


def _refuse_other_models(optimizer: torch.optim.Optimizer, layers: LayerSequence) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trainable = [layers.tensors[name] for name, spec in layers.state.items() if spec.trainable]
    if trainable and not any(id(parameter) in held for parameter in trainable):
        raise HarmonyError(
            f"the optimizer ({type(optimizer).__name__}) holds none of the model's {len(trainable)} trainable "
            "parameters, so nothing would be trained. It may be that of an older model: make one over this model's "
            "parameters, optimizer(model.parameters(), ...)"
        )


def _refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    own: Sequence[object] = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    of_all: Sequence[object] = [
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]
    if own or of_all:
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in (*own, *of_all))
        where = type(optimizer).__name__ if own else "all optimizers"
        raise HarmonyError(
            f"step hooks are registered on {where}: {names}. An iteration calls step() once per pack, with the "
            "gradients of that pack alone, so a hook would run several times and never see all gradients. Remove it "
            "(call remove() on the handle that registering it returned); do what comes after a step, such as an "
            "average of the weights, after each Trainer.step()"
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    return False
