"""Copies between devices that lose data are found out; here links stand in for those between cards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harmony_lab.machine import HOST, Machine
from harmony_lab.runtime.device_copies import Peers, arrives, in_parts

CPU = torch.device("cpu")


def _first_half(to: Tensor, tensor: Tensor) -> None:
    to[: len(to) // 2] = tensor[: len(to) // 2]


@pytest.mark.parametrize(
    ("copy", "right"),
    [
        (Tensor.copy_, True),
        (lambda to, tensor: to.zero_(), False),
        (lambda to, tensor: None, False),
        (_first_half, False),
        (lambda to, tensor: to.copy_(tensor.roll(1)), False),
    ],
    ids=["a good link", "zeros arrive", "nothing arrives", "half arrives", "it arrives elsewhere"],
)
def test_a_way_that_loses_data_is_found_out(copy: Callable[[Tensor, Tensor], Any], right: bool) -> None:
    for _ in range(2):  # the second time memory may hold what has arrived before
        assert arrives(CPU, CPU, copy) is right
        assert arrives(CPU, CPU)


class Away:
    """Stands in for a tensor on a device."""

    def cpu(self) -> str:
        return "in host memory"


def test_what_does_not_arrive_goes_by_way_of_the_host() -> None:
    bad, asked, tensor = {(0, 2), (2, 1)}, [], Away()

    def arrive(source: int, destination: int) -> bool:
        asked.append((source, destination))
        return (source, destination) not in bad

    peers = Peers(Machine.emulated(3), arrive)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert sorted(asked) == pairs
    for pair in [*pairs, (HOST, 1), (1, HOST)]:
        found = peers.reachable(*pair, tensor)  # type: ignore[arg-type]
        assert found == "in host memory" if pair in bad else found is tensor, pair


def test_devices_that_should_not_reach_each_other_are_not_tried() -> None:
    peers = Peers(Machine.emulated(2, peer_transfers=False), lambda *pair: pytest.fail(f"{pair} was tried"))
    assert peers.reachable(0, 1, Away()) == "in host memory"  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.parametrize("size", [0, 1, 16 * 2**20, 16 * 2**20 + 1])
def test_large_flat_copies_go_in_parts_that_are_all_of_it(size: int) -> None:
    source, to = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    parts = list(in_parts(to, source))
    assert max(len(part) for part, _ in parts) <= 16 * 2**20
    for part, content in parts:
        part += content  # a byte that two parts have is 2, one that none has is 0
    assert torch.equal(to, source)


def test_others_go_at_once() -> None:
    to, source = torch.zeros(2, 3), torch.ones(2, 3)
    assert [(part is to, content is source) for part, content in in_parts(to, source)] == [(True, True)]
