"""How much more two cores of this host do than one: plain training in two processes that have nothing in common."""

import statistics
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from harmony_lab.bench.decoder import Shape
from harmony_lab.bench.training import plain_step, seconds

__all__ = ["speedup_of_two_processes"]

_WARM_UP = 2


class _Work(NamedTuple):
    shape: Shape
    minibatch_size: int
    microbatch_size: int


def speedup_of_two_processes(shape: Shape, minibatch_size: int, microbatch_size: int, rounds: int) -> float:
    """Steps a second of two processes at once, one thread each, over those of one alone: the median of ``rounds``
    alternating runs.  2 where cores share nothing."""
    context = get_context("spawn")
    pipes = []
    processes = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        work = _Work(shape, minibatch_size, microbatch_size)
        process = context.Process(target=_steps, args=(theirs, work), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for _ in range(_WARM_UP):
            _at_once(pipes)
        return statistics.median(2 * _at_once(pipes[:1]) / _at_once(pipes) for _ in range(rounds))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def _at_once(pipes: list[Connection]) -> float:
    """Seconds of the slowest."""
    for pipe in pipes:
        pipe.send(None)
    return max(float(pipe.recv()) for pipe in pipes)


def _steps(pipe: Connection, work: _Work) -> None:
    """In a process of its own: a step whenever it is asked for one, until the other end closes."""
    torch.set_num_threads(1)
    step = plain_step(work.shape, work.minibatch_size, work.microbatch_size)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(seconds(step))
