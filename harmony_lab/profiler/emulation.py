"""emulation: what emulated devices take of this host beside kernels and links, measured by running a tiny program."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn

from harmony_lab.costs import Profile
from harmony_lab.emulation import Emulation
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Backend, Machine
from harmony_lab.profiler.decompose import decompose
from harmony_lab.program import Block, Op, OpKind, Program, Stream, TensorKind
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.runner import Runner
from harmony_lab.simulator.engine import makespan_s
from harmony_lab.trace import Trace

__all__ = ["emulation_of"]

CostsOf = Callable[[LayerSequence, Machine, int], Profile]


class _Size(NamedTuple):
    """Of layers, and of microbatches in samples."""

    width: int
    samples: int


_TINY = _Size(32, 1)  # kernels that take next to nothing
_USUAL = _Size(256, 64)  # kernels of about a millisecond
_LARGE = _Size(256, 384)  # kernels that take most of the time

_MICROBATCHES = 8
_ROUNDS, _WARM_UP = 7, 2
_ROUNDS_OF_LARGE = 15
_COPIED_BYTES = 16 * 2**20  # more than caches hold
_COPIES = 5
_MOST_SLOWED = 8.0
_HALVINGS = 12
_BUDGET = 2**26  # bytes
_WHOLE = (0, 2)
_NO_SAMPLES = (0, 0)
_known: dict[int, Emulation] = {}
_one_at_a_time = Lock()


def emulation_of(machine: Machine, costs_of: CostsOf, *, anew: bool = False) -> Emulation | None:
    """None for real devices.  Measured once per number of devices, and where it is asked for ``anew``.  ``costs_of``:
    profiles layers, without this.

    What one op takes is seen on one device.  Several share the interpreter, the cores and the memory, and wait for
    whichever is late: how much longer that takes than the simulator says of shared cores is seen on all of them at
    once, with small kernels for what an op takes beside them, with large ones for the kernels; each time right after
    one device alone, for how fast kernels are on this host changes with what else it does.  In virtual time devices do
    not meet: there it is what one device takes.
    """
    if any(device.backend is not Backend.EMULATED for device in machine.devices):
        return None
    count = 1 if machine.virtual_time else machine.num_devices
    with _one_at_a_time:
        if anew or count not in _known:
            with torch.random.fork_rng(devices=()):
                _known[count] = _measured(count, costs_of)
        return _known[count]


def _measured(num_devices: int, costs_of: CostsOf) -> Emulation:
    rounds, costs = _run((1,), _TINY, costs_of)
    spans = [span for (trace,) in rounds for span in _spans(trace)]
    emulation = Emulation(
        compute_s=_beside_kernels_s(rounds, costs),
        transfer_s=(_typical_s(spans, OpKind.SWAP_IN) + _typical_s(spans, OpKind.SWAP_OUT)) / 2,
        waking_s=statistics.median(gap for kind, _, gap in spans if kind is OpKind.SWAP_OUT),
        copied_bytes_per_s=_COPIED_BYTES / _copy_s(),
        alone_s=_beside_kernels_s(*_run((1,), _TINY, costs_of, virtual_time=True)),
    )
    if num_devices == 1:
        return emulation
    rounds, costs = _run((1, num_devices), _USUAL, costs_of)
    transfer_s = _typical_transfer_s([together for _, together in rounds])
    hurried = emulation._replace(transfer_s=max(emulation.transfer_s, transfer_s))
    slowed = hurried._replace(compute_s=emulation.compute_s * _slower_ops(rounds, costs, emulation, hurried))
    rounds, costs = _run((1, num_devices), _LARGE, costs_of, _ROUNDS_OF_LARGE)
    return slowed._replace(kernels_slowed=_slower_kernels(rounds, costs, emulation, slowed))


def _run(
    numbers: Sequence[int],
    size: _Size,
    costs_of: CostsOf,
    num_rounds: int = _ROUNDS,
    *,
    virtual_time: bool = False,
) -> tuple[list[tuple[Trace, ...]], Profile]:
    """Rounds of one step on each of these numbers of devices; what the layers cost."""
    with ExitStack() as stack:
        steps = [stack.enter_context(_running(_machine(number, virtual_time), size)) for number in numbers]
        rounds = [tuple(step() for step in steps) for _ in range(_WARM_UP + num_rounds)]
    return rounds[_WARM_UP:], costs_of(_layers(size), _machine(1), size.samples)


def _layers(size: _Size) -> LayerSequence:
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the user has as defaults
    model = nn.Sequential(*(nn.Linear(size.width, size.width, **like) for _ in range(*_WHOLE)))
    batch = torch.zeros(2, 2 * size.samples, size.width, **like)
    return decompose(model, (batch[0], batch[1]), nn.functional.mse_loss)


def _machine(num_devices: int, virtual_time: bool = False) -> Machine:
    machine = Machine.emulated(num_devices, memory=_BUDGET, link=1e12, virtual_time=virtual_time)
    return replace(machine, devices=tuple(replace(device, compute_threads=1) for device in machine.devices))


@contextmanager
def _running(machine: Machine, size: _Size) -> Iterator[Callable[[], Trace]]:
    """A step, again and again."""
    layers = _layers(size)
    program = _program(layers, machine.num_devices, size.samples)
    batch = torch.zeros(2, program.minibatch_size, size.width, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.SGD(layers.model.parameters(), lr=0.0)
    with Runner(layers, optimizer, machine, lambda size: program) as runner:

        def step() -> Trace:
            runner.step((batch[0], batch[1]))
            assert runner.last_trace is not None
            return runner.last_trace

        yield step


def _beside_kernels_s(rounds: Sequence[tuple[Trace, ...]], costs: Profile) -> float:
    """What one device takes for a computing op beside its kernels."""
    spans = [span for (trace,) in rounds for span in _spans(trace)]
    of_layers = [costs.cost(layer, _TINY.samples) for layer in range(*_WHOLE)]
    kernels_s = sum(cost.recompute_s + cost.backward_s for cost in of_layers)
    return max(0.0, (_typical_s(spans, OpKind.FORWARD) + _typical_s(spans, OpKind.BACKWARD) - kernels_s) / 2)


def _typical_s(spans: Sequence[tuple[OpKind, float, float]], kind: OpKind) -> float:
    return statistics.median(seconds for other, seconds, _ in spans if other is kind)


def _typical_transfer_s(traces: Sequence[Trace]) -> float:
    """On average, for they add up: where all cores compute, many wait long for one.  Without the longest tenth."""
    moves = (OpKind.SWAP_IN, OpKind.SWAP_OUT)
    seconds = sorted(seconds for trace in traces for kind, seconds, _ in _spans(trace) if kind in moves)
    return statistics.fmean(seconds[: -(len(seconds) // 10)])


def _slower_ops(
    rounds: Sequence[tuple[Trace, ...]], costs: Profile, emulation: Emulation, of_several: Emulation
) -> float:
    """How many times as much ops take beside their kernels where several devices compute."""
    factors = []
    for alone, together in rounds:
        speed = _agreeing(alone, costs, partial(_with_slower_kernels, emulation))
        as_fast = of_several._replace(kernels_slowed=speed)
        factors.append(_agreeing(together, costs, partial(_with_slower_ops, as_fast)))
    return max(1.0, statistics.median(factors))


def _slower_kernels(
    rounds: Sequence[tuple[Trace, ...]], costs: Profile, emulation: Emulation, of_several: Emulation
) -> float:
    """How many times as long kernels take where several devices compute."""
    factors = [
        _agreeing(together, costs, partial(_with_slower_kernels, of_several))
        / _agreeing(alone, costs, partial(_with_slower_kernels, emulation))
        for alone, together in rounds
    ]
    return max(1.0, statistics.median(factors))


def _with_slower_ops(emulation: Emulation, factor: float) -> Emulation:
    return emulation._replace(compute_s=factor * emulation.compute_s)


def _with_slower_kernels(emulation: Emulation, factor: float) -> Emulation:
    return emulation._replace(kernels_slowed=factor)


def _agreeing(trace: Trace, costs: Profile, slower: Callable[[float], Emulation]) -> float:
    """The factor with which the simulator says of the trace's program what was measured."""
    low, high = 1 / _MOST_SLOWED, _MOST_SLOWED
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        simulated_s = makespan_s(trace.program, replace(costs, emulation=slower(middle)), trace.machine)
        low, high = (middle, high) if simulated_s < trace.makespan_s else (low, middle)
    return math.sqrt(low * high)


