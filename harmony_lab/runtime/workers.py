"""Workers: one thread per queue of a Program, which take its ops in order and wait for what each comes after."""

import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import torch

from harmony_lab.errors import TrainingError
from harmony_lab.machine import HOST
from harmony_lab.program import Op, Program, Stream
from harmony_lab.runtime.backend import StepAborted
from harmony_lab.runtime.failures import Failure, capture
from harmony_lab.runtime.waits import Key, Waits
from harmony_lab.trace import Floats

__all__ = ["Job", "Workers"]

_Inbox: TypeAlias = "SimpleQueue[Job | None]"
_Entered: TypeAlias = SimpleQueue[Failure | None]
_LONGEST_DELAY_S = 2e-3
_INTERRUPT_CHECK_S = 0.1
"""An interrupt that no signal brings (a kernel's message) is noticed when the main thread runs Python code."""


class Job:
    """One step: every op of a program once.

    The first error wins: it ends the job, waiting threads wake and no further op starts.  ``conclude(success)`` runs in
    the last thread to finish, whatever happened: with success where every op was done, also if it was aborted then.
    """

    def __init__(
        self,
        program: Program,
        waits: Waits,
        perform: Callable[[int, Op], None],
        conclude: Callable[[bool], None],
        abort: Callable[[], None],
        chaos: str | None = None,
    ) -> None:
        self.program = program
        self.queues = waits.queues
        self.origin_s = time.perf_counter()
        self.failure: Failure | None = None
        self.finished = threading.Event()
        self._perform = perform
        self._conclude = conclude
        self._abort = abort
        self._chaos = chaos
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._unfinished = set(waits.queues)
        self._waits = waits
        self._counts = list(waits.counts)
        self._free = [index for index, count in enumerate(waits.counts) if not count and waits.passive[index]]
        self._gates = {key: threading.Semaphore(0) for key in waits.queues}
        self._waiting: dict[Key, int] = {}
        self._starts_s = [0.0] * len(program.ops)
        self._ends_s = [0.0] * len(program.ops)
        self._ended = bytearray(len(program.ops))

    @property
    def times_s(self) -> tuple[Floats, Floats]:
        """Start and end of every op."""
        return np.array(self._starts_s), np.array(self._ends_s)

    def elapsed_s(self) -> float:
        """Since the job began."""
        return time.perf_counter() - self.origin_s

    @property
    def num_ended(self) -> int:
        """Ops that have ended by now."""
        return sum(self._ended)

    def standstill(self) -> str:
        """The op that every queue has come to, and which others that one waits for; a line each."""
        ops, followers, passive = self.program.ops, self._waits.followers, self._waits.passive
        with self._lock:
            ended = bytes(self._ended)

        def awaited(op: int) -> set[int]:
            before = {index for index in range(op) if op in followers[index] and not ended[index]}
            return before.union(*(awaited(index) for index in before if passive[index]))

        heads = [next((index for index in queue if not ended[index]), None) for queue in self.queues.values()]
        lines = []
        for head in (head for head in heads if head is not None):
            waits = ", ".join(f"op {index}, {ops[index]}" for index in sorted(awaited(head)))
            lines.append(f"op {head}, {ops[head]}, {f'waits for {waits}' if waits else 'waits for no other'}")
        return "\n".join(lines)

    def awaits(self, key: Key) -> bool:
        """Whether that queue is still to be worked on: its thread may have been given the job twice."""
        with self._lock:
            return key in self._unfinished

    def abort(self) -> None:
        """No further op starts; threads that wait go home."""
        self._aborted.set()
        self._abort()
        for gate in self._gates.values():
            gate.release()

    def work(self, key: Key) -> None:
        """Run the ops of one queue, in that queue's thread."""
        at: int | None = None
        try:
            rng = None if self._chaos is None else random.Random(f"{self._chaos}/{key}")
            for at in self.queues[key]:
                self._wait(key, at)
                self._delay(rng)
                if self._aborted.is_set():
                    break
                passive = [*self._run(at, rng), *self._ready()]
                while passive and not self._aborted.is_set():
                    at = passive.pop(0)
                    passive += self._run(at, rng)
        except StepAborted:
            self.abort()  # where a cancelled step came to an update before it was told of
        except BaseException as error:
            self._fail("the end of the step" if at is None else f"op {at}, {self.program.ops[at]}", error)
        self._leave(key)

    def work_alone(self, rng: random.Random) -> None:
        """Run every op in this thread, one at a time, in an order that the program's edges allow."""
        at: int | None = None
        try:
            with closing(self._one_by_one(rng)) as ops:
                for index in ops:
                    at = index
                    if self._aborted.is_set():
                        break
        except StepAborted:
            self.abort()
        except BaseException as error:
            self._fail("the end of the step" if at is None else f"op {at}, {self.program.ops[at]}", error)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            for key in self.queues:
                self._leave(key)

    def _one_by_one(self, rng: random.Random) -> Generator[int, None, None]:
        """Runs every op, in a random order; tells of each before it does.

        Some queues are favoured, so that they run as far ahead as nothing holds them up.
        """
        queues = {key: deque(queue) for key, queue in self.queues.items()}
        favour = {key: rng.random() for key in queues}
        passive = self._ready()
        while passive or queues:
            heads = [key for key, queue in queues.items() if not self._counts[queue[0]]]
            assert passive or heads, "every op that is left waits for another"
            if passive and (not heads or rng.random() < 0.5):
                at = passive.pop(rng.randrange(len(passive)))
            else:
                key = max(heads, key=favour.__getitem__) if rng.random() < 0.5 else rng.choice(heads)
                at = queues[key].popleft()
                if not queues[key]:
                    del queues[key]
            yield at
            passive += self._run(at, None)

    def _ready(self) -> list[int]:
        """The passive ops that wait for nothing, once."""
        with self._lock:
            ready, self._free = self._free, []
        return ready

    def _wait(self, key: Key, index: int) -> None:
        with self._lock:
            if not self._counts[index]:
                return
            self._waiting[key] = index
        self._gates[key].acquire()

    def _run(self, index: int, rng: random.Random | None) -> list[int]:
        """Do one op; returns the passive ops that waited for it alone."""
        self._starts_s[index] = self.elapsed_s()
        self._perform(index, self.program.ops[index])
        self._delay(rng)
        self._ends_s[index] = self.elapsed_s()
        passive, counts, keys = [], self._counts, self._waits.keys
        with self._lock:
            self._ended[index] = True
            for follower in self._waits.followers[index]:
                counts[follower] -= 1
                if not counts[follower]:
                    if self._waits.passive[follower]:
                        passive.append(follower)
                    elif self._waiting.get(keys[follower]) == follower:
                        self._gates[keys[follower]].release()
        return passive

    def _delay(self, rng: random.Random | None) -> None:
        if rng is not None and rng.random() < 0.5:
            self._aborted.wait(rng.random() * _LONGEST_DELAY_S)

    def _fail(self, where: str, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = capture(where, error)
        self.abort()

    def _leave(self, key: Key) -> None:
        with self._lock:
            last = key in self._unfinished and len(self._unfinished) == 1
            self._unfinished.discard(key)
        if last:
            try:
                self._conclude(self.failure is None and all(self._ended))
            except StepAborted:
                self.abort()
            except BaseException as error:
                self._fail("the end of the step", error)
            self.finished.set()


class Workers:
    """The threads, kept from step to step and joined by ``close``.  ``enter(device, stream)`` runs first in each.

    Threads end by themselves when their Workers are forgotten.  They hold up no interpreter that exits: between steps
    they only wait.
    """

    def __init__(self, enter: Callable[[int, Stream], None]) -> None:
        self._enter = enter
        self._threads: dict[Key, threading.Thread] = {}
        self._inboxes: dict[Key, _Inbox] = {}
        weakref.finalize(self, _dismiss, self._inboxes)

    def prepare(self, keys: Iterable[Key]) -> None:
        """Start the threads that are missing.  Where one cannot start, all end and its error is raised."""
        missing = [key for key in keys if key not in self._threads]
        if not missing:
            return
        num_threads = torch.get_num_threads()
        try:
            for key in missing:
                self._start(key)
        except BaseException:
            self.close()
            raise
        finally:
            torch.set_num_threads(num_threads)  # what a worker sets for itself also became that of later threads

    def _start(self, key: Key) -> None:
        device, stream = key
        name = f"{'host' if device == HOST else f'd{device}'}.{stream}"
        inbox: _Inbox = SimpleQueue()
        entered: _Entered = SimpleQueue()
        arguments = (self._enter, key, inbox, entered)
        thread = threading.Thread(target=_serve, args=arguments, name=f"harmony-{name}", daemon=True)
        self._threads[key], self._inboxes[key] = thread, inbox  # first: an interrupt may come once it has started
        thread.start()
        failure = entered.get()
        if failure is not None:
            raise TrainingError(
                f"the thread for {name} could not start: {type(failure.error).__name__}: {failure.error}. "
                "No weights were updated: training can go on from where it was."
            ) from failure.error

    def run(self, job: Job, patience_s: float = math.inf) -> None:
        """Run a job to its end.  ``KeyboardInterrupt`` here aborts it, and is raised once all threads are idle.

        Raises ``TrainingError`` when no op has ended for ``patience_s``, not counting time in which the whole process
        was stopped.  It is for ops that wait for each other: one that is under way is waited for all the same.
        """
        pending = list(job.queues)
        try:
            while pending:
                self._inboxes[pending[-1]].put(job)
                pending.pop()
            checks, seen = 0, 0
            while not job.finished.wait(_INTERRUPT_CHECK_S):
                checks, seen = (checks + 1, seen) if job.num_ended == seen else (0, job.num_ended)
                if checks * _INTERRUPT_CHECK_S > patience_s:
                    raise TrainingError(f"no op has ended for {patience_s} s:\n{job.standstill()}")
        except BaseException:
            self._drain(job, pending)
            raise

    def _drain(self, job: Job, pending: list[Key]) -> None:
        """``pending``: whose threads may not have the job yet; it may have been given to the last of them."""
        while not job.finished.is_set():
            try:
                job.abort()
                for key in pending:
                    self._inboxes[key].put(job)
                job.finished.wait()
            except KeyboardInterrupt:
                continue  # asked for already

    def close(self) -> None:
        """Join all threads."""
        _dismiss(self._inboxes)
        for thread in self._threads.values():
            if thread.ident is not None:  # else it has not started
                thread.join()
        self._threads.clear()
        self._inboxes.clear()


def _serve(enter: Callable[[int, Stream], None], key: Key, inbox: _Inbox, entered: _Entered) -> None:
    try:
        enter(*key)
    except BaseException as error:
        entered.put(capture("entering", error))
        return
    entered.put(None)
    while (job := inbox.get()) is not None:
        if job.awaits(key):
            job.work(key)
        del job


def _dismiss(inboxes: dict[Key, _Inbox]) -> None:
    for inbox in inboxes.values():
        inbox.put(None)
