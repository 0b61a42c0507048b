"""ControlNames: names the controls around it for screen readers; shows nothing."""

import anywidget

from harmony_lab.notebook.static_files import static_text

__all__ = ["ControlNames"]


class ControlNames(anywidget.AnyWidget):
    """Acts on the controls of the dashboard that it is part of, in the page."""

    _esm = static_text("control_names.js")
