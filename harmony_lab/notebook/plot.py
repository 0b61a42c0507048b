"""Plot: a plotly figure as a widget.  The 5 MB of plotly.js travel to a page once, compressed, not once per figure."""

import json
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import anywidget
import traitlets
from plotly.offline import get_plotlyjs

from harmony_lab.figures.spec import Spec, spec_json
from harmony_lab.notebook.static_files import static_text

__all__ = ["Plot", "packed_plotly"]


class Plot(anywidget.AnyWidget):
    """A figure that is redrawn whole when another is shown; any thread may call ``show``.

    Figures travel in messages to pages that show the plot, which ask for one when they begin to.  As a part of the
    widget's state they would be saved with a notebook, where nothing draws them: plotly.js comes from a kernel.

    ``on_pick`` is called with the number that a marker which is clicked carries as its ``customdata``.
    """

    _esm = static_text("plot.js")
    _css = static_text("plot.css")
    picks = traitlets.Bool(False).tag(sync=True)

    def __init__(self, spec: Spec | None = None, *, on_pick: Callable[[int], None] | None = None) -> None:
        _carry_library()
        super().__init__(picks=on_pick is not None)
        self._on_pick = on_pick
        self._packed = b""  # compressed JSON
        self._sending = threading.Lock()  # so that the last figure sent is the last shown
        self.on_msg(_heard)
        if spec is not None:
            self.show(spec)

    def show(self, spec: Spec) -> None:
        packed = zlib.compress(spec_json(spec).encode(), level=1)
        with self._sending:
            if packed != self._packed:
                self._packed = packed
                self.send({"figure": True}, buffers=[packed])

    def show_again(self) -> None:
        """To a page that has begun to show the plot."""
        with self._sending:
            if self._packed:
                self.send({"figure": True}, buffers=[self._packed])

    def picked(self, number: int) -> None:
        if self._on_pick is not None:
            self._on_pick(number)

    @property
    def figure(self) -> dict[str, Any]:
        """What is drawn, as plotly's JSON; empty before anything is."""
        return json.loads(zlib.decompress(self._packed)) if self._packed else {}


def _heard(plot: Plot, content: Mapping[str, Any], _buffers: Any) -> None:
    if "picked" in content:
        plot.picked(int(content["picked"]))
    else:
        plot.show_again()


class _PlotlyLibrary(anywidget.AnyWidget):
    """Sends plotly.js to a page that asks, and has the script that draws figures with it; has nothing to show.

    Nor is plotly.js a part of the widget's state.
    """

    _esm = static_text("fitting.js") + static_text("drawing.js") + static_text("library.js")

    def __init__(self) -> None:
        super().__init__()
        self.on_msg(_send_plotly)


def _send_plotly(library: Any, _content: Any, _buffers: Any) -> None:
    library.send({}, buffers=[packed_plotly()])


@cache
def packed_plotly() -> bytes:
    """plotly.js as it travels to a page."""
    # plotly.js is a script for CommonJS; around it goes what makes it a module.
    script = f"const module = {{exports: {{}}}};\n{get_plotlyjs()}\nexport default module.exports;\n"
    return zlib.compress(script.encode(), level=6)


_carried: list[_PlotlyLibrary] = []


def _carry_library() -> None:
    """One carrier per kernel, made again where all widgets were closed."""
    if not _carried or _carried[0].comm is None:
        _carried[:] = [_PlotlyLibrary()]
