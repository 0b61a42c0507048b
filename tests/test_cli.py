"""The command line: what it prints, writes and returns."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from models import mlp_batch, sequential
from torch.nn.functional import cross_entropy

import harmony_lab
from harmony_lab.cli import main
from harmony_lab.costs import Profile
from harmony_lab.demo import DemoSettings, Outcome, source_batches
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.search import Rejected, SearchResult, search
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.terminal import ranking_table, rejected_table
from harmony_lab.units import format_rate, parse_bytes, parse_rate


@pytest.fixture(scope="module")
def saved_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = decompose(sequential(), mlp_batch(8), cross_entropy)
    path = tmp_path_factory.mktemp("profiles") / "small.json"
    profile(layers, Machine.emulated(1), microbatch_sizes=(2, 8), trials=1).save(path)
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a short demo wrote, with its exit status and report."""
    folder = tmp_path_factory.mktemp("demo")
    status = main(["demo", "--steps", "3", "--json", str(folder / "o.json"), "--report", str(folder / "r.html")])
    return {
        **json.loads((folder / "o.json").read_text()),
        "status": status,
        "report": (folder / "r.html").read_text(),
    }


def test_demo_passes_its_own_checks(demo: dict[str, Any]) -> None:
    assert demo["status"] == 0


def test_demo_devices_hold_at_most_half_of_the_training_state(demo: dict[str, Any]) -> None:
    assert len(demo["device_budget_bytes"]) == 2
    assert 2 * sum(demo["device_budget_bytes"]) <= demo["state_bytes"]
    assert demo["state_bytes"] < demo["footprint_bytes"]


def test_demo_trains_what_plain_pytorch_trains(demo: dict[str, Any]) -> None:
    assert demo["max_abs_param_diff_vs_torch"] <= 1e-5
    assert demo["final_loss"] < demo["initial_loss"]


def test_demo_moves_the_bytes_it_predicted_within_the_memory_it_predicted(demo: dict[str, Any]) -> None:
    assert demo["swap_bytes_measured"] == demo["swap_bytes_predicted"] > 0
    for measured, predicted, budget in zip(
        demo["peak_bytes_measured"], demo["peak_bytes_predicted"], demo["device_budget_bytes"], strict=True
    ):
        assert 0 < measured <= predicted <= budget


def test_demo_writes_a_plan_that_parses_and_a_bound_below_it(demo: dict[str, Any]) -> None:
    assert Plan.parse(demo["plan"]).minibatch_size == 32
    assert 0 < demo["lower_bound_step_s"] <= demo["predicted_step_s"]
    assert demo["measured_step_s"] > 0


def test_demo_report_shows_predicted_and_measured(demo: dict[str, Any]) -> None:
    assert demo["report"].count("<svg") >= 4
    assert "measured" in demo["report"]


OUTCOME = Outcome(
    state_bytes=100,
    footprint_bytes=150,
    device_budget_bytes=[25, 25],
    plan="",
    initial_loss=5.0,
    final_loss=3.0,
    max_abs_param_diff_vs_torch=0.0,
    predicted_step_s=1.0,
    measured_step_s=1.0,
    swap_bytes_predicted=7,
    swap_bytes_measured=7,
    peak_bytes_predicted=[20, 20],
    peak_bytes_measured=[20, 20],
    lower_bound_step_s=0.5,
)


@pytest.mark.parametrize(
    "fault",
    [
        {"max_abs_param_diff_vs_torch": 2e-5},
        {"max_abs_param_diff_vs_torch": float("nan")},
        {"swap_bytes_measured": 8},
        {"peak_bytes_measured": [20, 21]},
        {"peak_bytes_predicted": [26, 20]},
        {"device_budget_bytes": [25, 26]},
        {"final_loss": 3.6},
    ],
)
def test_demo_checks_fail_on_each_fault(fault: dict[str, Any]) -> None:
    settings = DemoSettings()
    assert all(check.holds for check in OUTCOME.checks(settings))
    faulty = Outcome(**{**OUTCOME.to_json(), **fault})
    assert sum(not check.holds for check in faulty.checks(settings)) == 1


def test_short_demo_does_not_ask_for_the_loss_drop() -> None:
    unlearned = Outcome(**{**OUTCOME.to_json(), "final_loss": 5.0})
    assert all(check.holds for check in unlearned.checks(DemoSettings(steps=5)))


def test_demo_data_is_text_and_the_same_every_time() -> None:
    first, again = source_batches(2), source_batches(2)
    assert first[0]["input_ids"].shape == (32, 32)
    assert first[1]["input_ids"].equal(again[1]["input_ids"])
    assert not first[0]["input_ids"].equal(first[1]["input_ids"])
    source = bytes(first[0]["input_ids"].flatten().tolist()).decode("utf-8", errors="replace")
    assert sum(letter.isascii() for letter in source) > 0.95 * len(source)


