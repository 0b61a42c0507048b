"""Layers run one after another in plain PyTorch: the reference that schedules and runtimes are compared with."""

from collections.abc import Mapping
from typing import Any

import torch

from harmony_lab.layers import LayerCall, LayerSequence

__all__ = ["run_flat", "run_layers"]


def run_layers(
    layers: LayerSequence, batch: Any, *, seed: int = 0, samples: tuple[int, int] | None = None
) -> torch.Tensor:
    """The loss of a batch, with the user's own parameters and autograd; buffers are updated.

    ``samples``: the range of the minibatch that the batch is, all of it by default.
    """
    tensors, sizes = layers.flatten_batch(batch)
    return run_flat(layers, tensors, seed=seed, samples=samples or (0, sizes["batch"]))


def run_flat(
    layers: LayerSequence, tensors: Mapping[str, torch.Tensor], *, seed: int, samples: tuple[int, int]
) -> torch.Tensor:
    """The same for tensors by name, as ``flatten_batch`` gives them, that are cut to those samples."""
    device = next(iter(tensors.values())).device
    sizes = {**layers.example_sizes, "batch": samples[1] - samples[0]}
    values: dict[str, torch.Tensor] = {}
    for layer in layers.layers:
        call = LayerCall(samples=samples, sizes=sizes, seed=seed, device=device, first_random_op=layer.first_random_op)
        outputs = layer.function(
            [layers.tensors[name] for name in layer.parameters],
            [layers.tensors[name] for name in layer.buffers],
            [values[name] for name in layer.inputs],
            [tensors[name] for name in layer.batch_inputs],
            call,
        )
        values.update(zip(layer.outputs, outputs, strict=True))
    return values[layers.boundaries[-1][0].name]
