"""What becomes of a plan when it trains: updates that wait where they must, microbatch sizes that come up."""

from dataclasses import replace
from typing import TYPE_CHECKING

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan, microbatches
from harmony_lab.roles import Role

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["deferred", "machine_to_train_on", "plan_as", "sizes_to_measure", "sizes_to_run", "suggestions"]

_FUSABLE = ("Adam", "AdamW")  # whose fused step is that much faster on the host


def deferred(plan: Plan, overlap: bool) -> Plan:
    """The plan with updates that wait for all gradients."""
    overlaps = overlap or plan.overlapped_update
    return plan.with_(just_in_time_update=False, overlapped_update=overlaps, device_updates=())


def plan_as(role: Role, plan: Plan) -> Plan:
    """The plan of a minibatch of that role; several make an update on the host only, where their gradients meet.

    Gradients that are only added up need not wait for others, so they take turns in the host's memory.
    """
    match role:
        case Role.ALONE:
            return plan.with_(overlapped_update=False)
        case Role.LAST:
            return plan.with_(overlapped_update=False, device_updates=())
        case Role.ADDING:
            return plan.with_(just_in_time_update=True, overlapped_update=False, device_updates=())
        case Role.LEAVING:
            return plan


def machine_to_train_on(machine: Machine | str, *, virtual_time: bool, chaos_seed: int | None) -> Machine:
    """The machine, in virtual time where that is asked for.

    Raises ``HarmonyError`` for one with real devices, and where ops are to be delayed at random.
    """
    machine = Machine.of(machine)
    if virtual_time:
        machine = replace(machine, virtual_time=True)
    if machine.virtual_time and chaos_seed is not None:
        raise HarmonyError(
            f"chaos_seed={chaos_seed} delays ops at random, which does not show in virtual time: leave one of them out"
        )
    return machine


def suggestions(optimizer: "Optimizer") -> tuple[str, ...]:
    name = type(optimizer).__name__
    if name not in _FUSABLE or all(group.get("fused") for group in optimizer.param_groups):
        return ()
    return (f"on the host, {name} updates several times as fast when it is made with fused=True",)


def sizes_to_measure(plan: Plan, layers: LayerSequence) -> list[int]:
    """Microbatch sizes that a plan runs, with the smallest, so that those of smaller minibatches can be interpolated,
    and those it is made of, which larger minibatches run where devices have less than one each.

    Where samples meet in a layer the smallest is two: batch norm has no statistics of one.
    """
    smallest = min(2, plan.minibatch_size) if layers.couples_samples else 1
    return sorted(sizes_to_run(plan) | {smallest, plan.forward_microbatch_size, plan.backward_microbatch_size})


def sizes_to_run(plan: Plan) -> set[int]:
    shares = [plan.share(position) for position in range(plan.num_devices)]
    chosen = (plan.forward_microbatch_size, plan.backward_microbatch_size)
    return {stop - start for share in shares for size in chosen for start, stop in microbatches(*share, size)}
