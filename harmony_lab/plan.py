"""Plan: the knobs of a schedule, their invariants, a one-line text form and JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from operator import index
from pathlib import Path
from typing import Any

from harmony_lab.errors import PlanError
from harmony_lab.machine import check_schema
from harmony_lab.packs import Pack, joined, microbatches, tiling
from harmony_lab.plan_words import WORDS, knobs_of
from harmony_lab.precision import Precision

__all__ = ["Mode", "Pack", "Plan", "difference", "microbatches"]

SCHEMA_VERSION = 1
_PACKS = ("forward_packs", "backward_packs", "resident_packs", "kept_packs", "device_updates")
_COUNTS = ("minibatch_size", "forward_microbatch_size", "backward_microbatch_size", "prefetch")
_SWITCHES = ("peer_transfers", "just_in_time_update", "overlapped_update", "mirrored")
_INDICES = ("devices", "device_stash")
_APART = "on different devices; in pp mirrored=True may help, else leave it out"
_NEEDED = ("minibatch", "forward", "backward", "devices")


class Mode(StrEnum):
    DP = "dp"  # every device runs all packs on its share of the minibatch
    PP = "pp"  # packs go round the devices, every device sees the whole minibatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one iteration over a minibatch is scheduled.

    ``forward_microbatch_size``, ``forward_packs``, ``backward_microbatch_size`` and ``backward_packs`` are the paper's
    four-tuple (U_F, P_F, U_B, P_B).  Backward packs tile all layers; the last one's forward is fused with its backward,
    so forward packs tile the layers before it.  ``devices`` is the order in which packs visit devices (PP) or shares
    are dealt (DP).

    ``prefetch``: how many packs ahead weights are fetched (0: nothing is; a pack's weights come once all that the pack
    before made has left, a microbatch's inputs once the one before has been computed).  ``peer_transfers``: between
    devices directly, else through the host.  ``just_in_time_update``: update a pack right after its backward, else all
    at the end, or, with ``overlapped_update``, beside the next iteration's forward, in its order.  ``precision``: what
    layers compute in and weights move as.

    Where memory is left, less need move or be computed twice:

    ``mirrored``         PP only: a backward pack runs on the device that ran the forward of its first layer, instead of
                         the packs going on round the devices
    ``resident_packs``   packs, the same forward and backward on one device, whose weights stay there in between
    ``kept_packs``       of these, packs whose forward keeps what backward needs: nothing is computed twice
    ``device_stash``     boundaries where backward packs start whose values stay on the device until then, and are
                         handed from pack to pack on it; others go to the host and back
    ``device_updates``   backward packs whose parameters the optimizer updates on the device that ran their backward,
                         right after it: its state for them stays there from step to step, gradients do not leave,
                         weights go back to the host updated

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
    overlapped_update: bool = False
    precision: Precision = Precision.FP32
    mirrored: bool = False
    resident_packs: tuple[Pack, ...] = ()
    kept_packs: tuple[Pack, ...] = ()
    device_stash: tuple[int, ...] = ()
    device_updates: tuple[Pack, ...] = ()
    fingerprint: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        violations = list(self._mistyped()) or list(self._violations())
        if violations:
            raise PlanError("this plan breaks invariants", violations)

    def _mistyped(self) -> Iterable[str]:
        """What is of another type than its knob; sequences become tuples on the way."""
        if self.mode in set(Mode):
            object.__setattr__(self, "mode", Mode(self.mode))
        else:
            yield f"mode must be dp or pp, got {self.mode!r}"
        if self.precision in set(Precision):
            object.__setattr__(self, "precision", Precision(self.precision))
        else:
            yield f"precision must be fp32 or bf16, got {self.precision!r}"
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                yield f"{name} must be True or False, got {getattr(self, name)!r}"
        for name in (*_COUNTS, *_INDICES, *_PACKS):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, _whole(name, given))
            except TypeError:
                like = "a whole number" if name in _COUNTS else "whole numbers like (0, 1)"
                yield f"{name} must be {'packs like ((0, 2), (2, 5))' if name in _PACKS else like}, got {given!r}"

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
        yield from tiling("backward_packs", self.backward_packs, 0, self.backward_packs[-1].stop)
        fused = self.backward_packs[-1]
        if fused.start == 0 and self.forward_packs:
            yield f"forward_packs must be empty: the one backward pack {fused} runs every layer's forward itself"
        elif fused.start > 0 and not self.forward_packs:
            yield f"forward_packs must tile layers 0:{fused.start}, those before the last backward pack; there are none"
        elif self.forward_packs:
            yield from tiling("forward_packs", self.forward_packs, 0, fused.start)
        yield from self._misplaced()

    def _misplaced(self) -> Iterable[str]:
        """What is to stay on a device must be needed there again, by microbatches of the same samples."""
        if self.mirrored and self.mode is Mode.DP:
            yield "mirrored is for pp: in dp every device runs every pack"
        for pack in self.resident_packs:
            if pack not in self.forward_packs or pack not in self.backward_packs:
                yield f"resident_packs: {pack} must be both a forward and a backward pack"
            elif self.forward_devices(pack.start) != self.backward_devices(pack):
                yield f"resident_packs: {pack} runs forward and backward {_APART} (resident=() for none)"
        for pack in self.kept_packs:
            if pack not in self.resident_packs:
                yield f"kept_packs: {pack} must be one of resident_packs, its backward needs the same weights"
        if (self.kept_packs or self.device_stash) and self.forward_microbatch_size != self.backward_microbatch_size:
            yield "kept_packs and device_stash need forward and backward microbatches of one size"
        starts = {pack.start: pack for pack in self.backward_packs if pack.start > 0}
        for boundary in self.device_stash:
            if boundary not in starts:
                yield f"device_stash: no backward pack starts at boundary {boundary}"
            elif self.forward_devices(self._holder(boundary)) != self.backward_devices(starts[boundary]):
                yield f"device_stash: forward and backward at boundary {boundary} are {_APART} (stash=() for none)"
        for pack in self.device_updates:
            if pack not in self.backward_packs:
                yield f"device_updates: {pack} must be one of backward_packs"
        if len(set(self.device_updates)) < len(self.device_updates):
            yield f"device_updates: a pack is updated once, got {joined(self.device_updates)}"
        if self.device_updates and not self.just_in_time_update:
            yield "device_updates need just_in_time_update: a device updates a pack right after its backward"
        if self.overlapped_update and self.just_in_time_update:
            yield "overlapped_update needs just_in_time_update off: updates wait for the next iteration's forward"
        if self.device_updates and self.precision is not Precision.FP32:
            yield f"device_updates need precision fp32: in {self.precision} the weights to update are on the host"

    def forward_devices(self, layer: int) -> tuple[int, ...]:
        """Where that layer's forward runs: every device in DP."""
        if self.mode is Mode.DP:
            return self.devices
        stage = next((i for i, pack in enumerate(self.forward_packs) if layer < pack.stop), len(self.forward_packs))
        return (self.devices[stage % self.num_devices],)

    def backward_devices(self, pack: Pack) -> tuple[int, ...]:
        """Where that backward pack runs: every device in DP."""
        if self.mode is Mode.DP:
            return self.devices
        if self.mirrored and pack != self.fused_pack:
            return self.forward_devices(pack.start)
        stage = len(self.forward_packs) + len(self.backward_packs) - 1 - self.backward_packs.index(pack)
        return (self.devices[stage % self.num_devices],)

    def _holder(self, boundary: int) -> int:
        """The layer on whose device a boundary's values are after forward: the one that they go into; before the last
        pack, which takes them itself, the one that they come from."""
        return boundary - 1 if boundary == self.fused_pack.start else boundary

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
        """The same plan with some knobs changed, named as here or as in the text form: ``with_(prefetch=0,
        update="end")``.  Raises ``PlanError`` where the result breaks invariants.
        """
        knobs, violations = knobs_of(changes)
        unknown = [f"{name!r} is no knob of a plan" for name in sorted(set(knobs) - {f.name for f in fields(self)})]
        if unknown:
            there = ", ".join(f.name for f in fields(self) if f.compare)
            words = ", ".join(f"{word}=" for word in WORDS)
            unknown.append(f"there are {there}; or as in a plan's text {words}")
        if unknown or violations:
            raise PlanError("unknown knobs" if unknown else "these knobs cannot be read", [*violations, *unknown])
        return replace(self, **knobs)

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
        late = "next" if self.overlapped_update else "end"
        extra = f" update={'jit' if self.just_in_time_update else late}" + (" mirrored=on" if self.mirrored else "")
        extra += "" if self.precision is Precision.FP32 else f" precision={self.precision}"
        staying = (
            ("resident", self.resident_packs),
            ("kept", self.kept_packs),
            ("stash", self.device_stash),
            ("optimizer", self.device_updates),
        )
        for key, values in staying:
            extra += f" {key}={joined(values)}" if values else ""
        return (
            f"{self.mode} minibatch={self.minibatch_size} "
            f"forward={self.forward_microbatch_size}[{joined(self.forward_packs)}] "
            f"backward={self.backward_microbatch_size}[{joined(self.backward_packs)}] "
            f"devices={joined(self.devices)} prefetch={self.prefetch} "
            f"peer={'on' if self.peer_transfers else 'off'}{extra}"
        )

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{self}</pre>'

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read the text form.  Raises ``PlanError`` saying which part is off."""
        mode, *rest = text.split() or [""]
        parts = dict(part.split("=", 1) for part in rest if "=" in part)
        violations = [f"{word}= is missing" for word in _NEEDED if word not in parts]
        violations += [f"{word}= is unknown" for word in sorted(set(parts) - set(WORDS))]
        violations += [f"{part!r} is unknown" for part in rest if "=" not in part]
        if mode not in set(Mode):
            violations.append(f"a plan starts with its mode, dp or pp, got {mode!r}")
        knobs, unreadable = knobs_of({word: value for word, value in parts.items() if word in WORDS})
        if violations or unreadable:
            raise PlanError(f"this is not a plan: {text!r}", [*violations, *unreadable])
        return cls(mode=Mode(mode), **knobs)

    @classmethod
    def of(cls, plan: "Plan | str") -> "Plan":
        """The plan itself, or the one that a text describes."""
        if not isinstance(plan, cls | str):
            cure = "; a Lab has a plan after lab.prepare()" if plan is None else ""
            raise PlanError("no plan", [f"expected a harmony_lab.Plan or its text, got a {type(plan).__name__}{cure}"])
        return cls.parse(plan) if isinstance(plan, str) else plan

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; ``from_json`` reads it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        packs = {name: [list(pack) for pack in values[name]] for name in _PACKS}
        return {
            "schema": "harmony_lab.plan",
            "version": SCHEMA_VERSION,
            **values,
            **packs,
            "mode": str(self.mode),
            "precision": str(self.precision),
            "devices": list(self.devices),
            "device_stash": list(self.device_stash),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Raises ``HarmonyError`` for another kind of file or a newer schema version, ``PlanError`` for a broken
        plan."""
        check_schema(data, "harmony_lab.plan", SCHEMA_VERSION)
        known = {f.name: f.default for f in fields(cls)}
        missing = [f"{name} is missing" for name, default in known.items() if default is MISSING and name not in data]
        if missing:
            raise PlanError("this is not a whole plan", missing)
        return cls(**{name: value for name, value in data.items() if name in known})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        return cls.from_json(json.loads(Path(path).read_text()))


