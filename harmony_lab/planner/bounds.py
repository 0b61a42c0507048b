"""Lower bounds on an iteration: of one plan, cheap enough to order candidates by, and of the whole problem."""

from collections.abc import Collection

import numpy as np

from harmony_lab.compiled import Floats, Ints, compiled
from harmony_lab.machine import HOST, HOST_MEMORY, Backend, Direction, Machine
from harmony_lab.plan import Mode, Pack, Plan, microbatches
from harmony_lab.planner.compose import stages
from harmony_lab.planner.pack import PackCosts

__all__ = ["candidate_bound", "problem_bound"]


def candidate_bound(plan: Plan, costs: PackCosts, machine: Machine) -> float:
    """No simulation of that plan ends earlier: each device's computing, each link's weights and gradients, both in the
    host's memory, the updates."""
    computing = dict.fromkeys(plan.devices, 0.0)
    swapped_in = dict.fromkeys(plan.devices, 0)
    for stage in stages(plan, costs.profile):
        for device, share in zip(stage.devices, stage.shares, strict=True):
            if not (stage.backward and stage.pack in plan.resident_packs):
                swapped_in[device] += costs.weight_bytes(*stage.pack)
            for first, last in microbatches(*share, stage.microbatch_size):
                computing[device] += stage.seconds(costs, last - first)
    per_reduction = plan.num_devices if plan.mode is Mode.DP and not plan.peer_transfers else 1
    on_devices = plan.device_updates
    swapped_out = per_reduction * (
        costs.gradient_bytes(0, plan.num_layers) - sum(costs.gradient_bytes(*pack) for pack in on_devices)
    ) + sum(costs.weight_bytes(*pack) for pack in on_devices if costs.gradient_bytes(*pack))
    return max(
        max(computing.values()),
        _cores_bound(sum(computing.values()), machine),
        _down_bound(swapped_in, machine),
        swapped_out / _rate_up(machine),
        (sum(swapped_in.values()) + swapped_out) / machine.capacities.get(HOST_MEMORY, np.inf),
        _update_seconds(costs, on_devices),
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

    The least computing (``_least_computing_s``), spread evenly over the devices; every weight in once; every gradient
    out once, or the weights that a device has updated, which are no less.
    ``overlapping`` False: plans with ``prefetch=0`` whose packs all come and go, see ``_serial_bound``; ``peers_only``:
    with peer transfers where the machine has them; ``device_updates``: devices may update what of the optimizer's state
    they have room for, else the host updates all; ``keeps``: packs may keep what backward needs, where there is room.
    """
    profile = costs.profile
    in_pp = Mode.PP in modes or machine.num_devices == 1
    share = minibatch_size if in_pp else -(-minibatch_size // machine.num_devices)
    total = _least_computing_s(costs, machine, minibatch_size, share, keeps=keeps)
    count = len(profile)
    bound = max(
        total / machine.num_devices,
        _cores_bound(total, machine),
        costs.weight_bytes(0, count) / _rate_down(machine),
        costs.gradient_bytes(0, count) / _rate_up(machine),
        (costs.weight_bytes(0, count) + costs.gradient_bytes(0, count)) / machine.capacities.get(HOST_MEMORY, np.inf),
        _least_host_update_s(costs, machine) if device_updates else _update_seconds(costs),
    )
    if not overlapping and modes and not profile.first_trainable_layer:
        bound = max(bound, min(_serial_bound(costs, machine, minibatch_size, mode, peers_only) for mode in modes))
    return bound


def _least_computing_s(costs: PackCosts, machine: Machine, minibatch_size: int, share: int, *, keeps: bool) -> float:
    """Forward of every layer, and forward again with backward.  ``share``: of a device, the largest microbatch.

    Forward is not run twice in the last pack, at most the largest that fits with the microbatches of backward, and in
    layers that keep what backward needs, at most as many as all devices have memory for.  The least over the sizes that
    backward's microbatches may have, each layer in its best time per sample of those up to that.
    """
    profile = costs.profile
    bottom, count = profile.first_trainable_layer, len(profile)
    once = np.full(count, np.inf)
    for size in (*profile.microbatch_sizes, *profile.forward_only_sizes):  # between these, times are linear
        once = np.minimum(once, costs.layer_seconds(size, forward=True) / size)
    kept = np.array([_kept_bytes(costs, layer, minibatch_size) for layer in range(count)])
    memory = sum(machine.budgets) if keeps else 0
    found, backward = np.inf, np.full(count, np.inf)
    for size in range(profile.microbatch_sizes[0], min(profile.largest_microbatch, share) + 1):
        backward = np.minimum(backward, costs.layer_seconds(size, forward=False) / size)
        to_the_end = costs.reach(size, max(machine.budgets), forward=False) >= count
        fused = max(bottom, int(np.argmax(to_the_end)) if to_the_end.any() else count - 1)
        seconds = once[:fused].sum() + backward[bottom:].sum()
        found = min(found, seconds - _most_saved(once[bottom:fused], kept[bottom:fused], memory))
    return float(found * minibatch_size)


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


def _serial_bound(costs: PackCosts, machine: Machine, minibatch_size: int, mode: Mode, peers_only: bool) -> float:
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
        best = np.minimum(best, costs.layer_seconds(size, forward=True) / size * samples)
        arriving = value / down if from_host else value * max(0.0, 1 - size / samples) / peer
        packs = _fewest(costs.reach(size, budget, forward=True))
        forward.append((best, packs * (release_s + arriving)))
    found = np.inf
    best = np.full(count, np.inf)
    for size in range(costs.profile.microbatch_sizes[0], min(costs.profile.largest_microbatch, samples) + 1):
        best = np.minimum(best, costs.layer_seconds(size, forward=False) / size * samples)
        reach = costs.reach(size, budget, forward=False)
        fused = int(np.argmax(reach >= count)) if (reach >= count).any() else count - 1
        least = float(_fewest(reach)[count])
        seconds = float(best.sum()) + least * release_s + max(0.0, least - 2) * value / down  # not the first and last
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


def _update_seconds(costs: PackCosts, on_devices: Collection[Pack] = ()) -> float:
    """On the host."""
    elsewhere = {layer for pack in on_devices for layer in range(*pack)}
    return sum(layer.update_s for number, layer in enumerate(costs.profile.layers) if number not in elsewhere)


def _least_host_update_s(costs: PackCosts, machine: Machine) -> float:
    """Where all devices' memory is full of optimizer state, that of the layers which save the host most per byte."""
    layers, left = costs.profile.layers, sum(machine.budgets)
    seconds = sum(layer.update_s for layer in layers if layer.optimizer_state_bytes)
    for layer in sorted(layers, key=lambda layer: -layer.update_s / max(1, layer.optimizer_state_bytes)):
        if layer.optimizer_state_bytes:
            share = min(1.0, left / layer.optimizer_state_bytes)
            seconds -= share * layer.update_s
            left -= round(share * layer.optimizer_state_bytes)
    return max(0.0, seconds)


def _cores_bound(compute_s: float, machine: Machine) -> float:
    """Emulated devices compute on the host's cores, beside the updates."""
    threads = [device.compute_threads for device in machine.devices if device.backend is Backend.EMULATED]
    return compute_s * min(threads) / machine.host.num_cores if threads else 0.0


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
