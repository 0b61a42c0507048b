"""Training on several emulated devices against plain PyTorch."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_training import PlainTraining, any_size, planned
from small_layers import build, layer, mlp
from torch import Tensor

from harmony_lab.errors import HarmonyError, ProgramError, TrainingError
from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.program import Stream
from harmony_lab.runtime import runner as runtime_runner
from harmony_lab.runtime.emulated import EmulatedBackend
from harmony_lab.runtime.runner import Runner, step_seed
from harmony_lab.runtime.workers import Job, Workers

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
PLANS = {
    "one device, one pack": "dp minibatch=8 forward=8[] backward=8[0:6] devices=0",
    "one device, packs and microbatches": "pp minibatch=8 forward=4[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0",
    "dp": "dp minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0,1",
    "dp, three devices, uneven": "dp minibatch=8 forward=2[0:3] backward=1[0:3,3:6] devices=2,0,1",
    "dp through the host": "dp minibatch=8 forward=2[0:4] backward=2[0:4,4:6] devices=0,1 peer=off update=end",
    "pp": "pp minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0,1",
    "pp, three devices, uneven": "pp minibatch=8 forward=3[0:1,1:2,2:4] backward=5[0:1,1:4,4:6] devices=1,2,0",
    "pp through the host": "pp minibatch=8 forward=1[0:2,2:5] backward=4[0:3,3:5,5:6] devices=0,1 peer=off prefetch=0",
}


def machine(num_devices: int = 3) -> Machine:
    return Machine.emulated(num_devices, memory="64KiB", link=1e9)


def adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=1e-2)


def trainable(layers: LayerSequence) -> list[Tensor]:
    return [tensor for tensor in layers.tensors.values() if tensor.requires_grad]


def compare(layers: LayerSequence, text: str, make: MakeOptimizer = adamw, *, steps: int = 5, **options: int) -> None:
    """Train both ways on batches that differ, and compare losses, parameters, buffers and optimizer state."""
    plain = PlainTraining(layers, make)
    program = planned(layers, machine(), text)
    optimizer = make(trainable(layers))
    with Runner(layers, optimizer, machine(), program, **options) as runner:
        for step in range(steps):
            batch = {name: tensor.roll(step, 0) for name, tensor in layers.example_batch.items()}
            assert runner.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)
        assert runner.device_bytes == (0, 0, 0)
    plain.assert_equal(1e-4)
    expected, got = plain.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS.keys())
def test_training_equals_plain_pytorch(text: str) -> None:
    compare(mlp(depth=5, num_samples=8), text)


@pytest.mark.parametrize("text", [PLANS["dp"], PLANS["pp, three devices, uneven"]], ids=["dp", "pp"])
def test_training_equals_plain_pytorch_under_chaos(text: str) -> None:
    compare(mlp(depth=5, num_samples=8), text, steps=3, chaos_seed=7)


@pytest.mark.parametrize("text", [PLANS["dp"], PLANS["pp, three devices, uneven"]], ids=["dp", "pp"])
def test_only_queues_with_a_thread_of_their_own_run_on_a_devices_streams(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A CUDA stream is made by the thread that enters; sends and frees have none."""

    class Strict(EmulatedBackend):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.entered: set[tuple[int, Stream]] = set()

        def enter_worker(self, device: int, stream: Stream) -> None:
            super().enter_worker(device, stream)
            self.entered.add((device, stream))

        def running(self, device: int, stream: Stream) -> AbstractContextManager[None]:
            assert (device, stream) in self.entered
            return super().running(device, stream)

    monkeypatch.setattr(runtime_runner, "EmulatedBackend", Strict)
    compare(mlp(depth=5, num_samples=8), text, steps=1)


def test_parameter_groups_and_learning_rate_schedulers_are_the_users_own() -> None:
    layers = mlp(depth=5, num_samples=8)
    plain = PlainTraining(layers, adamw)

    def groups(tensors: Mapping[str, Tensor]) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        weights = [tensor for name, tensor in tensors.items() if name.endswith("weight")]
        biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
        optimizer = torch.optim.SGD(
            [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}], lr=0.1, momentum=0.9
        )
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    plain.optimizer, plain_scheduler = groups(plain.tensors)
    optimizer, scheduler = groups(layers.tensors)
    with Runner(layers, optimizer, machine(), planned(layers, machine(), PLANS["pp"])) as runner:
        for _ in range(4):
            runner.step(layers.example_batch)
            plain.step(layers.example_batch)
            scheduler.step()
            plain_scheduler.step()
    plain.assert_equal()


