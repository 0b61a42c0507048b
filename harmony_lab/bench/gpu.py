"""Benchmark on a GPU, in one short run that needs torch, numpy and pandas only; without a GPU, its emulated form.

``python -m harmony_lab.bench.gpu --json FILE``: the tests that need a GPU, whether training equals plain PyTorch's,
what the links carry, and a GPT-2-shaped model whose state is four times the memory that plans may use: its step against
the prediction, the lower bound, saved tensors offloaded on demand, and FSDP with its CPU offload.
"""

import argparse
import copy
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmony_lab.bench.decoder import Decoder, Shape, decoder_batch
from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Backend, Machine
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.search import search
from harmony_lab.precision import Precision
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.links import LinkProbe, probe_links
from harmony_lab.profiler.measure import profile
from harmony_lab.trainer import Trainer

__all__ = ["bench_gpu", "main"]

Progress = Callable[[str], None]
_STATE_TO_BUDGET = 4
_STEPS, _WARM_UP = 5, 2
_BYTES_OF_STATE = 4  # weight, gradient and AdamW's two moments, each the size of the weights
_SMALL = Shape(name="small", num_blocks=3, width=32, num_heads=2, length=16)
_ON_GPU = Shape(name="GPT-2 shaped", num_blocks=24, width=1280, num_heads=20, length=512, vocabulary=8192)
_EMULATED = Shape(name="GPT-2 shaped, tiny", num_blocks=4, width=128, num_heads=4, length=32)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print what is found as it comes, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    options = parser.parse_args(arguments)
    found = bench_gpu(progress=lambda text: print(text, flush=True))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def bench_gpu(*, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Every part on its own: one that fails is reported as its error and the others go on."""
    on_gpu = torch.cuda.is_available()
    machine = Machine.detect().with_(num_devices=1) if on_gpu else _one_core(Machine.emulated(1, link="2GB/s"))
    found: dict[str, Any] = {"device": machine.devices[0].model or machine.name, "emulated": not on_gpu}
    probed = _part(found, "links", progress, lambda: _links(machine))
    if isinstance(probed, LinkProbe):
        machine = probed.machine
        found["links"] = [{name: getattr(rate, name) for name in rate.__dataclass_fields__} for rate in probed.rates]
    _part(found, "tests", progress, _gpu_tests)
    _part(found, "equality", progress, lambda: _equality(machine))
    shape = _ON_GPU if on_gpu else _EMULATED
    _part(found, "training", progress, lambda: _training(shape, machine, Precision.FP32))
    _part(found, "training_bf16", progress, lambda: _training(shape, machine, Precision.BF16))
    for name, make in (("save_on_cpu_step_s", _save_on_cpu), ("fsdp_cpu_offload_step_s", _fsdp)):
        _part(found, name, progress, lambda make=make: make(shape, _place(machine)))  # type: ignore[misc]
    training = found["training"]
    if "error" not in training:
        for name in ("save_on_cpu_step_s", "fsdp_cpu_offload_step_s"):
            if isinstance(found[name], float):
                training[f"faster_than_{name.removesuffix('_step_s')}"] = found[name] / training["measured_step_s"]
    return found


def _part(found: dict[str, Any], name: str, progress: Progress, run: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    try:
        found[name] = run()
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
    progress(f"{name} ({time.perf_counter() - began:.1f} s): {found[name]}")
    return found[name]


def _gpu_tests() -> str:
    """The outcome of the tests that need a GPU, where this runs from the project's folder and pytest is there."""
    tests = Path(__file__).parents[2] / "tests"
    if not torch.cuda.is_available():
        return "need a GPU"
    if importlib.util.find_spec("pytest") is None or not tests.is_dir():
        return "not run: pytest or the tests are not here"
    options = ["-m", "gpu", "-q", "-o", "addopts=", "--import-mode=importlib"]
    ran = subprocess.run([sys.executable, "-m", "pytest", *options, str(tests)], capture_output=True, text=True)
    return (ran.stdout or ran.stderr).strip().splitlines()[-1]


def _links(machine: Machine) -> LinkProbe:
    return probe_links(machine)


def _one_core(machine: Machine) -> Machine:
    return replace(machine, devices=tuple(replace(device, compute_threads=1) for device in machine.devices))


def _place(machine: Machine) -> torch.device:
    device = machine.devices[0]
    return torch.device("cuda", device.ordinal) if device.backend is Backend.CUDA else torch.device("cpu")


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


# -- the same numbers -------------------------------------------------------------------------------------------------


def _equality(machine: Machine) -> dict[str, float]:
    """Three steps under a plan against plain PyTorch on the host: the largest difference of a parameter."""
    torch.manual_seed(0)
    model = Decoder(_SMALL)
    plain = copy.deepcopy(model)
    batches = [decoder_batch(_SMALL, 8, seed) for seed in range(3)]
    layers = decompose(model, batches[0])
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    costs = profile(layers, machine, optimizer, microbatch_sizes=(1, 2, 4), trials=1, cache=False)
    best = search(costs, machine, 8).best
    losses = []
    with Trainer(layers, optimizer, best, machine, profile=costs) as training:
        for tokens, targets in batches:
            ours = training.step((tokens, targets))
            other.zero_grad()
            loss = plain(tokens, targets)
            loss.backward()
            other.step()
            losses.append(abs(ours - loss.item()))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "parameters_off_by": max((a - b).abs().max().item() for a, b in pairs),
        "losses_off_by": max(losses),
    }


