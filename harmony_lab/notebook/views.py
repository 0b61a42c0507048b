"""Views: which Labs and Runs a notebook shows, and when they are let go."""

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harmony_lab.notebook.shown import Bundle, Shown

if TYPE_CHECKING:
    from harmony_lab.lab import Lab
    from harmony_lab.run import Run

__all__ = ["Views", "held", "named"]

_LAB, _RUN = ("harmony_lab.lab", "Lab"), ("harmony_lab.run", "Run")
_HISTORY = ("In", "Out")
_LAST_RESULTS = ("_", "__", "___")


class Views:
    """Shows Labs and Runs, each with one set of widgets wherever it appears.

    What is on a page is kept: one can press Launch there though no name holds the Lab.  It is let go, a Lab closed with
    its run, once

    - a name that held it is given to another Lab (or Run), or
    - the cell that showed it runs again,

    unless another name holds it, by itself or in a list, tuple, set or dict.  IPython's history of results counts for
    nothing and is cleared of what is let go, or the old model would stay in memory with it.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._has_page = getattr(shell, "kernel", None) is not None  # else a terminal: text once, no updates
        self._shown: dict[int, Shown] = {}
        self._dashboards: dict[int, Any] = {}  # of open Labs
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()  # runs whose steps make a Lab's static form old
        self._names: dict[str, weakref.ref[Any]] = {}
        self._cell: str | None = None  # that runs
        self._cells: list[tuple[weakref.ref[Any], str]] = []  # what is shown by which cell
        self._outdated: list[weakref.ref[Any]] = []  # shown by the cell that runs, when it ran before

    def load(self) -> None:
        formatter = self._shell.display_formatter.ipython_display_formatter
        formatter.for_type_by_name(*_LAB, self.show_lab)
        formatter.for_type_by_name(*_RUN, self.show_run)
        self._shell.events.register("pre_run_cell", self.before_cell)
        self._shell.events.register("post_run_cell", self.after_cell)

    def unload(self) -> None:
        formatter = self._shell.display_formatter.ipython_display_formatter
        for module, name in (_LAB, _RUN):
            _take_away(formatter, module, name)
        self._shell.events.unregister("pre_run_cell", self.before_cell)
        self._shell.events.unregister("post_run_cell", self.after_cell)
        for lab in {id(lab): lab for lab in (*self.open_labs(), *_of_history(self._shell.user_ns))}.values():
            lab.close()

    def open_labs(self) -> "list[Lab]":
        """Labs that have a name or are shown, each once."""
        shown = [reference() for reference, _ in self._cells]
        shown += [dashboard.lab for dashboard in self._dashboards.values()]
        found: list[Any] = [*named(self._shell.user_ns).values(), *(lab for lab in shown if _is(_LAB, lab))]
        return list({id(lab): lab for lab in found if not lab.closed}.values())

    # -- show -----------------------------------------------------------------------------------------------------

    def show_lab(self, lab: "Lab") -> None:
        """The dashboard, and a static form; of a closed Lab, the static form."""
        shown = self._shown.get(id(lab))
        if shown is None and not lab.closed and self._has_page:
            from harmony_lab.notebook.dashboard import Dashboard

            dashboard = self._dashboards[id(lab)] = Dashboard(lab)
            shown = self._shown[id(lab)] = Shown(self._publish, dashboard.view, lambda: _static(lab))
            lab.subscribe(lambda event: self._lab_event(lab, dashboard, event))
            dashboard.start()
        self._display(lab, shown)

    def show_run(self, run: "Run") -> None:
        """The panel with Pause and Stop, and a static form."""
        shown = self._shown.get(id(run))
        if shown is None and self._has_page:
            from harmony_lab.notebook.live import RunPanel

            made = shown = self._shown[id(run)] = _ShownPanel(self._publish, RunPanel(run), lambda: _static(run))
            run.subscribe(lambda event: made.changed(soon=event == "status"))
        self._display(run, shown)

    def _display(self, value: Any, shown: Shown | None) -> None:
        if self._cell is not None:
            self._cells.append((weakref.ref(value), self._cell))
        if shown is None:
            self._publish(data=_static(value), metadata={})
        else:
            shown.display()

    def _publish(self, **message: Any) -> None:
        self._shell.display_pub.publish(**message)

    def _lab_event(self, lab: "Lab", dashboard: Any, event: str) -> None:
        if event == "closed":
            self._dashboards.pop(id(lab), None)
        shown = self._shown.get(id(lab))
        if shown is None:
            return
        if event == "closed":
            dashboard.close()
            self._shown.pop(id(lab), None)
            shown.end("This Lab is closed; its last state:")
        elif event in ("profile", "result", "plan", "run"):
            shown.changed()
            if event == "run" and lab.run is not None and lab.run.active and lab.run not in self._followed:
                self._followed.add(lab.run)
                lab.run.subscribe(lambda _: shown.changed(soon=False))

    # -- let go ---------------------------------------------------------------------------------------------------

    def before_cell(self, info: Any) -> None:
        """Note what this cell showed when it ran before."""
        self._cell = getattr(info, "cell_id", None)
        self._outdated = [reference for reference, cell in self._cells if cell == self._cell]
        self._cells = [(reference, cell) for reference, cell in self._cells if cell != self._cell]

    def after_cell(self, _: Any) -> None:
        """Let go what this cell replaced; offer the names it made to train on; send what static forms have to tell, so
        that a saved notebook has it."""
        names = _names(self._shell.user_ns)
        replaced = list(self._replaced(names))
        held = {id(value) for value in _held(self._shell.user_ns)} if replaced else set()
        for value in replaced:
            if id(value) not in held:
                self.let_go(value)
        self._names = {name: weakref.ref(value) for name, value in names.items()}
        for dashboard in list(self._dashboards.values()):
            dashboard.launcher.offer()
        for shown in list(self._shown.values()):
            shown.flush()

    def _replaced(self, names: Mapping[str, Any]) -> Iterator[Any]:
        for name, reference in self._names.items():
            before, now = reference(), names.get(name)
            if before is not None and now is not before and type(now) is type(before):
                yield before
        again = {id(reference()) for reference, cell in self._cells if cell == self._cell}
        for reference in self._outdated:
            value = reference()
            if value is not None and id(value) not in again:
                yield value

    def let_go(self, value: Any) -> None:
        """Close it, put a static form in the place of its widgets, and clear IPython's history of it."""
        gone = [value]
        if _is(_LAB, value):
            value.close()
            gone += [] if value.run is None else [value.run]
        for each in gone:
            shown = self._shown.pop(id(each), None)
            if shown is not None:
                shown.end("Replaced by a newer one; the last state:")
            _forget(self._shell, each)


