"""Coupling: whether samples of one microbatch influence each other in a layer, told by running it on two of them."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from harmony_lab.layers import LayerCall, LayerSequence, TensorSpec
from harmony_lab.runtime.moves import batch_slice

__all__ = ["coupled_layers"]

_TOLERANCE = 1e-3  # far above rounding, far below what a sample that matters changes
_SAMPLES = 2
_SEED = 0


def coupled_layers(layers: LayerSequence, suspects: Collection[int]) -> list[int]:
    """Those of the suspects, by index, that compute something else for two samples together than for each alone.

    Each kind runs once, with random values as inputs.  A layer whose parameters have no data cannot be run and counts
    as one in which samples meet.
    """
    verdicts: dict[int, bool] = {}
    found = []
    for index in sorted(suspects):
        kind = layers.layers[index].kind
        if kind not in verdicts:
            verdicts[kind] = not _has_data(layers, index) or _samples_meet(layers, index)
        if verdicts[kind]:
            found.append(index)
    return found


def _has_data(layers: LayerSequence, index: int) -> bool:
    layer = layers.layers[index]
    return not any(layers.tensors[name].is_meta for name in (*layer.parameters, *layer.buffers))


def _samples_meet(layers: LayerSequence, index: int) -> bool:
    layer = layers.layers[index]
    generator = torch.Generator().manual_seed(_SEED)
    specs = {spec.name: spec for spec in layers.boundaries[index]}
    values = {name: _value(specs[name], generator) for name in dict.fromkeys(layer.inputs)}
    batch = _two_samples(layers)
    ranges = [(0, _SAMPLES), *((sample, sample + 1) for sample in range(_SAMPLES))]
    parts = [batch_slice(layers, list(batch), batch, samples, _SAMPLES) for samples in ranges]
    outputs = []
    for samples, part in zip(ranges, parts, strict=True):
        given = {name: _cut(value, specs[name], samples) for name, value in values.items()}
        outputs.append(_run(layers, index, given, part, samples))
    (whole, *alone), (_, *parts) = outputs, parts
    if index == len(layers) - 1:
        weights = [layers.loss_weight(part) for part in parts]
        return not _alike(whole[0], _combined(layers, [outputs[0] for outputs in alone], weights))
    made = {spec.name: spec for spec in layers.boundaries[index + 1]}
    return not all(
        _alike(whole[position], _joined([outputs[position] for outputs in alone], made[name]))
        for position, name in enumerate(layer.outputs)
    )


def _run(
    layers: LayerSequence,
    index: int,
    values: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    samples: tuple[int, int],
) -> tuple[Tensor, ...]:
    """Buffers are copies: the user's stay as they are."""
    layer = layers.layers[index]
    own = [layers.tensors[name] for name in (*layer.parameters, *layer.buffers)]
    device = next(iter([*own, *values.values(), *batch.values()])).device
    call = LayerCall(
        samples=samples,
        sizes={**layers.example_sizes, "batch": samples[1] - samples[0]},
        seed=_SEED,
        device=device,
        first_random_op=layer.first_random_op,
    )
    with torch.no_grad():
        return layer.function(
            [layers.tensors[name] for name in layer.parameters],
            [layers.tensors[name].clone() for name in layer.buffers],
            [values[name].to(device) for name in layer.inputs],
            [batch[name].to(device) for name in layer.batch_inputs],
            call,
        )


def _two_samples(layers: LayerSequence) -> dict[str, Tensor]:
    """Two of the example batch, of each tensor the first and the first that differs from it: of two samples that were
    alike, such as two with one label, nobody could tell whether they are mixed up.  Where all are alike, one twice."""
    batch, _ = layers.flatten_batch(layers.example_batch)
    found = {}
    for spec in layers.batch:
        tensor = batch[spec.name].detach()
        found[spec.name] = tensor if spec.batch_dim is None else _two_different(tensor, spec.batch_dim)
    return found


def _two_different(tensor: Tensor, dim: int) -> Tensor:
    count = tensor.shape[dim]
    first = tensor.select(dim, 0)
    other = next((row for row in range(1, count) if not torch.equal(tensor.select(dim, row), first)), min(1, count - 1))
    return tensor.index_select(dim, torch.tensor([0, other], device=tensor.device))


def _value(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Normal numbers, True and 0 for two samples."""
    shape = [n * _SAMPLES if dim == spec.batch_dim else n for dim, n in enumerate(spec.shape)]
    tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype))
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.normal_(generator=generator)
    return tensor.fill_(tensor.dtype is torch.bool)


def _cut(value: Tensor, spec: TensorSpec, samples: tuple[int, int]) -> Tensor:
    if spec.batch_dim is None:
        return value
    rows = spec.shape[spec.batch_dim]
    return value.narrow(spec.batch_dim, samples[0] * rows, (samples[1] - samples[0]) * rows)


def _joined(parts: Sequence[Tensor], spec: TensorSpec) -> Tensor:
    """What the samples alone give, together; without a batch dimension they must all give the same."""
    if spec.batch_dim is not None:
        return torch.cat(list(parts), spec.batch_dim)
    same = all(_alike(part, parts[0]) for part in parts)
    return parts[0] if same else torch.full_like(parts[0], torch.nan)


def _combined(layers: LayerSequence, losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights) if layers.loss_reduction == "mean" else 1.0
    return torch.stack([loss * (weight / total) for loss, weight in zip(losses, weights, strict=True)]).sum()


def _alike(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(a.abs().max()) if a.numel() else 0.0)
