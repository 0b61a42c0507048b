"""Kept: what autograd saved in one forward, in memory that can leave the device and come back elsewhere.

Autograd's saved tensors hooks (``torch.autograd.graph.saved_tensors_hooks``) say where each tensor that backward will
need lies: in a storage that forward allocated, which then is in a ``Slot``, or in a weight, buffer, input or value that
forward was given.  Those may have left and come back since, so backward looks them up among what it is given itself::

    forward   given  [weights] [value]     makes  [slot 0] [slot 1]
                        ^         ^                  ^        ^
    saved            weight.T   value             output    mask[:, 0]

Nothing else of the graph holds memory: leaves and outputs are replaced by what has their form.
"""

import bisect
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from harmony_lab.layers import LayerSequence
from harmony_lab.runtime.execution import Root, SavedLayer, run_with_gradient

__all__ = ["Kept", "Slot", "run_keeping"]

Given = Mapping[str, Tensor]


def run_keeping(
    given: Given, layers: LayerSequence, start: int, stop: int, state: Given, *arguments: Any
) -> tuple[dict[int, dict[str, Tensor]], list[SavedLayer], "Kept"]:
    """``run_with_gradient``, with what autograd saves kept so that it may move.  ``given``: the tensors that forward
    reads, by names under which backward gets them too.  To be settled then (``Kept.settle``)."""
    kept = Kept(given)
    with kept.saving():
        made, saved = run_with_gradient(layers, start, stop, kept.leaves(state), *arguments)
    return made, saved, kept


class Slot:
    """``flat``: the bytes of one storage, on the device; None while they are on the host."""

    __slots__ = ("__weakref__", "flat", "num_bytes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.num_bytes = storage.nbytes()
        self.flat: Tensor | None = _over(storage, torch.uint8, 0, (self.num_bytes,), (1,))


class _Part(NamedTuple):
    """A tensor as a part of a slot, or of the given tensor of that name."""

    whole: Slot | str
    offset_bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Kept:
    """The graph holds the slots, and drops each where it would have dropped the tensors; those of outputs are held here
    until ``release``."""

    def __init__(self, given: Given) -> None:
        self.parameters: dict[str, Tensor] = {}
        self._outputs: list[Any] = []
        self._slots: list[weakref.ref[Slot]] = []
        self._by_storage: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        self._given: Given = {}
        ranges = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in given.items() if tensor.nbytes)
        self._starts = [start for start, _, _ in ranges]
        self._ranges = ranges

    @property
    def slots(self) -> list[Slot]:
        """Those that something still needs."""
        return [slot for slot in (known() for known in self._slots) if slot is not None]

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self.slots)

    # -- forward --------------------------------------------------------------------------------------------------

    def saving(self) -> saved_tensors_hooks:
        """What forward runs under."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def leaves(self, state: Given) -> dict[str, Tensor]:
        """Weights for forward, whose gradients are collected in tensors that are the graph's own."""
        self.parameters = {name: _leaf(tensor) for name, tensor in state.items()}
        return self.parameters

    def settle(self, layers: list[SavedLayer]) -> None:
        """After forward: no leaf and no output holds memory any more, but for a number."""
        for layer in layers:
            for name, output in layer.outputs.items():
                assert isinstance(output, Tensor)
                self._outputs.append(self._pack(output.detach()))
                layer.outputs[name] = Root(get_gradient_edge(output), output.shape, output.dtype, output.device)
            for leaf in layer.inputs.values():
                _empty(leaf)
        for leaf in self.parameters.values():
            _empty(leaf)
        self._starts, self._ranges = [], []
        self._by_storage.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Part:
        if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        form = tensor.shape, tensor.stride(), tensor.dtype
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            start, num_bytes, name = self._ranges[at]
            if address < start + num_bytes:
                return _Part(name, int(address - start), *form)
        storage = tensor.untyped_storage()
        slot = self._by_storage.get(storage._cdata)
        if slot is None:
            slot = self._by_storage[storage._cdata] = Slot(storage)
            self._slots.append(weakref.ref(slot))
        return _Part(slot, int(tensor.storage_offset()) * tensor.element_size(), *form)

    # -- backward -------------------------------------------------------------------------------------------------

    def release(self, given: Given) -> None:
        """Before backward: what it is given in place of what forward was."""
        self._given = given
        self._outputs.clear()

    def _unpack(self, packed: Tensor | _Part) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed.whole, Slot):
            whole = packed.whole.flat
            assert whole is not None, "what backward needs is on the host"
        else:
            whole = self._given[packed.whole].detach()
        start = int(whole.storage_offset()) * whole.element_size() + packed.offset_bytes
        return _over(whole.untyped_storage(), packed.dtype, start, packed.size, packed.stride)

    # -- moving ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The device's memory is given up."""
        for slot in self.slots:
            slot.flat = None

    def come_back(self, device: torch.device) -> None:
        """Memory on a device, with any content."""
        for slot in self.slots:
            slot.flat = torch.empty(slot.num_bytes, dtype=torch.uint8, device=device)


def _over(
    storage: torch.UntypedStorage, dtype: torch.dtype, start: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A tensor over that storage, from byte ``start`` on."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    with torch.no_grad():
        return tensor.set_(storage, start // dtype.itemsize, size, stride)


def _leaf(weight: Tensor) -> Tensor:
    leaf = weight.detach().requires_grad_(weight.requires_grad)
    if leaf.requires_grad:
        leaf.grad_dtype = weight.grad_dtype  # gradients may be of another type than weights
    return leaf


def _empty(leaf: Tensor) -> None:
    """Its form stays: that is all that collecting its gradient takes."""
    leaf.data = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
