"""Effects: what every knob does to a plan, found by simulating the plan with that one knob at another setting."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.figures.comparison import change
from harmony_lab.figures.theme import label
from harmony_lab.notebook.knobs import Knobs, Updates, devices_text, microbatch_choices
from harmony_lab.notebook.text import Weighed, weighed
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.compose import updatable
from harmony_lab.precision import Precision
from harmony_lab.preview import Preview, can_stay
from harmony_lab.units import format_change

__all__ = ["Effect", "effects"]


class Effect(NamedTuple):
    """``"instead of 6: step −4.1%, peak ±0%, swapped +2.0%"`` for a knob that was turned; for one that was not,
    ``"with 7: ..."``, what turning it would do."""

    knob: str
    text: str


def effects(
    shown: Weighed,
    reference: Plan,
    base: Plan,
    profile: Profile,
    simulate: Callable[[Plan], Preview],
    wanted: Callable[[], bool],
    known: Callable[[Precision], bool] = lambda precision: True,
) -> Iterator[Effect]:
    """One knob after the other while they are ``wanted``.

    ``known``: whether there is a profile in that precision; one is not made for this.
    ``shown``: the plan at hand, made by turning knobs of ``base``.  ``reference``: the plan that knobs were turned
    from: a knob set otherwise there is compared with its setting there, any other with the setting beside its own.
    """
    knobs, before = Knobs.of(shown.preview.plan), Knobs.of(reference)
    for name in Knobs.__dataclass_fields__:
        if not wanted():
            return
        turned = getattr(knobs, name) != getattr(before, name)
        other = getattr(before, name) if turned else _beside(name, knobs, shown.preview.plan, profile)
        if other is None:
            yield Effect(name, "")
            continue
        if name == "precision" and not known(other):
            yield Effect(name, f"with {other}: layers are profiled in it first; turn it to see what it does")
            continue
        words = f"{'instead of' if turned else 'with'} {_setting(name, other)}"
        try:
            preview = simulate(knobs.turn(**{name: other}).apply(base, profile))
        except HarmonyError:
            yield Effect(name, f"{words}: not possible")
            continue
        alternative = weighed(preview)
        told = _difference(shown, alternative) if turned else _difference(alternative, shown)
        per = ", per sample" if name == "minibatch_size" else ""
        yield Effect(name, f"{words}{per}: {told}" + ("" if preview.fits else ", does not fit"))


def _beside(name: str, knobs: Knobs, plan: Plan, profile: Profile) -> Any:
    """A setting next to the one at hand; None where there is none to try."""
    value: Any = getattr(knobs, name)
    match name:
        case "mode":
            return Mode.PP if value is Mode.DP else Mode.DP
        case "updates":
            return Updates.END if value is Updates.EACH else Updates.EACH
        case "devices":
            return value[::-1] if len(value) > 1 else None
        case "minibatch_size":
            return value * 2
        case "forward_microbatch_size" | "backward_microbatch_size":
            choices = microbatch_choices(profile, plan.minibatch_size, value)
            place = choices.index(value)
            return choices[place - 1] if place else choices[1] if len(choices) > 1 else None
        case "num_forward_packs":
            most = plan.fused_pack.start
            return None if most < 2 else value + 1 if value < most else value - 1
        case "num_backward_packs":
            return None if plan.num_layers < 2 else value + 1 if value < plan.num_layers else value - 1
        case "num_stashed" | "num_resident_packs" | "num_kept_packs":
            possible = can_stay(plan)
            most = {
                "num_stashed": len(possible.device_stash),
                "num_resident_packs": len(possible.resident_packs),
                "num_kept_packs": len(plan.resident_packs) if possible.kept_packs else 0,
            }[name]
            return (0 if value else most) if most else None
        case "precision":
            return Precision.BF16 if value is Precision.FP32 else Precision.FP32
        case "num_device_updates":
            most = len(updatable(plan, profile))
            return (0 if value else most) if most else None
        case "mirrored" if plan.mode is Mode.DP:
            return None
        case "prefetch":
            return 0 if value else 1
        case _:
            return not value


def _setting(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "it on" if value else "it off"
    if isinstance(value, Mode):
        return label(value)
    if isinstance(value, Updates):
        return f"updates {value}"
    return devices_text(value) if isinstance(value, tuple) else str(value)


def _difference(plan: Weighed, against: Weighed) -> str:
    """Step per sample, so that minibatches of other sizes compare."""
    one, other = plan.preview.trace, against.preview.trace
    samples, before = plan.preview.plan.minibatch_size, against.preview.plan.minibatch_size
    parts = (
        ("step", one.makespan_s / samples, other.makespan_s / before),
        ("peak", max(plan.peak_bytes), max(against.peak_bytes)),
        ("swapped", one.swap_bytes / samples, other.swap_bytes / before),
    )
    same = format_change(0)
    told = {name: change(value, was)[0] or same for name, value, was in parts}
    if set(told.values()) == {same}:
        return "no difference"
    return ", ".join(f"{name} {words}" for name, words in told.items())
