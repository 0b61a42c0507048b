"""A layer's graph as machine code, by TorchInductor: the compiler behind ``torch.compile``, called directly.

``torch.compile`` first captures a graph from Python, and checks at every call whether it still holds.  A layer is a
graph already, and a pure function of tensors: so it is handed over as it is, with the number of samples as a symbol,
and nothing of torch's global state for capturing is involved when layers run on several threads.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from harmony_lab.profiler.randomness import TracedCall

__all__ = ["Argument", "MachineCode", "compiled"]


class Argument(NamedTuple):
    """What code is compiled for of one tensor.  ``stride`` None: contiguous.  ``batch_dims``: those that grow with the
    number of samples."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    batch_dims: tuple[int, ...]


class MachineCode:
    """``code(num_samples, tensors, origin)`` gives the layer's outputs; ``origin``: see ``TracedCall``.

    ``has_run``: once without an error.
    """

    def __init__(self, run: Callable[..., Any], covers: Callable[[int], bool]) -> None:
        self._run = run
        self._covers = covers
        self._known: dict[int, bool] = {}
        self.has_run = False

    def covers(self, num_samples: int) -> bool:
        """Whether it is right for so many samples: compilers choose by size and note what they took for granted."""
        known = self._known.get(num_samples)
        if known is None:
            known = self._known[num_samples] = self._covers(num_samples)
        return known

    def __call__(self, num_samples: int, tensors: Sequence[Tensor], origin: Tensor) -> tuple[Any, ...]:
        outputs = tuple(self._run(num_samples, *tensors, origin))
        self.has_run = True
        return outputs


_one_at_a_time = threading.RLock()
"""The compiler keeps state of its own for the process."""


def compiled(
    module: fx.GraphModule, arguments: Sequence[Argument], num_samples: int, device: torch.device, *, any_number: bool
) -> MachineCode:
    """Code of a layer, forward and, where gradients are enabled and an argument needs one, backward.

    For the present thread's number of threads and its autocast.  ``any_number``: for other numbers of samples too, as
    far as ``covers`` says; without, for ``num_samples`` alone.  Needs no data.  Raises whatever the layer or the
    compiler raises.
    """
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    samples: Any = num_samples
    if any_number:
        source = ConstantSource("num_samples")
        symbol = shapes.create_symbol(num_samples, source, dynamic_dim=DimDynamic.DYNAMIC)
        samples = shapes.create_symintnode(symbol, hint=num_samples, source=source)
    with (
        _one_at_a_time,
        _disable_current_modes(),
        tracing(TracingContext(mode)),
        # Backward is compiled here too, not by the thread that first needs it; and never taken from a cache that would
        # bypass _counted.
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
    ):
        with mode:
            fakes = [_fake(argument, num_samples, samples, device) for argument in arguments]
            origin = torch.empty(3, dtype=torch.int64)
        run: Any = compile_fx(_with_inputs(module, device), [samples, *fakes, origin], inner_compile=_counted)
    if not any_number:
        return MachineCode(run, lambda count: count == num_samples)
    guards = shapes.produce_guards_expression([samples])
    return MachineCode(run, lambda count: guards is None or shapes.evaluate_guards_expression(guards, [count]))


def _fake(argument: Argument, num_samples: int, samples: Any, device: torch.device) -> Tensor:
    shape = [
        length // num_samples * samples if dim in argument.batch_dims else length
        for dim, length in enumerate(argument.shape)
    ]
    form: dict[str, Any] = {"dtype": argument.dtype, "device": device, "requires_grad": argument.requires_grad}
    if argument.stride is None:
        return torch.empty(shape, **form)
    return torch.empty_strided(shape, argument.stride, **form)


def _with_inputs(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The graph with the number of samples first, and what a ``LayerCall`` tells of draws last, as inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    samples = graph.placeholder("samples")
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.name == "call":
            origin = graph.placeholder("origin")
            copies[node] = graph.call_function(_traced_call, (samples, origin, device))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    root = nn.Module()  # compiling may change what it is given
    for name, region in module.named_children():
        root.add_module(name, copy.deepcopy(region))
    return fx.GraphModule(root, graph, class_name="Layer")


def _traced_call(samples: Any, origin: Tensor, device: torch.device) -> TracedCall:
    return TracedCall(samples=(0, samples), sizes={"batch": samples}, seed=0, device=device, origin=origin)


# -- memory -----------------------------------------------------------------------------------------------------------


def _counted(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Inductor's code for a graph, whose allocations a dispatch mode can see.

    Its code takes memory past torch's dispatcher, so that what watches ops there (``runtime.memory``) would see
    nothing of it.  The functions for that are names in the module that is generated for each graph, replaced there.
    """
    code: Any = compile_fx_inner(graph, inputs, **options)
    found = [module for module in PyCodeCache.modules if getattr(module, "key", None) == code.cache_key]
    assert found, "inductor keeps the modules that it has loaded"
    for module in found:
        for kind in ("cpu", "cuda", "xpu"):
            name = f"empty_strided_{kind}"
            allocate = getattr(module, name, None)
            if allocate is not None and not isinstance(allocate, _Allocator):
                setattr(module, name, _Allocator(allocate, kind))
    return code


class _Allocator:
    """``empty_strided_cpu(size, stride, dtype)`` and its like: as fast as before where nobody watches."""

    def __init__(self, allocate: Callable[..., Tensor], device: str) -> None:
        self._allocate = allocate
        self._device = device

    def __call__(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            return torch.empty_strided(size, stride, dtype=dtype, device=self._device)
        return self._allocate(size, stride, dtype)
