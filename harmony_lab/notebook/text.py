"""Short texts of the dashboard as HTML: notes, errors and the figures of a plan beside those of another."""

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from harmony_lab.notebook.static_files import static_text
from harmony_lab.planner.check import peak_bytes
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from harmony_lab.lab import Preview

__all__ = ["Tile", "Weighed", "error_html", "note_html", "stylesheet_html", "tiles", "tiles_html", "weighed"]


class Tile(NamedTuple):
    """One figure of a plan: what it is, its value, how it differs from the reference's, and whether that is worse."""

    name: str
    value: str
    delta: str = ""
    worse: bool | None = None


class Weighed(NamedTuple):
    """A plan, and the most bytes that any timing of it can have alive, per device."""

    preview: "Preview"
    peak_bytes: tuple[int, ...]


def weighed(preview: "Preview") -> Weighed:
    return Weighed(preview, peak_bytes(preview.program))


def tiles(plan: Weighed, reference: Weighed) -> list[Tile]:
    """Step time, throughput, peak memory, swap volume and idle share, with the change against the reference."""
    preview, peaks = plan
    trace, before = preview.trace, reference.preview.trace
    budgets = preview.program.budgets
    tightest = max(range(len(budgets)), key=lambda device: peaks[device] / budgets[device])
    return [
        Tile("step", format_seconds(trace.makespan_s), *_delta(trace.makespan_s, before.makespan_s)),
        Tile("throughput", f"{preview.plan.minibatch_size / trace.makespan_s:.3g} samples/s"),
        Tile(
            f"peak on {trace.machine.devices[tightest].name}, at most",
            f"{format_bytes(peaks[tightest])} of {format_bytes(budgets[tightest])}",
            *_delta(max(peaks), max(reference.peak_bytes)),
        ),
        Tile("swapped", format_bytes(trace.swap_bytes), *_delta(trace.swap_bytes, before.swap_bytes)),
        Tile("devices idle", f"{trace.bubble_fraction:.0%}", f"was {before.bubble_fraction:.0%}"),
    ]


def _delta(value: float, before: float) -> tuple[str, bool | None]:
    if not before:
        return ("", None) if not value else ("from nothing", True)
    change = value / before - 1
    if abs(change) < 5e-4:
        return "±0 %", None
    return f"{change:+.1%}".replace("%", " %").replace("-", "−"), change > 0


def tiles_html(shown: list[Tile], caption: str, problem: str | None) -> str:
    cells = "".join(
        f'<div class="harmony-tile"><small>{escape(tile.name)}</small><b>{escape(tile.value)}</b>'
        f"{_delta_html(tile)}</div>"
        for tile in shown
    )
    trouble = error_html(f"This plan does not fit. {problem}") if problem else ""
    return f'<div class="harmony-tiles">{cells}</div>{note_html(caption)}{trouble}'


def _delta_html(tile: Tile) -> str:
    if not tile.delta:
        return "<small>&nbsp;</small>"
    tone = {True: "harmony-worse", False: "harmony-better", None: ""}[tile.worse]
    return f'<small class="{tone}">{escape(tile.delta)}</small>'


def note_html(message: str) -> str:
    return f'<div class="harmony-note" role="status">{escape(message)}</div>' if message else ""


def error_html(message: str) -> str:
    """A user error, its lines kept."""
    return f'<div class="harmony-error" role="alert">{escape(message)}</div>' if message else ""


def stylesheet_html() -> str:
    """The dashboard's style sheet, for a widget that holds HTML."""
    return f"<style>{static_text('dashboard.css')}</style>"
