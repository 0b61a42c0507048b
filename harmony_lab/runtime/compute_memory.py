"""ComputeMemory: what a compute op allocates on a device, counted op by op of torch once, known from then on."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from harmony_lab.program import Op, TensorKind
from harmony_lab.runtime.ledger import Account, Ledger
from harmony_lab.runtime.memory import MemoryTracker

__all__ = ["ComputeMemory", "Usage", "Usages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes that a forward or recompute needs at most, and those that it keeps for backward, which needs
    ``backward_bytes`` more."""

    peak_bytes: int
    saved_bytes: int = 0
    backward_bytes: int = 0


class Usages:
    """What compute ops were seen to use, by what decides it: the kind of op, its layers, the size of its microbatch.

    Counting every torch op costs as much as a small op itself.  So it is done the first time; later the ledger is
    charged with what was seen, for the whole op.  Not so with ``always``, and for ops whose results have sizes that
    depend on data.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._known: dict[Hashable, Usage] = {}

    def get(self, key: Hashable) -> Usage | None:
        return self._known.get(key)

    def put(self, key: Hashable, usage: Usage, *memories: "ComputeMemory") -> None:
        """``memories``: of the ops that it was seen in."""
        if not self._always and not any(memory.varies for memory in memories):
            self._known.setdefault(key, usage)


class ComputeMemory:
    """What one compute op allocates.

    ``usage``: what is known of it; the op is then charged ``charge_bytes`` at once.  None: count.  ``beside``: the
    memory of an earlier op that this one uses up, backward that of its forward.  ``peak_bytes``: counted, at most,
    above what was alive before.
    """

    def __init__(
        self,
        ledger: Ledger,
        op: Op,
        key: Hashable = None,
        usage: Usage | None = None,
        charge_bytes: int = 0,
        beside: "ComputeMemory | None" = None,
    ) -> None:
        self.key = key
        self.usage = usage
        self.peak_bytes = 0
        self.account = Account(ledger, op)
        self._ledger = ledger
        self.tracker = None if usage else MemoryTracker(self._allocated, self.account.released)
        self._charge_bytes = charge_bytes
        self._beside = beside
        self._beside_bytes = beside.account.alive_bytes if beside else 0

    def _allocated(self, num_bytes: int) -> None:
        self.account.allocated(num_bytes)
        used_up = self._beside_bytes - self._beside.account.alive_bytes if self._beside else 0
        self.peak_bytes = max(self.peak_bytes, self.account.alive_bytes - used_up)

    @property
    def varies(self) -> bool:
        """Whether what it was seen to allocate may be another amount with other data."""
        return self.tracker is None or self.tracker.depends_on_data

    @contextmanager
    def counting(self) -> Iterator["ComputeMemory"]:
        """Counts what torch ops allocate in here, or charges what they are known to."""
        try:
            if self.tracker is None:
                self.account.allocated(self._charge_bytes)
                yield self
            else:
                with self.tracker:
                    yield self
        except BaseException:
            self.account.close()
            raise

    def hand_over(self, kind: TensorKind, tensors: Iterable[Tensor]) -> None:
        """These tensors, allocated by the op, are a block's content from now on."""
        with self.account.handing_over(kind):
            for tensor in tensors:
                if self.tracker is None:
                    self.account.released(tensor.nbytes)
                else:
                    self.tracker.forget(tensor)

    def again(self, purpose: Op, tensors: Iterable[Tensor]) -> "ComputeMemory":
        """The same, of what is kept and now is in these tensors, after it was elsewhere.

        Raises ``DeviceMemoryError``, counting nothing.
        """
        memory = ComputeMemory(self._ledger, purpose, self.key, self.usage)
        memory.peak_bytes = self.peak_bytes
        try:
            if memory.tracker is None:
                memory.account.allocated(sum(tensor.nbytes for tensor in tensors))
            else:
                memory.tracker.depends_on_data = self.varies
                for tensor in tensors:
                    memory.tracker.count(tensor)
        except BaseException:
            memory.account.close()
            raise
        memory.account.become(TensorKind.SAVED)
        return memory

    def keep(self) -> None:
        """What is alive now, of the op's own, is what layers keep for backward."""
        if self.usage is not None:
            self.account.released(self.account.alive_bytes - self.usage.saved_bytes)
        self.account.become(TensorKind.SAVED)
