"""decompose: a model and its loss as a sequence of layers that are pure functions."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from harmony_lab.errors import DecomposeError, HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.assembly import Assembly
from harmony_lab.profiler.batch import BatchStructure
from harmony_lab.profiler.capture import capture
from harmony_lab.profiler.coupling import coupled_layers
from harmony_lab.profiler.cut import Step, choose_segments
from harmony_lab.profiler.flops import with_flops
from harmony_lab.profiler.graph import DataFlow, analyze
from harmony_lab.profiler.loss import LossReduction, reduction_of
from harmony_lab.profiler.loss_refusals import IN_ONE_MICROBATCH
from harmony_lab.profiler.modules import decompose_modules, sequential_groups
from harmony_lab.profiler.nodes import describe, module_path, size_factor
from harmony_lab.profiler.random_nodes import is_random
from harmony_lab.profiler.recipe import Recipe
from harmony_lab.profiler.refusals import refuse_gradient_hooks, refuse_shared_updates
from harmony_lab.warning import warn

__all__ = ["decompose", "layers_of"]


def decompose(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    cut: Sequence[str] | None = None,
    loss_reduction: str | None = None,
) -> LayerSequence:
    """The model's training computation, in its present train or eval mode, as layers.

    Without ``loss_fn`` the model returns its loss: ``model(**batch)`` for a mapping, ``model(*batch)`` for a sequence,
    else ``model(batch)``.  With it, a batch is ``(inputs, targets)`` and the loss is
    ``loss_fn(model(inputs), targets)``.  The number of samples, dimension 0 of the batch's tensors, may vary from batch
    to batch; no other size may.

    ``layers``: modules that are run in sequence on the inputs, one layer each, for a model that cannot be captured;
    needs ``loss_fn``.
    ``cut``: names of modules at whose first operation to cut, instead of at the blocks of the model.
    ``loss_reduction``: "mean" or "sum" over samples, where it does not follow from the loss itself, or where samples
    meet in the model: then the minibatch's loss is the mean or sum of what the microbatches give each by itself.

    The layers repeat what the model's Python code did when it was captured.  Counters, chance and the clock there may
    make it do something else in the next step, so it is run again on tensors without data: a difference is refused, a
    change in Python without one is warned of, and a batch is refused when a number in Python that forward reads has
    another value than it had.

    The model is not changed.  Raises ``DecomposeError``, which names the operation and the source line and says what
    to do.
    """
    _check_arguments(example_batch, loss_fn, loss_reduction)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps, so that names are the plain model's
    refuse_gradient_hooks(model)
    if loss_fn is None and isinstance(model, nn.Sequential):
        raise DecomposeError("an nn.Sequential returns no loss: pass loss_fn and a batch of (inputs, targets)")
    if not model.training:
        warn(
            f"{type(model).__name__} is in eval mode and will be trained so: dropout is off, batch norm keeps its "
            "statistics; call model.train() first if that is not meant",
        )
    return layers_of(
        Recipe(
            model=model,
            example_batch=example_batch,
            structure=BatchStructure(example_batch, ("inputs", "targets") if loss_fn is not None else ()),
            loss_fn=loss_fn,
            layers=None if layers is None else tuple(layers),
            cut=None if cut is None else tuple(cut),
            loss_reduction=loss_reduction,
        )
    )


def _check_arguments(example_batch: Any, loss_fn: Callable[..., Any] | None, loss_reduction: str | None) -> None:
    if loss_reduction not in (None, "mean", "sum"):
        raise DecomposeError(f'loss_reduction is {loss_reduction!r}, expected "mean" or "sum"')
    if isinstance(loss_fn, type):
        raise DecomposeError(
            f"loss_fn is the class {loss_fn.__name__}, expected a function of (output, target): make an instance, "
            f"{loss_fn.__name__}()"
        )
    if loss_fn is not None and not (isinstance(example_batch, list | tuple) and len(example_batch) == 2):
        raise DecomposeError(
            f"with loss_fn a batch is (inputs, targets), but the example batch is a {type(example_batch).__name__}; "
            "put the inputs of the model and the targets of the loss into a pair"
        )


def layers_of(recipe: Recipe) -> LayerSequence:
    """``decompose`` of checked arguments."""
    return replace(_layers_of(recipe), recipe=recipe.with_modes())


def _layers_of(recipe: Recipe) -> LayerSequence:
    model, example_batch, structure = recipe.model, recipe.example_batch, recipe.structure
    loss_fn, loss_reduction, cut = recipe.loss_fn, recipe.loss_reduction, recipe.cut
    if recipe.layers is not None:
        groups = [[module] for module in recipe.layers]
        with _naming(structure):
            return _of_modules(model, groups, example_batch, structure, loss_fn, loss_reduction)
    try:
        captured = capture(model, structure, loss_fn)
    except DecomposeError as error:
        if not isinstance(model, nn.Sequential) or loss_fn is None:
            raise
        with _naming(structure):
            try:
                return _of_modules(model, sequential_groups(model), example_batch, structure, loss_fn, loss_reduction)
            except DecomposeError as second:
                raise DecomposeError(f"{error}\nNor can it be run module by module: {second}") from error
    flow = analyze(captured, is_random)
    steps = [Step(tuple(module_path(node)), _parameters_read(flow, node)) for node in flow.trunk]
    segments = choose_segments(model, steps, partial(_crossing_bytes, flow), cut)
    assembly = Assembly(model, structure, flow, segments, _reduction(flow, loss_reduction))
    return _with_coupling(assembly, assembly.sequence(example_batch), declared=loss_reduction is not None)


@contextmanager
def _naming(structure: BatchStructure) -> Iterator[None]:
    """The batch, where modules run on a few samples of it do not take it."""
    try:
        yield
    except HarmonyError:
        raise
    except Exception as error:
        raise DecomposeError(
            f"the modules, or loss_fn, do not take this example batch ({structure.describe()}), of which a few samples "
            f"were tried: {type(error).__name__}: {error}"
        ) from error


def _reduction(flow: DataFlow, declared: str | None) -> LossReduction:
    if declared is None:
        return reduction_of(flow)
    try:
        tail = reduction_of(flow).tail
    except DecomposeError:
        tail = frozenset()  # it is declared because it cannot be read off the graph
    return LossReduction(declared, tail=tail)


def _with_coupling(assembly: Assembly, layers: LayerSequence, *, declared: bool) -> LayerSequence:
    """The same layers, with those named in which samples meet; refused unless the user says how losses combine."""
    suspects = assembly.suspects()
    coupled = coupled_layers(layers, suspects)
    runnable = not any(tensor.is_meta for tensor in layers.tensors.values())
    if coupled and runnable and not declared:
        raise DecomposeError(
            f"samples of a batch meet in {describe(suspects[coupled[0]])}: what is computed for one depends on the "
            f"others, so the losses of microbatches do not make up the loss of the minibatch. {IN_ONE_MICROBATCH}; or "
            "use a loss_fn, and layers, that look at each sample alone"
        )
    refuse_shared_updates(layers)
    _point_out_gathered_parameters(layers)
    names = (layers.layers[index].name for index in sorted({*assembly.batch_norms(), *coupled}))
    return with_flops(replace(layers, couples_samples=tuple(names)))


def _point_out_gathered_parameters(layers: LayerSequence) -> None:
    """A loss that reads the parameters of most layers makes the last layer as large as they are together."""
    last = len(layers) - 1
    others = {index for name in layers.layers[last].parameters for index in layers.state[name].layers} - {last}
    if last > 1 and 2 * len(others) > last:
        warn(
            f"the loss reads parameters of {len(others)} of the {last} layers before it, so its layer needs them all "
            "on the device at once; a penalty on weights is better left to the optimizer (weight_decay)",
        )


def _of_modules(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Module]],
    example_batch: Any,
    structure: BatchStructure,
    loss_fn: Callable[..., Any] | None,
    loss_reduction: str | None,
) -> LayerSequence:
    if loss_fn is None or not any(groups):
        raise DecomposeError("layers=[...] needs at least one module, a loss_fn and batches of (inputs, targets)")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise DecomposeError("layers=[...] are run once on a few samples, which weights on the meta device cannot be")
    decomposed = decompose_modules(model, groups, example_batch, structure, loss_fn, loss_reduction)
    _refuse_left_out(model, groups)
    refuse_shared_updates(decomposed)
    if loss_reduction is None:
        _refuse_coupled_modules(decomposed)
    return with_flops(decomposed)


def _refuse_left_out(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
    """Every trainable parameter of the model belongs to a layer."""
    given = {id(parameter) for group in groups for module in group for parameter in module.parameters()}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        raise DecomposeError(
            f"layers=[...] must be all of the model, run in sequence: {', '.join(left_out[:3])}{more} would not be "
            "trained; add the modules they belong to, or freeze them"
        )


def _refuse_coupled_modules(layers: LayerSequence) -> None:
    alone = [index for index, layer in enumerate(layers.layers) if layer.name not in layers.couples_samples]
    coupled = coupled_layers(layers, alone)
    if coupled:
        name = layers.layers[coupled[0]].name
        raise DecomposeError(
            f"samples of a batch meet in layer {name}: what is computed for one depends on the others, so the losses "
            f"of microbatches do not make up the loss of the minibatch. {IN_ONE_MICROBATCH}"
        )


def _crossing_bytes(flow: DataFlow) -> list[int]:
    """For each step, bytes of one sample's values that are made before it and that it or a later step reads."""
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(flow.trunk):
        last.update(dict.fromkeys(flow.needs[node], position))
    change = [0] * (len(flow.trunk) + 1)
    for position, node in enumerate(flow.trunk):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and last.get(node, position) > position:
            factors = (size_factor(length, flow.captured.symbol) or (0, 1) for length in value.shape)
            num_bytes = math.prod(sum(factor) for factor in factors) * value.dtype.itemsize
            change[position + 1] += num_bytes
            change[last[node] + 1] -= num_bytes
    return list(accumulate(change))


def _parameters_read(flow: DataFlow, node: fx.Node) -> frozenset[str]:
    sources = flow.captured.sources
    read = (sources[value] for value in node.all_input_nodes if value in sources)
    return frozenset(source.name for source in read if source.role == "parameter")
