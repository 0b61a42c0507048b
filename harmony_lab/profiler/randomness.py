"""Random ops whose draws depend on (seed, sample, op) alone.

Dropout in PyTorch draws from one global stream, so a mask depends on everything drawn before it: on how a minibatch is
cut into microbatches, on recompute, on which device runs first.  Here each sample of each random op has its own seed,
so forward and recompute, any split of the minibatch and any order of execution agree without saving generator states.

Masks are drawn on the device that needs them; CPU and GPU generators differ, so a mask is reproduced on the same kind
of device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerCall, LayerSequence

__all__ = [
    "BatchDim",
    "PerSampleRandomness",
    "TracedCall",
    "attention",
    "bernoulli",
    "drawn",
    "drawn_like",
    "dropout",
    "feature_dropout",
    "refilled",
    "reproducible_randomness",
    "sample_seed",
]


class BatchDim(NamedTuple):
    """Where the samples are in a tensor: the dimension that grows with them (None: there is none), its rows per sample,
    and in how many equal blocks those lie, each of which has rows of all samples (``cat([x, y])`` is two).
    """

    dim: int | None
    rows: int
    blocks: int = 1

    def of_sample(self, tensor: torch.Tensor, index: int, num_samples: int) -> torch.Tensor:
        """A view of one sample's part."""
        assert self.dim is not None, "a tensor without samples has no part of one"
        rows = self.rows // self.blocks
        if self.blocks == 1:
            return tensor.narrow(self.dim, index * rows, rows)
        apart = torch.unflatten(tensor, self.dim, (self.blocks, num_samples, rows))
        return apart.select(self.dim + 1, index)


_MASK = (1 << 64) - 1


def sample_seed(seed: int, sample: int, op: int) -> int:
    """64 well-mixed bits of the three (splitmix64, Steele et al. 2014, once per word)."""
    state = 0
    for word in (seed, sample, op):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _draw(
    call: LayerCall, op: int, tensor: torch.Tensor, batch: BatchDim, method: str, args: Sequence[Any]
) -> torch.Tensor:
    """Fill ``tensor`` sample by sample with its in-place random ``method``; ``op`` counts from the layer's first."""
    if isinstance(call, TracedCall):
        return tensor.copy_(call.draw(op, tensor, batch, method, args))
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return tensor  # shapes only
    return _fill(tensor, call.seed, call.samples[0], op + call.first_random_op, batch, method, args)


def _fill(
    tensor: torch.Tensor, seed: int, first_sample: int, op: int, batch: BatchDim, method: str, args: Sequence[Any]
) -> torch.Tensor:
    generator = torch.Generator(tensor.device)
    if batch.dim is None:
        generator.manual_seed(sample_seed(seed, first_sample, op))
        getattr(tensor, method)(*args, generator=generator)
        return tensor
    num_samples = tensor.shape[batch.dim] // batch.rows
    for index in range(num_samples):
        generator.manual_seed(sample_seed(seed, first_sample + index, op))
        getattr(batch.of_sample(tensor, index, num_samples), method)(*args, generator=generator)
    return tensor


# -- draws in compiled code -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall(LayerCall):
    """The call of a layer that is being compiled: code made once serves every step and microbatch.

    So what a draw depends on comes in with each call, as a tensor on the host: ``origin`` holds the seed, the first
    sample and the ordinal of the layer's first random op.
    """

    origin: torch.Tensor

    def draw(self, op: int, like: torch.Tensor, batch: BatchDim, method: str, args: Sequence[Any]) -> torch.Tensor:
        """One op that compilers leave as it is, with the strides of ``like``: they decide where which number goes."""
        form = (like.shape, like.stride(), like.dtype, like.device)
        numbers = [float(number) for number in args]
        drawn: torch.Tensor = _draw_opaquely(self.origin, op, *form, *batch, method, numbers)
        return drawn


@torch.library.custom_op("harmony_lab::draw", mutates_args=())
def _draw_opaquely(
    origin: torch.Tensor,
    op: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    dim: int | None,
    rows: int,
    blocks: int,
    method: str,
    args: Sequence[float],
) -> torch.Tensor:
    seed, first_sample, first_op = origin.tolist()
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return _fill(tensor, seed, first_sample, op + first_op, BatchDim(dim, rows, blocks), method, args)


