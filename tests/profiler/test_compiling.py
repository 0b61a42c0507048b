"""Compiled layers compute what the layers do, and their memory is counted; what cannot be compiled runs as it was."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.planner.check import peak_bytes
from harmony_lab.profiler import inductor, randomness
from harmony_lab.profiler.bench import Bench, Phase
from harmony_lab.profiler.compiling import CompiledFunction, compile_layers, prepare
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.inductor import MachineCode
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.randomness import BatchDim, TracedCall
from harmony_lab.trainer import Trainer

MACHINE = Machine.emulated(2, memory="8MiB")
SAMPLES = 12
ORIGIN_BYTES = 24  # of the seed and ordinals that each call is given, on the host


class Net(nn.Module):
    """Batch norm, then equal blocks with dropout and, passing by all of them, what is added at the end; frozen bias."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.4)) for _ in range(3)
        )
        self.head = nn.Linear(width, 5)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x) + first[:, :5], y)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


@pytest.fixture(scope="module")
def layers(net: Net) -> LayerSequence:
    return decompose(net, models.mlp_batch(SAMPLES), cut=["blocks.1", "blocks.2", "head"])


@pytest.fixture(scope="module")
def compiled(layers: LayerSequence) -> LayerSequence:
    return compile_layers(layers)


@pytest.fixture(scope="module")
def costs(compiled: LayerSequence) -> Profile:
    return profile(compiled, MACHINE, adamw(compiled), microbatch_sizes=(2, 3, 4, 6), trials=1)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Code is made for a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(MACHINE.devices[0].compute_threads)
    yield
    torch.set_num_threads(before)


def adamw(layers: LayerSequence) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in layers.model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)


def codes(layers: LayerSequence) -> list[int]:
    functions = {layer.kind: layer.function for layer in layers.layers}
    return [len(function._codes) for function in functions.values() if isinstance(function, CompiledFunction)]


def first_of(layers: LayerSequence) -> LayerSequence:
    """The first layer alone, not yet compiled."""
    return replace(compile_layers(layers), layers=compile_layers(layers).layers[:1])


@pytest.mark.parametrize(
    "plan",
    [
        "dp minibatch=12 forward=4[0:2] backward=4[0:2,2:4] devices=0,1",
        "pp minibatch=12 forward=5[0:1,1:2] backward=5[0:1,1:2,2:4] devices=0,1",
        # What autograd keeps refers to buffers that are elsewhere when backward runs.
        "dp minibatch=12 forward=4[0:2] backward=4[0:2,2:4] devices=0 resident=0:2 kept=0:2",
    ],
)
def test_training_equals_plain_pytorch_with_code_made_once(compiled: LayerSequence, costs: Profile, plan: str) -> None:
    batches = [models.mlp_batch(SAMPLES, seed=seed) for seed in (1, 2)]
    with Trainer(compiled, adamw(compiled), plan, MACHINE, profile=costs) as trainer:
        before = codes(compiled)
        certificate = trainer.verify(batches)
        trainer.step(batches[0])
        trace, most = trainer.last_trace, peak_bytes(trainer.predicted.program)
    assert certificate.passed, str(certificate)
    assert before == codes(compiled) == [2, 2, 2]  # of each type, with and without gradient
    assert trace is not None
    assert all(measured <= bound for measured, bound in zip(trace.peak_bytes, most, strict=True))


def test_counted_bytes_are_those_that_the_allocator_gives(compiled: LayerSequence, costs: Profile) -> None:
    target = Target.of(MACHINE.devices[0])
    for index in (0, 1, 3):
        bench = Bench.prepare(compiled, index, target, 6)
        weight = bench.weigh()
        alive, peaks = allocated(bench)
        assert alive[Phase.RECOMPUTE] == weight.saved_bytes
        assert peaks[Phase.FORWARD] - weight.forward_peak_bytes in (0, ORIGIN_BYTES)
        assert peaks[Phase.RECOMPUTE] - weight.recompute_peak_bytes in (0, ORIGIN_BYTES)
        assert max(peaks[Phase.BACKWARD], weight.saved_bytes) == weight.backward_peak_bytes


def allocated(bench: Bench) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes alive at the end of each phase and at most in it, by what torch's CPU allocator reports."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for phase in bench._run():
            with torch.profiler.record_function(f"end of {phase}"):
                pass
    total, peak = 0, 0
    alive, peaks = {}, {}
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
        elif event.name().startswith("end of "):
            phase = event.name().removeprefix("end of ")
            alive[phase], peaks[phase], peak = total, peak, total
    return alive, peaks


def test_costs_are_kept_apart_from_those_of_the_layers_as_they_were(layers: LayerSequence, costs: Profile) -> None:
    plain = profile(layers, MACHINE, adamw(layers), microbatch_sizes=(2,), trials=1)
    assert not plain.cached
    again = profile(compile_layers(layers), MACHINE, adamw(layers), microbatch_sizes=(2, 3, 4, 6), trials=1)
    assert again.cached
    assert again.layers == costs.layers


