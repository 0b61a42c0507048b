"""Benchmarks of the runtime, on models small enough to run in a second: what they report, not how fast it is."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harmony_lab.bench import chaos, compiled, gpu, prediction, runtime
from harmony_lab.bench.decoder import Decoder, Shape, decoder_batch
from harmony_lab.bench.training import Subject, emulated, layerwise_plan, plain_step, trainer
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode
from harmony_lab.program import Stream

TINY = Shape(name="tiny", num_blocks=2, width=16, num_heads=2, length=8, vocabulary=32)
DEEP = replace(TINY, num_blocks=8, width=32)


def test_runtime_reports_every_ratio_and_runs_the_chaos_plans_asked_for(tmp_path: Path) -> None:
    found = runtime.bench_runtime(chaos_plans=2, rounds=2, shapes=(TINY,))
    ratios = ("overhead_vs_checkpoint", "overhead_smallest", "speedup_two_devices_pp", "speedup_two_devices_dp")
    overlaps = ("overlap_ratio", "predicted_overlap_ratio", "overlap_ratio_busier_way", "overlap_ratio_every_phase")
    assert all(found[name] > 0 for name in (*ratios, *overlaps, "predicted_speedup_pp"))
    assert found["speedup_two_processes"] > 0
    assert found["resume_step_ratio"] > 0
    assert (found["chaos_plans"], found["chaos_failures"]) == (2, 0)
    runtime.to_json(found, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["overheads"].keys() == {"tiny"}


def test_every_transfer_in_and_all_computing_belong_to_one_phase() -> None:
    subject = Subject(TINY, 8, 2)
    machine = emulated(1)
    with trainer(subject, layerwise_plan(subject, Mode.DP, 1), machine, subject.profile(machine, trials=1)) as ours:
        trace = ours.predicted
    forward, rest = runtime._phases([trace])
    assert 0 < forward.num_bytes < rest.num_bytes
    into, out = runtime._moved_bytes(trace)
    assert forward.num_bytes + rest.num_bytes == into
    assert into + out == trace.swap_bytes
    assert forward.seconds + rest.seconds == pytest.approx(trace.busy_s[0, Stream.COMPUTE])
    assert 0 < forward.seconds < rest.seconds


def test_prediction_reports_a_row_per_mode_and_link_with_exact_swap_bytes(tmp_path: Path) -> None:
    found = prediction.bench_prediction(rounds=1, steps=1, shapes=(TINY,))
    assert len(found["rows"]) == len(Mode) * len(prediction.LINKS)
    for row in found["rows"]:
        assert row["swap_bytes_predicted"] == row["swap_bytes_measured"]
        measured, predicted = row["peak_bytes_measured"], row["peak_bytes_predicted"]
        assert all(m <= p for m, p in zip(measured, predicted, strict=True))
        assert row["error"] == pytest.approx(abs(row["measured_s"] / row["predicted_s"] - 1))
        assert row["streams"]["d1.compute"]["measured_s"] > 0
        assert row["virtual_streams"]["d1.compute"]["measured_s"] <= row["virtual_measured_s"]
    assert found["worst_error"] == max(row["error"] for row in found["rows"])
    assert 0 <= found["median_stream_error"] <= found["worst_stream_error"]
    assert found["virtual_worst_error"] == max(row["virtual_error"] for row in found["rows"])
    assert 0 <= found["virtual_median_stream_error"] <= found["virtual_worst_stream_error"]
    prediction.to_json(found, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["rows"]


def test_a_row_of_predictions_is_of_the_round_in_the_middle() -> None:
    rounds = [{"measured_s": measured_s, "predicted_s": 1.0} for measured_s in (1.5, 0.9, 1.1)]
    assert prediction._typical(rounds) is rounds[2]


def test_compiled_layers_are_set_beside_plain_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "compile_layers", lambda layers: layers)  # compiling has tests of its own
    found = compiled.bench_compiled(rounds=1, shapes=(TINY,))
    (row,) = found["rows"]
    assert row["saved_ratio"] == 1
    assert found["median_ratio"] == row["ratio"] > 0
    assert row["compute_ratio"] > 0
    compiled.to_json(found, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == found


def test_the_plain_step_that_overhead_is_measured_against_does_the_same_work() -> None:
    subject = Subject(TINY, 8, 2)
    machine = emulated(1)
    with trainer(subject, layerwise_plan(subject, Mode.DP, 1), machine, subject.profile(machine, trials=1)) as ours:
        losses = [ours.step(subject.batch) for _ in range(3)]
    torch.manual_seed(0)
    step = plain_step(TINY, 8, 2)
    (model,) = (cell.cell_contents for cell in step.__closure__ or () if isinstance(cell.cell_contents, Decoder))
    expected = []
    for _ in range(3):
        with torch.no_grad():
            expected.append(model(*subject.batch).item())
        step()
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_chaos_failure_comes_with_the_seed_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chaos.run_plan(1) is None
    right = chaos.train_plainly
    monkeypatch.setattr(chaos, "train_plainly", lambda *given: {**right(*given), "losses": [0.0, 0.0]})
    found = chaos.failures(2)
    assert set(found) == {0, 1}
    assert "not close" in found[1]
    assert chaos.run_plan(1) == found[1]


def test_chaos_leaves_its_models_as_they_were() -> None:
    for seed in range(4):
        model = chaos._work(random.Random(seed)).subject.model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        chaos.run_plan(seed)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_gpu_benchmark_runs_in_its_emulated_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "_EMULATED", DEEP)
    monkeypatch.setattr(gpu, "_links", lambda machine: {"error": "not probed here"})
    gpu.main(["--json", str(tmp_path / "gpu.json")])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["emulated"]
    assert found["equality"]["parameters_off_by"] < 1e-5
    training = found["training"]
    assert training["state_bytes"] >= 3 * training["budget_bytes"]
    assert training["swap_bytes_predicted"] == training["swap_bytes_measured"]
    assert training["over_lower_bound"] == training["measured_step_s"] / training["lower_bound_step_s"]
    assert training["faster_than_save_on_cpu"] > 0
    assert found["fsdp_cpu_offload_step_s"] == "needs a GPU"


def test_a_part_of_the_gpu_benchmark_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: Machine) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(gpu, "_EMULATED", TINY)
    monkeypatch.setattr(gpu, "_links", fail)
    monkeypatch.setattr(gpu, "_training", lambda shape, machine, precision: fail(machine))
    found = gpu.bench_gpu()
    assert found["links"] == found["training"] == found["training_bf16"] == {"error": "RuntimeError: no such luck"}
    assert found["save_on_cpu_step_s"] > 0


def test_the_decoder_takes_shifted_tokens() -> None:
    tokens, targets = decoder_batch(TINY, 4)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert Decoder(TINY)(tokens, targets).item() == pytest.approx(torch.tensor(32.0).log().item(), abs=0.5)
