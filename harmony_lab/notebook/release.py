"""Release: Labs and Trainers closed, and their device memory given back."""

import gc
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from harmony_lab.units import format_bytes

__all__ = ["Freed", "free"]


class Freed(NamedTuple):
    """What ``%harmony free`` closed, and the bytes that every CUDA device has got back."""

    num_labs: int
    num_trainers: int
    device_bytes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        closed = f"closed {_count(self.num_labs, 'Lab')} and {_count(self.num_trainers, 'Trainer')}"
        back = ", ".join(f"gpu{i} {format_bytes(size)}" for i, size in enumerate(self.device_bytes))
        return f"{closed}; given back: {back}" if back else closed


def free(labs: Iterable[Any], trainers: Iterable[Any], forget: Any) -> Freed:
    """Close them, ``forget(lab)`` what is shown of Labs, and let the allocator give its cache back."""
    before = _free_bytes()
    closed_labs, closed_trainers = list(labs), list(trainers)
    for lab in closed_labs:
        lab.close()
        if lab.run is not None:
            lab.run.stop()
        forget(lab)
    for trainer in closed_trainers:
        trainer.close()
    freed = len(closed_labs), len(closed_trainers)
    del closed_labs, closed_trainers
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    after = _free_bytes()
    return Freed(*freed, tuple(max(0, now - then) for now, then in zip(after, before, strict=True)))


def _free_bytes() -> list[int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.mem_get_info(ordinal)[0] for ordinal in range(torch.cuda.device_count())]


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
