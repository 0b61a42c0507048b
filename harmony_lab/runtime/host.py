"""HostStore: the user's own parameters, gathered into one arena so that a pack is one transfer."""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from harmony_lab.errors import HarmonyError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.program import TensorKind
from harmony_lab.runtime.arena import Arena
from harmony_lab.runtime.layout import Layout, Layouts, Piece
from harmony_lab.runtime.shadows import Shadows

__all__ = ["HostStore", "PackReader"]

_SHOWN_NAMES = 8


class _Run(NamedTuple):
    """Bytes that lie next to each other both in the host's memory and in a pack's block."""

    host_offset: int
    block_offset: int
    num_bytes: int

    def ends_at(self, host_offset: int, block_offset: int) -> bool:
        return (self.host_offset + self.num_bytes, self.block_offset + self.num_bytes) == (host_offset, block_offset)


class HostStore:
    """The master copies: while a store is open, the model's parameters lie in its arena one after the other, in layer
    order.

    So ``model.state_dict()`` is always current.  Each parameter has a storage of its own over its part of the arena, so
    what is saved of a model, whole or in part, is no larger than in plain PyTorch.  Buffers stay where they are.
    Where devices get parameters in another type, ``shadows`` beside the arena are what packs are read from.
    ``close`` gives the parameters memory of their own again.  Both ways take the memory of one more parameter at a
    time, where the system takes parts of the arena back (Linux).
    """

    def __init__(self, layers: LayerSequence, layouts: Layouts, *, pin: bool = False) -> None:
        self._layers = layers
        self.whole = layouts.masters()
        self.moving = layouts.of(TensorKind.WEIGHT, (0, len(layers)))
        _refuse_off_host(layers)
        _refuse_overlaps((piece.name, layers.tensors[piece.name]) for piece in self.whole.pieces)
        _refuse_changed_training(layers)
        _refuse_changed_modes(layers)
        self.arena = Arena(self.whole.num_bytes)
        with torch.no_grad():
            for piece in self.whole.pieces:
                parameter = layers.tensors[piece.name]
                place = self.arena.tensor(piece.offset, piece.shape, piece.dtype)
                place.copy_(parameter)
                parameter.data = place
        self.shadows = Shadows(layers.tensors, self.moving) if self.moving != self.whole else None
        if pin:
            self._moving_arena.pin("parameters")

    @property
    def memory(self) -> Tensor:
        """What packs are read from, as flat bytes laid out as ``moving`` says."""
        return self._moving_arena.memory

    @property
    def _moving_arena(self) -> Arena:
        return self.arena if self.shadows is None else self.shadows.arena

    @property
    def num_bytes(self) -> int:
        """Host memory of the parameters and their shadows."""
        return self.arena.num_bytes + (0 if self.shadows is None else self.shadows.arena.num_bytes)

    def reading(
        self, awaited: Collection[str] = (), wait_for: Callable[[str], None] = lambda name: None
    ) -> AbstractContextManager[None]:
        """While packs are read: they have what the parameters hold when this begins, the ``awaited`` once ``wait_for``
        has returned."""
        return nullcontext() if self.shadows is None else self.shadows.renewing(awaited, wait_for)

    def check_in_place(self) -> None:
        """Raises ``HarmonyError`` where somebody has given a parameter another storage since the store was opened, or
        another ``requires_grad`` since the model was decomposed.
        """
        _refuse_changed_training(self._layers)
        for piece in self.whole.pieces:
            if not self.arena.holds(self._layers.tensors[piece.name], piece.offset):
                raise TrainingError(
                    f"parameter {piece.name!r} has been moved to other memory since training was set up (model.to(), "
                    "another Trainer or Lab on the same model, an assignment to .data): close this one, make a new one"
                )

    def reader(self, layers: LayerSequence, layouts: Layouts) -> "PackReader":
        """Packs of that sequence of layers, over the same model."""
        return PackReader(self, layers, layouts)

    def close(self) -> None:
        """Give each parameter that still lies in the arena memory of its own; may be called again."""
        self._moving_arena.unpin()
        if self.shadows is not None:
            self.shadows.close()
            self.shadows = None
        for piece in self.whole.pieces:
            parameter = self._layers.tensors[piece.name]
            if self.arena.holds(parameter, piece.offset):
                before = weakref.ref(parameter.untyped_storage())
                parameter.data = parameter.detach().clone()
                if before() is None:  # else somebody still reads it, such as a state_dict taken while training
                    self.arena.give_back(piece.offset, piece.num_bytes)
        self.whole = self.moving = Layout(pieces=())
        self.arena = Arena(0)


