"""Preset GPUs and machines: read from text, sound in their numbers."""

import pytest

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, HOST_MEMORY, Backend, Direction, Hop, Machine
from harmony_lab.presets import GPUS, gpu, preset_machine


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("4090", "4090"),
        ("RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("GeForce GTX 1080 Ti", "1080ti"),
        ("A6000", "a6000"),
        ("a100", "a100-80gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("V100", "v100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h200", "h200"),
    ],
)
def test_a_gpu_is_found_by_any_of_its_names(name: str, short: str) -> None:
    assert gpu(name) is GPUS[short]


def test_every_preset_is_found_by_the_name_that_torch_gives_it() -> None:
    assert all(gpu(card.name) is card for card in GPUS.values())


def test_an_unknown_gpu_is_refused_with_those_there_are() -> None:
    with pytest.raises(HarmonyError, match="called '4091'; there are 1080ti, 3060, 3080"):
        gpu("4091")


def test_numbers_have_a_source_and_the_right_order() -> None:
    for card in GPUS.values():
        assert card.source.startswith("NVIDIA, ")
        assert card.fp32_flops <= card.tf32_flops <= card.fp16_flops
        assert card.bf16_flops in (card.fp32_flops, card.fp16_flops)  # with or without tensor cores for it
        assert 8e9 < card.bytes_per_s / 10 < card.fp32_flops


def test_rates_go_by_type() -> None:
    card = gpu("a100")
    assert card.flops("float32") == 19.5e12
    assert card.flops("float32", tf32=True) == 156e12
    assert card.flops("bfloat16", tf32=True) == 312e12
    assert gpu("v100").flops("bfloat16") == gpu("v100").flops("float32")


def test_context_and_margin_are_left_out_of_what_plans_may_use() -> None:
    card = gpu("1080ti")
    free = card.memory_bytes - 512 * 2**20
    assert card.usable_bytes == free - free // 10
    (device,) = preset_machine("1080ti").devices
    assert (device.memory_bytes, device.model, device.backend) == (card.usable_bytes, card.name, Backend.CUDA)


def test_each_gpu_has_its_own_link_to_the_host() -> None:
    machine = Machine.preset("4x1080ti")
    assert machine.num_devices == 4
    assert machine.capacities[Hop("host-gpu3", Direction.UP)] == 12e9
    assert machine.peer_transfers
    assert machine.route(0, 3) == (Hop("host-gpu0", Direction.UP), Hop("host-gpu3", Direction.DOWN))


def test_lanes_and_switches_are_as_written() -> None:
    machine = preset_machine("8x4090, pcie4 x8 behind 2 switches")
    assert [device.parent for device in machine.devices] == ["switch0"] * 4 + ["switch1"] * 4
    assert machine.capacities[Hop("host-switch1", Direction.DOWN)] == 24e9
    assert machine.capacities[Hop("switch1-gpu7", Direction.DOWN)] == 12e9
    assert machine.route(HOST, 7) == (Hop("host-switch1", Direction.DOWN), Hop("switch1-gpu7", Direction.DOWN))
    assert not machine.peer_transfers  # the driver of these cards allows none
    assert preset_machine("2x4090 peers").peer_transfers


def test_a_card_is_no_faster_than_its_own_generation() -> None:
    assert preset_machine("3090 pcie5").capacities == preset_machine("3090 pcie4").capacities


def test_peers_take_the_fabric_where_there_is_one() -> None:
    machine = Machine.preset("2 x A100-SXM4-80GB")
    assert machine.route(0, 1) == (Hop("fabric-gpu0", Direction.UP), Hop("fabric-gpu1", Direction.DOWN))
    assert machine.capacities[Hop("fabric-gpu0", Direction.UP)] == 300e9
    assert machine.latency_s(machine.route(0, 1)) == 0
    assert machine.route(0, HOST) == (Hop("host-gpu0", Direction.UP),)
    assert Machine.from_json(machine.to_json()) == machine
    without = Machine.preset("2xa100 no nvlink")
    assert without.route(0, 1) == (Hop("host-gpu0", Direction.UP), Hop("host-gpu1", Direction.DOWN))


