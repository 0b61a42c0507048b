"""The bytes that MemoryTracker counts, against shapes worked out by hand."""

import gc
import threading

import pytest
import torch
from torch import Tensor

from harmony_lab.errors import DeviceMemoryError
from harmony_lab.runtime.memory import MemoryTracker


class Ledger:
    """Alive and peak bytes; refuses to go over a budget."""

    def __init__(self, budget: int = 10**12) -> None:
        self.alive = self.peak = 0
        self.budget = budget

    def allocated(self, num_bytes: int) -> None:
        if self.alive + num_bytes > self.budget:
            raise DeviceMemoryError(f"{num_bytes} bytes do not fit")
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)

    def released(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def tracker(ledger: Ledger) -> MemoryTracker:
    return MemoryTracker(ledger.allocated, ledger.released)


def test_forward_counts_results_and_what_autograd_saves(ledger: Ledger, tracker: MemoryTracker) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)
    with tracker:
        y = (x @ w).relu().sum()
    # The product is a temporary: relu saves its result, not its input.
    assert ledger.alive == 4 * 16 * 4 + 4
    assert ledger.peak == 2 * 4 * 16 * 4
    del y
    assert ledger.alive == 0


def test_backward_counts_gradients_and_frees_saved_activations(ledger: Ledger, tracker: MemoryTracker) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)
    with tracker:
        y = (x @ w).relu().sum()
        y.backward()
    del y
    assert ledger.alive == 8 * 16 * 4  # w.grad
    w.grad = None
    assert ledger.alive == 0


def test_backward_into_a_preset_gradient_leaves_nothing(ledger: Ledger, tracker: MemoryTracker) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)
    w.grad = torch.zeros_like(w)
    with tracker:
        (x @ w).sum().backward()
    assert ledger.alive == 0
    assert torch.equal(w.grad, x.t() @ torch.ones(4, 16))


def test_views_and_in_place_ops_count_nothing(ledger: Ledger, tracker: MemoryTracker) -> None:
    x = torch.zeros(6, 4)
    with tracker:
        views = [x.view(24), x.t(), *x.split(2), x.add_(1), x.reshape(2, 12), x.detach(), x[1]]
        assert ledger.peak == 0
        fresh = x.t().reshape(24)  # has to copy
    assert ledger.alive == 24 * 4
    del views, fresh
    assert ledger.alive == 0


def test_every_result_of_an_op_counts(ledger: Ledger, tracker: MemoryTracker) -> None:
    x = torch.randn(5, 32)
    with tracker:
        values, indices = x.topk(3, dim=1)
    assert ledger.alive == 5 * 3 * (4 + 8)
    del values, indices
    assert ledger.alive == 0


def test_a_view_keeps_its_storage_counted(ledger: Ledger, tracker: MemoryTracker) -> None:
    with tracker:
        row = torch.ones(10, 10)[0]
    gc.collect()
    assert ledger.alive == 400
    del row
    assert ledger.alive == 0


def test_release_counts_after_the_tracker_was_left_and_on_any_thread(ledger: Ledger, tracker: MemoryTracker) -> None:
    with tracker:
        held = [torch.ones(256)]
    assert ledger.alive == 1024
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert ledger.alive == 0


def test_ops_of_other_threads_do_not_count(ledger: Ledger, tracker: MemoryTracker) -> None:
    made: list[Tensor] = []
    with tracker:
        thread = threading.Thread(target=lambda: made.append(torch.ones(256)))
        thread.start()
        thread.join()
    assert made[0].numel() == 256
    assert ledger.peak == 0


def test_forget_hands_the_bytes_over_once(ledger: Ledger, tracker: MemoryTracker) -> None:
    with tracker:
        block = torch.ones(256)
        assert tracker.forget(block) == 1024
        assert ledger.alive == 0
        assert tracker.forget(block) == 0
        view = block.view(16, 16)
    assert ledger.alive == 0
    del block, view
    assert ledger.alive == 0


def test_a_refused_allocation_leaves_the_account_right() -> None:
    ledger = Ledger(budget=2048)
    tracker = MemoryTracker(ledger.allocated, ledger.released)
    with tracker:
        first = torch.ones(256)
        with pytest.raises(DeviceMemoryError, match="4096 bytes do not fit"):
            torch.ones(1024)
        second = torch.ones(256)
    assert ledger.alive == 2048
    del first, second
    assert ledger.alive == 0


def test_a_refused_allocation_inside_backward_leaves_the_account_right() -> None:
    ledger = Ledger()
    tracker = MemoryTracker(ledger.allocated, ledger.released)
    w = torch.randn(64, 64, requires_grad=True)
    with tracker:
        y = (torch.ones(1, 64) @ w).sum()
        ledger.budget = ledger.alive + 600  # the gradient of w takes 16 KiB
        with pytest.raises(DeviceMemoryError):
            y.backward()
    del y
    assert ledger.alive == 0
    assert w.grad is None


def test_reused_addresses_do_not_confuse_the_account(ledger: Ledger, tracker: MemoryTracker) -> None:
    with tracker:
        for _ in range(200):
            x = torch.ones(128)
            y = x.view(-1) + 1
            assert ledger.alive == 1024
            del x, y
            assert ledger.alive == 0
