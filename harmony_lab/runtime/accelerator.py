"""Real devices: torch.cuda streams, pinned copies, peer copies that were seen to work.

Every op ends with its stream synchronized by the thread that ran it, so what comes after an op on another stream needs
no event on the device, and memory that an op frees is used by nobody.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Stream
from harmony_lab.runtime.backend import Copy

__all__ = ["AcceleratorBackend"]

_CHUNK = 1 << 20
"""Elements that a reduction holds at once on top of the gradients: small enough for the margin kept beside a budget."""


class AcceleratorBackend:
    """The CUDA devices of a machine.  Raises ``HarmonyError`` where one is missing."""

    pins_host_memory = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        present = torch.cuda.device_count()
        missing = [device.name for device in machine.devices if device.ordinal >= present]
        if missing:
            raise HarmonyError(
                f"{', '.join(missing)} of {machine.name} cannot be found: torch sees {present} CUDA devices here. "
                "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use Machine.detect() or Machine.emulated()"
            )
        self._streams: dict[tuple[int, Stream], torch.cuda.Stream] = {}
        count = machine.num_devices
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        self._direct = {pair for pair in pairs if machine.peer_transfers and self._copies_right(*pair)}

    def begin(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cuda", self._machine.devices[device].ordinal)

    def enter_worker(self, device: int, stream: Stream) -> None:
        torch.get_num_threads()  # torch's first call in a thread sets that thread's number
        if device == HOST:
            torch.set_num_threads(self._machine.host.update_threads)
        else:
            torch.set_num_threads(1)
            torch.cuda.set_device(self.torch_device(device))
            self._streams[device, stream] = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def running(self, device: int, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext() if device == HOST else self._on(self._streams[device, stream])

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                _wait_for(stream)

    def transfer(self, copies: Sequence[Copy]) -> None:
        with torch.no_grad():
            for copy in copies:
                staged = HOST not in (copy.source, copy.destination) and (
                    (copy.source, copy.destination) not in self._direct
                )
                for to, source in copy.pairs:
                    to.copy_(source.cpu() if staged else source, non_blocking=True)
        _wait_for(torch.cuda.current_stream())

    def reduce(self, device: int, shards: Sequence[Sequence[Tensor]], traffic: Sequence[tuple[int, int, int]]) -> None:
        here = self.torch_device(device)
        with torch.no_grad():
            for parts in zip(*shards, strict=True):
                for chunks in zip(*(part.split(_CHUNK) for part in parts), strict=True):
                    total = self._fetch(chunks[0], here).clone()
                    for chunk in chunks[1:]:
                        total += self._fetch(chunk, here)
                    for chunk in chunks:
                        chunk.copy_(total if self._reach(here, chunk.device) else total.cpu())
        _wait_for(torch.cuda.current_stream())

    def released(self, tensors: Iterable[Tensor]) -> None:
        pass

    # -- peers ----------------------------------------------------------------------------------------------------

    def _fetch(self, tensor: Tensor, here: torch.device) -> Tensor:
        return tensor.to(here) if self._reach(tensor.device, here) else tensor.cpu().to(here)

    def _reach(self, source: torch.device, destination: torch.device) -> bool:
        index = {self.torch_device(device): device for device in range(self._machine.num_devices)}
        return source == destination or (index[source], index[destination]) in self._direct

    def _copies_right(self, source: int, destination: int) -> bool:
        """Whether data survives the way: between some consumer cards peer copies arrive as zeros, without an error."""
        given = torch.arange(1, 1 << 16, device=self.torch_device(source))
        arrived = torch.empty_like(given, device=self.torch_device(destination))
        arrived.copy_(given)
        return torch.equal(arrived.cpu(), given.cpu())


def _wait_for(stream: torch.cuda.Stream) -> None:
    """Wait without spinning: other threads need the core."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
