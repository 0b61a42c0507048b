"""The baselines benchmark, on small made-up tables."""

import json
from functools import partial
from pathlib import Path

import pytest
from published_tables import tables

from harmony_lab.bench import baseline_steps
from harmony_lab.bench import baselines as bench
from harmony_lab.bench.decoder import Shape
from harmony_lab.cli import main
from harmony_lab.errors import HarmonyError
from harmony_lab.planner.baselines import BASELINES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.json").write_text(json.dumps(tables()))
    return tmp_path


def test_a_row_per_number_of_devices_and_baseline_against_our_plan(folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    rows = bench.bench_baselines(folder, num_devices=(1, 2), progress=lambda *call: calls.append(call))
    assert [(row["num_devices"], row["baseline"]) for row in rows] == [(n, name) for n in (1, 2) for name in BASELINES]
    for row in rows:
        assert row["model"] == "made up"
        assert row["minibatch_size"] == 32
        assert row["fits"]
        assert row["reason"] is None
        assert row["speedup"] == row["step_s"] / row["ours_step_s"]
        assert row["swap_bytes"] == sum(row["swap_bytes_by_kind"].values())
    assert calls[0] == (0, 2, "made up on 1")
    assert calls[-1] == (2, 2, "baselines")


def test_the_minibatch_is_the_one_that_reference_plans_use(folder: Path) -> None:
    plan = {
        "model": "made up",
        "mode": "dp",
        "minibatch_size": 12,
        "num_devices": 1,
        "device_memory_cap_bytes": 10**9,
        "search_time_s": 1.0,
        "estimated_iteration_s": 1.0,
        "forward_microbatch_size": 3,
        "forward_packs": [],
        "backward_microbatch_size": 3,
        "backward_packs": [[0, 6]],
    }
    (folder / "reference_plans.json").write_text(json.dumps({"note": "", "rows": [plan]}))
    (row,) = bench.bench_baselines(folder, names=["dp, in memory"], num_devices=(1,))
    assert row["minibatch_size"] == 12


def test_what_does_not_fit_has_a_reason_and_no_numbers(folder: Path) -> None:
    huge = tables()
    for name in ("parameter_bytes", "optimizer_state_bytes"):
        huge[name] = [number * 200_000 for number in huge[name]]
    for way, copies in (("forward", 1), ("backward", 2)):
        for row in huge[f"{way}_memory_bytes"].values():
            row[:] = [
                number + copies * (after - before)
                for number, after, before in zip(row, huge["parameter_bytes"], tables()["parameter_bytes"], strict=True)
            ]
    (folder / "small.json").write_text(json.dumps(huge))
    (row,) = bench.bench_baselines(folder, names=["dp, in memory"], num_devices=(1,))
    assert not row["fits"]
    assert "weights, gradients, optimizer state and activations need" in row["reason"]
    assert row["step_s"] is row["swap_bytes"] is row["speedup"] is row["swap_ratio"] is None


def test_a_folder_without_profiles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarmonyError, match="holds no profile"):
        bench.bench_baselines(tmp_path)


def test_the_command_shows_a_table_and_writes_json(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    small = Shape(name="small", num_blocks=2, width=32, num_heads=2, length=8)
    quick = partial(baseline_steps.bench_baseline_steps, small, memory="360KiB", link=1e9, rounds=1)
    monkeypatch.setattr(baseline_steps, "bench_baseline_steps", quick)
    measure = baseline_steps.profile
    monkeypatch.setattr(
        baseline_steps, "profile", lambda *given, **options: measure(*given, **{**options, "cache": True})
    )
    target = folder / "rows" / "found.json"
    target.parent.mkdir()
    assert main(["bench", "baselines", "--profiles", str(folder), "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "zero-infinity order" in printed
    written = json.loads(target.read_text())
    assert len(written["rows"]) == len(bench.NUM_DEVICES) * len(BASELINES)
    assert [row["name"] for row in written["measured"]] == [baseline_steps.OURS, *BASELINES]
    ours, *others = written["measured"]
    assert (ours["speedup"], ours["swap_ratio"]) == (1.0, 1.0)
    for row in others:
        assert row["fits"] or row["name"].endswith("in memory")
        if row["fits"]:
            assert row["speedup"] == row["measured_s"] / ours["measured_s"]
            assert row["swap_ratio"] == row["swap_bytes"] / ours["swap_bytes"]
            assert row["name"] in printed
