"""Comparison: two plans side by side, in figures on the same axes and in a table of what differs."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from harmony_lab.figures.critical import critical_path
from harmony_lab.figures.images import as_images, plan_html
from harmony_lab.figures.memory import memory_spec
from harmony_lab.figures.spec import Spec
from harmony_lab.figures.svg import memory_svg, timeline_svg
from harmony_lab.figures.tables import table_html
from harmony_lab.figures.theme import label
from harmony_lab.figures.timeline import timelines_spec
from harmony_lab.machine import HOST
from harmony_lab.program import TensorKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_change, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Comparison",
    "Row",
    "Side",
    "change",
    "comparison_html",
    "comparison_memory_specs",
    "comparison_rows",
    "comparison_timeline_spec",
]

_TIMES_FROM = 9.0  # a change is told as a factor from ten times on


class Side(NamedTuple):
    """One of the two: what it is called, its plan's text, its iteration, and the most alive per device at any
    timing."""

    name: str
    plan: str
    trace: Trace
    peak_bytes: tuple[int, ...]

    @property
    def samples_per_s(self) -> float:
        return self.trace.program.minibatch_size / self.trace.makespan_s if self.trace.makespan_s else 0.0


class Row(NamedTuple):
    """One figure of both; ``worse``: whether B is worse than A, None where neither is better."""

    what: str
    a: str
    b: str
    change: str
    worse: bool | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Two plans; shows the table and, in a notebook, the pictures on the same axes."""

    a: Side
    b: Side

    def to_frame(self) -> "pandas.DataFrame":
        """A row per figure: that of A, that of B, and the change."""
        import pandas

        rows = comparison_rows(self.a, self.b)
        columns = {f"A: {self.a.name}": [r.a for r in rows], f"B: {self.b.name}": [r.b for r in rows]}
        return pandas.DataFrame(columns | {"B against A": [r.change for r in rows]}, index=[r.what for r in rows])

    def __repr__(self) -> str:
        head = Row("", f"A: {self.a.name}", f"B: {self.b.name}", "B against A", None)
        rows = [row[:4] for row in (head, *comparison_rows(self.a, self.b))]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _repr_html_(self) -> str:
        return comparison_html(self.a, self.b)


def change(value: float, before: float, *, more_is_worse: bool = True) -> tuple[str, bool | None]:
    """``("+4.1%", True)``: by how much a value differs from the one before, and whether that is worse."""
    if not before:
        return ("", None) if not value else ("from nothing", more_is_worse)
    share = value / before - 1
    words = format_change(share)
    if words == format_change(0):
        return words, None
    if share >= _TIMES_FROM:
        return f"× {value / before:,.0f}", more_is_worse
    return words, (share > 0) is more_is_worse


def comparison_rows(a: Side, b: Side) -> list[Row]:
    """Step time, throughput, peaks, traffic by tensor kind, idle share and the critical path.

    Where the minibatches differ, time and traffic are told per sample.
    """
    one, other = a.trace, b.trace
    size, other_size = one.program.minibatch_size, other.program.minibatch_size
    differ = size != other_size

    def amount(what: str, value: float, other_value: float, words: Callable[[float], str]) -> Row:
        if not differ:
            return _row(what, value, other_value, words)
        return _row(f"{what}, per sample", value / size, other_value / other_size, words)

    rows = [
        *([Row("minibatch", f"{size} samples", f"{other_size} samples", "", None)] if differ else []),
        amount("step", one.makespan_s, other.makespan_s, format_seconds),
        _row("throughput", a.samples_per_s, b.samples_per_s, _samples, more_is_worse=False),
        _row("peak of a device, at most", max(a.peak_bytes), max(b.peak_bytes), format_bytes),
        _points("devices idle", one.bubble_fraction, other.bubble_fraction),
        amount("swapped in all", one.swap_bytes, other.swap_bytes, format_bytes),
    ]
    for kind in TensorKind:
        both = _swapped(one, kind), _swapped(other, kind)
        if any(both):
            rows.append(amount(f"swapped: {label(kind)}", *both, format_bytes))
    if one.peer_bytes or other.peer_bytes:
        rows.append(amount("between devices", one.peer_bytes, other.peer_bytes, format_bytes))
    rows.append(Row("critical path", critical_path(one).words(), critical_path(other).words(), "", None))
    return rows


def _row(what: str, a: float, b: float, words: Callable[[float], str], *, more_is_worse: bool = True) -> Row:
    return Row(what, words(a), words(b), *change(b, a, more_is_worse=more_is_worse))


def _swapped(trace: Trace, kind: TensorKind) -> int:
    moved = trace.moved_bytes.items()
    return sum(n for (source, destination, k), n in moved if k is kind and HOST in (source, destination))


def _points(what: str, a: float, b: float) -> Row:
    """Shares; their difference in points of a hundred, for a percentage of percentages would mislead."""
    points = round(100 * b) - round(100 * a)
    words = f"{points:+d} {'point' if abs(points) == 1 else 'points'}".replace("-", "−") if points else "±0 points"
    return Row(what, f"{a:.0%}", f"{b:.0%}", words, points > 0 if points else None)


def _samples(per_s: float) -> str:
    return f"{per_s:.3g} samples/s"


def comparison_timeline_spec(a: Side, b: Side) -> Spec:
    """Both timelines, A above B, on one time axis."""
    return timelines_spec(f"A: {a.name}, above B: {b.name}", [("A", a.trace), ("B", b.trace)])


def comparison_memory_specs(a: Side, b: Side, *, left: int = 80) -> tuple[Spec, Spec]:
    """The memory of either, with the same axes."""
    until_s = max(a.trace.makespan_s, b.trace.makespan_s)
    most = max(*a.trace.peak_bytes, *b.trace.peak_bytes, *a.trace.program.budgets, *b.trace.program.budgets)
    one, other = (
        memory_spec(side.trace, left=left, name=f"{letter}: {side.name}", until_s=until_s, most_bytes=most)
        for letter, side in zip("AB", (a, b), strict=True)
    )
    return one, other


def comparison_html(a: Side, b: Side) -> str:
    """The table and the pictures, static."""
    until_s = max(a.trace.makespan_s, b.trace.makespan_s)
    rows = [[row.what, row.a, row.b, row.change] for row in comparison_rows(a, b)]
    table = table_html(["", f"A: {a.name}", f"B: {b.name}", "B against A"], rows)
    plans = "".join(plan_html(f"{letter}: {side.plan}") for letter, side in zip("AB", (a, b), strict=True))
    pictures = "".join(
        f"<h4>{letter}: {escape(side.name)}</h4>{timeline_svg(side.trace, until_s=until_s)}{memory_svg(side.trace)}"
        for letter, side in zip("AB", (a, b), strict=True)
    )
    return f"{plans}{table}{as_images(pictures)}"
