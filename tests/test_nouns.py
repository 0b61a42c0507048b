"""The ground floor: text and JSON forms read back, invariants are listed, units are readable."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import toy_profiles as toys
from hypothesis import given
from hypothesis import strategies as st

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, OutOfRangeError, PlanError, ProgramError
from harmony_lab.machine import HOST, Bridge, Device, Host, Link, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.search import search
from harmony_lab.program import Program, shard_bounds
from harmony_lab.units import format_bytes, format_count, format_seconds, parse_bytes, parse_rate

PLAN = Plan.parse(
    "pp minibatch=8 forward=2[0:2,2:4] backward=4[0:2,2:4,4:6] devices=1,0 prefetch=0 peer=off update=end"
)


def test_a_plan_is_one_line_that_parses_back() -> None:
    assert Plan.parse(str(PLAN)) == PLAN
    assert str(PLAN) == (
        "pp minibatch=8 forward=2[0:2,2:4] backward=4[0:2,2:4,4:6] devices=1,0 prefetch=0 peer=off update=end"
    )


@given(seed=st.randoms(use_true_random=False))
def test_every_plan_survives_text_and_json(seed: "object") -> None:
    plan = toys.random_plan(seed, 7)  # type: ignore[arg-type]
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_broken_plan_lists_every_violation() -> None:
    with pytest.raises(PlanError) as caught:
        PLAN.with_(forward_microbatch_size=9, backward_packs=((0, 2), (3, 6)), devices=(0, 0), prefetch=-1)
    assert len(caught.value.violations) == 5
    assert "without gap or overlap: after 2 comes pack 3:6" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "xx minibatch=8",
        "pp minibatch=8 forward=2[0:2 backward=2[0:4] devices=0",
        "pp minibatch=x forward=1[] backward=1[0:2] devices=0",
    ],
)
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="this is not a plan"):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("update=maybe", "update= is jit, end or next, got 'maybe'"),
        ("minibatch=x", "minibatch= takes a whole number, got .x."),
        ("mirored", "'mirored' is unknown"),
        ("peers=off", "peers= is unknown"),
    ],
)
def test_a_part_that_is_off_is_named(part: str, message: str) -> None:
    name = part.split("=")[0]
    others = [other for other in str(PLAN).split() if not other.startswith(name)]
    with pytest.raises(PlanError, match=message):
        Plan.parse(" ".join([*others, part]))


def test_an_unknown_knob_is_refused() -> None:
    with pytest.raises(PlanError, match="'microbatch' is no knob"):
        PLAN.with_(microbatch=3)


def test_a_smaller_last_minibatch_keeps_the_schedule() -> None:
    small = PLAN.for_minibatch(3)
    assert (small.minibatch_size, small.forward_microbatch_size, small.backward_microbatch_size) == (3, 2, 3)
    assert PLAN.with_(mode="dp").for_minibatch(1).devices == (1,)


def test_files_of_another_kind_or_a_newer_version_are_refused() -> None:
    with pytest.raises(HarmonyError, match=r"a harmony_lab.plan file was expected"):
        Plan.from_json(toys.gpus(2).to_json())
    with pytest.raises(HarmonyError, match="version 99 cannot be read"):
        Plan.from_json({**PLAN.to_json(), "version": 99})


def test_machines_and_profiles_survive_json() -> None:
    machine = Machine.emulated(3, memory="10MiB", link="1GB/s", peer_link="500MB/s")
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    older = machine.to_json() | {"version": 1, "host": {"memory_bytes": 2**30, "num_cores": 2, "update_threads": 1}}
    del older["bridges"]
    assert Machine.from_json(older).links == machine.links
    profile = toys.profile(5, tied=True)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_machine_whose_links_do_not_reach_a_device_is_refused() -> None:
    with pytest.raises(HarmonyError, match="gpu1: no chain of links leads to the host"):
        Machine(
            name="broken",
            devices=(Device(name="gpu0", memory_bytes=1), Device(name="gpu1", memory_bytes=1, parent="nowhere")),
            host=Host(memory_bytes=1, num_cores=1),
            links=(Link(child="gpu0", parent="host", bytes_per_s=1.0),),
        )


def test_without_peer_transfers_devices_reach_each_other_through_the_host() -> None:
    machine = Machine.emulated(2, peer_transfers=False)
    assert [str(hop) for hop in machine.route(0, 1)] == [
        "switch-emu0:up",
        "host-switch:up",
        "host-switch:down",
        "switch-emu1:down",
    ]
    assert machine.route(HOST, HOST) == ()


def test_what_if_changes_memory_link_and_devices() -> None:
    machine = Machine.emulated(3).with_(num_devices=2, memory="1GiB", link="3GB/s")
    assert machine.budgets == (2**30, 2**30)
    assert str(machine).startswith("2 of 3 emulated: 2 devices of 1.00 GiB")
    assert [link.bytes_per_s for link in machine.links if link.parent == "host"] == [3e9]
    with pytest.raises(HarmonyError, match="has 2 devices"):
        machine.with_(num_devices=3)


def test_costs_between_measured_sizes_are_linear_and_beyond_are_refused() -> None:
    profile = toys.profile(4, overhead_s=1.0)
    assert profile.cost(0, 3).forward_s == pytest.approx(
        (profile.cost(0, 2).forward_s + profile.cost(0, 4).forward_s) / 2
    )
    with pytest.raises(OutOfRangeError, match="covers microbatches of 1 to 8 samples, 9 was asked for"):
        profile.cost(0, 9)


def test_a_shared_parameter_counts_once_in_a_pack_that_holds_both_layers() -> None:
    profile = toys.profile(4, tied=True)
    assert profile.weight_bytes(0, 4) == 4 * 1_000_000 - 64_000
    assert profile.weight_bytes(0, 2) + profile.weight_bytes(2, 4) == 4 * 1_000_000


@pytest.mark.parametrize(
    "line", ["nonsense", "0 forward d0.nowhere 0:1 0:1", "%0 weight d0 0:1", "0 forward d0.compute 0:1 0:1 eats=3"]
)
def test_text_that_is_no_program_names_the_line(line: str) -> None:
    with pytest.raises(ProgramError, match="line 2"):
        Program.parse(f"harmony_lab.program 1 minibatch=1 layers=1 budgets=1\n{line}")


@given(num_bytes=st.integers(0, 10**6), shards=st.integers(1, 8))
def test_shards_tile_a_block(num_bytes: int, shards: int) -> None:
    bounds = [shard_bounds(num_bytes, shards, rank) for rank in range(shards)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_bytes
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64MiB", 64 * 2**20), ("1.5 GB", 1_500_000_000), ("2e9", 2_000_000_000), (7, 7), ("512", 512), ("3 KiB", 3072)],
)
def test_sizes_people_write(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_what_is_no_size_or_rate_is_refused() -> None:
    with pytest.raises(HarmonyError, match="a size like '64MiB'"):
        parse_bytes("lots")
    with pytest.raises(ValueError, match="a rate like '12GB/s'"):
        parse_rate("fast")
    with pytest.raises(HarmonyError, match="'12Gbps' is in bits"):
        parse_rate("12Gbps")
    assert parse_rate("12GB/s") == 12e9
    for text in ("5", "5/s", " 2.5"):
        with pytest.raises(ValueError, match=r"write '.*GB/s'"):
            parse_rate(text)
    assert parse_rate(5) == parse_rate("5 B/s") == 5.0
    assert parse_rate("2e9") == 2e9


def test_numbers_people_read() -> None:
    assert [format_bytes(n) for n in (0, 999, 1024, 8_482_560_000)] == ["0 B", "999 B", "1.00 KiB", "7.90 GiB"]
    assert [format_seconds(s) for s in (0, 4.2e-5, 0.31, 1.24, 185)] == [
        "0.00 s",
        "42.0 µs",
        "310 ms",
        "1.24 s",
        "3 min 05 s",
    ]
    assert format_count(6_410_000) == "6.41 M"


def test_records_are_one_line_at_the_prompt() -> None:
    profile, machine = toys.profile(4), toys.gpus(2, memory_bytes=6_000_000)
    trace = search(profile, machine, 4).best_trace
    assert repr(profile).startswith("<Profile of toy on ")
    assert repr(trace) == f"<Trace of a {trace}>"
    ops, blocks = len(trace.program.ops), len(trace.program.blocks)
    assert repr(trace.program) == f"<Program of {ops} ops over {blocks} blocks: minibatch of 4, 4 layers, 2 devices>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bridges": (Bridge(first="emu0", second="emu2", bytes_per_s=1.0),)}, "bridge emu0-emu2: first and second"),
        ({"bridges": (Bridge(first="emu0", second="emu0", bytes_per_s=1.0),)}, "must be two of the devices"),
        ({"bridges": (Bridge(first="emu0", second="emu1", bytes_per_s=0.0),)}, "bytes_per_s must be above 0"),
        (
            {"bridges": tuple(Bridge(first=f"emu{i}", second=f"emu{1 - i}", bytes_per_s=1.0) for i in (0, 1))},
            "one bridge only",
        ),
        ({"host": Host(memory_bytes=1, num_cores=1, memory_bytes_per_s=0.0)}, "the host's memory_bytes_per_s must"),
    ],
)
def test_bridges_and_rates_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HarmonyError, match=message):
        replace(Machine.emulated(2), **changes)


def test_emulated_devices_may_have_bridges_and_share_the_hosts_memory() -> None:
    machine = Machine.emulated(3, bridge="5GB/s", host_memory_rate="3GB/s")
    assert (machine.bridges[0].name, machine.bridges[0].bytes_per_s, len(machine.bridges)) == ("emu0-emu1", 5e9, 1)
    assert machine.host.memory_bytes_per_s == 3e9


def test_a_machine_shows_devices_links_and_host_as_html() -> None:
    machine = Machine.emulated(2, memory="1GiB", link="2GB/s", host_memory="8GiB", peer_transfers=False)
    shown = machine._repr_html_()
    for fact in ("emu1 1.00 GiB", f"host-switch: {machine.links[0].bytes_per_s / 2**30:.2f} GiB/s", "through the host"):
        assert fact in shown
