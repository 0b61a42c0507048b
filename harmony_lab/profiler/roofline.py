"""Roofline: what the ops of a layer cost by their shapes: floating-point operations, bytes touched, seconds at best.

An op takes at least as long as its arithmetic at the device's peak rate and as its traffic at the memory's; the longer
of the two bounds it (Williams, Waterman and Patterson, *Roofline*, CACM 52(4), 2009).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["OpCounter", "Rates", "Work"]

_aten = torch.ops.aten

# These make a tensor without touching its memory.
_UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# These write their first argument without reading it.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"}
# These read as many elements of their first (or second) argument as they return.
_GATHERS = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0}


class Work(NamedTuple):
    """What some ops cost.  ``best_s``: the sum of each op's roofline."""

    num_ops: int
    flops: int
    num_bytes: int
    best_s: float

    def __add__(self, other: Any) -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def seconds(self, efficiency: float, launch_s: float) -> float:
        """At that share of the peak rates, with that overhead per op."""
        return self.best_s / efficiency + self.num_ops * launch_s


_NOTHING = Work(0, 0, 0, 0.0)


class Rates(NamedTuple):
    """Of one device: ``flops(dtype, convolution)`` is its peak rate of multiplying matrices, per second."""

    flops: Callable[[torch.dtype, bool], float]
    bytes_per_s: float


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's __init_subclass__ has no types
    """Counts ops while active, backward's included; also of fake tensors, where nothing is computed.

    Bytes are what an op reads and writes once each: inputs, without elements that are only repeated (broadcast), and
    outputs.  Views cost nothing.
    """

    supports_higher_order_operators = True

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no types
        self._rates = rates
        self._work = _NOTHING

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def take(self) -> Work:
        """The work since the last take."""
        work, self._work = self._work, _NOTHING
        return work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "aten":
            self._work += self._of(func, args, kwargs, result)
        return result

    def _of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
        name = func.overloadpacket.__name__
        given = list(_tensors((args, kwargs)))
        made = [tensor for tensor in _tensors(result) if not any(_same_memory(tensor, other) for other in given)]
        written = [*made, *_written(func, args, kwargs)]
        if name in _UNTOUCHED or not written:
            return _NOTHING
        num_bytes = sum(map(_num_bytes, written)) + sum(_read_bytes(name, given, made))
        flops = _flops(func, args, kwargs, result)
        best_s = num_bytes / self._rates.bytes_per_s
        if flops:
            dtype = next(tensor.dtype for tensor in given if tensor.is_floating_point() or tensor.is_complex())
            best_s = max(best_s, flops / self._rates.flops(dtype, "conv" in name))
        return Work(1, flops, num_bytes, best_s)


def _read_bytes(name: str, given: list[Tensor], made: list[Tensor]) -> Iterator[int]:
    seen: set[int] = set()
    for position, tensor in enumerate(given):
        if id(tensor) in seen or (position == 0 and name in _OVERWRITES):
            continue
        seen.add(id(tensor))
        num_bytes = _num_bytes(tensor)
        if _GATHERS.get(name) == position:
            num_bytes = min(num_bytes, sum(map(_num_bytes, made)))
        yield num_bytes


def _num_bytes(tensor: Tensor) -> int:
    """Without what broadcasting repeats."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes in place."""
    named = _named(func, args, kwargs)
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(named.get(argument.name))


def _same_memory(tensor: Tensor, other: Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.layout is torch.strided:
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


# -- floating-point operations ------------------------------------------------------------------------------------


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Two per multiplication and addition of a matrix product or a convolution; other ops count none."""
    packet = func.overloadpacket
    attention = _ATTENTION.get(packet.__name__)
    if attention is not None:
        named = _named(func, args, kwargs)
        flops = attention(named)
        return flops // 2 if named.get("is_causal") else flops  # what the mask hides is not computed
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _attention_flops(named: dict[str, Any]) -> int:
    flops: Any = sdpa_flop_count  # without types
    return int(flops(*_shapes(named, ("query", "key", "value"))))


def _attention_backward_flops(named: dict[str, Any]) -> int:
    flops: Any = sdpa_backward_flop_count
    gradient = "grad_out" if "grad_out" in named else "grad_out_"
    return int(flops(*_shapes(named, (gradient, "query", "key", "value"))))


def _shapes(named: dict[str, Any], names: Iterable[str]) -> list[torch.Size]:
    return [named[name].shape for name in names]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_ATTENTION: dict[str, Callable[[dict[str, Any]], int]] = {
    **{f"_scaled_dot_product_{kernel}": _attention_flops for kernel in _KERNELS},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward_flops for kernel in _KERNELS},
}