# -- a model larger than its device -----------------------------------------------------------------------------------


def _training(shape: Shape, machine: Machine, precision: Precision) -> dict[str, Any]:
    """The same device memory in any precision: that of fp32's state."""
    torch.manual_seed(0)
    model, batch = Decoder(shape), decoder_batch(shape, 16)
    layers = decompose(model, batch)
    budget = _BYTES_OF_STATE * layers.parameter_bytes // _STATE_TO_BUDGET
    machine = machine.with_(memory=min(budget, machine.devices[0].memory_bytes))
    sizes = (1, 2, 4, 8)
    costs = profile(layers, machine, _adamw(model), precision=precision, microbatch_sizes=sizes, cache=False)
    result = search(costs, machine, 16)
    found = _measured(layers, model, batch, machine, costs, result.best)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": _BYTES_OF_STATE * layers.parameter_bytes,
        "budget_bytes": machine.devices[0].memory_bytes,
        "plan": str(result.best),
        "lower_bound_step_s": result.lower_bound_s,
        "over_lower_bound": found["measured_step_s"] / result.lower_bound_s,
        **found,
    }


def _measured(
    layers: LayerSequence,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    machine: Machine,
    costs: Profile,
    plan: Any,
) -> dict[str, Any]:
    with Trainer(layers, _adamw(model), plan, machine, profile=costs) as training:
        predicted = training.predicted
        traces = []
        for _ in range(_WARM_UP + _STEPS):
            training.step(batch)
            assert training.last_trace is not None
            traces.append(training.last_trace)
    measured_s = statistics.median(trace.makespan_s for trace in traces[_WARM_UP:])
    return {
        "predicted_step_s": predicted.makespan_s,
        "measured_step_s": measured_s,
        "prediction_error": abs(measured_s / predicted.makespan_s - 1),
        "swap_bytes_predicted": predicted.swap_bytes,
        "swap_bytes_measured": traces[-1].swap_bytes,
        "peak_bytes_predicted": list(peak_bytes(predicted.program)),
        "peak_bytes_measured": list(traces[-1].peak_bytes),
    }


# -- what else one could do -------------------------------------------------------------------------------------------


def _save_on_cpu(shape: Shape, place: torch.device) -> float:
    """Weights and optimizer on the device, what backward needs moved to the host and back as it comes."""
    torch.manual_seed(0)
    model = Decoder(shape).to(place)
    optimizer = _adamw(model)
    tokens, targets = (part.to(place) for part in decoder_batch(shape, 16))

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, 16, 4):
            with torch.autograd.graph.save_on_cpu(pin_memory=place.type == "cuda"):
                loss = model(tokens[start : start + 4], targets[start : start + 4]) / 4
            loss.backward()
        optimizer.step()

    return _timed(step, place)


def _fsdp(shape: Shape, place: torch.device) -> float | str:
    """Weights, gradients and optimizer on the host, a block's weights brought as they are needed."""
    from torch import distributed

    if place.type != "cuda" or not distributed.is_available():
        return "needs a GPU"
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            model = Decoder(shape, checkpointed=True)
            for block in model.blocks:
                fully_shard(block, offload_policy=CPUOffloadPolicy())
            fully_shard(model, offload_policy=CPUOffloadPolicy())
            optimizer = _adamw(model)
            tokens, targets = (part.to(place) for part in decoder_batch(shape, 16))

            def step() -> None:
                optimizer.zero_grad()
                for start in range(0, 16, 4):
                    (model(tokens[start : start + 4], targets[start : start + 4]) / 4).backward()
                optimizer.step()

            return _timed(step, place)
        finally:
            distributed.destroy_process_group()


def _timed(step: Callable[[], None], place: torch.device) -> float:
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        step()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:])


if __name__ == "__main__":
    main()
