"""Reference plans are read as plans, on the machine that the reference's cost model describes."""

import json
from pathlib import Path

import pytest

from harmony_lab.bench.reference import load_reference, reference_machine
from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Mode, Pack

ROW = {
    "model": "small",
    "mode": "pp",
    "minibatch_size": 8,
    "num_devices": 2,
    "device_memory_cap_bytes": 9_000_000,
    "search_time_s": 1.5,
    "estimated_iteration_s": 12.0,
    "forward_microbatch_size": 4,
    "forward_packs": [[0, 3]],
    "backward_microbatch_size": 2,
    "backward_packs": [[0, 3], [3, 5]],
}


def test_a_row_is_a_plan_without_prefetch_on_its_machine(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"rows": [ROW]}))
    (row,) = load_reference(path)
    assert row.plan.mode is Mode.PP
    assert row.plan.forward_packs == (Pack(0, 3),)
    assert row.plan.backward_packs == (Pack(0, 3), Pack(3, 5))
    assert (row.plan.prefetch, row.plan.peer_transfers, row.plan.just_in_time_update) == (0, True, True)
    assert row.machine.budgets == (9_000_000, 9_000_000)
    assert (row.search_s, row.estimated_step_s) == (1.5, 12.0)


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"rows": [{"mode": "pp"}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(HarmonyError, match="is no file of reference plans"):
        load_reference(path)


def test_a_folder_without_them_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(HarmonyError, match=r"MODEL.json, and what their scheduler plans for them"):
        load_reference(tmp_path / "reference_plans.json")


def test_devices_have_fixed_shares_of_the_host_link_and_reach_each_other_without_it() -> None:
    machine = reference_machine(4, 10**9)
    rates = machine.capacities
    for device in range(4):
        (hop,) = machine.route(HOST, device)
        assert rates[hop] == pytest.approx(11.5 * 2**30 / 4)
    assert all(rates[hop] == pytest.approx(8.2 * 2**30) for hop in machine.route(0, 3))
    assert not {*machine.route(HOST, 0), *machine.route(1, HOST)} & {*machine.route(0, 1)}


def test_the_time_to_release_memory_is_part_of_a_saved_machine() -> None:
    machine = reference_machine(2, 10**9)
    assert [device.release_s for device in machine.devices] == [0.04, 0.04]
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
