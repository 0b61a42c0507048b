"""forecast: what training under a plan takes of the devices' and the host's memory, before it begins."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from harmony_lab.costs import Profile
from harmony_lab.errors import HostMemoryError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Backend, Machine
from harmony_lab.places import place, waiting_bytes
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.limits import state_on_devices
from harmony_lab.program import OP_CODES, TENSOR_CODES, OpKind, Program, TensorKind
from harmony_lab.units import format_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Forecast", "forecast", "measured_state_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Bytes that training takes at most.

    ``device_peak_bytes``, ``device_budget_bytes``: per device; peaks are bounds for any timing.  On the host:
    ``weight_bytes`` of parameters and of the copies that devices get in another type, ``optimizer_state_bytes``,
    ``gradient_bytes`` of the memory that gradients come to lie in and ``stash_bytes`` of what only activations do,
    allocated once and held (``places``), ``accumulated_bytes`` of gradients that wait for other minibatches beside,
    ``update_bytes`` of the optimizer's temporaries, ``emulated_bytes`` of what emulated devices are made of.
    ``pinned_bytes`` of all that are page-locked.  ``present_bytes`` are taken by the model and its optimizer now;
    ``available_bytes`` can be had beside them.

    Not counted is what the C library keeps of freed memory for later: with emulated devices, whose memory is the
    host's, glibc may keep tens of MiB for each of a device's threads, unless the environment has
    MALLOC_MMAP_THRESHOLD_=1000000 when Python starts.
    """

    device_peak_bytes: tuple[int, ...]
    device_budget_bytes: tuple[int, ...]
    weight_bytes: int
    optimizer_state_bytes: int
    gradient_bytes: int
    stash_bytes: int
    accumulated_bytes: int
    update_bytes: int
    emulated_bytes: int
    pinned_bytes: int
    present_bytes: int
    available_bytes: int

    @property
    def host_bytes(self) -> int:
        """Of the host's memory, in all."""
        return sum(num_bytes for _, num_bytes in self._parts())

    @property
    def pageable_bytes(self) -> int:
        return self.host_bytes - self.pinned_bytes

    @property
    def needed_bytes(self) -> int:
        """Of the host's memory, beside what is present."""
        return max(0, self.host_bytes - self.present_bytes)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes

    def require(self) -> None:
        """Raises ``HostMemoryError`` unless the host has what is needed."""
        if not self.fits:
            parts = ", ".join(f"{format_bytes(num_bytes)} of {name}" for name, num_bytes in self._parts() if num_bytes)
            raise HostMemoryError(
                f"training under this plan takes {format_bytes(self.host_bytes)} of the host's memory ({parts}), "
                f"{format_bytes(self.needed_bytes)} more than the model and its optimizer take now, but "
                f"{format_bytes(self.available_bytes)} are available. Free memory, use smaller minibatches or an "
                "optimizer with less state (Adafactor, SGD), or a host with more memory",
                needed_bytes=self.needed_bytes,
                available_bytes=self.available_bytes,
            )

    def _parts(self) -> Iterable[tuple[str, int]]:
        return (
            ("weights", self.weight_bytes),
            ("optimizer state", self.optimizer_state_bytes),
            ("gradients", self.gradient_bytes),
            ("activations kept for backward", self.stash_bytes),
            ("gradients that are added up", self.accumulated_bytes),
            ("temporaries of updates", self.update_bytes),
            ("emulated devices", self.emulated_bytes),
        )

    # -- on screen ----------------------------------------------------------------------------------------------------

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            (f"device {number}", f"{format_bytes(peak)} of {format_bytes(budget)}")
            for number, (peak, budget) in enumerate(zip(self.device_peak_bytes, self.device_budget_bytes, strict=True))
        ]
        rows += [(f"host, {name}", format_bytes(num_bytes)) for name, num_bytes in self._parts() if num_bytes]
        rows.append(
            (
                "host, in all",
                f"{format_bytes(self.host_bytes)}: {format_bytes(self.pinned_bytes)} pinned, "
                f"{format_bytes(self.pageable_bytes)} pageable",
            )
        )
        rows.append(
            (
                "host, beside what is there now",
                f"{format_bytes(self.needed_bytes)} of {format_bytes(self.available_bytes)} available",
            )
        )
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self._rows())
        return f"<table>{rows}</table>"


