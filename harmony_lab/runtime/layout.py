"""Layout: where each parameter, buffer or gradient of a pack lies in the pack's flat block of bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from harmony_lab.layers import LayerSequence, padded
from harmony_lab.program import TensorKind

__all__ = ["Layout", "Layouts", "Piece"]


class Piece(NamedTuple):
    """One tensor in a flat block: contiguous, ``num_bytes`` long from ``offset`` on."""

    name: str
    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """Where the next piece starts."""
        return self.offset + padded(self.num_bytes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tensors one after the other, each padded to a multiple of 64 bytes."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Size, torch.dtype]]) -> "Layout":
        """The layout of tensors with these names, shapes and types, in this order."""
        pieces: list[Piece] = []
        offset = 0
        for name, shape, dtype in tensors:
            piece = Piece(name, offset, shape.numel() * dtype.itemsize, shape, dtype)
            pieces.append(piece)
            offset = piece.stop
        return cls(pieces=tuple(pieces))

    @cached_property
    def num_bytes(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    @cached_property
    def by_name(self) -> dict[str, Piece]:
        return {piece.name: piece for piece in self.pieces}

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The one dtype of all pieces; None where they differ or there are none."""
        dtypes = {piece.dtype for piece in self.pieces}
        return dtypes.pop() if len(dtypes) == 1 else None

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of a flat uint8 block."""
        return {piece.name: _view(flat, piece) for piece in self.pieces}

    def spans(self, flat: Tensor, start: int, stop: int) -> list[Tensor]:
        """Bytes [start, stop) of a flat block, padding included, as one-dimensional views of one dtype each.

        ``start`` and ``stop`` are multiples of 64, or the block's end.
        """
        if self.dtype is not None:
            return [flat[start:stop].view(self.dtype)] if stop > start else []
        cuts = [(max(start, piece.offset), min(stop, piece.stop), piece.dtype) for piece in self.pieces]
        return [flat[first:last].view(dtype) for first, last, dtype in cuts if first < last]


def _view(flat: Tensor, piece: Piece) -> Tensor:
    """That piece of a flat uint8 block.

    ``data``: with a version counter of its own, so that autograd does not take a write to one buffer (batch norm's
    statistics) for one to all that backward has saved.
    """
    return flat[piece.offset : piece.offset + piece.num_bytes].view(piece.dtype).view(piece.shape).data


class Layouts:
    """The layouts of a model's packs, made once each."""

    def __init__(self, layers: LayerSequence) -> None:
        self._layers = layers
        self._made: dict[tuple[TensorKind, tuple[int, int], frozenset[str]], Layout] = {}

    def of(self, kind: TensorKind, pack: tuple[int, int], absent: frozenset[str] = frozenset()) -> Layout:
        """The layout of a WEIGHT, GRADIENT (of trainable parameters) or BUFFER block of layers [start, stop), without
        those that are ``absent``."""
        layout = self._made.get((kind, pack, absent))
        if layout is None:
            names = [name for name in self._names(kind, pack) if name not in absent]
            layout = self._made[kind, pack, absent] = Layout.of(
                (name, self._layers.tensors[name].shape, self._dtype(kind, name)) for name in names
            )
        return layout

    def masters(self) -> Layout:
        """The layout of all parameters as the model has them: what devices get may be of other types."""
        tensors, names = self._layers.tensors, self._names(TensorKind.WEIGHT, (0, len(self._layers)))
        return Layout.of((name, tensors[name].shape, tensors[name].dtype) for name in names)

    def _dtype(self, kind: TensorKind, name: str) -> torch.dtype:
        """A gradient has the type of the model's own parameter."""
        shadow = self._layers.state[name].shadow if kind is TensorKind.WEIGHT else ""
        dtype: torch.dtype = getattr(torch, shadow) if shadow else self._layers.tensors[name].dtype
        return dtype

    def _names(self, kind: TensorKind, pack: tuple[int, int]) -> Sequence[str]:
        match kind:
            case TensorKind.WEIGHT:
                return self._layers.parameters_of(*pack)
            case TensorKind.GRADIENT:
                return [name for name in self._layers.parameters_of(*pack) if self._layers.state[name].trainable]
            case TensorKind.BUFFER:
                return self._layers.buffers_of(*pack)
        raise AssertionError(f"a {kind} block has no layout")