def test_smaller_minibatches_run_under_the_same_plan() -> None:
    layers = any_size(mlp(depth=5, num_samples=8))
    plain = PlainTraining(layers, adamw)
    with Runner(layers, adamw(trainable(layers)), machine(), planned(layers, machine(), PLANS["dp"])) as runner:
        for size in (8, 3, 1, 8):
            batch = {name: tensor[:size] for name, tensor in layers.example_batch.items()}
            assert runner.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)
    plain.assert_equal(1e-4)


def test_parameters_are_current_after_every_step_and_own_their_memory_after_closing() -> None:
    layers = mlp(depth=5, num_samples=8)
    weight = layers.tensors["3.weight"]
    with Runner(layers, adamw(trainable(layers)), machine(), planned(layers, machine(), PLANS["pp"])) as runner:
        seen = [weight.detach().clone()]
        for _ in range(3):
            runner.step(layers.example_batch)
            assert not torch.equal(weight.detach(), seen[-1])
            seen.append(weight.detach().clone())
        assert runner.step_count == 3
    assert torch.equal(weight.detach(), seen[-1])
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in layers.tensors.values())


# -- state that needs care ----------------------------------------------------------------------------------------


def _tied_linear(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
    (x,) = (*inputs, *batch)
    return (torch.tanh(x @ parameters[0] + (parameters[1] if len(parameters) > 1 else 0)),)


def _squared(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
    return ((inputs[0] ** 2).mean(),)


def tied() -> LayerSequence:
    """The first and the fourth layer share a weight; the second is frozen."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(6, 6, generator=generator) for name in ("shared", "frozen", "own")}
    tensors = {name: tensor.requires_grad_(name != "frozen") for name, tensor in tensors.items()}
    names = [("shared",), ("frozen",), ("own",), ("shared",)]
    reads = [{"batch_inputs": ("x",)}, *({"inputs": (f"v{i}",)} for i in range(3))]
    layers = [
        layer(f"{i}", _tied_linear, kind=min(i, 1), parameters=name, outputs=(f"v{i}",), **read)
        for i, (name, read) in enumerate(zip(names, reads, strict=True))
    ]
    layers.append(layer("loss", _squared, kind=2, inputs=("v3",), outputs=("loss",)))
    return build(layers, tensors, {"x": torch.randn(8, 6, generator=generator)})


@pytest.mark.parametrize(
    "text",
    [
        "dp minibatch=8 forward=8[] backward=8[0:5] devices=0",
        "pp minibatch=8 forward=2[0:2,2:3] backward=4[0:1,1:3,3:5] devices=0,1",
        "dp minibatch=8 forward=2[0:2,2:3] backward=2[0:1,1:3,3:5] devices=0,1",
        "dp minibatch=8 forward=2[0:2] backward=2[0:2,2:5] devices=0,1,2 update=end peer=off",
    ],
)
def test_a_tied_weight_gets_one_update_with_the_summed_gradient_and_a_frozen_one_none(text: str) -> None:
    layers = tied()
    frozen = layers.tensors["frozen"].clone()
    compare(layers, text)
    assert torch.equal(layers.tensors["frozen"], frozen)


def _averaging(parameters, buffers, inputs, batch, call: LayerCall):  # type: ignore[no-untyped-def]
    (x,) = (*inputs, *batch)
    with torch.no_grad():
        buffers[0].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        buffers[1].add_(1)
    return (x * parameters[0],)


def averaging(*, shared: bool = False) -> LayerSequence:
    """Every layer keeps a running average of its inputs and counts its microbatches; ``shared``: the first two keep the
    same average.
    """
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    layers = []
    for i in range(3):
        buffers = ("0.average" if shared and i == 1 else f"{i}.average", f"{i}.count")
        tensors |= {f"{i}.scale": torch.randn(5, generator=generator).requires_grad_()}
        tensors.setdefault(buffers[0], torch.randn(5, generator=generator))
        tensors[buffers[1]] = torch.tensor(3)
        state = {"parameters": (f"{i}.scale",), "buffers": buffers, "updated_buffers": buffers}
        read = {"inputs": (f"v{i - 1}",)} if i else {"batch_inputs": ("x",)}
        layers.append(layer(f"{i}", _averaging, kind=min(i, 1), outputs=(f"v{i}",), **state, **read))
    layers.append(layer("loss", _squared, kind=2, inputs=("v2",), outputs=("loss",)))
    decay = {f"{i}.{name}": value for i in range(3) for name, value in (("average", 0.9), ("count", 1.0))}
    if shared:
        decay["0.average"] = 0.9**2
    batch = {"x": torch.randn(8, 5, generator=generator)}
    return build(layers, tensors, batch, buffer_decay=decay)


@pytest.mark.parametrize(
    "text",
    [
        "pp minibatch=8 forward=2[0:2] backward=2[0:2,2:4] devices=0",
        "pp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0,1",
        "dp minibatch=8 forward=2[0:2] backward=2[0:2,2:4] devices=0,1",
        "dp minibatch=8 forward=2[0:2] backward=2[0:2,2:4] devices=1,0",
    ],
)
def test_buffers_are_updated_once_per_microbatch_in_order(text: str) -> None:
    layers = averaging()
    expected = {name: layers.tensors[name].clone() for name in layers.buffer_state}
    with torch.no_grad():
        scales = [layers.tensors[f"{i}.scale"].detach().clone() for i in range(3)]
        for start in range(0, 8, 2):
            x = layers.example_batch["x"][start : start + 2]
            for i, scale in enumerate(scales):
                expected[f"{i}.average"].mul_(0.9).add_(x.mean(0), alpha=0.1)
                expected[f"{i}.count"].add_(1)
                x = x * scale
    with Runner(layers, adamw(trainable(layers)), machine(), planned(layers, machine(), text)) as runner:
        runner.step(layers.example_batch)
    for name, value in expected.items():
        torch.testing.assert_close(layers.tensors[name], value)


# -- losses -------------------------------------------------------------------------------------------------------


def _masked_mean(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
    return ((inputs[0] * batch[0]).sum() / batch[0].sum(),)


def _scaled(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
    return ((batch[0] @ parameters[0]).sum(1),)


def masked() -> LayerSequence:
    """A mean over the samples that a mask selects; some microbatches of two have one, one has none."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        layer("0", _scaled, parameters=("w",), batch_inputs=("x",), outputs=("v",)),
        layer("loss", _masked_mean, kind=1, inputs=("v",), batch_inputs=("mask",), outputs=("loss",)),
    ]
    mask = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 1])
    batch = {"x": torch.randn(8, 4, generator=generator), "mask": mask}
    tensors = {"w": torch.randn(4, 4, generator=generator).requires_grad_()}
    return build(layers, tensors, batch, loss_weight=lambda microbatch: float(microbatch["mask"].sum()))