def test_plan_ranks_plans_of_a_saved_profile(saved_profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(saved_profile), "--devices", "2", "--memory", "1MiB", "--minibatch", "8", "--mode", "dp"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    best = next(line for line in output.splitlines() if line.startswith("Best plan: "))
    plan = Plan.parse(best.removeprefix("Best plan: "))
    assert (plan.mode, plan.minibatch_size, plan.num_devices) == ("dp", 8, 2)


def test_plan_explains_itself_within_eighty_columns_and_writes_what_it_found(
    saved_profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found, saved = tmp_path / "found.json", tmp_path / "plan.json"
    arguments = ["plan", str(saved_profile), "--devices", "2", "--memory", "1MiB", "--minibatch", "8", "--explain"]
    assert main([*arguments, "--json", str(found), "--save-plan", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("Best plan: "))
    output = " ".join(" ".join(lines).split())
    for part in ("What binds is", "largest backward microbatch", "What each switch buys", "just-in-time update"):
        assert part in output
    data, plan = json.loads(found.read_text()), Plan.load(saved)
    assert Plan.from_json(data["candidates"][0]["plan"]) == plan
    assert f"Best plan: {plan}" in lines
    assert data["explanation"].split(".")[0] in output
    assert data["ablation"]["plan"] == str(plan)
    assert {row["switch"] for row in data["ablation"]["rows"]} >= {"grouping", "packing", "prefetch"}
    assert data["limits"]["backward"]["size"] == 8
    assert data["limits"]["host"]["weight_bytes"] == Profile.load(saved_profile).weight_bytes(0, 4)


def test_plan_for_clipped_training_says_what_that_costs(
    saved_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(saved_profile), "--minibatch", "8", "--mode", "dp", "--clipped", "--explain"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "update=next" in output.rsplit("Best plan: ", 1)[1]
    assert "beside the next iteration's forward" in output


def test_plan_without_explain_writes_no_ablation(saved_profile: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert main(["plan", str(saved_profile), "--minibatch", "8", "--mode", "dp", "--json", str(found)]) == 0
    data = json.loads(found.read_text())
    assert "ablation" not in data
    assert data["lower_bound_s"] <= data["candidates"][0]["step_s"]


def test_plan_says_where_layers_were_measured_if_that_is_another_device(
    saved_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(saved_profile), "--machine", "2x3090", "--minibatch", "8"]) == 0
    assert "Layers are taken to be as fast as they were on" in capsys.readouterr().out
    assert main(["plan", str(saved_profile), "--minibatch", "8"]) == 0
    assert "as fast as they were" not in capsys.readouterr().out


def test_a_preset_obeys_the_other_options_or_says_how_to_write_it(
    saved_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", str(saved_profile), "--minibatch", "8", "--mode", "pp", "--machine", "4x3090"]
    assert main([*given, "--devices", "2", "--memory", "1GiB"]) == 0
    printed = capsys.readouterr().out
    assert Plan.parse(printed.rsplit("Best plan: ", 1)[1].strip()).num_devices == 2
    assert "2 of 4x3090, changed: 2 devices of 1.00 GiB" in printed
    assert main([*given, "--devices", "8"]) == 2
    assert "such as 8x3090" in capsys.readouterr().err
    assert main(["machine", "4x3090", "--measure"]) == 2
    assert "leave the name out to measure what is here" in capsys.readouterr().err


def test_the_ranking_shows_one_plan_of_each_shape(saved_profile: Path) -> None:
    found = search(Profile.load(saved_profile), Machine.emulated(2, memory="1MiB"), 8)
    twice = replace(found, candidates=tuple(c for c in found.candidates for _ in range(2)))
    table = ranking_table(twice, limit=1000)
    shapes = list(zip(*(list(table.columns[i].cells) for i in (1, 2, 3)), strict=True))
    assert len(set(shapes)) == len(shapes) == len(set(_shapes(found)))
    assert next(iter(table.columns[0].cells)) == "0"
    assert "Ranks (#) left out are of slower plans" in str(table.caption)


def _shapes(found: SearchResult) -> list[tuple[Any, ...]]:
    return [
        (
            c.plan.mode,
            *(len(c.plan.forward_packs), c.plan.forward_microbatch_size if c.plan.forward_packs else 0),
            *(len(c.plan.backward_packs), c.plan.backward_microbatch_size),
        )
        for c in found.candidates
    ]


def test_what_is_not_possible_is_told_by_group(saved_profile: Path) -> None:
    found = search(Profile.load(saved_profile), Machine.emulated(2, memory="1MiB"), 8)
    rejected = tuple(Rejected(f"dp, microbatches of {size}", "too large [really]") for size in range(9))
    single = (Rejected("dp minibatch=8", "backward is too much"), Rejected("pp minibatch=8", "that too"))
    table = rejected_table(replace(found, rejected=rejected + single))
    whats, whys = (list(column.cells) for column in table.columns)
    assert whats[0] == "dp, microbatches of 0"
    assert whats[-2:] == ["and 3 more such", "2 plans, such as one in dp"]
    assert whys[-1] == "backward is too much"
    everything = rejected_table(replace(found, rejected=()))
    assert [list(column.cells) for column in everything.columns] == [["nothing that was tried"], ["all of it fits"]]


def test_plan_that_cannot_fit_is_an_error_without_traceback(
    saved_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(saved_profile), "--memory", "1KiB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("harmony-lab: ")
    assert "Traceback" not in error
    assert "1.00 KiB" in error


@pytest.mark.parametrize("option", ["--json", "--save-plan"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    saved_profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["plan", str(saved_profile), option, str(tmp_path / "none" / "x.json")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{option} {tmp_path / 'none' / 'x.json'}: there is no folder" in printed.err
    assert main(["machine", "2x3090", "--json", str(tmp_path)]) == 2
    assert "is a folder; give a file in it" in capsys.readouterr().err


def test_what_is_assumed_of_a_machine_is_said_and_no_name_is_ignored(
    saved_profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "2x3090"]) == 0
    assert "host memory 256 GiB (assumed)" in capsys.readouterr().out
    for command in (["machine", ""], ["plan", str(saved_profile), "--machine", ""]):
        assert main(command) == 2
        assert "'' is no machine: a GPU is missing" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "not json", '{"schema": "something else"}'])
def test_unreadable_profile_is_an_error_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("harmony-lab: ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demo", "--steps", "0"],
        ["demo", "--devices", "two"],
        ["demo", "--memory", "lots"],
        ["demo", "--memory", "64"],
        ["demo", "--link", "fast"],
        ["machine", "--link", "5"],
        ["demo", "--mode", "zz"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    assert "usage: harmony-lab" in capsys.readouterr().err


def test_missing_transformers_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    assert main(["demo", "--steps", "1"]) == 2
    assert "pip install 'harmony_lab[demo]'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.strip() == f"harmony-lab {harmony_lab.__version__}"


@pytest.mark.parametrize(
    ("arguments", "devices", "mode"),
    [
        (["--devices", "1", "--memory", "60MB", "--link", "500MB/s"], 1, None),
        (["--devices", "3", "--memory", "24MiB", "--mode", "dp", "--link", "20GB/s"], 3, "dp"),
    ],
)
def test_demo_takes_its_machine_and_mode_from_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], devices: int, mode: str | None
) -> None:
    found, report = tmp_path / "found.json", tmp_path / "report.html"
    assert main(["demo", "--steps", "1", "--json", str(found), "--report", str(report), *arguments]) == 0
    outcome = json.loads(found.read_text())
    plan = Plan.parse(outcome["plan"])
    assert plan.num_devices == len(outcome["device_budget_bytes"]) == devices
    assert mode is None or plan.mode == mode
    options = dict(pairwise(arguments))
    assert set(outcome["device_budget_bytes"]) == {parse_bytes(options["--memory"])}
    assert format_rate(parse_rate(options["--link"])) in capsys.readouterr().out


def test_the_ranking_tells_simulated_plans_from_those_ruled_out_skipped_and_too_large(saved_profile: Path) -> None:
    machine = Machine.emulated(2, memory="1MiB")
    found = search(Profile.load(saved_profile), machine, 8)
    all_simulated = replace(found, num_bounded=0, num_skipped=0, rejected=())
    assert ranking_table(all_simulated).title == f"{len(found.candidates)} plans fit and were simulated"
    some = replace(found, num_bounded=7, num_skipped=5, rejected=(Rejected("dp", "too large"),))
    assert ranking_table(some).title == (
        f"{len(found.candidates)} plans fit and were simulated; 7 ruled out by bounds and forecasts; "
        "5 not simulated: enough were; 1 do not fit"
    )


@pytest.mark.parametrize("module", ["harmony_lab", "harmony_lab.cli"])
def test_the_package_runs_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "demo", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: harmony-lab demo")


def test_the_models_benchmark_writes_a_row_per_model(tmp_path: Path) -> None:
    target = tmp_path / "models.json"
    assert main(["bench", "models", "GPT-2", "MLP with BatchNorm", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["supported"] for row in rows] == [True, True]
    assert all(1.0 <= row["peak_predicted_bytes"] / row["peak_measured_bytes"] <= 1.05 for row in rows)
    assert all(row["max_grad_diff"] < 1e-5 for row in rows)


def test_machine_measures_the_links_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    arguments = ["--devices", "2", "--memory", "8MiB", "--link", "200MB/s", "--json", str(path)]
    assert main(["machine", *arguments]) == 0
    written, expected = Machine.from_json(json.loads(path.read_text())), Machine.emulated(2, memory="8MiB", link=2e8)
    assert written == replace(expected, host=written.host)  # how much of its memory is free changes meanwhile
    assert "emu0 → emu1" not in capsys.readouterr().out
    assert main(["machine", "--measure", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count("host → emu1") == 3  # alone, beside the other, and in both directions at once
    assert "emu0 → emu1" in printed
    assert "all data right" in printed
    found = Machine.from_json(json.loads(path.read_text()))
    assert found.num_devices == 2
    assert all(0 < link.bytes_per_s < 1.1 * 200e6 for link in found.links if link.parent != "host")
