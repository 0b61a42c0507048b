"""rates: what each device's transfers get of the links when all devices transfer at once."""

from collections.abc import Sequence

import numpy as np

from harmony_lab.compiled import Floats
from harmony_lab.machine import HOST, Hop, Machine

__all__ = ["host_rates", "peer_rates", "ring"]


def ring(count: int) -> list[tuple[int, int]]:
    """Who sends to each device, as packs go round."""
    return [((device - 1) % count, device) for device in range(count)]


def host_rates(machine: Machine) -> tuple[float, float]:
    """What each device gets from and to the host when all go on at once.

    Of the host's memory two thirds are taken to be read: weights travel twice where gradients travel once.
    """
    devices = range(machine.num_devices)
    down = _rates(machine, [(HOST, device) for device in devices]).min()
    up = _rates(machine, [(device, HOST) for device in devices]).min()
    if machine.host.memory_bytes_per_s is not None:
        memory = machine.host.memory_bytes_per_s / machine.num_devices
        down = min(down, max(memory * 2 / 3, memory - up))
        up = min(up, max(memory / 3, memory - down))
    return float(down), float(up)


def peer_rates(machine: Machine, down: float, up: float) -> Floats:
    """What each device gets from the one before when all go on at once; through the host, where it does not reach it,
    one way after the other."""
    pairs = ring(machine.num_devices)
    direct = [pair for pair in pairs if machine.reaches(*pair)]
    rates = np.full(len(pairs), 1 / (1 / down + 1 / up))
    if machine.num_devices > 1:
        rates[[device for _, device in direct]] = _rates(machine, direct)
    return rates


def _rates(machine: Machine, ends: Sequence[tuple[int, int]]) -> Floats:
    """What each of these transfers gets when all go on at once, by equal shares of every link."""
    users: dict[Hop, int] = {}
    routes = [machine.route(*pair) for pair in ends]
    for route in routes:
        for hop in route:
            users[hop] = users.get(hop, 0) + 1
    return np.array([min(machine.capacities[hop] / users[hop] for hop in route) for route in routes])