@_draw_opaquely.register_fake
def _(
    origin: Any, op: int, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, *args: Any
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


# -- random ops -------------------------------------------------------------------------------------------------------


def _mask(call: LayerCall, op: int, mask: torch.Tensor, p: float, batch: BatchDim) -> torch.Tensor:
    """0 with probability p, else 1 / (1 - p)."""
    if p >= 1:
        return mask.zero_()
    return _draw(call, op, mask, batch, "bernoulli_", (1 - p,)).div_(1 - p)


def dropout(
    call: LayerCall, op: int, batch: BatchDim, input: torch.Tensor, p: float, *, inplace: bool = False
) -> torch.Tensor:
    """``torch.nn.functional.dropout`` in train mode."""
    mask = _mask(call, op, torch.empty_like(input, requires_grad=False), p, batch)
    return input.mul_(mask) if inplace else input * mask


def feature_dropout(
    call: LayerCall, op: int, batch: BatchDim, input: torch.Tensor, p: float, *, inplace: bool = False
) -> torch.Tensor:
    """``dropout1d/2d/3d`` in train mode: whole channels (dimension 1) are dropped."""
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
    per_channel = batch if batch.dim is not None and batch.dim < 2 else BatchDim(None, 1)
    mask = _mask(call, op, input.new_empty(shape), p, per_channel)
    return input.mul_(mask) if inplace else input * mask


def attention(
    call: LayerCall,
    op: int,
    batch: BatchDim,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` with dropout on the weights, in plain operations.

    query (.., H, L, E), key (.., H or fewer, S, E), value (.., H or fewer, S, V) -> (.., H, L, V)
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key * root).transpose(
        -2, -1
    )  # (.., H, L, S); scaled before the product for half precision
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = scores.masked_fill(visible.logical_not(), -math.inf).softmax(-1)
    elif attn_mask is None:
        weights = scores.softmax(-1)
    else:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        else:
            scores = scores + attn_mask
        weights = torch.ops.aten._safe_softmax.default(scores, -1)  # a row with nothing visible gives 0, as in torch
    return dropout(call, op, batch, weights, dropout_p) @ value


def bernoulli(call: LayerCall, op: int, batch: BatchDim, input: torch.Tensor, p: float | None = None) -> torch.Tensor:
    """``torch.bernoulli``: ones with probability ``p``, or with the probabilities that ``input`` holds."""
    uniform = _draw(call, op, torch.empty_like(input, requires_grad=False), batch, "uniform_", ())
    return (uniform < (input if p is None else p)).to(input.dtype)


def refilled(call: LayerCall, op: int, batch: BatchDim, tensor: torch.Tensor, method: str, *args: Any) -> torch.Tensor:
    """The same tensor, drawn anew with an in-place method, as ``tensor.bernoulli_(p)`` does."""
    return _draw(call, op, tensor, batch, method, args)


def drawn_like(
    call: LayerCall, op: int, batch: BatchDim, like: torch.Tensor, method: str, **kwargs: Any
) -> torch.Tensor:
    """``rand_like`` and ``randn_like``."""
    return _draw(call, op, torch.empty_like(like, requires_grad=False, **kwargs), batch, method, ())


def drawn(call: LayerCall, op: int, batch: BatchDim, size: Sequence[int], method: str, **kwargs: Any) -> torch.Tensor:
    """``rand`` and ``randn``."""
    return _draw(call, op, torch.empty(size, **kwargs), batch, method, ())


# -- the same draws for a plain model ---------------------------------------------------------------------------------

# Python functions of torch.nn.functional that reach a random op inside: run through, so that the mode sees that op.
_COMPOSITE = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.multi_head_attention_forward,
)


def _without_own_dispatch(function: Any) -> Callable[..., Any]:
    """A private copy of a torch.nn.functional function that does not hand itself to the active mode again."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **{name: (lambda *_: False) for name in checks}}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_RUN_THROUGH: dict[Any, Callable[..., Any]] = {function: _without_own_dispatch(function) for function in _COMPOSITE}
_DRAWS = {"bernoulli_": "bernoulli_", "uniform_": "uniform_", "normal_": "normal_", "exponential_": "exponential_"}
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}
_FACTORIES = {"rand": "uniform_", "randn": "normal_"}


class PerSampleRandomness(TorchFunctionMode):
    """While active on this thread, the k-th random call draws as the k-th random op of decomposed layers does.

    ``random_ops[k]`` is the batch dimension of that op, as in ``LayerSequence.random_ops``.  With None instead,
    ``shapes`` collects the shapes drawn and every tensor is drawn as one.
    """

    def __init__(self, call: LayerCall, random_ops: Sequence[BatchDim] | None) -> None:
        super().__init__()
        self.call = call
        self.random_ops = random_ops
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            run_through = _RUN_THROUGH.get(func)
        except TypeError:  # an unhashable callable is none of ours
            run_through = None
        if run_through is not None:
            with self:
                return run_through(*args, **kwargs)
        handler = _HANDLERS.get(getattr(func, "__name__", ""))
        return func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)

    def next_op(self, tensor: torch.Tensor) -> tuple[LayerCall, int, BatchDim]:
        index = len(self.shapes)
        self.shapes.append(tuple(tensor.shape))
        if self.random_ops is None:
            return self.call, index, BatchDim(None, 1)
        if index >= len(self.random_ops):
            raise DecomposeError(
                f"the model draws random numbers more often than its {len(self.random_ops)} decomposed random ops; "
                "run one forward per context, in the same train or eval mode as when it was decomposed"
            )
        batch = self.random_ops[index]
        samples = self.call.samples[1] - self.call.samples[0]
        if batch.dim is not None and tensor.shape[batch.dim] != batch.rows * samples:
            raise DecomposeError(
                f"random op {index} draws a tensor of shape {tuple(tensor.shape)} where {batch.rows * samples} rows "
                f"were expected in dimension {batch.dim}; samples={self.call.samples} must be the range that the "
                "model's batch is"
            )
        return self.call, index, batch


def _mode_dropout(inplace: bool, draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def handler(mode: PerSampleRandomness, func: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not train or p == 0:
            return func(input, p, train)  # type: ignore[no-any-return]
        return draw(*mode.next_op(input), input, p, inplace=inplace)

    return handler


def _mode_attention(
    mode: PerSampleRandomness,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    if dropout_p == 0:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)  # type: ignore[no-any-return]
    return attention(*mode.next_op(query), query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def _mode_draw(method: str) -> Callable[..., torch.Tensor]:
    def handler(mode: PerSampleRandomness, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return refilled(*mode.next_op(tensor), tensor, method, *args, *kwargs.values())

    return handler


def _mode_bernoulli(mode: PerSampleRandomness, func: Any, input: torch.Tensor, *args: Any) -> torch.Tensor:
    return bernoulli(*mode.next_op(input), input, *args)


def _mode_like(method: str) -> Callable[..., torch.Tensor]:
    def handler(mode: PerSampleRandomness, func: Any, input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return drawn_like(*mode.next_op(input), input, method, **kwargs)

    return handler


def _mode_factory(method: str) -> Callable[..., torch.Tensor]:
    def handler(mode: PerSampleRandomness, func: Any, *size: Any, **kwargs: Any) -> torch.Tensor:
        tensor = torch.empty(*size, **kwargs)
        return refilled(*mode.next_op(tensor), tensor, method)

    return handler


_HANDLERS: dict[str, Callable[..., torch.Tensor]] = {
    "dropout": _mode_dropout(False, dropout),
    "dropout_": _mode_dropout(True, dropout),
    "feature_dropout": _mode_dropout(False, feature_dropout),
    "feature_dropout_": _mode_dropout(True, feature_dropout),
    "scaled_dot_product_attention": _mode_attention,
    "bernoulli": _mode_bernoulli,
    **{name: _mode_draw(method) for name, method in _DRAWS.items()},
    **{name: _mode_like(method) for name, method in _LIKE.items()},
    **{name: _mode_factory(method) for name, method in _FACTORIES.items()},
}


def reproducible_randomness(layers: LayerSequence, seed: int, samples: tuple[int, int]) -> PerSampleRandomness:
    """A context in which the plain model, run once on samples [a, b) of a minibatch, draws what its layers draw.

    ``with reproducible_randomness(layers, seed, (0, 8)): loss = model(**batch).loss``
    """
    call = LayerCall(samples=samples, sizes={"batch": samples[1] - samples[0]}, seed=seed, device=None)
    return PerSampleRandomness(call, [BatchDim(*op) for op in layers.random_ops])
