"""profile: run each kind of layer alone on a device, at several microbatch sizes, and record what it costs."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from harmony_lab.costs import Cost, Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence, require_layers
from harmony_lab.machine import Backend, Machine
from harmony_lab.precision import Precision
from harmony_lab.profiler.bench import Bench, Seconds, Weight
from harmony_lab.profiler.cache import CostCache, Key, Numbers, layer_key, update_key
from harmony_lab.profiler.compiling import compiled_in
from harmony_lab.profiler.costing import Room, Sizes, assemble, costs_by_size, kinds_of
from harmony_lab.profiler.emulation import emulation_of
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.precision import in_precision
from harmony_lab.profiler.steps import ProgressCallback, Steps
from harmony_lab.profiler.updates import TimedSteps, UpdateCost, UpdateCosts, Updated, spread_of
from harmony_lab.runtime.failures import clear_frames
from harmony_lab.runtime.optimizer import PackOptimizer

__all__ = ["profile"]

_TRIALS_OF_KERNELS = 15  # of microseconds to a millisecond


def profile(
    layers: LayerSequence,
    machine: Machine | str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    precision: Precision | str | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    minibatch_size: int | None = None,
    trials: int = 3,
    cache: bool = True,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure every kind of layer on the machine's first device, and its update on the host.

    One layer is on the device at a time, with random inputs of the right shape (what comes from the batch is the
    example batch's), so a model larger than the device is profiled in place.  Parameters, gradients, buffers, the
    optimizer and the random state stay as they are, and nothing is left on the device, also after an error or an
    interrupt.

    ``precision``: what layers compute in, by default as the layers are (see ``in_precision``).
    Of emulated devices it is also measured, once per process, what running them takes beside the layers
    (``Profile.emulation``).

    ``microbatch_sizes``: what to measure; the profile interpolates between them.  By default 1, 2, 4, ... up to
    ``minibatch_size`` (the example batch's) or to the largest that fits into the device, six at most.
    ``trials``: seconds are the median of that many runs, after one to warm up.
    ``cache``: take over what was measured before for the same layers, device, threads and versions, and keep what is
    measured now (``Profile.cached`` tells when all was there).
    ``progress(done, total, what)`` is called along the way; what it raises ends the profiling.

    Raises ``PlanDoesNotFitError`` for a layer that does not fit even with the smallest microbatch, ``HarmonyError``
    for an optimizer that cannot be measured or a device that is not here, and whatever a layer raises.
    """
    require_layers(layers, "profile")
    machine = Machine.of(machine)
    if optimizer is not None:
        PackOptimizer(optimizer, layers)  # refuses by name what cannot train a model pack by pack
    if trials < 1:
        raise HarmonyError(f"trials must be 1 or more, got {trials}")
    sizes = Sizes.of(microbatch_sizes, layers.example_sizes["batch"] if minibatch_size is None else minibatch_size)
    target = Target.of(machine.devices[0])
    if precision is not None:
        layers = in_precision(layers, precision, machine)
    try:
        return _Measurement(layers, machine, target, optimizer, sizes, trials, cache, progress).profile()
    except BaseException as error:
        clear_frames(error)  # a notebook keeps the last error, and with its frames what is on the device
        raise
    finally:
        target.give_back()


