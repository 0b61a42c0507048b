"""The planner benchmark, on a small made-up table."""

import json
from pathlib import Path

import pytest
from published_tables import tables

from harmony_lab.bench.planner import bench_planner
from harmony_lab.cli import main

ROW = {
    "model": "made up",
    "mode": "pp",
    "minibatch_size": 12,
    "num_devices": 2,
    "device_memory_cap_bytes": 10**9,
    "search_time_s": 0.5,
    "estimated_iteration_s": 100.0,
    "forward_microbatch_size": 3,
    "forward_packs": [[0, 3]],
    "backward_microbatch_size": 3,
    "backward_packs": [[0, 3], [3, 6]],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "made up.json").write_text(json.dumps(tables()))
    (tmp_path / "reference_plans.json").write_text(json.dumps({"note": "", "rows": [ROW]}))
    return tmp_path


def test_a_row_sets_our_plan_beside_the_references(folder: Path) -> None:
    (row,) = bench_planner(folder)
    assert row["reference_search_s"] == 0.5
    assert row["lower_bound_s"] <= row["makespan_s"] <= row["reference_plan_makespan_s"]
    assert row["makespan_all_switches_s"] <= row["makespan_s"]
    assert row["backward_packs"][0][0] == 0
    assert row["backward_packs"][-1][1] == 6


def test_the_command_writes_json_also_where_no_search_took_a_second(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "found.json"
    assert main(["bench", "planner", "--profiles", str(folder), "--json", str(file)]) == 0
    assert "worst_speedup: none" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["worst_speedup"] is None
    assert len(found["rows"]) == 1
    assert found["total_search_s"] == found["rows"][0]["search_s"]
