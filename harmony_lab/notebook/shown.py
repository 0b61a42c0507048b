"""Shown: an object on a page, as widgets and as a static form that holds the last state."""

import logging
import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

__all__ = ["Bundle", "Shown"]

Bundle = dict[str, Any]  # by MIME type
Publish = Callable[..., None]  # of IPython's DisplayPublisher

_log = logging.getLogger("harmony_lab")
_SOON_S = 2.0  # so that ten moves of a slider send one static form
_LATER_S = 30.0


class Shown:
    """Two outputs of a cell::

        widgets        while there is a kernel
        static form    hidden by the style sheet as long as the widgets live

    One output with both would show neither in a notebook reopened without its kernel: there a viewer insists on the
    widgets, which are gone.  The static form is sent anew when the object has changed and came to rest; to pages that
    were loaded since, by way of a ``KeptForm``.
    """

    def __init__(self, publish: Publish, widget: Any, static: Callable[[], Bundle]) -> None:
        from harmony_lab.notebook.kept_form import KeptForm  # widgets load with the first that is shown

        self.widget = widget
        self._publish = publish
        self._static = static
        self._widget_id, self._static_id = str(uuid4()), str(uuid4())
        self._kept = KeptForm(self._static_id)
        self._version = 0  # of the static form
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None  # while a change has not been sent

    def display(self) -> None:
        """Add the outputs to the cell that runs."""
        text = "(The controls need a running kernel; the last state is below.)"
        self._send(self._widget_id, {**self.widget._repr_mimebundle_(), "text/plain": text}, update=False)
        self._send_static(update=False)

    def changed(self, *, soon: bool = True) -> None:
        """Send the static form once no further change has come for a moment; with ``soon=False``, within half a
        minute.
        """
        with self._lock:
            if self._timer is not None:
                if not soon:
                    return
                self._timer.cancel()
            self._timer = threading.Timer(_SOON_S if soon else _LATER_S, self._flush_or_log)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Send the static form now if it has changed."""
        with self._lock:
            if self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
        self._send_static(update=True)

    def end(self, farewell: str) -> None:
        """Put the last static form and a sentence in place of the widgets, which are closed."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._send_static(update=True)
        self._send(self._widget_id, {"text/html": f"<p>{farewell}</p>", "text/plain": farewell}, update=True)
        self._kept.send_newest()
        _close(self._kept)
        _close(self.widget)

    def _flush_or_log(self) -> None:
        try:
            self.flush()
        except Exception:  # on the timer's thread there is nobody to tell
            _log.exception("the static form could not be made")

    def _send_static(self, *, update: bool) -> None:
        bundle = self._static()
        with self._lock:
            self._version += 1
            version = self._version
        bundle = {**bundle, "text/html": self._kept.mark(bundle["text/html"], version)}
        self._send(self._static_id, bundle, update=update)
        self._kept.sent(bundle, version)

    def _send(self, display_id: str, bundle: Bundle, *, update: bool) -> None:
        self._publish(data=bundle, metadata={}, transient={"display_id": display_id}, update=update)


def _close(root: Any) -> None:
    """Close a widget and what is in it: ipywidgets keeps all that are open."""
    waiting = [root]
    while waiting:
        widget = waiting.pop()
        parts = (getattr(widget, name, None) for name in ("layout", "style"))
        waiting += [*getattr(widget, "children", ()), *(part for part in parts if hasattr(part, "close"))]
        widget.close()
