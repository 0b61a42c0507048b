"""explain: why a plan is as fast as it is: what binds it, what would make it faster, what each of its switches buys."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, PlanError
from harmony_lab.machine import HOST, HOST_MEMORY, Direction, Hop, Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.baselines import baselines
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.staying import mirror, staying
from harmony_lab.program import OP_CODES, STREAM_CODES, OpKind, Stream
from harmony_lab.simulator.engine import makespan_s, run
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_change, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["Ablation", "AblationRow", "Advice", "ablation", "advice", "what_binds"]

_WORTH_TELLING = 0.02  # of the time
_WIDTH = 80
_STREAMED = "zero-infinity order"
_NOTHING_STAYS: dict[str, Any] = {
    **{"mirrored": False, "resident_packs": (), "kept_packs": ()},
    **{"device_stash": (), "device_updates": ()},
}


# -- what binds -------------------------------------------------------------------------------------------------------


def what_binds(plan: Plan, trace: Trace, peaks: Sequence[int]) -> str:
    """What is busiest, and the pack that needs most of the fullest device.  ``peaks``: bytes of each device."""
    machine = trace.machine
    shares = [trace.busy_fraction(device, Stream.COMPUTE) for device in range(machine.num_devices)]
    compute, host = sum(shares) / len(shares), trace.busy_fraction(HOST, Stream.HOST)
    name, link = _busiest_link(trace)
    reasons = {
        f"computing ({compute:.0%} of the time{_twice(trace)})": compute,
        f"the {name} ({link:.0%} busy)": link,
    }
    reasons[f"the update on the host ({host:.0%} of the time)"] = host
    first, second, *_ = sorted(reasons, key=lambda reason: -reasons[reason])
    then = f", then {second}" if round(100 * reasons[second]) else ""
    fullest = max(range(len(peaks)), key=lambda device: peaks[device] / machine.budgets[device])
    return (
        f"What binds is {first}{then}.  {machine.devices[fullest].name} needs up to "
        f"{format_bytes(peaks[fullest])} of {format_bytes(machine.budgets[fullest])}, the most during "
        f"{_at_peak(plan, trace, fullest)}."
    )


def _twice(trace: Trace) -> str:
    """How much of the computing is forwards that backward repeats."""
    ops, spent_s = trace.program.op_columns, trace.end_s - trace.start_s
    again_s = float(spent_s[ops.kind == OP_CODES[OpKind.RECOMPUTE]].sum())
    all_s = float(spent_s[ops.stream == STREAM_CODES[Stream.COMPUTE]].sum())
    return f", {again_s / all_s:.0%} of it recomputing" if again_s >= _WORTH_TELLING * all_s else ""


def _busiest_link(trace: Trace) -> tuple[str, float]:
    """Its name and the share of the iteration that it would take at its full rate."""
    capacities = trace.machine.capacities
    moved = dict.fromkeys(capacities, 0)
    for (hop, _), num_bytes in trace.link_bytes.items():
        moved[hop] += num_bytes
    hop = max(moved, key=lambda hop: moved[hop] / capacities[hop])
    share = moved[hop] / capacities[hop] / trace.makespan_s if trace.makespan_s else 0.0
    return _hop_words(hop, trace.machine), share


def _hop_words(hop: Hop, machine: Machine) -> str:
    if hop == HOST_MEMORY:
        return "host memory"
    down = hop.direction is Direction.DOWN
    for bridge in machine.bridges:
        if bridge.name == hop.link:
            return f"bridge {hop.link} to {bridge.second if down else bridge.first}"
    return f"link {hop.link} {'to' if down else 'from'} the devices"


def _at_peak(plan: Plan, trace: Trace, device: int) -> str:
    """The pack that is computed when most is alive in the simulated iteration."""
    timeline, ops = trace.memory[device], trace.program.op_columns
    peak_s = timeline.times_s[int(np.argmax(timeline.total_bytes))]
    mine = np.flatnonzero((ops.device == device) & (ops.stream == STREAM_CODES[Stream.COMPUTE]))
    number = int(mine[max(0, int(np.searchsorted(trace.start_s[mine], peak_s, side="right")) - 1)])
    op = trace.program.ops[number]
    pack = Pack(*op.layers)
    way = "forward" if op.kind is OpKind.FORWARD and pack in plan.forward_packs else "backward"
    packs = plan.forward_packs if way == "forward" else plan.backward_packs
    return f"{way} of pack {packs.index(pack)} [{pack}]" if pack in packs else f"layers {pack}"


# -- what would help --------------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """What would make the same plan faster; ``saved``: of the time per sample, 0.1 is 10%."""

    change: str
    step_s: float
    saved: float

    def __str__(self) -> str:
        return f"{self.change}: {self.saved:.0%} less time per sample"


def advice(plan: Plan, profile: Profile, machine: Machine) -> tuple[Advice, ...]:
    """What helps the plan, most useful first; each found by simulating it so, and left out where it saves nothing
    worth telling.  Packs and microbatches stay as they are: another search may do more with what is changed."""
    costs = PackCosts(profile)
    before_s = makespan_s(lower(plan, profile, machine, costs=costs), profile, machine) / plan.minibatch_size
    found = []
    for change, changed_plan, changed_profile, changed_machine in _changes(plan, profile, machine):
        step_s = _seconds(changed_plan, changed_profile, changed_machine, PackCosts(changed_profile))
        if step_s is not None:  # a larger minibatch may leave a rest that was not profiled, or more to keep than fits
            found.append(Advice(change, step_s, 1 - step_s / changed_plan.minibatch_size / before_s))
    larger = replace(machine, devices=tuple(replace(d, memory_bytes=2 * d.memory_bytes) for d in machine.devices))
    bare = mirror(plan.with_(**_NOTHING_STAYS))
    updated = updatable(bare, profile, larger)
    more = [step_s for _, step_s in staying(bare, lambda tried: _seconds(tried, profile, larger, costs), updated)]
    if more:
        found.append(Advice("devices with twice the memory", more[-1], 1 - more[-1] / plan.minibatch_size / before_s))
    return tuple(sorted((one for one in found if one.saved >= _WORTH_TELLING), key=lambda one: -one.saved))


def _seconds(plan: Plan, profile: Profile, machine: Machine, costs: PackCosts) -> float | None:
    """Of an iteration; None where that is not possible."""
    try:
        return makespan_s(lower(plan, profile, machine, costs=costs), profile, machine)
    except HarmonyError:
        return None


def _changes(plan: Plan, profile: Profile, machine: Machine) -> Iterator[tuple[str, Plan, Profile, Machine]]:
    links = tuple(replace(link, bytes_per_s=2 * link.bytes_per_s) for link in machine.links)
    yield "links twice as fast", plan, profile, replace(machine, links=links)
    if machine.host.memory_bytes_per_s is not None:
        host = replace(machine.host, memory_bytes_per_s=2 * machine.host.memory_bytes_per_s)
        yield "host memory twice as fast", plan, profile, replace(machine, host=host)
    if machine.num_devices > 1 and not machine.all_reach:
        direct = replace(machine, peer_transfers=True)
        yield "copies between devices without the host", plan.with_(peer_transfers=True), profile, direct
    yield "devices that compute twice as fast", plan, _computing_faster(profile), machine
    faster = tuple(replace(layer, update_s=layer.update_s / 2) for layer in profile.layers)
    yield "updates on the host twice as fast", plan, replace(profile, layers=faster), machine
    twice = 2 * plan.minibatch_size
    yield f"minibatches of {twice} instead of {plan.minibatch_size}", plan.for_minibatch(twice), profile, machine


def _computing_faster(profile: Profile) -> Profile:
    layers = tuple(
        replace(
            layer,
            costs=tuple(
                cost._replace(
                    forward_s=cost.forward_s / 2, recompute_s=cost.recompute_s / 2, backward_s=cost.backward_s / 2
                )
                for cost in layer.costs
            ),
            forward_costs=tuple(cost._replace(forward_s=cost.forward_s / 2) for cost in layer.forward_costs),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


# -- what switches buy ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One switch taken off.

    ``instead``: what is then done.  ``loss``: how much longer an iteration takes, 0.1 is 10%.  Where there is no such
    variant, or it does not fit, ``reason`` says why and the numbers are None.  ``peak_bytes``: of the fullest device.
    ``plan``: the variant as a plan; None for one that is no plan.
    """

    switch: str
    instead: str
    plan: Plan | None = None
    step_s: float | None = None
    swap_bytes: int | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """What each switch of a plan buys: its numbers, and those without one switch at a time."""

    plan: Plan
    step_s: float
    swap_bytes: int
    peak_bytes: int
    rows: tuple[AblationRow, ...]

    def __getitem__(self, switch: str) -> AblationRow:
        """The row of ``"grouping"``, ``"just-in-time update"``, ``"peer transfers"``, ``"packing"``, ``"prefetch"`` or
        ``"staying"``, and of ``"updates on devices"`` and others where the plan has them."""
        for row in self.rows:
            if row.switch == switch:
                return row
        raise KeyError(f"no row of {switch!r}; there are {', '.join(row.switch for row in self.rows)}")

    def to_frame(self) -> "pandas.DataFrame":
        """A row per switch."""
        import pandas

        names = ("switch", "instead", "step_s", "loss", "swap_bytes", "peak_bytes", "reason")
        rows = [{name: getattr(row, name) for name in names} | {"plan": _text(row.plan)} for row in self.rows]
        return pandas.DataFrame(rows, columns=[*names, "plan"])

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, plans as text."""
        return {
            **{name: getattr(self, name) for name in ("step_s", "swap_bytes", "peak_bytes")},
            "plan": str(self.plan),
            "rows": [{**asdict(row), "plan": _text(row.plan)} for row in self.rows],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max(len(switch) for switch, *_ in self.cells())
        yield f"{'without':<{width}}  {'step':>11}  {'longer':>7}  {'swapped':>8}  {'peak':>8}"
        for switch, cells, note in self.cells():
            numbers = "  ".join(f"{cell:>{size}}" for cell, size in zip(cells, (11, 7, 8, 8), strict=True))
            yield f"{switch:<{width}}  {numbers}".rstrip()
            yield from wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="  ")

    def cells(self) -> Iterator[tuple[str, tuple[str, str, str, str], str]]:
        """Switch, numbers as text, and what is done instead or why there are none; the plan itself first."""
        own = format_seconds(self.step_s), "", format_bytes(self.swap_bytes), format_bytes(self.peak_bytes)
        yield "(the plan itself)", own, ""
        for row in self.rows:
            if row.step_s is None or row.loss is None or row.swap_bytes is None or row.peak_bytes is None:
                yield row.switch, ("", "", "", ""), row.reason
            else:
                sizes = format_bytes(row.swap_bytes), format_bytes(row.peak_bytes)
                yield row.switch, (format_seconds(row.step_s), format_change(row.loss), *sizes), row.instead

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(switch)}</th>" + "".join(f"<td>{cell}</td>" for cell in (*cells, escape(note))) + "</tr>"
            for switch, cells, note in self.cells()
        )
        return (
            "<table><thead><tr><th>without</th><th>step</th><th>longer</th><th>swapped</th><th>peak memory</th>"
            f"<th></th></tr></thead><tbody>{rows}</tbody></table>"
        )


def _text(plan: Plan | None) -> str | None:
    return None if plan is None else str(plan)


def ablation(plan: Plan | str, profile: Profile, machine: Machine | str) -> Ablation:
    """The plan (or its text) against itself with each switch taken off alone, all simulated.

    Raises what ``lower`` does where the plan itself is not possible.
    """
    plan, machine, costs = Plan.of(plan), Machine.of(machine), PackCosts(profile)
    step_s, swap_bytes, peak = _simulated(plan, profile, machine, costs)
    rows = [_streamed(plan, profile, machine, step_s)]
    for switch, instead, variant in _variants(plan, profile, machine):
        if isinstance(variant, str):
            rows.append(AblationRow(switch=switch, instead=instead, reason=variant))
            continue
        try:
            other_s, other_bytes, other_peak = _simulated(variant, profile, machine, costs)
        except HarmonyError as error:
            rows.append(AblationRow(switch=switch, instead=instead, plan=variant, reason=f"{instead}: {_why(error)}"))
            continue
        rows.append(
            AblationRow(
                switch=switch,
                instead=instead,
                plan=variant,
                step_s=other_s,
                swap_bytes=other_bytes,
                peak_bytes=other_peak,
                loss=other_s / step_s - 1,
            )
        )
    return Ablation(plan=plan, step_s=step_s, swap_bytes=swap_bytes, peak_bytes=peak, rows=tuple(rows))


def _why(error: HarmonyError) -> str:
    """In a line, without what to do about a plan that nobody has asked for."""
    if isinstance(error, PlanError):
        return "; ".join(error.violations)
    return str(error).partition("; use ")[0]


def _simulated(plan: Plan, profile: Profile, machine: Machine, costs: PackCosts) -> tuple[float, int, int]:
    trace = run(lower(plan, profile, machine, costs=costs), profile, machine)
    return trace.makespan_s, trace.swap_bytes, max(peak_bytes(trace.program))


def _streamed(plan: Plan, profile: Profile, machine: Machine, step_s: float) -> AblationRow:
    """Without grouping: in data parallel order, every layer's weights for every microbatch."""
    (found,) = baselines(profile, machine, plan.minibatch_size, names=(_STREAMED,))
    if found.step_s is None:
        instead = "weights streamed for every microbatch"
        return AblationRow(switch="grouping", instead=instead, reason=f"{instead}: {found.reason}")
    return AblationRow(
        switch="grouping",
        instead=f"each layer streamed for each microbatch of {found.microbatch_size}, in dp ({_STREAMED})",
        step_s=found.step_s,
        swap_bytes=found.swap_bytes,
        peak_bytes=max(found.peak_bytes),
        loss=found.step_s / step_s - 1,
    )


