"""What a Lab is given, looked at before anything is made of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Machine

if TYPE_CHECKING:
    from harmony_lab.layers import LayerSequence

__all__ = ["check_kinds", "check_optimizer", "require_folder"]


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


def check_optimizer(optimizer: Any, layers: "LayerSequence") -> None:
    """Raise ``HarmonyError`` for one that cannot train these layers pack by pack."""
    from harmony_lab.runtime.optimizer import PackOptimizer

    if optimizer is not None:
        PackOptimizer(optimizer, layers)


def require_folder(path: Path, what: str) -> None:
    """Raise ``HarmonyError`` for a file that could not be written there; ``what`` is how it was asked for."""
    if not path.parent.is_dir():
        raise HarmonyError(f"{what} {path}: there is no folder {path.parent}; make it, or give a file in one there is")
    if path.is_dir():
        raise HarmonyError(f"{what} {path} is a folder; give a file in it, such as {path / 'file'}")
