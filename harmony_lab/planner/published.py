"""Profiles from files: the package's own, and per-layer tables as published with Harmony's code.

A published file is a JSON object with, for R layers of which the last is the loss::

    model, device, num_layers
    microbatch_sizes          {"forward": [...], "backward": [...]}: the keys of the tables
    forward_time_s            {size: [R]} without gradient
    backward_time_s           {size: [R]} recompute and backward together
    forward_memory_bytes      {size: [R]} all that is on the device while that layer runs alone: weights, buffers,
    backward_memory_bytes     {size: [R]}   input, output; for backward also gradients and what it saves
    input_bytes               {size: [R]} what crosses into the layer
    parameter_bytes, buffer_bytes, optimizer_state_bytes, cpu_update_time_s    [R]
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harmony_lab.costs import Cost, ForwardCost, LayerCost, Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.layers import TensorSpec

__all__ = ["from_published", "load_profile"]

_FORWARD = ("forward_time_s", "forward_memory_bytes")
_BACKWARD = ("backward_time_s", "backward_memory_bytes")
_PER_LAYER = ("parameter_bytes", "buffer_bytes", "optimizer_state_bytes", "cpu_update_time_s")
_FIELDS = ("model", "num_layers", "microbatch_sizes", *_FORWARD, *_BACKWARD, "input_bytes", *_PER_LAYER)
_ITEM_BYTES = 4  # all tensors were fp32
_MOST_PROBLEMS = 8  # listed in one error


def load_profile(path: str | Path) -> Profile:
    """The profile in a file that ``Profile.save`` wrote or that holds published tables.

    Raises ``HarmonyError`` for any other file.
    """
    data = _read(path)
    if "schema" not in data:
        return from_published(data, str(path))
    try:
        return Profile.from_json(data)
    except (KeyError, TypeError) as error:
        raise HarmonyError(f"{path} is not a profile that Profile.save wrote: {error!r}; write it again") from None


def _read(path: str | Path) -> Mapping[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise HarmonyError(
            f"{path} cannot be read: {error.strerror}; expected is a file that Profile.save wrote, or published tables"
        ) from None
    except ValueError as error:
        raise HarmonyError(f"{path} is not a profile: it is no JSON ({error})") from None
    if not isinstance(data, dict):
        raise HarmonyError(f"{path} is not a profile: a JSON object was expected, got a {type(data).__name__}")
    return data


def from_published(data: Mapping[str, Any], source: str = "this") -> Profile:
    """The profile in published tables.  ``source`` is what errors call them.

    Gradients are as large as parameters, and all parameters are trained.  The recompute takes as long as the forward
    without gradient, the backward alone what is left of the two together.  What backward needs beside state and input
    counts as saved, less the gradients of input and output: the tables do not tell it from temporaries.
    """
    problems = list(_problems(data))
    if problems:
        more = f"\n  - and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise HarmonyError(
            f"{source} is neither a profile that Profile.save wrote nor one of published tables:\n"
            + "\n".join(f"  - {problem}" for problem in problems[:_MOST_PROBLEMS])
            + more
        )
    forward, backward = data["microbatch_sizes"]["forward"], data["microbatch_sizes"]["backward"]
    both = tuple(size for size in forward if size in set(backward))
    forward_only = tuple(size for size in forward if size > both[-1])
    num_layers = data["num_layers"]
    inputs = [num_bytes / both[0] for num_bytes in data["input_bytes"][str(both[0])]]
    values = [_value(f"value{layer}", inputs[layer]) for layer in range(num_layers)]
    loss = TensorSpec(
        name="loss", shape=(), dtype="float32", item_bytes=_ITEM_BYTES, batch_dim=None, requires_grad=True
    )
    return Profile(
        model=data["model"],
        fingerprint=_fingerprint(data),
        device=data.get("device", "unknown"),
        microbatch_sizes=both,
        layers=_layers(data, both, forward_only),
        boundaries=((), *((value,) for value in values[1:]), (loss,)),
        batch=(_value("batch", inputs[0], requires_grad=False),),
        forward_only_sizes=forward_only,
        additive_memory=True,
    )


def _value(name: str, sample_bytes: float, *, requires_grad: bool = True) -> TensorSpec:
    """A value of that many bytes a sample."""
    size = int(sample_bytes)
    item_bytes, dtype = (1, "uint8") if size % _ITEM_BYTES else (_ITEM_BYTES, "float32")
    return TensorSpec(
        name=name,
        shape=(size // item_bytes,),
        dtype=dtype,
        item_bytes=item_bytes,
        batch_dim=0,
        requires_grad=requires_grad,
    )


def _layers(data: Mapping[str, Any], both: Sequence[int], forward_only: Sequence[int]) -> tuple[LayerCost, ...]:
    kinds: dict[tuple[tuple[Cost, ...], tuple[ForwardCost, ...]], int] = {}
    shared: list[tuple[tuple[Cost, ...], tuple[ForwardCost, ...]]] = []
    layers = []
    for index in range(data["num_layers"]):
        costs = (
            tuple(_cost(data, index, str(size)) for size in both),
            tuple(_forward_cost(data, index, str(size)) for size in forward_only),
        )
        kind = kinds.setdefault(costs, len(kinds))
        if kind == len(shared):
            shared.append(costs)
        layers.append(
            LayerCost(
                name="loss" if index == data["num_layers"] - 1 else f"layer{index}",
                kind=kind,
                parameter_bytes=data["parameter_bytes"][index],
                gradient_bytes=data["parameter_bytes"][index],
                buffer_bytes=data["buffer_bytes"][index],
                updated_buffer_bytes=0,
                optimizer_state_bytes=data["optimizer_state_bytes"][index],
                update_s=data["cpu_update_time_s"][index],
                batch_inputs=("batch",) if index == 0 else (),
                costs=shared[kind][0],
                forward_costs=shared[kind][1],
            )
        )
    return tuple(layers)


def _forward_cost(data: Mapping[str, Any], layer: int, size: str) -> ForwardCost:
    return ForwardCost(
        forward_s=data["forward_time_s"][size][layer],
        forward_peak_bytes=data["forward_memory_bytes"][size][layer] - _present(data, layer, size),
    )


def _cost(data: Mapping[str, Any], layer: int, size: str) -> Cost:
    forward = _forward_cost(data, layer, size)
    backward_peak = (
        data["backward_memory_bytes"][size][layer] - _present(data, layer, size) - data["parameter_bytes"][layer]
    )
    inputs = data["input_bytes"][size]
    gradients = (inputs[layer] if layer else 0) + (inputs[layer + 1] if layer + 1 < len(inputs) else _ITEM_BYTES)
    saved = max(0, backward_peak - gradients)
    return Cost(
        forward_s=forward.forward_s,
        recompute_s=forward.forward_s,
        backward_s=max(0.0, data["backward_time_s"][size][layer] - forward.forward_s),
        forward_peak_bytes=forward.forward_peak_bytes,
        saved_bytes=saved,
        recompute_peak_bytes=saved,
        backward_peak_bytes=backward_peak,
    )


def _present(data: Mapping[str, Any], layer: int, size: str) -> int:
    """What was on the device before that layer began."""
    given: int = data["parameter_bytes"][layer] + data["buffer_bytes"][layer] + data["input_bytes"][size][layer]
    return given


def _fingerprint(data: Mapping[str, Any]) -> str:
    """Tells models apart by the sizes of their layers."""
    sizes = [data["model"], data["parameter_bytes"], data["buffer_bytes"], next(iter(data["input_bytes"].values()))]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]


# -- what may be wrong ---------------------------------------------------------------------------------------------


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    missing = [name for name in _FIELDS if name not in data]
    if missing:
        yield f"fields are missing: {', '.join(missing)}"
        return
    sizes = data["microbatch_sizes"]
    if not isinstance(sizes, dict) or not all(_ascending(sizes.get(way)) for way in ("forward", "backward")):
        yield 'microbatch_sizes must be {"forward": [...], "backward": [...]} with sizes from 1 up, ascending'
        return
    if not set(sizes["forward"]) & set(sizes["backward"]):
        yield "no microbatch size was measured both forward and backward"
    num_layers = data["num_layers"]
    if not isinstance(num_layers, int) or num_layers < 1:
        yield f"num_layers must be a whole number of at least 1, got {num_layers!r}"
        return
    shapes = list(_shape_problems(data, num_layers))
    yield from shapes
    if not shapes:
        yield from _byte_problems(data, num_layers)


def _ascending(sizes: Any) -> bool:
    whole = isinstance(sizes, list) and bool(sizes) and all(isinstance(size, int) and size >= 1 for size in sizes)
    return whole and sizes == sorted(set(sizes))


def _shape_problems(data: Mapping[str, Any], num_layers: int) -> Iterator[str]:
    for name in _PER_LAYER:
        if not _numbers(data[name], num_layers):
            yield f"{name} must be {num_layers} numbers of at least 0, one a layer"
    for names, way in (((*_FORWARD, "input_bytes"), "forward"), (_BACKWARD, "backward")):
        for name in names:
            for size in data["microbatch_sizes"][way]:
                if not isinstance(data[name], dict) or not _numbers(data[name].get(str(size)), num_layers):
                    yield f"{name} must hold {num_layers} numbers of at least 0 for microbatches of {size}"


def _numbers(values: Any, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, (int, float)) and value >= 0 for value in values)


def _byte_problems(data: Mapping[str, Any], num_layers: int) -> Iterator[str]:
    first = data["microbatch_sizes"]["forward"][0]
    for way, name in (("forward", "forward_memory_bytes"), ("backward", "backward_memory_bytes")):
        sizes = data["microbatch_sizes"][way]
        for layer in range(num_layers):
            state = data["parameter_bytes"][layer] * (1 if way == "forward" else 2) + data["buffer_bytes"][layer]
            small = [
                size
                for size in sizes
                if str(size) in data["input_bytes"]
                and data[name][str(size)][layer] < state + data["input_bytes"][str(size)][layer]
            ]
            if small:
                yield f"{name}: layer {layer} with {small[0]} samples takes less than its own state and input"
    for layer in range(num_layers):
        one = data["input_bytes"][str(first)][layer]
        for size in data["microbatch_sizes"]["forward"]:
            if data["input_bytes"][str(size)][layer] * first != one * size:
                yield f"input_bytes: layer {layer} takes no fixed number of bytes a sample ({first} and {size} samples)"
                break
