"""Copies between real devices: straight where data was seen to arrive, else by way of the host; large ones in parts."""

from collections.abc import Callable, Iterator
from itertools import permutations

import torch
from torch import Tensor

from harmony_lab.machine import HOST, Machine

__all__ = ["Peers", "arrives", "in_parts"]

_PART_SIZE = 16 * 2**20
_PROBE_SIZE = 1 << 16


class Peers:
    """Which devices of a machine copy straight to each other: of those that should, the pairs that ``arrives`` is true
    of; it is asked once for each."""

    def __init__(self, machine: Machine, arrives: Callable[[int, int], bool]) -> None:
        pairs = permutations(range(machine.num_devices), 2)
        self._direct = {pair for pair in pairs if machine.reaches(*pair) and arrives(*pair)}

    def reachable(self, source: int, destination: int, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy in host memory where its device cannot send to ``destination``."""
        return tensor if HOST in (source, destination) or (source, destination) in self._direct else tensor.cpu()


def arrives(
    source: torch.device, destination: torch.device, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> bool:
    """Whether data survives the way: between some consumer cards peer copies arrive as zeros, without an error."""
    given = torch.arange(1, _PROBE_SIZE, device=source)
    arrived = torch.zeros_like(given, device=destination)  # not what another probe has left there
    copy(arrived, given)
    return torch.equal(arrived.cpu(), given.cpu())


def in_parts(to: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A large flat copy in parts: between them the device's copy engine takes what other streams have to copy."""
    if to.dim() == 1:
        yield from zip(torch.split(to, _PART_SIZE), torch.split(source, _PART_SIZE), strict=True)
    else:
        yield to, source