class PackReader:
    """What packs of a sequence of layers read from the host: parameters from the store, buffers from the model."""

    def __init__(self, store: HostStore, layers: LayerSequence, layouts: Layouts) -> None:
        self._store = store
        self._layers = layers
        self._layouts = layouts
        self._runs: dict[tuple[tuple[int, int], frozenset[str], bool], list[_Run]] = {}

    def parts_of(
        self, pack: tuple[int, int], absent: frozenset[str] = frozenset(), *, own: bool = False
    ) -> list[tuple[Tensor, int]]:
        """The parameters of layers [start, stop), as devices get them: flat parts of host memory, each with its offset
        in the pack's block.  Called while the store is ``reading``.

        ``absent``: those that the block lacks.  ``own``: without those that an earlier layer shares.
        """
        layout = self._layouts.of(TensorKind.WEIGHT, pack, absent)
        runs = self._runs.get((pack, absent, own))
        if runs is None:
            first = {name: min(self._layers.state[name].layers) for name in layout.by_name}
            pieces = [piece for piece in layout.pieces if not own or first[piece.name] >= pack[0]]
            runs = self._runs[pack, absent, own] = _runs(self._store.moving, pieces)
        if self._store.shadows is not None:
            self._store.shadows.wait_for(layout.by_name)
        memory = self._store.memory
        return [(memory[run.host_offset : run.host_offset + run.num_bytes], run.block_offset) for run in runs]

    def buffers_of(self, pack: tuple[int, int]) -> Tensor:
        """A flat copy of the present buffers of layers [start, stop)."""
        layout = self._layouts.of(TensorKind.BUFFER, pack)
        flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for name, view in layout.views(flat).items():
            view.copy_(self._layers.tensors[name])
        return flat


def _runs(whole: Layout, pieces: Iterable[Piece]) -> list[_Run]:
    runs: list[_Run] = []
    for piece in pieces:
        host_offset, num_bytes = whole.by_name[piece.name].offset, piece.stop - piece.offset
        last = runs[-1] if runs else None
        if last is not None and last.ends_at(host_offset, piece.offset):
            runs[-1] = last._replace(num_bytes=last.num_bytes + num_bytes)
        else:
            runs.append(_Run(host_offset, piece.offset, num_bytes))
    return runs


def _refuse_off_host(layers: LayerSequence) -> None:
    names = [*layers.state, *layers.buffer_state]
    elsewhere = [name for name in names if layers.tensors[name].device.type != "cpu"]
    if elsewhere:
        device = layers.tensors[elsewhere[0]].device
        raise HarmonyError(
            f"{len(elsewhere)} of the model's parameters and buffers are not in host memory, {elsewhere[0]!r} is on "
            f"{device}: call model.cpu() before training; packs move to the devices when their turn comes"
        )


def _refuse_changed_training(layers: LayerSequence) -> None:
    changed = [name for name, spec in layers.state.items() if layers.tensors[name].requires_grad != spec.trainable]
    if changed:
        frozen = [name for name in changed if layers.state[name].trainable]
        thawed = [name for name in changed if not layers.state[name].trainable]
        what = [f"{_listed(names)} {verb}" for names, verb in ((frozen, "frozen"), (thawed, "made trainable")) if names]
        raise HarmonyError(
            f"requires_grad was changed after the model was decomposed: {'; '.join(what)}. What gets a "
            "gradient was settled then: decompose the model again, or make a new Lab"
        )


def _refuse_changed_modes(layers: LayerSequence) -> None:
    """Layers compute in the mode that their modules were captured in, train or eval, whatever is called later."""
    changed = [] if layers.recipe is None else layers.recipe.changed_modes()
    differs = bool(layers.random_ops) or any(layer.updated_buffers for layer in layers.layers)
    if changed and (differs or not all(was for _, was in changed)):
        whole = changed[0][0] == type(layers.model).__name__
        what = "the model was" if whole else f"modules of the model ({_listed([name for name, _ in changed])}) were"
        now, then = ("eval", "train") if changed[0][1] else ("train", "eval")
        raise HarmonyError(
            f"{what} put into {now} mode after the model was decomposed, but layers train as they were captured, in "
            f"{then} mode: {f'call model.{then}()' if whole else f'put them back into {then} mode'}, or decompose the "
            f"model again (make a new Lab) to train in {now} mode"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN_NAMES]))
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def _refuse_overlaps(parameters: Iterable[tuple[str, Tensor]]) -> None:
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in parameters)
    for (_, stop, name), (start, _, other) in pairwise(ranges):
        if start < stop:
            raise HarmonyError(
                f"parameters {name!r} and {other!r} are two Parameter objects over the same memory, so updating one "
                "would change the other: tie weights by using one Parameter in both places"
            )
