"""The dashboard's head: the model, what its training needs, what the machine has, and what binds."""

from html import escape
from typing import TYPE_CHECKING

from harmony_lab.costs import Profile
from harmony_lab.precision import Precision
from harmony_lab.units import format_bytes

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["header_html"]


def header_html(lab: "Lab") -> str:
    model = escape(repr(lab.layers).removeprefix("LayerSequence of "))
    lines = [f"<p>{escape(str(lab.machine))}; host memory {format_bytes(lab.machine.host.memory_bytes)}</p>"]
    if lab.only_planned:
        lines.append(f'<p class="harmony-planned">{escape(lab.only_planned)}</p>')
    profile, result = lab.profile, lab.result
    if profile is not None:
        lines.insert(0, f"<p>{_footprint(profile, lab)}</p>")
    if result is not None:
        binds, dot, rest = escape(result.explain()).partition(". ")
        lines.append(f"<p><b>{binds}{dot}</b>{rest}</p>")
    return f'<div class="harmony-header"><h3>{model}</h3>{"".join(lines)}</div>'


def _footprint(profile: Profile, lab: "Lab") -> str:
    state, devices = profile.state_bytes, sum(lab.machine.budgets)
    activations = profile.activation_bytes(lab.minibatch_size)
    ratio = state / devices
    size = f"{ratio:.1f} times what" if ratio >= 1 else f"{ratio:.0%} of what"
    host = state / lab.machine.host.memory_bytes
    on_host = f"{host:.1f} times" if host >= 1 else f"{host:.0%} of" if host >= 0.01 else "less than 1% of"
    also = "" if profile.precision is Precision.FP32 else f", in fp32 and {profile.precision}"
    return (
        f"Training state (weights{also}, gradients, optimizer) <b>{format_bytes(state)}</b>, {size} the devices hold "
        f"together ({format_bytes(devices)}) and {on_host} the host's memory; activations of a minibatch of "
        f"{lab.minibatch_size}, all kept: "
        f"{format_bytes(activations)}"
    )
