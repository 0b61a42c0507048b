"""A thousand steps: nothing grows and nothing drifts."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import psutil
import pytest
import torch
from plain_training import PlainTraining, planned
from small_layers import mlp
from torch import Tensor

from harmony_lab.machine import Machine
from harmony_lab.program import Stream
from harmony_lab.runtime.emulated import EmulatedBackend
from harmony_lab.runtime.memory import MemoryTracker
from harmony_lab.runtime.runner import Runner

MACHINE = Machine.emulated(2, memory="64KiB", link=1e12)
PLANS = {
    "pp": "pp minibatch=8 forward=4[0:1,1:2] backward=4[0:2,2:4] devices=0,1",
    "dp, some of it stays": "dp minibatch=8 forward=4[0:1,1:2] backward=4[0:1,1:2,2:4] devices=0,1 prefetch=2 "
    "resident=1:2 stash=1",
    "dp, updated on devices": "dp minibatch=8 forward=2[0:1,1:2] backward=2[0:1,1:2,2:4] devices=0,1 prefetch=2 "
    "resident=0:1 kept=0:1 optimizer=0:1,2:4",
}


def sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.05, momentum=0.9)


def adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=1e-2, eps=1e-4)


@pytest.mark.parametrize(
    ("plan", "make"), [("pp", sgd), ("dp, some of it stays", adamw)], ids=["pp", "dp with a learning rate schedule"]
)
def test_a_thousand_steps_leave_memory_and_threads_flat_and_equal_plain_pytorch(
    plan: str, make: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    layers = mlp(depth=3, num_samples=8)
    plain = PlainTraining(layers, make)
    optimizer = make([tensor for tensor in layers.tensors.values() if tensor.requires_grad])
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(of, T_max=300, eta_min=1e-3) for of in (optimizer, plain.optimizer)
    ]
    process, counts, objects = psutil.Process(), [], []
    with Runner(layers, optimizer, MACHINE, planned(layers, MACHINE, PLANS[plan])) as runner:
        for step in range(1000):
            loss = runner.step(layers.example_batch)
            expected = plain.step(layers.example_batch)
            for schedule in schedules if make is adamw else ():
                schedule.step()
            if step in (199, 599, 999):
                assert loss == pytest.approx(expected, rel=1e-3)
                gc.collect()
                counts.append((threading.active_count(), process.memory_info().rss, runner.host_bytes))
                objects.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        assert runner.device_bytes == (0, 0)
    threads, resident, on_host = zip(*counts, strict=True)
    assert len(set(threads)) == len(set(on_host)) == 1
    assert objects[-1] <= objects[0]
    growth = [after - before for before, after in pairwise(resident)]
    assert min(growth) < 4 * 2**20, growth  # a leak goes on; what allocators keep for later comes once
    plain.assert_equal(1e-3)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_step_like_those_before_allocates_on_devices_for_computing_only_and_keeps_none_of_it(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a chunk of gradients at a time, where devices sum them up."""
    streams: list[tuple[int, Stream]] = []
    running = EmulatedBackend.running

    @contextmanager
    def watched(backend: EmulatedBackend, device: int, stream: Stream) -> Iterator[None]:
        streams.append((device, stream))
        with running(backend, device, stream):
            yield
        streams.pop()

    monkeypatch.setattr(EmulatedBackend, "running", watched)
    layers = mlp(depth=3, num_samples=8)
    alive, allocating = 0, set()

    def allocated(num_bytes: int) -> None:
        nonlocal alive
        alive += num_bytes
        allocating.update(streams[-1:])

    def released(num_bytes: int) -> None:
        nonlocal alive
        alive -= num_bytes

    optimizer = adamw(list(layers.tensors.values()))
    with Runner(layers, optimizer, MACHINE, planned(layers, MACHINE, plan), interleaves=True) as runner:
        for _ in range(3):
            runner.step(layers.example_batch)
        with MemoryTracker(allocated, released):
            runner.step(layers.example_batch)
        assert alive == 0
    summing = {(0, Stream.PEER_IN), (1, Stream.PEER_IN)} if plan.startswith("dp") else set()
    computing = {(0, Stream.COMPUTE), (1, Stream.COMPUTE)}
    assert allocating - {(-1, Stream.HOST)} == computing | summing
