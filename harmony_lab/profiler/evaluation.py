"""A model's layers in eval mode: what evaluating runs, beside the layers that training runs.

The graph of training is that of train mode: dropout drops, batch norm takes a microbatch's statistics and updates its
own.  So the model is captured once more, as a copy in eval mode over the same parameters and buffers.
"""

from typing import Any

from harmony_lab.errors import DecomposeError, HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.plan import Pack, Plan
from harmony_lab.profiler.compiling import compile_layers, is_compiled
from harmony_lab.profiler.decompose import layers_of
from harmony_lab.profiler.recipe import recipe_of

__all__ = ["evaluation_layers", "evaluation_plan"]


def evaluation_layers(layers: LayerSequence) -> LayerSequence:
    """The same model in eval mode, every module of it, over the same tensors; the model itself stays as it is.

    Raises ``HarmonyError`` for a model that updates buffers or reads other parameters in eval mode, and
    ``DecomposeError`` for one that cannot be captured so.
    """
    recipe = recipe_of(layers).sharing_tensors()
    for module in recipe.modules():
        module.eval()
    try:
        found = layers_of(recipe)
    except DecomposeError as error:
        raise DecomposeError(
            f"{type(layers.model).__name__} trains, but cannot be cut in eval mode: {error}"
        ) from error
    updated = [(layer.name, name) for layer in found.layers for name in layer.updated_buffers]
    if updated:
        where, name = updated[0]
        raise HarmonyError(
            f"{type(layers.model).__name__} updates buffer {name!r} (layer {where}) in eval mode too, and evaluating "
            "must leave the model as it is: update it only where self.training is set"
        )
    unknown = [name for name in found.state if name not in layers.state]
    if unknown:
        raise HarmonyError(
            f"{type(layers.model).__name__} reads parameters in eval mode that training does not: {unknown[0]!r}. "
            "Evaluate it in plain PyTorch"
        )
    return compile_layers(found) if is_compiled(layers) else found


def evaluation_plan(plan: Plan, trained: LayerSequence, evaluated: LayerSequence) -> Plan:
    """The plan's forward packs, and its last one, over the layers of eval mode.

    All run the backward's microbatches, which fit with more beside them.  Raises ``HarmonyError`` where packs start at
    layers that eval mode does not have.
    """
    edges = {stop: _edge(stop, trained, evaluated) for _, stop in (*plan.forward_packs, *plan.backward_packs)} | {0: 0}
    packs = {
        name: tuple(Pack(edges[start], edges[stop]) for start, stop in getattr(plan, name))
        for name in ("forward_packs", "backward_packs")
    }
    nothing_kept: dict[str, Any] = {
        **dict.fromkeys(("resident_packs", "kept_packs", "device_stash", "device_updates"), ()),
        "mirrored": False,
    }
    size = plan.backward_microbatch_size
    return plan.with_(**packs, **nothing_kept, forward_microbatch_size=size, fingerprint="")


def _edge(edge: int, trained: LayerSequence, evaluated: LayerSequence) -> int:
    if len(trained) == len(evaluated) or edge == 0:
        return edge
    if edge == len(trained):
        return len(evaluated)
    name = trained.layers[edge].name
    found = [index for index, layer in enumerate(evaluated.layers) if layer.name == name]
    if len(found) != 1:
        raise HarmonyError(
            f"in eval mode {type(trained.model).__name__} has {len(evaluated)} layers instead of {len(trained)}, and "
            f"no single one of them is {name!r}, where a pack of the plan starts: choose packs that start elsewhere, "
            "or evaluate in plain PyTorch"
        )
    return found[0]
