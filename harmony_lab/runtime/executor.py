"""Executor: runs Programs on a backend, and reports what really happened as a Trace."""

from harmony_lab.errors import TrainingError
from harmony_lab.machine import Machine
from harmony_lab.program import Program
from harmony_lab.runtime.failures import Failure
from harmony_lab.runtime.step import Minibatch, Step, Training
from harmony_lab.runtime.workers import Job, Workers
from harmony_lab.trace import Origin, Trace

__all__ = ["Executor"]


class Executor:
    """Owns the threads: one per (device, stream) that a program has used, kept until ``close``.

    ``chaos_seed``: every op is delayed at random before it starts and before it counts as done, so that a missing edge
    shows.
    """

    def __init__(self, training: Training, machine: Machine, *, chaos_seed: int | None = None) -> None:
        self._training = training
        self._machine = machine
        self._chaos_seed = chaos_seed
        self._workers = Workers(training.backend.enter_worker)

    def run(self, program: Program, minibatch: Minibatch) -> tuple[float, Trace]:
        """One iteration; returns the minibatch's loss and the measured Trace.

        Raises ``TrainingError`` with the op that failed and the state of the weights; the devices are empty then, and
        the next call works.  ``KeyboardInterrupt`` ends the iteration the same way.
        """
        backend, ledgers = self._training.backend, self._training.ledgers
        self._training.store.check_in_place()
        self._training.optimizer.begin()
        self._workers.prepare(program)
        step = Step(program, self._training, minibatch)
        backend.begin()
        chaos = None if self._chaos_seed is None else f"{self._chaos_seed}/{minibatch.seed}"
        job = Job(program, step.perform, step.conclude, backend.abort, chaos)
        for ledger in ledgers:
            ledger.begin(job.origin_s)
        try:
            self._workers.run(job)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(step.describe_changes())
            raise
        if job.failure is not None:
            raise _error(job.failure, step) from job.failure.error
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

    def close(self) -> None:
        """Join all threads."""
        self._workers.close()


def _error(failure: Failure, step: Step) -> TrainingError:
    what = f"{type(failure.error).__name__}: {failure.error}"
    return TrainingError(f"this step stopped at {failure.where}: {what}\n{step.describe_changes()}")
