"""What a Lab is given, looked at before anything is made of it."""

from typing import Any

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Machine

__all__ = ["check_kinds"]


def check_kinds(optimizer: Any, machine: Any, loss_fn: Any) -> None:
    """Mistakes that would show later, far from where they were made."""
    from torch.optim import Optimizer

    wrong = []
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        wrong.append(
            f"optimizer is a {type(optimizer).__name__}, expected one of torch.optim over the model's parameters"
        )
    if machine is not None and not isinstance(machine, Machine | str):
        wrong.append(f"machine is a {type(machine).__name__}, expected a Machine or a preset's name such as '4x4090'")
    if loss_fn is not None and not callable(loss_fn):
        wrong.append(f"loss_fn is a {type(loss_fn).__name__}, expected a function of (output, target)")
    if wrong:
        raise HarmonyError("; ".join(wrong))
