"""Lower bounds on an iteration: of one plan, cheap enough to order candidates by, and of the whole problem."""

from harmony_lab.machine import HOST, Backend, Direction, Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.compose import compose
from harmony_lab.planner.pack import PackCosts

__all__ = ["candidate_bound", "problem_bound"]


def candidate_bound(plan: Plan, costs: PackCosts, machine: Machine) -> float:
    """No simulation of that plan ends earlier: each device's computing, each link's weights and gradients, the
    updates."""
    computing = dict.fromkeys(plan.devices, 0.0)
    swapped_in = dict.fromkeys(plan.devices, 0)
    for task in compose(plan, costs.profile):
        start, stop = task.pack
        swapped_in[task.device] += costs.weight_bytes(start, stop)
        for first, last in task.samples:
            size = last - first
            if task.backward:
                computing[task.device] += costs.recompute_s(start, stop, size) + costs.backward_s(start, stop, size)
            else:
                computing[task.device] += costs.forward_s(start, stop, size)
    per_reduction = plan.num_devices if plan.mode is Mode.DP and not plan.peer_transfers else 1
    gradients = per_reduction * costs.gradient_bytes(0, plan.num_layers)
    return max(
        max(computing.values()),
        _cores_bound(sum(computing.values()), machine),
        _down_bound(swapped_in, machine),
        gradients / _rate_up(machine),
        _update_seconds(costs),
    )


def problem_bound(costs: PackCosts, machine: Machine, minibatch_size: int) -> float:
    """No plan that swaps every pack in, recomputes and updates on the host is faster.

    Per layer the best time per sample over all measured sizes, spread evenly over the devices; every weight in once;
    every gradient out once.
    """
    profile = costs.profile
    total = 0.0
    for index, layer in enumerate(profile.layers):
        if index >= profile.first_trainable_layer:
            per_sample = [
                (cost.recompute_s + cost.backward_s) / size
                for size, cost in zip(profile.microbatch_sizes, layer.costs, strict=True)
            ]
        else:
            per_sample = [
                min(cost.forward_s, cost.recompute_s) / size
                for size, cost in zip(profile.microbatch_sizes, layer.costs, strict=True)
            ]
        total += min(per_sample) * minibatch_size
    count = len(profile)
    return max(
        total / machine.num_devices,
        _cores_bound(total, machine),
        costs.weight_bytes(0, count) / _rate_down(machine),
        costs.gradient_bytes(0, count) / _rate_up(machine),
        _update_seconds(costs),
    )


def _update_seconds(costs: PackCosts) -> float:
    return sum(layer.update_s for layer in costs.profile.layers)


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
    roots = {
        (machine.route(HOST, device) if direction is Direction.DOWN else machine.route(device, HOST)[::-1])[0]
        for device in range(machine.num_devices)
    }
    return sum(machine.capacities[hop] for hop in roots)
