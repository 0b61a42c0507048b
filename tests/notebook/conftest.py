"""A small Lab that the notebook's tests share: five equal layers on two devices that do not hold them together."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import harmony_lab as hl

WIDTH, MINIBATCH = 64, 8


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(MINIBATCH, WIDTH), torch.randn(MINIBATCH, WIDTH)) for _ in range(3)]


@pytest.fixture
def lab(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[hl.Lab]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    machine = hl.Machine.emulated(2, memory="100KiB", link="1GB/s")
    optimizer = torch.optim.Adam(model.parameters())
    made = hl.Lab(
        model, batches[0], optimizer, loss_fn=nn.functional.mse_loss, minibatch_size=MINIBATCH, machine=machine
    )
    with made:
        yield made
