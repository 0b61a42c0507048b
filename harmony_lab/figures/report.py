"""Reports: one HTML page with everything about a plan and its run, readable offline and without scripts."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.figures.svg import links_svg, loss_svg, memory_svg, swaps_svg, timeline_svg
from harmony_lab.figures.tables import candidates_html, facts_html, profile_html, traces_html
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.trace import Trace

if TYPE_CHECKING:
    import pandas

__all__ = ["Section", "report_html", "sections_html", "training_report", "training_sections"]

_LIGHT: Final = "--hl-surface:#fff;--hl-ink:#3a4048;--hl-grid:#dde1e6"
_DARK: Final = "--hl-surface:#1a1e24;--hl-ink:#c9ced6;--hl-grid:#343a43"
_STYLE: Final = f"""
:root {{ color-scheme: light dark; --page: #f5f6f8; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #111418; {_DARK} }} }}
body {{ margin: 0 auto; padding: 24px 16px 64px; max-width: 960px; background: var(--page); color: var(--hl-ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 24px; }} h2 {{ font-size: 17px; margin: 32px 0 8px; }}
section {{ overflow-x: auto; }} svg {{ display: block; margin: 8px 0 14px; }}
table {{ border-collapse: collapse; background: var(--hl-surface); font-size: 13px; }}
td {{ font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--hl-grid); white-space: nowrap; }}
th {{ font-weight: 600; }} th:first-child, td:first-child {{ text-align: left; }}
table.facts th, table.facts td {{ text-align: left; white-space: normal; }}
pre {{ padding: 10px 12px; background: var(--hl-surface); border-radius: 6px; white-space: pre-wrap; }}
"""


class Section(NamedTuple):
    """A heading (plain text) and HTML below it."""

    title: str
    html: str


def report_html(title: str, sections: Sequence[Section]) -> str:
    """A self-contained page; light or dark as the reader's system is."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>\n" for name, html in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def training_report(
    *,
    profile: Profile | None,
    machine: Machine,
    result_frame: "pandas.DataFrame | None",
    plan: Plan | None,
    predicted: Trace | None,
    measured: Trace | None,
    losses: Sequence[float],
    facts: Mapping[str, str],
) -> str:
    """The page of one model on one machine; what is not there yet is left out.  ``facts`` come first."""
    sections = training_sections(
        profile=profile,
        machine=machine,
        result_frame=result_frame,
        plan=plan,
        predicted=predicted,
        measured=measured,
        losses=losses,
        facts=facts,
    )
    name = f"{profile.model} on {machine.name}" if profile else machine.name
    return report_html(f"Training {name}", sections)


def sections_html(sections: Sequence[Section]) -> str:
    """The sections as a fragment, to stand in a notebook's output."""
    return "".join(f"<h4>{escape(name)}</h4>{html}" for name, html in sections)


def training_sections(
    *,
    profile: Profile | None,
    machine: Machine,
    result_frame: "pandas.DataFrame | None",
    plan: Plan | None,
    predicted: Trace | None,
    measured: Trace | None,
    losses: Sequence[float],
    facts: Mapping[str, str],
) -> list[Section]:
    """What ``training_report`` shows, in order; arguments as there."""
    sections = [Section("Summary", facts_html({**facts, "machine": str(machine)}))]
    traces = [trace for trace in (predicted, measured) if trace is not None]
    if traces:
        sections.append(Section("One iteration", traces_html(traces)))
    if plan is not None:
        sections.append(Section("Plan", plan._repr_html_()))
    if losses:
        sections.append(Section("Loss", loss_svg(losses)))
    if traces:
        until_s = max(trace.makespan_s for trace in traces)
        pictures = "".join(timeline_svg(trace, until_s=until_s) for trace in traces)
        sections.append(Section("Timeline", pictures))
        sections.append(Section("Memory", "".join(memory_svg(trace) for trace in traces)))
        sections.append(Section("Links", links_svg(traces[-1])))
        sections.append(Section("Swap volume", swaps_svg(traces[-1])))
    if result_frame is not None:
        sections.append(Section("Candidates", candidates_html(result_frame)))
    if profile is not None:
        sections.append(Section("Layers", profile_html(profile)))
    return sections
