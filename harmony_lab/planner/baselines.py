"""baselines: what one would have without a plan, as Programs for the same simulator.

``dp, paged``, ``pp gpipe, paged`` and ``pp 1f1b, paged``
    Plain PyTorch on devices whose memory is virtual (``layerwise``): a tensor is fetched when an op needs it, the least
    recently used makes room.  Where a device holds but one layer at a time, weights and their gradients move (4m + 2)
    times their size per device with m microbatches: weights in twice per microbatch and in and out for the update,
    gradients out with every microbatch and in again for the next, or for the update.
``zero-infinity order``
    Weights are streamed for every microbatch, the optimizer is on the host (``streaming``).
``dp, in memory`` and ``pp, in memory``
    Plain PyTorch where all of its training state and activations fit.

Each is given the microbatch size, and the choice between recomputing layers and keeping what they save, that serve it
best, and pipelines are cut where their stages take equal times.

All but ``zero-infinity order`` are iterations in the middle of training: what is on the devices in the end is what the
next one finds there.  ``baselines(..., runnable=True)`` gives iterations that ``Runner`` can run, to compare what is
measured: they begin with empty devices, and in the end all that was changed goes to the host, so that the model and the
optimizer's state are there after every step.  That costs up to a device's memory of traffic once per iteration.
So do several minibatches that make one update: all but the last leave their gradients on the host, where they are added
up, and the last fetches the sums when its backward adds to them.

With clipping, gradients are fetched once for their norm and once for the update, which scales them; plain PyTorch's
``clip_grad_norm_`` would write them once more in between.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Pack
from harmony_lab.planner.asked import check_baselines
from harmony_lab.planner.baseline_programs import (
    Iteration,
    Needs,
    in_memory_program,
    paged_program,
    pipeline_units,
    runnable_program,
    streaming_program,
)
from harmony_lab.planner.baseline_tables import LayerTables
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.pack import PackCosts, partitions
from harmony_lab.program import Program, TensorKind
from harmony_lab.roles import Role
from harmony_lab.simulator.engine import makespan_s, run
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["BASELINES", "Baseline", "baselines"]

BASELINES = ("dp, paged", "pp gpipe, paged", "pp 1f1b, paged", "zero-infinity order", "dp, in memory", "pp, in memory")
_STREAMED = "zero-infinity order"
_SIZES_TRIED = 4  # of those that fit
_SMALLER = 2 / 3  # than the one before
_WORTHWHILE = 0.995  # a smaller one must be this much faster: it moves more


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Baseline:
    """One baseline: its program and what the simulator says of it, or why there is none.

    ``recomputes``: layers are computed again for backward instead of keeping what they save.  ``swap_bytes_by_kind``:
    between devices and host, both ways.  ``peak_bytes``: per device, the most alive at once under any timing.
    ``several``: of a runnable one, the programs of minibatches that make one update with others, by role.
    """

    name: str
    microbatch_size: int | None = None
    recomputes: bool | None = None
    program: Program | None = None
    reason: str = ""
    step_s: float | None = None
    swap_bytes: int | None = None
    swap_bytes_by_kind: Mapping[TensorKind, int] = field(default_factory=dict)
    peer_bytes: int | None = None
    peak_bytes: tuple[int, ...] = ()
    several: Mapping[Role, Program] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.program is not None

    def lower(self, minibatch_size: int) -> Program:
        """For ``Runner``: the program, which is for one minibatch size.  Raises ``HarmonyError`` for others."""
        return self._sized(self.program, minibatch_size)

    @property
    def lower_as(self) -> Mapping[Role, Callable[[int], Program]]:
        """For ``Runner``: the same for ``several``."""
        return {role: partial(self._sized, program) for role, program in self.several.items()}

    def _sized(self, program: Program | None, minibatch_size: int) -> Program:
        if program is None:
            raise HarmonyError(f"{self.name} has no program here: {self.reason}")
        if program.minibatch_size != minibatch_size:
            raise HarmonyError(
                f"this program of {self.name} is for minibatches of {program.minibatch_size}, got one of "
                f"{minibatch_size}: ask for baselines(profile, machine, {minibatch_size}, ...), or leave such batches "
                "out (DataLoader(..., drop_last=True))"
            )
        return program

    def __str__(self) -> str:
        if self.step_s is None or self.swap_bytes is None:
            return f"{self.name}: {self.reason}"
        how = "recomputing layers" if self.recomputes else "keeping what layers save"
        return (
            f"{self.name}: {format_seconds(self.step_s)} an iteration, {format_bytes(self.swap_bytes)} swapped "
            f"(microbatches of {self.microbatch_size}, {how})"
        )

    def __repr__(self) -> str:
        return f"<Baseline {self}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


class _Made(NamedTuple):
    """A program and how long it takes."""

    step_s: float
    size: int
    recomputes: bool
    program: Program


Make = Callable[[int], Program | Needs]
"""The program with microbatches of that size, or what it lacks."""


def baselines(
    profile: Profile,
    machine: Machine | str,
    minibatch_size: int,
    *,
    names: Iterable[str] | str = BASELINES,
    runnable: bool = False,
    clipped: bool = False,
) -> tuple[Baseline, ...]:
    """The baselines for one iteration on that minibatch with all devices of the machine.

    Where one does not fit, or is not possible, its ``reason`` says so.  ``runnable``: with programs for
    ``runtime.runner.Runner``, and what the simulator says of those (see the module's docstring).  ``clipped``: all
    gradients are looked at before the first update, for their norm (the Runner's ``max_grad_norm``).  ``names``: some
    of ``BASELINES``, or one.  Raises ``PlanError`` for others, and for a minibatch of no samples.
    """
    names = check_baselines(minibatch_size, names, BASELINES)
    setting = _Setting(profile, Machine.of(machine), minibatch_size, runnable, clipped)
    return tuple(setting.baseline(name) for name in names)


class _Setting:
    def __init__(self, profile: Profile, machine: Machine, minibatch_size: int, runnable: bool, clipped: bool) -> None:
        self.profile, self.machine, self.minibatch_size = profile, machine, minibatch_size
        self.runnable, self.clipped = runnable, clipped
        self.costs = PackCosts(profile)
        self.tables = LayerTables(profile, self.costs)

    def baseline(self, name: str) -> Baseline:
        is_dp = not name.startswith("pp")
        problem = self._problem(is_dp) or self._not_runnable(name)
        if problem:
            return Baseline(name=name, reason=problem)
        sizes = self._sizes(is_dp=is_dp)
        found = [self._fastest(sizes, recomputes, make) for recomputes, make in self._ways(name)]
        fitting = [made for made in found if isinstance(made, _Made)]
        if fitting:
            return self._judged(name, min(fitting, key=lambda made: made.step_s))
        lacking = min((made for made in found if isinstance(made, Needs)), key=lambda needs: needs.num_bytes)
        return Baseline(name=name, reason=self._reason(name, lacking))

    def _fastest(self, sizes: Sequence[int], recomputes: bool, make: Make) -> _Made | Needs:
        """With the best of some microbatch sizes, given from the largest down; what the smallest lacks if none fits."""
        best: _Made | None = None
        lacking: Needs | None = None
        num_tried = size_before = 0
        for size in sizes:
            if num_tried and size > _SMALLER * size_before:
                continue
            program = make(size)
            if isinstance(program, Needs):
                lacking = program
                continue
            num_tried, size_before = num_tried + 1, size
            step_s = makespan_s(program, self.profile, self.machine)
            if best is None or step_s < _WORTHWHILE * best.step_s:
                best = _Made(step_s, size, recomputes, program)
            if num_tried == _SIZES_TRIED:
                break
        made = best or lacking
        assert made is not None, "no size to try"
        return made

    def _judged(self, name: str, made: _Made) -> Baseline:
        program = made.program
        trace = run(program, self.profile, self.machine)
        by_kind: dict[TensorKind, int] = {}
        for (source, destination, kind), num_bytes in trace.moved_bytes.items():
            if HOST in (source, destination):
                by_kind[kind] = by_kind.get(kind, 0) + num_bytes
        return Baseline(
            name=name,
            microbatch_size=made.size,
            recomputes=made.recomputes,
            program=program,
            step_s=trace.makespan_s,
            swap_bytes=trace.swap_bytes,
            swap_bytes_by_kind=by_kind,
            peer_bytes=trace.peer_bytes,
            peak_bytes=peak_bytes(program),
            several=self._several(name, made) if self.runnable else {},
        )

    def _several(self, name: str, made: _Made) -> dict[Role, Program]:
        """Where the host updates, the program itself: its updates add gradients up until the last minibatch."""
        several = {}
        for role in (Role.ADDING, Role.LAST):
            program: Program | Needs = made.program
            if name != _STREAMED:
                iteration = self._iteration(name, made.size, made.recomputes)
                program = runnable_program(iteration, on_demand=not _in_memory(name), role=role)
            assert isinstance(program, Program), f"{name}: {role} needs more than one minibatch alone"
            several[role] = program
        return several

    # -- ways ---------------------------------------------------------------------------------------------------------

    def _ways(self, name: str) -> list[tuple[bool, Make]]:
        """Whether layers are recomputed, and how to make the program."""
        if name == _STREAMED:
            stream = partial(streaming_program, self.tables, self.machine, self.minibatch_size, clips=self.clipped)
            return [(True, stream)]
        make = in_memory_program if _in_memory(name) else paged_program
        if self.runnable:
            make = partial(runnable_program, on_demand=not _in_memory(name))

        def layerwise(recomputes: bool, size: int) -> Program | Needs:
            return make(self._iteration(name, size, recomputes))

        return [(recomputes, partial(layerwise, recomputes)) for recomputes in (False, True)]

    def _iteration(self, name: str, size: int, recomputes: bool) -> Iteration:
        stages: tuple[Pack, ...] = ()
        units = None
        if name.startswith("pp"):
            stages = self._stages(size)
            units = pipeline_units(self.costs, stages, self.minibatch_size, size, gpipe="gpipe" in name)
        return Iteration(
            tables=self.tables,
            machine=self.machine,
            minibatch_size=self.minibatch_size,
            size=size,
            recomputes=recomputes,
            clips=self.clipped,
            stages=stages,
            units=units,
        )

    def _stages(self, size: int) -> tuple[Pack, ...]:
        count = min(self.machine.num_devices, len(self.profile))
        found = partitions(self.costs, 0, len(self.profile), size, forward=False, budget_bytes=None, counts=(count,))
        return found[count]

    def _sizes(self, *, is_dp: bool) -> list[int]:
        """Measured microbatch sizes and the largest there is use for, from the largest down.

        None that leaves a rest smaller than the smallest measured one; if they all do, any size that does not.
        """
        count = self.machine.num_devices if is_dp else 1
        shares = {self.minibatch_size // count, -(-self.minibatch_size // count)}
        smallest, largest = self.profile.microbatch_sizes[0], min(max(shares), self.profile.largest_microbatch)
        usable = [
            size
            for size in range(largest, smallest - 1, -1)
            if all(min(share, share % size or size) >= smallest for share in shares)
        ]
        return [size for size in usable if size in {*self.profile.microbatch_sizes, largest}] or usable

    # -- what is not possible -----------------------------------------------------------------------------------------

    def _problem(self, is_dp: bool) -> str:
        count = self.machine.num_devices
        if is_dp and self.minibatch_size < count:
            return f"a minibatch of {self.minibatch_size} cannot be dealt to {count} devices"
        if is_dp and count > 1 and self.profile.serial_buffers:
            return f"buffers depend on the order of microbatches: {', '.join(self.profile.serial_buffers[:3])}"
        if self.profile.first_trainable_layer == len(self.profile):
            return "the model has no trainable parameter"
        if not self._sizes(is_dp=is_dp):
            return (
                f"the profile starts at microbatches of {self.profile.microbatch_sizes[0]}; a minibatch of "
                f"{self.minibatch_size} leaves a smaller rest"
            )
        return ""

    def _not_runnable(self, name: str) -> str:
        if self.runnable and name != _STREAMED and self.profile.master_bytes:
            return (
                f"devices update the weights that they have, in this profile those are {self.profile.precision} copies "
                "of masters on the host: to run it profile in fp32, or layers that have the masters on devices, "
                "in_precision(layers, ..., shadows=False)"
            )
        return ""

    def _reason(self, name: str, lacking: Needs) -> str:
        budget = format_bytes(self.machine.budgets[lacking.device])
        if _in_memory(name):
            return (
                f"weights, gradients, optimizer state and activations need {format_bytes(lacking.num_bytes)} on device "
                f"{lacking.device} with microbatches of {lacking.size}, its budget is {budget}"
            )
        layer = lacking.layer
        whose = f"layer {layer} ({self.profile.layers[layer].name}) alone needs" if layer >= 0 else "it needs"
        return (
            f"{whose} {format_bytes(lacking.num_bytes)} or more at once with microbatches of {lacking.size}, the "
            f"budget of device {lacking.device} is {budget}"
        )


def _in_memory(name: str) -> bool:
    return name.endswith("in memory")
