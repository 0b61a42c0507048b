"""Runner: trains a LayerSequence step by step, with one Program per minibatch size."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from harmony_lab.errors import HarmonyError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Machine
from harmony_lab.machine import Backend as DeviceKind
from harmony_lab.roles import Role, roles
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.compute_memory import Usages
from harmony_lab.runtime.device_memory import BlockMemories, DeviceMemory
from harmony_lab.runtime.emulated import EmulatedBackend
from harmony_lab.runtime.executor import Executor
from harmony_lab.runtime.host import HostStore
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.left_updates import LeftUpdates
from harmony_lab.runtime.losses import combined_totals, weight_of
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.optimizer_places import OptimizerPlaces
from harmony_lab.runtime.programs import Lower, Programs
from harmony_lab.runtime.step import Minibatch, Training
from harmony_lab.runtime.updates import GradientObserver, Updates
from harmony_lab.runtime.virtual import OpSeconds, as_it_took
from harmony_lab.trace import Trace

__all__ = ["Evaluation", "Runner", "step_seed"]

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Evaluation(NamedTuple):
    """How a model is evaluated: its layers in eval mode, and forward-only programs for them by minibatch size."""

    layers: LayerSequence
    lower: Lower


class Runner:
    """Trains the user's own parameters with the user's own optimizer.  Close it, or use it as a context manager.

    ``lower(minibatch_size)`` gives the program for a minibatch of that size; it is asked once per size.  ``lower_as``:
    the same for minibatches of other roles than ``ALONE``, where they have programs of their own.  Gradients of several
    minibatches meet on the host; without ``LEAVING`` (``planner.overlapping``) no step leaves its updates to the next.
    ``seed`` and the number of the step decide random masks (``step_seed``); ``first_step``: that of the first, for
    training that goes on.  ``chaos_seed``: see ``Executor``; then every allocation of every step is counted and freed
    memory is poisoned.  ``max_grad_norm``, ``observe``: see ``Updates``.  ``stop_on_nan``: see ``Losses``; before any
    update if programs have the edges that ``ordering.updating_after`` adds.  ``evaluation`` is asked once, when a batch
    is first evaluated.  ``patience_s``, ``interleaves``, ``op_seconds``: see ``Executor``; where ops are interleaved
    emulated links take no time, and on a machine in virtual time (``virtual``) no wall time.  May be
    used from any thread, one step at a time, and after an error.
    """

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: torch.optim.Optimizer,
        machine: Machine,
        lower: Lower,
        *,
        lower_as: Mapping[Role, Lower] = MappingProxyType({}),
        seed: int = 0,
        first_step: int = 0,
        chaos_seed: int | None = None,
        max_grad_norm: float | None = None,
        stop_on_nan: bool = False,
        evaluation: Callable[[], Evaluation] | None = None,
        observe: GradientObserver | None = None,
        interleaves: bool = False,
        op_seconds: OpSeconds = as_it_took,
        patience_s: float = math.inf,
    ) -> None:
        self.step_count = first_step
        self.last_trace: Trace | None = None
        self.last_norm: float | None = None
        self._sum_bytes = 0  # on the host, of gradients that were added up in the last step
        self._layers = layers
        self._programs = Programs(layers, lower, lower_as)
        self._left: LeftUpdates | None = None  # by the step before
        self._seed = seed
        self._max_grad_norm = max_grad_norm
        self._stop_on_nan = stop_on_nan
        self._observe = observe
        self._evaluation = evaluation
        self._evaluating: tuple[Training, Programs] | None = None
        self._one_at_a_time = Lock()
        self._cancelling = Lock()
        self._under_way: Updates | None = None
        self._closed = False
        self._optimizer = PackOptimizer(optimizer, layers)
        self._chaos = chaos_seed is not None
        backend = _backend(machine, interleaves=interleaves, chaos=self._chaos)
        layouts = Layouts(layers)
        self._store = HostStore(layers, layouts, pin=backend.pins_host_memory)
        ledgers = [Ledger(device.name, device.memory_bytes) for device in machine.devices]
        self._places = OptimizerPlaces(self._optimizer, backend, ledgers)
        self._training = Training(
            layers=layers,
            backend=backend,
            ledgers=ledgers,
            state=self._store.reader(layers, layouts),
            usages=Usages(always=self._chaos),
            memory=BlockMemories(layers, layouts, DeviceMemory(backend, shared=not self._chaos)),
            places=self._places,
        )
        self._executor = Executor(
            backend,
            machine,
            chaos_seed=chaos_seed,
            interleaves=interleaves,
            op_seconds=op_seconds,
            patience_s=patience_s,
        )

    def step(self, batch: Any, *, leave_updates: bool = False) -> float:
        """Train on one minibatch; returns its loss.  See ``accumulate``."""
        return self.accumulate([batch], leave_updates=leave_updates)

    def accumulate(self, batches: Sequence[Any], *, leave_updates: bool = False) -> float:
        """One update from these minibatches, as if they were one; returns its loss.

        ``leave_updates``: to the next step, whose first minibatch makes them beside its forward, or to ``finish``;
        until then parameters and the optimizer's state are those before this step.
        ``last_trace`` is what happened in the one that made updates, the last, or of those that leave theirs the first;
        ``last_norm`` is that of the gradients where it is limited.
        Raises ``TrainingError``, see ``Executor.run``: buffers are then as they were before the step.
        """
        return self._step(batches, leaves=leave_updates and self._programs.can_leave)

    def finish(self) -> None:
        """Make the updates that the last step has left."""
        with self._one_at_a_time:
            self._finish()

    def _finish(self) -> None:
        if self._left is not None:
            try:
                self._left.finish()
            finally:
                if self._left.all_tried:  # else an interrupt came between two of them
                    self._left = None

    def _step(self, batches: Sequence[Any], *, leaves: bool) -> float:
        with self._one_at_a_time:
            if not leaves:
                self._finish()
            self._training.memory.memory.expect(leaves=leaves)
            try:
                return self._take(batches, leaves)
            except BaseException:
                self._finish()  # also where the batch was refused
                raise

    def _take(self, batches: Sequence[Any], leaves: bool) -> float:
        with self._updating(leaves) as updates:
            minibatches = self._minibatches(batches)
            self._optimizer.begin()
            try:
                with self._undoing(updates, len(batches) > 1), self._reading():
                    return self._train(minibatches, updates)
            finally:
                if updates.complete:  # also where an interrupt came when all was done
                    self._left = updates.left
                    self._optimizer.tell_scheduler()
                    self.last_norm = updates.norm
                    self.step_count += 1

    @contextmanager
    def _undoing(self, updates: Updates, several: bool) -> Iterator[None]:
        """Where a step of several minibatches fails, buffers are as they were before it."""
        before = {name: self._layers.tensors[name].clone() for name in _updated(self._layers) if several}
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for name, value in before.items() if not updates.complete else ():
                    self._layers.tensors[name].copy_(value)
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Packs are read, once what was left to update in them is; all of that is in the end, also of a step that
        fails."""
        left = self._left
        if left is None:
            with self._store.reading():
                yield
            return
        with self._store.reading(left.names, left.wait_for):
            try:
                yield
            finally:
                self._finish()

    def cancel(self) -> bool:
        """End the step under way, from any thread, unless it has begun to update: then it is finished.

        The step raises ``StepCancelledError``; False where there is none to cancel.
        """
        with self._cancelling:
            if self._under_way is None or not self._under_way.progress.cancel():
                return False
            self._executor.abort()
            return True

    @contextmanager
    def _updating(self, leaves: bool) -> Iterator[Updates]:
        """A step's updates; ``cancel`` never reaches into the next one's."""
        updates = Updates(
            self._layers,
            self._optimizer,
            max_grad_norm=self._max_grad_norm,
            observe=self._observe,
            leaves=leaves,
            before=self._left,
        )
        with self._cancelling:
            self._under_way = updates
        try:
            yield updates
        finally:
            with self._cancelling:
                self._under_way = None

    def _train(self, minibatches: Sequence[Minibatch], updates: Updates) -> float:
        losses = []
        self._sum_bytes = 0
        for minibatch, role in zip(minibatches, roles(len(minibatches), leaves=updates.leaves), strict=True):
            updates.begin(role, last=minibatch is minibatches[-1])
            self._sum_bytes = max(self._sum_bytes, updates.sum_bytes)
            program = self._programs.of(role, minibatch.sizes["batch"])
            loss, trace = self._executor.run(program, self._training, minibatch, updates)
            if role is not Role.ADDING:
                self.last_trace = trace
            losses.append(loss)
        return sum(losses)

    def evaluate(self, batch: Any) -> float:
        """The loss of the model in eval mode; nothing is changed, ``last_trace`` is what happened."""
        with self._one_at_a_time:
            self._must_be_open()
            self._finish()
            if self._evaluating is None:
                assert self._evaluation is not None, "this Runner was made without an evaluation"
                self._evaluating = self._prepared(*self._evaluation())
            training, programs = self._evaluating
            tensors, sizes = _flattened(training.layers, batch)
            minibatch = Minibatch(tensors=tensors, sizes=sizes, seed=step_seed(self._seed, self.step_count))
            with self._store.reading():
                loss, self.last_trace = self._executor.run(
                    programs.of(Role.ALONE, sizes["batch"]), training, minibatch, None
                )
            return loss

    def _prepared(self, layers: LayerSequence, lower: Lower) -> tuple[Training, Programs]:
        layouts = Layouts(layers)
        state = self._store.reader(layers, layouts)
        training = self._training
        prepared = replace(
            training,
            layers=layers,
            state=state,
            usages=Usages(always=self._chaos),
            memory=training.memory.over(layers, layouts),
        )
        return prepared, Programs(layers, lower, {})

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes alive on each device now; between steps those of optimizer state that stays there."""
        return tuple(ledger.alive_bytes for ledger in self._training.ledgers)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host: parameters, their shadows, optimizer state, the memory that gradients and the stash lie
        in, and gradients that were added up in the last step."""
        state_bytes = self._optimizer.state_bytes - self._places.num_bytes
        block_bytes = self._training.memory.memory.num_bytes.get(HOST, 0)
        left_bytes = self._training.memory.memory.left_bytes
        return self._store.num_bytes + state_bytes + block_bytes + left_bytes + self._sum_bytes

    @property
    def kept_bytes(self) -> int:
        """Of the host's memory, what is kept from step to step for blocks, of emulated devices too."""
        backend, kept = self._training.backend, self._training.memory.memory.num_bytes
        here = [size for at, size in kept.items() if at == HOST or backend.torch_device(at).type == "cpu"]
        return sum(here) + self._training.memory.memory.left_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Make the updates that were left, join the threads, bring the optimizer's state to the host and give the
        parameters storage of their own again; may be called again."""
        with self._one_at_a_time:
            if not self._closed:
                self._closed = True
                with ExitStack() as then:  # each whatever those before it raise
                    then.callback(self._store.close)
                    then.callback(self._training.memory.memory.close)
                    then.callback(self._executor.close)
                    then.callback(self._places.bring_back)
                    self._finish()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _must_be_open(self) -> None:
        if self._closed:
            raise TrainingError("this Trainer is closed: make a new one to train on")
        self._store.check_in_place()

    def _minibatches(self, batches: Sequence[Any]) -> list[Minibatch]:
        self._must_be_open()
        flat = [_flattened(self._layers, batch) for batch in batches]
        several = len(flat) > 1
        totals = combined_totals([tensors for tensors, _ in flat]) if several else {}
        total_weight = sum(weight_of(self._layers, tensors) for tensors, _ in flat) if several else None
        minibatches: list[Minibatch] = []
        first_sample = 0
        for tensors, sizes in flat:
            minibatches.append(
                Minibatch(
                    tensors={**tensors, **totals},
                    sizes=sizes,
                    seed=step_seed(self._seed, self.step_count),
                    first_sample=first_sample,
                    total_weight=total_weight,
                    stop_on_nan=self._stop_on_nan,
                )
            )
            first_sample += sizes["batch"]
        return minibatches


def _updated(layers: LayerSequence) -> tuple[str, ...]:
    return layers.updated_buffers_of(0, len(layers))


def _flattened(layers: LayerSequence, batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """A batch's tensors and sizes.  Raises ``HarmonyError`` for sizes that were not planned with."""
    tensors, sizes = layers.flatten_batch(batch)
    planned = layers.example_sizes
    others = [
        f"{name} = {size} (planned: {planned[name]})"
        for name, size in sizes.items()
        if name != "batch" and size != planned[name]
    ]
    if others:
        raise HarmonyError(
            f"this batch has other sizes than the one that was profiled and planned with: {', '.join(others)}. Pad "
            "batches to the planned size, or decompose and profile again with a batch of this size"
        )
    return tensors, sizes


def _backend(machine: Machine, *, interleaves: bool, chaos: bool) -> Backend:
    kinds = {device.backend for device in machine.devices}
    if kinds == {DeviceKind.EMULATED}:
        if machine.virtual_time and (chaos or interleaves):
            raise HarmonyError("virtual time is an order of ops, chaos_seed and interleaves are others: choose one")
        return EmulatedBackend(machine, timed=not (interleaves or machine.virtual_time), poisons=chaos)
    if kinds == {DeviceKind.CUDA}:
        from harmony_lab.runtime.accelerator import AcceleratorBackend

        return AcceleratorBackend(machine)
    raise HarmonyError(f"{machine.name} mixes emulated and real devices: use a machine of one kind")


def step_seed(seed: int, step: int) -> int:
    """The seed of the random masks of one step, counted from 0 (the finalizer of splitmix64)."""
    word = (seed * _GOLDEN_RATIO + step + 1) * _GOLDEN_RATIO & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return (word ^ word >> 31) >> 1
