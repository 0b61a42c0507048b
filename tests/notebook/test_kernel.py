"""In a real kernel: a page turns knobs and launches by messages, a cell that runs again frees what it made before, and
a saved notebook holds the last state."""

import base64
import os
import re
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bleach
import nbclient
import nbconvert
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """
%load_ext harmony_lab
import gc, resource, weakref, torch, harmony_lab as hl
from torch import nn
from ipywidgets.widgets.widget import _instances as widgets
models = weakref.WeakSet()
batches = [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(3)]

def new_lab():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    models.add(model)
    machine = hl.Machine.emulated(2, memory="100KiB", link="1GB/s")
    return hl.Lab(model, batches[0], torch.optim.Adam(model.parameters()), loss_fn=nn.functional.mse_loss,
                  minibatch_size=8, machine=machine)
"""
LAB_AND_RUN = """
lab = new_lab()
lab.prepare()
lab.launch(batches, 2).wait()
lab
"""


class Kernel:
    """A kernel, and what a page knows of it: the widgets' states by the id of their comm, as messages bring them."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.states: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, bytes] = {}

    def __call__(self, code: str, cell: str | None = None) -> str:
        """Run a cell, by an id if one is given; returns what it printed."""
        printed: list[str] = []
        asked = self._send("execute_request", _request(code), metadata={"cellId": cell} if cell else {})
        while True:
            reply = self._hear()
            if reply["parent_header"].get("msg_id") != asked:
                continue
            content = reply["content"]
            assert reply["msg_type"] != "error", "\n".join(content.get("traceback", []))
            printed += [content["text"]] if reply["msg_type"] == "stream" and content["name"] == "stdout" else []
            if reply["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(printed).strip()

    def widget(self, description: str) -> str:
        """The newest control of that description."""
        return next(name for name, state in reversed(self.states.items()) if state.get("description") == description)

    def turn(self, description: str, value: Any) -> None:
        self._tell(self.widget(description), {"method": "update", "state": {"value": value}, "buffer_paths": []})

    def click(self, description: str) -> None:
        self._tell(self.widget(description), {"method": "custom", "content": {"event": "click"}})

    def until(self, holds: Callable[[], bool]) -> None:
        """Listen until it holds of what was told."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, "the page was never told"
            self._hear()

    def tells(self, words: str) -> None:
        """Listen until a text on the page has those words."""
        self.until(lambda: any(words in str(state.get("value")) for state in self.states.values()))

    @property
    def figures(self) -> list[str]:
        """What is drawn, as JSON."""
        return [zlib.decompress(figure).decode() for figure in self._figures.values()]

    def _send(self, kind: str, content: dict[str, Any], **parts: Any) -> str:
        message = self._client.session.msg(kind, content, **parts)
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _tell(self, widget: str, data: dict[str, Any]) -> None:
        self._send("comm_msg", {"comm_id": widget, "data": data})

    def _hear(self) -> dict[str, Any]:
        message: dict[str, Any] = self._client.get_iopub_msg(timeout=PATIENCE_S)
        content = message["content"]
        if message["msg_type"] in ("comm_open", "comm_msg") and "state" in content["data"]:
            state = self.states.setdefault(content["comm_id"], {})
            state |= content["data"]["state"]
            paths = content["data"].get("buffer_paths", [])
            state |= {path[0]: bytes(buffer) for path, buffer in zip(paths, message["buffers"], strict=True)}
        elif message["msg_type"] == "comm_msg" and content["data"].get("content") == {"figure": True}:
            self._figures[content["comm_id"]] = bytes(message["buffers"][0])
        return message


@pytest.fixture
def execute(tmp_path: Path) -> Iterator[Kernel]:
    """A fresh kernel."""
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    manager, client = start_new_kernel(env=environment)
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def soon(execute: Kernel, expression: str, value: Any) -> bool:
    """Whether the expression has that value as soon as threads that were told to end have ended."""
    waits = f"""
    import time
    until = time.monotonic() + {PATIENCE_S // 2}
    while (gc.collect(), {expression})[1] != {value!r} and time.monotonic() < until:
        time.sleep(0.05)
    print({expression} == {value!r})
    """
    return execute(waits) == "True"


def _request(code: str) -> dict[str, Any]:
    return {
        "code": textwrap.dedent(code),
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": True,
    }


def test_a_cell_that_runs_again_frees_the_models_and_widgets_it_made_before(execute) -> None:
    execute(SETUP)
    execute(LAB_AND_RUN)
    num_widgets = int(execute("print(len(widgets))"))
    for _ in range(4):
        execute(LAB_AND_RUN)
    assert soon(execute, "(len(models), len(widgets))", (1, num_widgets))


