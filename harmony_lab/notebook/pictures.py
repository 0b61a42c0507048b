"""The pictures of a plan: timeline and memory, links, swap volume, candidates, and what was measured."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from harmony_lab.figures.candidates import candidates_spec
from harmony_lab.figures.link_load import link_load_spec
from harmony_lab.figures.memory import memory_spec
from harmony_lab.figures.swaps import candidate_swap_spec, swap_spec
from harmony_lab.figures.timeline import TIMELINE_LEFT, compare_spec, timeline_spec
from harmony_lab.figures.utilisation import utilisation_spec
from harmony_lab.notebook.plot import Plot
from harmony_lab.notebook.text import note_html
from harmony_lab.notebook.weak import weakly
from harmony_lab.trace import Trace

if TYPE_CHECKING:
    import pandas

__all__ = ["Pictures"]

_LANES = (
    "Swap in and out: weights and gradients, between host and device. Values: activations and their gradients, a "
    "microbatch at a time. Peer: from device to device. Drag across a picture to zoom both, double-click to see all; a "
    "pointer over a bar tells layers, samples, bytes and times."
)
Submit = Callable[[str, Callable[[], None]], None]


class Pictures:
    """Tabs of figures, drawn when they are looked at; any thread may call the ``show`` methods.

    ``submit(name, task)`` runs a task on another thread: drawing a tab that was opened.  ``candidate_traces``: the best
    candidates' names and predicted iterations.  ``on_pick`` is told the rank of a candidate that is clicked.
    ``more``: further tabs by title, with what draws them.
    """

    def __init__(
        self,
        submit: Submit,
        candidate_traces: Callable[[], tuple[Sequence[str], Sequence[Trace]]],
        on_pick: Callable[[int], None],
        more: Sequence[tuple[str, Any, Callable[[], None]]] = (),
    ) -> None:
        self._submit = submit
        self._candidate_traces = candidate_traces
        self._lock = threading.Lock()
        self._trace: Trace | None = None
        self._peak_bytes = 0
        self._frame: pandas.DataFrame | None = None
        self._swaps_of: pandas.DataFrame | None = None  # the candidates whose swap volume is drawn
        self._measured: tuple[Trace, Trace] | None = None
        self.timeline, self.memory = Plot(), Plot()
        self.links, self.utilisation = Plot(), Plot()
        self.swaps, self.candidate_swaps = Plot(), Plot()
        self.candidates = Plot(on_pick=on_pick)
        self.measured = Plot()
        self._unmeasured = ipywidgets.HTML("Launch the plan to see what was measured beside what was predicted.")
        pick = ipywidgets.HTML(note_html("A click on a plan takes it. The table above has the same plans."))
        lanes = ipywidgets.HTML(note_html(_LANES))
        tabs = [
            ("Timeline", ipywidgets.VBox([self.timeline, lanes, self.memory]), self._draw_plan),
            ("Links", ipywidgets.VBox([self.links, self.utilisation]), self._draw_links),
            ("Swaps", ipywidgets.VBox([self.swaps, self.candidate_swaps]), self._draw_swaps),
            ("Candidates", ipywidgets.VBox([self.candidates, pick]), self._draw_candidates),
            *more,
            ("Measured", ipywidgets.VBox([self._unmeasured, self.measured]), self._draw_measured),
        ]
        self._titles = [title for title, _, _ in tabs]
        self._draw = {title: draw for title, _, draw in tabs}
        self._stale: set[str] = set()
        self.view = ipywidgets.Tab([view for _, view, _ in tabs], titles=self._titles, selected_index=0)
        self.view.observe(weakly(self._opened), "selected_index")

    # -- what there is to draw --------------------------------------------------------------------------------------

    def show_plan(self, trace: Trace, peak_bytes: int) -> None:
        """``peak_bytes``: the most of any device, at any timing."""
        self._trace, self._peak_bytes = trace, peak_bytes
        self.outdate("Timeline", "Links", "Swaps", "Candidates")

    def show_candidates(self, frame: "pandas.DataFrame") -> None:
        self._frame = frame
        self.outdate("Candidates", "Swaps")

    def show_measured(self, predicted: Trace, measured: Trace) -> None:
        self._measured = predicted, measured
        self.outdate("Measured")

    # -- when it is drawn -------------------------------------------------------------------------------------------

    @property
    def open(self) -> str:
        """The title of the tab that is looked at."""
        return self._titles[self.view.selected_index or 0]

    def look_at(self, title: str) -> None:
        """Open that tab."""
        self.view.selected_index = self._titles.index(title)

    def outdate(self, *titles: str) -> None:
        """Draw those tabs anew: the open one now, on this thread, others once they are opened."""
        with self._lock:
            self._stale.update(titles)
        self._draw_open()

    def _opened(self, _: Any) -> None:
        self._submit("open tab", self._draw_open)

    def _draw_open(self) -> None:
        title = self.open
        with self._lock:
            if title not in self._stale:
                return
            self._stale.remove(title)
        self._draw[title]()

    # -- the figures ------------------------------------------------------------------------------------------------

    def _draw_plan(self) -> None:
        if self._trace is not None:
            self.timeline.show(timeline_spec(self._trace))
            self.memory.show(memory_spec(self._trace, left=TIMELINE_LEFT))  # one below the other, one time axis

    def _draw_links(self) -> None:
        if self._trace is not None:
            self.links.show(link_load_spec(self._trace))
            self.utilisation.show(utilisation_spec(self._trace))

    def _draw_swaps(self) -> None:
        if self._trace is not None:
            self.swaps.show(swap_spec(self._trace))
        frame = self._frame
        if frame is not None and frame is not self._swaps_of:  # another plan leaves candidates as they are
            self._swaps_of = frame
            names, traces = self._candidate_traces()
            if names:
                self.candidate_swaps.show(candidate_swap_spec(names, traces))

    def _draw_candidates(self) -> None:
        if self._frame is not None:
            trace = self._trace
            at_hand = None if trace is None else (self._peak_bytes, trace.makespan_s)
            self.candidates.show(candidates_spec(self._frame, at_hand))

    def _draw_measured(self) -> None:
        if self._measured is not None:
            self._unmeasured.value = ""
            self.measured.show(compare_spec(*self._measured))
