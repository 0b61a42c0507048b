"""Updates: a step's use of the optimizer, on the gradients that arrive on the host or that devices have."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.places import left_gradients
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.runtime.blocks import Blocks
from harmony_lab.runtime.left_updates import LeftUpdates
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.progress import UpdateProgress

__all__ = ["GradientObserver", "Updates"]

GradientObserver = Callable[[Mapping[str, Tensor]], None]
"""Told the gradients that the optimizer is about to see, a part of them at a time."""

_CLIP_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_


class Updates:
    """One step's updates.  A step of several minibatches runs a program for each: all but the ``last`` one only add
    their gradients up, here on the host.

    ``max_grad_norm``: all gradients together are scaled to that 2-norm at most, as ``clip_grad_norm_`` does, before the
    first update; the program's updates then wait for all gradients (``ordering.updating_after``).

    ``leaves``: the program's updates are those that the step ``before`` has left, if there is one; this step's own are
    ``left`` in the end (``planner.overlapping``).
    """

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: PackOptimizer,
        *,
        max_grad_norm: float | None = None,
        observe: GradientObserver | None = None,
        leaves: bool = False,
        before: LeftUpdates | None = None,
    ) -> None:
        self.leaves = leaves
        self.left: LeftUpdates | None = None
        self.complete = False  # all of the step was done, but for what it has left
        self._before = before
        self.progress = UpdateProgress()
        self.last = True
        self.norm: float | None = None
        self._layers = layers
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._observe = observe
        self._sums: dict[str, Tensor] = {}  # of the minibatches before
        self._complete: dict[str, Tensor] | None = None  # clipped: all gradients, from the first update on
        self._scale: Tensor | None = None
        self._to_return: dict[tuple[int, int], int] = {}  # blocks that are not on the host yet, of what devices updated

    @property
    def sum_bytes(self) -> int:
        """Host memory of the gradients that wait for the last minibatch."""
        return sum(tensor.nbytes for tensor in self._sums.values())

    def perform(self, op: Op, program: Program, blocks: Blocks) -> None:
        """Step the parameters whose first layer is among the op's, each with the sum of its gradients."""
        if self.leaves:
            if self._before is not None:
                self._before.perform(op.layers)
            return
        if not self.last:
            for name, gradient in self._arrived(op, program, blocks).items():
                if name in self._sums:
                    self._sums[name].add_(gradient)
                else:
                    self._sums[name] = gradient.clone()
            return
        if self._max_grad_norm is None:
            gradients = self._gradients(op, program, blocks)
        else:
            gradients = self._clipped(op, program, blocks, self._max_grad_norm)
        if self._observe is not None:
            self._observe(gradients)
        with self.progress.updating(op.layers):
            self._optimizer.step(gradients)

    def perform_on_device(
        self,
        op: Op,
        weights: Mapping[str, Tensor],
        parts: Sequence[Mapping[str, Tensor]],
        states: dict[str, dict[str, Any]] | None = None,
        *,
        num_returning: int = 1,
    ) -> None:
        """Step the device's weights of the parameters whose first layer is among the op's, layer by layer, each with
        the sum of its gradients in ``parts``.

        ``states``: of the optimizer, if it is not what stays on the device.  ``num_returning``: so many blocks, weights
        and maybe state, count as half done until they are on the host again (``returned``); 0: what another device
        makes of the same is what the host gets.
        """
        if not self.last or self._max_grad_norm is not None:
            raise ProgramError(
                "this program updates on devices, each layer as soon as its gradients are there",
                [f"{op}: max_grad_norm and several minibatches per update need updates on the host, after all of them"],
            )
        state = self._layers.state
        gradients = self._summed(op, parts)
        if num_returning:
            if self._observe is not None:
                self._observe({name: gradient.to("cpu") for name, gradient in gradients.items()})
            self.progress.begin(op.layers)
            self._to_return[op.layers] = num_returning
        for layer in range(*op.layers):
            own = [name for name in gradients if state[name].layers[0] == layer]
            self._optimizer.step_on_device({name: (weights[name], gradients[name]) for name in own}, states)

    def returned(self, op: Op) -> None:
        """The weights that a device updated are on the host, or their state, which came from there."""
        self._to_return[op.layers] -= 1
        if not self._to_return[op.layers]:
            self.progress.end(op.layers)

    def _clipped(self, op: Op, program: Program, blocks: Blocks, max_norm: float) -> dict[str, Tensor]:
        if self._complete is None:
            updates = (other for other in program.ops if other.kind is OpKind.UPDATE)
            self._complete = {
                name: gradient
                for update in updates
                for name, gradient in self._gradients(update, program, blocks).items()
            }
            self._scale = self._clipping(self._complete, max_norm)
        gradients = {name: self._complete[name] for name in self._owned(op)}
        if self._scale is not None:
            for gradient in gradients.values():
                gradient.mul_(self._scale.to(gradient.dtype))
        return gradients

    def _clipping(self, complete: Mapping[str, Tensor], max_norm: float) -> Tensor | None:
        """What all gradients are to be multiplied with; None: nothing."""
        norm = total_norm(complete, self._layers)
        self.norm = norm.item()
        scale = torch.clamp(max_norm / (norm + _CLIP_EPSILON), max=1.0)
        return scale if scale.item() != 1.0 else None

    def leave(self, program: Program, blocks: Blocks) -> None:
        """In the end, when the step cannot be cancelled any more: keep the gradients for the next step's updates."""
        parts = [blocks.hand_over(index).views for index in left_gradients(program)]
        updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
        gradients = {op.layers: self._summed(op, parts) for op in updates}
        scale = None
        if self._max_grad_norm is not None:
            complete = {name: gradient for named in gradients.values() for name, gradient in named.items()}
            scale = self._clipping(complete, self._max_grad_norm)
        self.left = LeftUpdates(self._optimizer, gradients, scale)

    def describe(self) -> str:
        """What has become of the weights, in words."""
        if self.complete:
            return "All of this step was done, its updates are made."
        before = "" if self._before is None else self._before.describe()
        return f"{before} This step has updated no weights." if before else str(self.progress)

    def _gradients(self, op: Op, program: Program, blocks: Blocks) -> dict[str, Tensor]:
        """Complete: those of the minibatches before too."""
        gradients = self._arrived(op, program, blocks)
        for name, gradient in gradients.items():
            if (before := self._sums.pop(name, None)) is not None:
                gradient.add_(before)
        return gradients

    def _arrived(self, op: Op, program: Program, blocks: Blocks) -> dict[str, Tensor]:
        """Of this minibatch: a parameter that packs share has several gradients, summed up in the first of them."""
        reads = [index for index in op.reads if program.blocks[index].kind is TensorKind.GRADIENT]
        return self._summed(op, [blocks.flat(index).views for index in reads])

    def _summed(self, op: Op, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for name in self._owned(op):
            found = [views[name] for views in parts if name in views]
            assert found, f"{op}: no gradient of {name} has arrived"
            gradients[name], *others = found
            for other in others:
                gradients[name].add_(other)
        return gradients

    def _owned(self, op: Op) -> list[str]:
        """The trainable parameters whose first layer is among the op's."""
        state = self._layers.state
        names = self._layers.parameters_of(*op.layers)
        return [name for name in names if state[name].trainable and op.layers[0] <= min(state[name].layers)]


def total_norm(gradients: Mapping[str, Tensor], layers: LayerSequence) -> Tensor:
    """Their 2-norm, taken together, in the model's order of parameters: to the bit what ``clip_grad_norm_`` finds."""
    order = {name: number for number, (name, _) in enumerate(layers.model.named_parameters())}
    names = sorted(gradients, key=lambda name: order.get(name, math.inf))
    norm: Tensor = torch.nn.utils.get_total_norm([gradients[name] for name in names])
    return norm
