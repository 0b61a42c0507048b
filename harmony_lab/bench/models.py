"""The models benchmark: for every model of the zoo, does it decompose, train as plain PyTorch does, and need the bytes
that its profile predicts?"""

import json
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harmony_lab.bench.equality import Differences, compare
from harmony_lab.bench.peak import peak_bytes
from harmony_lab.bench.zoo import Specimen, ZooModel
from harmony_lab.bench.zoo_language import LANGUAGE_MODELS
from harmony_lab.bench.zoo_own import OWN_MODELS
from harmony_lab.bench.zoo_vision import VISION_MODELS
from harmony_lab.errors import DecomposeError, HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.planner.pack import PackCosts
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile

__all__ = ["ZOO", "bench_models", "differences_of", "peaks_of", "to_json"]

ZOO: tuple[ZooModel, ...] = (*LANGUAGE_MODELS, *VISION_MODELS, *OWN_MODELS)

EXAMPLE_SAMPLES = 4
_SPLITS = ((0, 3), (0, 6), (0, 1, 3, 6))  # minibatches of 3 and of 6 samples, the latter also in microbatches

Progress = Callable[[int, int, str], None]


def bench_models(names: Collection[str] | None = None, progress: Progress | None = None) -> list[dict[str, Any]]:
    """A row per model of the zoo, or per model named.

    ``model``, ``supported``, ``reason`` (why not), ``num_layers``, ``num_types``, ``decompose_s``, ``profile_s``,
    ``max_grad_diff`` and ``max_buffer_diff`` (against plain PyTorch, see ``equality.Differences``),
    ``peak_predicted_bytes`` and ``peak_measured_bytes`` (of recompute and backward of the whole model at once).  What
    was not measured is None.  ``progress(done, total, name)`` is called along the way.

    Raises ``HarmonyError`` for a name that is not in the zoo.
    """
    chosen = _chosen(names)
    rows = []
    with _one_thread():
        for index, model in enumerate(chosen):
            if progress is not None:
                progress(index, len(chosen), model.name)
            rows.append(_row(model))
    if progress is not None:
        progress(len(chosen), len(chosen), "models")
    return rows


def to_json(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Write ``{"rows": [...]}``."""
    Path(path).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def differences_of(model: ZooModel, specimen: Specimen, layers: LayerSequence) -> Differences:
    """The largest differences from plain PyTorch over minibatches of other sizes than the example's."""
    splits = [split for split in _SPLITS if len(split) == 2 or not model.couples]
    found = Differences(loss=0.0, gradients=0.0, buffers=0.0)
    for split in splits:
        found |= compare(layers, specimen, model.batch(split[-1], split[-1]), split)
    return found


def peaks_of(model: ZooModel, layers: LayerSequence) -> tuple[int, int, float]:
    """(bytes that the profile predicts, bytes measured, seconds of profiling), all layers in one pack."""
    trained = [layers.tensors[name] for name, spec in layers.state.items() if spec.trainable]
    before_s = time.perf_counter()
    costs = profile(
        layers,
        Machine.emulated(1, memory="64GiB"),
        torch.optim.AdamW(trained),
        microbatch_sizes=(1, EXAMPLE_SAMPLES) if not model.couples else (2, EXAMPLE_SAMPLES),
        trials=1,
        cache=False,
    )
    profile_s = time.perf_counter() - before_s
    predicted = PackCosts(costs).backward_bytes(0, len(layers), EXAMPLE_SAMPLES)
    return predicted, peak_bytes(layers, model.batch(EXAMPLE_SAMPLES, 0), EXAMPLE_SAMPLES), profile_s


def _chosen(names: Collection[str] | None) -> list[ZooModel]:
    known = {model.name for model in ZOO}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise HarmonyError(f"no such model in the zoo: {', '.join(unknown)}. There are: {', '.join(sorted(known))}")
    return [model for model in ZOO if names is None or model.name in names]


def _row(model: ZooModel) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        (
            "num_layers",
            "num_types",
            "decompose_s",
            "profile_s",
            "max_grad_diff",
            "max_buffer_diff",
            "peak_predicted_bytes",
            "peak_measured_bytes",
        )
    )
    specimen = model.make()
    before_s = time.perf_counter()
    try:
        layers = decompose(specimen.model, model.batch(EXAMPLE_SAMPLES, 0), specimen.loss_fn)
    except DecomposeError as error:
        return {"model": model.name, "supported": False, "reason": str(error), **row}
    row |= {
        "num_layers": len(layers),
        "num_types": layers.num_kinds,
        "decompose_s": round(time.perf_counter() - before_s, 3),
    }
    differences = differences_of(model, specimen, layers)
    predicted, measured, profile_s = peaks_of(model, layers)
    row |= {
        "profile_s": round(profile_s, 3),
        "max_grad_diff": differences.gradients,
        "max_buffer_diff": differences.buffers,
        "peak_predicted_bytes": predicted,
        "peak_measured_bytes": measured,
    }
    return {"model": model.name, "supported": True, "reason": None, **row}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' on settings of so small models
            yield
    finally:
        torch.set_num_threads(before)
