"""Emulated devices: links take their time, freed memory is poisoned."""

import threading
import time

import pytest
import torch

from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Stream, TensorKind
from harmony_lab.runtime.backend import Copy, StepAborted
from harmony_lab.runtime.emulated import EmulatedBackend, poison
from harmony_lab.runtime.reduction import Shard

SIZE = 100_000


def copy(source: int, destination: int, num_bytes: int = SIZE) -> Copy:
    given = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    return Copy(source, destination, TensorKind.WEIGHT, [(torch.empty_like(given), given)])


def start_together(backend: EmulatedBackend, *copies: Copy) -> float:
    """Seconds until the last of these transfers has ended, each in a thread."""
    barrier = threading.Barrier(len(copies) + 1)

    def transfer(one: Copy) -> None:
        barrier.wait()
        backend.transfer([one])

    threads = [threading.Thread(target=transfer, args=(one,)) for one in copies]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def test_a_transfer_copies_and_takes_at_least_bytes_over_rate() -> None:
    backend = EmulatedBackend(Machine.emulated(1, link=2e6))
    moved = copy(HOST, 0)
    began = time.perf_counter()
    backend.transfer([moved])
    assert time.perf_counter() - began >= SIZE / 2e6 - 1e-4
    ((to, source),) = moved.pairs
    assert torch.equal(to, source)


def test_transfers_to_two_devices_share_the_hosts_link() -> None:
    backend = EmulatedBackend(Machine.emulated(2, link=4e6, peer_link=1e9))
    assert start_together(backend, copy(HOST, 0), copy(HOST, 1)) >= 2 * SIZE / 4e6 - 2e-3


def test_a_transfer_is_not_slowed_by_one_whose_thread_has_yet_to_wake() -> None:
    links = EmulatedBackend(Machine.emulated(1, link=1e3))._links
    short, _ = links._start(HOST, 0, 1000)
    long, _ = links._start(HOST, 0, 2000)
    links._settle(time.perf_counter() + 10)
    assert links._ended_s[long] - links._ended_s[short] == pytest.approx(1.0, rel=0.2)


def test_peer_transfers_wait_for_the_slower_of_their_links() -> None:
    backend = EmulatedBackend(Machine.emulated(2, link=1e12, peer_link=2e6))
    assert start_together(backend, copy(0, 1)) >= SIZE / 2e6 - 2e-3


def test_abort_wakes_a_transfer_under_way_and_the_links_are_free_for_the_next_step() -> None:
    backend = EmulatedBackend(Machine.emulated(1, link=1.0))
    outcome: list[BaseException] = []

    def transfer() -> None:
        try:
            backend.transfer([copy(HOST, 0)])
        except StepAborted as error:
            outcome.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    while not backend._links._resources.flows:
        thread.join(0.001)
    backend.abort()
    thread.join(10)
    assert not thread.is_alive()
    assert len(outcome) == 1
    assert not backend._links._resources.flows
    backend.begin()
    backend.transfer([copy(HOST, 0, num_bytes=0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_poisoned_floats_are_nan(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    poison(tensor[1:])
    assert tensor[1:].isnan().all()
    assert not tensor[0].isnan().any()


def test_poisoned_integers_are_no_valid_index() -> None:
    tensor = torch.ones(4, dtype=torch.int64)
    poison(tensor)
    assert (tensor == -1).all()


def test_a_reduction_leaves_the_sum_on_every_device() -> None:
    backend = EmulatedBackend(Machine.emulated(3))
    parts = [torch.full((4,), float(i)) for i in (1, 2, 3)]
    others = [torch.full((2,), i, dtype=torch.float64) for i in (10, 20, 30)]
    shards = [Shard(device, pair) for device, pair in zip((2, 1, 0), zip(parts, others, strict=True), strict=True)]
    moved = backend.reduce(1, shards)
    assert sorted(moved) == [(0, 1, 32), (1, 0, 32), (1, 2, 32), (2, 1, 32)]
    assert all((part == 6).all() for part in parts)
    assert all((part == 60).all() for part in others)


def test_a_workers_number_of_threads_is_its_own() -> None:
    backend = EmulatedBackend(Machine.emulated(1))
    before = torch.get_num_threads()
    seen: list[int] = []

    def work() -> None:
        backend.enter_worker(0, Stream.SWAP_IN)
        torch.ones(10) @ torch.ones(10)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]
    torch.set_num_threads(before)
    assert torch.get_num_threads() == before