def _variants(plan: Plan, profile: Profile, machine: Machine) -> Iterator[tuple[str, str, Plan | str]]:
    """Switch, what is done instead, and the plan so or why there is none."""
    on_host = plan.with_(device_updates=())
    too = " (and on the host)" if plan.device_updates else ""
    late = on_host.with_(just_in_time_update=False) if plan.just_in_time_update else "the plan updates at the end"
    yield "just-in-time update", f"all updates at the end{too}", late
    too = " (and updates there)" if plan.device_updates and plan.mode is Mode.DP else ""
    yield "peer transfers", f"between devices through the host{too}", _without_peers(plan, machine)
    yield "packing", "packs of one layer", _one_layer_packs(plan, profile, machine)
    ahead = plan.with_(prefetch=0) if plan.prefetch else "the plan fetches nothing ahead"
    yield "prefetch", "nothing fetched ahead", ahead
    if plan.device_updates:
        yield "updates on devices", "all updates on the host", on_host
    if not (plan.resident_packs or plan.device_stash or plan.mirrored or plan.device_updates):
        yield "staying", "nothing stays on the devices", "the plan leaves nothing on the devices"
        return
    if plan.kept_packs:
        yield "kept activations", "recomputed for backward", plan.with_(kept_packs=())
    if plan.device_stash:
        yield "stash on the device", "packs' inputs out to the host and in again", plan.with_(device_stash=())
    if plan.resident_packs:
        both = plan.with_(resident_packs=(), kept_packs=())
        yield "resident weights", "weights in again for backward, which recomputes", both
    yield "staying", "nothing stays on the devices", plan.with_(**_NOTHING_STAYS)


