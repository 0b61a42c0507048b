"""CostCache: what was measured before, in this process and on disk, by everything that the numbers depend on."""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harmony_lab.layers import LayerSequence, StateSpec, TensorSpec
from harmony_lab.precision import Precision
from harmony_lab.profiler.extract import GraphFunction
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.precision import AutocastFunction

__all__ = ["CostCache", "Key", "Numbers", "layer_key", "update_key"]

Key = Mapping[str, Any]  # JSON-ready
Numbers = Sequence[float | None]

_SCHEMA, _VERSION = "harmony_lab.costs", 1
_SCHEDULED = ("lr", "initial_lr")  # hyperparameters that change from step to step, and no cost with them

_known: dict[str, Numbers] = {}


class CostCache:
    """A few numbers per key.  Files that cannot be read or written count as missing.

    On disk under ``$XDG_CACHE_HOME/harmony_lab`` (``~/.cache/harmony_lab``), a small JSON file per key.
    """

    def __init__(self) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = Path(home) / "harmony_lab" / "costs"

    def get(self, key: Key | None, count: int) -> Numbers | None:
        """The numbers under that key if there are so many; a key of None is never there."""
        if key is None:
            return None
        path = self._path(key)
        numbers = _known.get(str(path))
        if numbers is None:
            numbers = _read(path, key)
        if numbers is None or len(numbers) != count:
            return None
        _known[str(path)] = numbers
        return numbers

    def put(self, key: Key | None, numbers: Numbers) -> None:
        if key is None:
            return
        path = self._path(key)
        _known[str(path)] = tuple(numbers)
        text = json.dumps({"schema": _SCHEMA, "version": _VERSION, "key": key, "numbers": list(numbers)})
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".new")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, path)  # whole or not at all, whoever else writes it

    def _path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


def _read(path: Path, key: Key) -> Numbers | None:
    try:
        data = json.loads(path.read_text())
        right = data["schema"] == _SCHEMA and data["version"] == _VERSION and data["key"] == key
        numbers = data["numbers"] if right else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(numbers, list) and all(number is None or isinstance(number, (int, float)) for number in numbers):
        return tuple(numbers)
    return None


# -- keys ---------------------------------------------------------------------------------------------------------


def layer_key(layers: LayerSequence, index: int, target: Target, num_samples: int, trials: int) -> Key | None:
    """Of one run of a layer; None for a layer that is no graph, whose code may change unseen."""
    layer = layers.layers[index]
    function = layer.function.inner if isinstance(layer.function, AutocastFunction) else layer.function
    if not isinstance(function, GraphFunction):
        return None
    given = {spec.name: spec for spec in layers.boundaries[index]}
    made = {spec.name: spec for spec in layers.boundaries[index + 1]}
    return {
        **_place(target.num_threads),
        "device": target.description,
        "precision": _precision(layers),
        "graph": hashlib.sha256(function.text.encode()).hexdigest(),
        "parameters": [_state(layers.state[name]) for name in layer.parameters],
        "buffers": [_state(layers.buffer_state[name]) for name in layer.buffers],
        "inputs": [_value(given[name]) for name in layer.inputs],
        "batch": [_value(layers.batch_by_name[name]) for name in layer.batch_inputs],
        "outputs": [_value(made[name]) if name in made else None for name in layer.outputs],
        "last": index + 1 == len(layers),
        "sizes": {**layers.example_sizes, "batch": num_samples},
        "trials": trials,
    }


def update_key(
    optimizer: torch.optim.Optimizer | None,
    updated: Sequence[tuple[Mapping[str, Any], StateSpec]],
    num_threads: int,
    on_gpu: bool,
    trials: int,
    model_bytes: int,
) -> Key | None:
    """Of an update of parameters, each with its hyperparameters; None for optimizers that are not torch's own, whose
    code may change unseen.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return None
    return {
        **_place(num_threads),
        "optimizer": kind.__qualname__,
        "updated": [
            [_state(spec), {name: repr(value) for name, value in group.items() if name not in _SCHEDULED}]
            for group, spec in updated
        ],
        "on_gpu": on_gpu,
        "model_bytes": model_bytes,
        "trials": trials,
    }


def _precision(layers: LayerSequence) -> str:
    casts = layers.precision is not Precision.FP32 and not layers.has_shadows
    return f"{layers.precision}, weights cast where they are used" if casts else str(layers.precision)


def _state(spec: StateSpec) -> list[Any]:
    return [list(spec.shape), spec.dtype, spec.trainable]


def _value(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), spec.dtype, spec.batch_dim, spec.requires_grad]


def _place(num_threads: int | None) -> dict[str, Any]:
    return {
        "harmony_lab": _code(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "threads": num_threads,
    }


@cache
def _code() -> str:
    """A version of what runs and measures layers that changes with its text."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in ("profiler", "runtime"):
        for file in sorted((package / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.machine()} {platform.processor()}, {os.cpu_count()} cores"
