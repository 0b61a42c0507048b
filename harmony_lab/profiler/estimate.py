"""estimate: a Profile without running anything: exact bytes and floating-point operations, seconds by a roofline."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from harmony_lab.costs import Cost, Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence, require_layers
from harmony_lab.machine import Machine
from harmony_lab.precision import Precision
from harmony_lab.presets import GPU, find, gpu
from harmony_lab.profiler.bench import Bench, Phase, Seconds, Weight
from harmony_lab.profiler.costing import Room, Sizes, assemble, costs_by_size, kinds_of, parameter_bytes
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.precision import in_precision
from harmony_lab.profiler.roofline import OpCounter, Rates, Work
from harmony_lab.profiler.steps import ProgressCallback, Steps
from harmony_lab.profiler.updates import UpdateCost, UpdateCosts
from harmony_lab.runtime.optimizer import PackOptimizer
from harmony_lab.units import parse_rate

__all__ = ["estimate"]

_EFFICIENCY = 0.7  # what GPT-2 layers, fp32, have been measured to reach on a GTX 1080 Ti
_STAND_IN_BYTES = 2**20
_HOST_BANDWIDTH = "20GB/s"  # updates by Adam have been measured at 17 to 27 GB/s on servers with one GPU each
_MOST_LAUNCH_SHARE = 0.5


def estimate(
    layers: LayerSequence,
    device: Machine | GPU | str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    precision: Precision | str | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    minibatch_size: int | None = None,
    efficiency: float | None = None,
    calibrate: Profile | None = None,
    host_bandwidth: str | float = _HOST_BANDWIDTH,
    progress: ProgressCallback | None = None,
) -> Profile:
    """What ``profile`` would give on a device that is not at hand, without computing anything.

    ``device``: a preset GPU, by name or as a record of ``harmony_lab.presets``, or a machine of them, also by its text
    (``"4x4090"``).  Layers may live on the meta device, so a model needs no memory.

    Bytes are those of the ops that run, on tensors without data, as exact as measured ones but for what kernels of
    attention and of recurrent layers (LSTM) keep for themselves.  Seconds: every op takes the longer of its
    floating-point operations at the GPU's peak rate and its bytes at the memory's, over ``efficiency``, and the GPU's
    ``launch_s``.  ``efficiency``: the share of its peak rates that the GPU reaches, 0.7 if not known.
    ``calibrate``: a profile measured on such a GPU, of one of these layers or more: the efficiency is that with which
    the layers of those names and sizes take as long as measured, at the largest microbatch measured.  For a model too
    large to be measured, build one with two blocks of the same width, and ``profile`` and ``save`` that on the GPU:
    ``estimate(layers, "4090", calibrate=Profile.load("two_blocks.json"))``.

    Updates on the host are bound by its memory: the bytes that the optimizer's ops read and write, at
    ``host_bandwidth``; optimizers that multiply matrices, as Muon does, take longer than that.

    ``precision``, ``microbatch_sizes``, ``minibatch_size``, ``progress`` and the errors raised: as in ``profile``.
    What runs in bf16 does so at the GPU's rate for it; which ops do, and so bytes, follows autocast's lists for the
    CPU: on a GPU norms and softmaxes run in fp32, and save more.
    """
    require_layers(layers, "estimate")
    if optimizer is not None:
        PackOptimizer(optimizer, layers)
    card, room, threads = _resolved(device)
    if precision is not None:
        layers = in_precision(layers, precision)
    sizes = Sizes.of(microbatch_sizes, layers.example_sizes["batch"] if minibatch_size is None else minibatch_size)
    kinds = kinds_of(layers)
    num_kinds = len(set(kinds))
    steps = Steps(progress, num_kinds * len(sizes.values) + 1, num_kinds * len(sizes.values) + 1)
    works = _Works(layers, card)
    share = _share_reached(efficiency, calibrate, works, card)

    def cost_of(index: int, size: int) -> Cost:
        steps.begin(f"{layers.layers[index].name}, microbatch of {size}", 1)
        work = works.of(index, size)
        room.check(layers, index, size, work.weight)
        return Cost(*work.seconds(share, card.launch_s), *work.weight)

    costs = costs_by_size(layers, kinds, sizes, room, cost_of)
    steps.only(1, 1)
    steps.begin("updates", 1)
    updated = _updates(layers, optimizer, parse_rate(host_bandwidth))
    steps.end()
    return assemble(layers, f"{card.name}, estimated at {share:.0%} of its peak rates", kinds, costs, updated, threads)


def _share_reached(efficiency: float | None, calibrate: Profile | None, works: "_Works", card: GPU) -> float:
    """The share of its peak rates that the GPU reaches, as given, as in a profile, or as supposed."""
    if efficiency is not None and calibrate is not None:
        raise HarmonyError("give either an efficiency or a profile to calibrate with, not both")
    if calibrate is not None:
        return _calibrated(works, calibrate, card)
    share = _EFFICIENCY if efficiency is None else efficiency
    if not share > 0:
        raise HarmonyError(f"efficiency is the share of peak rates that is reached, such as 0.7; got {efficiency!r}")
    return share


def _updates(layers: LayerSequence, optimizer: torch.optim.Optimizer | None, bytes_per_s: float) -> list[UpdateCost]:
    """Of each layer, on the host."""
    updates = UpdateCosts(layers, optimizer, _TrafficOfSteps(bytes_per_s), on_gpu=True)
    return [updates.of(updates.updated_by(index)) for index in range(len(layers))]


def _resolved(device: Machine | GPU | str) -> tuple[GPU, Room, int]:
    """(the GPU, what fits, threads that update on the host)."""
    if not isinstance(device, GPU) and not (isinstance(device, str) and find(device)):
        device = Machine.of(device)
    if isinstance(device, Machine):
        models = sorted({item.model for item in device.devices})
        if len(models) != 1 or not models[0]:
            raise HarmonyError(
                f"costs are estimated for GPUs of one known model; {device.name} has {' and '.join(models) or 'none'}: "
                "name a machine to estimate for, such as machine='4x4090' of a Lab or '4090' for estimate"
            )
        return gpu(models[0]), Room.of(device), device.host.update_threads
    card = device if isinstance(device, GPU) else gpu(device)
    return card, Room(0, card.name, card.usable_bytes), 1


# -- layers -------------------------------------------------------------------------------------------------------


class _LayerWork(NamedTuple):
    weight: Weight
    forward: Work
    recompute: Work
    backward: Work

    def seconds(self, share: float, launch_s: float) -> Seconds:
        return Seconds(*(phase.seconds(share, launch_s) for phase in (self.forward, self.recompute, self.backward)))


class _Works:
    """What runs of single layers do, by layer and microbatch size, each found once."""

    def __init__(self, layers: LayerSequence, card: GPU) -> None:
        self.layers = layers
        self._rates = Rates(_peak(card), card.bytes_per_s)
        self._known: dict[tuple[int, int], _LayerWork] = {}

    def of(self, index: int, size: int) -> _LayerWork:
        if (index, size) not in self._known:
            self._known[index, size] = self._count(index, size)
        return self._known[index, size]

    def _count(self, index: int, size: int) -> _LayerWork:
        done: dict[Phase, Work] = {}
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), OpCounter(self._rates) as counter:
                bench = Bench.prepare(self.layers, index, Target.shapes(""), size)
                counter.take()
                weight = bench.weigh(lambda phase: done.__setitem__(phase, counter.take()))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise HarmonyError(
                f"layer {self.layers.layers[index].name} cannot be estimated: what {error.func} returns depends on the "
                "data, or torch cannot tell its shape without running it. Measure with harmony_lab.profile instead"
            ) from error
        return _LayerWork(weight, done[Phase.FORWARD], done[Phase.RECOMPUTE], done[Phase.BACKWARD])


def _peak(card: GPU) -> Callable[[torch.dtype, bool], float]:
    """TF32 where torch's settings allow it: by default in convolutions."""

    def rate(dtype: torch.dtype, convolution: bool) -> float:
        allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32
        return card.flops(str(dtype).removeprefix("torch."), tf32=bool(allowed))

    return rate


