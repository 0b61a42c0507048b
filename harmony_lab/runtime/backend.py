"""Backend: what the executor asks of devices.  All above this protocol is the same for emulated and real ones."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harmony_lab.program import Stream, TensorKind
from harmony_lab.runtime.reduction import Shard, Traffic

__all__ = ["Backend", "Copy", "StepAborted"]


class StepAborted(Exception):
    """The step was aborted while this op was under way."""


class Copy(NamedTuple):
    """Tensors copied from one place to another, device indices or ``HOST``, as one transfer."""

    source: int
    destination: int
    kind: TensorKind
    pairs: Sequence[tuple[Tensor, Tensor]]  # (to, from), of one shape and dtype each

    @property
    def num_bytes(self) -> int:
        return sum(to.nbytes for to, _ in self.pairs)


class Backend(Protocol):
    """Devices, used from one worker thread per (device, stream).

    ``pins_host_memory``: whether host blocks are page-locked, for copies that run beside the host.
    """

    pins_host_memory: bool

    def begin(self) -> None:
        """Before a step."""

    def abort(self) -> None:
        """End waits of the running step, from any thread; they raise ``StepAborted``."""

    def torch_device(self, device: int) -> torch.device:
        """Where that device's tensors live."""

    def enter_worker(self, device: int, stream: Stream) -> None:
        """Called once in the thread that runs the ops of that queue."""

    def running(self, device: int, stream: Stream) -> AbstractContextManager[None]:
        """What an op of that queue runs under; leaving it waits until the device has done the op."""

    def transfer(self, copies: Sequence[Copy]) -> None:
        """Copy over the links."""

    def reduce(self, device: int, shards: Sequence[Shard]) -> Traffic:
        """Leave the sum of shards, added in the given order, in all of them; ``device`` does the work.

        Returns what was copied, to the byte.
        """

    def released(self, tensors: Iterable[Tensor]) -> None:
        """The memory of these tensors is free now: nobody may read them any more."""
