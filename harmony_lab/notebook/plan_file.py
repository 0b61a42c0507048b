"""PlanFile: a plan written to a file and read back, as one line of text or as JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import ipywidgets

from harmony_lab.errors import HarmonyError
from harmony_lab.notebook.text import note_html
from harmony_lab.plan import Plan

__all__ = ["PlanFile", "read_plan", "write_plan"]


def write_plan(plan: Plan, path: Path) -> None:
    """JSON where the name ends in ``.json``, else the text form."""
    if path.suffix == ".json":
        plan.save(path)
    else:
        path.write_text(f"{plan}\n", encoding="utf-8")


def read_plan(path: Path) -> Plan:
    """What ``write_plan`` wrote.  Raises ``HarmonyError`` for a file that is not there or holds no plan."""
    try:
        return Plan.load(path) if path.suffix == ".json" else Plan.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HarmonyError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise HarmonyError(f"{path} holds no plan: {error}") from None


class PlanFile:
    """A file name with Save and Load; relative to the notebook's folder."""

    def __init__(
        self, plan: Callable[[], Plan | None], on_plan: Callable[[Plan], None], complain: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._on_plan = on_plan
        self._complain = complain
        self.name = ipywidgets.Text(
            value="plan.txt", description="file", style={"description_width": "40px"}, layout={"width": "260px"}
        )
        self.save = ipywidgets.Button(
            description="Save", icon="save", tooltip="write the plan: .json, else one line", layout={"width": "auto"}
        )
        self.load = ipywidgets.Button(
            description="Load", icon="folder-open", tooltip="take the plan in the file", layout={"width": "auto"}
        )
        self.done = ipywidgets.HTML()
        self.save.on_click(lambda _: self._save())
        self.load.on_click(lambda _: self._load())
        self.view = ipywidgets.HBox([self.name, self.save, self.load, self.done], layout={"flex_flow": "row wrap"})

    def enable(self, enabled: bool) -> None:
        for control in (self.name, self.save, self.load):
            control.disabled = not enabled

    def _save(self) -> None:
        plan = self._plan()
        if plan is None:
            return
        path = Path(self.name.value.strip() or "plan.txt")
        try:
            write_plan(plan, path)
        except OSError as error:
            self._complain(f"{path} cannot be written: {error.strerror}")
        else:
            self.done.value = note_html(f"saved to {path}")

    def _load(self) -> None:
        self.done.value = ""
        try:
            plan = read_plan(Path(self.name.value.strip() or "plan.txt"))
        except HarmonyError as error:
            self._complain(str(error))
        else:
            self._on_plan(plan)
