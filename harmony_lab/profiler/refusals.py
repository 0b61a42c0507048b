"""What a captured graph cannot hold, told before it is lost: gradients by hand, chance and choices in Python."""

import io
import logging
import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerSequence

__all__ = [
    "RefuseTensorHooks",
    "not_exportable",
    "refuse_custom_gradients",
    "refuse_gradient_hooks",
    "refuse_python_chance",
    "refuse_shared_updates",
    "without_graph_dumps",
]

_MOST_REASON_LINES = 3


# Functions whose own backward is the derivative of their forward, written out: the graph's gradient is the same.
_OWN_DERIVATIVE = {"transformers.models.bloom.modeling_bloom.GeLUFunction"}


class RefuseTensorHooks(TorchFunctionMode):
    """While active, a hook registered on a tensor raises ``DecomposeError``: it would not run."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
            raise DecomposeError(
                "the model registers a gradient hook on a tensor in its forward, which would not run; write what it "
                "does with differentiable operations, such as a sum of x.detach() and a scaled x"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_python_chance() -> Iterator[None]:
    """Raise ``DecomposeError`` where what runs inside draws the random numbers of Python or numpy.

    A graph would hold the one number that was there when it was captured.
    """
    before = _chance()
    yield
    if _chance() != before:
        raise DecomposeError(
            "the model's forward draws random numbers from Python or numpy, which a graph would hold as they were "
            "once; draw them with torch (torch.rand, dropout), or before the model, as part of the batch"
        )


def _chance() -> tuple[Any, ...]:
    of_numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return random.getstate(), repr(of_numpy.get("gauss")), bytes(of_numpy["state"]["key"]), of_numpy["state"]["pos"]


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise ``DecomposeError`` where a parameter has hooks: they see a gradient per microbatch, not the minibatch's."""
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise DecomposeError(
            f"these parameters have gradient hooks, which would not run: {', '.join(hooked[:5])}.  Remove the hooks, "
            "or write what they do into the model or the optimizer"
        )


def refuse_custom_gradients(loss: torch.Tensor) -> None:
    """Raise ``DecomposeError`` where the loss depends on a ``torch.autograd.Function``.

    A graph holds its forward only, so the gradient would silently be that of the forward's operations.
    """
    seen: set[torch.autograd.graph.Node] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not _is_kept(node):
            name = type(node).__name__.removesuffix("Backward")
            cure = "write it with differentiable operations, or keep it out of the training loss"
            if name == "CheckpointFunction":
                cure = "switch gradient checkpointing off (packs are recomputed anyway), or use_reentrant=False"
            raise DecomposeError(
                f"the model uses torch.autograd.Function {name!r}, whose own backward would be lost; {cure}"
            )
        pending += [following for following, _ in node.next_functions]


def _is_kept(node: torch.autograd.function.BackwardCFunction) -> bool:
    """Whether a layer's graph has that gradient: an op made with ``torch.library`` is one node and brings its own."""
    if type(node).__name__.startswith("GeneratedBackwardFor_"):
        return True
    function = type(node)._forward_cls  # type: ignore[attr-defined] # torch sets it on each class it makes
    return f"{function.__module__}.{function.__qualname__}" in _OWN_DERIVATIVE


def refuse_shared_updates(layers: LayerSequence) -> None:
    """Raise ``DecomposeError`` where one layer's forward changes a buffer that another one reads.

    A pack runs all its microbatches before the next pack runs any, so the other layer would see another value.
    """
    for name in {name for layer in layers.layers for name in layer.updated_buffers}:
        users = layers.buffer_state[name].layers
        if len(users) > 1:
            where = ", ".join(layers.layers[index].name for index in users)
            raise DecomposeError(
                f"buffer {name} is changed in forward and used in several layers ({where}); put them into one layer: "
                "one module around them, or cut=[...] with a name outside them"
            )


_TALKATIVE = {"fx.experimental.symbolic_shapes": logging.ERROR, "_subclasses.fake_tensor": logging.CRITICAL}


@contextmanager
def without_graph_dumps() -> Iterator[None]:
    """Keep torch from logging and printing the whole graph so far where it meets a value that depends on the data, and
    its own calls where an operation does not take the shapes that it is given: the error says what is wrong.

    What else is written to stderr meanwhile is written at the end.
    """
    heard, dump = io.StringIO(), ""
    logs = {logging.getLogger(f"torch.{name}"): level for name, level in _TALKATIVE.items()}
    before = {log: log.level for log in logs}
    for log, level in logs.items():
        log.setLevel(max(log.level, level))
    try:
        with redirect_stderr(heard):
            yield
    except Exception as error:
        dump = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        for log, level in before.items():
            log.setLevel(level)
        sys.stderr.write(heard.getvalue().replace(dump, "") if dump.strip() else heard.getvalue())


def not_exportable(model: nn.Module, given: str, error: Exception) -> DecomposeError:
    """The user's line, why it stops torch.export, and the cure; all that torch has to say is for the cause.

    ``given``: the batch, in words.
    """
    torch_folder, ours = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((torch_folder, ours))
    ]
    where = f"\n  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        reason = "what Python does there depends on values of tensors, which a graph cannot follow"
        cure = (
            "Write it with an operation whose result has a fixed size: a mask (torch.where, ignore_index for a loss), "
            "a fixed capacity per expert; or pass"
        )
    else:
        first = str(error).strip().split("\n\n")[0].splitlines()[:_MOST_REASON_LINES]
        reason = f"{type(error).__name__}: " + "\n  ".join(first)
        cure = (
            f"If the model does not take such batches ({given}), give one that it takes; else change that line, or pass"
        )
    return DecomposeError(
        f"{type(model).__name__} cannot be captured as a graph{where}\n  {reason}\n{cure} layers=[...]: a list of "
        "modules that are run in sequence, which need no capture."
    )
