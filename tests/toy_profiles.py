"""Small made-up profiles, machines and random plans that the planner's and simulator's tests share."""

import random
from itertools import pairwise

from harmony_lab.costs import Cost, LayerCost, Profile, SharedParameter
from harmony_lab.layers import TensorSpec
from harmony_lab.machine import Backend, Device, Host, Link, Machine
from harmony_lab.plan import Mode, Pack, Plan

SIZES = (1, 2, 4, 8)


def profile(
    num_layers: int = 8,
    *,
    weight_bytes: int = 1_000_000,
    activation_bytes: int = 10_000,
    layer_s: float = 0.01,
    update_s: float = 0.005,
    tied: bool = False,
    buffers: bool = False,
    frozen: int = 0,
    overhead_s: float = 0.0,
) -> Profile:
    """Equal layers; ``tied``: the first and last share a parameter; ``frozen``: so many first layers train nothing."""
    costs = tuple(
        Cost(
            forward_s=overhead_s + layer_s * u,
            recompute_s=overhead_s + layer_s * 1.1 * u,
            backward_s=overhead_s + layer_s * 2 * u,
            forward_peak_bytes=activation_bytes * 2 * u,
            saved_bytes=activation_bytes * 6 * u,
            recompute_peak_bytes=activation_bytes * 7 * u,
            backward_peak_bytes=activation_bytes * 9 * u,
        )
        for u in SIZES
    )
    layers = tuple(
        LayerCost(
            name=f"layer{i}",
            kind=0,
            parameter_bytes=weight_bytes,
            gradient_bytes=0 if i < frozen else weight_bytes,
            buffer_bytes=640 if buffers else 0,
            updated_buffer_bytes=640 if buffers else 0,
            optimizer_state_bytes=0 if i < frozen else 2 * weight_bytes,
            update_s=0.0 if i < frozen else update_s,
            batch_inputs=("x",) if i in (0, num_layers - 1) else (),
            costs=costs,
        )
        for i in range(num_layers)
    )
    shared = (SharedParameter(name="tied", num_bytes=64_000, gradient_bytes=64_000, layers=(0, num_layers - 1)),)
    inner = [
        (_value(f"v{i}", activation_bytes // 4, batch_dim=0, requires_grad=i >= frozen),) for i in range(num_layers - 1)
    ]
    return Profile(
        model="toy",
        fingerprint="toy",
        device="made up",
        microbatch_sizes=SIZES,
        layers=layers,
        boundaries=((), *inner, (_value("loss", None, batch_dim=None, requires_grad=True),)),
        batch=(_value("x", 10, batch_dim=0),),
        shared=shared if tied else (),
    )


def _value(name: str, length: int | None, *, batch_dim: int | None, requires_grad: bool = False) -> TensorSpec:
    shape = () if length is None else (length,)
    return TensorSpec(
        name=name, shape=shape, dtype="float32", item_bytes=4, batch_dim=batch_dim, requires_grad=requires_grad
    )


def gpus(num_devices: int, *, memory_bytes: int = 8_000_000, link: float = 1e9, peer_link: float = 2e9) -> Machine:
    """Devices that compute for themselves behind one switch; ``link`` is the uplink they share."""
    devices = tuple(
        Device(name=f"gpu{i}", memory_bytes=memory_bytes, parent="switch", backend=Backend.CUDA, ordinal=i)
        for i in range(num_devices)
    )
    links = (
        Link(child="switch", parent="host", bytes_per_s=link),
        *(Link(child=device.name, parent="switch", bytes_per_s=peer_link) for device in devices),
    )
    return Machine(name="gpus", devices=devices, host=Host(memory_bytes=2**36, num_cores=8), links=links)


def random_packs(rng: random.Random, start: int, stop: int) -> tuple[Pack, ...]:
    edges = sorted({start, stop, *(edge for edge in range(start + 1, stop) if rng.random() < 0.5)})
    return tuple(Pack(a, b) for a, b in pairwise(edges))


def random_plan(
    rng: random.Random, num_layers: int, max_devices: int = 3, max_size: int = 8, *, equal_sizes: bool = False
) -> Plan:
    """Any valid plan: packs, microbatch sizes that need not divide the minibatch, device order and switches."""
    minibatch = rng.randint(3, 13)
    devices = rng.sample(range(max_devices), rng.randint(1, max_devices))
    backward = random_packs(rng, 0, num_layers)
    backward_size = rng.randint(1, min(minibatch, max_size))
    same = equal_sizes or rng.random() < 0.5
    plan = Plan(
        mode=rng.choice(list(Mode)),
        minibatch_size=minibatch,
        forward_microbatch_size=backward_size if same else rng.randint(1, min(minibatch, max_size)),
        forward_packs=random_packs(rng, 0, backward[-1].start) if backward[-1].start else (),
        backward_microbatch_size=backward_size,
        backward_packs=backward,
        devices=tuple(devices),
        prefetch=rng.choice((0, 1, 1, 2)),
        peer_transfers=rng.random() < 0.7,
        just_in_time_update=rng.random() < 0.8,
    )
    return staying(rng, plan) if rng.random() < 0.5 else plan


def staying(rng: random.Random, plan: Plan) -> Plan:
    """The plan with the same packs forward and backward, some of which stay on their device in between."""
    plan = plan.with_(
        forward_packs=plan.backward_packs[:-1],
        forward_microbatch_size=plan.backward_microbatch_size,
        mirrored=plan.mode is Mode.PP and rng.random() < 0.7,
    )
    home = [p for p in plan.forward_packs if plan.forward_devices(p.start) == plan.backward_devices(p)]
    resident = [pack for pack in home if rng.random() < 0.6]
    last = plan.fused_pack
    together = bool(last.start) and plan.forward_devices(last.start - 1) == plan.backward_devices(last)
    boundaries = [pack.start for pack in home if pack.start] + [last.start] * together
    return plan.with_(
        resident_packs=resident,
        kept_packs=[pack for pack in resident if rng.random() < 0.5],
        device_stash=[boundary for boundary in boundaries if rng.random() < 0.5],
    )
