"""Virtual time: the ops of a step on a clock of their own, which goes from event to event as the simulator's does.

Real is what ops compute, copy, allocate and free: each runs in full at its virtual start, in one thread for all, where
no other takes its cores and no interrupt reaches.  Virtual is when it starts and ends, in the Trace and in the memory
timelines.  An op starts when the one before it on its stream and all that it waits for have ended.  Computing and
updating take ``OpSeconds``, by default the wall time they took alone; updates on the host share its cores.  Moving
bytes takes what the machine's links, fairly shared, give these bytes, and the latency, however long copying took.

So eight emulated devices on two cores give the timeline of eight real ones that compute as fast, and nobody sleeps.
"""

import math
import time
from collections.abc import Generator, Hashable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Protocol

import torch

from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Op, OpKind, Program, Stream, TensorKind
from harmony_lab.runtime.step import Step, Training
from harmony_lab.runtime.waits import Key, Waits
from harmony_lab.runtime.workers import Job
from harmony_lab.sharing import Flow, SharedResources

__all__ = ["ALONE", "OpSeconds", "VirtualJob", "as_it_took"]

ALONE = (HOST, Stream.HOST)
"""The thread that runs all ops."""

_COMPUTING = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.UPDATE})
_CORES = "the host's cores"


class OpSeconds(Protocol):
    """The clock that virtual time is read from: what an op that computes or updates takes, which just took
    ``wall_s``."""

    def __call__(self, program: Program, index: int, wall_s: float, /) -> float: ...


def as_it_took(program: Program, index: int, wall_s: float, /) -> float:
    return wall_s


class VirtualJob(Job):
    """A job of one thread, which follows virtual time."""

    def __init__(
        self, program: Program, waits: Waits, step: Step, training: Training, machine: Machine, seconds: OpSeconds
    ) -> None:
        super().__init__(program, waits, step.perform, step.conclude, training.backend.abort)
        self.queues = {ALONE: tuple(range(len(program.ops)))}
        self._unfinished = set(self.queues)
        self._step, self._machine, self._seconds = step, machine, seconds
        self._backend, self._ledgers = training.backend, training.ledgers
        self._now_s = 0.0
        cores = (_CORES, float(machine.host.num_cores))
        self._resources = SharedResources(dict([*machine.capacities.items(), cores]))
        self._op_of: dict[Hashable, int] = {}  # by flow under way
        self._tails_s: dict[int, float] = {}  # of these ops, after their last flow
        self._timed_s: dict[int, float] = {}  # when ops end for which that is known
        self._released: dict[int, Sequence[tuple[float, int, int]]] = {}  # by ops under way, in the end

    def work(self, key: Key) -> None:
        with suppress(KeyboardInterrupt):  # of an op's own: it has failed the job as any error does
            self.work_alone(Random())

    def elapsed_s(self) -> float:
        """In virtual time."""
        return self._now_s

    def _one_by_one(self, rng: Random) -> Generator[int, None, None]:
        waiting, followers = _edges(self.program)
        ready = [index for index, count in enumerate(waiting) if not count]
        num_threads = torch.get_num_threads()
        try:
            while ready or self._timed_s or self._op_of:
                for index in ready:
                    yield index
                    self._start(index, self.program.ops[index])
                ready = []
                for index in self._ended_next():
                    yield index
                    self._end(index, self.program.ops[index])
                    for follower in followers[index]:
                        waiting[follower] -= 1
                        if not waiting[follower]:
                            ready.append(follower)
        finally:
            torch.set_num_threads(num_threads)

    def _start(self, index: int, op: Op) -> None:
        self._starts_s[index] = self._now_s
        wall_s = self._perform_alone(index, op)
        seconds = self._seconds(self.program, index, wall_s) if op.kind in _COMPUTING else 0.0
        flows, tail_s = self._flows_of(index, op, seconds)
        if flows:
            self._tails_s[index] = tail_s
        else:
            self._timed_s[index] = self._now_s + seconds + tail_s
        for key, flow in enumerate(flows):
            self._resources.add((index, key), flow)
            self._op_of[index, key] = index

    def _perform_alone(self, index: int, op: Op) -> float:
        """The wall time it took.  What it released last of all is there until its virtual end."""
        self._backend.enter_worker(op.device, op.stream)
        ledger = None if op.device == HOST else self._ledgers[op.device]
        first = 0 if ledger is None else ledger.num_changes
        began_s = time.perf_counter()
        self._step.begin(index, op)
        wall_s = time.perf_counter() - began_s
        if ledger is not None:
            self._released[index] = ledger.take_back(first)
        return wall_s

    def _flows_of(self, index: int, op: Op, seconds: float) -> tuple[list[Flow], float]:
        """What it shares with others while it is under way, and the seconds that it takes after that."""
        frees_weights = any(self.program.blocks[block].kind is TensorKind.WEIGHT for block in op.frees)
        release_s = self._machine.devices[op.device].release_s if frees_weights and op.device != HOST else 0.0
        if op.kind is OpKind.UPDATE and op.device == HOST:
            return [Flow((_CORES,), seconds, cap=1.0, weight=self._machine.host.update_threads)], release_s
        num_bytes: dict[tuple[int, int], int] = {}
        for source, destination, _, count in self.program.transfers(index):
            num_bytes[source, destination] = num_bytes.get((source, destination), 0) + count
        routes = [self._machine.route(*way) for way in num_bytes]
        latency_s = max((self._machine.latency_s(route) for route in routes), default=0.0)
        return [Flow(*flow) for flow in zip(routes, map(float, num_bytes.values()), strict=True)], latency_s + release_s

    def _ended_next(self) -> list[int]:
        """Go to the next time at which ops end; these, in the order of their numbers."""
        while True:
            flow = self._resources.next_completion()
            flow_s = math.inf if flow is None else flow[0]
            known_s = min(self._timed_s.values(), default=math.inf)
            self._now_s = min(known_s, flow_s)
            self._resources.advance(self._now_s)
            if known_s <= flow_s:
                ended = sorted(index for index, end_s in self._timed_s.items() if end_s <= self._now_s)
                for index in ended:
                    del self._timed_s[index]
                return ended
            assert flow is not None
            self._resources.remove(flow[1])
            index = self._op_of.pop(flow[1])
            if index not in self._op_of.values():
                self._timed_s[index] = self._now_s + self._tails_s.pop(index)

    def _end(self, index: int, op: Op) -> None:
        self._ends_s[index] = self._now_s
        if op.device != HOST:
            self._ledgers[op.device].put_back(self._released.pop(index))
        self._step.end(op)
        self._ended[index] = True


def _edges(program: Program) -> tuple[list[int], list[list[int]]]:
    """How many ops each waits for, and those that wait for each: in the simulator's order, in which they start where
    they do so at one time."""
    waiting = [len(op.after) for op in program.ops]
    followers: list[list[int]] = [[] for _ in program.ops]
    for index, op in enumerate(program.ops):
        for other in op.after:
            followers[other].append(index)
    for queue in program.queues.values():
        for before, index in pairwise(queue):
            waiting[index] += 1
            followers[before].append(index)
    return waiting, followers
