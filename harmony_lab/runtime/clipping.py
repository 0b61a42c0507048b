"""Clipping: gradients are scaled by the norm of all of them, as ``torch.nn.utils.clip_grad_norm_`` does."""

import math
from collections.abc import Iterable, Mapping
from threading import Lock

import torch
from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence

__all__ = ["Clipping"]

_EPSILON = 1e-6  # that of clip_grad_norm_


class Clipping:
    """Of one step.  ``norm``: of all gradients, once it is known.  ``scale``: what they are multiplied with; None: as
    they are.

    All are looked at together, on the host, or a few at a time where they are, by several threads at once.
    """

    def __init__(self, layers: LayerSequence, max_norm: float) -> None:
        self.norm: float | None = None
        self.scale: Tensor | None = None
        self._layers = layers
        self._max_norm = max_norm
        self._scales: dict[torch.dtype, Tensor] = {}
        self._norms: dict[str, Tensor] = {}  # of what was looked at, by parameter
        self._lock = Lock()

    def look_at_all(self, gradients: Mapping[str, Tensor]) -> None:
        """``gradients``: of all parameters that are trained, or the norms of each."""
        norm = _total_norm(gradients, self._layers)
        scale = torch.clamp(self._max_norm / (norm + _EPSILON), max=1.0)
        if scale.item() != 1.0:
            self.scale = scale
            types = {self._layers.tensors[name].dtype for name in gradients}
            self._scales = {dtype: scale.to(dtype) for dtype in types}
        self.norm = norm.item()

    def look(self, gradients: Mapping[str, Tensor]) -> None:
        """``gradients``: of some, on a device.  Another device may have the same."""
        for name, gradient in gradients.items():
            self._norms[name] = torch.linalg.vector_norm(gradient).to("cpu")

    def settle(self) -> None:
        """Before an update on a device.  Raises ``ProgramError`` where it does not come after a look at all."""
        with self._lock:
            if self.norm is None:
                trained = [name for name, spec in self._layers.state.items() if spec.trainable]
                _require_all(trained, self._norms)
                self.look_at_all(self._norms)

    def apply(self, gradients: Iterable[Tensor]) -> None:
        """In place, with no memory."""
        if self.scale is not None:
            for gradient in gradients:
                gradient.mul_(self._scales[gradient.dtype])


def _require_all(trained: Iterable[str], seen: Mapping[str, Tensor]) -> None:
    unseen = [name for name in trained if name not in seen]
    if unseen:
        raise ProgramError(
            "this program updates on devices before the norm of all gradients is known, which max_grad_norm needs: "
            "train with a program that was made for that, baselines(..., runnable=True, clipped=True)",
            [f"{len(unseen)} parameters, such as {unseen[0]!r}, were not looked at"],
        )


def _total_norm(gradients: Mapping[str, Tensor], layers: LayerSequence) -> Tensor:
    """Their 2-norm, taken together, in the model's order of parameters: to the bit what ``clip_grad_norm_`` finds."""
    order = {name: number for number, (name, _) in enumerate(layers.model.named_parameters())}
    names = sorted(gradients, key=lambda name: order.get(name, math.inf))
    norm: Tensor = torch.nn.utils.get_total_norm([gradients[name] for name in names])
    return norm
