"""LayerSequence: a training computation, loss included, as layers that are pure functions.

Vocabulary.  A *value* is a tensor that crosses from one layer to a later one.  *Boundary* ``b`` is the set of values
that are alive between layer ``b - 1`` and layer ``b``: everything that a pack starting at ``b`` receives from earlier
layers.  Boundary 0 is empty and boundary ``num_layers`` holds the loss.  The *batch* is what the user passes to the
model; it stays on the host, and any layer may read it directly.

This module knows no torch: tensors, modules and graphs are held as opaque objects that ``profiler.decompose`` puts in
and ``runtime`` uses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any, Protocol

from harmony_lab.errors import HarmonyError
from harmony_lab.precision import Precision
from harmony_lab.units import format_bytes, format_count

__all__ = [
    "LOSS_TOTALS",
    "Layer",
    "LayerCall",
    "LayerFunction",
    "LayerSequence",
    "StateSpec",
    "TensorSpec",
    "padded",
    "require_layers",
]


LOSS_TOTALS = "totals of the loss"
"""The entry of a batch that holds what the terms of a mixed loss count in the whole minibatch: one number each, which
add up over minibatches."""
ALIGNMENT_BYTES = 64
"""Every parameter, buffer and gradient starts at a multiple of this in a pack's flat block."""


def padded(num_bytes: int) -> int:
    """Bytes that a parameter takes in a flat block."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A value or batch input as a function of the microbatch size u.

    ``shape`` is that of one sample; with u samples, dimension ``batch_dim`` is u times as long.  ``batch_dim`` None:
    the tensor has no batch dimension and belongs to its microbatch as a whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    batch_dim: int | None
    requires_grad: bool = False

    def num_bytes(self, num_samples: int) -> int:
        size = self.item_bytes if self.batch_dim is None else self.item_bytes * num_samples
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A parameter or buffer.  ``name`` is its first name in the model; ``layers`` are all the layers that read it.

    ``dtype``, ``num_bytes``: of the model's own tensor, and of its gradient.  ``shadow``: the type of two bytes that
    devices get an fp32 parameter in; empty: its own (see ``precision``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    trainable: bool
    layers: tuple[int, ...]
    shadow: str = field(default="", repr=False)  # texts of specs make a model's fingerprint

    @property
    def device_dtype(self) -> str:
        return self.shadow or self.dtype

    @property
    def device_bytes(self) -> int:
        return self.num_bytes // 2 if self.shadow else self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one run of a layer depends on beside tensors.

    ``samples``: the half-open range of the minibatch that the inputs are, ``sizes``: the extent of every dynamic
    dimension by its symbol (the batch dimension's is the number of samples), ``seed``: of this training step,
    ``device``: where it runs.  Random masks are a function of (seed, sample, random op), so they do not depend on how a
    minibatch is split.
    """

    samples: tuple[int, int]
    sizes: Mapping[str, int]
    seed: int
    device: Any
    first_random_op: int = 0


