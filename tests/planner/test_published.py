"""Published tables become a profile that says what they say, or an error that names what is wrong in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import toy_profiles as toys
from hypothesis import given
from hypothesis import strategies as st
from published_tables import BACKWARD_SIZES, FORWARD_SIZES, tables

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, OutOfRangeError
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts, partitions
from harmony_lab.planner.published import from_published, load_profile
from harmony_lab.planner.search import search


def test_seconds_are_those_of_the_tables_with_the_recompute_taken_out_of_backward() -> None:
    data = tables()
    profile = from_published(data)
    for size in BACKWARD_SIZES:
        for layer in range(6):
            cost = profile.cost(layer, size)
            assert cost.forward_s == cost.recompute_s == data["forward_time_s"][str(size)][layer]
            assert cost.recompute_s + cost.backward_s == pytest.approx(data["backward_time_s"][str(size)][layer])


def test_a_backward_faster_than_the_forward_takes_no_time_of_its_own() -> None:
    data = tables()
    data["backward_time_s"]["3"][2] = 0.5 * data["forward_time_s"]["3"][2]
    assert from_published(data).cost(2, 3).backward_s == 0.0


def test_forward_is_known_beyond_the_sizes_of_backward_and_says_so() -> None:
    data = tables()
    profile = from_published(data)
    assert (profile.largest_microbatch, profile.largest_forward_microbatch) == (5, 9)
    seconds = data["forward_time_s"]
    assert profile.forward_cost(4, 9).forward_s == seconds["9"][4]
    assert profile.forward_cost(4, 6).forward_s == pytest.approx(0.75 * seconds["5"][4] + 0.25 * seconds["9"][4])
    costs = PackCosts(profile)
    assert costs.forward_s(1, 4, 7) == pytest.approx(sum(profile.forward_cost(i, 7).forward_s for i in range(1, 4)))
    with pytest.raises(OutOfRangeError, match=r"1 to 5 samples \(forward alone up to 9\), 6 was asked for"):
        profile.cost(4, 6)
    with pytest.raises(OutOfRangeError, match="10 was asked for"):
        costs.forward_s(0, 2, 10)


def _published_bytes(data: dict[str, Any], way: str, start: int, stop: int, size: int) -> int:
    """The published rule: the sum over a pack's layers less the inputs of all but its first."""
    memory, inputs = data[f"{way}_memory_bytes"][str(size)], data["input_bytes"][str(size)]
    return sum(memory[start:stop]) - sum(inputs[start + 1 : stop])


@given(seed=st.integers(0, 10**6), start=st.integers(0, 5), length=st.integers(1, 6))
def test_the_memory_of_a_pack_is_exactly_what_the_published_rule_says(seed: int, start: int, length: int) -> None:
    data = tables(seed=seed)
    costs = PackCosts(from_published(data))
    stop = min(6, start + length)
    for size in FORWARD_SIZES:
        assert costs.forward_bytes(start, stop, size) == _published_bytes(data, "forward", start, stop, size)
    for size in BACKWARD_SIZES:
        assert costs.backward_bytes(start, stop, size) == _published_bytes(data, "backward", start, stop, size)


def test_boundaries_of_a_pack_that_are_kept_are_part_of_its_memory_not_added_to_it() -> None:
    data = tables()
    costs = PackCosts(from_published(data))
    assert costs.forward_bytes(1, 5, 3, keep=(2, 4, 5)) == _published_bytes(data, "forward", 1, 5, 3)


def test_layers_with_the_same_columns_are_of_one_kind() -> None:
    data = tables()
    for name in ("forward_time_s", "backward_time_s", "forward_memory_bytes", "backward_memory_bytes", "input_bytes"):
        for row in data[name].values():
            row[3] = row[2]
    for name in ("parameter_bytes", "buffer_bytes"):
        data[name][3] = data[name][2]
    for row in data["input_bytes"].values():  # what follows a layer is part of its costs
        row[4] = row[3]
    profile = from_published(data)
    assert profile.layers[2].kind == profile.layers[3].kind
    assert profile.layers[2].costs is profile.layers[3].costs
    assert len({layer.kind for layer in profile.layers}) == 5


def test_a_published_profile_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    profile = from_published(tables())
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile == Profile.load(tmp_path / "p.json")


def test_a_profile_of_before_there_were_forward_only_sizes_is_still_read(tmp_path: Path) -> None:
    profile = toys.profile(3)
    old = profile.to_json()
    for name in ("forward_only_sizes", "additive_memory", "forward_costs_by_kind"):
        del old[name]
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**old, "version": 1}))
    assert load_profile(path) == profile


def test_a_file_of_tables_is_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(tables(num_layers=8)))
    profile = load_profile(path)
    assert profile == from_published(json.loads(path.read_text()), str(path))
    costs = PackCosts(profile)
    budget = max(costs.backward_bytes(layer, layer + 2, 3) for layer in range(7))
    machine = toys.gpus(2, memory_bytes=2 * budget)
    result = search(profile, machine, 6)
    check(lower(result.best, profile, machine))
    assert partitions(costs, 0, 8, 3, forward=False, budget_bytes=budget, counts=(8,))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("parameter_bytes", [1], "parameter_bytes must be 6 numbers"),
        ("num_layers", 0, "num_layers must be a whole number of at least 1, got 0"),
        ("microbatch_sizes", {"forward": [2, 1], "backward": [1]}, "microbatch_sizes must be"),
        ("microbatch_sizes", {"forward": [1], "backward": [3]}, "no microbatch size was measured both"),
        ("microbatch_sizes", {"forward": [1, 2], "backward": [1]}, "forward_time_s must hold 6 numbers.*of 2"),
        ("forward_memory_bytes", None, "forward_memory_bytes must hold 6 numbers"),
        ("buffer_bytes", [10**9] * 6, "layer 0 with 1 samples takes less than its own state and input"),
        ("cpu_update_time_s", [-1.0] * 6, "cpu_update_time_s must be 6 numbers of at least 0"),
    ],
)
def test_what_is_wrong_in_tables_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(HarmonyError, match=message):
        from_published({**tables(), name: value}, "t.json")


def test_inputs_that_do_not_grow_with_the_microbatch_are_refused() -> None:
    data = tables()
    data["input_bytes"]["5"][2] -= 4
    with pytest.raises(HarmonyError, match="input_bytes: layer 2 takes no fixed number of bytes a sample"):
        from_published(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "it is no JSON"),
        ("[1]", "a JSON object was expected, got a list"),
        ('{"model": "x"}', "fields are missing: num_layers, microbatch_sizes"),
        ('{"schema": "harmony_lab.plan", "version": 1}', "a harmony_lab.profile file was expected"),
        ('{"schema": "harmony_lab.profile", "version": 1}', "write it again"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(HarmonyError, match=message):
        load_profile(path)