def _program(layers: LayerSequence, num_devices: int, num_samples: int) -> Program:
    """Every device runs its microbatches one after the other, each from its inputs to its loss, once the device before
    has ended the one before, as where devices hand each other their results; nothing is updated."""
    layouts = Layouts(layers)
    flat = {kind: layouts.of(kind, _WHOLE).num_bytes for kind in (TensorKind.WEIGHT, TensorKind.GRADIENT)}
    blocks: list[Block] = []
    ops: list[Op] = []

    def block(kind: TensorKind, device: int, layer: tuple[int, int], samples: tuple[int, int], num_bytes: int) -> int:
        blocks.append(Block(kind, device, layer, samples, num_bytes))
        return len(blocks) - 1

    def op(kind: OpKind, device: int, stream: Stream, samples: tuple[int, int], **lists: tuple[int, ...]) -> int:
        ops.append(Op(kind, device, stream, _WHOLE, samples, **lists))
        return len(ops) - 1

    states: list[tuple[int, int]] = []
    computed: list[list[int]] = []
    for device in range(num_devices):
        weight = block(TensorKind.WEIGHT, device, _WHOLE, _NO_SAMPLES, flat[TensorKind.WEIGHT])
        gradient = block(TensorKind.GRADIENT, device, _WHOLE, _NO_SAMPLES, flat[TensorKind.GRADIENT])
        came = op(OpKind.SWAP_IN, device, Stream.SWAP_IN, _NO_SAMPLES, writes=(weight,))
        states.append((weight, gradient))
        computed.append([came, came])
    num_bytes = sum(spec.num_bytes(num_samples) for spec in layers.batch)
    for number in range(_MICROBATCHES):
        before = [ops_of[-1] for ops_of in computed]
        for device, (weight, gradient) in enumerate(states):
            first = (device * _MICROBATCHES + number) * num_samples
            sample = (first, first + num_samples)
            inputs = block(TensorKind.INPUT, device, _WHOLE, sample, num_bytes)
            loss = block(TensorKind.ACTIVATION, device, (2, 2), sample, 4)
            saved = block(TensorKind.SAVED, device, _WHOLE, sample, 2**23)
            there = block(TensorKind.ACTIVATION, -1, (2, 2), sample, 4)
            room = (computed[device][-2],)  # for two at a time
            came = op(OpKind.SWAP_IN, device, Stream.SWAP_IN, sample, writes=(inputs,), after=room)
            forward = op(
                OpKind.FORWARD,
                device,
                Stream.COMPUTE,
                sample,
                reads=(weight, inputs),
                writes=(loss, saved),
                after=tuple(sorted({before[device - 1], came})),
            )
            out = {"reads": (loss,), "writes": (there,), "frees": (loss,), "after": (forward,)}
            op(OpKind.SWAP_OUT, device, Stream.SWAP_OUT, sample, **out)
            sums = {"reads": (weight, inputs, saved), "writes": (gradient,)}
            if number:
                sums = {"reads": (weight, gradient, inputs, saved)}
            computed[device].append(op(OpKind.BACKWARD, device, Stream.COMPUTE, sample, frees=(inputs, saved), **sums))
    return Program(
        minibatch_size=num_devices * _MICROBATCHES * num_samples,
        num_layers=2,
        budgets=(_BUDGET,) * num_devices,
        blocks=tuple(blocks),
        ops=tuple(ops),
    )


def _spans(trace: Trace) -> Iterator[tuple[OpKind, float, float]]:
    """Of microbatches: the kind of each op, its seconds, and those from when it could start to when it did."""
    for number, op, start_s, end_s in trace.spans():
        if op.samples != _NO_SAMPLES:
            queue = trace.program.queues[op.device, op.stream]
            position = queue.index(number)
            before = (*op.after, *(queue[position - 1 : position] if position else ()))
            yield op.kind, end_s - start_s, start_s - max((float(trace.end_s[other]) for other in before), default=0.0)


def _copy_s() -> float:
    """To copy ``_COPIED_BYTES`` with one thread."""
    source, to = torch.zeros(2, _COPIED_BYTES, dtype=torch.uint8)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(_COPIES):
            start_s = time.perf_counter()
            to.copy_(source)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds)
    finally:
        torch.set_num_threads(num_threads)
