"""MemoryTracker: the bytes that torch ops really allocate, while they run and until they are really released."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MemoryTracker"]


class _CountedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted: its address, which stays its own while it lives, and its bytes."""

    __slots__ = ("address", "num_bytes")

    address: int
    num_bytes: int


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's __init_subclass__ has no types
    """Counts the storages that torch ops allocate while it is active, until they are really released.

    Counted, by its size in bytes: every storage that an op creates on this thread, backward's ops included.  So
    outputs, activations that autograd saves and temporaries between ops are counted, each once however many views
    there are.  Not counted: storages from before (inputs, parameters), scratch memory inside one kernel, what an
    existing storage grows by when it is resized, and the inside of a higher-order operator (its results are).

    ``allocated(num_bytes)`` is called after the op that allocated them; when it raises, those bytes are not counted,
    the op's result is dropped and the error goes to the caller.  ``released(num_bytes)`` is called when the storage is
    freed, on whatever thread frees it and also after the tracker was left; it must not raise.  Once the tracker itself
    is gone nothing is reported any more, so keep it as long as the numbers matter.
    """

    supports_higher_order_operators = True

    def __init__(self, allocated: Callable[[int], None], released: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no types
        self._allocated = allocated
        self._released = released
        self._counted: dict[int, _CountedStorage] = {}
        self.depends_on_data = False
        """Whether an op has run whose result has a size that depends on what its inputs hold."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Only watches, so torch.compile may compile what runs below it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would otherwise import its compiler and wrap every call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not _returns_only_aliases(func):
            if _may_be_sized_by_data(func) and not _indexes_by_number(func, args):
                self.depends_on_data = True
            if isinstance(result, Tensor):
                self._count(result, args, kwargs)
            else:
                for tensor in _tensors(result):
                    self._count(tensor, args, kwargs)
        return result

    def forget(self, tensor: Tensor) -> int:
        """Stop counting this tensor's storage: its bytes are released now and returned (0: they were not counted)."""
        counted = self._counted.pop(tensor.untyped_storage()._cdata, None)
        if counted is None:
            return 0
        self._released(counted.num_bytes)
        return counted.num_bytes

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage as if an op had allocated it in here."""
        self._count(tensor, (), None)

    def _count(self, tensor: Tensor, args: Any, kwargs: Any) -> None:
        if tensor.layout is not torch.strided:
            return  # sparse tensors are made of strided ones, which are counted
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._counted:
            return
        num_bytes = storage.nbytes()
        if num_bytes == 0 or _hold(args, address) or (kwargs and _hold(kwargs.values(), address)):
            return
        self._allocated(num_bytes)
        counted = _CountedStorage(storage, self._on_release)
        counted.address = address
        counted.num_bytes = num_bytes
        self._counted[address] = counted

    def _on_release(self, counted: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(counted, _CountedStorage)
        # Called before the memory goes back to the allocator, so the address cannot be another storage's yet.
        if self._counted.pop(counted.address, None) is not None:
            self._released(counted.num_bytes)


@cache
def _returns_only_aliases(func: Any) -> bool:
    """Whether an op can only return its own inputs or views of them (views, in-place ops, ``out=``)."""
    schema = getattr(func, "_schema", None)
    return schema is not None and all(returned.alias_info is not None for returned in schema.returns)


@cache
def _may_be_sized_by_data(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _indexes_by_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether that op is ``tensor[indices]`` without a mask: its result then has a size that its inputs' sizes give."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) for item in args[1])


def _hold(arguments: Iterable[Any], address: int) -> bool:
    """Whether one of the tensors in there, also in nested lists, has the storage at that address."""
    for item in arguments:
        if isinstance(item, Tensor):
            if item.layout is torch.strided and item.untyped_storage()._cdata == address:
                return True
        elif isinstance(item, (tuple, list)) and _hold(item, address):
            return True
    return False


def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for item in results:
            yield from _tensors(item)
