"""What the command line shows: progress bars, the ranking and verdicts, as rich renderables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harmony_lab.planner.search import SearchResult
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["Check", "bar", "checks_table", "ranking_table"]

_SHOWN_PLANS = 8


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
    """The best plans, fastest first; forward and backward as packs × microbatch size."""
    table = Table(title=_tally(result), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    names = ("#", "mode", "forward", "backward", "step", "peak", "swapped", "peer", "idle")
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for rank, candidate in enumerate(result.candidates[:limit]):
        plan = candidate.plan
        table.add_row(
            str(rank),
            str(plan.mode),
            f"{len(plan.forward_packs)} × {plan.forward_microbatch_size}",
            f"{len(plan.backward_packs)} × {plan.backward_microbatch_size}",
            format_seconds(candidate.step_s),
            format_bytes(max(candidate.peak_bytes)),
            format_bytes(candidate.swap_bytes),
            format_bytes(candidate.peer_bytes),
            f"{candidate.bubble_fraction:.0%}",
        )
    return table


def _tally(result: SearchResult) -> str:
    """What became of the plans that were considered."""
    parts = (
        (result.num_bounded, "ruled out by their lower bound"),
        (result.num_skipped, "not simulated: enough were"),
        (len(result.rejected), "do not fit"),
    )
    others = "; ".join(f"{count} {what}" for count, what in parts if count)
    return f"{len(result.candidates)} plans fit and were simulated" + (f"; {others}" if others else "")


def checks_table(checks: Sequence[Check]) -> Table:
    """A row per check: what must hold, what was found."""
    table = Table(title="Verdict", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("check")
    table.add_column("found")
    table.add_column("")
    for check in checks:
        table.add_row(check.what, check.found, "[green]ok[/]" if check.holds else "[bold red]FAILED[/]")
    return table
