"""unfitting: what to say where no plan fits: what is too large, by how much, and what to do."""

from collections.abc import Sequence

from harmony_lab.errors import HostMemoryError, PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.result import Rejected
from harmony_lab.units import format_bytes

__all__ = ["what_does_not_fit"]


def what_does_not_fit(
    costs: PackCosts, machine: Machine, rejected: Sequence[Rejected], host_problem: str
) -> HostMemoryError | PlanDoesNotFitError:
    """The error to raise.  ``host_problem``: why the host's memory does not suffice, where that is it."""
    profile = costs.profile
    if host_problem:
        return HostMemoryError(
            f"no plan fits {machine}: {host_problem}",
            needed_bytes=profile.state_bytes,
            available_bytes=machine.host.memory_bytes,
        )
    size = profile.microbatch_sizes[0]
    layer = max(range(len(profile)), key=lambda layer: costs.backward_bytes(layer, layer + 1, size))
    needed = costs.backward_bytes(layer, layer + 1, size)
    weights, gradients = costs.weight_bytes(layer, layer + 1), costs.gradient_bytes(layer, layer + 1)
    budget = min(machine.budgets)
    device = machine.budgets.index(budget)
    cure = f"Use devices with at least {format_bytes(needed)}, or cut the layer into smaller modules."
    if needed <= budget:
        cure = "So it fits alone, but not with what else its packs need at once: see below."
    lacking = "".join(f"\n  - {one.description}: {one.reason}" for one in rejected[:6])
    return PlanDoesNotFitError(
        f"no plan fits {machine}.  The largest layer, {layer} ({profile.layers[layer].name}), needs "
        f"{format_bytes(needed)} at once for a microbatch of {size} ({format_bytes(weights)} weights, "
        f"{format_bytes(gradients)} gradients, {format_bytes(needed - weights - gradients)} activations and "
        f"temporaries); the budget of {machine.devices[device].name} is {format_bytes(budget)}.  {cure}"
        f"{lacking}",
        device=device,
        needed_bytes=needed,
        budget_bytes=budget,
    )