class _Measurement:
    """One profiling under way."""

    def __init__(
        self,
        layers: LayerSequence,
        machine: Machine,
        target: Target,
        optimizer: torch.optim.Optimizer | None,
        sizes: Sizes,
        trials: int,
        cache: bool,
        progress: ProgressCallback | None,
        *,
        emulates: bool = True,
    ) -> None:
        self._emulates = emulates
        self._layers = layers
        self._machine = machine
        self._target = target
        self._optimizer = optimizer
        self._sizes = sizes
        self._trials = trials
        self._cache = CostCache()
        self._caches = cache
        self._kinds = kinds_of(layers)
        self._room = Room.of(machine)
        self._num_kinds = len(set(self._kinds))
        weight = self._num_kinds * sum(sizes.values) + len(layers)
        self._steps = Steps(progress, self._num_kinds * len(sizes.values) + len(layers), weight)
        self._num_measured = 0

    def profile(self) -> Profile:
        layers, host = self._layers, self._machine.host
        with self._target.keeping_random_state():
            with _threads(self._target.num_threads):
                costs = costs_by_size(layers, self._kinds, self._sizes, self._room, self._cost)
            self._steps.only(len(layers), len(layers))
            with _threads(host.update_threads):
                updates = self._updates()
        self._steps.end()
        return assemble(
            layers,
            self._target.description,
            self._kinds,
            costs,
            updates,
            host.update_threads,
            emulation=emulation_of(self._machine, _costs_of, anew=not self._caches) if self._emulates else None,
            cached=self._num_measured == 0,
        )

    # -- layers ---------------------------------------------------------------------------------------------------

    def _cost(self, index: int, size: int) -> Cost:
        """Raises ``PlanDoesNotFitError`` where the layer alone, with what it reads, fits into none of the devices."""
        layer, number = self._layers.layers[index], self._kinds[index] + 1
        self._steps.begin(f"{layer.name} (kind {number} of {self._num_kinds}), microbatch of {size}", size)
        key = self._key(index, size)
        known = self._cache.get(key, len(Cost._fields))
        bench = None
        if known is None:
            bench, weight = self._weigh(index, size)
            seconds, spread = None, None
            key = self._key(index, size)  # another one where it turned out that a layer cannot be compiled
            self._keep(key, weight)
        else:
            seconds, weight, spread = _read(known)
        self._room.check(self._layers, index, size, weight)
        if seconds is None:
            bench = bench or self._weigh(index, size)[0]
            seconds, spread = self._time(bench)
            self._keep(key, weight, seconds, spread)
        return Cost(*seconds, *weight, spread=spread)

    def _key(self, index: int, size: int) -> Key | None:
        return layer_key(self._layers, index, self._target, size, self._trials) if self._caches else None

    def _weigh(self, index: int, size: int) -> tuple[Bench, Weight]:
        self._num_measured += 1
        bench = Bench.prepare(self._layers, index, self._target, size)
        if compiled_in(self._layers.layers[index].function) is not None:
            bench.time()  # so that it is compiled, or has turned out not to be, before anything is counted
        return bench, bench.weigh()

    def _time(self, bench: Bench) -> tuple[Seconds, float | None]:
        """The median of each phase; the spread is that of whole runs."""
        runs = [bench.time() for _ in range(self._trials)]
        return Seconds(*map(statistics.median, zip(*runs, strict=True))), spread_of([sum(run) for run in runs])

    def _keep(
        self, key: Key | None, weight: Weight, seconds: Seconds | None = None, spread: float | None = None
    ) -> None:
        """In the order of ``Cost``; seconds of a size that did not fit are missing."""
        self._cache.put(key, [*(seconds or (None, None, None)), *weight, spread])

    # -- updates --------------------------------------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return any(device.backend is not Backend.EMULATED for device in self._machine.devices)

    def _updates(self) -> list[UpdateCost]:
        clock = TimedSteps(self._layers, self._trials)
        costs = UpdateCosts(self._layers, self._optimizer, clock, on_gpu=self._on_gpu)
        updates = []
        for index, layer in enumerate(self._layers.layers):
            self._steps.begin(f"update of {layer.name} (layer {index + 1} of {len(self._layers)})", 1)
            updates.append(self._update(costs, index))
        return updates

    def _update(self, costs: UpdateCosts, index: int) -> UpdateCost:
        updated = costs.updated_by(index)
        if not updated:
            return costs.of(updated)
        key = self._update_key(costs, updated) if self._caches else None
        known = self._cache.get(key, len(UpdateCost._fields))
        if known is not None and known[0] is not None and known[1] is not None:
            return UpdateCost(int(known[0]), known[1], known[2], None if known[3] is None else int(known[3]))
        self._num_measured += 1
        update = costs.of(updated)
        self._cache.put(key, update)
        return update

    def _update_key(self, costs: UpdateCosts, updated: Sequence[Updated]) -> Key | None:
        return update_key(
            self._optimizer,
            [(costs.hyperparameters(group), spec) for group, spec in updated],
            self._machine.host.update_threads,
            self._on_gpu,
            self._trials,
            self._layers.trainable_bytes,
        )


def _costs_of(layers: LayerSequence, machine: Machine, num_samples: int) -> Profile:
    """What layers take by themselves, for ``emulation_of``."""
    sizes, target = Sizes.of((num_samples,), num_samples), Target.of(machine.devices[0])
    return _Measurement(layers, machine, target, None, sizes, _TRIALS_OF_KERNELS, False, None, emulates=False).profile()


def _read(known: Numbers) -> tuple[Seconds | None, Weight, float | None]:
    """What was kept of a layer."""
    seconds = [number for number in known[:3] if number is not None]
    weight = Weight(*(int(number or 0) for number in known[3:7]))
    return Seconds(*seconds) if len(seconds) == 3 else None, weight, known[7]


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Compute with that many of the host's threads, then with as many as before."""
    before = torch.get_num_threads()
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        yield
    finally:
        torch.set_num_threads(before)
