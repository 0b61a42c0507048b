"""The training computation of a model as one graph: torch.export in training IR, the loss as the only output."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, export
from torch.export.graph_signature import InputKind

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.alone import alone
from harmony_lab.profiler.batch import BatchStructure
from harmony_lab.profiler.call_log import Record
from harmony_lab.profiler.leftovers import take_out
from harmony_lab.profiler.nodes import describe
from harmony_lab.profiler.pieces import EvenPieces
from harmony_lab.profiler.python_state import KeptAttributes, Number
from harmony_lab.profiler.refusals import (
    RefuseTensorHooks,
    not_exportable,
    refuse_custom_gradients,
    refuse_python_chance,
    without_graph_dumps,
)
from harmony_lab.profiler.repeat import check_repeats
from harmony_lab.profiler.signatures import refuse_other_arguments
from harmony_lab.runtime.failures import clear_frames

__all__ = ["Captured", "Source", "capture", "loss_of"]

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a placeholder's tensor comes from: ``role`` is "parameter", "buffer" or "batch"."""

    role: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The exported graph.

    ``sources``: of every placeholder; a tied parameter has one name however many placeholders it has.
    ``tensors``: the user's own parameters and buffers, and constants of the graph, by name.
    ``symbol``: the number of samples in symbolic shapes.
    ``numbers``: Python state that the forward may read, which the graph holds as it was.
    """

    nodes: tuple[fx.Node, ...]
    loss: fx.Node
    modules: nn.Module
    sources: Mapping[fx.Node, Source]
    tensors: Mapping[str, torch.Tensor]
    symbol: Any
    numbers: Sequence[Number]
    min_samples: int
    max_samples: int | None


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returns: itself, its ``loss``, or its first element."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.ndim == 0 and candidate.is_floating_point():
            if torch.is_grad_enabled() and not candidate.requires_grad:
                raise DecomposeError(
                    "the loss depends on no trainable parameter, so nothing would be trained: either all parameters "
                    "are frozen (requires_grad), or what the model returns first is a metric; return the loss first, "
                    "or under 'loss'"
                )
            return candidate
    what = f"{output.ndim}-dimensional tensor" if isinstance(output, torch.Tensor) else type(output).__name__
    each = isinstance(output, torch.Tensor) and output.ndim == 1
    mean = 'if it is a loss for each sample, return the mean or sum (reduction="mean"); else ' if each else ""
    raise DecomposeError(
        f"the model returned a {what} and no loss in it (a scalar tensor, or one under 'loss' or first): {mean}"
        "put labels into the example batch, or pass loss_fn= and a batch of (inputs, targets)"
    )


class _Training(nn.Module):
    """Batch tensors in, loss out; the user's model is a submodule and stays as it is."""

    def __init__(self, model: nn.Module, structure: BatchStructure, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.structure = structure
        self.record = Record()

    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        lengths = [t.shape[0] for t, spec in zip(tensors, self.structure.tensors, strict=True) if spec.batched]
        for length in lengths[1:]:
            # One symbol from here on, not one for each tensor.
            torch._check(length == lengths[0])  # type: ignore[no-untyped-call] # torch's has no types
        batch = self.structure.rebuild(tensors)
        log = self.record.begin({id(tensor): name for name, tensor in self._given(tensors)})
        with EvenPieces(), RefuseTensorHooks(), refuse_python_chance(), log:
            if self.loss_fn is None:
                loss = loss_of(call_model(self.model, batch))
            else:
                inputs, targets = batch
                loss = loss_of(self.loss_fn(call_model(self.model, inputs), targets))
        refuse_custom_gradients(loss)
        return loss

    def _given(self, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_parameters()
        yield from self.named_buffers()
        for spec, tensor in zip(self.structure.tensors, tensors, strict=True):
            yield f"batch {spec.name}", tensor


def call_model(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        accepts_cache = "use_cache" in inspect.signature(model.forward).parameters
        # A key-value cache is for generation: in training it only keeps activations alive.
        extra = {"use_cache": False} if accepts_cache and "use_cache" not in inputs else {}
        return model(**inputs, **extra)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def capture(model: nn.Module, structure: BatchStructure, loss_fn: Callable[..., Any] | None) -> Captured:
    """Export the model's training computation, in its present train or eval mode, with a dynamic number of samples.

    One thread at a time: torch keeps what it does while exporting in globals.

    Raises ``DecomposeError`` with the operation and the user's source line where the model cannot be exported.
    """
    with alone:
        return _capture(model, structure, loss_fn)


def _capture(model: nn.Module, structure: BatchStructure, loss_fn: Callable[..., Any] | None) -> Captured:
    training = _Training(model, structure, loss_fn)
    samples = _example_samples(training, structure)
    # Each leaf its own tensor: a tensor given twice (labels=input_ids) would become one input of the graph.
    leaves = [
        _resized(tensor, samples) if spec.batched else tensor.clone()
        for spec, tensor in zip(structure.tensors, structure.example, strict=True)
    ]
    traced = _Training(_with_data(model), structure, loss_fn)
    dim = Dim("batch")
    shapes = [{0: dim} if spec.batched else None for spec in structure.tensors]

    def run_export() -> Any:
        with warnings.catch_warnings(), without_graph_dumps():
            # Those that it means are told apart, and refused, by running again.
            warnings.filterwarnings("ignore", "The tensor attributes? ", UserWarning)
            return export(traced, (leaves,), dynamic_shapes=(shapes,), strict=False)

    kept = KeptAttributes(traced.model)
    program = None
    try:
        try:
            program = run_export()
            numbers = check_repeats(traced, traced.record, leaves, program, run_export, kept)
        except DecomposeError:
            raise
        except Exception as error:
            if isinstance(error, TypeError):
                refuse_other_arguments(model, structure.rebuild(structure.example), loss_fn)
            fixed = _fixed_samples(traced, leaves, samples, error)
            raise fixed or not_exportable(model, structure.describe(), error) from error
    except BaseException as error:
        clear_frames(error)  # so that only what outlives the run still holds its tensors
        raise
    finally:
        kept.put_back()
        take_out(traced.record.forget(), but_from=() if program is None else _values(program))
    # What is another now was set by the runs: the forward looks after it.
    numbers = [number for number in numbers if not number.changed]
    return _captured(program, training, structure, numbers)


def _values(program: Any) -> Iterator[Any]:
    """What stands for the results of its operations, nested graphs' included."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            yield from torch.utils._pytree.tree_leaves(node.meta.get("val"))


def _with_data(model: nn.Module) -> nn.Module:
    """The model itself, or a copy whose tensors on the meta device are of the CPU, as the batch is, without memory."""
    tensors = [*model.parameters(), *model.buffers()]
    held = (value for module in model.modules() for value in vars(module).values())
    tensors += [value for value in held if isinstance(value, torch.Tensor)]
    if not any(tensor.is_meta for tensor in tensors):
        return model
    return copy.deepcopy(model, {id(tensor): _hollow(tensor) if tensor.is_meta else tensor for tensor in tensors})


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype)
    hollow.untyped_storage().resize_(0)
    return nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow


def _example_samples(training: nn.Module, structure: BatchStructure) -> int:
    """A number of samples that no other size equals, so that nothing mistakes one for the other."""
    taken = {length for spec in structure.tensors for length in spec.shape[1:]}
    taken |= {length for tensor in training.state_dict().values() for length in getattr(tensor, "shape", ())}
    return next((prime for prime in _PRIMES if prime not in taken), 73)


def _fixed_samples(
    training: _Training, leaves: list[torch.Tensor], samples: int, error: Exception
) -> DecomposeError | None:
    """For a model that can be captured with one number of samples only, as one that asks for ``len`` of a tensor.

    That number is a prime that no other size equals: a tensor that has it twice pairs every sample with every other.
    """
    lengths = training.record.log.lengths
    try:
        with without_graph_dumps():
            program = export(training, (leaves,), strict=False)
    except Exception:
        return None
    where = f" at {lengths[0]}" if lengths else ", as len(x), int(x.shape[0]) or a fixed size in a reshape do"
    cure = "write x.shape[0] in place of len(x)" if lengths else "compute with x.shape[0] itself"
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op == "call_function" and list(value.shape).count(samples) > 1:
            return DecomposeError(
                f"samples of a batch meet in {describe(node)}, which pairs each with every other: the losses of "
                "microbatches do not make up the loss of the minibatch; and the model makes the number of samples a "
                f"constant{where}. Pass a loss_fn that looks at each sample alone; or {cure}, and loss_reduction="
                '"mean" to train on the mean of the losses that the microbatches have each among their own samples'
            )
    if not lengths and "specialized it to be a constant" not in str(error):
        return None
    return DecomposeError(
        f"{type(training.model).__name__} makes the number of samples a constant{where}, so it computes for batches of "
        f"one size only: {cure}"
    )


def _resized(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    rows = torch.arange(samples, device=tensor.device) % tensor.shape[0]
    return tensor.detach().index_select(0, rows)


def _captured(program: Any, training: _Training, structure: BatchStructure, numbers: Sequence[Number]) -> Captured:
    # First names win: a tied parameter has one name, as in model.named_parameters().
    names = {id(tensor): name for name, tensor in [*training.named_parameters(), *training.named_buffers()]}
    owned = {
        **dict(training.named_parameters(remove_duplicate=False)),
        **dict(training.named_buffers(remove_duplicate=False)),
    }
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    sources: dict[fx.Node, Source] = {}
    tensors: dict[str, torch.Tensor] = {}
    batch_names = iter([spec.name for spec in structure.tensors])
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            sources[node] = Source("batch", next(batch_names))
            continue
        tensor = owned[spec.target] if spec.target in owned else program.constants[spec.target]
        name = _user_name(names.get(id(tensor), spec.target))
        sources[node] = Source("parameter" if isinstance(tensor, nn.Parameter) else "buffer", name)
        tensors[name] = tensor
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]
    symbol, low, high = _batch_symbol(program, placeholders, sources, structure)
    return Captured(
        nodes=tuple(node for node in program.graph.nodes if node.op != "output"),
        loss=outputs[len(outputs) - 1],
        modules=program.graph_module,
        sources=sources,
        tensors=tensors,
        symbol=symbol,
        numbers=numbers,
        min_samples=low,
        max_samples=high,
    )


def _user_name(name: str) -> str:
    return name.removeprefix("model.")


def _batch_symbol(
    program: Any, placeholders: Mapping[str, fx.Node], sources: Mapping[fx.Node, Source], structure: BatchStructure
) -> tuple[Any, int, int | None]:
    """The symbol of the number of samples, and the range the model admits (export's own minimum of 2 is none)."""
    batched = {spec.name for spec in structure.tensors if spec.batched}
    for node in placeholders.values():
        if sources[node].role == "batch" and sources[node].name in batched:
            symbol = node.meta["val"].shape[0].node.expr
            limits = program.range_constraints.get(symbol)
            low = 1 if limits is None or limits.lower <= 2 else int(limits.lower)
            bounded = limits is not None and limits.upper.is_Integer  # else infinite
            return symbol, low, int(limits.upper) if bounded else None
    raise AssertionError("a batch structure has at least one tensor with samples")