def difference(a: Plan, b: Plan) -> str:
    """The knobs in which ``b`` differs from ``a``, one per line; empty where none does.

    Of packs that tile layers, those at the beginning and at the end that both have are left out.
    """
    lines = []
    for knob in fields(Plan):
        before, after = getattr(a, knob.name), getattr(b, knob.name)
        if not knob.compare or before == after:
            continue
        same = ""
        if knob.name in ("forward_packs", "backward_packs"):
            counts = f"{len(before)} → {len(after)} packs, "
            before, after, num_left_out = _where_unlike(before, after)
            same = f" ({counts}{num_left_out} as before)"
        lines.append(f"{knob.name}: {_shown(before)} → {_shown(after)}{same}")
    return "\n".join(lines)


def _where_unlike(before: tuple[Pack, ...], after: tuple[Pack, ...]) -> tuple[tuple[Pack, ...], tuple[Pack, ...], int]:
    """Without what both begin and end with, and how many that is."""
    most = min(len(before), len(after))
    first = next((i for i in range(most) if before[i] != after[i]), most)
    last = next((i for i in range(most - first) if before[-1 - i] != after[-1 - i]), most - first)
    return before[first : len(before) - last], after[first : len(after) - last], first + last


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (joined(value) or "none") if isinstance(value, tuple) else str(value)


def _whole(name: str, given: Any) -> Any:
    """The value of a knob that counts, indexes or packs; raises ``TypeError`` where it is none."""
    if name in _COUNTS:
        return index(given)
    return tuple(Pack(*map(index, pack)) for pack in given) if name in _PACKS else tuple(map(index, given))