@pytest.mark.parametrize("mode", ["pp minibatch=8 {} devices=0", "dp minibatch=8 {} devices=0,1"])
def test_microbatches_that_count_differently_weigh_differently_also_not_at_all(mode: str) -> None:
    layers = masked()
    text = mode.format("forward=2[0:1] backward=2[0:1,1:2]")
    plain = PlainTraining(layers, adamw)
    with Runner(layers, adamw(trainable(layers)), machine(), planned(layers, machine(), text)) as runner:
        for _ in range(3):
            assert runner.step(layers.example_batch) == pytest.approx(plain.step(layers.example_batch), rel=1e-5)
    plain.assert_equal(1e-4)


def _sum(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
    return (inputs[0].sum(),)


def test_a_loss_that_is_a_sum_is_summed_over_microbatches() -> None:
    layers = masked()
    summed = replace(layers.layers[1], function=_sum, batch_inputs=())
    layers = replace(layers, layers=(layers.layers[0], summed), loss_reduction="sum")
    compare(layers, "dp minibatch=8 forward=1[0:1] backward=3[0:1,1:2] devices=0,1")


# -- refusals -----------------------------------------------------------------------------------------------------


def test_a_batch_with_another_size_than_planned_is_refused() -> None:
    layers = mlp(depth=5, num_samples=8)
    longer = replace(
        layers,
        example_sizes={"batch": 8, "length": 16},
        flatten_batch=lambda batch: (dict(batch), {"batch": 8, "length": 32}),
    )
    program = planned(layers, machine(), PLANS["pp"])
    with (
        Runner(longer, adamw(trainable(layers)), machine(), program) as runner,
        pytest.raises(HarmonyError, match=r"length = 32 \(planned: 16\)"),
    ):
        runner.step(layers.example_batch)


def test_an_optimizer_that_cannot_step_packs_is_refused_before_parameters_are_touched() -> None:
    layers = mlp(depth=5, num_samples=8)
    with pytest.raises(HarmonyError, match="LBFGS"):
        Runner(layers, torch.optim.LBFGS(trainable(layers)), machine(), planned(layers, machine(), PLANS["pp"]))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in layers.tensors.values())


