"""Lower bounds on an iteration: of one plan, cheap enough to order candidates by, and of the whole problem."""

from collections.abc import Collection, Iterator

import numpy as np

from harmony_lab.compiled import Floats, Ints, compiled
from harmony_lab.emulation import NOTHING, Emulation, computing_s, computing_threads, emulation_on, moving_s
from harmony_lab.machine import HOST, HOST_MEMORY, Direction, Machine
from harmony_lab.plan import Mode, Pack, Plan, microbatches
from harmony_lab.planner.compose import stages
from harmony_lab.planner.pack import PackCosts

__all__ = ["candidate_bound", "problem_bound"]


def candidate_bound(plan: Plan, costs: PackCosts, machine: Machine) -> float:
    """No simulation of that plan ends earlier: each device's computing, the host's cores, each link's weights and
    gradients, both in the host's memory, the updates."""
    taken = emulation_on(machine, costs.profile.emulation)
    kernels_s, num_ops = dict.fromkeys(plan.devices, 0.0), dict.fromkeys(plan.devices, 0)
    swapped_in, num_moves = dict.fromkeys(plan.devices, 0), 0
    for stage in stages(plan, costs.profile):
        for device, share in zip(stage.devices, stage.shares, strict=True):
            if not (stage.backward and stage.pack in plan.resident_packs):
                swapped_in[device] += costs.weight_bytes(*stage.pack)
                num_moves += 1 if costs.weight_bytes(*stage.pack) else 0
            for first, last in microbatches(*share, stage.microbatch_size):
                kernels_s[device] += stage.seconds(costs, last - first)
                num_ops[device] += stage.num_ops
    per_reduction = plan.num_devices if plan.mode is Mode.DP and not plan.peer_transfers else 1
    on_devices = plan.device_updates
    swapped_out = per_reduction * (
        costs.gradient_bytes(0, plan.num_layers) - sum(costs.gradient_bytes(*pack) for pack in on_devices)
    ) + sum(costs.weight_bytes(*pack) for pack in on_devices if costs.gradient_bytes(*pack))
    swapped_bytes = sum(swapped_in.values()) + swapped_out
    computing: dict[int, float] = {
        device: computing_s(taken, kernels_s[device], num_ops[device]) for device in plan.devices
    }
    return max(
        max(computing[device] + num_ops[device] * taken.waking_s for device in plan.devices),
        _cores_bound(sum(computing.values()), moving_s(taken, swapped_bytes, num_moves), costs, machine, taken),
        _down_bound(swapped_in, machine),
        swapped_out / _rate_up(machine),
        swapped_bytes / machine.capacities.get(HOST_MEMORY, np.inf),
        _update_seconds(costs, taken, on_devices),
    )


