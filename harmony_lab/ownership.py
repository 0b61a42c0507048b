"""Which owner a model has now: a newer one takes over from the one before."""

import threading
import weakref
from typing import Any, Protocol

__all__ = ["take_over"]


class _Owner(Protocol):
    def close(self) -> None: ...


_owners: "weakref.WeakKeyDictionary[Any, weakref.ref[_Owner]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def take_over(model: Any, owner: _Owner) -> None:
    """Make ``owner`` the one of that model; close the one before, and with it a run that trains the model."""
    with _lock:
        before = _owners.get(model)
        _owners[model] = weakref.ref(owner)
    older = before() if before is not None else None
    if older is not None:
        older.close()
