"""limits: how large a microbatch and a model a machine can take, and what of the host's memory a plan needs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from harmony_lab.costs import Profile
from harmony_lab.machine import Backend, Machine
from harmony_lab.places import place, waiting_at_most, waiting_bytes
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.program import TENSOR_CODES, Program, TensorKind
from harmony_lab.units import format_bytes

__all__ = [
    "HostMemory",
    "Limits",
    "MicrobatchLimit",
    "host_memory",
    "host_problem",
    "limits",
    "state_on_devices",
]


_NEGLIGIBLE = 1e-4  # of the host's memory in use


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of the host's memory that training under a plan takes at most.

    ``optimizer_state_bytes``: of the state that is not on devices (``Plan.device_updates``), which comes back when
    training ends.  ``gradient_bytes`` of the memory that gradients come to lie in, ``stash_bytes`` of what only
    activations and all else that waits on the host do: allocated once and held (``places``).  ``emulated_bytes``: what
    emulated devices are made of.  ``pinned_bytes`` of all that are page-locked.  ``available_bytes``: the machine's.
    Before training begins ``forecast`` tells more: it knows the optimizer, and what is in memory already.
    """

    weight_bytes: int
    optimizer_state_bytes: int
    gradient_bytes: int
    stash_bytes: int
    emulated_bytes: int
    pinned_bytes: int
    available_bytes: int

    @property
    def host_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._parts())

    @property
    def pageable_bytes(self) -> int:
        return self.host_bytes - self.pinned_bytes

    @property
    def fits(self) -> bool:
        return self.host_bytes <= self.available_bytes

    def _parts(self) -> Iterator[tuple[str, int]]:
        yield "weights", self.weight_bytes
        yield "optimizer state", self.optimizer_state_bytes
        yield "gradients", self.gradient_bytes
        yield "activations kept for backward", self.stash_bytes
        yield "emulated devices", self.emulated_bytes

    def __str__(self) -> str:
        told = [(name, num_bytes) for name, num_bytes in self._parts() if num_bytes > _NEGLIGIBLE * self.host_bytes]
        parts = ", ".join(f"{format_bytes(num_bytes)} of {name}" for name, num_bytes in told)
        of = " of" if self.fits else ", more than"
        return (
            f"{format_bytes(self.host_bytes)}{of} the host's {format_bytes(self.available_bytes)} ({parts}); "
            f"{format_bytes(self.pinned_bytes)} of it pinned"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


def host_memory(program: Program, profile: Profile, machine: Machine) -> HostMemory:
    """What training takes whose iterations are that program."""
    places = place(program, profile)
    gradients, stash = waiting_bytes(program, places)
    moving = profile.weight_bytes(0, len(profile))
    is_real = [device.backend is not Backend.EMULATED for device in machine.devices]
    return HostMemory(
        weight_bytes=profile.host_weight_bytes,
        optimizer_state_bytes=profile.optimizer_state_bytes - state_on_devices(program),
        gradient_bytes=gradients,
        stash_bytes=stash,
        emulated_bytes=sum(places.device_bytes(device) for device, real in enumerate(is_real) if not real),
        pinned_bytes=moving + gradients + stash if any(is_real) else 0,
        available_bytes=machine.host.memory_bytes,
    )


def state_on_devices(program: Program) -> int:
    """Bytes of the optimizer's state that stay on devices from one iteration to the next."""
    blocks = program.block_columns
    resident = np.array(program.resident, dtype=np.int64)
    of_state = resident[blocks.kind[resident] == TENSOR_CODES[TensorKind.OPTIMIZER]]
    return int(blocks.num_bytes[of_state].sum())


def host_problem(plan: Plan, profile: Profile, machine: Machine, *, program: Program | None = None) -> str:
    """Why the host's memory does not suffice for training under that plan; empty where it does.

    ``program``: the plan's, where it is at hand.  Looks at what shares memory only where the sum of all that ever waits
    on the host is too much.
    """
    made = lower(plan, profile, machine) if program is None else program
    emulated = [device.memory_bytes for device in machine.devices if device.backend is Backend.EMULATED]
    state = profile.host_weight_bytes + profile.optimizer_state_bytes - state_on_devices(made)
    if state + waiting_at_most(made, profile) + sum(emulated) <= machine.host.memory_bytes:
        return ""
    needed = host_memory(made, profile, machine)
    return "" if needed.fits else f"training takes {needed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLimit:
    """The largest microbatch that fits one layer at a time; 0: none does.

    ``layer`` needs ``needed_bytes`` with microbatches of ``next_size``, too much; None: no larger one was profiled.
    """

    size: int
    next_size: int | None = None
    layer: int | None = None
    layer_name: str = ""
    needed_bytes: int | None = None

    def __str__(self) -> str:
        if self.layer is None or self.needed_bytes is None:
            return f"{self.size}, the largest profiled"
        return (
            f"{self.size or 'none'} ({self.next_size} would take {format_bytes(self.needed_bytes)} in layer "
            f"{self.layer}, {self.layer_name})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine can take at most.

    ``forward``, ``backward``: microbatches; layers are weighed alone.  ``deepest``: how many times as many of the same
    layers could be trained, 0 where a layer does not fit a device; the host has to hold ``model_bytes`` of each.
    ``model_bytes``: weights, gradients, optimizer state and the plan's activations on the host.  ``host``: of the plan;
    None where none was given.
    """

    budget_bytes: int
    host_bytes: int
    forward: MicrobatchLimit
    backward: MicrobatchLimit
    deepest: float
    model_bytes: int
    host: HostMemory | None = None

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.rows())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.rows())
        return f"<table>{rows}</table>"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    def rows(self) -> Iterator[tuple[str, str]]:
        """What is limited, and its limit, as text."""
        yield f"largest forward microbatch in {format_bytes(self.budget_bytes)}", str(self.forward)
        yield f"largest backward microbatch in {format_bytes(self.budget_bytes)}", str(self.backward)
        yield "largest model", self._model()
        if self.host is not None:
            yield "host memory of the plan", str(self.host)

    def _model(self) -> str:
        if not self.backward.size:
            return f"layer {self.backward.layer} ({self.backward.layer_name}) is too large for a device"
        kept = "activations kept there, " if self.host is not None and self.host.stash_bytes else ""
        needs = f"{kept}weights, gradients and optimizer state of this one take {format_bytes(self.model_bytes)}"
        digits = 2 if self.deepest < 1 else 1 if self.deepest < 10 else 0
        times = f"{self.deepest:.{digits}f} times as many of these layers"
        return f"{times}: {needs}, the host has {format_bytes(self.host_bytes)}"


def limits(profile: Profile, machine: Machine | str, plan: Plan | str | None = None) -> Limits:
    """What the machine can take of models like this one; with a ``plan``, its use of the host's memory too."""
    machine = Machine.of(machine)
    costs, budget = PackCosts(profile), min(machine.budgets)
    backward = _largest_microbatch(costs, budget, forward=False)
    host = None if plan is None else host_memory(lower(plan, profile, machine), profile, machine)
    model_bytes = profile.state_bytes + (0 if host is None else host.stash_bytes)
    beside = sum(device.memory_bytes for device in machine.devices if device.backend is Backend.EMULATED)
    free = max(0, machine.host.memory_bytes - beside)
    return Limits(
        budget_bytes=budget,
        host_bytes=free,
        forward=_largest_microbatch(costs, budget, forward=True),
        backward=backward,
        deepest=free / model_bytes if backward.size and model_bytes else 0.0,
        model_bytes=model_bytes,
        host=host,
    )


def _largest_microbatch(costs: PackCosts, budget_bytes: int, *, forward: bool) -> MicrobatchLimit:
    """The last layer never runs forward alone: its forward is fused with its backward."""
    profile = costs.profile
    need = costs.forward_bytes if forward else costs.backward_bytes
    largest = profile.largest_forward_microbatch if forward else profile.largest_microbatch
    size = 0
    for tried in range(profile.microbatch_sizes[0], largest + 1):
        needs = [need(layer, layer + 1, tried) for layer in range(len(profile) - forward)]
        worst = max(needs, default=0)
        if worst > budget_bytes:
            layer = needs.index(worst)
            name = profile.layers[layer].name
            return MicrobatchLimit(size=size, next_size=tried, layer=layer, layer_name=name, needed_bytes=worst)
        size = tried
    return MicrobatchLimit(size=size)
