"""SwappedState: the optimizer's state of what a device updates, on that device for a part of an iteration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harmony_lab.runtime.optimizer import PackOptimizer, tensors_in
from harmony_lab.runtime.state_room import StateRoom

__all__ = ["SwappedState", "fetched", "returning"]

_Pairs = list[tuple[Tensor, Tensor]]
_Layers = tuple[int, int]
_ON_HOST = torch.device("cpu")


@dataclass(slots=True)
class SwappedState:
    """Content of an OPTIMIZER block.  ``states``: by the parameter's name; none before its first update.

    ``is_complete``: there was state of all parameters when it was fetched.  ``room``: on the device.
    """

    states: dict[str, dict[str, Any]]
    is_complete: bool
    room: StateRoom = field(default_factory=StateRoom)

    @property
    def tensors(self) -> list[Tensor]:
        return list(tensors_in(self.states))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def fetched(optimizer: PackOptimizer, layers: _Layers, device: torch.device) -> tuple[SwappedState, _Pairs]:
    """Room on a device for the state of what these layers update, and the copies that bring it there.

    What steps keep on the host whatever the parameter's device is copied too: several devices may step it.
    """
    pairs: _Pairs = []
    states = {}
    names = optimizer.updated_by(layers)
    for name in names:
        state = optimizer.state_of_parameter(name)
        if state:
            goes_along = optimizer.keeps_all_beside(name, device)

            def room(tensor: Tensor, _: Any, goes_along: bool = goes_along) -> Tensor:
                return torch.empty_like(tensor, device=device if tensor.dim() or goes_along else _ON_HOST)

            states[name] = _copied(state, None, room, pairs)
    return SwappedState(states, is_complete=len(states) == len(names)), pairs


def returning(
    optimizer: PackOptimizer, state: SwappedState, *, keeps: bool
) -> tuple[dict[str, dict[str, Any]], _Pairs]:
    """The state on the host again, by the parameter's name, once these copies are made: in the tensors that the host
    has, if ``keeps``, else in others."""
    pairs: _Pairs = []

    def room(tensor: Tensor, old: Any) -> Tensor:
        fits = isinstance(old, Tensor) and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
        return old if fits else torch.empty_like(tensor, device=_ON_HOST)

    states = {
        name: _copied(value, optimizer.state_of_parameter(name) if keeps else None, room, pairs)
        for name, value in state.states.items()
    }
    return states, pairs


def _copied(value: Any, old: Any, room: Callable[[Tensor, Any], Tensor], pairs: _Pairs) -> Any:
    """The same state in other tensors; ``old``: what is there now in its place."""
    if isinstance(value, Tensor):
        pairs.append((room(value, old), value))
        return pairs[-1][0]
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        return {key: _copied(item, known.get(key), room, pairs) for key, item in value.items()}
    if type(value) in (list, tuple):
        known_items = old if type(old) is type(value) and len(old) == len(value) else [None] * len(value)
        return type(value)(_copied(item, was, room, pairs) for item, was in zip(value, known_items, strict=True))
    return value
