"""What is verified: what a Trainer trains, or, where the host has no room for copies of it, a shortened model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from torch import nn

from harmony_lab.costs import Profile
from harmony_lab.errors import HostMemoryError
from harmony_lab.forecast import Forecast, forecast
from harmony_lab.layers import LayerSequence
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.program import Program
from harmony_lab.runtime.ordering import updating_after
from harmony_lab.shortened import kept_layers, shortened, shortened_plan, shortened_profile
from harmony_lab.verification import Subject, require_memory

__all__ = ["fitting", "step_bytes"]


def step_bytes(expected: Forecast, layers: LayerSequence, profile: Profile, microbatch_size: int) -> int:
    """Of the host's memory, what a step takes here beside weights and state, and plain activations."""
    emulated_and_kept = expected.host_bytes - expected.weight_bytes - expected.optimizer_state_bytes
    return emulated_and_kept + layers.trainable_bytes + profile.activation_bytes(microbatch_size)


def fitting(subject: Subject, profile: Profile, shorten: bool | None, waiting: Mapping[str, bool]) -> Subject:
    """The subject, shortened where that is asked for or, with None, where the host has no room for copies of it; as it
    is where nothing can be left out.

    ``waiting``: of its programs, see ``updating_after``.
    """
    if shorten is None:
        try:
            require_memory(subject)
        except HostMemoryError:
            shorten = True
    kept = kept_layers(subject.layers) if shorten else tuple(range(len(subject.layers)))
    return subject if len(kept) == len(subject.layers) else _shortened(subject, profile, kept, waiting)


def _shortened(subject: Subject, profile: Profile, kept: tuple[int, ...], waiting: Mapping[str, bool]) -> Subject:
    layers = shortened(subject.layers, kept, nn.Module())
    plan = shortened_plan(subject.plan, kept)
    costs = shortened_profile(profile, layers, kept)

    @cache
    def program(minibatch_size: int) -> Program:
        whole = minibatch_size == plan.minibatch_size
        planned = (plan if whole else plan.for_minibatch(minibatch_size)).with_(overlapped_update=False)
        made = updating_after(lower(planned, costs, subject.machine), **waiting)
        check(made)
        return made

    expected = forecast(program(plan.minibatch_size), layers, subject.optimizer, costs, subject.machine)
    return replace(
        subject,
        layers=layers,
        plan=plan,
        lower=program,
        step_bytes=step_bytes(expected, layers, costs, plan.backward_microbatch_size),
        optimizer_state_bytes=expected.optimizer_state_bytes,
        shortened_from=len(subject.layers),
    )
