"""compose: a Plan as stages: its packs in the order of one iteration, with the devices and samples of each."""

from collections.abc import Iterable
from typing import NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan, microbatches
from harmony_lab.planner.pack import PackCosts
from harmony_lab.precision import Precision

__all__ = ["Stage", "forward_stages", "stages", "updatable", "validate"]


class Stage(NamedTuple):
    """A pack with its whole group of microbatches.

    ``shares``: the samples that each of ``devices`` works on.  ``kept``: its forward keeps what its backward needs.
    """

    pack: Pack
    backward: bool
    fused: bool
    kept: bool
    microbatch_size: int
    devices: tuple[int, ...]
    shares: tuple[tuple[int, int], ...]

    def trains(self, costs: PackCosts) -> bool:
        """Whether there is anything to update."""
        return costs.gradient_bytes(*self.pack) > 0

    @property
    def num_ops(self) -> int:
        """Computing ops for one microbatch."""
        return 2 if self.backward and not self.kept else 1

    def seconds(self, costs: PackCosts, size: int) -> float:
        """Computing for one microbatch."""
        start, stop = self.pack
        if not self.backward:
            return costs.recompute_s(start, stop, size) if self.kept else costs.forward_s(start, stop, size)
        again = 0.0 if self.kept else costs.recompute_s(start, stop, size)
        return again + costs.backward_s(start, stop, size)


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
    if plan.precision is not profile.precision:
        yield (
            f"the plan computes in {plan.precision}, the profile is of {profile.precision}: profile (or estimate) with "
            f"precision={str(plan.precision)!r}, or change the plan with precision={str(profile.precision)!r}"
        )
    if max(plan.devices) >= machine.num_devices:
        yield f"the plan uses device {max(plan.devices)}, the machine has devices 0 to {machine.num_devices - 1}"
    largest = {
        "forward_microbatch_size": profile.largest_forward_microbatch,
        "backward_microbatch_size": profile.largest_microbatch,
    }
    for name, most in largest.items():
        if getattr(plan, name) > most:
            yield (
                f"{name} is {getattr(plan, name)}, the profile was measured up to {most}; "
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
    for pack in plan.device_updates:
        reason = _not_updatable(pack, plan, profile, machine)
        if reason:
            yield f"device_updates: {pack} {reason}"
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


def updatable(plan: Plan, profile: Profile, machine: Machine | None = None) -> tuple[Pack, ...]:
    """Backward packs that devices could update (``Plan.device_updates``), whether or not there is room; on a
    ``machine``, or on any."""
    if not plan.just_in_time_update or plan.precision is not Precision.FP32:
        return ()
    return tuple(
        pack
        for pack in plan.backward_packs
        if profile.gradient_bytes(*pack) and not _not_updatable(pack, plan, profile, machine)
    )


def _not_updatable(pack: Pack, plan: Plan, profile: Profile, machine: Machine | None) -> str:
    """Why no device can update that pack, as its gradients are complete on the host only; empty where one can."""
    peers = plan.peer_transfers and (machine is None or machine.all_reach)
    if plan.mode is Mode.DP and plan.num_devices > 1 and not peers:
        return "cannot be updated on a device in dp without peer transfers: its gradients meet on the host"
    inside = range(*pack)
    for shared in profile.shared:
        elsewhere = [layer for layer in shared.layers if layer not in inside]
        if shared.gradient_bytes and elsewhere and len(elsewhere) < len(shared.layers):
            whose = ", ".join(map(str, elsewhere[:3]))
            return f"shares the parameter {shared.name} with layer {whose}, so its gradients meet on the host"
    return ""


def _microbatch_sizes(plan: Plan) -> set[int]:
    shares = {plan.share(position) for position in range(plan.num_devices)}
    sizes = {plan.backward_microbatch_size, plan.forward_microbatch_size if plan.forward_packs else 0} - {0}
    return {stop - start for share in shares for size in sizes for start, stop in microbatches(*share, size)}


def stages(plan: Plan, profile: Profile) -> tuple[Stage, ...]:
    """Forward packs first to last, then backward packs last to first.

    PP deals the packs round the devices.  DP gives every pack to every device with its share of the minibatch.
    Backward packs below the first trainable layer have nothing to do and are left out.
    """
    backward = [pack for pack in reversed(plan.backward_packs) if pack.stop > profile.first_trainable_layer]
    shares = _shares(plan)
    kept = {pack for pack in plan.kept_packs if pack.stop > profile.first_trainable_layer}
    forward = [
        Stage(pack, False, False, pack in kept, plan.forward_microbatch_size, plan.forward_devices(pack.start), shares)
        for pack in plan.forward_packs
    ]
    return *forward, *(
        Stage(
            pack,
            True,
            pack == plan.fused_pack,
            pack in kept,
            plan.backward_microbatch_size,
            plan.backward_devices(pack),
            shares,
        )
        for pack in backward
    )


def forward_stages(plan: Plan) -> tuple[Stage, ...]:
    """Forward packs first to last, then the forward of the last pack: what evaluating takes."""
    sizes = [plan.forward_microbatch_size] * len(plan.forward_packs) + [plan.backward_microbatch_size]
    return tuple(
        Stage(pack, False, False, False, size, plan.forward_devices(pack.start), _shares(plan))
        for pack, size in zip((*plan.forward_packs, plan.fused_pack), sizes, strict=True)
    )


def _shares(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The samples of each device that runs a pack."""
    if plan.mode is Mode.PP:
        return ((0, plan.minibatch_size),)
    return tuple(plan.share(position) for position in range(plan.num_devices))
