"""The benchmark of the dashboard, on a small model: what is counted, and what must hold on any."""

from contextlib import nullcontext

import comm
import numpy as np
import pytest
from figures.pipelines import pipeline_trace

from harmony_lab.bench import notebook, notebook_with_run
from harmony_lab.bench.notebook import bench_notebook, repeated
from harmony_lab.bench.notebook_with_run import saved_bytes_with_run
from harmony_lab.cli import main
from harmony_lab.figures.timeline import timeline_spec
from harmony_lab.notebook.plot import Plot
from harmony_lab.run import RunStatus


def test_the_dashboard_stays_within_its_budgets(lab):
    before = comm.create_comm
    found = bench_notebook(lab, num_turns=1, num_turns_per_tab=1)
    assert comm.create_comm is before
    assert 1_000_000 < found["open_bytes"] < 6_000_000  # with plotly.js
    assert 0 < found["knob_bytes_median"] < 300_000
    assert 0 < found["saved_bytes"] < 1_000_000
    assert 0 < found["knob_ms_median"] <= found["knob_ms_worst"]
    assert set(found["knob_ms_by_tab"]) == {"Links", "Swaps", "Candidates", "Compare"}
    assert max(found["knob_ms_by_tab"].values()) <= found["knob_ms_worst"]
    assert found["draw_100k_s"] > 0


def test_a_saved_notebook_with_a_run_holds_neither_figures_nor_what_draws_them_twice(lab, batches):
    assert 0 < saved_bytes_with_run(lab, batches, steps=2) < 700_000
    assert lab.run.status is RunStatus.FINISHED
    plot = Plot(timeline_spec(lab.predicted))
    assert plot.figure["data"]
    assert len(str(plot.get_state())) < 2_000
    plot.close()


def test_repeated_iterations_follow_each_other():
    trace = pipeline_trace()
    many = repeated(trace, 3)
    count = len(trace.program.ops)
    assert many.makespan_s == pytest.approx(3 * trace.makespan_s)
    assert many.program.ops[count + 3].after == (count, count + 1)
    assert many.start_s[count] == pytest.approx(trace.makespan_s)
    assert many.swap_bytes == 3 * trace.swap_bytes
    assert np.all(np.diff(many.memory[0].times_s) >= 0)
    assert many.peak_bytes == trace.peak_bytes


def test_the_command_prints_what_was_found_by_tab_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"open_bytes": 1_800_000, "knob_ms_by_tab": {"Links": 12.5}}
    monkeypatch.setattr(notebook, "gpt2_xl_lab", lambda layers: nullcontext())
    monkeypatch.setattr(notebook_with_run, "trained_lab", lambda layers: (nullcontext(), []))
    monkeypatch.setattr(notebook_with_run, "saved_bytes_with_run", lambda lab, batches: 678_901)
    monkeypatch.setattr(notebook, "bench_notebook", lambda lab, progress: found)
    assert main(["bench", "notebook"]) == 0
    out = capsys.readouterr().out
    assert "open_bytes: 1,800,000" in out
    assert "saved_bytes_with_run: 678,901" in out
    assert "Links" in out
