"""FLOPs: floating-point operations of a layer's forward pass on one sample, from shapes alone."""

from dataclasses import replace

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import FlopCounterMode

from harmony_lab.layers import LayerCall, LayerFunction, LayerSequence, StateSpec, TensorSpec
from harmony_lab.profiler.alone import alone
from harmony_lab.profiler.extract import GraphFunction

__all__ = ["with_flops"]

_META = torch.device("meta")
_SAMPLES = 2  # batch norm refuses a single one


def with_flops(layers: LayerSequence) -> LayerSequence:
    """The same layers with ``flops_per_sample``: of matrix products and convolutions, two per multiplication and
    addition.

    Each kind runs once on the meta device.  None where that is not known: an op of another library than torch's, or one
    that needs data to tell the shape of what it returns.
    """
    known: dict[int, int | None] = {}
    for index, layer in enumerate(layers.layers):
        if layer.kind not in known:
            known[layer.kind] = _flops(layers, index)
    counted = tuple(replace(layer, flops_per_sample=known[layer.kind]) for layer in layers.layers)
    return replace(layers, layers=counted)


def _flops(layers: LayerSequence, index: int) -> int | None:
    layer = layers.layers[index]
    if _has_foreign_ops(layer.function):
        return None
    values = {spec.name: spec for spec in layers.boundaries[index]}
    call = LayerCall(samples=(0, _SAMPLES), sizes={**layers.example_sizes, "batch": _SAMPLES}, seed=0, device=_META)
    try:
        with alone, torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer.function(
                [_empty(layers.state[name]) for name in layer.parameters],
                [_empty(layers.buffer_state[name]) for name in layer.buffers],
                [_empty(values[name]) for name in layer.inputs],
                [_empty(layers.batch_by_name[name]) for name in layer.batch_inputs],
                call,
            )
    except (RuntimeError, ValueError, TypeError):
        return None
    return int(counter.get_total_flops()) // _SAMPLES


def _has_foreign_ops(function: LayerFunction) -> bool:
    if not isinstance(function, GraphFunction):
        return False
    targets = (node.target for node in function.module.graph.nodes)
    return any(isinstance(target, OpOverload) and target.namespace != "aten" for target in targets)


def _empty(spec: TensorSpec | StateSpec) -> Tensor:
    shape = list(spec.shape)
    if isinstance(spec, TensorSpec) and spec.batch_dim is not None:
        shape[spec.batch_dim] *= _SAMPLES
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=_META)
