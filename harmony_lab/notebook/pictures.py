"""The pictures of a plan: timeline and memory, swap volume, the other candidates, and what was measured."""

from typing import TYPE_CHECKING

import ipywidgets

from harmony_lab.figures.candidates import candidates_spec
from harmony_lab.figures.memory import memory_spec
from harmony_lab.figures.swaps import swap_spec
from harmony_lab.figures.timeline import TIMELINE_LEFT, compare_spec, timeline_spec
from harmony_lab.notebook.plot import Plot
from harmony_lab.trace import Trace

if TYPE_CHECKING:
    import pandas

__all__ = ["Pictures"]


class Pictures:
    """Tabs of figures; any thread may call the ``show`` methods."""

    def __init__(self) -> None:
        self.timeline = Plot()
        self.memory = Plot()
        self.swaps = Plot()
        self.candidates = Plot()
        self.measured = Plot()
        self._unmeasured = ipywidgets.HTML("Launch the plan to see what was measured beside what was predicted.")
        self._measured_box = ipywidgets.VBox([self._unmeasured, self.measured])
        self.view = ipywidgets.Tab(
            [
                ipywidgets.VBox([self.timeline, self.memory]),
                self.swaps,
                self.candidates,
                self._measured_box,
            ],
            titles=("Time and memory", "Swap volume", "Candidates", "Measured"),
        )

    def show_plan(self, trace: Trace) -> None:
        self.timeline.show(timeline_spec(trace))
        self.memory.show(memory_spec(trace, left=TIMELINE_LEFT))  # one below the other, one time axis
        self.swaps.show(swap_spec(trace))

    def show_candidates(self, frame: "pandas.DataFrame") -> None:
        self.candidates.show(candidates_spec(frame))

    def show_measured(self, predicted: Trace, measured: Trace) -> None:
        self._unmeasured.value = ""
        self.measured.show(compare_spec(predicted, measured))
