"""The dashboard's page: where its parts stand, beside each other where there is room."""

from collections.abc import Sequence
from typing import Any

import ipywidgets

from harmony_lab.notebook.candidates import LEGEND, CandidateTable
from harmony_lab.notebook.control_names import ControlNames
from harmony_lab.notebook.knob_panel import KnobPanel
from harmony_lab.notebook.text import note_html, stylesheet_html

__all__ = ["page"]


def page(
    status: Sequence[Any], table: CandidateTable, knobs: KnobPanel, figures: Any, pictures: Any, launcher: Any
) -> tuple[Any, list[Any]]:
    """(the page, those of its parts that are hidden until there is a plan to show).

    ::

        status
        candidates      │ knobs          on a narrow page one below the other
        packs and plan  │
        figures, launch, pictures
    """
    ranking = ipywidgets.VBox([table, ipywidgets.HTML(note_html(LEGEND))])
    sections = [_section("Candidates", ranking), _section("Packs and plan", knobs.strip_view)]
    left = ipywidgets.VBox(sections, layout={"flex": "3 1 500px", "min_width": "0"})
    right = _section("Knobs", knobs.view, flex="2 1 320px")
    top = ipywidgets.Box([left, right], layout={"flex_flow": "row wrap", "align_items": "flex-start"})
    top.add_class("harmony-columns")
    launch = _section("Launch", launcher)
    hidden = [top, pictures, launch]
    for part in hidden:
        part.layout.display = "none"
    parts = [ipywidgets.HTML(stylesheet_html()), *status, top, figures, launch, pictures, ControlNames()]
    view = ipywidgets.VBox(parts, layout={"width": "100%"})
    view.add_class("harmony-lab")
    return view, hidden


def _section(title: str, content: Any, *, flex: str = "0 0 auto") -> Any:
    heading = ipywidgets.HTML(f"<h4>{title}</h4>")
    return ipywidgets.VBox([heading, content], layout={"flex": flex, "min_width": "0"})
