"""The baseline in ZeRO-Infinity's order trains like plain PyTorch, and moves what the simulator says."""

import pytest
import torch
from plain_training import PlainTraining, any_size
from small_layers import mlp

from harmony_lab.machine import Machine
from harmony_lab.planner.baselines import baselines
from harmony_lab.profiler.measure import profile
from harmony_lab.runtime.runner import Runner


@pytest.mark.parametrize("peers", [True, False])
def test_streaming_weights_trains_as_plain_pytorch(peers: bool) -> None:
    layers = any_size(mlp(depth=5, num_samples=9))
    machine = Machine.emulated(2, memory="64KiB", link=1e9, peer_transfers=peers)
    costs = profile(layers, machine, microbatch_sizes=(1, 2), trials=1)
    (found,) = baselines(costs, machine, 9, names=["zero-infinity order"])
    assert found.program is not None
    program = found.program
    plain = PlainTraining(layers, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = torch.optim.SGD([t for t in layers.tensors.values() if t.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with Runner(layers, optimizer, machine, lambda size: program, chaos_seed=1) as runner:
        for _ in range(2):
            batch = {
                name: torch.randn(9, *spec.shape, generator=generator) for name, spec in layers.batch_by_name.items()
            }
            assert runner.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)
        measured = runner.last_trace
    plain.assert_equal()
    assert measured is not None
    assert (measured.swap_bytes, measured.peer_bytes) == (found.swap_bytes, found.peer_bytes)
    assert all(here <= there for here, there in zip(measured.peak_bytes, found.peak_bytes, strict=True))
