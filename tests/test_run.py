"""Run: steering and reporting, over a trainer that only counts."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from harmony_lab.errors import StepCancelledError, TrainingError
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.program import Program
from harmony_lab.run import Run, RunStatus, StepRecord
from harmony_lab.trace import Origin, Trace

PLAN = Plan.parse("dp minibatch=4 forward=4[] backward=4[0:2] devices=0")
MACHINE = Machine.emulated(1)
EMPTY = Trace(
    origin=Origin.PREDICTED,
    program=Program(minibatch_size=4, num_layers=2, budgets=MACHINE.budgets, blocks=(), ops=()),
    machine=MACHINE,
    start_s=np.zeros(0),
    end_s=np.zeros(0),
    memory=(),
    moved_bytes={},
)


class CountingTrainer:
    """Losses count down; ``step`` runs ``during`` first."""

    notes = ()

    def __init__(self, during: Callable[[int], None] = lambda number: None, norms: bool = False) -> None:
        self.during = during
        self.norms = norms
        self.batches: list[Any] = []
        self.groups: list[int] = []
        self.closed = 0

    @property
    def predicted(self) -> Trace:
        return EMPTY

    @property
    def last_trace(self) -> Trace | None:
        return EMPTY

    @property
    def last_norm(self) -> float | None:
        return float(len(self.batches)) if self.norms else None

    def accumulate(self, batches: Sequence[Any], *, leave_updates: bool = False) -> float:
        self.groups.append(len(batches))
        return sum(self.step(batch) for batch in batches) / len(batches)

    def step(self, batch: Any, *, leave_updates: bool = False) -> float:
        self.during(len(self.batches))
        self.batches.append(batch)
        return 100.0 - len(self.batches)

    def cancel(self) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1


def start(trainer: CountingTrainer, data: Any, steps: int, **options: Any) -> Run:
    run = Run(trainer, PLAN, data, steps, num_samples=lambda batch: len(batch), **options)
    run.start()
    return run


def no_thread_left() -> bool:
    return not any(thread.name == "harmony-lab run" for thread in threading.enumerate())


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Steps wait for this event; set at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def test_finished_run_has_a_loss_per_step_and_closed_its_trainer() -> None:
    trainer = CountingTrainer()
    run = start(trainer, ["aaaa", "bbbb"], 3).wait()
    assert run.status is RunStatus.FINISHED
    assert run.losses == (99.0, 98.0, 97.0)
    assert len(run.step_s) == 3
    assert trainer.closed == 1
    assert no_thread_left()


def test_data_starts_over_when_used_up() -> None:
    trainer = CountingTrainer()
    start(trainer, ["aaaa", "bbbb"], 5).wait()
    assert trainer.batches == ["aaaa", "bbbb", "aaaa", "bbbb", "aaaa"]


def test_iterator_that_ends_early_is_noted() -> None:
    run = start(CountingTrainer(), iter(["aaaa", "bbbb"]), 5).wait()
    assert run.status is RunStatus.FINISHED
    assert len(run.losses) == 2
    assert "ended after 2 of 5 steps" in run.notes[0]


def test_smaller_last_batch_is_noted_once_with_the_plan_it_ran_under() -> None:
    run = start(CountingTrainer(), ["aaaa", "bb"], 6).wait()
    assert len(run.notes) == 1
    assert "a batch of 2 ran instead of 4 (first in step 2)" in run.notes[0]
    assert str(PLAN.for_minibatch(2)) in run.notes[0]


def test_stop_ends_after_the_current_step(held: threading.Event) -> None:
    begun = threading.Event()

    def during(number: int) -> None:
        begun.set()
        held.wait(30)

    trainer = CountingTrainer(during)  # whose steps cannot be cancelled
    run = start(trainer, ["aaaa"], 1000)
    assert begun.wait(30)
    stopper = threading.Thread(target=run.stop)
    stopper.start()
    held.set()
    stopper.join(30)
    assert run.status is RunStatus.STOPPED
    assert 1 <= len(run.losses) < 1000
    assert trainer.closed == 1
    assert no_thread_left()


def test_stop_from_a_listener_does_not_wait_for_itself() -> None:
    run: list[Run] = []
    registered = threading.Event()
    trainer = CountingTrainer(lambda number: registered.wait(30) and None)
    run.append(start(trainer, ["aaaa"], 1000))
    run[0].subscribe(lambda event: run[0].stop() if event == "step" else None)
    registered.set()
    run[0].wait(30)
    assert run[0].status is RunStatus.STOPPED
    assert len(run[0].losses) == 1


def test_a_step_that_can_be_cancelled_does_not_hold_up_a_stop() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Cancelled(CountingTrainer):
        def step(self, batch: Any, *, leave_updates: bool = False) -> float:
            begun.set()
            assert cancelled.wait(30)
            raise StepCancelledError("cancelled")

        def cancel(self) -> bool:
            cancelled.set()
            return True

    trainer = Cancelled()
    run = start(trainer, ["aaaa"], 9)
    assert begun.wait(30)
    run.stop()
    assert run.status is RunStatus.STOPPED
    assert run.error is None
    assert run.losses == ()
    assert trainer.closed == 1


def test_paused_run_holds_still_until_resumed() -> None:
    paused = threading.Event()
    run: list[Run] = []
    made = threading.Event()

    def during(number: int) -> None:
        made.wait(30)
        if number == 1:
            run[0].pause()
            assert run[0].status is RunStatus.RUNNING  # while the step runs on

    run.append(start(CountingTrainer(during), ["aaaa"], 4))
    run[0].subscribe(lambda event: paused.set() if run[0].status is RunStatus.PAUSED else None)
    made.set()
    assert paused.wait(30)
    with pytest.raises(TimeoutError, match="paused"):
        run[0].wait(0.2)
    assert len(run[0].losses) == 2
    assert run[0].status is RunStatus.PAUSED
    run[0].resume()
    assert run[0].wait(30).status is RunStatus.FINISHED
    assert len(run[0].losses) == 4


def test_paused_run_can_be_stopped() -> None:
    run: list[Run] = []
    made = threading.Event()

    def during(number: int) -> None:
        made.wait(30)
        run[0].pause()

    run.append(start(CountingTrainer(during), ["aaaa"], 4))
    made.set()
    run[0].stop()
    assert run[0].status is RunStatus.STOPPED


def test_failure_names_the_step_frees_the_trainer_and_is_raised_by_wait() -> None:
    def during(number: int) -> None:
        if number == 2:
            raise RuntimeError("the label 99 is out of range")

    trainer = CountingTrainer(during)
    run = start(trainer, ["aaaa"], 9)
    with pytest.raises(TrainingError, match="step 3 of 9: RuntimeError: the label 99"):
        run.wait(30)
    assert run.status is RunStatus.FAILED
    assert len(run.losses) == 2
    assert trainer.closed == 1
    assert run.error is not None
    assert run.error.__cause__ is None
    assert run.error.__context__ is None
    assert "during" in run.error.__notes__[0]  # where it happened, as text


def test_failing_data_is_a_training_error() -> None:
    def batches() -> Iterator[str]:
        yield "aaaa"
        raise KeyError("no such file")

    run = start(CountingTrainer(), batches(), 9)
    with pytest.raises(TrainingError, match="step 2 of 9: KeyError"):
        run.wait(30)


def test_empty_data_is_a_training_error() -> None:
    with pytest.raises(TrainingError, match="yields no batch"):
        start(CountingTrainer(), [], 9).wait(30)


def test_a_failing_listener_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    begin = threading.Event()
    run = start(CountingTrainer(lambda number: begin.wait(30) and None), ["aaaa"], 3)

    def listener(event: str) -> None:
        raise ValueError("broken view")

    run.subscribe(listener)
    begin.set()
    assert run.wait(30).status is RunStatus.FINISHED
    assert "broken view" in caplog.text


def test_unsubscribed_listener_hears_no_more() -> None:
    heard: list[str] = []
    begin = threading.Event()
    run = start(CountingTrainer(lambda number: begin.wait(30) and None), ["aaaa"], 3)
    run.subscribe(heard.append)()
    begin.set()
    run.wait(30)
    assert heard == []


def test_record_every_limits_recorded_steps_but_keeps_the_last() -> None:
    run = start(CountingTrainer(), ["aaaa"], 7, record_every=3).wait(30)
    assert len(run.losses) == 7
    assert len(run.swap_bytes) == 3  # after steps 3, 6 and 7


def test_interrupt_while_waiting_stops_the_run() -> None:
    started = threading.Event()

    def during(number: int) -> None:
        started.wait(30)
        if number == 0:
            threading.Event().wait(0.3)  # by then the main thread waits
            os.kill(os.getpid(), signal.SIGINT)

    trainer = CountingTrainer(during)
    run = start(trainer, ["aaaa"], 10**9)

    def wait() -> None:
        started.set()
        run.wait(60)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert run.status is RunStatus.STOPPED
    assert trainer.closed == 1


def test_a_run_nobody_waits_for_ends_with_the_interpreter() -> None:
    code = """
