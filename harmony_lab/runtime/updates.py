"""Updates: a step's use of the optimizer, on the gradients that arrive on the host or that devices have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.places import left_gradients
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.roles import Role
from harmony_lab.runtime.blocks import Blocks
from harmony_lab.runtime.clipping import Clipping
from harmony_lab.runtime.left_updates import LeftUpdates
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.progress import UpdateProgress

__all__ = ["GradientObserver", "Updates"]

GradientObserver = Callable[[Mapping[str, Tensor]], None]
"""Told the gradients that the optimizer is about to see, a part of them at a time."""


class Updates:
    """One step's updates.  A step of several minibatches runs a program for each, which has a ``role`` (``begin``);
    gradients are added up here, on the host.

    ``max_grad_norm``: all gradients together are scaled to that 2-norm at most, as ``clip_grad_norm_`` does, before the
    first update; the program's updates then wait for all gradients (``ordering.updating_after``), or, on devices, until
    each was looked at where it is.

    ``leaves``: the first program's updates are those that the step ``before`` has left, if there is one
    (``planner.overlapping``); this step's own are ``left`` in the end.  What the first one's gradients lie in stays
    theirs until then, so those of others are added up in it.
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
        self.role = Role.ALONE
        self.last = True
        self._layers = layers
        self._optimizer = optimizer
        self._clipping = None if max_grad_norm is None else Clipping(layers, max_grad_norm)
        self._observe = observe
        self._sums: dict[str, Tensor] = {}  # of the minibatches before
        self._to_leave: dict[tuple[int, int], dict[str, Tensor]] = {}  # the same, by the layers of each update
        self._complete: dict[str, Tensor] | None = None  # clipped: all gradients, from the first update on
        self._to_return: dict[tuple[int, int], int] = {}  # blocks that are not on the host yet, of what devices updated

    @property
    def norm(self) -> float | None:
        """Of all gradients, where it is limited."""
        return None if self._clipping is None else self._clipping.norm

    @property
    def sum_bytes(self) -> int:
        """Host memory of the gradients that wait for the last minibatch, but where it is that of gradients to leave."""
        return 0 if self.leaves else sum(tensor.nbytes for tensor in self._sums.values())

    def begin(self, role: Role, *, last: bool) -> None:
        """A minibatch, which may be the last of the step."""
        self.role, self.last = role, last

    def perform(self, op: Op, program: Program, blocks: Blocks) -> None:
        """Step the parameters whose first layer is among the op's, each with the sum of its gradients."""
        if self.role is Role.LEAVING:
            if self._before is not None:
                self._before.perform(op.layers)
            return
        if self.role is Role.ADDING:
            self._add(self._arrived(op, program, blocks))
            return
        if self._clipping is None:
            gradients = self._gradients(op, program, blocks)
        else:
            gradients = self._clipped(op, program, blocks, self._clipping)
        if self._observe is not None:
            self._observe(gradients)
        with self.progress.updating(op.layers):
            self._optimizer.step(gradients)

    def prepare_on_device(self, op: Op) -> None:
        """Before the update.  Raises ``ProgramError`` where the program was not made for how this step updates."""
        if self.role is Role.ADDING or self._sums:
            raise ProgramError(
                "this program updates on devices with the gradients of one minibatch alone: several minibatches per "
                "update need programs of their own (baselines(..., runnable=True), Baseline.several)",
                [str(op)],
            )
        if self._clipping is not None:
            self._clipping.settle()

    def look(self, op: Op, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """At gradients on a device, before the first update.  Those of a parameter that several parts have are added up
        in the first."""
        gradients = self._summed(op, parts)
        if self._clipping is not None:
            self._clipping.look(gradients)

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
        state = self._layers.state
        gradients = self._summed(op, parts)
        if self._clipping is not None:
            self._clipping.apply(gradients.values())
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

    def _clipped(self, op: Op, program: Program, blocks: Blocks, clipping: Clipping) -> dict[str, Tensor]:
        if self._complete is None:
            updates = (other for other in program.ops if other.kind is OpKind.UPDATE)
            self._complete = {
                name: gradient
                for update in updates
                for name, gradient in self._gradients(update, program, blocks).items()
            }
            clipping.look_at_all(self._complete)
        gradients = {name: self._complete[name] for name in self._owned(op)}
        clipping.apply(gradients.values())
        return gradients

    def end(self, program: Program, blocks: Blocks) -> None:
        """All ops of a minibatch are done.  Raises ``StepAborted`` where the step was cancelled before it was the last.

        A step that leaves its updates cannot be cancelled from then on.
        """
        if self.role is Role.LEAVING:
            self._hold(program, blocks)
        elif self.role is Role.ADDING:  # where devices update
            for index in left_gradients(program):
                self._add(blocks.flat(index).views)
        if self.leaves and self.last:
            self.progress.finish()
            if self._clipping is not None:
                self._clipping.look_at_all(self._sums)
            scale = None if self._clipping is None else self._clipping.scale
            self.left = LeftUpdates(self._optimizer, self._to_leave, scale)

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient.clone()

    def hand_over(self, layers: tuple[int, int], views: Mapping[str, Tensor]) -> None:
        """Give the last minibatch, for a device to add to, the sums of parameters whose first layer is among these."""
        for name, view in views.items():
            if name in self._sums and layers[0] <= min(self._layers.state[name].layers):
                view.copy_(self._sums.pop(name))

    def _hold(self, program: Program, blocks: Blocks) -> None:
        """Keep the gradients, for others to be added to and for the next step's updates."""
        parts = [blocks.hand_over(index).views for index in left_gradients(program)]
        updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
        self._to_leave = {op.layers: self._summed(op, parts) for op in updates}
        self._sums = {name: gradient for named in self._to_leave.values() for name, gradient in named.items()}

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
