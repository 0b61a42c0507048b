"""The candidates of a search as a table of which one row is chosen, with baselines below them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anywidget
import traitlets

from harmony_lab.machine import Machine
from harmony_lab.notebook.baselines_elsewhere import Told
from harmony_lab.notebook.static_files import static_text
from harmony_lab.plan import Mode
from harmony_lab.planner.result import Candidate
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = [
    "LEGEND",
    "NONE_CHOSEN",
    "CandidateTable",
    "Line",
    "baseline_line",
    "candidate_lines",
    "pending_line",
]

NONE_CHOSEN = -1
COLUMNS = (
    "rank",
    "mode",
    "forward packs",
    "backward packs",
    "step",
    "samples/s",
    "peak, at most",
    "swapped",
    "idle",
    "gap",
)


LEGEND = (
    "A pack is consecutive layers that move to a device together; 6 × 3: six packs, run on three samples at once. dp: "
    "every device runs all packs on its share of the minibatch; pp: packs go round the devices. Step: one minibatch. "
    "Swapped: between devices and host. Idle: of the devices' time. Gap: above a bound that no plan beats. Below the "
    "plans, for comparison: what one would have without them."
)


class Line(NamedTuple):
    """A row of the table: texts and what they are sorted by, parallel to ``COLUMNS``, and what a pointer over it
    tells."""

    texts: list[str]
    values: Sequence[float | None]
    title: str


def candidate_lines(frame: "pandas.DataFrame", candidates: Iterable[Candidate]) -> list[Line]:
    """A ranking; ``frame``: as ``SearchResult.to_frame`` gives it."""
    return [
        Line(_row(row), _values(row), f"peaks, at most: {_peaks_text(candidate.peak_bytes, candidate.machine)}")
        for row, candidate in zip(frame.to_dict("records"), candidates, strict=True)
    ]


def baseline_line(told: Told, machine: Machine, minibatch_size: int, bound_s: float) -> Line:
    """A baseline, or why there is none.  ``bound_s``: what the gap is from; 0 where there is none."""
    if not told.step_s:
        return Line(["–", told.name, *["–"] * (len(COLUMNS) - 2)], [None] * len(COLUMNS), told.text)
    gap = told.step_s / bound_s - 1 if bound_s else None
    pace, peak = minibatch_size / told.step_s, max(told.peak_bytes)
    texts = [
        *("–", told.name, "–", "–"),
        format_seconds(told.step_s),
        f"{pace:.3g}",
        format_bytes(peak),
        format_bytes(told.swap_bytes),
        f"{told.bubble_fraction:.0%}",
        "–" if gap is None else f"{gap:.0%}",
    ]
    values = [None, None, None, None, told.step_s, pace, peak, told.swap_bytes, told.bubble_fraction, gap]
    return Line(texts, values, f"{told.text}; peaks, at most: {_peaks_text(told.peak_bytes, machine)}")


def pending_line(name: str) -> Line:
    """A baseline that is not known yet."""
    return Line(["–", name, *["…"] * (len(COLUMNS) - 2)], [None] * len(COLUMNS), "being worked out")


def _peaks_text(peaks: Sequence[int], machine: Machine) -> str:
    """``"gpu0 3.10 GiB, gpu1 2.95 GiB"``."""
    return ", ".join(f"{device.name} {format_bytes(peak)}" for device, peak in zip(machine.devices, peaks, strict=True))


def _values(row: dict[Any, Any]) -> list[float | None]:
    names = ("num_forward_packs", "num_backward_packs", "step_s", "samples_per_s", "peak_bytes", "swap_bytes")
    return [
        float(row["rank"]),
        float(list(Mode).index(Mode(row["mode"]))),
        *(float(row[name]) for name in names),
        float(row["bubble_fraction"]),
        float(row["gap"]),
    ]


def _row(row: dict[Any, Any]) -> list[str]:
    return [
        str(row["rank"]),
        str(row["mode"]),
        _packs(row["num_forward_packs"], row["forward_microbatch_size"]),
        _packs(row["num_backward_packs"], row["backward_microbatch_size"]),
        format_seconds(row["step_s"]),
        f"{row['samples_per_s']:.3g}",
        format_bytes(row["peak_bytes"]),
        format_bytes(row["swap_bytes"]),
        f"{row['bubble_fraction']:.0%}",
        f"{row['gap']:.0%}",
    ]


def _packs(count: int, microbatch_size: int) -> str:
    return f"{count} × {microbatch_size}" if count else "none"


class CandidateTable(anywidget.AnyWidget):
    """``selected`` is the chosen row, ``NONE_CHOSEN`` when the plan at hand is none of them.

    ``values``, parallel to ``rows``: what the page sorts by, None last.  ``titles``, too: what a pointer over a row is
    told.  The first ``num_choices`` rows can be chosen, baselines below them cannot.
    """

    _esm = static_text("table.js")
    _css = static_text("table.css")
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    rows = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    values = traitlets.List(traitlets.List(traitlets.Float(allow_none=True))).tag(sync=True)
    titles = traitlets.List(traitlets.Unicode()).tag(sync=True)
    num_choices = traitlets.Int(0).tag(sync=True)
    selected = traitlets.Int(NONE_CHOSEN).tag(sync=True)

    def __init__(self, on_choice: Callable[[int], None]) -> None:
        super().__init__(columns=list(COLUMNS))
        self._on_choice = on_choice
        self._marked = NONE_CHOSEN
        self.observe(self._selected, "selected")

    def show(self, candidates: Sequence[Line], baselines: Sequence[Line] = ()) -> None:
        """A ranking, and what it is compared with."""
        lines = [*candidates, *baselines]
        with self.hold_sync():
            self.num_choices = len(candidates)
            self.titles = [line.title for line in lines]
            self.values = [list(line.values) for line in lines]
            self.rows = [line.texts for line in lines]

    def mark(self, index: int) -> None:
        """Show that row as chosen, without calling ``on_choice``."""
        self._marked = index
        self.selected = index

    def _selected(self, change: Any) -> None:
        if change["new"] != self._marked:
            self._marked = change["new"]
            self._on_choice(self._marked)
