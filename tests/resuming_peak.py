"""Peak host memory of training, and of training that is resumed from shards: a program that prints both in bytes."""

import json
import multiprocessing
import resource
import sys
from pathlib import Path

import torch
from torch import nn

from harmony_lab.machine import Machine
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.trainer import Trainer

WIDTH, DEPTH = 1448, 8  # 200 MB of parameters and AdamW's state
PLAN = "dp minibatch=2 forward=2[0:3,3:6] backward=2[0:3,3:6,6:8] devices=0"
MACHINE = Machine.emulated(1, memory="128MiB", link="1e12")


def made(width: int = WIDTH) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(DEPTH)))
    return model, torch.optim.AdamW(model.parameters())


def trained(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> int:
    """The most memory that this process has had after a few steps."""
    width = model[0][0].in_features
    batch = torch.randn(2, width), torch.randn(2, width)
    layers = decompose(model, batch, nn.MSELoss())
    costs = profile(layers, MACHINE, optimizer, microbatch_sizes=(2,), trials=1)
    with Trainer(layers, optimizer, PLAN, MACHINE, profile=costs) as trainer:
        for _ in range(2):
            trainer.step(batch)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(folder: Path) -> int:
    model, optimizer = made()
    peak_bytes = trained(model, optimizer)
    state = optimizer.state_dict()["state"]
    for index in range(DEPTH):
        of_model = {f"{index}.{name}": value for name, value in model[index].state_dict().items()}
        shard = {"model": of_model, "optimizer": {number: state[number] for number in (2 * index, 2 * index + 1)}}
        torch.save(shard, folder / str(index))
    return peak_bytes


def resume(folder: Path) -> int:
    model, optimizer = made()
    state = {}
    for index in range(DEPTH):
        shard = torch.load(folder / str(index), weights_only=True)
        model.load_state_dict(shard["model"], strict=False)
        state |= shard["optimizer"]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return trained(model, optimizer)


if __name__ == "__main__":
    where, peaks = Path(sys.argv[1]), []
    trained(*made(8))  # all that is imported and compiled is there for both
    for work in (train, resume):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            peaks.append(pool.apply(work, (where,)))
    print(json.dumps(peaks))
