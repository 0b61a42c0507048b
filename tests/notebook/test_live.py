"""RunPanel: a run's state in words, figures and buttons."""

import threading
from collections.abc import Iterator
from typing import Any

import harmony_lab as hl
from harmony_lab.notebook.live import RunPanel

PATIENCE_S = 60


def gated(batches: list[Any], gate: threading.Event) -> Iterator[Any]:
    yield batches[0]
    gate.wait(PATIENCE_S)
    yield from batches


def test_a_paused_run_can_be_resumed_from_the_panel(lab: hl.Lab, batches: list[Any]) -> None:
    gate = threading.Event()
    run = lab.launch(gated(batches, gate), 4)
    panel = RunPanel(run)
    panel.pause.click()
    assert panel.settle(PATIENCE_S)
    assert "paused" in panel.headline.value
    assert panel.pause.description == "Resume"
    panel.pause.click()
    gate.set()
    run.wait(PATIENCE_S)
    assert panel.settle(PATIENCE_S)
    assert "finished" in panel.headline.value
    assert panel.stop.disabled


def test_a_failed_run_shows_what_happened_and_where(lab: hl.Lab, batches: list[Any]) -> None:
    run = lab.launch([batches[0], (batches[0][0], None)], 2)
    panel = RunPanel(run)
    try:
        run.wait(PATIENCE_S)
    except hl.TrainingError as error:
        first_line = str(error).splitlines()[0]
    assert panel.settle(PATIENCE_S)
    assert "failed" in panel.headline.value
    assert first_line[:30] in panel.trouble.value
    assert "Traceback" in panel.trouble.value
    panel.close()


def test_a_finished_run_is_shown_with_measured_beside_predicted(lab: hl.Lab, batches: list[Any]) -> None:
    run = lab.launch(batches, 3).wait(PATIENCE_S)
    panel = RunPanel(run)
    assert f"{run.losses[-1]:.4f}" in panel.figures.value
    assert "predicted" in panel.figures.value
    assert panel.pause.disabled