def test_a_draw_in_traced_code_is_that_of_the_layer() -> None:
    facts: dict[str, Any] = {
        "samples": (7, 10),
        "sizes": {"batch": 3},
        "seed": 2**64 - 5,
        "device": torch.device("cpu"),
    }
    call = LayerCall(**facts, first_random_op=4)
    traced = TracedCall(**{**facts, "seed": 0}, origin=torch.tensor([-5, 7, 4]))
    x = torch.randn(4, 3, 2).transpose(0, 1)  # draws follow the strides
    for function, arguments in (
        (randomness.dropout, (x, 0.3)),
        (randomness.feature_dropout, (x, 0.3)),
        (randomness.bernoulli, (x.sigmoid(),)),
        (randomness.drawn_like, (x, "normal_")),
    ):
        ours = function(traced, 1, BatchDim(0, 1), *arguments)
        assert torch.equal(ours, function(call, 1, BatchDim(0, 1), *arguments))
    filled = torch.zeros(3, 4)
    assert randomness.refilled(traced, 0, BatchDim(0, 1), filled, "normal_", 1, 2) is filled
    assert torch.equal(filled, randomness.refilled(call, 0, BatchDim(0, 1), torch.zeros(3, 4), "normal_", 1, 2))


def test_code_that_does_not_hold_for_a_size_is_made_anew_for_it(
    layers: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def compiled(module: Any, arguments: Any, num_samples: int, device: Any, *, any_number: bool) -> MachineCode:
        made.append((num_samples, any_number))
        return MachineCode(lambda *given: (), lambda count: count == num_samples or (any_number and count <= 4))

    monkeypatch.setattr(inductor, "compiled", compiled)
    prepare(first_of(layers), MACHINE, [2, 3, 4])
    assert made == [(2, True)] * 2  # without and with gradient; on two devices of one kind
    prepare(first_of(layers), MACHINE, [2, 6, 6, 1])
    assert made[2:] == [(1, False)] * 2 + [(2, True)] * 2 + [(6, False)] * 2


def test_devices_that_need_the_same_code_at_once_share_it(
    layers: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, threads = first_of(layers), []

    def compiled(*arguments: Any, **options: Any) -> MachineCode:
        if len(threads) < 2:  # while this thread compiles, another comes along
            threads.append(threading.Thread(target=prepare, args=(first, MACHINE, [2])))
            threads[-1].start()
        return MachineCode(lambda *given: (), lambda count: True)

    monkeypatch.setattr(inductor, "compiled", compiled)
    prepare(first, MACHINE, [2])
    for thread in threads:
        thread.join()
    assert codes(first) == [2]
    assert len(threads) == 2  # compiled without and with gradient, by whoever came first


@pytest.mark.parametrize("fails_when_run", [False, True])
def test_a_layer_that_cannot_be_compiled_runs_as_it_was_and_is_named(
    layers: LayerSequence, monkeypatch: pytest.MonkeyPatch, fails_when_run: bool
) -> None:
    def fail(num_samples: int, *tensors: Tensor) -> None:
        raise RuntimeError("no such compiler\nand much more")

    def compiled(*arguments: Any, **options: Any) -> MachineCode:
        if not fails_when_run:
            fail(0)
        return MachineCode(fail, lambda count: True)

    monkeypatch.setattr(inductor, "compiled", compiled)
    broken = compile_layers(layers)
    with pytest.warns(UserWarning, match=r"layers like '.*no such compiler\) and run as they are") as warned:
        costs = profile(broken, MACHINE, microbatch_sizes=(5, 7), trials=1)
    assert len(warned) == broken.num_kinds
    plain = profile(layers, MACHINE, microbatch_sizes=(5, 7), trials=1)
    assert plain.cached  # what was measured is kept as what it is
    assert plain.layers == costs.layers


def test_buffers_are_updated_once_where_code_fails_half_way(
    layers: LayerSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(num_samples: int, *tensors: Tensor) -> None:
        for buffer in tensors[len(first.layers[0].parameters) :][: len(first.layers[0].buffers)]:
            buffer.fill_(7)
        raise RuntimeError("half way")

    monkeypatch.setattr(inductor, "compiled", lambda *args, **options: MachineCode(fail, lambda count: True))
    first = first_of(layers)
    ours, theirs = (Bench.prepare(some, 0, Target.of(MACHINE.devices[0]), 4) for some in (first, layers))
    with pytest.warns(UserWarning, match="half way"):
        next(ours._run())
    next(theirs._run())
    assert ours.buffers
    assert all(torch.equal(ours.buffers[name], theirs.buffers[name]) for name in ours.buffers)


def test_a_layers_own_error_is_not_taken_for_one_of_the_compiler(layers: LayerSequence) -> None:
    first = first_of(layers)
    prepare(first, MACHINE, [1])  # no variance of one sample
    bench = Bench.prepare(first, 0, Target.of(MACHINE.devices[0]), 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        bench.weigh()


def test_modules_run_in_sequence_are_refused_with_the_cure() -> None:
    model = models.dropout_mlp(blocks=2)
    batch = (torch.randn(4, 16), torch.randn(4, 16))
    of_modules = decompose(model, batch, nn.MSELoss(), layers=list(model))
    with pytest.raises(HarmonyError, match=r"Leave layers=\[\.\.\.\] out"):
        compile_layers(of_modules)
