"""Gauges: how many bytes are alive on a device, now and at most, while layers run there."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from harmony_lab.errors import HarmonyError
from harmony_lab.machine import Backend, Device
from harmony_lab.runtime.memory import MemoryTracker

__all__ = ["Gauge", "Target"]


class Gauge(Protocol):
    """Counts bytes inside its ``with`` block, above what was alive before it."""

    def __enter__(self) -> "Gauge": ...
    def __exit__(self, *error: Any) -> None: ...

    @property
    def alive_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def restart_peak(self) -> None:
        """From here on, ``peak_bytes`` is the most alive since now."""


class _TrackedGauge:
    """Of an emulated device: every storage that an op allocates."""

    def __init__(self) -> None:
        self.alive_bytes = 0
        self.peak_bytes = 0
        self._tracker = MemoryTracker(self._allocated, self._released)

    def __enter__(self) -> "_TrackedGauge":
        self._tracker.__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracker.__exit__(*error)  # type: ignore[no-untyped-call]

    def restart_peak(self) -> None:
        self.peak_bytes = self.alive_bytes

    def _allocated(self, num_bytes: int) -> None:
        self.alive_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _released(self, num_bytes: int) -> None:
        self.alive_bytes -= num_bytes


class _CudaGauge:
    """Of a CUDA device: torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> "_CudaGauge":
        self._before = torch.cuda.memory_allocated(self._device)
        self.restart_peak()
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    @property
    def alive_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class Target:
    """Where layers are measured: what a Device of the machine is for torch."""

    device: torch.device
    description: str
    num_threads: int | None  # of the host, for emulated devices
    shapes_only: bool = False  # nothing is computed there: tensors are fake

    @classmethod
    def of(cls, device: Device) -> "Target":
        """Raises ``HarmonyError`` where that device is not here."""
        if device.backend is Backend.EMULATED:
            threads = device.compute_threads
            what = f"emulated cpu, {threads} thread" + ("s" if threads > 1 else "")
            return cls(torch.device("cpu"), what, threads)
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.ordinal >= present:
            raise HarmonyError(
                f"{device.name} cannot be measured: torch sees {present} CUDA devices here. For a machine that is not "
                "at hand use harmony_lab.estimate; to measure here, Machine.detect() or Machine.emulated()"
            )
        cuda = torch.device("cuda", device.ordinal)
        return cls(cuda, torch.cuda.get_device_name(cuda), None)

    @classmethod
    def shapes(cls, description: str) -> "Target":
        """For ``estimate``.  Fake tensors say they are on the CPU: fake CUDA tensors need a torch with CUDA."""
        return cls(torch.device("cpu"), description, None, shapes_only=True)

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def gauge(self) -> Gauge:
        return _CudaGauge(self.device) if self._is_cuda else _TrackedGauge()

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """What torch's allocator keeps of freed memory goes back to the device."""
        if self._is_cuda:
            torch.cuda.empty_cache()

    def keeping_random_state(self) -> AbstractContextManager[None]:
        """Leaves the user's random state as it was."""
        keeping: AbstractContextManager[None] = torch.random.fork_rng(
            devices=[self.device.index] if self._is_cuda else []
        )
        return keeping
