"""What benchmarks of training share: machines of one core per device, plans with a layer to a pack, ratios of times."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harmony_lab.bench.decoder import Decoder, Shape, decoder_batch
from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan, microbatches
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.trainer import Trainer

__all__ = [
    "SHAPES",
    "Subject",
    "adamw",
    "alternating",
    "emulated",
    "layerwise_plan",
    "plain_step",
    "threads",
    "trainer",
]

SHAPES = (
    Shape(name="decoder 2 x 128", num_blocks=2, width=128, num_heads=4, length=64),
    Shape(name="decoder 4 x 192", num_blocks=4, width=192, num_heads=4, length=64),
    Shape(name="decoder 6 x 256", num_blocks=6, width=256, num_heads=4, length=64),
)
FREE_LINK = 1e12  # bytes per second: transfers take what copying takes


class Subject:
    """A model ready to be trained: its layers, a minibatch, what its layers cost at one microbatch size."""

    def __init__(self, shape: Shape, minibatch_size: int, microbatch_size: int) -> None:
        torch.manual_seed(0)
        self.shape, self.minibatch_size, self.microbatch_size = shape, minibatch_size, microbatch_size
        self.batch = decoder_batch(shape, minibatch_size)
        self.model = Decoder(shape)
        self.layers: LayerSequence = decompose(self.model, self.batch)

    def profile(self, machine: Machine, trials: int = 5) -> Profile:
        return profile(
            self.layers,
            machine,
            adamw(self.model),
            microbatch_sizes=(self.microbatch_size,),
            trials=trials,
            cache=False,
        )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def emulated(num_devices: int, *, memory: int = 2**31, link: float = FREE_LINK) -> Machine:
    """Devices that compute on one core each."""
    machine = Machine.emulated(num_devices, memory=memory, link=link)
    return replace(machine, devices=tuple(replace(device, compute_threads=1) for device in machine.devices))


def layerwise_plan(subject: Subject, mode: Mode, num_devices: int) -> Plan:
    """Every layer a pack; the last block and what comes after it are the fused one."""
    count = len(subject.layers)
    alone = tuple(Pack(index, index + 1) for index in range(count - 2))
    return Plan(
        mode=mode,
        minibatch_size=subject.minibatch_size,
        forward_microbatch_size=subject.microbatch_size,
        forward_packs=alone,
        backward_microbatch_size=subject.microbatch_size,
        backward_packs=(*alone, Pack(count - 2, count)),
        devices=tuple(range(num_devices)),
    )


def trainer(subject: Subject, plan: Plan, machine: Machine, costs: Profile) -> Trainer:
    return Trainer(subject.layers, adamw(subject.model), plan, machine, profile=costs)


def plain_step(shape: Shape, minibatch_size: int, microbatch_size: int) -> Callable[[], Any]:
    """A step of plain PyTorch with a checkpoint at every block and the same microbatches."""
    model = Decoder(shape, checkpointed=True)
    optimizer = adamw(model)
    tokens, targets = decoder_batch(shape, minibatch_size)
    parts = list(microbatches(0, minibatch_size, microbatch_size))

    def step() -> None:
        optimizer.zero_grad()
        for start, stop in parts:
            loss = model(tokens[start:stop], targets[start:stop]) * ((stop - start) / minibatch_size)
            loss.backward()
        optimizer.step()

    return step


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Compute with that many threads in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def alternating(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> float:
    """How many times as long ``second`` takes as ``first``: the median over rounds that run one after the other."""
    for step in (first, second, first, second):
        step()
    return statistics.median(1 / (seconds(first) / seconds(second)) for _ in range(rounds))


def seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
