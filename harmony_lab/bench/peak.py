"""Peak: the bytes that recompute and backward of a whole model really need, seen by PyTorch's own memory tracker.

The tracker is ``torch.distributed._tools.mem_tracker``: written apart from harmony_lab's, it follows every storage that
an op touches.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.program import TensorKind
from harmony_lab.runtime.execution import clone_updated_buffers, run_backward, run_with_gradient
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.moves import batch_slice

__all__ = ["peak_bytes"]


class _Tracker(MemTracker):  # type: ignore[no-untyped-call] # torch's __init_subclass__ has no types
    """Also lets regions such as ``torch.no_grad`` pass, which an exported graph calls as one op."""

    supports_higher_order_operators = True


def peak_bytes(layers: LayerSequence, batch: Any, num_samples: int) -> int:
    """Bytes alive at once, at most, while all layers run as one pack: weights, gradients and buffers laid out in flat
    blocks, the batch, activations and temporaries.

    ``batch`` has at least that many samples.  Nothing of the user's changes.
    """
    count = len(layers)
    tensors, sizes = layers.flatten_batch(batch)
    part = batch_slice(layers, layers.batch_inputs_of(0, count), tensors, (0, num_samples), sizes["batch"])
    part = {name: tensor.clone() for name, tensor in part.items()}
    weights, state = _block(layers, TensorKind.WEIGHT)
    gradients, gradient_of = _block(layers, TensorKind.GRADIENT)
    buffers, content = _block(layers, TensorKind.BUFFER)
    for name, parameter in state.items():
        parameter.requires_grad_(layers.state[name].trainable)
        if name in gradient_of:
            parameter.grad = gradient_of[name].zero_()
    call = LayerCall(
        samples=(0, num_samples),
        sizes={**sizes, "batch": num_samples},
        seed=0,
        device=torch.device("cpu"),
    )
    tracker = _Tracker()
    tracker.track_external(weights, gradients, buffers, *part.values())
    with tracker:
        _recompute_and_backward(layers, state, content, part, call)
    return _total(tracker.get_tracker_snapshot("peak").values())


def _recompute_and_backward(
    layers: LayerSequence,
    state: dict[str, Tensor],
    buffers: dict[str, Tensor],
    batch: dict[str, Tensor],
    call: LayerCall,
) -> None:
    count = len(layers)
    scratch = clone_updated_buffers(layers, 0, count, buffers)
    _, saved = run_with_gradient(layers, 0, count, state, scratch, {}, batch, call, ())
    del scratch
    run_backward(layers, 0, count, saved, {}, seed_gradient=1.0)


def _block(layers: LayerSequence, kind: TensorKind) -> tuple[Tensor, dict[str, Tensor]]:
    """A flat block of the whole model with the user's values, and its tensors by name."""
    layout = Layouts(layers).of(kind, (0, len(layers)))
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(memory)
    for name, view in views.items():
        view.copy_(layers.tensors[name].detach())
    return memory, views


def _total(snapshots: Iterable[dict[Any, int]]) -> int:
    return sum(snapshot["Total"] for snapshot in snapshots)
