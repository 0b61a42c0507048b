"""ComparePanel: two plans beside each other, chosen from the candidates, the plan at hand and the what-if."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets

from harmony_lab.errors import HarmonyError
from harmony_lab.figures.comparison import (
    Row,
    Side,
    comparison_memory_specs,
    comparison_rows,
    comparison_timeline_spec,
)
from harmony_lab.notebook.plot import Plot
from harmony_lab.notebook.text import error_html
from harmony_lab.notebook.weak import weakly

__all__ = ["ComparePanel", "Option", "rows_html"]

Option = tuple[str, str]
"""What is shown in the list, and the key it stands for."""


class ComparePanel:
    """``side(key)`` gives one side, or None where there is nothing yet; ``on_choice`` is told that the user chose."""

    def __init__(self, side: Callable[[str], Side | None], on_choice: Callable[[], None]) -> None:
        self._side = side
        self._on_choice = on_choice
        self._offering = False
        self.a, self.b = _choice("A"), _choice("B")
        self.table = ipywidgets.HTML()
        self.timelines = Plot()
        self.memory = Plot(), Plot()
        for choice in (self.a, self.b):
            choice.observe(weakly(self._chosen), "value")
        choices = ipywidgets.HBox([self.a, self.b], layout={"flex_flow": "row wrap"})
        beside = ipywidgets.Box(
            [ipywidgets.VBox([plot], layout={"flex": "1 1 420px", "min_width": "0"}) for plot in self.memory],
            layout={"flex_flow": "row wrap"},
        )
        self.view = ipywidgets.VBox([choices, self.table, self.timelines, beside])

    def offer(self, options: Sequence[Option]) -> None:
        """Plans to choose from; what is chosen stays where it can, at first the second and third."""
        self._offering = True
        try:
            keys = [key for _, key in options]
            for place, choice in enumerate((self.a, self.b)):
                kept = choice.value
                choice.options = tuple(options)
                if keys:
                    choice.value = kept if kept in keys else keys[min(place + 1, len(keys) - 1)]
        finally:
            self._offering = False

    def draw(self) -> None:
        """Draw what is chosen; any thread may call."""
        try:
            sides = self._side(self.a.value or ""), self._side(self.b.value or "")
        except HarmonyError as error:
            self.table.value = error_html(str(error))
            return
        a, b = sides
        if a is None or b is None:
            self.table.value = "Nothing to compare yet."
            return
        self.table.value = rows_html(comparison_rows(a, b), a.name, b.name)
        self.timelines.show(comparison_timeline_spec(a, b))
        for plot, spec in zip(self.memory, comparison_memory_specs(a, b), strict=True):
            plot.show(spec)

    def enable(self, enabled: bool) -> None:
        self.a.disabled = self.b.disabled = not enabled

    def _chosen(self, _: Any) -> None:
        if not self._offering:
            self._on_choice()


def rows_html(rows: Sequence[Row], a: str, b: str) -> str:
    """The rows as a table, better and worse in colour and in the sign."""
    tones = {True: "harmony-worse", False: "harmony-better", None: ""}
    body = "".join(
        f"<tr><th scope=row>{escape(row.what)}</th><td>{escape(row.a)}</td><td>{escape(row.b)}</td>"
        f'<td class="{tones[row.worse]}">{escape(row.change)}</td></tr>'
        for row in rows
    )
    head = f"<th></th><th scope=col>A: {escape(a)}</th><th scope=col>B: {escape(b)}</th><th scope=col>B against A</th>"
    return f'<div class="harmony-scroll"><table class="harmony-compared"><tr>{head}</tr>{body}</table></div>'


def _choice(letter: str) -> Any:
    return ipywidgets.Dropdown(description=letter, style={"description_width": "20px"}, layout={"width": "330px"})
