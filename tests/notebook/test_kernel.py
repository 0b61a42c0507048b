"""In a real kernel: a cell that runs again frees what it made before, and a saved notebook holds the last state."""

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def execute(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Run a cell in a fresh kernel, by an id if one is given; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    manager, client = start_new_kernel(env=environment)

    def run(code: str, cell: str | None = None) -> str:
        printed: list[str] = []
        message = client.session.msg("execute_request", _request(code), metadata={"cellId": cell} if cell else {})
        client.shell_channel.send(message)
        while True:
            reply = client.get_iopub_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            content = reply["content"]
            assert reply["msg_type"] != "error", "\n".join(content.get("traceback", []))
            printed += [content["text"]] if reply["msg_type"] == "stream" and content["name"] == "stdout" else []
            if reply["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(printed).strip()

    try:
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def soon(execute: Callable[..., str], expression: str, value: Any) -> bool:
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook with a Lab and a run, executed and as it would be saved, widgets' state included."""
    cells = [
        SETUP,
        "lab = new_lab()\nlab",
        "lab.prepare()\nlab.choose(1)\nprint(lab.plan)",
        "run = lab.launch(batches, 30)\nrun",
        "run.wait()\nprint(f'{run.losses[-1]:.4g}')",
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
    assert f"<pre>{printed(saved.cells[2])}</pre>" in page
    assert f"→ {printed(saved.cells[4])}" in page
