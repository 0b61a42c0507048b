"""RunPanel: a run's state in words, figures and buttons."""

import statistics
import threading
from collections.abc import Iterator
from typing import Any

import harmony_lab as hl
from harmony_lab.notebook.live import RunPanel, run_tiles
from harmony_lab.units import format_bytes, format_seconds

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
    assert "<b>pausing after the current step" in panel.headline.value
    assert panel.pause.disabled
    gate.set()
    assert panel.settle(PATIENCE_S)
    assert "<b>paused" in panel.headline.value
    assert panel.pause.description == "Resume"
    assert not panel.pause.disabled
    panel.pause.click()
    run.wait(PATIENCE_S)
    assert panel.settle(PATIENCE_S)
    assert "finished" in panel.headline.value
    assert panel.stop.disabled


def test_a_run_that_is_to_pause_can_be_stopped(lab: hl.Lab, batches: list[Any]) -> None:
    gate = threading.Event()
    run = lab.launch(gated(batches, gate), 100_000)
    panel = RunPanel(run)
    panel.pause.click()
    panel.stop.click()
    assert "<b>stopping" in panel.headline.value
    gate.set()
    assert panel.settle(PATIENCE_S)
    assert "<b>stopped" in panel.headline.value
    assert panel.pause.disabled


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
    assert f"predicted {format_seconds(run.predicted.makespan_s)}" in panel.figures.value
    assert f"predicted {format_bytes(run.predicted.swap_bytes)}" in panel.figures.value
    assert panel.pause.disabled


def test_pace_counts_every_minibatch_of_a_step(lab: hl.Lab, batches: list[Any]) -> None:
    run = lab.launch(batches, 2, accumulate=3).wait(PATIENCE_S)
    tiles = {tile.name: tile for tile in run_tiles(run)}
    samples = 3 * len(batches[0][0])
    assert tiles["throughput"].value == f"{samples / statistics.median(run.step_s):.3g} samples/s"
    assert tiles["step, median"].delta == f"predicted {format_seconds(3 * run.predicted.makespan_s)} for 3 minibatches"
    assert run.trace is not None
    assert tiles["swapped in a minibatch"].value == format_bytes(run.trace.swap_bytes)
