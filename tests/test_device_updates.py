"""Packs that devices update (``Plan.device_updates``): the numbers of plain PyTorch, the bytes and memory predicted."""

import copy
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from plain_training import breaking
from torch import Tensor, nn

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, PlanError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import peak_bytes
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.program import OpKind, TensorKind
from harmony_lab.trainer import Trainer

WIDTH = 16
ALL = Plan.parse("pp minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0 optimizer=0:2,2:4,4:6")
MIXED = ALL.with_(devices=(0, 1), device_updates=((2, 4),))
WHOLE = Plan.parse("pp minibatch=8 forward=2[] backward=2[0:6] devices=0 optimizer=0:6")
DP = ALL.with_(mode="dp", devices=(0, 1))


@cache
def subject() -> tuple[LayerSequence, Profile]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    layers = decompose(nn.Sequential(*parts).double(), batch(2), nn.MSELoss())
    costs = profile(layers, machine(1), adam(layers.model), microbatch_sizes=(1, 2), trials=1)
    return layers, costs


@pytest.fixture
def layers() -> Iterator[LayerSequence]:
    made, _ = subject()
    start = copy.deepcopy(made.model.state_dict())
    yield made
    made.model.load_state_dict(start)


def batch(count: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, count, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, targets


def machine(num_devices: int) -> Machine:
    return Machine.emulated(num_devices, memory="64MiB", link="1e12")


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def trainer(layers: LayerSequence, optimizer: torch.optim.Optimizer, plan: Plan, **options: Any) -> Trainer:
    return Trainer(layers, optimizer, plan, machine(plan.num_devices), profile=subject()[1], **options)


class Plain:
    """The same training in plain PyTorch, from where model and optimizer are."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = type(optimizer)(self.model.parameters())  # type: ignore[call-arg]
        self.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def step(self, *batches: tuple[Tensor, Tensor], limit: float | None = None) -> float:
        self.optimizer.zero_grad()
        losses = [nn.functional.mse_loss(self.model(x), y) / len(batches) for x, y in batches]
        for loss in losses:
            loss.backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        return sum(loss.item() for loss in losses)

    def assert_same(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.testing.assert_close(dict(model.state_dict()), dict(self.model.state_dict()), rtol=1e-7, atol=1e-9)
        ours, theirs = optimizer.state_dict(), self.optimizer.state_dict()
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-6, atol=1e-9)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [ALL, MIXED, DP, MIXED.with_(mirrored=True, prefetch=0)], ids=str)
def test_training_that_is_resumed_evaluates_and_has_a_smaller_last_minibatch_equals_plain_pytorch(
    layers: LayerSequence, plan: Plan
) -> None:
    """The optimizer's state is on the host before; a plan that updates there follows."""
    optimizer = adam(layers.model)
    with trainer(layers, optimizer, plan.with_(device_updates=())) as earlier:
        earlier.step(batch())
    plain = Plain(layers.model, optimizer)
    with trainer(layers, optimizer, plan) as training:
        for seed, count in enumerate((8, 8, 5, 1, 8)):
            given = batch(count, seed)
            assert training.step(given) == pytest.approx(plain.step(given), rel=1e-9)
            plain.assert_same(layers.model, optimizer)  # the host's copies are current
        expected = nn.functional.mse_loss(plain.model(batch()[0]), batch()[1]).item()
        held, on_host = training._runner.device_bytes, training.host_bytes
        assert training.evaluate(batch()) == pytest.approx(expected, rel=1e-9)
        assert training.last_trace is not None
        assert (training._runner.device_bytes, training.host_bytes) == (held, on_host)  # the state has stayed
        assert any(held)
        budgets = training.last_trace.program.budgets
        training._runner._places.settle(training.last_trace.program, lambda device: budgets[device])
        assert not any(training._runner.device_bytes)  # there was no room for it
        training.step(batch(seed=9))
    plain.step(batch(seed=9))
    with trainer(layers, optimizer, plan.with_(device_updates=())) as later:
        later.step(batch(seed=10))
    plain.step(batch(seed=10))
    plain.assert_same(layers.model, optimizer)


def test_what_the_user_changes_between_steps_counts(layers: LayerSequence) -> None:
    optimizer = adam(layers.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plain = Plain(layers.model, optimizer)
    with trainer(layers, optimizer, ALL) as training, warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: the scheduler was called before the optimizer
        for seed in range(3):
            training.step(batch(seed=seed))
            plain.step(batch(seed=seed))
            with torch.no_grad():
                for model in (layers.model, plain.model):
                    model[2][0].bias.fill_(0.1)  # type: ignore[index, union-attr]
            scheduler.step()
            plain.optimizer.param_groups[0]["lr"] /= 2
        optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        training.step(batch(seed=7))
        plain.step(batch(seed=7))
        plain.assert_same(layers.model, optimizer)


def test_clipping_and_several_minibatches_are_updated_on_the_host_and_said_once(
    layers: LayerSequence, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adam(layers.model)
    plain = Plain(layers.model, optimizer)
    with trainer(layers, optimizer, ALL) as training, caplog.at_level(logging.WARNING, "harmony_lab"):
        training.step(batch())
        plain.step(batch())
        for seed in (1, 3):
            both = batch(seed=seed), batch(seed=seed + 1)
            assert training.accumulate(both) == pytest.approx(plain.step(*both), rel=1e-9)
        assert len(caplog.records) == 1
        assert any("several minibatches" in note for note in training.notes)
        assert training.last_trace is not None
        assert {op.device for op in training.last_trace.program.ops if op.kind is OpKind.UPDATE} == {HOST}
        training.step(batch(seed=5))
        plain.step(batch(seed=5))
    with trainer(layers, optimizer, ALL, max_grad_norm=0.1) as training:
        assert not training.plan.device_updates
        training.step(batch(seed=6))
        plain.step(batch(seed=6), limit=0.1)
    plain.assert_same(layers.model, optimizer)


class Wrapping(torch.optim.Optimizer):
    """Another optimizer does the work, over the same parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params), {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_that_holds_the_parameters_themselves_updates_on_the_host(layers: LayerSequence) -> None:
    optimizer, plain = Wrapping(layers.model.parameters()), copy.deepcopy(layers.model)
    with trainer(layers, optimizer, ALL) as training:
        assert (
            "Wrapping keeps parameters, or another optimizer over them, in its attribute 'inner'" in training.notes[0]
        )
        training.step(batch())
    nn.functional.mse_loss(plain(batch()[0]), batch()[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(layers.model.state_dict()), dict(plain.state_dict()))


def test_trainings_copies_are_verified(layers: LayerSequence) -> None:
    optimizer = adam(layers.model)
    with trainer(layers, optimizer, DP) as training:
        training.step(batch())
        assert training.verify([batch(seed=1), batch(seed=2)]).passed


# -- a step that fails ------------------------------------------------------------------------------------------------


def test_a_step_that_fails_says_what_was_updated_and_leaves_parameters_on_the_host(layers: LayerSequence) -> None:
    """Layer 1 fails in its recompute, when packs 4:6 and 2:4 have been updated."""
    calls, fails = iter(range(1000)), []

    def fail() -> None:
        if fails and next(calls) == 4:  # four microbatches forward
            raise RuntimeError("broken")

    broken, optimizer = breaking(layers, 1, fail), adam(layers.model)
    before = {name: value.clone() for name, value in layers.model.state_dict().items()}
    with trainer(broken, optimizer, ALL) as training:
        fails.append(True)
        with pytest.raises(TrainingError, match="broken") as caught:
            training.step(batch())
        text = str(caught.value)
        assert "4:6" in text
        assert "0:2" not in text.split("\n")[-1]
        held = training._runner.device_bytes
        for name, value in layers.model.state_dict().items():
            assert value.device.type == "cpu"
            layer = int(name.split(".")[0])
            assert torch.equal(value, before[name]) is (layer < 2) or layer in (2, 3)  # pack 2:4 may be on its way
        fails.clear()
        plain = Plain(layers.model, optimizer)
        training.step(batch(seed=1))
        assert training._runner.device_bytes == held
        plain.step(batch(seed=1))
        plain.assert_same(layers.model, optimizer)
    assert training._runner.device_bytes == (0,)


# -- bytes and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [WHOLE, ALL, DP, MIXED], ids=str)
def test_bytes_moved_and_memory_are_as_predicted(layers: LayerSequence, plan: Plan) -> None:
    """Gradients of these packs do not leave, their weights do; the optimizer's state does not move."""
    optimizer, costs, here = adam(layers.model), subject()[1], plan.device_updates
    with trainer(layers, optimizer, plan) as training:
        predicted = training.predicted
        for seed in range(3):
            training.step(batch(seed=seed))
            measured = training.last_trace
            assert measured is not None
            assert measured.moved_bytes == predicted.moved_bytes
            for timeline, most in zip(measured.memory, peak_bytes(measured.program), strict=True):
                assert timeline.peak_bytes <= most
                assert timeline.peak_bytes >= 0.95 * most or plan is not WHOLE  # others: depends on timing
        out = Counter[TensorKind]()
        for (_, to, kind), num_bytes in measured.moved_bytes.items():
            out[kind] += num_bytes if to == HOST else 0
        assert out[TensorKind.WEIGHT] == sum(costs.weight_bytes(*pack) for pack in here)
        gradients = costs.gradient_bytes(0, len(layers)) - sum(costs.gradient_bytes(*pack) for pack in here)
        assert out[TensorKind.GRADIENT] == gradients
        assert not any(kind is TensorKind.OPTIMIZER for _, _, kind in measured.moved_bytes)
        held = sum(training._runner.device_bytes)
        assert held == sum(costs.optimizer_bytes(*pack) for pack in here)
        assert training.forecast().optimizer_state_bytes == costs.optimizer_state_bytes - held


def test_a_pack_that_shares_a_parameter_or_whose_gradients_meet_on_the_host_is_named() -> None:
    import toy_profiles as toys

    from harmony_lab.planner.lower import lower

    plan = Plan.parse("pp minibatch=8 forward=2[0:2,2:6] backward=2[0:2,2:6,6:8] devices=0,1 optimizer=0:2,2:6")
    with pytest.raises(PlanError, match="0:2 shares the parameter tied with layer 7") as caught:
        lower(plan, toys.profile(8, tied=True), toys.gpus(2))
    assert len(caught.value.violations) == 1
    with pytest.raises(PlanError, match="in dp without peer transfers"):
        lower(plan.with_(mode="dp", peer_transfers=False), toys.profile(8), toys.gpus(2))
    lower(plan.with_(mode="dp", peer_transfers=False, devices=(0,)), toys.profile(8), toys.gpus(1, memory_bytes=10**8))


def test_training_ends_without_tensors_left_behind(layers: LayerSequence) -> None:
    optimizer = adam(layers.model, fused=True)
    with trainer(layers, optimizer, ALL) as training:
        training.step(batch())
        devices = training._runner.device_bytes
    assert devices[0] > 0
    del training
    gc.collect()
    assert all(value.device.type == "cpu" for state in optimizer.state.values() for value in state.values())


def test_a_profile_without_the_optimizer_is_refused(layers: LayerSequence) -> None:
    costs = profile(layers, machine(1), microbatch_sizes=(1, 2), trials=1)
    with pytest.raises(HarmonyError, match="the profile was made without an optimizer"):
        Trainer(layers, adam(layers.model), ALL, machine(1), profile=costs)
    with Trainer(
        layers, torch.optim.SGD(layers.model.parameters(), lr=0.1), ALL, machine(1), profile=costs
    ) as training:
        training.step(batch())  # keeps no state
        assert training._runner.device_bytes == (0,)
