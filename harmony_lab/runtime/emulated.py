"""Emulated devices: host memory behind links of a given bandwidth."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Stream
from harmony_lab.runtime.backend import Copy
from harmony_lab.runtime.links import EmulatedLinks
from harmony_lab.runtime.reduction import Shard, Traffic, sum_shards

__all__ = ["EmulatedBackend", "poison"]


class EmulatedBackend:
    """Devices made of host memory.

    Transfers really copy and take at least the time that the machine's links, fairly shared, give them.  Each device
    computes with its ``compute_threads``.

    ``timed``: without, transfers take no more than copying does, for tests and in virtual time: order and budgets hold
    all the same.
    ``poisons``: freed memory is filled with NaN, which takes as long as writing it once more.
    """

    pins_host_memory = False

    def __init__(self, machine: Machine, *, timed: bool = True, poisons: bool = False) -> None:
        self._machine = machine
        self._poisons = poisons
        self._links = EmulatedLinks(machine, timed=timed)

    def begin(self) -> None:
        self._links.begin()

    def abort(self) -> None:
        self._links.abort()

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cpu")

    def enter_worker(self, device: int, stream: Stream) -> None:
        torch.get_num_threads()  # torch's first call in a thread sets that thread's number
        if device == HOST:
            torch.set_num_threads(self._machine.host.update_threads)
        else:
            torch.set_num_threads(self._machine.devices[device].compute_threads if stream is Stream.COMPUTE else 1)

    def running(self, device: int, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def transfer(self, copies: Sequence[Copy]) -> None:
        with (
            self._links.carrying([(copy.source, copy.destination, copy.num_bytes) for copy in copies]),
            torch.no_grad(),
        ):
            for copy in copies:
                for to, source in copy.pairs:
                    to.copy_(source)

    def reduce(self, device: int, shards: Sequence[Shard]) -> Traffic:
        sizes = [(shard.device, sum(part.nbytes for part in shard.parts)) for shard in shards]
        peers = [(peer, num_bytes) for peer, num_bytes in sizes if peer != device]
        gathered = [(peer, device, num_bytes) for peer, num_bytes in peers]
        spread = [(device, peer, num_bytes) for peer, num_bytes in peers]
        with self._links.carrying(gathered + spread):
            return sum_shards(device, shards, lambda source, destination, tensor: tensor)

    def released(self, tensors: Iterable[Tensor]) -> None:
        if self._poisons:
            for tensor in tensors:
                poison(tensor)


def poison(tensor: Tensor) -> None:
    """Fill a contiguous tensor so that who reads it late sees NaN in floats of any width, -1 in integers."""
    start, num_bytes = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (num_bytes,), (1,)).fill_(0xFF)
