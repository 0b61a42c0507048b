"""The same training on real devices; needs CUDA."""

from dataclasses import replace

import pytest
import torch
from plain_training import PlainTraining, planned
from small_layers import mlp

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Backend, Machine
from harmony_lab.runtime.accelerator import AcceleratorBackend
from harmony_lab.runtime.runner import Runner


def machine(num_devices: int) -> Machine:
    """CUDA devices with a small budget."""
    emulated = Machine.emulated(num_devices, memory="64KiB", link=1e9)
    return replace(emulated, devices=tuple(replace(device, backend=Backend.CUDA) for device in emulated.devices))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["pp", "dp"])
def test_training_on_cuda_devices_equals_plain_pytorch(mode: str) -> None:
    count = min(2, torch.cuda.device_count())
    devices = ",".join(map(str, range(count)))
    layers = mlp(depth=5, num_samples=8)
    plain = PlainTraining(layers, lambda tensors: torch.optim.AdamW(tensors, lr=1e-2))
    program = planned(
        layers, machine(count), f"{mode} minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices={devices}"
    )
    optimizer = torch.optim.AdamW(list(layers.tensors.values()), lr=1e-2)
    with Runner(layers, optimizer, machine(count), program) as runner:
        for _ in range(5):
            assert runner.step(layers.example_batch) == pytest.approx(plain.step(layers.example_batch), rel=1e-4)
        assert runner.device_bytes == (0,) * count
    plain.assert_equal(1e-3)


def test_a_device_that_is_not_here_is_named() -> None:
    here = torch.cuda.device_count()
    with pytest.raises(HarmonyError, match=f"emu{here} of .* torch sees {here} CUDA devices"):
        AcceleratorBackend(machine(here + 1))