def problem_bound(
    costs: PackCosts,
    machine: Machine,
    minibatch_size: int,
    *,
    modes: Collection[Mode] = tuple(Mode),
    overlapping: bool = True,
    peers_only: bool = True,
    device_updates: bool = True,
    keeps: bool = True,
) -> float:
    """No plan of these modes on all devices is faster.

    The least computing (``_least_computing``), spread evenly over the devices; every weight in once; every gradient out
    once, or the weights that a device has updated, which are no less; what of these is done in turn.
    ``overlapping`` False: plans with ``prefetch=0`` whose packs all come and go, see ``_serial_bound``; ``peers_only``:
    with peer transfers where the machine has them; ``device_updates``: devices may update what of the optimizer's state
    they have room for, else the host updates all; ``keeps``: packs may keep what backward needs, where there is room.
    """
    profile = costs.profile
    taken = emulation_on(machine, profile.emulation)
    in_pp = Mode.PP in modes or machine.num_devices == 1
    share = minibatch_size if in_pp else -(-minibatch_size // machine.num_devices)
    count = len(profile)
    weight_bytes, gradient_bytes = costs.weight_bytes(0, count), costs.gradient_bytes(0, count)
    computing_at_least, on_cores_at_least = np.inf, np.inf
    for kernels_s, num_ops in _least_computing(costs, machine, minibatch_size, share, keeps=keeps, taken=taken):
        computing = computing_s(taken, kernels_s, num_ops)
        computing_at_least = min(computing_at_least, computing + num_ops * taken.waking_s)
        on_cores_at_least = min(on_cores_at_least, computing)
    moving = moving_s(taken, weight_bytes + gradient_bytes, 2)
    bound = max(
        computing_at_least / machine.num_devices,
        _cores_bound(on_cores_at_least, moving, costs, machine, taken),
        weight_bytes / _rate_down(machine),
        gradient_bytes / _rate_up(machine),
        (weight_bytes + gradient_bytes) / machine.capacities.get(HOST_MEMORY, np.inf),
        _least_host_update_s(costs, machine, taken) if device_updates else _update_seconds(costs, taken),
        _in_turn_bound(costs, machine, minibatch_size, share, taken),
    )
    if not overlapping and modes and not profile.first_trainable_layer:
        serial = [_serial_bound(costs, machine, minibatch_size, mode, peers_only, taken) for mode in modes]
        bound = max(bound, min(serial))
    return bound


def _least_computing(
    costs: PackCosts, machine: Machine, minibatch_size: int, share: int, *, keeps: bool, taken: Emulation
) -> Iterator[tuple[float, int]]:
    """For each size that backward's microbatches may have, kernels' seconds and ops at least: forward of every layer,
    and forward again with backward.  ``share``: of a device, the largest microbatch.

    Forward is not run twice in the last pack, at most the largest that fits with the microbatches of backward, and in
    layers that keep what backward needs, at most as many as all devices have memory for.  Each layer in its best time
    per sample of sizes up to that.
    """
    profile = costs.profile
    bottom, count = profile.first_trainable_layer, len(profile)
    once = np.full(count, np.inf)
    for size in (*profile.microbatch_sizes, *profile.forward_only_sizes):  # between these, times are linear
        once = np.minimum(once, costs.layer_seconds(size, forward=True) / size)
    kept = np.array([_kept_bytes(costs, layer, minibatch_size) for layer in range(count)])
    memory = sum(machine.budgets) if keeps else 0
    backward = np.full(count, np.inf)
    for size in range(profile.microbatch_sizes[0], min(profile.largest_microbatch, share) + 1):
        backward = np.minimum(backward, costs.layer_seconds(size, forward=False) / size)
        reach = costs.reach(size, max(machine.budgets), forward=False)
        if (np.maximum.accumulate(reach)[bottom:] <= np.arange(bottom, count)).any():  # a layer in no pack that fits
            continue
        to_the_end = reach >= count
        fused = max(bottom, int(np.argmax(to_the_end)) if to_the_end.any() else count - 1)
        seconds = once[:fused].sum() + backward[bottom:].sum()
        seconds -= _most_saved(once[bottom:fused], kept[bottom:fused], memory)
        num_ops = 0 if taken is NOTHING else _least_ops(reach, bottom, -(-minibatch_size // size))
        yield float(seconds * minibatch_size), num_ops


def _least_ops(reach: Ints, bottom: int, num_microbatches: int) -> int:
    """A forward and a backward of every microbatch in the fewest packs that hold the layers from ``bottom`` on."""
    fewest = _fewest(reach)
    return 2 * num_microbatches * (int(fewest[-1] - fewest[bottom]) if np.isfinite(fewest[-1]) else 1)


def _kept_bytes(costs: PackCosts, layer: int, minibatch_size: int) -> float:
    """At least what a layer takes that keeps what backward needs of the whole minibatch: that, but for its input, and
    its weights."""
    cost = costs.profile.layers[layer]
    per_sample = min(
        max(0, sized.saved_bytes - costs.boundary_bytes(layer, size)) / size
        for size, sized in zip(costs.profile.microbatch_sizes, cost.costs, strict=True)
    )
    return cost.parameter_bytes + per_sample * minibatch_size


def _most_saved(seconds: Floats, num_bytes: Floats, memory: float) -> float:
    """The most of these seconds that so much memory saves, the last layer in part."""
    saved = 0.0
    for index in np.argsort(num_bytes / np.maximum(seconds, 1e-30)):
        share = 1.0 if num_bytes[index] <= memory else memory / num_bytes[index]
        saved += share * float(seconds[index])
        memory -= share * num_bytes[index]
        if memory <= 0.0:
            break
    return saved


def _in_turn_bound(costs: PackCosts, machine: Machine, minibatch_size: int, share: int, taken: Emulation) -> float:
    """A backward begins, and so a gradient leaves, when all weights have come in, for a loss takes all of them; and a
    pack's gradients are complete when its devices have been through all microbatches of theirs.  ``share``: of a
    device, the largest microbatch."""
    profile = costs.profile
    most = min(profile.largest_microbatch, share)
    forward, backward = np.full((2, len(profile)), np.inf)
    for size in {*(size for size in profile.microbatch_sizes if size < most), most}:  # between these, times are linear
        sized = costs.backward_costs(size)
        forward = np.minimum(forward, np.diff(sized.recompute_s) / size)
        backward = np.minimum(backward, np.diff(sized.backward_s) / size)
    for size in (*profile.microbatch_sizes, *profile.forward_only_sizes):
        forward = np.minimum(forward, costs.layer_seconds(size, forward=True) / size)
    at_once = max(1 / machine.num_devices, computing_threads(machine) / machine.host.num_cores)
    at_once *= minibatch_size * taken.kernels_slowed
    forward_s = at_once * float(forward.sum())
    backward_s = at_once * float(backward[profile.first_trainable_layer :].sum())
    down_s = costs.weight_bytes(0, len(profile)) / _rate_down(machine)
    up_s = costs.gradient_bytes(0, len(profile)) / _rate_up(machine)
    return max(down_s + backward_s, max(down_s, forward_s) + up_s)


def _serial_bound(
    costs: PackCosts, machine: Machine, minibatch_size: int, mode: Mode, peers_only: bool, taken: Emulation
) -> float:
    """Where nothing is fetched ahead, a device fetches, computes and gives back in turn.

    For each largest microbatch size: the least computing, for each of the fewest packs that fit the release of its
    memory, weights twice (once in the last pack), what each microbatch brings in; in DP each pack's reduction and the
    way of its gradients to the host too.
    """
    devices, count = machine.num_devices, len(costs.profile)
    is_dp = mode is Mode.DP or devices == 1  # where both are the same
    samples = -(-minibatch_size // devices) if is_dp else minibatch_size
    down = max(_alone(machine, HOST, device) for device in range(devices))
    up = max(_alone(machine, device, HOST) for device in range(devices))
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    peer = max((_alone(machine, *pair) for pair in pairs), default=np.inf)
    reduces = peers_only and machine.all_reach
    if not reduces:
        peer = max(peer, down)
    release_s = min(device.release_s for device in machine.devices)
    budget = max(machine.budgets)
    value = min([costs.boundary_bytes(b, 1) for b in range(1, count)], default=0) * samples
    from_host = is_dp or devices == 1

    forward: list[
        tuple[Floats, Floats]
    ] = []  # by largest size: least seconds of layers, and what packs up to each cost
    best = np.full(count, np.inf)
    for size in range(costs.profile.microbatch_sizes[0], min(costs.profile.largest_forward_microbatch, samples) + 1):
        best = np.minimum(best, taken.kernels_slowed * costs.layer_seconds(size, forward=True) / size * samples)
        arriving = value / down if from_host else value * max(0.0, 1 - size / samples) / peer
        packs = _fewest(costs.reach(size, budget, forward=True))
        forward.append((best, packs * (release_s + arriving)))
    found = np.inf
    best = np.full(count, np.inf)
    for size in range(costs.profile.microbatch_sizes[0], min(costs.profile.largest_microbatch, samples) + 1):
        best = np.minimum(best, taken.kernels_slowed * costs.layer_seconds(size, forward=False) / size * samples)
        reach = costs.reach(size, budget, forward=False)
        fused = int(np.argmax(reach >= count)) if (reach >= count).any() else count - 1
        least = float(_fewest(reach)[count])
        seconds = float(best.sum()) + least * release_s + max(0.0, least - 2) * value / down  # not the first and last
        seconds += 2 * least * -(-samples // size) * (taken.compute_s + taken.waking_s)
        seconds += (costs.weight_bytes(0, count) + costs.weight_bytes(0, fused)) / down
        if fused:
            seconds += min(float(layers[:fused].sum()) + float(more[fused]) for layers, more in forward)
        found = min(found, seconds)
    if not is_dp:
        return found / devices
    num_bytes = costs.gradient_bytes(0, count)
    if devices > 1 and reduces:
        found += 2 * (devices - 1) / devices * num_bytes / peer
    return found + num_bytes / up


@compiled
def _fewest(reach: Ints) -> Floats:
    """The fewest packs that hold layers [0, stop), by stop."""
    fewest = np.full(len(reach) + 1, np.inf)
    fewest[0] = 0.0
    for start in range(len(reach)):
        for stop in range(start + 1, reach[start] + 1):
            fewest[stop] = min(fewest[stop], fewest[start] + 1)
    return fewest


def _alone(machine: Machine, source: int, destination: int) -> float:
    """Bytes per second of a transfer that shares its links with no other."""
    return min(machine.capacities[hop] for hop in machine.route(source, destination))


def _update_seconds(costs: PackCosts, taken: Emulation, on_devices: Collection[Pack] = ()) -> float:
    """On the host."""
    elsewhere = {layer for pack in on_devices for layer in range(*pack)}
    layers = enumerate(costs.profile.layers)
    return taken.kernels_slowed * sum(layer.update_s for number, layer in layers if number not in elsewhere)


def _least_host_update_s(costs: PackCosts, machine: Machine, taken: Emulation) -> float:
    """Where all devices' memory is full of optimizer state, that of the layers which save the host most per byte."""
    layers, left = costs.profile.layers, sum(machine.budgets)
    seconds = sum(layer.update_s for layer in layers if layer.optimizer_state_bytes)
    for layer in sorted(layers, key=lambda layer: -layer.update_s / max(1, layer.optimizer_state_bytes)):
        if layer.optimizer_state_bytes:
            share = min(1.0, left / layer.optimizer_state_bytes)
            seconds -= share * layer.update_s
            left -= round(share * layer.optimizer_state_bytes)
    return taken.kernels_slowed * max(0.0, seconds)


def _cores_bound(computing: float, moving: float, costs: PackCosts, machine: Machine, taken: Emulation) -> float:
    """Emulated devices compute on the host's cores, transfers between them take some too, and so do the updates,
    wherever they are made."""
    threads = computing_threads(machine)
    on_cores_s = threads * computing + moving
    if threads and all(device.memory_bytes_per_s is None for device in machine.devices):
        on_cores_s += min(threads, machine.host.update_threads) * _update_seconds(costs, taken)
    return on_cores_s / machine.host.num_cores


def _down_bound(swapped_in: dict[int, int], machine: Machine) -> float:
    """The fullest link towards the devices."""
    load: dict[object, int] = {}
    for device, num_bytes in swapped_in.items():
        for hop in machine.route(HOST, device):
            load[hop] = load.get(hop, 0) + num_bytes
    capacities: dict[object, float] = dict(machine.capacities.items())
    return max(num_bytes / capacities[hop] for hop, num_bytes in load.items())


def _rate_down(machine: Machine) -> float:
    """The most that all links from the host carry together."""
    return _root_rate(machine, Direction.DOWN)


def _rate_up(machine: Machine) -> float:
    return _root_rate(machine, Direction.UP)


def _root_rate(machine: Machine, direction: Direction) -> float:
    routes = [
        machine.route(HOST, device) if direction is Direction.DOWN else machine.route(device, HOST)[::-1]
        for device in range(machine.num_devices)
    ]
    roots = {next(hop for hop in route if hop.direction is direction) for route in routes}
    return sum(machine.capacities[hop] for hop in roots)
