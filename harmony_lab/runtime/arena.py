"""Arena: one stretch of host memory in which tensors with storages of their own lie side by side."""

import logging
import mmap
import sys
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from harmony_lab.units import format_bytes

__all__ = ["Arena"]

_log = logging.getLogger("harmony_lab")

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform == "linux" else None


class Arena:
    """``memory``: the whole, as flat bytes.  It lives as long as the arena or one of its tensors does."""

    def __init__(self, num_bytes: int) -> None:
        self._unpin: weakref.finalize[..., Arena] | None = None
        self._pages: mmap.mmap | None = None
        if num_bytes and _PRIVATE is not None:
            self._pages = mmap.mmap(-1, num_bytes, flags=_PRIVATE)
            self.memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor there, with any content.  Its storage ends where it ends, so saving it saves no more."""
        num_bytes = shape.numel() * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        buffer = self.memory.numpy() if self._pages is None else self._pages
        return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)

    def holds(self, tensor: Tensor, offset: int) -> bool:
        """Whether that tensor lies there."""
        return not tensor.nbytes or tensor.data_ptr() == self.memory.data_ptr() + offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """The system may have the memory of these bytes back, but for pages that others share; nobody reads them."""
        if self._pages is not None:
            first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > first:
                self._pages.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def pin(self, content: str, *, warns: bool = True) -> bool:
        """Page-lock all of it, so that devices copy at full speed and beside the host.  False where the system does not
        let it, which a warning says.  ``content``: what lies there.

        By registration, for torch's pinned memory is rounded up to a power of two.
        """
        if not self.num_bytes:
            return True
        cudart, start = torch.cuda.cudart(), self.memory.data_ptr()  # type: ignore[no-untyped-call]
        pinned = int(cudart.cudaHostRegister(start, self.num_bytes, 0)) == 0
        if pinned:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, start)
            self._unpin.atexit = False  # CUDA may be gone by then
            return True
        _clear_last_error()
        if warns:
            _log.warning(
                "the system does not let %s of %s be page-locked: copies to devices are staged and slower",
                format_bytes(self.num_bytes),
                content,
            )
        return False

    def unpin(self) -> None:
        """Before the memory goes; of an arena that is forgotten this happens by itself."""
        if self._unpin is not None:
            self._unpin()


def _clear_last_error() -> None:
    """CUDA remembers a refused call, and whoever launches the next kernel is told: that one, here."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
