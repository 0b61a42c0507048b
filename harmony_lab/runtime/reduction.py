"""Reduction: the sum of gradients over devices, a chunk at a time; the same code for every backend."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Shard", "Traffic", "sum_shards"]

Traffic = list[tuple[int, int, int]]
"""(source, destination, bytes)"""

_CHUNK = 1 << 20
"""Elements held at once on top of the gradients: small enough for the margin kept beside a budget."""


class Shard(NamedTuple):
    """One device's part of gradients that are summed over devices: tensors of the same shapes and dtypes on each."""

    device: int
    parts: Sequence[Tensor]


def sum_shards(device: int, shards: Sequence[Shard], reachable: Callable[[int, int, Tensor], Tensor]) -> Traffic:
    """Leave the sum of shards, added in the given order by ``device``, in all of them; returns what was copied.

    ``reachable(source, destination, tensor)``: that tensor of ``source``, where ``destination`` can copy from it.
    """
    copied: Counter[tuple[int, int]] = Counter()

    def bring(source: int, destination: int, tensor: Tensor) -> Tensor:
        if source == destination:
            return tensor
        copied[source, destination] += tensor.nbytes
        return reachable(source, destination, tensor)

    with torch.no_grad():
        for parts in zip(*(shard.parts for shard in shards), strict=True):
            for chunks in zip(*(part.split(_CHUNK) for part in parts), strict=True):
                held = list(zip((shard.device for shard in shards), chunks, strict=True))
                here = next(chunk.device for owner, chunk in held if owner == device)
                total = torch.zeros_like(chunks[0], device=here)
                for owner, chunk in held:
                    total += bring(owner, device, chunk).to(here)
                for owner, chunk in held:
                    chunk.copy_(bring(device, owner, total))
    return [(source, destination, num_bytes) for (source, destination), num_bytes in copied.items()]
