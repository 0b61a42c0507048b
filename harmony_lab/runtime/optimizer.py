"""PackOptimizer: the user's own torch.optim optimizer, stepping a part of its parameters at a time."""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.runtime.separable import steps_parameters_together

__all__ = ["PackOptimizer", "move_state", "only_on_host", "tensors_in"]

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
        self._groups = _numbered_groups(optimizer)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state for the model's parameters, by now."""
        return self.state_bytes_of((0, len(self._layers)))

    def begin(self) -> None:
        """Before a step: forget gradients that are left over, as ``optimizer.zero_grad()`` does."""
        _refuse_hooks(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        self._groups = _numbered_groups(self._optimizer)

    def step(self, gradients: Mapping[str, Tensor], settings: Sequence[Mapping[str, Any]] = ()) -> None:
        """Update the parameters of these names.  ``settings``: those to do it with, where others may be set by now."""
        parameters = [self._layers.tensors[name] for name in gradients]
        groups = zip(self._optimizer.param_groups, settings, strict=False)
        changed = [(group, then, dict(group)) for group, then in groups if _differ(then, group)]
        try:
            for group, then, _ in changed:
                group.update(then)
            for parameter, gradient in zip(parameters, gradients.values(), strict=True):
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for group, _, now in changed:
                group.update(now)
            for parameter in parameters:
                parameter.grad = None

    def settings(self) -> list[dict[str, Any]]:
        """Of each group: its learning rate and whatever else it has, but the parameters."""
        return [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def step_on_device(
        self, tensors: Mapping[str, tuple[Tensor, Tensor]], states: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Update weights that are on a device: (weights, gradient) by name of the parameter, whose state is there.

        Beside ``step``, and this for others, at once: what is stepped are not the user's parameters but the device's
        weights, by an optimizer of the user's class with the user's hyperparameters, over the same state; or over that
        in ``states``, by name, which gets what is made.
        """
        known = {name: pair for name, pair in tensors.items() if id(self._layers.tensors[name]) in self._groups}
        if not known:
            return
        twin = self._twin({name: weights for name, (weights, _) in known.items()}, states)
        try:
            for weights, gradient in known.values():
                weights.grad = gradient
            twin.step()
        finally:
            for name, (weights, _) in known.items():
                weights.grad = None
                if weights in twin.state and states is None:
                    self.put_state(name, twin.state[weights])
                elif weights in twin.state and states is not None:
                    states[name] = twin.state[weights]

    def _twin(
        self, weights: Mapping[str, Tensor], states: Mapping[str, dict[str, Any]] | None
    ) -> torch.optim.Optimizer:
        """The user's optimizer as it is now, over these tensors instead of the parameters of these names."""
        optimizer = self._optimizer
        twin: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer))
        vars(twin).pop("step", None)  # what a learning rate scheduler has put around the user's
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        members: dict[int, list[Tensor]] = {}
        for name, tensor in weights.items():
            parameter = self._layers.tensors[name]
            members.setdefault(self._groups[id(parameter)], []).append(tensor)
            known = self.state_of_parameter(name) if states is None else states.get(name)
            if known is not None:
                state[tensor] = known
        twin.state = state
        twin.param_groups = [
            {**optimizer.param_groups[number], "params": tensors} for number, tensors in sorted(members.items())
        ]
        return twin

    def tell_scheduler(self) -> None:
        """After a step in which devices updated everything: schedulers ask whether ``step()`` of the user's optimizer
        was called.  Without gradients it does nothing."""
        if hasattr(self._optimizer.step, "_wrapped_by_lr_sched") and not getattr(self._optimizer, "_opt_called", False):
            self._optimizer.step()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_of(self, layers: tuple[int, int]) -> list[Tensor]:
        """The tensors of the state of what these layers update, those that there are."""
        states = [self._optimizer.state.get(parameter) for parameter in self._updated_by(layers)]
        return list(tensors_in(states))

    def state_of_parameter(self, name: str) -> dict[str, Any] | None:
        """None before its first update."""
        state: dict[str, Any] | None = self._optimizer.state.get(self._layers.tensors[name])
        return state

    def put_state(self, name: str, state: dict[str, Any]) -> None:
        self._optimizer.state[self._layers.tensors[name]] = state

    def state_bytes_of(self, layers: tuple[int, int]) -> int:
        return sum(tensor.nbytes for tensor in self.state_of(layers))

    def has_state(self, layers: tuple[int, int]) -> bool:
        """Whether all that these layers update has been updated before."""
        return all(parameter in self._optimizer.state for parameter in self._updated_by(layers))

    def move_state(self, layers: tuple[int, int], device: torch.device) -> None:
        """Bring the state of what these layers update to where ``device`` says."""
        for parameter in self._updated_by(layers):
            group = self._optimizer.param_groups[self._groups[id(parameter)]]
            move_state(self._optimizer, group, parameter, device)

    def keeps_all_beside(self, name: str, device: torch.device) -> bool:
        """Whether all of that parameter's state lies where the parameter lies, if that is ``device``."""
        group = self._optimizer.param_groups[self._groups[id(self._layers.tensors[name])]]
        return _goes_along(group, device)

    def updated_by(self, layers: tuple[int, int]) -> list[str]:
        """The trainable parameters whose first layer is among these, of those that the optimizer has."""
        tensors, state = self._layers.tensors, self._layers.state
        names = [name for name in self._layers.parameters_of(*layers) if state[name].trainable]
        return [name for name in names if state[name].layers[0] >= layers[0] and id(tensors[name]) in self._groups]

    def _updated_by(self, layers: tuple[int, int]) -> list[Tensor]:
        return [self._layers.tensors[name] for name in self.updated_by(layers)]


def _numbered_groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The number of each parameter's group, by the parameter's identity."""
    groups = enumerate(optimizer.param_groups)
    return {id(parameter): number for number, group in groups for parameter in group["params"]}


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _differ(settings: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tensors, such as a learning rate that a scheduler changes in place, by value."""
    return any(bool(torch.as_tensor(value != now.get(name)).any()) for name, value in settings.items())


def move_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, device: torch.device
) -> None:
    """Bring the optimizer's state of a parameter of that group to a device, or to the host.

    What steps keep on the host whatever the parameter's device, such as their number, is left there.
    """
    goes_along = _goes_along(group, device)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device) if value.dim() or goes_along else value
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return type(value)(map(moved, value)) if type(value) in (list, tuple) else value

    state = optimizer.state.get(parameter)
    if state and any(tensor.device != device for tensor in tensors_in(state)):
        state.update(moved(dict(state)))


def _goes_along(group: Mapping[str, Any], device: torch.device) -> bool:
    return bool(device.type == "cpu" or group.get("fused") or group.get("capturable"))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def only_on_host(optimizer: torch.optim.Optimizer) -> str:
    """Why devices cannot update with that optimizer: it knows the parameters themselves; empty where they can."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and _holds(value, parameters):
            return (
                f"{type(optimizer).__name__} keeps parameters, or another optimizer over them, in its attribute "
                f"{name!r}, so that it can only step the parameters themselves, which are on the host"
            )
    return ""


def _holds(value: object, parameters: set[int], depth: int = 3) -> bool:
    if isinstance(value, torch.optim.Optimizer) or id(value) in parameters:
        return True
    if not depth or not isinstance(value, Mapping | list | tuple | set):
        return False
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return any(_holds(item, parameters, depth - 1) for item in inner)


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