def test_bridges_join_cards_two_by_two_where_asked_for() -> None:
    machine = Machine.preset("5x3090 nvlink")
    assert [bridge.name for bridge in machine.bridges] == ["gpu0-gpu1", "gpu2-gpu3"]
    assert machine.route(1, 0) == (Hop("gpu0-gpu1", Direction.UP),)
    assert machine.capacities[Hop("gpu0-gpu1", Direction.UP)] == 56.25e9
    assert machine.route(1, 2) == (Hop("host-gpu1", Direction.UP), Hop("host-gpu2", Direction.DOWN))
    assert machine.reaches(2, 3)
    assert not machine.reaches(1, 2)  # over PCIe the driver of these cards allows no copies
    assert not machine.all_reach
    assert Machine.preset("4xa6000 nvlink").all_reach
    assert "directly where bridged" in machine._repr_html_()
    assert Machine.from_json(machine.to_json()) == machine
    assert machine.with_(num_devices=3).bridges == machine.bridges[:1]
    assert Machine.preset("2x3090").bridges == Machine.preset("3090 nvlink").bridges == ()


def test_the_hosts_memory_may_be_a_limit() -> None:
    machine = preset_machine("8x4090, Host 40 GB/s, host 512GiB")
    assert (machine.host.memory_bytes, machine.host.memory_bytes_per_s) == (512 * 2**30, 40e9)
    assert machine.capacities[HOST_MEMORY] == 40e9
    assert machine.route(HOST, 7) == (HOST_MEMORY, Hop("host-gpu7", Direction.DOWN))
    assert machine.route(7, HOST) == (Hop("host-gpu7", Direction.UP), HOST_MEMORY)
    assert machine.route(0, 1).count(HOST_MEMORY) == 2
    assert "37.3 GiB/s" in str(machine)
    assert Machine.from_json(machine.to_json()) == machine
    assert HOST_MEMORY not in preset_machine("8x4090, host 512GiB").capacities


def test_the_hosts_size_may_be_given() -> None:
    host = preset_machine("2xt4, host 64GiB, 10 cores").host
    assert (host.memory_bytes, host.num_cores) == (64 * 2**30, 10)
    assert host.assumed is False
    assumed = preset_machine("2xt4")
    assert (assumed.host.num_cores, assumed.host_words) == (8, "256 GiB (assumed)")
    assert Machine.from_json(assumed.to_json()) == assumed


def test_a_machine_is_taken_as_it_is_or_by_its_text() -> None:
    machine = Machine.preset("2x3080ti")
    assert Machine.of(machine) is machine
    assert Machine.of("2x3080ti") == machine
    with pytest.raises(HarmonyError, match=r"a harmony_lab.Machine or a text like '4x4090', got a int"):
        Machine.of(2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a GPU is missing"),
        ("4x4091", "'4091'"),
        ("4x4090 pcie9", "'pcie9'"),
        ("4x4090 pcie4 x3", "'pcie4 x3'"),
        ("2x4090 behind 3 switches", "2 GPUs behind 3 switches"),
        ("0x4090", "0 GPUs"),
        ("2x4090, fast", "'fast' cannot be read"),
        ("2x4090 nvlink", "has no NVLink; leave 'nvlink' out, .* there for 3090, a6000"),
        ("2x4090, host 40Gb/s", "is in bits"),
        ("2x3090 nvlonk", "'nvlonk' cannot be read .did you mean 'nvlink'"),
        ("2x3090 64GiB", "the host's memory is 'host 64GiB'"),
        ("2x3090 host 40", "'host 40' cannot be read;"),
        ("2x3090, 1x4090", "GPUs of one kind, .* RTX 3090 and NVIDIA GeForce RTX 4090"),
        ("2x3090+4090", "GPUs of one kind"),
        ("1000000x3090", "1000000 GPUs; a machine has 1 to 64"),
    ],
)
def test_text_that_is_no_machine_is_refused(text: str, said: str) -> None:
    with pytest.raises(HarmonyError, match=said):
        preset_machine(text)
    with pytest.raises(HarmonyError, match="a text such as '4x1080ti', got a int"):
        preset_machine(4)  # type: ignore[arg-type]
