"""KeptForm: keeps a static form current in notebooks that were loaded after it was first sent; shows nothing.

A kernel's updates of an output reach only pages that were there when the output was made.  A page that is loaded later,
with the kernel still at work, would keep, and save, what the notebook was saved with.
"""

from typing import Any

import anywidget
import traitlets

from harmony_lab.notebook.static_files import static_text

__all__ = ["KeptForm"]


class KeptForm(anywidget.AnyWidget):
    """``version`` counts what was sent; a page whose form is older asks for the newest."""

    _esm = static_text("kept_form.js")
    form = traitlets.Unicode().tag(sync=True)
    version = traitlets.Int(0).tag(sync=True)

    def __init__(self, form: str) -> None:
        super().__init__(form=form)
        self._newest: dict[str, Any] = {}
        self.on_msg(lambda *_: self.send_newest())

    def mark(self, html: str, version: int) -> str:
        """The form as HTML that pages know it by."""
        return f'<div class="harmony-static" data-form="{self.form}" data-version="{version}">{html}</div>'

    def sent(self, bundle: dict[str, Any], version: int) -> None:
        """That bundle went to the pages that get updates of outputs."""
        self._newest, self.version = bundle, version

    def send_newest(self) -> None:
        """Send it to all pages; those that have it already leave it."""
        if self._newest:
            self.send({"version": self.version, "data": self._newest})