def test_a_lab_without_a_name_goes_when_its_cell_runs_again(execute) -> None:
    execute(SETUP)
    for _ in range(3):
        execute("new_lab().prepare()", cell="here")
    execute("new_lab().prepare()", cell="elsewhere")
    assert soon(execute, "len(models)", 2)


def test_a_lab_that_another_name_or_list_holds_stays_open(execute) -> None:
    execute(SETUP)
    execute("lab = new_lab(); kept = [lab]; lab")
    execute("lab = new_lab(); also = lab; lab")
    execute("lab = new_lab(); lab")
    assert execute("print(kept[0].closed, also.closed, lab.closed)") == "False False False"
    execute("kept = also = None; lab = new_lab(); lab")
    assert execute("print(lab.closed, _ is lab)") == "False True"


def test_replacing_a_lab_stops_its_run(execute) -> None:
    execute(SETUP)
    execute("lab = new_lab(); old = weakref.ref(lab.launch(batches, 10**9)); lab")
    execute("lab = new_lab()")
    assert soon(execute, "(old() is None, len(models))", (True, 1))


def test_a_pages_messages_turn_knobs_launch_pause_and_stop(execute: Kernel) -> None:
    execute(SETUP)
    execute("lab = new_lab(); lab.prepare(); lab")
    execute.until(lambda: not execute.states[execute.widget("packs fetched ahead")].get("disabled"))
    execute.until(lambda: any("iteration" in figure for figure in execute.figures))
    before, other = execute.figures, 0 if int(execute("print(lab.plan.prefetch)")) else 1
    execute.turn("packs fetched ahead", other)
    execute.until(lambda: f"prefetch={other}" in execute.states[execute.widget("plan")]["value"])
    execute.until(lambda: execute.figures != before)
    assert execute.states[execute.widget("plan")]["value"] == execute("print(lab.plan)")
    execute.turn("steps", 10**8)
    execute.click("Launch")
    execute.tells("<b>training</b>")
    execute.click("Pause")
    execute.tells("<b>paused</b>")
    assert execute("print(lab.run.status)") == "paused"
    execute.click("Resume")
    execute.tells("<b>training</b>")
    execute.click("Stop")
    execute.tells("<b>stopped</b>")
    assert execute("print(lab.run.status, lab.run.error)") == "stopped None"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook with a Lab and a run, executed and as it would be saved, widgets' state included."""
    cells = [
        SETUP,
        "lab = new_lab()\nlab",
        "lab.prepare()\nlab.choose(1)\nprint(lab.plan)",
        "run = lab.launch(batches, 30)\nrun",
        "run.wait()\nprint(f'{run.losses[-1]:#.4g}')",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(folder))
        nbclient.NotebookClient(book, timeout=PATIENCE_S, resources={"metadata": {"path": str(folder)}}).execute()
    return book


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream").strip()


def test_a_saved_notebook_holds_the_last_state_in_its_static_forms(saved) -> None:
    plan, loss = printed(saved.cells[2]), printed(saved.cells[4])
    for cell in (saved.cells[1], saved.cells[3]):
        widgets, static = cell.outputs
        assert WIDGET in widgets.data
        assert "text/html" not in widgets.data
        assert WIDGET not in static.data
        assert f"→ {loss}" in static.data["text/html"]  # the title of the loss curve
        assert "finished" in static.data["text/html"]
    assert plan in saved.cells[1].outputs[1].data["text/html"]


def test_a_saved_notebook_is_small(saved) -> None:
    assert saved.metadata.widgets
    assert len(nbformat.writes(saved)) < 1_000_000


@pytest.mark.parametrize("with_widgets", [True, False])
def test_exported_html_shows_the_last_state(saved, with_widgets: bool) -> None:
    book = nbformat.from_dict(saved)
    if not with_widgets:
        book.metadata = {name: value for name, value in saved.metadata.items() if name != "widgets"}
    page, _ = nbconvert.HTMLExporter().from_notebook_node(book)
    assert f">{printed(saved.cells[2])}</pre>" in page
    assert f"→ {printed(saved.cells[4])}" in page


def test_where_html_is_cleaned_the_saved_form_still_shows_its_pictures_and_texts(saved) -> None:
    tags = {"p", "b", "table", "thead", "tbody", "tr", "th", "td", "pre", "h4", "div", "img"}
    form = saved.cells[1].outputs[1].data["text/html"]
    cleaned = bleach.clean(form, tags=tags, attributes={"img": ["src", "alt"]}, protocols={"data"}, strip=True)
    pictures = re.findall(r'<img src="data:image/svg\+xml;base64,(.*?)" alt="(.*?)">', cleaned)
    assert len(pictures) == form.count("<img") >= 4
    for data, alternative in pictures:
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
        assert alternative
    text = re.sub("<[^>]*>", "", cleaned)
    assert printed(saved.cells[2]) in text
    assert "critical path" not in text  # a word of a picture, in which it stands alone