def test_every_step_has_a_seed_of_its_own() -> None:
    seeds = {step_seed(seed, step) for seed in range(30) for step in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_steps_count_on_from_the_first_and_with_them_the_masks() -> None:
    def masked_by_seed(parameters, buffers, inputs, batch, call: LayerCall):  # type: ignore[no-untyped-def]
        return ((batch[0] @ parameters[0] * (call.seed % 1009 + 1)).sum(1),)

    layers = masked()
    first = replace(layers.layers[0], function=masked_by_seed)
    layers = replace(layers, layers=(first, layers.layers[1]))
    still = torch.optim.SGD(trainable(layers), lr=0.0)

    def losses(first_step: int, steps: int) -> list[float]:
        program = planned(layers, machine(), "dp minibatch=8 forward=8[] backward=8[0:2] devices=0")
        with Runner(layers, still, machine(), program, first_step=first_step) as runner:
            found = [runner.step(layers.example_batch) for _ in range(steps)]
            assert runner.step_count == first_step + steps
        return found

    whole = losses(0, 4)
    assert len(set(whole)) == 4
    assert losses(2, 2) == whole[2:]


# -- buffers that several layers update ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "pp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0",
        "pp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0,1",
        "dp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0,1",
    ],
)
def test_a_buffer_that_layers_of_different_packs_update_is_refused_before_anything_runs(text: str) -> None:
    layers = averaging(shared=True)
    before = {name: tensor.detach().clone() for name, tensor in layers.tensors.items()}
    with (
        Runner(layers, adamw(trainable(layers)), machine(), planned(layers, machine(), text)) as runner,
        pytest.raises(ProgramError, match=r"'0\.average' is updated by layers 0 \(0\), 1 \(1\)"),
    ):
        runner.step(layers.example_batch)
    assert all(torch.equal(tensor.detach(), before[name]) for name, tensor in layers.tensors.items())


@pytest.mark.parametrize("devices", ["0", "0,1"])
def test_a_buffer_that_layers_of_one_pack_update_moves_in_the_order_of_microbatches(devices: str) -> None:
    layers = averaging(shared=True)
    expected = layers.tensors["0.average"].clone()
    scale = layers.tensors["0.scale"].detach().clone()
    for start in range(0, 8, 2):
        x = layers.example_batch["x"][start : start + 2]
        for value in (x, x * scale):
            expected.mul_(0.9).add_(value.mean(0), alpha=0.1)
    text = f"dp minibatch=8 forward=2[0:2] backward=2[0:2,2:4] devices={devices}"
    with Runner(layers, adamw(trainable(layers)), machine(), planned(layers, machine(), text)) as runner:
        runner.step(layers.example_batch)
    torch.testing.assert_close(layers.tensors["0.average"], expected)


def test_buffers_that_cannot_be_written_are_all_left_and_the_error_says_that_weights_were_updated() -> None:
    layers = averaging()
    before = {name: layers.tensors[name].clone() for name in layers.buffer_state}
    text = "dp minibatch=8 forward=2[0:3] backward=2[0:3,3:4] devices=0,1"
    program = planned(layers, machine(), text)
    layers = replace(layers, buffer_decay=Unmergeable(layers.buffer_decay))
    with (
        Runner(layers, adamw(trainable(layers)), machine(), program) as runner,
        pytest.raises(
            TrainingError, match=r"end of the step.*no decay[^$]*already updated[^$]*Buffers.*before this step"
        ),
    ):
        runner.step(layers.example_batch)
    assert all(torch.equal(layers.tensors[name], value) for name, value in before.items())


class Unmergeable(dict[str, float | None]):
    """Fails for the last buffer when it is asked while merging."""

    def __getitem__(self, name: str) -> float | None:
        if name == "2.average":
            raise ArithmeticError("no decay")
        return super().__getitem__(name)


@pytest.mark.parametrize("count", [1, 2], ids=["one minibatch", "two"])
def test_a_step_that_was_done_when_an_interrupt_came_counts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, undisturbed = averaging(), averaging()
    text = "dp minibatch=8 forward=8[0:2] backward=8[0:2,2:4] devices=0 update=end"
    run, runs = Workers.run, []

    def interrupted(workers: Workers, job: Job, patience_s: float) -> None:
        run(workers, job, patience_s)
        runs.append(job)
        if len(runs) == count:
            raise KeyboardInterrupt

    for one in (undisturbed, layers):
        with Runner(one, adamw(trainable(one)), machine(), planned(one, machine(), text)) as runner:
            if one is undisturbed:
                runner.accumulate([one.example_batch] * count)
            else:
                monkeypatch.setattr(Workers, "run", interrupted)
                with pytest.raises(KeyboardInterrupt) as caught:
                    runner.accumulate([one.example_batch] * count)
                assert caught.value.__notes__ == ["All of this step was done, its updates are made."]
            assert runner.step_count == 1
    for name, tensor in undisturbed.tensors.items():
        torch.testing.assert_close(layers.tensors[name].detach(), tensor.detach(), msg=name)
