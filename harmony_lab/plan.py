"""Plan: the knobs of a schedule, their invariants, a one-line text form and JSON."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from harmony_lab.errors import PlanError
from harmony_lab.machine import check_schema

__all__ = ["Mode", "Pack", "Plan", "microbatches"]

SCHEMA_VERSION = 1


class Mode(StrEnum):
    DP = "dp"  # every device runs all packs on its share of the minibatch
    PP = "pp"  # packs go round the devices, every device sees the whole minibatch


class Pack(NamedTuple):
    """Consecutive layers [start, stop) that swap in and out together."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one iteration over a minibatch is scheduled.

    ``forward_microbatch_size``, ``forward_packs``, ``backward_microbatch_size`` and ``backward_packs`` are the paper's
    four-tuple (U_F, P_F, U_B, P_B).  Backward packs tile all layers; the last one's forward is fused with its backward,
    so forward packs tile the layers before it.  ``devices`` is the order in which packs visit devices (PP) or shares
    are dealt (DP).

    ``prefetch``: how many packs ahead weights are fetched (0: when their turn has come).  ``peer_transfers``: between
    devices directly, else through the host.  ``just_in_time_update``: update a pack right after its backward, else all
    at the end.

    Raises ``PlanError``, listing every violation.
    """

    mode: Mode
    minibatch_size: int
    forward_microbatch_size: int
    forward_packs: tuple[Pack, ...]
    backward_microbatch_size: int
    backward_packs: tuple[Pack, ...]
    devices: tuple[int, ...]
    prefetch: int = 1
    peer_transfers: bool = True
    just_in_time_update: bool = True
    fingerprint: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", Mode(self.mode))
        for name in ("forward_packs", "backward_packs"):
            object.__setattr__(self, name, tuple(Pack(*pack) for pack in getattr(self, name)))
        object.__setattr__(self, "devices", tuple(self.devices))
        violations = list(self._violations())
        if violations:
            raise PlanError("this plan breaks invariants", violations)

    def _violations(self) -> Iterable[str]:
        if self.minibatch_size < 1:
            yield f"minibatch_size must be at least 1, got {self.minibatch_size}"
        for name in ("forward_microbatch_size", "backward_microbatch_size"):
            size = getattr(self, name)
            if not 1 <= size <= max(1, self.minibatch_size):
                yield f"{name} must lie between 1 and the minibatch size {self.minibatch_size}, got {size}"
        if not self.devices or len(set(self.devices)) != len(self.devices) or min(self.devices) < 0:
            yield f"devices must be different indices from 0 up, at least one, got {self.devices}"
        if self.mode is Mode.DP and len(self.devices) > self.minibatch_size:
            yield f"dp deals {self.minibatch_size} samples to {len(self.devices)} devices: some would have none"
        if self.prefetch < 0:
            yield f"prefetch must be 0 or more packs ahead, got {self.prefetch}"
        if not self.backward_packs:
            yield "backward_packs must hold at least one pack"
            return
        yield from _tiling("backward_packs", self.backward_packs, 0, self.backward_packs[-1].stop)
        fused = self.backward_packs[-1]
        if fused.start == 0 and self.forward_packs:
            yield f"forward_packs must be empty: the one backward pack {fused} runs every layer's forward itself"
        elif fused.start > 0 and not self.forward_packs:
            yield f"forward_packs must tile layers 0:{fused.start}, those before the last backward pack; there are none"
        elif self.forward_packs:
            yield from _tiling("forward_packs", self.forward_packs, 0, fused.start)

    @property
    def num_layers(self) -> int:
        return self.backward_packs[-1].stop

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def fused_pack(self) -> Pack:
        """The last backward pack: its forward and backward run together."""
        return self.backward_packs[-1]

    def share(self, position: int) -> tuple[int, int]:
        """Samples [start, stop) that the device at ``position`` of the device order works on."""
        if self.mode is Mode.PP:
            return 0, self.minibatch_size
        count = len(self.devices)
        return self.minibatch_size * position // count, self.minibatch_size * (position + 1) // count

    def with_(self, **changes: Any) -> "Plan":
        """The same plan with some knobs changed; raises ``PlanError`` where the result breaks invariants."""
        unknown = sorted(set(changes) - {f.name for f in fields(self)})
        if unknown:
            raise PlanError("unknown knobs", [f"{name!r} is no knob of a plan" for name in unknown])
        return replace(self, **changes)

    def for_minibatch(self, minibatch_size: int) -> "Plan":
        """The same schedule for another minibatch size, such as a smaller last batch; microbatches shrink where they
        must."""
        devices = self.devices[: minibatch_size if self.mode is Mode.DP else None]
        return replace(
            self,
            minibatch_size=minibatch_size,
            forward_microbatch_size=min(self.forward_microbatch_size, minibatch_size),
            backward_microbatch_size=min(self.backward_microbatch_size, minibatch_size),
            devices=devices,
        )

    # -- text and JSON --------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """One line; ``Plan.parse`` reads it back."""
        return (
            f"{self.mode} minibatch={self.minibatch_size} "
            f"forward={self.forward_microbatch_size}[{','.join(map(str, self.forward_packs))}] "
            f"backward={self.backward_microbatch_size}[{','.join(map(str, self.backward_packs))}] "
            f"devices={','.join(map(str, self.devices))} prefetch={self.prefetch} "
            f"peer={'on' if self.peer_transfers else 'off'} update={'jit' if self.just_in_time_update else 'end'}"
        )

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read the text form.  Raises ``PlanError`` saying which part is off."""
        mode, *rest = text.split() or [""]
        parts = dict(part.split("=", 1) for part in rest if "=" in part)
        missing = [key for key in ("minibatch", "forward", "backward", "devices") if key not in parts]
        unknown = sorted(set(parts) - {"minibatch", "forward", "backward", "devices", "prefetch", "peer", "update"})
        violations = [f"{key}= is missing" for key in missing] + [f"{key}= is unknown" for key in unknown]
        if mode not in set(Mode):
            violations.append(f"a plan starts with its mode, dp or pp, got {mode!r}")
        if violations:
            raise PlanError(f"this is not a plan: {text!r}", violations)
        try:
            forward_size, forward_packs = _parse_packs(parts["forward"])
            backward_size, backward_packs = _parse_packs(parts["backward"])
            return cls(
                mode=Mode(mode),
                minibatch_size=_parse_count("minibatch", parts["minibatch"]),
                forward_microbatch_size=forward_size,
                forward_packs=forward_packs,
                backward_microbatch_size=backward_size,
                backward_packs=backward_packs,
                devices=tuple(_parse_count("devices", device) for device in parts["devices"].split(",")),
                prefetch=_parse_count("prefetch", parts.get("prefetch", "1")),
                peer_transfers=_parse_switch("peer", parts.get("peer", "on"), on="on", off="off"),
                just_in_time_update=_parse_switch("update", parts.get("update", "jit"), on="jit", off="end"),
            )
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"this is not a plan: {text!r}", [f"{error}"]) from None

    @classmethod
    def of(cls, plan: "Plan | str") -> "Plan":
        """The plan itself, or the one that a text describes."""
        return cls.parse(plan) if isinstance(plan, str) else plan

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``from_json`` reads it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        packs = {name: [list(pack) for pack in values[name]] for name in ("forward_packs", "backward_packs")}
        return {
            "schema": "harmony_lab.plan",
            "version": SCHEMA_VERSION,
            **values,
            **packs,
            "mode": str(self.mode),
            "devices": list(self.devices),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Raises ``HarmonyError`` for another kind of file or a newer schema version, ``PlanError`` for a broken
        plan."""
        check_schema(data, "harmony_lab.plan", SCHEMA_VERSION)
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        return cls.from_json(json.loads(Path(path).read_text()))


def microbatches(start: int, stop: int, size: int) -> tuple[tuple[int, int], ...]:
    """Samples [start, stop) in microbatches of ``size``; the last may be smaller."""
    return tuple((first, min(first + size, stop)) for first in range(start, stop, size))


def _tiling(name: str, packs: Sequence[Pack], start: int, stop: int) -> Iterable[str]:
    edge = start
    for pack in packs:
        if pack.start != edge:
            yield f"{name} must tile layers {start}:{stop} without gap or overlap: after {edge} comes pack {pack}"
        if pack.stop <= pack.start:
            yield f"{name}: pack {pack} holds no layer"
        edge = pack.stop
    if edge != stop:
        yield f"{name} must end at layer {stop}, the last pack ends at {edge}"


def _parse_count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name}= takes whole numbers, got {text!r}")
    return int(text)


def _parse_switch(name: str, text: str, *, on: str, off: str) -> bool:
    if text not in (on, off):
        raise ValueError(f"{name}= is {on} or {off}, got {text!r}")
    return text == on


def _parse_packs(text: str) -> tuple[int, tuple[Pack, ...]]:
    match = re.fullmatch(r"(\d+)\[((?:\d+:\d+)?(?:,\d+:\d+)*)\]", text)
    if match is None:
        raise ValueError(f"a microbatch size and packs like 4[0:3,3:6] were expected, got {text!r}")
    size, packs = match.groups()
    pairs = [pack.split(":") for pack in packs.split(",") if pack]
    return int(size), tuple(Pack(int(start), int(stop)) for start, stop in pairs)
