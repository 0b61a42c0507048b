"""Executor: runs Programs on a backend, and reports what really happened as a Trace."""

import math
import random

from harmony_lab.errors import StepCancelledError, TrainingError
from harmony_lab.machine import Machine
from harmony_lab.program import Program
from harmony_lab.runtime.accelerator import out_of_memory_advice
from harmony_lab.runtime.backend import Backend
from harmony_lab.runtime.failures import Failure
from harmony_lab.runtime.runnable import require_runnable
from harmony_lab.runtime.step import Minibatch, Step, Training
from harmony_lab.runtime.updates import Updates
from harmony_lab.runtime.virtual import ALONE, OpSeconds, VirtualJob, as_it_took
from harmony_lab.runtime.waits import Waits
from harmony_lab.runtime.workers import Job, Workers
from harmony_lab.trace import Origin, Trace

__all__ = ["Executor"]


class Executor:
    """Owns the threads: one per (device, stream) that a program has used, kept until ``close``.

    ``chaos_seed``: every op is delayed at random before it starts and before it counts as done, so that a missing edge
    shows.  ``interleaves``: without delays and threads; all ops run in the caller's, one after the other, in a random
    order that the program's edges allow.  On a machine in virtual time one thread runs them, each at its virtual start
    (``virtual``); ``op_seconds`` is the clock.  ``patience_s``: see ``Workers.run``.
    """

    def __init__(
        self,
        backend: Backend,
        machine: Machine,
        *,
        chaos_seed: int | None = None,
        interleaves: bool = False,
        op_seconds: OpSeconds = as_it_took,
        patience_s: float = math.inf,
    ) -> None:
        self._backend = backend
        self._machine = machine
        self._chaos_seed = chaos_seed
        self._interleaves = interleaves
        self._op_seconds = op_seconds
        self._patience_s = patience_s
        self._workers = Workers(backend.enter_worker)
        self._waits: dict[int, tuple[Program, Waits]] = {}
        self._job: Job | None = None  # under way

    def run(
        self, program: Program, training: Training, minibatch: Minibatch, updates: Updates | None
    ) -> tuple[float, Trace]:
        """One iteration; returns the minibatch's loss and the measured Trace.  ``updates``: see ``Step``.

        Raises ``ProgramError`` for a program that only the simulator knows, ``TrainingError`` with the op that failed
        and the state of the weights; the devices are empty then, and the next call works.  ``KeyboardInterrupt`` ends
        the iteration the same way.  ``StepCancelledError``: see ``abort``.
        """
        if id(program) not in self._waits:
            require_runnable(program, training.layers)
        backend, ledgers = self._backend, training.ledgers
        waits = self._waits_of(program)
        if not self._interleaves:
            self._workers.prepare([ALONE] if self._machine.virtual_time else waits.queues)
        memory = training.memory.of(program)
        memory.trim(training.places.held_beside(program))
        training.places.settle(program, memory.device_bytes)
        memory.prepare()
        step = Step(program, memory, training, minibatch, updates)
        backend.begin()
        chaos = None if self._chaos_seed is None else f"{self._chaos_seed}/{minibatch.seed}"
        if self._machine.virtual_time:
            job: Job = VirtualJob(program, waits, step, training, self._machine, self._op_seconds)
        else:
            job = Job(program, waits, step.perform, step.conclude, backend.abort, chaos)
        for ledger in ledgers:
            ledger.begin(job.elapsed_s)
        self._job = job
        if updates is not None and updates.progress.cancelled:  # by somebody who saw no job yet
            job.abort()
        try:
            if self._interleaves:
                job.work_alone(random.Random(chaos))
            else:
                self._workers.run(job, self._patience_s)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(step.describe_changes())
            raise
        finally:
            self._job = None
        if job.failure is not None:
            raise _error(job.failure, step) from job.failure.error
        if updates is not None and updates.progress.cancelled:
            raise StepCancelledError(
                "this step was cancelled before its first update: nothing of the model was changed"
            )
        start_s, end_s = job.times_s
        trace = Trace(
            origin=Origin.MEASURED,
            program=program,
            machine=self._machine,
            start_s=start_s,
            end_s=end_s,
            memory=tuple(ledger.timeline() for ledger in ledgers),
            moved_bytes=step.moved_bytes,
        )
        return step.loss, trace

    def _waits_of(self, program: Program) -> Waits:
        known = self._waits.get(id(program))
        if known is None:
            known = self._waits[id(program)] = program, Waits(program)
        return known[1]

    def abort(self) -> None:
        """End an iteration under way whose updates were cancelled (``UpdateProgress.cancel``), from any thread."""
        job = self._job
        if job is not None:
            job.abort()

    def close(self) -> None:
        """Join all threads."""
        self._workers.close()


def _error(failure: Failure, step: Step) -> TrainingError:
    what = f"{type(failure.error).__name__}: {failure.error}"
    advice = out_of_memory_advice(failure.error)
    told = [f"this step stopped at {failure.where}: {what}", step.describe_changes(), *([advice] if advice else [])]
    return TrainingError("\n".join(told))
