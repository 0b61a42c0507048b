"""Random models, machines and plans on them: what property tests draw from."""

import random
from dataclasses import replace
from typing import NamedTuple

import toy_profiles as toys

from harmony_lab.costs import Cost, LayerCost, Profile, SharedParameter
from harmony_lab.emulation import Emulation
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.layers import TensorSpec
from harmony_lab.machine import Backend, Bridge, Device, Host, Link, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.lower import lower
from harmony_lab.program import Program

NUM_DEVICES = 3
PLENTY = 2**40


class Setting(NamedTuple):
    """A program and what it was made from."""

    plan: Plan
    profile: Profile
    machine: Machine
    program: Program


def setting(seed: int, **machine: object) -> Setting:
    """Any plan for any model on any machine; half of the time with hardly enough memory."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(3, 9))
    plan = toys.random_plan(rng, len(profile), NUM_DEVICES)
    on = random_machine(rng, **machine)
    share = rng.choice((0.0, 0.0, 0.5, 1.0))
    plan = plan.with_(device_updates=[pack for pack in updatable(plan, profile, on) if rng.random() < share])
    program = lower(plan, profile, on)
    if rng.random() < 0.5:
        needed = peak_bytes(program)
        for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            tight = with_memory(on, tuple(max(1, int(share * num_bytes)) for num_bytes in needed))
            try:
                return Setting(plan, profile, tight, lower(plan, profile, tight))
            except PlanDoesNotFitError:
                continue
    return Setting(plan, profile, on, program)


def with_memory(machine: Machine, budgets: tuple[int, ...]) -> Machine:
    devices = zip(machine.devices, budgets, strict=True)
    return replace(machine, devices=tuple(replace(device, memory_bytes=budget) for device, budget in devices))


def random_profile(rng: random.Random, num_layers: int) -> Profile:
    """Layers of a few kinds, some without weights, buffers or gradients; values that pass by; shared parameters."""
    kinds = [_costs(rng) for _ in range(rng.randint(1, 3))]
    frozen = rng.choice((0, 0, 0, 1, num_layers - 1))
    trains = [layer >= frozen and rng.random() < 0.85 for layer in range(num_layers - 1)] + [True]
    has_buffers = rng.random() < 0.4
    layers = []
    for index in range(num_layers):
        kind = rng.randrange(len(kinds))
        weights = 64 * rng.randint(100, 5000) if trains[index] else rng.choice((0, 64 * 300))
        buffers = 64 * rng.randint(0, 20) if has_buffers else 0
        layers.append(
            LayerCost(
                name=f"layer{index}",
                kind=kind,
                parameter_bytes=weights,
                gradient_bytes=weights if trains[index] else 0,
                buffer_bytes=buffers,
                updated_buffer_bytes=rng.choice((0, buffers)),
                optimizer_state_bytes=2 * weights if trains[index] else 0,
                update_s=rng.uniform(0.001, 0.02) if trains[index] else 0.0,
                batch_inputs=tuple(name for name in ("x", "y") if rng.random() < 0.4),
                costs=kinds[kind],
            )
        )
    first = trains.index(True)
    shared = []
    trainable = [layer for layer in range(num_layers) if trains[layer]]
    if len(trainable) > 1 and rng.random() < 0.4:
        readers = tuple(sorted(rng.sample(trainable, rng.randint(2, min(3, len(trainable))))))
        shared.append(SharedParameter(name="shared", num_bytes=6400, gradient_bytes=6400, layers=readers))
    inner = [_values(rng, boundary, boundary > first) for boundary in range(1, num_layers)]
    return Profile(
        model="random",
        fingerprint="random",
        device="made up",
        microbatch_sizes=toys.SIZES,
        layers=tuple(layers),
        boundaries=((), *inner, (_value("loss", (), None, True),)),
        batch=(_value("x", (rng.randint(1, 50),), 0), _value("y", (3,), 0)),
        shared=tuple(shared),
    )


def _costs(rng: random.Random) -> tuple[Cost, ...]:
    forward_s, backward_s, overhead_s = rng.uniform(0.001, 0.01), rng.uniform(0.002, 0.02), rng.uniform(0, 0.005)
    saved, workspace = rng.randint(0, 40_000), rng.randint(0, 40_000)
    return tuple(
        Cost(
            forward_s=overhead_s + forward_s * size,
            recompute_s=overhead_s + forward_s * 1.1 * size,
            backward_s=overhead_s + backward_s * size,
            forward_peak_bytes=workspace * size,
            saved_bytes=saved * size,
            recompute_peak_bytes=(saved + workspace) * size,
            backward_peak_bytes=(saved + 2 * workspace) * size,
        )
        for size in toys.SIZES
    )


def random_emulation(rng: random.Random) -> Emulation | None:
    """None, or about as much as the work itself, of each part."""
    if rng.random() < 0.3:
        return None
    return Emulation(
        compute_s=rng.choice((0.0, rng.uniform(0, 0.02))),
        transfer_s=rng.choice((0.0, rng.uniform(0, 0.01))),
        waking_s=rng.choice((0.0, rng.uniform(0, 0.01))),
        copied_bytes_per_s=10 ** rng.uniform(5, 9),
        kernels_slowed=rng.uniform(1, 3),
    )


def _values(rng: random.Random, boundary: int, requires_grad: bool) -> tuple[TensorSpec, ...]:
    main = _value(f"hidden{boundary}", (rng.randint(1, 5000),), 0, requires_grad)
    return (main, _value("mask", (rng.randint(1, 300),), 0)) if rng.random() < 0.3 else (main,)


def _value(name: str, shape: tuple[int, ...], batch_dim: int | None, requires_grad: bool = False) -> TensorSpec:
    return TensorSpec(
        name=name, shape=shape, dtype="float32", item_bytes=4, batch_dim=batch_dim, requires_grad=requires_grad
    )


def random_machine(
    rng: random.Random, *, backend: Backend | None = None, switches: int | None = None, peers: bool | None = None
) -> Machine:
    """Three devices with memory for anything, hung from the host or from switches, which hang from each other or not;
    some with a bridge between two, or a host whose memory is a limit.

    ``switches`` 0: every device has its own link to the host, and nothing else is shared.  ``peers`` False: no bridges.
    """
    backend = backend or rng.choice(list(Backend))
    nodes = ["host"] + [f"switch{i}" for i in range(rng.randint(0, 2) if switches is None else switches)]
    links = [_link(rng, name, rng.choice(nodes[:i])) for i, name in enumerate(nodes) if i > 0]
    devices = []
    for ordinal in range(NUM_DEVICES):
        name, parent = f"device{ordinal}", rng.choice(nodes)
        links.append(_link(rng, name, parent))
        devices.append(
            Device(
                name=name,
                memory_bytes=PLENTY,
                parent=parent,
                backend=backend,
                ordinal=ordinal,
                compute_threads=rng.randint(1, 3),
                release_s=rng.choice((0.0, 0.0, 0.003)),
            )
        )
    made = Machine(
        name="random",
        devices=tuple(devices),
        host=Host(memory_bytes=PLENTY, num_cores=rng.randint(2, 8), update_threads=rng.randint(1, 4)),
        links=tuple(links),
        peer_transfers=rng.random() < 0.8 if peers is None else peers,
        fabric_bytes_per_s=rng.choice((None, None, 2e7)),
    )
    if switches is None and rng.random() < 0.4:
        made = replace(made, host=replace(made.host, memory_bytes_per_s=10 ** rng.uniform(5, 8)))
    if peers is None and rng.random() < 0.5:
        first, second = (device.name for device in rng.sample(devices, 2))
        made = replace(
            made,
            bridges=(Bridge(first=first, second=second, bytes_per_s=10 ** rng.uniform(6, 8)),),
            peer_transfers=rng.random() < 0.5,
        )
    return made


def _link(rng: random.Random, child: str, parent: str) -> Link:
    return Link(child=child, parent=parent, bytes_per_s=10 ** rng.uniform(5, 8), latency_s=rng.choice((0.0, 0.0, 1e-4)))