def _without_peers(plan: Plan, machine: Machine) -> Plan | str:
    if plan.num_devices == 1:
        return "the plan is for one device"
    if not (machine.peer_transfers or machine.bridges):
        return "the devices of this machine do not reach each other"
    if not plan.peer_transfers:
        return "the plan goes through the host"
    meets_on_host: dict[str, Any] = {"device_updates": ()} if plan.mode is Mode.DP else {}
    return plan.with_(peer_transfers=False, **meets_on_host)


def _one_layer_packs(plan: Plan, profile: Profile, machine: Machine) -> Plan | str:
    """The same with a pack per layer; what stays in a pack stays in each of its layers, where that is possible, and
    devices update those layers that they can."""
    ones = _layers_of((Pack(0, plan.num_layers),))
    if plan.backward_packs == ones:
        return "the plan has packs of one layer"
    split: dict[str, Any] = {
        "forward_packs": ones[:-1],
        "backward_packs": ones,
        "resident_packs": _layers_of(plan.resident_packs),
        "kept_packs": _layers_of(plan.kept_packs),
        "device_updates": (),
    }
    if not plan.forward_packs:  # the size has meant nothing so far
        split["forward_microbatch_size"] = plan.backward_microbatch_size
    for unstuck in ({}, {"device_stash": ()}, {**_NOTHING_STAYS, "mirrored": plan.mirrored}):
        try:
            single = plan.with_(**{**split, **unstuck})
        except PlanError:  # layers of one pack may run on different devices
            continue
        usable = set(updatable(single, profile, machine))
        return single.with_(device_updates=tuple(one for one in _layers_of(plan.device_updates) if one in usable))
    return "layers of its packs would run on different devices"


def _layers_of(packs: Sequence[Pack]) -> tuple[Pack, ...]:
    return tuple(Pack(layer, layer + 1) for pack in packs for layer in range(pack.start, pack.stop))
