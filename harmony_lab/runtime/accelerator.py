"""Real devices: torch.cuda streams, pinned copies, peer copies that were seen to work.

Every op ends with its stream synchronized by the thread that ran it, so what comes after an op on another stream needs
no event on the device, and memory that an op frees is used by nobody.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Stream
from harmony_lab.runtime.backend import Copy
from harmony_lab.runtime.device_copies import Peers, arrives, in_parts
from harmony_lab.runtime.reduction import Shard, Traffic, sum_shards

__all__ = ["AcceleratorBackend", "out_of_memory_advice"]

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


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
        self._peers = Peers(machine, lambda a, b: arrives(self.torch_device(a), self.torch_device(b)))

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
                for whole, source in copy.pairs:
                    for to, part in in_parts(whole, self._peers.reachable(copy.source, copy.destination, source)):
                        to.copy_(part, non_blocking=True)
        _wait_for(torch.cuda.current_stream())

    def reduce(self, device: int, shards: Sequence[Shard]) -> Traffic:
        moved = sum_shards(device, shards, self._peers.reachable)
        _wait_for(torch.cuda.current_stream())
        return moved

    def released(self, tensors: Iterable[Tensor]) -> None:
        pass


def out_of_memory_advice(error: BaseException) -> str:
    """What helps where the device itself had no memory though the plan's budget was kept; empty for other errors.

    Layers compute in memory of torch's allocator, which keeps what is freed in pieces: with microbatches of several
    sizes many may be too small for what comes next.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    smaller = "plan for a smaller device (Machine.detect leaves a margin; give its devices less memory_bytes)"
    if any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS):
        return f"Other programs may use the device too: {smaller}."
    return (
        "Memory that torch's allocator keeps may be in pieces that are too small: set PYTORCH_ALLOC_CONF="
        f"expandable_segments:True before Python starts, or {smaller}."
    )


def _wait_for(stream: torch.cuda.Stream) -> None:
    """Wait without spinning: other threads need the core."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
