"""The cache of costs: the same numbers at once, never another layer's, never in the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt2, gpt2_batch
from torch import nn

from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.profiler import cache
from harmony_lab.profiler.cache import CostCache
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile

MACHINE = Machine.emulated(1, memory="64MiB")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_known", {})
    return tmp_path / "harmony_lab" / "costs"


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_known", {})


def blocks(depth: int = 3, width: int = 16, **fields: Any) -> tuple[LayerSequence, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
    layers = decompose(model, (torch.randn(4, width), torch.randn(4, width)), nn.MSELoss())
    return layers, torch.optim.AdamW(model.parameters(), **fields)


def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that are run from here on."""
    from harmony_lab.profiler.bench import Bench

    runs: list[int] = []
    prepare = Bench.prepare.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, layers: Any, index: int, *args: Any) -> Any:
        runs.append(index)
        return prepare(kind, layers, index, *args)

    monkeypatch.setattr(Bench, "prepare", classmethod(counted))
    return runs


@pytest.mark.parametrize("new_process", [False, True])
def test_what_was_measured_before_is_not_measured_again(
    new_process: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = profile(*with_machine(*blocks()), trials=2)
    if new_process:
        forget_process(monkeypatch)
    runs = measured(monkeypatch)
    again = profile(*with_machine(*blocks()), trials=2)
    assert runs == []
    assert again == first
    assert (first.cached, again.cached) == (False, True)
    assert "cached" in str(again)
    assert "cached" not in str(first)


def with_machine(layers: LayerSequence, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return layers, MACHINE, optimizer


def test_a_deeper_model_of_the_same_layers_measures_nothing_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = gpt2_batch(2)
    profile(decompose(gpt2(layers=2), batch), MACHINE, trials=1)
    runs = measured(monkeypatch)
    assert profile(decompose(gpt2(layers=6), batch), MACHINE, trials=1).cached
    assert runs == []


@pytest.mark.parametrize("change", ["width", "trials", "threads", "sizes", "optimizer", "frozen"])
def test_anything_else_is_measured_anew(change: str, folder: Path) -> None:
    profile(*with_machine(*blocks()), trials=1, microbatch_sizes=[2])
    layers, optimizer = blocks(width=24) if change == "width" else blocks()
    machine, sizes = MACHINE, [2]
    if change == "threads":
        from dataclasses import replace

        device = replace(MACHINE.devices[0], compute_threads=MACHINE.devices[0].compute_threads + 1)
        machine = replace(MACHINE, devices=(device,))
    if change == "sizes":
        sizes = [2, 3]
    if change == "optimizer":
        layers, optimizer = blocks(amsgrad=True)
    if change == "frozen":
        model = layers.model
        model[0].requires_grad_(False)
        layers = decompose(model, layers.example_batch, nn.MSELoss())
    again = profile(layers, machine, optimizer, trials=2 if change == "trials" else 1, microbatch_sizes=sizes)
    assert not again.cached
    if change == "optimizer":
        assert again.layers[0].optimizer_state_bytes > 3 * 16 * 16 * 4


def test_a_learning_rate_schedule_changes_no_cost(folder: Path) -> None:
    profile(*with_machine(*blocks(lr=1e-3)), trials=1)
    assert profile(*with_machine(*blocks(lr=1e-4)), trials=1).cached


def test_without_the_cache_nothing_is_read_or_written(folder: Path) -> None:
    layers, optimizer = blocks()
    for _ in range(2):
        assert not profile(layers, MACHINE, optimizer, trials=1, cache=False).cached
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": "other"}', "\x00\x01", "numbers", "too few"])
def test_damaged_files_are_measured_and_written_again(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = profile(*with_machine(*blocks()), trials=1)
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        text = damage
        if damage in ("numbers", "too few"):
            numbers = ["a"] * 8 if damage == "numbers" else [1.0]
            text = json.dumps({**json.loads(file.read_text()), "numbers": numbers})
        file.write_text(text)
    forget_process(monkeypatch)
    again = profile(*with_machine(*blocks()), trials=1)
    assert not again.cached
    assert [item.costs[0][3:7] for item in again.layers] == [item.costs[0][3:7] for item in first.layers]
    forget_process(monkeypatch)
    assert profile(*with_machine(*blocks()), trials=1).cached
    assert sorted(folder.iterdir()) == files  # and no scraps


def test_a_place_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    forget_process(monkeypatch)
    assert not profile(*with_machine(*blocks()), trials=1).cached
    assert profile(*with_machine(*blocks()), trials=1).cached  # in this process


def test_a_size_that_did_not_fit_is_known_not_to_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, optimizer = blocks(width=64)
    small = Machine.emulated(1, memory="56KiB")
    first = profile(layers, small, optimizer, trials=1, minibatch_size=64)
    assert first.largest_microbatch < 64
    runs = measured(monkeypatch)
    assert profile(layers, small, optimizer, trials=1, minibatch_size=64) == first
    assert runs == []
    larger = profile(layers, MACHINE, optimizer, trials=1, minibatch_size=64)
    assert larger.largest_microbatch == 64
    assert all(seconds > 0 for item in larger.layers for cost in item.costs for seconds in cost[:3])


def test_layers_whose_code_may_change_unseen_are_not_kept(folder: Path) -> None:
    layers, _ = blocks()
    modules = decompose(layers.model, layers.example_batch, nn.MSELoss(), layers=list(layers.model))
    assert not profile(modules, MACHINE, trials=1).cached
    assert not profile(modules, MACHINE, trials=1).cached


def test_the_folder_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert CostCache().folder == Path("/somewhere/.cache/harmony_lab/costs")
