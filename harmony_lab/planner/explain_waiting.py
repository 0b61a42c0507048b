"""waiting_for_gradients: what it costs that no update is made before all gradients are there, in a sentence."""

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.simulator.engine import makespan_s
from harmony_lab.units import format_change, format_seconds

__all__ = ["waiting_for_gradients"]

_NOTHING = 5e-4


def waiting_for_gradients(
    plan: Plan, step_s: float, instead: Plan, profile: Profile, machine: Machine, num_minibatches: int = 1
) -> str:
    """``step_s``: predicted of ``plan``, whose updates wait.  ``instead``: what would be done if they need not; where
    its updates wait too, the same with updates just in time.

    ``num_minibatches``: that an update is made of.  Only the one that it comes with waits; others add their gradients
    up as they come, so each is counted as if it was updated just in time.
    """
    if plan.overlapped_update:
        when = "updates come beside the next iteration's forward (update=next)"
    else:
        when = "updates come at the end of each iteration (update=end)"
    just_in_time = instead.with_(just_in_time_update=True, overlapped_update=False)
    try:
        other_s = makespan_s(lower(just_in_time, profile, machine), profile, machine)
    except HarmonyError:
        return f"{when}, on the host, instead of just in time"
    cost = (step_s / other_s - 1) / num_minibatches
    waits_s, in_time_s = step_s + (num_minibatches - 1) * other_s, num_minibatches * other_s
    step = "a step" if num_minibatches == 1 else f"a step of {num_minibatches} minibatches"
    comes_to = f"{format_seconds(waits_s)} {step} instead of {format_seconds(in_time_s)}, {format_change(cost)}"
    return (
        f"{when}, on the host, instead of just in time: {comes_to if abs(cost) >= _NOTHING else 'that costs nothing'}"
    )
