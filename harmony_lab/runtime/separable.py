"""Whether an optimizer may step its parameters part after part: told by trying it on a few small ones."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["steps_parameters_together"]

_SHAPE = (3, 4)
_MAGNITUDES = (1e-3, 1.0, 1e2, 1e4)  # of the gradients: a norm over all of them is far from the norm of any but one
_NUM_STEPS = 2  # what a step remembers shows in the second
_TOLERANCE = 1e-4


def steps_parameters_together(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters end elsewhere when ``step()`` is called for one after the other instead of for all at once.

    Asks optimizers like the user's, made of its ``defaults`` or else of its first group's options, on float64
    stand-ins; the user's own is only read and the random state stays as it is.  One that cannot be made that way, or
    fails on them, is taken to treat each parameter by itself.
    """
    kind = type(optimizer)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    for options in (optimizer.defaults, group):
        try:
            together, apart = (_moves(kind, options, apart=apart) for apart in (False, True))
        except Exception:  # whatever a class of the user's raises when it is made in a way it does not expect
            continue
        return not all(map(_alike, together, apart))
    return False


def _moves(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], *, apart: bool) -> list[Tensor]:
    """How far each stand-in is from its start after a few steps, of all at once or of one after the other."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)  # an optimizer that draws numbers draws the same both ways
        pattern = torch.linspace(-1.0, 1.0, _SHAPE[0] * _SHAPE[1], dtype=torch.float64).reshape(_SHAPE)
        starts = [1.0 + pattern * (number + 1) for number in range(len(_MAGNITUDES))]
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        made: Any = kind  # a subclass may take other arguments than Optimizer does
        optimizer = made(parameters, **_accepted(kind, options))
        for step in range(_NUM_STEPS):
            for part in [[number] for number in range(len(parameters))] if apart else [range(len(parameters))]:
                for number in part:
                    magnitude = _MAGNITUDES[(number + step) % len(_MAGNITUDES)]  # other ratios in every step
                    parameters[number].grad = pattern.flip(0) * magnitude
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return [parameter.detach() - start for parameter, start in zip(parameters, starts, strict=True)]


def _alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(a.abs().max()), equal_nan=True)


def _accepted(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the constructor takes: some optimizers keep more in ``defaults`` than they accept."""
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in accepted}
