"""What becomes of a plan when it trains: updates that wait where they must, microbatch sizes that come up."""

from typing import TYPE_CHECKING

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.plan import Plan, microbatches

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["deferred", "sizes_to_measure", "sizes_to_run", "suggestions"]

_FUSABLE = ("Adam", "AdamW")  # whose fused step is that much faster on the host


def deferred(plan: Plan, max_grad_norm: float, overlap: bool) -> Plan:
    """The plan with updates that wait for all gradients."""
    if not max_grad_norm > 0:
        raise HarmonyError(f"max_grad_norm must be above 0, got {max_grad_norm}; None clips nothing")
    overlaps = overlap or plan.overlapped_update
    return plan.with_(just_in_time_update=False, overlapped_update=overlaps, device_updates=())


def suggestions(optimizer: "Optimizer") -> tuple[str, ...]:
    name = type(optimizer).__name__
    if name not in _FUSABLE or all(group.get("fused") for group in optimizer.param_groups):
        return ()
    return (f"on the host, {name} updates several times as fast when it is made with fused=True",)


def sizes_to_measure(plan: Plan, layers: LayerSequence) -> list[int]:
    """Microbatch sizes that a plan runs, with the smallest, so that those of smaller minibatches can be interpolated.

    Where samples meet in a layer that is two: batch norm has no statistics of one.
    """
    smallest = min(2, plan.minibatch_size) if layers.couples_samples else 1
    return sorted(sizes_to_run(plan) | {smallest})


def sizes_to_run(plan: Plan) -> set[int]:
    shares = [plan.share(position) for position in range(plan.num_devices)]
    chosen = (plan.forward_microbatch_size, plan.backward_microbatch_size)
    return {stop - start for share in shares for size in chosen for start, stop in microbatches(*share, size)}
