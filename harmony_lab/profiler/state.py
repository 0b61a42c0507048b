"""Specs of the parameters, buffers and batch tensors that layers read."""

from collections.abc import Mapping, Sequence

import torch

from harmony_lab.layers import Layer, StateSpec, TensorSpec
from harmony_lab.profiler.batch import BatchStructure

__all__ = ["batch_specs", "dtype_name", "state_specs"]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_specs(
    layers: Sequence[Layer], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, StateSpec], dict[str, StateSpec]]:
    """(parameters, buffers) that the layers read, by name, in layer order."""
    return _specs(layers, tensors, "parameters"), _specs(layers, tensors, "buffers")


def _specs(layers: Sequence[Layer], tensors: Mapping[str, torch.Tensor], field: str) -> dict[str, StateSpec]:
    readers: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for name in getattr(layer, field):
            readers.setdefault(name, []).append(index)
    return {
        name: StateSpec(
            name=name,
            shape=tuple(tensors[name].shape),
            dtype=dtype_name(tensors[name].dtype),
            num_bytes=tensors[name].numel() * tensors[name].element_size(),
            trainable=tensors[name].requires_grad,
            layers=tuple(indices),
        )
        for name, indices in readers.items()
    }


def batch_specs(structure: BatchStructure) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=spec.name,
            shape=(1, *spec.shape[1:]) if spec.batched else spec.shape,
            dtype=dtype_name(spec.dtype),
            item_bytes=spec.dtype.itemsize,
            batch_dim=0 if spec.batched else None,
        )
        for spec in structure.tensors
    )
