"""Whether a model and its loss take what a batch gives them: the reason for most calls that fail."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from harmony_lab.errors import DecomposeError

__all__ = ["refuse_other_arguments"]


def refuse_other_arguments(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> None:
    """Raise ``DecomposeError`` where ``model.forward`` cannot be called with the batch, or ``loss_fn`` with a pair."""
    name = f"{type(model).__name__}.forward"
    if loss_fn is None:
        cure = "if the batch is (inputs, targets), pass loss_fn=..., a function of (output, targets)"
        _bind(model.forward, name, batch, f"{cure}; otherwise give a batch as forward takes it")
    else:
        _bind(model.forward, name, batch[0], "in a batch of (inputs, targets), give the inputs as forward takes them")
        _bind(loss_fn, "loss_fn", (None, None), "it is called with (output, targets)")


def _bind(function: Callable[..., Any], name: str, given: Any, cure: str) -> None:
    named: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    unnamed = () if isinstance(given, Mapping) else given if isinstance(given, tuple | list) else (given,)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # such as a function written in C, which does not say
    try:
        signature.bind(*unnamed, **named)
    except TypeError as error:
        parameters = ", ".join(signature.parameters)
        what = f"{', '.join(map(str, named))} by name" if named else f"{len(unnamed)} in their order"
        raise DecomposeError(f"{name} takes ({parameters}) and is given {what}: {error}; {cure}") from None
