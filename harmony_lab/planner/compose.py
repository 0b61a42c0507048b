"""compose: a Plan as tasks, each a pack on a device with its microbatches, in the order in which they are begun."""

from collections.abc import Iterable
from typing import NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan, microbatches
from harmony_lab.planner.pack import PackCosts

__all__ = ["Task", "Unit", "compose", "ordered_units", "validate"]


class Task(NamedTuple):
    """A pack's whole group of microbatches on one device.

    ``stage``: position in the chain of packs of one iteration, the same on every device in DP.
    """

    stage: int
    pack: Pack
    device: int
    backward: bool
    fused: bool
    samples: tuple[tuple[int, int], ...]


class Unit(NamedTuple):
    """One microbatch of a task."""

    task: Task
    position: int  # among the task's microbatches

    @property
    def samples(self) -> tuple[int, int]:
        return self.task.samples[self.position]

    @property
    def num_samples(self) -> int:
        start, stop = self.samples
        return stop - start

    @property
    def is_first(self) -> bool:
        return self.position == 0

    @property
    def is_last(self) -> bool:
        return self.position == len(self.task.samples) - 1


def validate(plan: Plan, profile: Profile, machine: Machine) -> None:
    """Raise ``PlanError`` listing everything about the plan that this model or machine cannot do."""
    violations = list(_violations(plan, profile, machine))
    if violations:
        raise PlanError(f"this plan does not suit {profile.model} on {machine.name}", violations)


def _violations(plan: Plan, profile: Profile, machine: Machine) -> Iterable[str]:
    if plan.num_layers != len(profile):
        yield f"the plan is for {plan.num_layers} layers, the model has {len(profile)}"
        return
    if plan.fingerprint and profile.fingerprint and plan.fingerprint != profile.fingerprint:
        yield f"the plan was made for another model (fingerprint {plan.fingerprint}, this one is {profile.fingerprint})"
    if max(plan.devices) >= machine.num_devices:
        yield f"the plan uses device {max(plan.devices)}, the machine has devices 0 to {machine.num_devices - 1}"
    for name in ("forward_microbatch_size", "backward_microbatch_size"):
        if getattr(plan, name) > profile.largest_microbatch:
            yield (
                f"{name} is {getattr(plan, name)}, the profile was measured up to {profile.largest_microbatch}; "
                "use a smaller one or profile again with larger microbatch_sizes"
            )
    smallest = min(_microbatch_sizes(plan))
    if smallest < profile.microbatch_sizes[0]:
        yield (
            f"a microbatch has {smallest} samples (the last of a minibatch may be smaller than the others), the "
            f"profile was measured from {profile.microbatch_sizes[0]} up; use a size that leaves no smaller rest"
        )
    if profile.first_trainable_layer == len(profile):
        yield "the model has no trainable parameter"
    if plan.mode is Mode.DP and plan.num_devices > 1 and profile.serial_buffers:
        names = ", ".join(profile.serial_buffers[:3])
        yield f"dp cannot merge buffers that depend on the order of microbatches ({names}); use pp"
    if plan.forward_microbatch_size != plan.backward_microbatch_size and plan.forward_packs:
        if profile.couples_samples:
            names = ", ".join(profile.couples_samples[:3])
            yield f"forward and backward microbatch sizes must be equal: samples influence each other in {names}"
        for boundary in sorted({pack.start for pack in plan.backward_packs} - {0}):
            if not profile.splits_at(boundary):
                yield f"microbatch sizes must be equal: a value at boundary {boundary} has no batch dimension"


def _microbatch_sizes(plan: Plan) -> set[int]:
    shares = {plan.share(position) for position in range(plan.num_devices)}
    sizes = {plan.backward_microbatch_size, plan.forward_microbatch_size if plan.forward_packs else 0} - {0}
    return {stop - start for share in shares for size in sizes for start, stop in microbatches(*share, size)}


def compose(plan: Plan, profile: Profile) -> tuple[Task, ...]:
    """Tasks by stage, then by device order.

    PP deals the packs round the devices, forward packs first to last, then backward packs last to first.  DP gives
    every pack to every device with its share of the minibatch.  Backward packs below the first trainable layer have
    nothing to do and are left out.
    """
    backward = [pack for pack in reversed(plan.backward_packs) if pack.stop > profile.first_trainable_layer]
    chain = [(pack, False) for pack in plan.forward_packs] + [(pack, True) for pack in backward]
    tasks = []
    for stage, (pack, is_backward) in enumerate(chain):
        size = plan.backward_microbatch_size if is_backward else plan.forward_microbatch_size
        if plan.mode is Mode.PP:
            placed = [(plan.devices[stage % plan.num_devices], (0, plan.minibatch_size))]
        else:
            placed = [(device, plan.share(position)) for position, device in enumerate(plan.devices)]
        tasks += [
            Task(stage, pack, device, is_backward, pack == plan.fused_pack and is_backward, microbatches(*share, size))
            for device, share in placed
        ]
    return tuple(tasks)


def ordered_units(tasks: tuple[Task, ...], costs: PackCosts) -> list[Unit]:
    """All units in the order in which they would begin if only computing took time.

    This is the order in which memory is promised (see ``program``), so it must be one in which the devices really
    progress together.  Where several devices run one stage (DP), the stage ends on all of them before the next: what
    they reduce together leaves before more is promised to a device that is ahead.
    """
    free_at: dict[int, float] = {}
    ended: dict[tuple[int, int], list[tuple[int, float]]] = {}  # (stage, device) -> each unit's last sample and end
    devices_of: dict[int, list[int]] = {}
    for task in tasks:
        devices_of.setdefault(task.stage, []).append(task.device)
    begun: list[tuple[tuple[float, float, int, int], Unit]] = []
    for task in tasks:
        before = devices_of.get(task.stage - 1, [])
        source = task.device if task.device in before else next(iter(before), task.device)
        produced = ended.get((task.stage - 1, source), [])
        ends = ended[task.stage, task.device] = []
        for position, samples in enumerate(task.samples):
            ready = next((end for stop, end in produced if stop >= samples[1]), 0.0)
            start = max(free_at.get(task.device, 0.0), ready)
            free_at[task.device] = start + _unit_seconds(task, samples, costs)
            ends.append((samples[1], free_at[task.device]))
            in_step = task.stage if len(devices_of[task.stage]) > 1 else 0.0
            begun.append(((in_step, start, task.stage, position), Unit(task, position)))
    begun.sort(key=lambda row: row[0])
    return [unit for _, unit in begun]


def _unit_seconds(task: Task, samples: tuple[int, int], costs: PackCosts) -> float:
    start, stop = task.pack
    size = samples[1] - samples[0]
    if task.backward:
        return costs.recompute_s(start, stop, size) + costs.backward_s(start, stop, size)
    return costs.forward_s(start, stop, size)