from harmony_lab.plan import Plan
from harmony_lab.run import Run

class Endless:
    predicted = last_trace = last_norm = None
    notes = ()
    def step(self, batch, leave_updates): return 0.0
    def close(self): print("closed")

plan = Plan.parse("dp minibatch=4 forward=4[] backward=4[0:2] devices=0")
Run(Endless(), plan, ["aaaa"], 10**12, num_samples=len).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "closed"


def test_a_listener_that_is_told_of_the_end_may_wait_for_it() -> None:
    begin = threading.Event()
    ends: list[RunStatus] = []
    run = start(CountingTrainer(lambda number: begin.wait(30) and None), ["aaaa"], 2)
    run.subscribe(lambda event: ends.append(run.wait(5).status) if event == "status" else None)
    begin.set()
    run.wait(30)
    assert ends == [RunStatus.FINISHED]


def test_a_listener_that_waits_for_its_own_run_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    begin = threading.Event()
    run = start(CountingTrainer(lambda number: begin.wait(30) and None), ["aaaa"], 2)
    run.subscribe(lambda event: run.wait() and None if event == "step" else None)
    begin.set()
    assert run.wait(30).status is RunStatus.FINISHED
    assert "a listener cannot wait for the run that calls it" in caplog.text


def test_a_run_that_gets_no_thread_has_failed_and_its_trainer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    trainer = CountingTrainer()
    run = Run(trainer, PLAN, ["aaaa"], 3, num_samples=len)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            run.start()
    assert run.status is RunStatus.FAILED
    assert trainer.closed == 1
    run.stop()
    with pytest.raises(TrainingError, match="can't start"):
        run.wait(30)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_is_over_holds_neither_trainer_nor_data_nor_listeners(fails: bool) -> None:
    class Data(list[str]):
        pass

    def during(number: int) -> None:
        if fails and number == 1:
            raise ValueError("broken")

    trainer, data = CountingTrainer(during), Data(["aaaa"])
    run = Run(trainer, PLAN, data, 3, num_samples=len)
    view = CountingTrainer()
    run.subscribe(lambda event, seen=view: None)  # type: ignore[misc]
    watched = [weakref.ref(thing) for thing in (trainer, data, view)]
    run.start()
    run.stop()
    del trainer, data, view
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]
    assert run.predicted is EMPTY


