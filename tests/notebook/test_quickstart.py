"""The quickstart notebook runs from top to bottom without a front end."""

import os
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"


def test_it_runs_headless_and_the_model_has_learnt(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    book = nbformat.read(QUICKSTART, as_version=4)
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = [output.text for cell in book.cells for output in cell.get("outputs", []) if output.output_type == "stream"]
    (losses,) = [text for text in texts if text.startswith("loss on the last batch")]
    before, after = (float(word) for word in losses.replace(":", " ").replace(",", " ").split() if word[0].isdigit())
    assert after < before - 1.5
    shown = [set(output.data) for cell in book.cells for output in cell.get("outputs", []) if "data" in output]
    assert {"application/vnd.jupyter.widget-view+json", "text/plain"} in shown
    assert {"text/html", "text/plain"} in shown
    assert (tmp_path / "harmony-lab-report.html").stat().st_size > 10_000


def test_it_is_stored_without_outputs():
    book = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")
