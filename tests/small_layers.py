"""Layer sequences made by hand, for tests of what runs below ``decompose``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harmony_lab.layers import Layer, LayerCall, LayerSequence, StateSpec, TensorSpec

__all__ = ["build", "layer", "mlp", "plain_run", "samples"]


def layer(name: str, function: Callable[..., Any], **fields: Any) -> Layer:
    """A layer whose function takes (parameters, buffers, inputs, batch, call) and returns a tuple."""
    names = ("parameters", "buffers", "updated_buffers", "inputs", "batch_inputs", "outputs")
    return Layer(
        name=name,
        kind=fields.pop("kind", 0),
        function=function,
        **{key: tuple(fields.pop(key, ())) for key in names},
        **fields,
    )


def samples(batch: Mapping[str, Tensor], start: int, stop: int) -> tuple[dict[str, Tensor], LayerCall]:
    """One microbatch of a batch whose tensors all have the samples first."""
    call = LayerCall(samples=(start, stop), sizes={"batch": stop - start}, seed=0, device=torch.device("cpu"))
    return {name: tensor[start:stop] for name, tensor in batch.items()}, call


def plain_run(
    layers: Sequence[Layer],
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    call: LayerCall,
) -> dict[str, Tensor]:
    """Every value of the computation, by plain autograd."""
    values: dict[str, Tensor] = {}
    for item in layers:
        outputs = item.function(
            [tensors[n] for n in item.parameters],
            [tensors[n] for n in item.buffers],
            [values[n] for n in item.inputs],
            [batch[n] for n in item.batch_inputs],
            call,
        )
        values.update(zip(item.outputs, outputs, strict=True))
    return values


def build(
    layers: Sequence[Layer],
    tensors: Mapping[str, Tensor],
    batch: dict[str, Tensor],
    *,
    smallest: int = 1,
    **fields: Any,
) -> LayerSequence:
    """A LayerSequence over these layers; boundaries follow from liveness, shapes from running two batch sizes, the
    smallest that runs and its double.
    """
    buffers = {name for item in layers for name in item.buffers}
    scratch = {n: (t.detach().clone().requires_grad_(t.requires_grad)) for n, t in tensors.items()}
    ran = [plain_run(layers, scratch, *samples(batch, 0, size)) for size in (smallest, 2 * smallest)]
    specs = {
        name: _spec(name, one, two, smallest) for (name, one), two in zip(ran[0].items(), ran[1].values(), strict=True)
    }
    count = len(layers)
    last_use = {name: i for i, item in enumerate(layers) for name in item.inputs}
    last_use[layers[-1].outputs[0]] = count
    born = {name: i for i, item in enumerate(layers) for name in item.outputs}
    boundaries = tuple(
        tuple(specs[name] for name in born if born[name] < b <= last_use.get(name, -1)) for b in range(count + 1)
    )
    state = {
        name: StateSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=tensor.numel() * tensor.element_size(),
            trainable=tensor.requires_grad,
            layers=tuple(i for i, item in enumerate(layers) if name in (*item.parameters, *item.buffers)),
        )
        for name, tensor in tensors.items()
    }
    num_samples = next(iter(batch.values())).shape[0]
    given: dict[str, Any] = {
        "model": torch.nn.Identity(),
        "layers": tuple(layers),
        "boundaries": boundaries,
        "batch": tuple(_spec(name, tensor[:1], tensor[:2]) for name, tensor in batch.items()),
        "state": {name: spec for name, spec in state.items() if name not in buffers},
        "buffer_state": {name: spec for name, spec in state.items() if name in buffers},
        "tensors": dict(tensors),
        "flatten_batch": lambda given: (dict(given), {"batch": num_samples}),
        "example_sizes": {"batch": num_samples},
        "loss_weight": lambda microbatch: float(next(iter(microbatch.values())).shape[0]),
        "loss_reduction": "mean",
        "couples_samples": (),
        "buffer_decay": {},
        "random_ops": (),
        "fingerprint": "small",
        "example_batch": batch,
    }
    return LayerSequence(**{**given, **fields})


def _spec(name: str, one: Tensor, two: Tensor, samples_in_one: int = 1) -> TensorSpec:
    batch_dim = next((i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b), None)
    return TensorSpec(
        name=name,
        shape=tuple(n // samples_in_one if i == batch_dim else n for i, n in enumerate(one.shape)),
        dtype=str(one.dtype).removeprefix("torch."),
        item_bytes=one.element_size(),
        batch_dim=batch_dim,
        requires_grad=one.requires_grad,
    )


def _linear(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: LayerCall) -> tuple[Tensor, ...]:
    (x,) = (*inputs, *batch)
    return (torch.tanh(torch.nn.functional.linear(x, *parameters)),)


def _loss(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: LayerCall) -> tuple[Tensor, ...]:
    return (((inputs[0] - batch[0]) ** 2).mean(),)


def mlp(depth: int = 3, width: int = 8, num_samples: int = 6) -> LayerSequence:
    """``depth`` layers tanh(linear(x)), all of one kind but the first, which reads the batch, and a loss layer."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    layers = []
    for i in range(depth):
        for name, shape in ((f"{i}.weight", (width, width)), (f"{i}.bias", (width,))):
            tensors[name] = torch.randn(shape, generator=generator).requires_grad_()
        reads = {"inputs": (f"v{i - 1}",)} if i else {"batch_inputs": ("x",)}
        layers.append(
            layer(f"{i}", _linear, kind=min(i, 1), parameters=(f"{i}.weight", f"{i}.bias"), outputs=(f"v{i}",), **reads)
        )
    layers.append(layer("loss", _loss, kind=2, inputs=(f"v{depth - 1}",), batch_inputs=("target",), outputs=("loss",)))
    batch = {name: torch.randn(num_samples, width, generator=generator) for name in ("x", "target")}
    return build(layers, tensors, batch)
