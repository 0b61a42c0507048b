"""Run: training under way on a thread of its own, watched and steered from any thread."""

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from html import escape
from itertools import islice
from typing import Any, NamedTuple

from harmony_lab.batches import endless
from harmony_lab.errors import HarmonyError, StepCancelledError, TrainingError
from harmony_lab.listeners import Listeners
from harmony_lab.plan import Plan
from harmony_lab.step_record import StepRecord, StepTrainer
from harmony_lab.trace import Trace
from harmony_lab.units import format_seconds

__all__ = ["Run", "RunStatus", "StepRecord", "StepTrainer"]

_INTERRUPT_CHECK_S = 0.1
_PAUSE_CHECK_S = 0.5  # how often a paused run looks whether the interpreter is going down


class RunStatus(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"  # by the user, before its last step
    FINISHED = "finished"
    FAILED = "failed"


_ACTIVE = (RunStatus.RUNNING, RunStatus.PAUSED)


class _Task(NamedTuple):
    """What a run needs while it trains."""

    trainer: StepTrainer
    batches: Iterator[Any]
    num_samples: Callable[[Any], int]
    on_step: Callable[[StepRecord], None] | None


class Run:
    """Training of ``steps`` minibatches; made by ``Lab.launch``.

    The thread owns the trainer: when the run ends, however it ends, the trainer is closed, the parameters have their
    own storage again and the devices are free; then trainer, data and listeners are let go, and what was recorded
    stays.  Events: ``"step"`` (every ``record_every`` steps and the last), ``"status"``; the last one comes when the
    run is over.

    ``losses``, ``step_s`` and, where gradients are clipped, ``grad_norms`` have one entry per step; ``swap_bytes`` and
    ``peak_bytes`` (per device) one per recorded step.  ``trace`` is the last measured iteration, ``notes`` say what is
    worth knowing, such as a smaller last batch.

    ``accumulate``: minibatches per step, see ``Trainer.accumulate``.  ``on_step`` is called after every step, on the
    run's thread, once its updates are made; what it raises ends the run, as it would end a loop.

    Under a plan with ``update=next`` each step leaves its updates to the next (``Trainer.step``), but for those that
    ``on_step`` is told of: then, and while the run is paused and when it has ended, weights are those of all its steps.
    Who subscribes to a run's events is told of its progress, and must not count on the weights.
    """

    def __init__(
        self,
        trainer: StepTrainer,
        plan: Plan,
        data: Iterable[Any],
        steps: int,
        *,
        num_samples: Callable[[Any], int],
        record_every: int = 1,
        accumulate: int = 1,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.plan = plan
        self.steps = steps
        self.record_every = record_every
        self.predicted = trainer.predicted
        self.accumulate = accumulate
        self._leaves = plan.overlapped_update and on_step is None
        self._task: _Task | None = _Task(trainer, endless(data), num_samples, on_step)
        self._listeners = Listeners()
        self._changed = threading.Condition()
        self._status = RunStatus.RUNNING
        self._stop_wanted = self._pause_wanted = False
        self._losses: list[float] = []
        self._step_s: list[float] = []
        self._swap_bytes: list[int] = []
        self._peak_bytes: list[tuple[int, ...]] = []
        self._grad_norms: list[float] = []
        self._notes: list[str] = list(trainer.notes)
        self._error: TrainingError | None = None
        self._trace: Trace | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train, name="harmony-lab run")

    def start(self) -> None:
        """Begin; where no thread can be had, the run has failed and its trainer is closed."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end(RunStatus.FAILED, error)
            raise

    # -- what it tells --------------------------------------------------------------------------------------------

    @property
    def status(self) -> RunStatus:
        return self._status

    @property
    def active(self) -> bool:
        """Whether it is running or paused."""
        return self._status in _ACTIVE

    @property
    def losses(self) -> tuple[float, ...]:
        with self._changed:
            return tuple(self._losses)

    @property
    def step_s(self) -> tuple[float, ...]:
        with self._changed:
            return tuple(self._step_s)

    @property
    def grad_norms(self) -> tuple[float, ...]:
        with self._changed:
            return tuple(self._grad_norms)

    @property
    def swap_bytes(self) -> tuple[int, ...]:
        with self._changed:
            return tuple(self._swap_bytes)

    @property
    def peak_bytes(self) -> tuple[tuple[int, ...], ...]:
        with self._changed:
            return tuple(self._peak_bytes)

    @property
    def notes(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._notes)

    @property
    def error(self) -> TrainingError | None:
        return self._error

    @property
    def trace(self) -> Trace | None:
        """The last measured iteration."""
        return self._trace

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call back with each event's name, on the run's thread; returns what ends the subscription."""
        return self._listeners.subscribe(callback)

    # -- steering -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop; returns when the trainer is closed.

        A step that has updated nothing yet is cancelled, as if it had never begun; one that has is finished first.
        """
        with self._changed:
            self._stop_wanted = True
            task = self._task
            self._changed.notify_all()
        if task is not None:
            task.trainer.cancel()
        del task  # what it holds is let go when the run ends, not when the wait for that does
        if threading.current_thread() is not self._thread:
            self._ended.wait()
            self._join()

    def pause(self) -> None:
        """Hold still after the current step; nothing is freed.  Returns when it does, or when the run has ended.

        On the run's own thread, where listeners and ``on_step`` are called, it returns at once.
        """
        with self._changed:
            self._pause_wanted = True
            if self._thread.ident is None or threading.current_thread() is self._thread:
                return
            while self._pause_wanted and self._status is RunStatus.RUNNING:
                self._changed.wait(_INTERRUPT_CHECK_S)

    def resume(self) -> None:
        """Go on, or take back a wish to pause."""
        with self._changed:
            self._pause_wanted = False
            paused = self._status is RunStatus.PAUSED
            if paused:
                self._status = RunStatus.RUNNING
            self._changed.notify_all()
        if paused:
            self._listeners.notify("status")

    def wait(self, timeout: float | None = None) -> "Run":
        """Wait for the end, or for ``timeout`` seconds (``TimeoutError``).  A failed run raises its ``TrainingError``.

        An interrupt while waiting stops the run, then arrives in the caller.
        """
        if threading.current_thread() is self._thread and not self._ended.is_set():
            raise HarmonyError("a listener cannot wait for the run that calls it: wait in another thread")
        try:
            ended = self._wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not ended:
            raise TimeoutError(f"still {self} after {timeout} s")
        self._join()
        if self._error is not None:
            raise self._error
        return self

    def _wait(self, timeout: float | None) -> bool:
        """Wait for the end in short parts: an interrupt that no signal brings is noticed when Python code runs.

        Not by join: an interrupted one takes the thread for ended (bpo-45274).
        """
        stop_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(max(0.0, min(_INTERRUPT_CHECK_S, stop_s - time.monotonic()))):
            if time.monotonic() >= stop_s:
                return False
        return True

    def _join(self) -> None:
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        assert self._task is not None
        try:
            self._end(self._steps(self._task))
        except BaseException as error:
            self._end(RunStatus.FAILED, error)

    def _end(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Close the trainer, let go of all that was needed to train, and say so."""
        assert self._task is not None
        trainer, self._task = self._task.trainer, None
        described = None if error is None else self._describe(error)
        try:
            trainer.close()
        except BaseException as fault:
            status = RunStatus.FAILED
            described = described or self._describe(fault)
        del trainer
        with self._changed:
            self._status, self._error = status, described
            self._changed.notify_all()
        self._ended.set()  # before listeners hear of it: they may wait for the run
        self._listeners.notify("status")
        self._listeners.clear()

    def _steps(self, task: _Task) -> RunStatus:
        for number in range(self.steps):
            if not self._may_go_on(task.trainer):
                return RunStatus.STOPPED
            batches = list(islice(task.batches, self.accumulate))
            if len(batches) < self.accumulate:
                self._note(self._ended_early(number, len(batches)))
                return RunStatus.FINISHED
            sizes = [task.num_samples(batch) for batch in batches]
            for size in sizes:
                self._note_size(number, size)
            if self._stop_wanted:  # while the data was loaded
                return RunStatus.STOPPED
            begin = time.perf_counter()
            try:
                if self.accumulate > 1:
                    loss = task.trainer.accumulate(batches, leave_updates=self._leaves)
                else:
                    loss = task.trainer.step(batches[0], leave_updates=self._leaves)
            except StepCancelledError:
                return RunStatus.STOPPED
            seconds = time.perf_counter() - begin
            self._count(number, loss, seconds, task.trainer.last_norm)
            if (number + 1) % self.record_every == 0 or number + 1 == self.steps:
                self._record(task.trainer.last_trace)
            if task.on_step is not None:
                self._tell(task, number, loss, seconds, sum(sizes))
        return RunStatus.FINISHED

    def _ended_early(self, number: int, left_out: int) -> str:
        """What to note of data that ended after that many steps; of none at all, an error."""
        if number == 0:
            raise TrainingError(
                f"the data ended before the first step, which takes {self.accumulate} of its batches: it gave "
                f"{left_out}; an iterator cannot start over: give a list or a DataLoader"
            )
        minibatches = "1 minibatch that makes" if left_out == 1 else f"{left_out} minibatches that make"
        rest = f", and {minibatches} no whole step {'was' if left_out == 1 else 'were'} left out" if left_out else ""
        return f"the data ended after {number} of {self.steps} steps; an iterator cannot start over{rest}"

    def _count(self, number: int, loss: float, seconds: float, norm: float | None) -> None:
        if not math.isfinite(loss) and all(map(math.isfinite, self._losses)):
            self._note(f"the loss became {loss} in step {number + 1}; weights from there on may be of no use")
        with self._changed:
            self._losses.append(loss)
            self._step_s.append(seconds)
            if norm is not None:
                self._grad_norms.append(norm)

    def _tell(self, task: _Task, number: int, loss: float, seconds: float, num_samples: int) -> None:
        assert task.on_step is not None
        record = StepRecord(
            step=number + 1,
            loss=loss,
            seconds=seconds,
            num_samples=num_samples,
            grad_norm=task.trainer.last_norm,
            trace=task.trainer.last_trace,
        )
        try:
            task.on_step(record)
        except BaseException as error:
            what = f"on_step failed after step {number + 1} of {self.steps}, whose updates are made"
            raise TrainingError(f"{what}: {type(error).__name__}: {error}") from error

    def _record(self, trace: Trace | None) -> None:
        if trace is not None:
            with self._changed:
                self._trace = trace
                self._swap_bytes.append(trace.swap_bytes)
                self._peak_bytes.append(trace.peak_bytes)
        self._listeners.notify("step")

    def _may_go_on(self, trainer: StepTrainer) -> bool:
        """Hold still while asked to; False when asked to stop or when the interpreter waits for its threads to end."""
        while True:
            with self._changed:
                if self._stop_wanted or not threading.main_thread().is_alive():
                    return False
                if not self._pause_wanted:
                    return True
                if self._status is RunStatus.PAUSED:
                    self._changed.wait(_PAUSE_CHECK_S)
                    continue
            if self._leaves:
                trainer.finish()  # so that weights are those of all steps
            with self._changed:
                if not self._pause_wanted:
                    continue
                self._status = RunStatus.PAUSED
                self._changed.notify_all()
            self._listeners.notify("status")

    def _note(self, text: str) -> None:
        with self._changed:
            if text not in self._notes:
                self._notes.append(text)

    def _note_size(self, number: int, size: int) -> None:
        ran = f"a batch of {size} ran instead of {self.plan.minibatch_size} "
        if size != self.plan.minibatch_size and not any(note.startswith(ran) for note in self._notes):
            self._note(f"{ran}(first in step {number + 1}), as {self.plan.for_minibatch(size)}")

    def _describe(self, error: BaseException) -> TrainingError:
        """The error as text: frames would keep tensors alive for as long as somebody holds the error."""
        step = len(self._losses) + 1
        if isinstance(error, TrainingError):
            described = TrainingError(str(error))
        else:
            described = TrainingError(
                f"training stopped in step {step} of {self.steps}: {type(error).__name__}: {error}"
            )
        described.add_note("".join(traceback.format_exception(error)))
        return described

    # -- on screen ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        losses = self.losses
        text = f"{self._status}: step {len(losses)} of {self.steps}"
        if losses:
            median_s = sorted(self.step_s)[len(losses) // 2]
            text += f", loss {losses[-1]:.4f}, {format_seconds(median_s)} of wall time per step"
        return text

    def __repr__(self) -> str:
        return f"<Run {self}>"

    def _repr_html_(self) -> str:
        from harmony_lab.figures.images import as_images
        from harmony_lab.figures.svg import loss_svg

        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        error = f"<pre>{escape(str(self._error))}</pre>" if self._error else ""
        return f"<p>{escape(str(self))}</p>{error}{notes}{as_images(loss_svg(self.losses))}"
