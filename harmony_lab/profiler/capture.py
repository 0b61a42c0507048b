"""The training computation of a model as one graph: torch.export in training IR, the loss as the only output."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, export
from torch.export.graph_signature import InputKind

from harmony_lab.errors import DecomposeError
from harmony_lab.profiler.batch import BatchStructure

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
    """

    nodes: tuple[fx.Node, ...]
    loss: fx.Node
    modules: nn.Module
    sources: Mapping[fx.Node, Source]
    tensors: Mapping[str, torch.Tensor]
    symbol: Any
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
            return candidate
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    raise DecomposeError(
        f"the model returned a {type(output).__name__}{shape} and no loss in it (a scalar tensor, or one under "
        "'loss' or first): put labels into the example batch, or pass loss_fn and a batch of (inputs, targets)"
    )


class _Training(nn.Module):
    """Batch tensors in, loss out; the user's model is a submodule and stays as it is."""

    def __init__(self, model: nn.Module, structure: BatchStructure, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.structure = structure

    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        batch = self.structure.rebuild(tensors)
        if self.loss_fn is None:
            return loss_of(call_model(self.model, batch))
        inputs, targets = batch
        return loss_of(self.loss_fn(call_model(self.model, inputs), targets))


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

    Raises ``DecomposeError`` with the operation and the user's source line where the model cannot be exported.
    """
    training = _Training(model, structure, loss_fn)
    samples = _example_samples(training, structure)
    # Each leaf its own tensor: a tensor given twice (labels=input_ids) would become one input of the graph.
    leaves = [
        _resized(tensor, samples) if spec.batched else tensor.clone()
        for spec, tensor in zip(structure.tensors, structure.example, strict=True)
    ]
    dim = Dim("batch")
    shapes = [{0: dim} if spec.batched else None for spec in structure.tensors]
    try:
        program = export(training, (leaves,), dynamic_shapes=(shapes,), strict=False)
    except DecomposeError:
        raise
    except Exception as error:
        raise _not_exportable(model, error) from error
    return _captured(program, training, structure)


def _example_samples(training: nn.Module, structure: BatchStructure) -> int:
    """A number of samples that no other size equals, so that nothing mistakes one for the other."""
    taken = {length for spec in structure.tensors for length in spec.shape[1:]}
    taken |= {length for tensor in training.state_dict().values() for length in getattr(tensor, "shape", ())}
    return next((prime for prime in _PRIMES if prime not in taken), 73)


def _resized(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    rows = torch.arange(samples, device=tensor.device) % tensor.shape[0]
    return tensor.detach().index_select(0, rows)


def _captured(program: Any, training: _Training, structure: BatchStructure) -> Captured:
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


def _not_exportable(model: nn.Module, error: Exception) -> DecomposeError:
    torch_folder = str(Path(torch.__file__).parent)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(torch_folder)
    ]
    ours = str(Path(__file__).parent)
    frames = [frame for frame in frames if not frame.filename.startswith(ours)]
    where = f"\n  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    reason = "\n".join(f"  {line}" for line in str(error).strip().splitlines()[:12])
    return DecomposeError(
        f"{type(model).__name__} cannot be captured as a graph: {type(error).__name__}{where}\n{reason}\n"
        "Change that line, or pass layers=[...]: a list of modules that are run in sequence, which need no capture."
    )