class LayerFunction(Protocol):
    """outputs = function(parameters, buffers, inputs, batch, call): tensors in the order of the Layer's names.

    Writes nothing but the layer's ``updated_buffers``, in place.  Outputs may alias inputs.
    """

    def __call__(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        call: LayerCall,
    ) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: names of what it reads and writes, and its function.

    ``kind`` numbers the layer *type*: layers of one kind have the same graph and shapes and share ``function``.
    ``inputs`` and ``outputs`` name values; ``batch_inputs`` name batch entries; ``parameters`` and ``buffers`` name
    state of the model.  ``first_random_op`` is the ordinal, in the whole model, of the layer's first random op.
    ``flops_per_sample``: of the forward pass; None where it is not known.
    """

    name: str
    kind: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    updated_buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    batch_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: LayerFunction
    first_random_op: int = 0
    num_random_ops: int = 0
    flops_per_sample: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSequence:
    """A model, and the loss it is trained on, as a sequence of layers.

    ``boundaries``
        ``num_layers + 1`` tuples of values, see the module's docstring.
    ``state``, ``buffer_state``
        Specs of every parameter and buffer that a layer reads, by name.
    ``tensors``, ``model``
        The user's own parameters and buffers by name; the user's module.
    ``flatten_batch(batch)``
        A batch as the user passes it, as ``(tensors by name, sizes by symbol)``; ``sizes["batch"]`` is the number of
        samples.  Raises ``DecomposeError`` for a batch of another structure or with a size that is not dynamic.
    ``loss_weight(batch_tensors)``
        The weight of a microbatch's loss: a minibatch's loss is the weighted mean when ``loss_reduction`` is
        ``"mean"``, the plain sum when ``"sum"``.
    ``couples_samples``
        Names of layers in which samples of one microbatch influence each other (BatchNorm in train mode).
    ``buffer_decay``
        For each updated buffer, d where one microbatch maps b to d·b + f(microbatch); None where it has another form.
    ``random_ops``
        (batch dimension, rows per sample, blocks) of what the k-th random op draws: ``profiler.randomness.BatchDim``.
    ``recipe``
        What it was made of (``profiler.recipe.Recipe``); None for layers made by hand.
    ``precision``, ``in_fp32``, ``device_type``
        What the layers compute in (see ``precision`` and ``profiler.precision.in_precision``); where that is not fp32,
        the same layers in fp32, and torch's type of the devices whose rules the boundaries' types follow.
    """

    model: Any
    layers: tuple[Layer, ...]
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    batch: tuple[TensorSpec, ...]
    state: Mapping[str, StateSpec]
    buffer_state: Mapping[str, StateSpec]
    tensors: Mapping[str, Any]
    flatten_batch: Callable[[Any], tuple[dict[str, Any], dict[str, int]]]
    example_sizes: Mapping[str, int]
    loss_weight: Callable[[Mapping[str, Any]], float]
    loss_reduction: str
    couples_samples: tuple[str, ...]
    buffer_decay: Mapping[str, float | None]
    random_ops: tuple[tuple[int | None, int, int], ...]
    fingerprint: str
    example_batch: Any = None
    recipe: Any = None
    precision: Precision = Precision.FP32
    in_fp32: "LayerSequence | None" = None
    device_type: str = ""

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_kinds(self) -> int:
        return len({layer.kind for layer in self.layers})

    @cached_property
    def batch_by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.batch}

    @cached_property
    def has_shadows(self) -> bool:
        """Whether devices get copies of parameters in another type."""
        return any(spec.shadow for spec in self.state.values())

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.state.values())

    @cached_property
    def trainable_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.state.values() if spec.trainable)

    def parameters_of(self, start: int, stop: int) -> tuple[str, ...]:
        """Names of the parameters that layers [start, stop) read, each once, in layer order."""
        return _unique(name for layer in self.layers[start:stop] for name in layer.parameters)

    def buffers_of(self, start: int, stop: int) -> tuple[str, ...]:
        return _unique(name for layer in self.layers[start:stop] for name in layer.buffers)

    def updated_buffers_of(self, start: int, stop: int) -> tuple[str, ...]:
        return _unique(name for layer in self.layers[start:stop] for name in layer.updated_buffers)

    def batch_inputs_of(self, start: int, stop: int) -> tuple[str, ...]:
        return _unique(name for layer in self.layers[start:stop] for name in layer.batch_inputs)

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer: name, kind, parameters, their bytes, and of one sample bytes crossing in and FLOPs."""
        return [
            {
                "layer": index,
                "name": layer.name,
                "kind": layer.kind,
                "parameters": sum(_count(self.state[name].shape) for name in layer.parameters),
                "parameter_bytes": sum(self.state[name].num_bytes for name in layer.parameters),
                "input_bytes_per_sample": sum(spec.num_bytes(1) for spec in self.boundaries[index]),
                "flops_per_sample": layer.flops_per_sample,
            }
            for index, layer in enumerate(self.layers)
        ]

    def __repr__(self) -> str:
        total = sum(_count(spec.shape) for spec in self.state.values())
        return (
            f"LayerSequence of {type(self.model).__name__}: {len(self)} layers of {self.num_kinds} kinds, "
            f"{format_count(total)} parameters ({format_bytes(self.parameter_bytes)})"
            f"{'' if self.precision is Precision.FP32 else f', in {self.precision}'}"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{row['layer']}</td><td>{escape(row['name'])}</td><td>{row['kind']}</td>"
            f"<td>{format_count(row['parameters'])}</td><td>{format_bytes(row['parameter_bytes'])}</td>"
            f"<td>{format_bytes(row['input_bytes_per_sample'])}</td>"
            f"<td>{'' if row['flops_per_sample'] is None else format_count(row['flops_per_sample'])}</td></tr>"
            for row in self.rows()
        )
        return (
            f"<p>{escape(repr(self))}</p><table><thead><tr><th>layer</th><th>name</th><th>kind</th><th>parameters</th>"
            "<th>bytes</th><th>crossing in, per sample</th><th>FLOPs forward, per sample</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )


def require_layers(given: Any, what: str) -> None:
    """Raise ``HarmonyError`` for anything but a LayerSequence, such as the model itself; ``what`` asked for it."""
    if not isinstance(given, LayerSequence):
        raise HarmonyError(
            f"{what} takes the layers of a model, got a {type(given).__name__}: make them with "
            "layers = harmony_lab.decompose(model, example_batch), or decompose(model, (inputs, targets), loss_fn)"
        )


def _unique(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
