"""What training takes on a machine: measured where its devices are at hand, else estimated."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harmony_lab.costs import Profile
from harmony_lab.forecast import Forecast, forecast
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Backend, Machine
from harmony_lab.planner.lower import lower
from harmony_lab.precision import Precision
from harmony_lab.preview import Preview
from harmony_lab.profiler.estimate import estimate
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.steps import ProgressCallback
from harmony_lab.program import Program
from harmony_lab.roles import Role
from harmony_lab.schedules import forecast_of_several
from harmony_lab.training_plan import plan_as

if TYPE_CHECKING:
    import torch

__all__ = ["costs_on", "forecast_on", "why_only_planned"]


def why_only_planned(layers: LayerSequence, machine: Machine) -> str:
    """Why nothing can be measured or trained there, in a sentence; empty where it can."""
    what = "costs are estimated from data sheets instead of measured, and plans can be looked at but not launched"
    if any(tensor.is_meta for tensor in layers.tensors.values()):
        return f"The model is on the meta device, without data: {what}."
    if not _at_hand(machine):
        return f"{machine.name} is not at hand: {what}."
    return ""


def _at_hand(machine: Machine) -> bool:
    """Whether torch sees all its devices here: so many GPUs, of these models."""
    real = [device for device in machine.devices if device.backend is Backend.CUDA]
    if not real:
        return True
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return all(
        device.ordinal < present and device.model in ("", torch.cuda.get_device_name(device.ordinal)) for device in real
    )


def costs_on(
    layers: LayerSequence,
    machine: Machine,
    optimizer: "torch.optim.Optimizer | None",
    *,
    precision: Precision,
    minibatch_size: int,
    cache: bool,
    progress: ProgressCallback,
) -> Profile:
    """The profile, measured or estimated; ``cache``: as in ``profile``."""
    given: dict[str, Any] = {"precision": precision, "minibatch_size": minibatch_size, "progress": progress}
    if why_only_planned(layers, machine):
        return estimate(layers, machine, optimizer, **given)
    return profile(layers, machine, optimizer, cache=cache, **given)


def forecast_on(
    machine: Machine,
    chosen: Preview,
    layers: LayerSequence,
    optimizer: "torch.optim.Optimizer",
    costs: Profile,
    *,
    accumulate: int = 1,
) -> Forecast:
    """``forecast``; of a machine that is not at hand, against its own host's memory, with nothing present yet."""

    def lowered(role: Role) -> Program:
        return lower(plan_as(role, chosen.plan), costs, machine, allow_overrun=True)

    if accumulate == 1:
        found = forecast(chosen.program, layers, optimizer, costs, machine)
    else:
        found = forecast_of_several(lowered, chosen.plan, layers, optimizer, costs, machine)
    if why_only_planned(layers, machine):
        return replace(found, present_bytes=0, available_bytes=machine.host.memory_bytes)
    return found
