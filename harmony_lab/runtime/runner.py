"""Runner: trains a LayerSequence step by step, with one Program per minibatch size."""

from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Any

import torch

from harmony_lab.errors import HarmonyError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Backend as DeviceKind
from harmony_lab.machine import Machine
from harmony_lab.program import Program
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.buffers import check_buffers
from harmony_lab.runtime.emulated import EmulatedBackend
from harmony_lab.runtime.executor import Executor
from harmony_lab.runtime.host import HostStore
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.runtime.step import Minibatch, Training
from harmony_lab.trace import Trace

__all__ = ["Runner", "step_seed"]

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Runner:
    """Trains the user's own parameters with the user's own optimizer.  Close it, or use it as a context manager.

    ``lower(minibatch_size)`` gives the program for a minibatch of that size; it is asked once per size.  ``seed`` and
    the number of the step decide random masks (``step_seed``); ``first_step``: that of the first, for training that
    goes on.  ``chaos_seed``: see ``Executor``.  May be used from any thread, one step at a time, and after an error.
    """

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: torch.optim.Optimizer,
        machine: Machine,
        lower: Callable[[int], Program],
        *,
        seed: int = 0,
        first_step: int = 0,
        chaos_seed: int | None = None,
    ) -> None:
        self.step_count = first_step
        self.last_trace: Trace | None = None
        self._layers = layers
        self._lower = lower
        self._seed = seed
        self._programs: dict[int, Program] = {}
        self._one_at_a_time = Lock()
        self._closed = False
        pack_optimizer = PackOptimizer(optimizer, layers)
        backend = _backend(machine)
        layouts = Layouts(layers)
        self._store = HostStore(layers, layouts, pin=backend.pins_host_memory)
        self._training = Training(
            layers=layers,
            layouts=layouts,
            backend=backend,
            ledgers=[Ledger(device.name, device.memory_bytes) for device in machine.devices],
            store=self._store,
            optimizer=pack_optimizer,
        )
        self._executor = Executor(self._training, machine, chaos_seed=chaos_seed)

    def step(self, batch: Any) -> float:
        """Train on one minibatch; returns its loss.  ``last_trace`` is what happened.

        Raises ``TrainingError``, see ``Executor.run``.
        """
        with self._one_at_a_time:
            if self._closed:
                raise TrainingError("this Trainer is closed: make a new one to train on")
            tensors, sizes = self._layers.flatten_batch(batch)
            self._refuse_other_sizes(sizes)
            program = self._program(sizes["batch"])
            minibatch = Minibatch(tensors=tensors, sizes=sizes, seed=step_seed(self._seed, self.step_count))
            loss, self.last_trace = self._executor.run(program, minibatch)
            self.step_count += 1
            return loss

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes alive on each device now; zero between steps."""
        return tuple(ledger.alive_bytes for ledger in self._training.ledgers)

    def close(self) -> None:
        """Join the threads and give the parameters storage of their own again; may be called again."""
        with self._one_at_a_time:
            if not self._closed:
                self._closed = True
                self._executor.close()
                self._store.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _program(self, minibatch_size: int) -> Program:
        program = self._programs.get(minibatch_size)
        if program is None:
            program = self._lower(minibatch_size)
            check_buffers(program, self._layers)
            self._programs[minibatch_size] = program
        return program

    def _refuse_other_sizes(self, sizes: dict[str, int]) -> None:
        planned = self._layers.example_sizes
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


def _backend(machine: Machine) -> Backend:
    kinds = {device.backend for device in machine.devices}
    if kinds == {DeviceKind.EMULATED}:
        return EmulatedBackend(machine)
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
