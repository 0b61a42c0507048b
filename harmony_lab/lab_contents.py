"""What there is to show of a Lab by now, for reports and for its static form."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmony_lab.units import format_bytes

if TYPE_CHECKING:
    from harmony_lab.lab import Lab

__all__ = ["contents", "fragment_html", "write_report"]


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
    if lab.only_planned:
        facts["only planned"] = lab.only_planned
    if lab.profile is None and not lab.closed:
        facts["not planned yet"] = (
            "lab.prepare() profiles and plans; in a notebook, %load_ext harmony_lab shows the dashboard in this place"
        )
    if lab.profile is not None:
        facts["costs"] = f"per layer and microbatch, on {lab.profile.device}"
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


def fragment_html(lab: "Lab") -> str:
    """The static form, to stand in a notebook's output."""
    from harmony_lab.figures.images import as_images
    from harmony_lab.figures.report import sections_html, training_sections

    return as_images(sections_html(training_sections(**contents(lab) | {"profile": None})))


def write_report(lab: "Lab", target: Path) -> Path:
    """One HTML page that opens offline."""
    from harmony_lab.figures.report import training_report

    target.write_text(training_report(**contents(lab)), encoding="utf-8")
    return target
