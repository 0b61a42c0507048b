"""Even pieces: cutting a tensor along its samples while it is captured, for any number of samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harmony_lab.profiler.nodes import size_factor

__all__ = ["EvenPieces"]


class EvenPieces(TorchFunctionMode):
    """While active, cuts a tensor of k * samples rows into k equal pieces, as in ``cat([x, y]).chunk(2)``.

    Torch computes how many pieces there are by rounding up a quotient, and its solver does not see that this gives the
    same for any number of samples.  Here it follows from the expressions of the lengths.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("chunk", "split"):
            pieces = _pieces(func.__name__ == "chunk", *args, **kwargs)
            if pieces is not None:
                return pieces
        return func(*args, **kwargs)


def _pieces(chunks: bool, tensor: Tensor, number: Any = None, dim: int = 0, **named: Any) -> tuple[Tensor, ...] | None:
    """The equal pieces: ``number`` of them, or as long as ``number`` each; None where nothing says they are equal."""
    number = number if number is not None else next(iter(named.values()), None)
    length = tensor.shape[dim]
    if not isinstance(length, torch.SymInt) or len(length.node.expr.free_symbols) != 1:
        return None
    (symbol,) = length.node.expr.free_symbols
    whole, part = size_factor(length, symbol), size_factor(number, symbol)
    if whole is None or part is None:
        return None
    if chunks:
        even = part[0] == 0 and part[1] > 0 and whole[0] % part[1] == whole[1] % part[1] == 0
        return _cut(tensor, dim, part[1], length // number) if even else None
    count = whole[0] // part[0] if part[0] else 0
    return _cut(tensor, dim, count, number) if whole == (count * part[0], count * part[1]) else None


def _cut(tensor: Tensor, dim: int, count: int, size: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.narrow(dim, index * size, size) for index in range(count))
