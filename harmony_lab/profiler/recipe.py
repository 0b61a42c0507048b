"""Recipe: what a LayerSequence was made of, so that copies can be made of it and the plain model can be run."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.batch import BatchStructure
from harmony_lab.profiler.capture import call_model, loss_of

__all__ = ["Recipe", "recipe_of"]

Memo = dict[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The arguments of ``decompose``, and the structure of a batch.

    ``modes``: whether each module was in train mode when it was captured, in ``_every_module``'s order.
    """

    model: nn.Module
    example_batch: Any
    structure: BatchStructure
    loss_fn: Callable[..., Any] | None = None
    layers: tuple[nn.Module, ...] | None = None
    cut: tuple[str, ...] | None = None
    loss_reduction: str | None = None
    modes: tuple[bool, ...] = ()

    def with_modes(self) -> "Recipe":
        """With the modes that the modules are in now."""
        return replace(self, modes=tuple(module.training for _, module in self._every_module()))

    def changed_modes(self) -> list[tuple[str, bool]]:
        """Modules that are in another mode now than when they were captured, with whether they were in train mode."""
        modules = zip(self._every_module(), self.modes, strict=False)
        return [(name, was) for (name, module), was in modules if module.training != was]

    def _every_module(self) -> Iterator[tuple[str, nn.Module]]:
        """All there are, by name, those that are called among them under their classes' names."""
        for outer in self.modules():
            yield from ((name or type(outer).__name__, module) for name, module in outer.named_modules())

    def plain_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss as a user of PyTorch computes it, from the tensors of a batch by name."""
        whole = self.structure.rebuild([batch[spec.name] for spec in self.structure.tensors])
        if self.loss_fn is None:
            return loss_of(call_model(self.model, whole))
        inputs, targets = whole
        if self.layers is None:
            return loss_of(self.loss_fn(call_model(self.model, inputs), targets))
        first, *others = self.layers
        value = call_model(first, inputs)
        for module in others:
            value = module(value)
        return loss_of(self.loss_fn(value, targets))

    def modules(self) -> Iterator[nn.Module]:
        """Those that are called, outermost."""
        yield self.model
        yield from self.layers or ()

    def copied(self, memo: Memo) -> "Recipe":
        """With copies of the modules.  ``memo``: as of ``copy.deepcopy``; tensors in it are kept, copies are added.

        Raises ``HarmonyError`` where a module cannot be copied.
        """
        try:
            model, layers, loss_fn = copy.deepcopy((self.model, self.layers, self.loss_fn), memo)
        except Exception as error:
            raise HarmonyError(
                f"{type(self.model).__name__} cannot be copied ({type(error).__name__}: {error}), which this needs: "
                "keep what copy.deepcopy does not take (files, locks, tensors that are results of computations) "
                "outside of the model and its loss"
            ) from error
        return replace(self, model=model, layers=layers, loss_fn=loss_fn)

    def sharing_tensors(self) -> "Recipe":
        """With copies of the modules over the same parameters, buffers and other tensors."""
        modules: list[nn.Module] = [*self.modules(), *([self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [])]
        return self.copied({id(tensor): tensor for module in modules for tensor in _tensors(module)})


def recipe_of(layers: LayerSequence) -> Recipe:
    """Raises ``HarmonyError`` for layers that ``decompose`` has not made."""
    if not isinstance(layers.recipe, Recipe):
        raise HarmonyError(
            "these layers were made by hand, so the plain model that they stand for is not known: make them with "
            "harmony_lab.decompose"
        )
    return layers.recipe


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for inner in module.modules():
        yield from (value for value in vars(inner).values() if isinstance(value, torch.Tensor))
