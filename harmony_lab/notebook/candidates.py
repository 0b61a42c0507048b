"""The candidates of a search as a table of which one row is chosen."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from harmony_lab.notebook.static_files import static_text
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["NONE_CHOSEN", "CandidateTable", "candidate_rows"]

NONE_CHOSEN = -1
# Packs are shown as how many there are × the size of their microbatches.
COLUMNS = ("rank", "mode", "forward packs", "backward packs", "step", "samples/s", "peak, at most", "swapped", "idle")


def candidate_rows(frame: "pandas.DataFrame", most: int) -> list[list[str]]:
    """The best ``most`` rows of a ranking (``SearchResult.to_frame``) as texts, parallel to ``COLUMNS``."""
    return [_row(row) for row in frame.head(most).to_dict("records")]


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
    ]


def _packs(count: int, microbatch_size: int) -> str:
    return f"{count} × {microbatch_size}" if count else "none"


class CandidateTable(anywidget.AnyWidget):
    """``selected`` is the chosen row, ``NONE_CHOSEN`` when the plan at hand is none of them."""

    _esm = static_text("table.js")
    _css = static_text("table.css")
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    rows = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    selected = traitlets.Int(NONE_CHOSEN).tag(sync=True)

    def __init__(self, on_choice: Callable[[int], None]) -> None:
        super().__init__(columns=list(COLUMNS))
        self._on_choice = on_choice
        self._marked = NONE_CHOSEN
        self.observe(self._selected, "selected")

    def mark(self, index: int) -> None:
        """Show that row as chosen, without calling ``on_choice``."""
        self._marked = index
        self.selected = index

    def _selected(self, change: Any) -> None:
        if change["new"] != self._marked:
            self._marked = change["new"]
            self._on_choice(self._marked)
