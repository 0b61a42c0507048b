"""What there is to show of a Lab by now, for reports and for its static form."""

from typing import TYPE_CHECKING, Any

from harmony_lab.units import format_bytes

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["contents"]


def contents(lab: "Lab") -> dict[str, Any]:
    """Arguments of ``figures.report.training_sections``."""
    preview, run, result = lab.chosen, lab.run, lab.result
    return {
        "profile": lab.profile,
        "machine": lab.machine,
        "result_frame": None if result is None else result.to_frame(),
        "plan": None if preview is None else preview.plan,
        "predicted": None if preview is None else preview.trace,
        "measured": None if run is None or preview is None or run.plan != preview.plan else run.trace,
        "losses": () if run is None else run.losses,
        "facts": _facts(lab),
    }


def _facts(lab: "Lab") -> dict[str, str]:
    facts = {"model": repr(lab.layers), "minibatch": str(lab.minibatch_size)}
    if lab.profile is not None:
        facts["training state"] = (
            f"{format_bytes(lab.profile.state_bytes)} of weights, gradients and optimizer state, without "
            f"activations; the devices together hold {format_bytes(sum(lab.machine.budgets))}"
        )
    if lab.chosen is not None and lab.chosen.problem is not None:
        facts["does not fit"] = lab.chosen.problem
    if lab.result is not None:
        facts["best plan"] = lab.result.explain()
    if lab.run is not None:
        facts["run"] = str(lab.run)
    return facts
