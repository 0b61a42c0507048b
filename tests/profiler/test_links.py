"""Link probes: rates and shared links found from copies, wrong peer data noticed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, Backend, Device, Direction, Hop, Host, Link, Machine
from harmony_lab.presets import preset_machine
from harmony_lab.profiler.links import LinkProbe, probe_links, probe_with
from harmony_lab.sharing import Flow, fair_rates

GB = 1e9


class FairMover:
    """Copies that go as fast as fair sharing of the links of ``truth`` lets them; ``wrong`` peers bring wrong data."""

    pins: tuple[bool | None, ...] = (True, False)

    def __init__(self, truth: Machine, wrong: Sequence[tuple[int, int]] = (), pageable: float = 0.5) -> None:
        self.truth = truth
        self.wrong = wrong
        self.pageable = pageable

    def move(self, pairs: Sequence[tuple[int, int]], pinned: bool | None) -> list[tuple[float, bool]]:
        flows = [Flow(resources=self.truth.route(*pair), remaining=1.0) for pair in pairs]
        capacities: Mapping[Hashable, float] = dict(self.truth.capacities.items())
        share = self.pageable if pinned is False else 1.0
        rates = fair_rates(flows, capacities)
        return [(rate * share, pair not in self.wrong) for rate, pair in zip(rates, pairs, strict=True)]


def flat(count: int, **fields: object) -> Machine:
    """As ``Machine.detect`` sees it: every device on a link of its own, of an assumed rate."""
    devices = tuple(Device(name=f"gpu{i}", memory_bytes=10**9, ordinal=i, backend=Backend.CUDA) for i in range(count))
    links = tuple(Link(child=d.name, parent="host", bytes_per_s=12 * GB, latency_s=1e-5) for d in devices)
    host = Host(memory_bytes=10**10, num_cores=4)
    return Machine(name="flat", devices=devices, host=host, links=links, **fields)  # type: ignore[arg-type]


def rates(machine: Machine) -> dict[str, float]:
    return {link.name: link.bytes_per_s for link in machine.links}


def test_links_of_their_own_keep_their_own_measured_rates() -> None:
    truth = replace(
        flat(2),
        links=(
            Link(child="gpu0", parent="host", bytes_per_s=11 * GB),
            Link(child="gpu1", parent="host", bytes_per_s=5 * GB),
        ),
    )
    probe = probe_with(FairMover(truth), flat(2))
    assert rates(probe.machine) == {"host-gpu0": 11 * GB, "host-gpu1": 5 * GB}
    assert [link.latency_s for link in probe.machine.links] == [1e-5, 1e-5]
    assert probe.rate(HOST, 1) == 5 * GB
    assert probe.rate(HOST, 1, pinned=False) == 2.5 * GB
    assert probe.rate(1, HOST, at_once=2) == 5 * GB
    assert probe.rate(0, 1) == 5 * GB


def test_devices_that_slow_each_other_down_are_put_behind_a_switch() -> None:
    truth = preset_machine("4x1080ti behind 2 switches")
    found = probe_with(FairMover(truth), flat(4)).machine
    assert [device.parent for device in found.devices] == ["switch0", "switch0", "switch1", "switch1"]
    assert rates(found) == pytest.approx(rates(truth))
    assert found.route(0, 1) == (Hop("switch0-gpu0", Direction.UP), Hop("switch0-gpu1", Direction.DOWN))


def test_a_limit_of_all_devices_together_is_found_even_where_pairs_run_free() -> None:
    truth = replace(
        flat(4),
        devices=tuple(replace(device, parent="hub") for device in flat(4).devices),
        links=(
            Link(child="hub", parent="host", bytes_per_s=30 * GB),
            *(replace(link, parent="hub") for link in flat(4).links),
        ),
    )
    found = probe_with(FairMover(truth), flat(4)).machine
    assert rates(found) == pytest.approx(rates(truth))


def test_switches_that_are_known_get_the_rate_of_all_their_devices() -> None:
    truth = preset_machine("4x4090, pcie4 x8 behind 2 switches")
    assumed = replace(truth, links=tuple(replace(link, bytes_per_s=1.0) for link in truth.links))
    found = probe_with(FairMover(truth), assumed).machine
    assert found == truth


def test_wrong_data_between_peers_sends_all_peers_through_the_host() -> None:
    probe = probe_with(FairMover(flat(3), wrong=[(2, 1)]), flat(3))
    assert not probe.machine.peer_transfers
    assert [(item.source, item.destination) for item in probe.rates if not item.verified] == [(2, 1)]
    assert "1 with wrong data" in str(probe)
    assert "through the host" in str(probe)
    assert "gpu2 → gpu1</td><td>alone</td><td></td>" in probe._repr_html_()
    assert probe.machine.route(0, 1) == (Hop("host-gpu0", Direction.UP), Hop("host-gpu1", Direction.DOWN))


def test_peers_faster_than_the_links_have_a_fabric() -> None:
    truth = preset_machine("4xv100")
    found = probe_with(FairMover(truth), flat(4)).machine
    assert found.fabric_bytes_per_s == 150 * GB
    assert found.peer_transfers
    assert probe_with(FairMover(flat(2)), flat(2)).machine.fabric_bytes_per_s is None


@pytest.mark.parametrize("known", [True, False])
def test_pairs_faster_than_their_links_have_bridges(known: bool) -> None:
    truth = preset_machine("4x3090 nvlink")
    given = replace(flat(4), peer_transfers=False, bridges=truth.bridges if known else ())
    found = probe_with(FairMover(truth), given).machine
    assert found.bridges == truth.bridges
    assert (found.peer_transfers, found.fabric_bytes_per_s, found.links) == (False, None, truth.links)


def test_wrong_data_over_a_bridge_or_between_others_is_not_copied_directly() -> None:
    truth = preset_machine("4xa6000 nvlink")
    found = probe_with(FairMover(truth, wrong=[(1, 0), (0, 2)]), flat(4)).machine
    assert [bridge.name for bridge in found.bridges] == ["gpu2-gpu3"]
    assert not found.peer_transfers


def test_the_hosts_memory_is_found_where_both_directions_slow_each_other_down() -> None:
    truth = preset_machine("4x1080ti, host 60GB/s")
    probe = probe_with(FairMover(truth), flat(4))
    assert probe.machine.host.memory_bytes_per_s == pytest.approx(60 * GB)
    assert rates(probe.machine) == rates(truth)
    assert probe.rate(HOST, 3, at_once=8) == pytest.approx(7.5 * GB)
    assert probe_with(FairMover(flat(4)), flat(4)).machine.host.memory_bytes_per_s is None


def test_one_device_is_enough() -> None:
    probe = probe_with(FairMover(flat(1)), flat(1))
    assert len(probe.rates) == 4  # there and back, pinned and not
    assert probe.machine == flat(1)


def test_the_frame_has_a_row_per_measurement() -> None:
    frame = probe_with(FairMover(flat(2)), flat(2)).to_frame()
    assert len(frame) == 2 * (4 + 4) + 4 + 2
    assert set(frame["source"]) == {"host", "gpu0", "gpu1"}
    assert set(frame.columns) == {"source", "destination", "at_once", "pinned", "bytes_per_s", "verified"}


def test_what_was_never_measured_is_not_invented() -> None:
    probe: LinkProbe = probe_with(FairMover(flat(1)), flat(1))
    with pytest.raises(KeyError):
        probe.rate(0, 1)


@pytest.mark.parametrize("peer_transfers", [True, False])
def test_emulated_links_are_really_copied_over(peer_transfers: bool) -> None:
    machine = Machine.emulated(2, memory="8MiB", link="60MB/s", peer_link="40MB/s", peer_transfers=peer_transfers)
    probe = probe_links(machine)
    assert all(item.verified for item in probe.rates)
    for item in probe.rates:
        if item.at_once == 1:
            assert 0.2 * 40e6 < item.bytes_per_s < 1.05 * 40e6
    together = sum(item.bytes_per_s for item in probe.rates if item.at_once == 2) / 2  # there and back
    assert 0.2 * 60e6 < together < 1.1 * 60e6
    assert probe.machine.peer_transfers is peer_transfers
    assert {link.name for link in probe.machine.links} == {link.name for link in machine.links}


def test_devices_that_are_not_here_are_refused_by_name() -> None:
    machine = replace(flat(1), devices=(Device(name="gpu0", memory_bytes=10**9, ordinal=99, backend=Backend.CUDA),))
    with pytest.raises(HarmonyError, match="gpu0 cannot be measured: torch sees"):
        probe_links(machine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_links_are_measured_with_right_data() -> None:
    machine = Machine.detect()
    allocated = [torch.cuda.memory_allocated(device.ordinal) for device in machine.devices]
    probe = probe_links(machine)
    assert all(item.bytes_per_s > 1e8 for item in probe.rates)
    assert all(item.verified for item in probe.rates if HOST in (item.source, item.destination))
    assert probe.rate(HOST, 0, pinned=True) > probe.rate(HOST, 0, pinned=False) * 0.8
    assert [torch.cuda.memory_allocated(device.ordinal) for device in machine.devices] == allocated