def _calibrated(works: _Works, measured: Profile, card: GPU) -> float:
    """The efficiency with which the layers measured take as long as measured."""
    if measured.device.startswith("emulated"):
        raise HarmonyError(
            f"the profile to calibrate with is of an emulated device ({measured.device}), which tells nothing of "
            f"{card.name}: measure one on such a GPU, or give an efficiency"
        )
    layers = works.layers
    known = {
        (layer.name, parameter_bytes(layers, index), sum(spec.num_bytes(1) for spec in layers.boundaries[index])): index
        for index, layer in enumerate(layers.layers)
    }
    keys = [
        (layer.name, layer.parameter_bytes, measured.boundary_bytes(index, 1))
        for index, layer in enumerate(measured.layers)
    ]
    shared = [(known[key], layer) for key, layer in zip(keys, measured.layers, strict=True) if key in known]
    if not shared:
        raise HarmonyError(
            f"none of the {len(measured)} layers of the profile to calibrate with has the name, the parameters and "
            "the inputs of one of these layers: measure a model of the same width, with two blocks or more"
        )
    size = measured.largest_microbatch
    total_s = sum(sum(layer.costs[-1][:3]) for _, layer in shared)
    total = Work(0, 0, 0, 0.0)
    for index, _ in shared:
        work = works.of(index, size)
        total += work.forward + work.recompute + work.backward
    launches_s = total.num_ops * card.launch_s
    if launches_s > _MOST_LAUNCH_SHARE * total_s:
        raise HarmonyError(
            f"the layers to calibrate with are too small to tell the efficiency of {card.name}: with microbatches of "
            f"{size} launching their {total.num_ops} ops takes most of the time; measure larger layers or microbatches"
        )
    return total.best_s / (total_s - launches_s)


# -- updates ------------------------------------------------------------------------------------------------------


class _TrafficOfSteps:
    """Takes as long as the bytes that a step reads and writes take at that rate."""

    largest_stand_in_bytes = _STAND_IN_BYTES

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def __call__(self, step: Callable[[], Any]) -> tuple[float, float | None]:
        with OpCounter(Rates(lambda dtype, convolution: float("inf"), self._bytes_per_s)) as counter:
            step()
        return counter.take().num_bytes / self._bytes_per_s, None
