"""The notebooks run from top to bottom without a front end, and say what their text promises."""

import os
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.timeout(900)  # they plan large models, and share the cores with other tests
ROOT = Path(__file__).parents[2]
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook in an empty folder; gives what it printed, and what it showed by MIME type."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def execute(name: str) -> tuple[str, list[Any]]:
        book = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
        outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
        text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
        return text, [output.data for output in outputs if "data" in output]

    return execute


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_three_machines_have_three_reasons_to_be_slow(run):
    text, shown = run("02_read_the_pictures.ipynb")
    assert re.search(r"old cards: .*\nWhat binds is computing", text)
    assert re.search(r"on a cable: .*\nWhat binds is the link host-switch0", text)
    assert re.search(r"fast cards: .*\nWhat binds is the update on the host", text)
    assert sum("svg" in data.get("text/html", "") for data in shown) == 5
    few, many = numbers(r"minibatches of \d+: ([\d.]+) samples", text)
    assert many > 1.5 * few


def test_full_training_and_an_adapter_both_learn(run):
    text, shown = run("03_train_a_model_larger_than_memory.ipynb")
    state, devices = numbers(r"training state: ([\d.]+) MiB", text) + numbers(r"devices: ([\d.]+) MiB", text)
    assert devices < state / 2
    for first, last in re.findall(r"loss: ([\d.]+) at first, ([\d.]+) at last", text):
        assert float(last) < float(first) - 0.5
    whole, adapter = numbers(r"([\d.]+) MiB of training state", text)
    assert adapter < whole / 2
    assert "frozen weights are as they were: True" in text
    assert any("<table" in data.get("text/html", "") for data in shown)


def test_alternatives_take_longer_than_the_best_plan(run):
    text, shown = run("04_compare_with_the_alternatives.ipynb")
    assert "dp, in memory: " in text
    assert min(numbers(r"([\d.]+) times the best plan's time", text)) > 1.0
    tables = [data["text/html"] for data in shown if "<table" in data.get("text/html", "")]
    assert any("just-in-time update" in table for table in tables)


def test_forty_billion_parameters_are_planned_without_memory(run):
    text, _ = run("05_plan_for_hardware_you_do_not_have.ipynb")
    assert numbers(r"([\d.]+) billion parameters", text)[0] > 40
    assert "costs are estimated from data sheets" in text
    assert "estimated at 70% of its peak rates" in text
    paces = numbers(r"host \dTiB(?:, 64 cores)?: ([\d.]+) samples per second", text)
    assert len(paces) == 3
    assert paces[0] > paces[1]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")
