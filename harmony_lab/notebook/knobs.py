"""Knobs: a plan as the few values that a user turns, and back; no widgets."""

import re
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.plan import Mode, Plan
from harmony_lab.precision import Precision
from harmony_lab.preview import repacked

__all__ = ["Knobs", "Updates", "cuts_text", "devices_text", "microbatch_choices", "parse_cuts", "parse_devices"]

_MOST_CHOICES = 24


class Updates(StrEnum):
    """When packs are updated; the last two suit clipping by the global norm."""

    EACH = "at once"
    END = "at the end"
    NEXT = "in the next step"

    @classmethod
    def of(cls, plan: Plan) -> "Updates":
        return cls.EACH if plan.just_in_time_update else cls.NEXT if plan.overlapped_update else cls.END


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What can be turned with one control each; where packs are cut is edited apart (``parse_cuts``)."""

    mode: Mode
    minibatch_size: int
    forward_microbatch_size: int
    backward_microbatch_size: int
    num_forward_packs: int
    num_backward_packs: int
    devices: tuple[int, ...]
    prefetch: int
    peer_transfers: bool
    updates: Updates
    precision: Precision
    mirrored: bool
    num_stashed: int
    num_resident_packs: int
    num_kept_packs: int
    num_device_updates: int

    @classmethod
    def of(cls, plan: Plan) -> "Knobs":
        return cls(
            mode=plan.mode,
            minibatch_size=plan.minibatch_size,
            forward_microbatch_size=plan.forward_microbatch_size,
            backward_microbatch_size=plan.backward_microbatch_size,
            num_forward_packs=len(plan.forward_packs),
            num_backward_packs=len(plan.backward_packs),
            devices=plan.devices,
            prefetch=plan.prefetch,
            peer_transfers=plan.peer_transfers,
            updates=Updates.of(plan),
            precision=plan.precision,
            mirrored=plan.mirrored,
            num_stashed=len(plan.device_stash),
            num_resident_packs=len(plan.resident_packs),
            num_kept_packs=len(plan.kept_packs),
            num_device_updates=len(plan.device_updates),
        )

    def turn(self, **changes: Any) -> "Knobs":
        """Microbatches follow a minibatch that becomes smaller than they are."""
        turned = replace(self, **changes)
        if "minibatch_size" not in changes:
            return turned
        most = turned.minibatch_size
        return replace(
            turned,
            forward_microbatch_size=min(turned.forward_microbatch_size, most),
            backward_microbatch_size=min(turned.backward_microbatch_size, most),
        )

    def apply(self, base: Plan, profile: Profile) -> Plan:
        """``base`` with these knobs.  Its packs stay unless their number changes; then they are balanced in time.

        Raises ``PlanError`` where the result breaks invariants.
        """
        before, others = Knobs.of(base), asdict(self)
        counts = {name: others.pop(name) for name in list(others) if name.startswith("num_")}
        turned = {name: count for name, count in counts.items() if count != getattr(before, name)}
        updates = others.pop("updates")
        others |= {
            "just_in_time_update": updates is Updates.EACH,
            "overlapped_update": updates is Updates.NEXT,
        }
        return repacked(base, profile, **turned, **others)


def microbatch_choices(profile: Profile, minibatch_size: int, *also: int) -> tuple[int, ...]:
    """Microbatch sizes worth offering: all that the profile covers; of many, those measured, powers of two and divisors
    of the minibatch.  ``also`` are among them in any case.
    """
    smallest = profile.microbatch_sizes[0]
    largest = min(profile.largest_microbatch, minibatch_size)
    sizes = set(range(smallest, largest + 1))
    if len(sizes) > _MOST_CHOICES:
        sizes = {
            size
            for size in sizes
            if size in profile.microbatch_sizes or minibatch_size % size == 0 or size & (size - 1) == 0
        }
    return tuple(sorted(sizes | set(also)))


_NUMBERS = re.compile(r"\s*\d+(?:[\s,]+\d+)*\s*")
_EVERY = re.compile(r"\s*every\s+(\d+)\s*", re.IGNORECASE)


def cuts_text(cuts: tuple[int, ...]) -> str:
    """``"2, 4, 6"``; ``parse_cuts`` reads it back."""
    return ", ".join(map(str, cuts))


def parse_cuts(text: str, stop: int) -> tuple[int, ...]:
    """The layers before which packs are cut, from ``"2, 4, 6"``, ``"every 2"`` or nothing.

    Raises ``PlanError`` for another text.
    """
    every = _EVERY.fullmatch(text)
    if every and int(every[1]):
        return tuple(range(int(every[1]), stop, int(every[1])))
    return _numbers(text, "layers to cut before, like '2, 4, 6' or 'every 2'") if text.strip() else ()


def devices_text(devices: tuple[int, ...]) -> str:
    return ", ".join(map(str, devices))


def parse_devices(text: str) -> tuple[int, ...]:
    """The order of devices from ``"1, 0"``.  Raises ``PlanError`` for another text."""
    return _numbers(text, "device numbers in their order, like '0, 1'")


def _numbers(text: str, expected: str) -> tuple[int, ...]:
    if not _NUMBERS.fullmatch(text):
        raise PlanError("this cannot be read", [f"{expected}, were expected, got {text!r}"])
    return tuple(map(int, re.findall(r"\d+", text)))
