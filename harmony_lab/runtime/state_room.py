"""StateRoom: bytes of a device's memory that are held for the optimizer's state of a pack."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harmony_lab.program import Op, TensorKind
from harmony_lab.runtime.compute_memory import ComputeMemory
from harmony_lab.runtime.ledger import Ledger

__all__ = ["StateRoom"]


@dataclass(slots=True)
class StateRoom:
    """``held_bytes``: what the ledger counts, also for state that there is not yet."""

    held_bytes: int = 0

    @contextmanager
    def updating(self, op: Op, ledger: Ledger, memory: ComputeMemory, state_bytes: Callable[[], int]) -> Iterator[None]:
        """Counts what the optimizer's step allocates: temporaries, and state it makes, which takes the room held for
        it.  ``state_bytes``: of the state that there is by now."""
        before = state_bytes()
        ledger.released(TensorKind.OPTIMIZER, self.held_bytes - before)
        held, self.held_bytes = self.held_bytes, before
        try:
            with memory.counting():
                yield
        finally:
            memory.account.close()  # what it counted of new state is counted again, as such
            needed = max(held, state_bytes())
            ledger.allocated(TensorKind.OPTIMIZER, needed - before, op)
            self.held_bytes = needed
