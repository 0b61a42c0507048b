"""emulation: what running ops on emulated devices takes of this host, beside their kernels and the links.

The one place that says so: the simulator, the planner's forecasts and its lower bounds all ask here.
"""

from typing import Any, NamedTuple

import numpy as np

from harmony_lab.machine import Backend, Machine

__all__ = ["NOTHING", "Emulation", "computing_s", "computing_threads", "emulation_on", "moving_s"]


class Emulation(NamedTuple):
    """What emulated devices take beside the work itself, as the host runs them.

    ``compute_s``, ``transfer_s``: of a core, for each computing op and each transfer.  ``waking_s``: until an op that
    waited for another stream starts.  ``copied_bytes_per_s``: how fast one core copies.  ``kernels_slowed``: how many
    times as long kernels take where several devices compute, though each has a core.  ``alone_s``: for each computing
    op where nothing else runs, as in virtual time, which has none of the others.
    """

    compute_s: float
    transfer_s: float
    waking_s: float
    copied_bytes_per_s: float
    kernels_slowed: float = 1.0
    alone_s: float = 0.0


NOTHING = Emulation(compute_s=0.0, transfer_s=0.0, waking_s=0.0, copied_bytes_per_s=np.inf)
"""What real devices take."""


def emulation_on(machine: Machine, emulation: Emulation | None) -> Emulation:
    """What every op on that machine takes: nothing where any device is a real one."""
    if emulation is None or any(device.backend is not Backend.EMULATED for device in machine.devices):
        return NOTHING
    return NOTHING._replace(compute_s=emulation.alone_s) if machine.virtual_time else emulation


def computing_threads(machine: Machine) -> int:
    """Of the host's cores, each device computes on so many at least, where all are emulated and share them; else 0."""
    if machine.virtual_time or any(device.backend is not Backend.EMULATED for device in machine.devices):
        return 0
    return min(device.compute_threads for device in machine.devices)


def computing_s(taken: Emulation, kernels_s: Any, num_ops: Any = 1) -> Any:
    """Of their cores, numbers or arrays: computing ops, updates too, whose kernels take so long together."""
    return taken.kernels_slowed * kernels_s + num_ops * taken.compute_s


def moving_s(taken: Emulation, num_bytes: Any, num_ops: Any = 1) -> Any:
    """Of a core, numbers or arrays: transfers that carry so many bytes together."""
    return num_ops * taken.transfer_s + num_bytes / taken.copied_bytes_per_s
