"""What the README shows works as shown."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ConvNet

import harmony_lab as hl

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def names() -> dict[str, Any]:
    """What the snippets take for granted."""
    torch.manual_seed(0)
    model = ConvNet()
    batch = (torch.randn(64, 1, 8, 8), torch.randint(0, 5, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "hl": hl,
        "torch": torch,
        "model": model,
        "example_batch": batch,
        "loader": [batch] * 2,
        "optimizer": optimizer,
    }


def test_functions_run_as_shown() -> None:
    given = names()
    before = given["model"].head.weight.detach().clone()
    exec(BLOCKS[2], given)
    assert not given["model"].head.weight.equal(before)
    assert given["trace"].swap_bytes == given["trainer"].last_trace.swap_bytes
    before = given["model"].head.weight.detach().clone()
    exec(BLOCKS[-1], given)
    assert not given["model"].head.weight.equal(before)


def test_notebook_cell_runs_as_shown() -> None:
    given = names()
    exec(BLOCKS[0].replace("%load_ext harmony_lab\n", ""), given)
    run, stepped = given["run"], threading.Event()
    run.subscribe(lambda event: stepped.set() if event == "step" else None)
    assert run.losses or stepped.wait(60)
    run.stop()
    given["lab"].close()
    assert run.losses


def test_a_script_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = names()
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[1].replace("steps=500", "steps=3"), given)
    assert len(given["run"].losses) == 3
    assert given["found"].best == given["lab"].result.best
    assert (tmp_path / "report.html").exists()


def test_documented_files_exist() -> None:
    root = Path(__file__).parent.parent
    for name in re.findall(r"notebooks/[\w.]+|\.ci/run", README):
        assert (root / name).exists(), name
