"""Workers end whatever comes: ops that wait for each other, an abort, interrupts at any moment."""

import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from plain_training import planned
from small_layers import mlp

from harmony_lab.errors import TrainingError
from harmony_lab.machine import Machine
from harmony_lab.program import Op, OpKind, Stream
from harmony_lab.runtime.waits import Waits
from harmony_lab.runtime.workers import Job, Workers


def test_a_standstill_ends_with_what_every_thread_waits_for() -> None:
    machine = Machine.emulated(2, memory="64KiB", link=1e9)
    program = planned(
        mlp(depth=3, num_samples=4), machine, "pp minibatch=4 forward=2[0:2] backward=2[0:2,2:4] devices=0,1"
    )(4)
    waits = Waits(program)
    stuck = next(number for number, op in enumerate(program.ops) if op.kind is OpKind.BACKWARD)
    waits.counts[stuck] += 1  # an op that never comes
    concluded = []
    job = Job(program, waits, lambda index, op: None, concluded.append, lambda: None)
    workers = Workers(lambda device, stream: None)
    try:
        workers.prepare(waits.queues)
        with pytest.raises(TrainingError, match="no op has ended for") as error:
            workers.run(job, patience_s=1.0)
    finally:
        workers.close()
    lines = str(error.value).splitlines()[1:]
    assert f"op {stuck}, {program.ops[stuck]}, waits for no other" in lines
    assert any(f"op {stuck}, " in line.partition("waits for")[2] for line in lines), lines
    assert concluded == [False]


@pytest.mark.parametrize("in_the_last_op", [True, False])
def test_a_job_that_is_aborted_has_succeeded_only_where_every_op_was_done(in_the_last_op: bool) -> None:
    machine = Machine.emulated(1, memory="64KiB", link=1e9)
    program = planned(mlp(depth=3, num_samples=4), machine, "dp minibatch=4 forward=4[] backward=4[0:4] devices=0")(4)
    begun: list[int] = []
    concluded: list[bool] = []

    def perform(index: int, op: Op) -> None:
        begun.append(index)
        if len(begun) == (len(program.ops) if in_the_last_op else 1):
            job.abort()

    waits = Waits(program)
    job = Job(program, waits, perform, concluded.append, lambda: None)
    workers = Workers(lambda device, stream: None)
    try:
        workers.prepare(waits.queues)
        workers.run(job)
    finally:
        workers.close()
    assert concluded == [in_the_last_op]


class InterruptedOnce:
    """Does what it is made of, and is interrupted when that is done."""

    def __init__(self, then: Callable[..., None]) -> None:
        self._then = then
        self._left = 1

    def __call__(self, *arguments: Any) -> None:
        self._then(*arguments)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", ["when a thread has got its work", "when work is aborted", "both"])
def test_no_thread_waits_for_ever_whenever_interrupts_come(interrupted: str) -> None:
    machine = Machine.emulated(1, memory="64KiB", link=1e9)
    program = planned(mlp(depth=3, num_samples=4), machine, "dp minibatch=4 forward=4[] backward=4[0:4] devices=0")(4)
    waits = Waits(program)
    for queue in waits.queues.values():
        waits.counts[queue[0]] += 1  # an op that never comes
    concluded: list[bool] = []
    abort: Callable[[], None] = (lambda: None) if "got" in interrupted else InterruptedOnce(lambda: None)
    job = Job(program, waits, lambda index, op: None, concluded.append, abort)
    workers = Workers(lambda device, stream: None)
    workers.prepare(waits.queues)
    if "aborted" in interrupted:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    else:
        last = list(job.queues)[-1]  # which gets it first
        workers._inboxes[last] = cast("Any", SimpleNamespace(put=InterruptedOnce(workers._inboxes[last].put)))
    with pytest.raises(KeyboardInterrupt):
        workers.run(job)
    closing = threading.Thread(target=workers.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert concluded == [False]


@pytest.mark.parametrize("starts", [True, False])
def test_a_thread_whose_start_is_interrupted_ends(starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, set(threading.enumerate())

    def interrupted(thread: threading.Thread) -> None:
        if starts:
            start(thread)
        raise KeyboardInterrupt

    workers = Workers(lambda device, stream: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.prepare([(0, Stream.COMPUTE)])
    assert set(threading.enumerate()) == before
    workers.prepare([(0, Stream.COMPUTE)])
    workers.close()
    assert set(threading.enumerate()) == before
