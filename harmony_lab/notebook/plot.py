"""Plot: a plotly figure as a widget.  The 5 MB of plotly.js travel to a page once, compressed, not once per figure."""

import json
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import anywidget
import traitlets
from plotly.offline import get_plotlyjs

from harmony_lab.figures.spec import Spec, spec_json
from harmony_lab.notebook.static_files import static_text

__all__ = ["Plot", "packed_plotly"]


class Plot(anywidget.AnyWidget):
    """A figure that is redrawn whole when ``packed``, its compressed JSON, changes; any thread may call ``show``.

    ``on_pick`` is called with the number that a marker which is clicked carries as its ``customdata``.
    """

    _esm = static_text("fitting.js") + static_text("plot.js")
    _css = static_text("plot.css")
    packed = traitlets.Bytes(b"").tag(sync=True)
    picks = traitlets.Bool(False).tag(sync=True)

    def __init__(self, spec: Spec | None = None, *, on_pick: Callable[[int], None] | None = None) -> None:
        _carry_library()
        super().__init__(picks=on_pick is not None)
        if on_pick is not None:
            self.on_msg(lambda _plot, content, _buffers: on_pick(int(content["picked"])))
        if spec is not None:
            self.show(spec)

    def show(self, spec: Spec) -> None:
        self.packed = zlib.compress(spec_json(spec).encode(), level=1)

    @property
    def figure(self) -> dict[str, Any]:
        """What is drawn, as plotly's JSON; empty before anything is."""
        return json.loads(zlib.decompress(self.packed)) if self.packed else {}


class _PlotlyLibrary(anywidget.AnyWidget):
    """Sends plotly.js to a page that asks; has nothing to show.

    The script is no part of the widget's state, which notebooks may be saved with.
    """

    _esm = static_text("library.js")

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
