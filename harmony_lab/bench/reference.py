"""The published reference: the machine its cost model describes, and the plans its scheduler found, as a file of rows.

Its cost model: every device has a fixed share of the host's link, in each direction; devices reach each other without
touching it; after each pack a device needs time to give its memory back; nothing is fetched ahead.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Backend, Device, Host, Link, Machine
from harmony_lab.plan import Mode, Plan

__all__ = ["ReferenceRow", "load_reference", "reference_machine"]

HOST_LINK_BYTES_PER_S = 11.5 * 2**30
PEER_BYTES_PER_S = 8.2 * 2**30
RELEASE_S = 0.04
_HOST_CORES = 64
_HOST_MEMORY_BYTES = 2**41  # enough for every model: the reference does not look at it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """One setting and the best plan that the reference found for it.

    ``search_s``: what its search took, ``estimated_step_s``: what its cost model makes of the plan.
    """

    model: str
    device_memory_bytes: int
    plan: Plan
    search_s: float
    estimated_step_s: float

    @property
    def machine(self) -> Machine:
        return reference_machine(self.plan.num_devices, self.device_memory_bytes)


def reference_machine(num_devices: int, memory_bytes: int) -> Machine:
    """The machine of the reference's cost model, with so many devices of so much memory."""
    devices = tuple(
        Device(
            name=f"gpu{i}",
            memory_bytes=memory_bytes,
            backend=Backend.CUDA,
            ordinal=i,
            model="GeForce GTX 1080 Ti",
            release_s=RELEASE_S,
        )
        for i in range(num_devices)
    )
    share = HOST_LINK_BYTES_PER_S / num_devices
    return Machine(
        name=f"{num_devices} × 1080 Ti, the reference's cost model",
        devices=devices,
        host=Host(memory_bytes=_HOST_MEMORY_BYTES, num_cores=_HOST_CORES),
        links=tuple(Link(child=device.name, parent="host", bytes_per_s=share) for device in devices),
        fabric_bytes_per_s=PEER_BYTES_PER_S,
    )


def load_reference(path: str | Path) -> tuple[ReferenceRow, ...]:
    """The rows of a file of reference plans.  Raises ``HarmonyError`` where it is none."""
    if not Path(path).is_file():
        raise HarmonyError(
            f"there is no {path}: a folder is expected with the profiles that Harmony's authors published, as "
            "MODEL.json, and what their scheduler plans for them, as reference_plans.json"
        )
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        return tuple(_row(row) for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        raise HarmonyError(
            f"{path} is no file of reference plans: a JSON object with a list of rows was expected ({error!r})"
        ) from None


def _row(row: Mapping[str, Any]) -> ReferenceRow:
    plan = Plan(
        mode=Mode(row["mode"]),
        minibatch_size=row["minibatch_size"],
        forward_microbatch_size=row["forward_microbatch_size"],
        forward_packs=tuple(row["forward_packs"]),
        backward_microbatch_size=row["backward_microbatch_size"],
        backward_packs=tuple(row["backward_packs"]),
        devices=tuple(range(row["num_devices"])),
        prefetch=0,
    )
    return ReferenceRow(
        model=row["model"],
        device_memory_bytes=row["device_memory_cap_bytes"],
        plan=plan,
        search_s=row["search_time_s"],
        estimated_step_s=row["estimated_iteration_s"],
    )