def forecast(
    program: Program,
    layers: LayerSequence,
    optimizer: "Optimizer",
    profile: Profile,
    machine: Machine,
    *,
    adding: Program | None = None,
) -> Forecast:
    """What training takes whose iterations are that program of the layers.  ``adding``: that of minibatches whose
    gradients are added to those that it updates with or leaves."""
    from harmony_lab.runtime.host_memory import available_bytes

    programs = [program] if adding is None else [program, adding]
    places = [place(one, layers) for one in programs]  # in the same memory, but for what is left
    left = places[0].left_bytes
    waiting = (waiting_bytes(one, placed) for one, placed in zip(programs, places, strict=True))
    gradients, stash = max(((g - p.left_bytes, s) for (g, s), p in zip(waiting, places, strict=True)), key=sum)
    held = _state_bytes(layers, optimizer)
    state = max(held, profile.optimizer_state_bytes or measured_state_bytes(layers, optimizer))
    on_host = max(0, state - state_on_devices(program))
    pinned = [device.backend is not Backend.EMULATED for device in machine.devices]
    emulated = [max(p.device_bytes(number) for p in places) for number, real in enumerate(pinned) if not real]
    moving = profile.weight_bytes(0, len(layers))
    return Forecast(
        device_peak_bytes=tuple(map(max, zip(*map(peak_bytes, programs), strict=True))),
        device_budget_bytes=machine.budgets,
        weight_bytes=profile.host_weight_bytes,
        optimizer_state_bytes=on_host,
        gradient_bytes=gradients + left,
        stash_bytes=stash,
        accumulated_bytes=0 if adding is None or left else layers.trainable_bytes,
        update_bytes=_update_bytes(program, layers, optimizer),
        emulated_bytes=sum(emulated),
        pinned_bytes=moving + gradients + left + stash if any(pinned) else 0,
        present_bytes=layers.parameter_bytes + held,
        available_bytes=min(available_bytes(), machine.host.memory_bytes),
    )


def _state_bytes(layers: LayerSequence, optimizer: "Optimizer") -> int:
    """Optimizer state of the model's parameters that there is by now."""
    states = (optimizer.state.get(layers.tensors[name], {}) for name in layers.state)
    return sum(getattr(value, "nbytes", 0) for state in states for value in state.values())


def measured_state_bytes(layers: LayerSequence, optimizer: "Optimizer") -> int:
    """Of the optimizer's state, asked on stand-ins: for a profile that was made without an optimizer."""
    from harmony_lab.profiler.updates import TimedSteps, UpdateCosts

    costs = UpdateCosts(layers, optimizer, TimedSteps(layers, 1))
    return sum(costs.of(costs.updated_by(index)).state_bytes for index in range(len(layers)))


def _update_bytes(program: Program, layers: LayerSequence, optimizer: "Optimizer") -> int:
    """Temporaries of steps on the host that are not fused: two at a time, as large as a parameter, with ``foreach`` as
    a pack."""
    ops, blocks = program.op_columns, program.block_columns
    on_host = (ops.kind == OP_CODES[OpKind.UPDATE]) & (ops.device == HOST)
    if not on_host.any() or all(group.get("fused") for group in optimizer.param_groups):
        return 0
    if any(group.get("foreach") for group in optimizer.param_groups):
        gradients = (blocks.kind == TENSOR_CODES[TensorKind.GRADIENT]) & (blocks.device == HOST)
        sizes = blocks.num_bytes[gradients].tolist()
    else:
        sizes = [spec.num_bytes for spec in layers.state.values() if spec.trainable]
    return 2 * max(sizes, default=0)
