"""Step: one iteration of a Program under way; what each kind of op does.

Methods are called from several threads, one op at a time per queue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.runtime import moves
from harmony_lab.runtime.backend import Backend, Copy
from harmony_lab.runtime.blocks import Blocks, ComputeMemory, Values, computing
from harmony_lab.runtime.buffers import BufferUpdates
from harmony_lab.runtime.execution import clone_updated_buffers, run_backward, run_forward, run_with_gradient
from harmony_lab.runtime.host import HostStore
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.losses import Losses
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.progress import UpdateProgress

__all__ = ["Minibatch", "Step", "Training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What stays from step to step."""

    layers: LayerSequence
    layouts: Layouts
    backend: Backend
    ledgers: Sequence[Ledger]
    store: HostStore
    optimizer: PackOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one step works on.  ``sizes``: of the dynamic dimensions by symbol.  ``seed``: of its random masks."""

    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    seed: int


class Step:
    """Runs the ops of a program on one minibatch."""

    def __init__(self, program: Program, training: Training, minibatch: Minibatch) -> None:
        self._program = program
        self._minibatch = minibatch
        self._layers = training.layers
        self._layouts = training.layouts
        self._backend = training.backend
        self._ledgers = training.ledgers
        self._store = training.store
        self._optimizer = training.optimizer
        self._blocks = Blocks(program, training.layers, training.layouts, training.backend, training.ledgers)
        self._buffers = BufferUpdates(program, training.layers)
        self._losses = Losses(program, training.layers, minibatch.tensors)
        self._moved: dict[int, list[tuple[int, int, TensorKind, int]]] = {}
        self._progress = UpdateProgress()

    # -- the whole ------------------------------------------------------------------------------------------------

    def perform(self, index: int, op: Op) -> None:
        """Run one op and free what it frees."""
        with self._backend.running(op.device, op.stream):
            match op.kind:
                case OpKind.FORWARD:
                    self._forward(op)
                case OpKind.RECOMPUTE:
                    self._recompute(op)
                case OpKind.BACKWARD:
                    self._backward(op)
                case OpKind.UPDATE:
                    self._update(op)
                case OpKind.ALL_REDUCE:
                    self._reduce(index, op)
                case OpKind.SWAP_IN:
                    batch = self._minibatch.tensors
                    copies = moves.swap_in(op, self._program, self._layers, self._blocks, self._store, batch)
                    self._transfer(index, copies)
                case OpKind.SWAP_OUT:
                    self._swap_out(index, op)
                case OpKind.RECV:
                    self._transfer(index, moves.receive(op, self._program, self._blocks))
                case OpKind.SEND | OpKind.FREE:
                    pass  # their order is all there is to them
        for block in op.frees:
            self._blocks.free(block)

    def conclude(self, success: bool) -> None:
        """Free what is left; if all ops have run, write the updated buffers."""
        self._blocks.clear()
        if success:
            self._buffers.apply()

    def describe_changes(self) -> str:
        """What this step has changed of the model by now."""
        unwritten = self._progress.any and not self._buffers.written
        kept = " Buffers, such as running statistics, are as they were before this step." if unwritten else ""
        return f"{self._progress}{kept}"

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
        with computing(self._ledgers[op.device], op) as memory:
            if saved_block is None:
                kept = run_forward(*arguments)
            else:
                kept, saved = run_with_gradient(*arguments)
        for boundary, block in outputs.items():
            self._blocks.adopt_values(block, kept[boundary], memory)
        if saved_block is None:
            memory.account.close()
        else:
            self._blocks.adopt_saved(saved_block, saved, memory)

    def _recompute(self, op: Op) -> None:
        (saved_block,) = self._of(op.writes, TensorKind.SAVED)
        state, buffers = self._state(op, TensorKind.WEIGHT), self._state(op, TensorKind.BUFFER)
        values, batch = self._values(op, TensorKind.ACTIVATION), self._values(op, TensorKind.INPUT)
        self._reserve(op)
        with computing(self._ledgers[op.device], op) as memory:
            scratch = clone_updated_buffers(self._layers, *op.layers, buffers)
            _, saved = run_with_gradient(self._layers, *op.layers, state, scratch, values, batch, self._call(op), ())
            del scratch
        self._blocks.adopt_saved(saved_block, saved, memory)

    def _backward(self, op: Op) -> None:
        start, stop = op.layers
        gradients = self._gradient_views(op)
        (saved_block,) = self._of(op.reads, TensorKind.SAVED)
        state = self._state(op, TensorKind.WEIGHT)
        output_gradients = self._values(op, TensorKind.ACTIVATION_GRADIENT)
        seed = self._losses.seed_gradient(op.samples) if stop == len(self._layers) else None
        self._reserve(op)
        try:
            for name, gradient in gradients.items():
                state[name].grad = gradient
            with computing(self._ledgers[op.device], op) as memory:
                saved = self._blocks.saved(saved_block).layers
                result = run_backward(self._layers, start, stop, saved, output_gradients, seed_gradient=seed)
        finally:
            for name in gradients:
                state[name].grad = None
        self._finish_backward(op, result, memory)

    def _finish_backward(self, op: Op, result: Values, memory: ComputeMemory) -> None:
        block = self._one_of(op.writes, TensorKind.ACTIVATION_GRADIENT)
        if block is not None:
            self._blocks.adopt_values(block, result, memory)
        memory.account.close()

    def _gradient_views(self, op: Op) -> Mapping[str, Tensor]:
        """The pack's GRADIENT block by parameter, zeroed by the first microbatch."""
        block = self._one_of(op.writes, TensorKind.GRADIENT)
        if block is not None:
            flat = self._blocks.allocate_flat(block, op)
            flat.memory.zero_()
            return flat.views
        block = self._one_of(op.reads, TensorKind.GRADIENT)
        return {} if block is None else self._blocks.flat(block).views

    def _call(self, op: Op) -> LayerCall:
        return LayerCall(
            samples=op.samples,
            sizes={**self._minibatch.sizes, "batch": op.samples[1] - op.samples[0]},
            seed=self._minibatch.seed,
            device=self._backend.torch_device(op.device),
        )

    # -- updating and moving --------------------------------------------------------------------------------------

    def _update(self, op: Op) -> None:
        """Step the parameters whose first layer is among the op's, each with the sum of its gradients."""
        gradients: dict[str, Tensor] = {}
        parts = [self._blocks.flat(block).views for block in self._of(op.reads, TensorKind.GRADIENT)]
        for name in self._layers.parameters_of(*op.layers):
            spec = self._layers.state[name]
            if spec.trainable and op.layers[0] <= min(spec.layers):
                found = [views[name] for views in parts if name in views]
                assert found, f"{op}: no gradient of {name} has arrived"
                gradients[name], *others = found
                for other in others:
                    gradients[name].add_(other)
        with self._progress.updating(op.layers):
            self._optimizer.step(gradients)

    def _reduce(self, index: int, op: Op) -> None:
        shards = moves.shards(op, self._program, self._blocks, self._layouts)
        moved = self._backend.reduce(op.device, shards)
        self._moved[index] = [(source, to, TensorKind.GRADIENT, num_bytes) for source, to, num_bytes in moved]

    def _swap_out(self, index: int, op: Op) -> None:
        copies, buffers = moves.swap_out(op, self._program, self._blocks, self._layouts)
        self._transfer(index, copies)
        for pack, views in buffers.items():
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
        return [index for index in blocks if self._program.blocks[index].kind is kind]

    def _one_of(self, blocks: Sequence[int], kind: TensorKind) -> int | None:
        found = self._of(blocks, kind)
        assert len(found) <= 1, f"several {kind} blocks where one is expected"
        return found[0] if found else None

    def _state(self, op: Op, kind: TensorKind) -> Mapping[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for block in self._of(op.reads, kind):
            merged.update(self._blocks.flat(block).views)
        return merged

    def _values(self, op: Op, kind: TensorKind) -> Values:
        merged: Values = {}
        for block in self._of(op.reads, kind):
            merged.update(self._blocks.values(block))
        return merged

    def _reserve(self, op: Op) -> None:
        for block in self._of(op.writes, TensorKind.WORKSPACE):
            self._blocks.reserve(block)
