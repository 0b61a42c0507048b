"""Training with plain autograd over the same layer functions: what every schedule must equal."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from small_layers import plain_run, samples
from torch import Tensor

from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.measure import profile
from harmony_lab.program import Program

__all__ = ["PlainTraining", "any_size", "breaking", "planned"]

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def any_size(layers: LayerSequence) -> LayerSequence:
    """The same layers for batches of any number of samples."""

    def flatten(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
        return dict(batch), {"batch": next(iter(batch.values())).shape[0]}

    return replace(layers, flatten_batch=flatten)


def planned(layers: LayerSequence, machine: Machine, text: str) -> Callable[[int], Program]:
    """Programs of a plan, lowered and checked, by minibatch size."""
    plan = Plan.parse(text)
    costs = profile(layers, machine, microbatch_sizes=tuple(range(1, plan.minibatch_size + 1)), trials=1)

    def program(minibatch_size: int) -> Program:
        lowered = lower(plan.for_minibatch(minibatch_size), costs, machine)
        check(lowered)
        return lowered

    return program


def breaking(layers: LayerSequence, index: int, before: Callable[[], None]) -> LayerSequence:
    """The same layers, with something called before that layer runs."""
    broken = layers.layers[index]

    def function(*arguments: Any) -> tuple[Tensor, ...]:
        before()
        return broken.function(*arguments)

    changed = replace(broken, function=function)
    return replace(layers, layers=(*layers.layers[:index], changed, *layers.layers[index + 1 :]))


class PlainTraining:
    """Copies of the parameters and buffers, trained on whole minibatches."""

    def __init__(self, layers: LayerSequence, optimizer: MakeOptimizer) -> None:
        self.layers = layers
        self.tensors = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in layers.tensors.items()
        }
        self.optimizer = optimizer([tensor for tensor in self.tensors.values() if tensor.requires_grad])

    def step(self, batch: Mapping[str, Tensor]) -> float:
        self.optimizer.zero_grad()
        size = next(iter(batch.values())).shape[0]
        values = plain_run(self.layers.layers, self.tensors, *samples(batch, 0, size))
        loss = values[self.layers.layers[-1].outputs[0]]
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def assert_equal(self, tolerance: float = 1e-5) -> None:
        """The layers' own tensors are where plain training has led."""
        for name, tensor in self.tensors.items():
            torch.testing.assert_close(
                self.layers.tensors[name].detach(),
                tensor.detach(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m: f"{name}: {m}",  # noqa: B023
            )
