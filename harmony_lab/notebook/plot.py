"""Plot: a plotly figure as a widget.  The 5 MB of plotly.js travel to a page once, not once per figure."""

import json
import zlib
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from plotly.offline import get_plotlyjs

__all__ = ["STATIC", "Plot"]

STATIC = Path(__file__).parent / "static"
# plotly.js is a script for CommonJS; around it goes what makes it a module that hands itself to plot.js.
_BEFORE = "const module = {exports: {}};\n"
_AFTER = """
const point = (globalThis[Symbol.for("harmony_lab.plotly")] ??= {});
if (point.resolve) point.resolve(module.exports);
else point.promise = Promise.resolve(module.exports);
export default {};
"""


class Plot(anywidget.AnyWidget):
    """A figure that is redrawn whole when ``packed``, its compressed JSON, changes; any thread may call ``show``."""

    _esm = STATIC / "plot.js"
    _css = STATIC / "plot.css"
    packed = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, figure: Any = None) -> None:
        _carry_library()
        super().__init__()
        if figure is not None:
            self.show(figure)

    def show(self, figure: Any) -> None:
        """Draw a ``plotly.graph_objects.Figure``."""
        self.packed = zlib.compress(figure.to_json(validate=False).encode(), level=1)

    @property
    def figure(self) -> dict[str, Any]:
        """What is drawn, as plotly's JSON; empty before anything is."""
        return json.loads(zlib.decompress(self.packed)) if self.packed else {}


class _PlotlyLibrary(anywidget.AnyWidget):
    """Carries plotly.js; has nothing to show."""

    _esm = _BEFORE + get_plotlyjs() + _AFTER


_carried: list[_PlotlyLibrary] = []


def _carry_library() -> None:
    """One carrier per kernel, made again where all widgets were closed."""
    if not _carried or _carried[0].comm is None:
        _carried[:] = [_PlotlyLibrary()]
