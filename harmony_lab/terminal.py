"""What the command line shows: progress bars, the ranking and what explains it, verdicts, as rich renderables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harmony_lab.plan import Plan
from harmony_lab.planner.explain import Ablation
from harmony_lab.planner.limits import Limits
from harmony_lab.planner.search import SearchResult
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from harmony_lab.profiler.links import LinkProbe

__all__ = [
    "Check",
    "ablation_table",
    "bar",
    "checks_table",
    "limits_table",
    "links_table",
    "ranking_table",
    "rejected_table",
]

_SHOWN_PLANS, _SHOWN_REASONS = 8, 6


class Check(NamedTuple):
    """One line of a verdict."""

    what: str
    found: str
    holds: bool


@contextmanager
def bar(console: Console, title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar; yields the callback (done, total, text) that moves it."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, text="")

        def move(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, text=text)

        yield move


def ranking_table(result: SearchResult, limit: int = _SHOWN_PLANS) -> Table:
    """The best plans, fastest first; of those with equal columns up to ``backward`` the fastest.

    Ranks are those of ``SearchResult.candidates``."""
    legend = (
        "dp: each device runs all packs on its share of the minibatch; pp: packs go round the devices.  forward, "
        "backward: packs × microbatch size.  swapped: between devices and host; peer: between devices; idle: share of "
        "the devices' time.  Ranks (#) left out are of slower plans with the same packs and microbatches as one here."
    )
    table = Table(
        title=_tally(result),
        title_justify="left",
        caption=legend,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    names = ("#", "mode", "forward", "backward", "step", "peak", "swapped", "peer", "idle")
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    shown: set[tuple[str, str, str]] = set()
    for rank, candidate in enumerate(result.candidates):
        shape = _shape(candidate.plan)
        if shape in shown or len(shown) == limit:
            continue
        shown.add(shape)
        table.add_row(
            str(rank),
            *shape,
            format_seconds(candidate.step_s),
            format_bytes(max(candidate.peak_bytes)),
            format_bytes(candidate.swap_bytes),
            format_bytes(candidate.peer_bytes),
            f"{candidate.bubble_fraction:.0%}",
        )
    return table


def _shape(plan: Plan) -> tuple[str, str, str]:
    forward = f"{len(plan.forward_packs)} × {plan.forward_microbatch_size}" if plan.forward_packs else "none"
    return str(plan.mode), forward, f"{len(plan.backward_packs)} × {plan.backward_microbatch_size}"


def _tally(result: SearchResult) -> str:
    """What became of the plans that were considered."""
    parts = (
        (result.num_bounded, "ruled out by bounds and forecasts"),
        (result.num_skipped, "not simulated: enough were"),
        (len(result.rejected), "do not fit"),
    )
    others = "; ".join(f"{count} {what}" for count, what in parts if count)
    count = len(result.candidates)
    fit = f"{count} plans fit and were simulated" if count > 1 else "1 plan fits and was simulated"
    return fit + (f"; {others}" if others else "")


def ablation_table(found: Ablation) -> Table:
    """What the plan loses without each of its switches; a row's second line says what is done instead, or why not."""
    table = Table(
        title="What each switch buys: the plan without it",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("without")
    for name in ("step", "longer", "swapped", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for switch, numbers, note in found.cells():
        table.add_row(f"{switch}\n[dim]{escape(note)}[/]" if note else switch, *numbers)
    return table


def limits_table(found: Limits) -> Table:
    """What the machine can take at most."""
    table = Table(title="Limits", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(ratio=1)
    table.add_column(ratio=2)
    for what, limit in found.rows():
        table.add_row(what, escape(limit))
    return table


def rejected_table(result: SearchResult, limit: int = _SHOWN_REASONS) -> Table:
    """Why what is not in the ranking is not possible: whole groups of plans first."""
    table = Table(title="Not possible", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(ratio=1)
    table.add_column(ratio=2)
    groups = [rejected for rejected in result.rejected if "=" not in rejected.description]
    for rejected in groups[:limit]:
        table.add_row(escape(rejected.description), escape(rejected.reason))
    if len(groups) > limit:
        table.add_row(f"and {len(groups) - limit} more such", "")
    single = [rejected for rejected in result.rejected if "=" in rejected.description]
    if single:
        count = f"{len(single)} plans, such as one in {single[0].description.split()[0]}"
        table.add_row("one plan" if len(single) == 1 else count, escape(single[0].reason))
    if not result.rejected:
        table.add_row("nothing that was tried", "all of it fits")
    return table


def links_table(probe: "LinkProbe") -> Table:
    """The rate of every copy that was measured."""
    table = Table(title="Links", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("copy", "", "host memory"):
        table.add_column(name)
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column("data")
    for cells in probe.rows():
        table.add_row(*map(escape, cells))
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """A row per check: what must hold, what was found."""
    table = Table(title="Verdict", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("check")
    table.add_column("found")
    table.add_column("")
    for check in checks:
        table.add_row(check.what, check.found, "[green]ok[/]" if check.holds else "[bold red]FAILED[/]")
    return table
