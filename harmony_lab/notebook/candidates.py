"""The candidates of a search as a table of which one row is chosen."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from harmony_lab.notebook.static_files import static_text
from harmony_lab.plan import Mode
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["LEGEND", "NONE_CHOSEN", "CandidateTable", "candidate_rows", "candidate_values"]

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
    "Swapped: between devices and host. Idle: of the devices' time. Gap: above a bound that no plan beats."
)


def candidate_rows(frame: "pandas.DataFrame", most: int) -> list[list[str]]:
    """The best ``most`` rows of a ranking (``SearchResult.to_frame``) as texts, parallel to ``COLUMNS``."""
    return [_row(row) for row in frame.head(most).to_dict("records")]


def candidate_values(frame: "pandas.DataFrame", most: int) -> list[list[float]]:
    """What ``candidate_rows`` are sorted by, parallel to them."""
    return [_values(row) for row in frame.head(most).to_dict("records")]


def _values(row: dict[Any, Any]) -> list[float]:
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

    ``values``, parallel to ``rows``: what the page sorts by.
    """

    _esm = static_text("table.js")
    _css = static_text("table.css")
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    rows = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    values = traitlets.List(traitlets.List(traitlets.Float())).tag(sync=True)
    selected = traitlets.Int(NONE_CHOSEN).tag(sync=True)

    def __init__(self, on_choice: Callable[[int], None]) -> None:
        super().__init__(columns=list(COLUMNS))
        self._on_choice = on_choice
        self._marked = NONE_CHOSEN
        self.observe(self._selected, "selected")

    def show(self, frame: "pandas.DataFrame", most: int) -> None:
        """The best ``most`` rows of a ranking."""
        with self.hold_sync():
            self.values = candidate_values(frame, most)
            self.rows = candidate_rows(frame, most)

    def mark(self, index: int) -> None:
        """Show that row as chosen, without calling ``on_choice``."""
        self._marked = index
        self.selected = index

    def _selected(self, change: Any) -> None:
        if change["new"] != self._marked:
            self._marked = change["new"]
            self._on_choice(self._marked)