class _ShownPanel(Shown):
    """Of a run: the panel's threads end with it."""

    def __init__(self, publish: Any, panel: Any, static: Any) -> None:
        super().__init__(publish, panel.view, static)
        self._panel = panel

    def end(self, farewell: str) -> None:
        self._panel.close()
        super().end(farewell)


def named(namespace: Mapping[str, Any]) -> "dict[str, Lab]":
    """Open Labs by name, each once."""
    found: dict[str, Lab] = {}
    for name, value in _names(namespace).items():
        if _is(_LAB, value) and not value.closed and value not in found.values():
            found[name] = value
    return found


def held(namespace: Mapping[str, Any], kind: tuple[str, str]) -> Iterator[Any]:
    """What of that kind, (module, class), names of the user's hold, by themselves or in a container; each once."""
    seen: set[int] = set()
    for value in _held(namespace):
        if _is(kind, value) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _is(kind: tuple[str, str], value: Any) -> bool:
    """Whether it is a Lab or a Run; where the module was never loaded nothing is, and torch stays unloaded."""
    module = sys.modules.get(kind[0])
    return module is not None and isinstance(value, getattr(module, kind[1]))


def _names(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Labs and Runs that the user named."""
    return {
        name: value
        for name, value in list(namespace.items())
        if not name.startswith("_") and (_is(_LAB, value) or _is(_RUN, value))
    }


def _held(namespace: Mapping[str, Any]) -> Iterator[Any]:
    """What names of the user's hold, and what is in the containers they hold."""
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in _HISTORY:
            continue
        yield value
        if isinstance(value, dict):
            yield from list(value.values())
        elif isinstance(value, list | tuple | set):
            yield from list(value)


def _of_history(namespace: Mapping[str, Any]) -> "list[Lab]":
    """Labs that only IPython's history of results holds."""
    return [value for value in list(namespace.get("Out", {}).values()) if _is(_LAB, value)]


def _forget(shell: Any, value: Any) -> None:
    """Clear IPython's history of results of that value."""
    for namespace in (shell.user_ns.get("Out", {}), *shell.all_ns_refs):
        for key in [key for key, kept in list(namespace.items()) if kept is value]:
            del namespace[key]
    for name in _LAST_RESULTS:
        if getattr(shell.displayhook, name, None) is value:
            setattr(shell.displayhook, name, "")  # as before the first result
            shell.user_ns[name] = ""


def _take_away(formatter: Any, module: str, name: str) -> None:
    if f"{module}.{name}" in formatter:
        formatter.pop(f"{module}.{name}")


def _static(value: Any) -> Bundle:
    return {"text/html": value._repr_html_(), "text/plain": repr(value)}
