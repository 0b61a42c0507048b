"""Link load: bytes over time add up to what was moved, and show where they were moved."""

from dataclasses import replace

import numpy as np
import pytest
from figures.pipelines import long_trace, pipeline_trace, trace_of

from harmony_lab.figures.link_load import hop_name, link_load, link_load_spec
from harmony_lab.figures.spec import spec_json
from harmony_lab.figures.svg import links_svg
from harmony_lab.machine import HOST_MEMORY, Direction, Hop, Machine
from harmony_lab.program import Program


def test_bytes_over_time_add_up_to_the_bytes_of_the_trace() -> None:
    for trace in (pipeline_trace(), long_trace(2000)):
        load = link_load(trace)
        expected: dict[Hop, int] = {}
        for (hop, _), num_bytes in trace.link_bytes.items():
            expected[hop] = expected.get(hop, 0) + num_bytes
        assert set(load.hops) == set(expected)
        for hop, row in zip(load.hops, load.num_bytes, strict=True):
            assert row.sum() == pytest.approx(expected[hop], rel=1e-6)


@pytest.mark.parametrize("bridge", [None, 1e9])
def test_the_hosts_memory_and_bridges_have_rows_of_their_own(bridge: float | None) -> None:
    given = pipeline_trace()
    machine = Machine.emulated(2, peer_transfers=False, bridge=bridge, host_memory_rate="3GB/s")
    trace = replace(given, machine=machine)
    load = link_load(trace)
    memory = load.num_bytes[load.hops.index(HOST_MEMORY)].sum()
    # What goes through the host is written there and read again.
    assert memory == pytest.approx(given.swap_bytes + (0 if bridge else 2 * given.peer_bytes), rel=1e-6)
    assert memory == sum(n for (hop, _), n in trace.link_bytes.items() if hop == HOST_MEMORY)
    names = {hop_name(hop) for hop in load.hops}
    assert names >= {"host memory ↕"} | ({"emu0-emu1 ↓", "emu0-emu1 ↑"} if bridge else set())
    assert "host memory ↕" in links_svg(trace)


def test_a_transfer_shows_in_the_time_it_took() -> None:
    trace = pipeline_trace()
    load = link_load(trace, num_stretches=37)  # of 1 ms
    up = load.num_bytes[load.hops.index(Hop("host-switch", Direction.UP))]
    assert np.flatnonzero(up > 1).tolist() == [7, 22, 23, 24, 25, 30, 31, 32]
    assert up[22:26] == pytest.approx(np.full(4, 3145728 / 4), rel=1e-6)


def test_a_full_link_has_a_share_of_one() -> None:
    text = """
    harmony_lab.program 1 minibatch=1 layers=1 budgets=4000000000
    %0 weight d0 0:1 0:0 2000000000
    0 swap_in d0.swap_in 0:1 0:0 writes=0
    """
    load = link_load(trace_of(Program.parse(text), np.array([0.0]), np.array([1.0])))  # over links of 2 GB/s
    assert load.shares == pytest.approx(np.ones_like(load.shares))


def test_the_heatmap_names_every_link_and_is_small() -> None:
    trace = long_trace(20_000)
    spec = link_load_spec(trace)
    assert len(spec["data"][0]["y"]) == len(link_load(trace).hops)
    assert spec["data"][0]["y"][0].startswith(hop_name(link_load(trace).hops[0]))
    assert len(spec_json(spec)) < 100_000


def test_the_static_picture_names_every_link_and_is_small() -> None:
    trace = long_trace(20_000)
    picture = links_svg(trace)
    for hop in link_load(trace).hops:
        assert hop_name(hop) in picture
    assert len(picture) < 120_000
    assert "of what it could" in picture


def test_a_trace_without_transfers_says_so() -> None:
    empty = Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=())
    spec = link_load_spec(trace_of(empty, np.zeros(0), np.zeros(0)))
    assert spec["layout"]["annotations"][0]["text"] == "nothing is moved"
    assert "nothing is moved" in links_svg(trace_of(empty, np.zeros(0), np.zeros(0)))
