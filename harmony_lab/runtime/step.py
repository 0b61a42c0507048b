"""Step: one iteration of a Program under way; what each kind of op does.

Methods are called from several threads, one op at a time per queue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.machine import HOST
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.roles import Role
from harmony_lab.runtime import moves
from harmony_lab.runtime.backend import Backend, Copy
from harmony_lab.runtime.blocks import Blocks
from harmony_lab.runtime.buffers import BufferUpdates
from harmony_lab.runtime.compute_memory import ComputeMemory, Usage, Usages
from harmony_lab.runtime.device_memory import BlockMemories, BlockMemory, Values
from harmony_lab.runtime.execution import clone_updated_buffers, run_backward, run_forward, run_with_gradient
from harmony_lab.runtime.host import PackReader
from harmony_lab.runtime.kept import run_keeping
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.losses import Losses
from harmony_lab.runtime.optimizer_places import OptimizerPlaces
from harmony_lab.runtime.swapped_state import SwappedState
from harmony_lab.runtime.updates import Updates

__all__ = ["Minibatch", "Step", "Training"]

_STATE = (TensorKind.WEIGHT, TensorKind.BUFFER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What stays from step to step.  ``usages``: what compute ops were seen to take of the devices' memory."""

    layers: LayerSequence
    backend: Backend
    ledgers: Sequence[Ledger]
    state: PackReader
    usages: Usages
    memory: BlockMemories
    places: OptimizerPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one run of a program works on.  ``sizes``: of the dynamic dimensions by symbol.

    ``seed``: of the step's random masks.  ``first_sample`` and ``total_weight``: where several minibatches make one
    step, the samples of those before and the weight of all (see ``Losses``).
    """

    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    seed: int
    first_sample: int = 0
    total_weight: float | None = None
    stop_on_nan: bool = False


class Step:
    """Runs the ops of a program on one minibatch.  Without ``updates`` the program has none."""

    def __init__(
        self,
        program: Program,
        memory: BlockMemory,
        training: Training,
        minibatch: Minibatch,
        updates: Updates | None = None,
    ) -> None:
        self._program = program
        self._kinds = memory.kinds
        self._loose = memory.loose
        self._device_updates = memory.updates
        self._minibatch = minibatch
        self._layers = training.layers
        self._backend = training.backend
        self._ledgers = training.ledgers
        self._updates = updates
        self._usages = training.usages
        self._blocks = Blocks(memory, training.backend, training.ledgers)
        self._buffers = BufferUpdates(program, training.layers)
        self._losses = Losses(
            program,
            training.layers,
            minibatch.tensors,
            total_weight=minibatch.total_weight,
            stop_on_nan=minibatch.stop_on_nan,
        )
        self._places = training.places
        self._stores = moves.Stores(
            parameters=training.state,
            buffers=self._buffers,
            optimizer=training.places.optimizer,
            updates=memory.updates,
            backend=training.backend,
        )
        self._moved: dict[int, list[tuple[int, int, TensorKind, int]]] = {}
        for block in program.resident:
            if updates is not None and updates.role is Role.LAST and self._kinds[block] is TensorKind.GRADIENT:
                updates.hand_over(program.blocks[block].layers, self._blocks.find(block).views)
            else:
                self._blocks.reserve(block)

    # -- the whole ------------------------------------------------------------------------------------------------

    def perform(self, index: int, op: Op) -> None:
        """Run one op and free what it frees."""
        self.begin(index, op)
        self.end(op)

    def begin(self, index: int, op: Op) -> None:
        """Run one op.  The order of SEND and FREE is all there is to them: they are on no stream of a device."""
        if op.kind not in (OpKind.SEND, OpKind.FREE):
            with self._backend.running(op.device, op.stream):
                self._perform(index, op)

    def end(self, op: Op) -> None:
        """Free what it frees."""
        for block in op.frees:
            self._blocks.free(block)

    def _perform(self, index: int, op: Op) -> None:
        match op.kind:
            case OpKind.FORWARD:
                self._forward(op)
            case OpKind.RECOMPUTE:
                self._recompute(op)
            case OpKind.BACKWARD:
                self._backward(op)
            case OpKind.UPDATE:
                assert self._updates is not None, f"{op}: nothing to update with"
                if op.device == HOST:
                    self._updates.perform(op, self._program, self._blocks)
                else:
                    self._update_on_device(op, self._updates)
            case OpKind.ALL_REDUCE:
                self._reduce(index, op)
            case OpKind.SWAP_IN:
                batch = self._minibatch.tensors
                copies = moves.swap_in(op, self._program, self._layers, self._blocks, self._stores, batch)
                self._transfer(index, copies)
            case OpKind.SWAP_OUT:
                self._swap_out(index, op)
            case OpKind.RECV:
                self._transfer(index, moves.receive(op, self._program, self._blocks))

    def conclude(self, success: bool) -> None:
        """Free what is left; if all ops have run, write the updated buffers.  Raises ``StepAborted`` where the step was
        cancelled in time."""
        updates = self._updates if success else None
        try:
            if updates is not None:
                updates.end(self._program, self._blocks)
            if success:
                self._buffers.apply()
            if updates is not None:
                updates.complete = updates.last
        finally:
            self._blocks.clear()

    def describe_changes(self) -> str:
        """What this step has changed of the model by now."""
        if self._updates is None:
            return "Nothing of the model was changed."
        unwritten = self._updates.progress.any and not self._buffers.written
        kept = " Buffers, such as running statistics, are as they were before this step." if unwritten else ""
        return f"{self._updates.describe()}{kept}"

    @property
    def loss(self) -> float:
        return self._losses.total()

    @property
    def moved_bytes(self) -> dict[tuple[int, int, TensorKind], int]:
        """Bytes of the copies that took place, by source, destination and kind."""
        totals: dict[tuple[int, int, TensorKind], int] = {}
        for index in sorted(self._moved):
            for source, destination, kind, num_bytes in self._moved[index]:
                key = (source, destination, kind)
                totals[key] = totals.get(key, 0) + num_bytes
        return totals

    # -- computing ------------------------------------------------------------------------------------------------

    def _forward(self, op: Op) -> None:
        outputs = {self._program.blocks[i].layers[0]: i for i in self._of(op.writes, TensorKind.ACTIVATION)}
        saved_block = self._one_of(op.writes, TensorKind.SAVED)
        state, buffers = self._state(op, TensorKind.WEIGHT), self._state(op, TensorKind.BUFFER)
        values, batch = self._values(op, TensorKind.ACTIVATION), self._values(op, TensorKind.INPUT)
        arguments = (self._layers, *op.layers, state, buffers, values, batch, self._call(op), tuple(outputs))
        self._reserve(op)
        given, kept = self._given(op) if saved_block in self._loose else None, None
        with self._computing(op, tuple(outputs), saves=saved_block is not None).counting() as memory:
            if saved_block is None:
                made = run_forward(*arguments)
            elif given is None:
                made, saved = run_with_gradient(*arguments)
            else:
                made, saved, kept = run_keeping(given, *arguments)
        for boundary, block in outputs.items():
            self._blocks.adopt_values(block, made[boundary], memory)
        if saved_block is None:
            memory.account.close()
            self._usages.put(memory.key, Usage(peak_bytes=memory.peak_bytes), memory)
        else:
            self._blocks.adopt_saved(saved_block, saved, memory, kept)

    def _recompute(self, op: Op) -> None:
        (saved_block,) = self._of(op.writes, TensorKind.SAVED)
        state, buffers = self._state(op, TensorKind.WEIGHT), self._state(op, TensorKind.BUFFER)
        values, batch = self._values(op, TensorKind.ACTIVATION), self._values(op, TensorKind.INPUT)
        self._reserve(op)
        given, kept = self._given(op) if saved_block in self._loose else None, None
        with self._computing(op, (), saves=True).counting() as memory:
            scratch = clone_updated_buffers(self._layers, *op.layers, buffers)
            arguments = (self._layers, *op.layers, state, scratch, values, batch, self._call(op), ())
            if given is None:
                _, saved = run_with_gradient(*arguments)
            else:
                _, saved, kept = run_keeping(given, *arguments)
            del scratch, arguments
        self._blocks.adopt_saved(saved_block, saved, memory, kept)

    def _computing(self, op: Op, outputs: tuple[int, ...], *, saves: bool) -> ComputeMemory:
        key = (op.kind, op.layers, op.samples[1] - op.samples[0], outputs, saves)
        usage = self._usages.get(key)
        return ComputeMemory(self._ledgers[op.device], op, key, usage, usage.peak_bytes if usage else 0)

    def _backward(self, op: Op) -> None:
        start, stop = op.layers
        gradients = self._gradient_views(op)
        (saved_block,) = self._of(op.reads, TensorKind.SAVED)
        leaves = self._state(op, TensorKind.WEIGHT)
        output_gradients = self._values(op, TensorKind.ACTIVATION_GRADIENT)
        seed = self._losses.seed_gradient(op.samples) if stop == len(self._layers) else None
        self._reserve(op)
        saved = self._blocks.saved(saved_block)
        saved_bytes = saved.memory.account.alive_bytes
        if saved.kept is not None:
            leaves = saved.kept.parameters
            saved.kept.release(self._given(op))
        try:
            for name, gradient in gradients.items():
                leaves[name].grad = gradient
            with self._computing_backward(op, saved.memory).counting() as memory:
                result = run_backward(self._layers, start, stop, saved.layers, output_gradients, seed_gradient=seed)
        finally:
            for name in gradients:
                leaves[name].grad = None
        self._finish_backward(op, result, memory)
        seen = Usage(
            peak_bytes=saved.memory.peak_bytes, saved_bytes=saved_bytes, backward_bytes=max(0, memory.peak_bytes)
        )
        self._usages.put(saved.memory.key, seen, saved.memory, memory)

    def _computing_backward(self, op: Op, saved: ComputeMemory) -> ComputeMemory:
        """Charged if its forward was, else both are counted."""
        usage = saved.usage
        charge_bytes = usage.backward_bytes if usage else 0
        return ComputeMemory(self._ledgers[op.device], op, None, usage, charge_bytes, beside=saved)

    def _finish_backward(self, op: Op, result: Values, memory: ComputeMemory) -> None:
        block = self._one_of(op.writes, TensorKind.ACTIVATION_GRADIENT)
        if block is not None:
            self._blocks.adopt_values(block, result, memory)
        memory.account.close()

    def _gradient_views(self, op: Op) -> Mapping[str, Tensor]:
        """The GRADIENT blocks of the pack, and of layers before that share parameters, by parameter; each zeroed by the
        first microbatch."""
        views = dict(self._state(op, TensorKind.GRADIENT))
        for block in self._of(op.writes, TensorKind.GRADIENT):
            flat = self._blocks.allocate_flat(block, op)
            flat.memory.zero_()
            views.update(flat.views)
        return views

    def _update_on_device(self, op: Op, updates: Updates) -> None:
        weights = self._state(op, TensorKind.WEIGHT)
        gradients = self._gradients_to_update(op)
        if not weights:
            updates.look(op, gradients)
            return
        updates.prepare_on_device(op)
        state_block = self._one_of(op.reads, TensorKind.OPTIMIZER)
        swapped = self._swapped_state(state_block) if self._device_updates.swaps_state else None
        self._reserve(op)
        key = (op.kind, op.layers, op.device)
        is_complete = self._places.is_complete(op) if swapped is None else swapped.is_complete
        usage = self._usages.get(key) if is_complete else None
        memory = ComputeMemory(self._ledgers[op.device], op, key, usage, usage.peak_bytes if usage else 0)
        if swapped is None:
            with self._places.updating(op, memory):
                updates.perform_on_device(op, weights, gradients)
        else:
            brings = self._device_updates.brings(op.device, op.layers)
            returning = (1 if state_block is None else 2) if brings else 0
            with swapped.room.updating(op, self._ledgers[op.device], memory, lambda: swapped.num_bytes):
                updates.perform_on_device(op, weights, gradients, swapped.states, num_returning=returning)
            if state_block is None and any(swapped.states.values()):
                raise ProgramError(
                    "this program has no room for the optimizer's state",
                    [f"{op} makes some: profile with the optimizer that you train with"],
                )
        if is_complete:
            self._usages.put(key, Usage(peak_bytes=memory.peak_bytes), memory)

    def _gradients_to_update(self, op: Op) -> list[Mapping[str, Tensor]]:
        """By block, that of the op's own layers first."""
        blocks = self._of(op.reads, TensorKind.GRADIENT)
        blocks.sort(key=lambda block: self._program.blocks[block].layers != op.layers)
        return [self._blocks.flat(block).views for block in blocks]

    def _swapped_state(self, block: int | None) -> SwappedState:
        return SwappedState({}, is_complete=True) if block is None else self._blocks.optimizer_state(block)

    def _call(self, op: Op) -> LayerCall:
        first = self._minibatch.first_sample
        return LayerCall(
            samples=(first + op.samples[0], first + op.samples[1]),
            sizes={**self._minibatch.sizes, "batch": op.samples[1] - op.samples[0]},
            seed=self._minibatch.seed,
            device=self._backend.torch_device(op.device),
        )

    # -- moving ---------------------------------------------------------------------------------------------------

    def _reduce(self, index: int, op: Op) -> None:
        shards = moves.shards(op, self._program, self._blocks)
        moved = self._backend.reduce(op.device, shards)
        self._moved[index] = [(source, to, TensorKind.GRADIENT, num_bytes) for source, to, num_bytes in moved]

    def _swap_out(self, index: int, op: Op) -> None:
        copies, left = moves.swap_out(op, self._program, self._blocks, self._stores)
        self._transfer(index, copies)
        for name, state in left.states.items():
            self._places.optimizer.put_state(name, state)
        if self._updates is not None and self._device_updates.brings(op.device, op.layers):
            for kind in (TensorKind.WEIGHT, TensorKind.OPTIMIZER):
                if self._of(op.reads, kind):
                    self._updates.returned(op)
        for pack, views in left.buffers.items():
            self._buffers.add(op.device, pack, views)
        end = (len(self._layers), len(self._layers))
        for block in self._of(op.writes, TensorKind.ACTIVATION):
            if self._program.blocks[block].layers == end:
                (loss,) = self._blocks.values(block).values()
                self._losses.add(op.samples, loss.item())

    def _transfer(self, index: int, copies: Sequence[Copy]) -> None:
        self._backend.transfer(copies)
        self._moved[index] = [(copy.source, copy.destination, copy.kind, copy.num_bytes) for copy in copies]

    # -- blocks of an op ------------------------------------------------------------------------------------------

    def _of(self, blocks: Sequence[int], kind: TensorKind) -> list[int]:
        return [index for index in blocks if self._kinds[index] is kind]

    def _one_of(self, blocks: Sequence[int], kind: TensorKind) -> int | None:
        found = self._of(blocks, kind)
        assert len(found) <= 1, f"several {kind} blocks where one is expected"
        return found[0] if found else None

    def _state(self, op: Op, kind: TensorKind) -> Mapping[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for block in self._of(op.reads, kind):
            merged.update(self._blocks.flat(block).views)
        return merged

    def _given(self, op: Op) -> Mapping[str, Tensor]:
        """All that forward or backward of a pack are given but gradients, by names of which no two are the same."""
        given = {f"{kind} {name}": tensor for kind in _STATE for name, tensor in self._state(op, kind).items()}
        for kind in (TensorKind.ACTIVATION, TensorKind.INPUT):
            given.update((f"{kind} {name}", tensor) for name, tensor in self._values(op, kind).items())
        return given

    def _values(self, op: Op, kind: TensorKind) -> Values:
        merged: Values = {}
        for block in self._of(op.reads, kind):
            merged.update(self._blocks.values(block))
        return merged

    def _reserve(self, op: Op) -> None:
        for block in self._of(op.writes, TensorKind.WORKSPACE):
            self._blocks.reserve(block)