def test_every_step_is_told_to_the_logging_hook_with_its_loss_time_and_norm() -> None:
    records: list[StepRecord] = []
    run = start(CountingTrainer(norms=True), ["aaaa", "bb"], 3, on_step=records.append).wait(30)
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.loss for record in records] == list(run.losses)
    assert [record.seconds for record in records] == list(run.step_s)
    assert [record.num_samples for record in records] == [4, 2, 4]
    assert [record.grad_norm for record in records] == list(run.grad_norms) == [1.0, 2.0, 3.0]


def test_norms_are_not_made_up_where_nothing_is_clipped() -> None:
    records: list[StepRecord] = []
    run = start(CountingTrainer(), ["aaaa"], 2, on_step=records.append).wait(30)
    assert [record.grad_norm for record in records] == [None, None]
    assert run.grad_norms == ()


def test_a_callback_that_fails_ends_the_run_with_its_error_and_a_whole_step() -> None:
    def fails(record: StepRecord) -> None:
        if record.step == 2:
            raise ConnectionError("no server")

    trainer = CountingTrainer()
    run = start(trainer, ["aaaa"], 9, on_step=fails)
    with pytest.raises(
        TrainingError, match=r"on_step failed after step 2 of 9, .*: ConnectionError: no server"
    ) as caught:
        run.wait(30)
    assert run.status is RunStatus.FAILED
    assert len(run.losses) == len(run.swap_bytes) == 2
    assert trainer.closed == 1
    assert 'raise ConnectionError("no server")' in caught.value.__notes__[0]


def test_steps_of_several_minibatches_take_them_in_order() -> None:
    trainer = CountingTrainer()
    records: list[StepRecord] = []
    run = start(trainer, ["aaaa", "bbbb", "cccc"], 3, accumulate=2, on_step=records.append).wait(30)
    assert trainer.batches == ["aaaa", "bbbb", "cccc", "aaaa", "bbbb", "cccc"]
    assert trainer.groups == [2, 2, 2]
    assert len(run.losses) == 3
    assert [record.num_samples for record in records] == [8, 8, 8]


def test_minibatches_that_make_no_whole_step_are_left_out_and_noted() -> None:
    trainer = CountingTrainer()
    run = start(trainer, iter(["aaaa"] * 5), 9, accumulate=2).wait(30)
    assert trainer.groups == [2, 2]
    assert "ended after 2 of 9 steps; an iterator cannot start over, and 1 minibatch that makes" in run.notes[0]


@pytest.mark.parametrize("given", [0, 3])
def test_data_that_ends_before_the_first_step_fails_the_run(given: int) -> None:
    run = start(CountingTrainer(), iter(["aaaa"] * given), 9, accumulate=4)
    with pytest.raises(TrainingError, match=f"ended before the first step, which takes 4 .* it gave {given};"):
        run.wait(30)
    assert run.status is RunStatus.FAILED
