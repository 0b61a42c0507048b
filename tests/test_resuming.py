"""Training resumed from a file has the memory of training that went on, and does in a step what that does."""

import io
import json
import subprocess
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import resuming_peak
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.runtime.runner import Runner

MACHINE = Machine.emulated(2, memory="64MiB", link=1e12)
PLANS = {
    "updated on the host": "pp minibatch=8 forward=4[0:2,2:4] backward=4[0:2,2:4,4:6] devices=0,1",
    "updated on devices": "pp minibatch=8 forward=4[0:2,2:4] backward=4[0:2,2:4,4:6] devices=0,1 "
    "mirrored=on resident=2:4 optimizer=0:2,2:4,4:6",
}
STEPS = 3


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of processes are compared, which begin as copies of one")
def test_resuming_takes_no_more_memory_than_training_and_a_shard(tmp_path: Path) -> None:
    program = [sys.executable, resuming_peak.__file__, str(tmp_path)]
    found = subprocess.run(program, check=True, capture_output=True, text=True, cwd=Path.cwd())
    trained, resumed = json.loads(found.stdout)
    shards = [file.stat().st_size for file in tmp_path.iterdir()]
    assert trained > sum(shards) > 2e8
    assert resumed <= trained + max(shards)


@cache
def subject(number: int) -> tuple[nn.Module, LayerSequence, Profile]:
    """Two of the same model."""
    model = models.dropout_mlp(width=8, blocks=6)
    layers = decompose(model, batch(4), nn.MSELoss())
    optimizer = torch.optim.AdamW(model.parameters())
    return model, layers, profile(layers, MACHINE, optimizer, microbatch_sizes=(4,), trials=1)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, size, 8, generator=torch.Generator().manual_seed(0))
    return inputs, targets


def from_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Ops(TorchDispatchMode):
    """What torch does on this thread: ops, by the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, Any]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[str(func), getattr(result, "shape", None)] += 1
        return result


class Training:
    def __init__(self, number: int, plan: str, first_step: int = 0, state: Any = None) -> None:
        self.model, self.layers, costs = subject(number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if state is not None:
            self.load(state)
        program = lower(Plan.parse(plan), costs, MACHINE)
        self.runner = Runner(
            self.layers, self.optimizer, MACHINE, lambda _: program, interleaves=True, first_step=first_step
        )

    def state(self) -> Any:
        return from_file({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self) -> float:
        return self.runner.step(batch(8))

    def observed_step(self) -> dict[str, Any]:
        """All that decides how long a step takes."""
        with Ops() as ops:
            self.step()
        assert self.runner.last_trace is not None
        parameters = list(self.layers.tensors.values())
        states = self.optimizer.state.values()
        return {
            "ops": ops.counts,
            "moved": self.runner.last_trace.moved_bytes,
            "threads": threading.active_count(),
            "held on devices": self.runner.device_bytes,
            "on the host": self.runner.host_bytes,
            "places": [parameter.data_ptr() - parameters[0].data_ptr() for parameter in parameters],
            "state": [{key: (v.device, v.dtype, v.stride()) for key, v in state.items()} for state in states],
        }


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("anew", [True, False], ids=["by a new one", "by the one that is open"])
def test_a_step_of_resumed_training_does_what_a_step_did_before(plan: str, anew: bool) -> None:
    going_on = Training(0, plan)
    for _ in range(STEPS):
        going_on.step()
    state = going_on.state()
    before = going_on.observed_step()
    assert any(before["held on devices"]) == ("optimizer=" in plan)
    expected = going_on.step()
    if anew:
        resumed = Training(1, plan, STEPS, state)
    else:
        resumed = going_on
        resumed.load(state)
        resumed.runner.step_count = STEPS
    resumed.step()  # the first brings what stays on devices there
    assert resumed.step() == expected
    assert resumed.observed_step() == before
    resumed.runner.close()
    going_on.runner.close()
