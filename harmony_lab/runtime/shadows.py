"""Shadows: copies of the master weights in the type that devices get, made anew in every step.

Whatever changed the masters since the last step (updates, a loaded checkpoint, ``p.data.clamp_()``, which leaves no
trace) is in the copies.  They are made on a thread of their own, in layer order, while devices work::

    shadows   | layers 0-2 | layers 3-5 | layers 6-8 |
    swap in                | pack 0:3 |       | pack 3:6 |      waits only for its own
    compute                           | pack 0:3 | pack 3:6 |

A pack is updated after its backward, so after its last swap-in: a copy made once is right for the whole step.  Where
the step makes updates that the one before has left, each copy waits for its own; those that wait for none come first,
as their packs come in whatever becomes of the updates.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_lab.runtime.arena import Arena
from harmony_lab.runtime.layout import Layout

__all__ = ["Shadows"]


@dataclass(slots=True)
class _Round:
    """How far the copies of one step are: one of its own, so that what an interrupt left behind counts for nothing.

    ``position``: in the order in which they are made, by name.
    """

    position: Mapping[str, int]
    num_made: int = 0
    failure: BaseException | None = None


class Shadows:
    """``arena``: the copies as flat bytes, laid out as ``layout`` says.  ``masters``: the model's tensors by name."""

    def __init__(self, masters: Mapping[str, Tensor], layout: Layout) -> None:
        self.arena = Arena(layout.num_bytes)
        self._masters = masters
        self._names = [piece.name for piece in layout.pieces]
        self._copies = layout.views(self.arena.memory)
        self._round = _Round({})
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "harmony-shadows", initializer=torch.get_num_threads)

    @contextmanager
    def renewing(
        self, awaited: Collection[str] = (), wait_for: Callable[[str], None] = lambda name: None
    ) -> Iterator[None]:
        """Make all copies anew meanwhile, of the ``awaited`` each once ``wait_for`` has returned; leaving waits for the
        last one."""
        order = sorted(self._names, key=lambda name: name in awaited)
        self._round = _Round({name: position for position, name in enumerate(order)})
        made = self._thread.submit(self._make, self._round, wait_for)
        try:
            yield
        finally:
            made.result()

    def _make(self, current: _Round, wait_for: Callable[[str], None]) -> None:
        try:
            for name in current.position:
                wait_for(name)
                with torch.no_grad():
                    self._copies[name].copy_(self._masters[name])
                with self._changed:
                    current.num_made += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                current.failure = error
                self._changed.notify_all()
            raise

    def wait_for(self, names: Iterable[str]) -> None:
        """Until the copies of these are made."""
        current = self._round
        last = max((current.position[name] for name in names), default=-1)
        with self._changed:
            self._changed.wait_for(lambda: current.num_made > last or current.failure is not None)
            if current.failure is not None:
                raise current.failure

    def close(self) -> None:
        """Join the thread."""
        self._thread.shutdown()
