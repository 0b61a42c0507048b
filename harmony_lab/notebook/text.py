"""Short texts of the dashboard as HTML: notes, errors and the figures of a plan beside those of another."""

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from harmony_lab.errors import HarmonyError
from harmony_lab.figures.comparison import Side, change
from harmony_lab.notebook.static_files import static_text
from harmony_lab.planner.check import peak_bytes
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from harmony_lab.lab import Preview

__all__ = [
    "Tile",
    "Weighed",
    "effect_html",
    "error_html",
    "error_words",
    "note_html",
    "side",
    "stylesheet_html",
    "tiles",
    "tiles_html",
    "weighed",
]


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


def side(name: str, plan: "Preview | Weighed") -> Side:
    """A plan as one side of a comparison."""
    preview, peaks = plan if isinstance(plan, Weighed) else weighed(plan)
    return Side(name, str(preview.plan), preview.trace, peaks)


def tiles(plan: Weighed, reference: Weighed) -> list[Tile]:
    """Step time, throughput, peak memory, swap volume and idle share, with the change against the reference; that of
    step and swap volume per sample where the minibatches differ.
    """
    preview, peaks = plan
    trace, before = preview.trace, reference.preview.trace
    samples, samples_before = preview.plan.minibatch_size, reference.preview.plan.minibatch_size
    pace, pace_before = samples / trace.makespan_s, samples_before / before.makespan_s
    budgets = preview.program.budgets
    tightest = max(range(len(budgets)), key=lambda device: peaks[device] / budgets[device])
    return [
        Tile(
            "step",
            format_seconds(trace.makespan_s),
            *_change_per_sample((trace.makespan_s, samples), (before.makespan_s, samples_before)),
        ),
        Tile("throughput", f"{pace:.3g} samples/s", *change(pace, pace_before, more_is_worse=False)),
        Tile(
            f"peak on {trace.machine.devices[tightest].name}, at most",
            f"{format_bytes(peaks[tightest])} of {format_bytes(budgets[tightest])}",
            *change(max(peaks), max(reference.peak_bytes)),
        ),
        Tile(
            "swapped",
            format_bytes(trace.swap_bytes),
            *_change_per_sample((trace.swap_bytes, samples), (before.swap_bytes, samples_before)),
        ),
        Tile("devices idle", f"{trace.bubble_fraction:.0%}", f"was {before.bubble_fraction:.0%}"),
    ]


def _change_per_sample(one: tuple[float, int], before: tuple[float, int]) -> tuple[str, bool | None]:
    """As ``change``, of (what a minibatch takes, samples in it); per sample, and it is said, where those differ."""
    (value, samples), (value_before, samples_before) = one, before
    if samples == samples_before:
        return change(value, value_before)
    words, worse = change(value / samples, value_before / samples_before)
    return f"{words} per sample" if words else "", worse


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


def effect_html(message: str) -> str:
    """What a knob does, below it."""
    return f'<div class="harmony-effect">{escape(message)}</div>' if message else ""


def note_html(message: str) -> str:
    return f'<div class="harmony-note" role="status">{escape(message)}</div>' if message else ""


def error_html(message: str) -> str:
    """A user error, its lines kept."""
    return f'<div class="harmony-error" role="alert">{escape(message)}</div>' if message else ""


def error_words(error: Exception) -> str:
    """Ours as they are: they say what to do; others with their kind."""
    return str(error) if isinstance(error, HarmonyError) else f"{type(error).__name__}: {error}"


def stylesheet_html() -> str:
    """The dashboard's style sheet, for a widget that holds HTML."""
    return f"<style>{static_text('dashboard.css')}</style>"
