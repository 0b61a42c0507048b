"""Training under any plan equals plain PyTorch: losses, parameters, optimizer state, buffers; bytes equal the
simulator's."""

import copy
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import models
import pytest
import torch
import toy_profiles as toys
from torch import nn

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan, microbatches
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.runtime.runner import step_seed
from harmony_lab.simulator.engine import run
from harmony_lab.trainer import Trainer

MINIBATCH = 7  # not divisible by any microbatch size or number of devices below
STEPS = 5
FAST = "1e12"  # bytes per second: links do not hold tests up


@dataclass
class Case:
    """A model in the two forms that are compared; ``batch(n, seed)`` makes data."""

    layers: LayerSequence
    model: nn.Module
    batch: Callable[..., Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    samples: Callable[[Any, int, int], Any]
    costs: Profile


def _machine(devices: int = 3, memory: str = "64MiB") -> Machine:
    return Machine.emulated(devices, memory=memory, link=FAST)


def _case(name: str) -> Case:
    if name in ("gpt2", "small gpt2", "llama"):
        model = (
            models.llama(layers=3) if name == "llama" else models.gpt2(layers=4 if name == "gpt2" else 2, dropout=0.1)
        )
        layers = decompose(model, models.gpt2_batch(2))

        def loss(module: nn.Module, batch: Any) -> torch.Tensor:
            result: torch.Tensor = module(**batch, use_cache=False).loss
            return result

        def samples(batch: Any, start: int, stop: int) -> Any:
            return {key: value[start:stop] for key, value in batch.items()}

        batch: Callable[..., Any] = models.gpt2_batch
    else:
        model = models.sequential() if name == "batchnorm" else models.dropout_mlp(width=8, blocks=5)
        criterion: nn.Module = nn.CrossEntropyLoss() if name == "batchnorm" else nn.MSELoss()

        def batch(count: int, seed: int = 1) -> Any:
            if name == "batchnorm":
                return models.mlp_batch(count, seed=seed)
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(count, 8, generator=generator), torch.randn(count, 8, generator=generator)

        def loss(module: nn.Module, pair: Any) -> torch.Tensor:
            result: torch.Tensor = criterion(module(pair[0]), pair[1])
            return result

        def samples(pair: Any, start: int, stop: int) -> Any:
            return tuple(value[start:stop] for value in pair)

        modules = list(model) if name == "modules" else None
        layers = decompose(model, batch(2), criterion, layers=modules)
    sizes = (2, 4, 13) if layers.couples_samples else (1, 2, 4, 13)  # batch norm has no statistics of one sample
    costs = profile(layers, _machine(1), torch.optim.AdamW(model.parameters()), microbatch_sizes=sizes, trials=1)
    return Case(layers, model, batch, loss, samples, costs)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return _case(request.param)


def _plain(
    case: Case, module: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, step: int, batch: Any, seed: int = 0
) -> float:
    """One step of plain PyTorch with gradient accumulation over the plan's backward microbatches."""
    optimizer.zero_grad()
    shares = [plan.share(position) for position in range(plan.num_devices if plan.mode == "dp" else 1)]
    total = 0.0
    for start, stop in shares:
        for first, last in microbatches(start, stop, plan.backward_microbatch_size):
            part = case.samples(batch, first, last)
            with reproducible_randomness(case.layers, step_seed(seed, step), samples=(first, last)):
                loss = case.loss(module, part) * ((last - first) / plan.minibatch_size)
            loss.backward()
            total += loss.item()
    optimizer.step()
    return total


def _assert_same(case: Case, plain: nn.Module, ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for (name, a), (_, b) in zip(case.model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    for (name, a), (_, b) in zip(case.model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    states = [optimizer.state_dict()["state"] for optimizer in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        for key, value in state.items():
            expected = torch.as_tensor(states[1][number][key])
            torch.testing.assert_close(torch.as_tensor(value), expected, rtol=1e-4, atol=2e-6)


def _train_both(
    case: Case, plan: Plan, *, steps: int, chaos_seed: int | None = None, memory: str = "64MiB", eps: float = 1e-5
) -> None:
    """``steps`` steps of both from the same start, compared; then the model is put back as it was.

    ``eps``: Adam's; far above the rounding of a gradient that is zero, such as a bias has in front of a BatchNorm.
    """
    start = copy.deepcopy(case.model.state_dict())
    plain = copy.deepcopy(case.model)
    ours = torch.optim.AdamW(case.model.parameters(), lr=1e-3, eps=eps)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=eps)
    machine = _machine(max(plan.devices) + 1, memory)
    predicted = run(lower(plan, case.costs, machine), case.costs, machine)
    bound = peak_bytes(predicted.program)
    try:
        with Trainer(case.layers, ours, plan, machine, profile=case.costs, chaos_seed=chaos_seed) as trainer:
            for step in range(steps):
                batch = case.batch(plan.minibatch_size, seed=step + 10)
                loss = trainer.step(batch)
                assert loss == pytest.approx(_plain(case, plain, theirs, plan, step, batch), rel=1e-5)
                measured = trainer.last_trace
                assert measured is not None
                assert measured.moved_bytes == predicted.moved_bytes
                assert measured.link_bytes == predicted.link_bytes
                for peak, most, budget in zip(measured.peak_bytes, bound, machine.budgets, strict=True):
                    assert peak <= most <= budget
        _assert_same(case, plain, ours, theirs)
    finally:
        case.model.load_state_dict(start)


def _plan(case: Case, mode: str, devices: int, forward_size: int, backward_size: int) -> Plan:
    count = len(case.layers)
    edges = sorted({0, *range(2, count, 2), count})
    backward = ",".join(f"{a}:{b}" for a, b in pairwise(edges))
    forward = ",".join(f"{a}:{b}" for a, b in pairwise(edges[:-1]))
    order = ",".join(map(str, reversed(range(devices))))
    return Plan.parse(
        f"{mode} minibatch={MINIBATCH} forward={forward_size}[{forward}] "
        f"backward={backward_size}[{backward}] devices={order}"
    )


@pytest.mark.parametrize("case", ["gpt2", "llama", "dropout"], indirect=True)
@pytest.mark.parametrize("mode", ["pp", "dp"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 3)])
def test_training_equals_plain_pytorch(case: Case, mode: str, devices: int, sizes: tuple[int, int]) -> None:
    """GPT-2: tied weights, dropout on.  Llama: rotary positions, grouped-query attention."""
    _train_both(case, _plan(case, mode, devices, *sizes), steps=STEPS)


@pytest.mark.parametrize("case", ["batchnorm"], indirect=True)
@pytest.mark.parametrize(("mode", "devices"), [("pp", 1), ("pp", 2), ("pp", 3), ("dp", 2), ("dp", 3)])
def test_batch_norm_statistics_move_once_per_microbatch(case: Case, mode: str, devices: int) -> None:
    plan = _plan(case, mode, devices, 2, 2).with_(minibatch_size=12)  # no share leaves a microbatch of one
    _train_both(case, plan, steps=STEPS)


@pytest.mark.parametrize("case", ["batchnorm", "dropout"], indirect=True)
def test_a_trainer_profiles_for_itself_what_its_plan_and_smaller_minibatches_run(case: Case) -> None:
    start = copy.deepcopy(case.model.state_dict())
    plan = _plan(case, "dp", 2, 4, 4).with_(minibatch_size=10)  # a share of five leaves a microbatch of one
    if case.layers.couples_samples:
        plan = plan.with_(minibatch_size=12)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    try:
        with Trainer(case.layers, optimizer, plan, _machine(2)) as trainer:
            for count in (plan.minibatch_size, 4):
                assert trainer.step(case.batch(count, seed=count)) > 0
    finally:
        case.model.load_state_dict(start)


@pytest.mark.parametrize("case", ["dropout"], indirect=True)
def test_a_plan_whose_devices_have_less_than_a_microbatch_each_runs_and_evaluates_larger_minibatches(
    case: Case,
) -> None:
    start = copy.deepcopy(case.model.state_dict())
    plan = _plan(case, "dp", 2, 3, 3).with_(minibatch_size=4)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    try:
        with Trainer(case.layers, optimizer, plan, _machine(2)) as trainer:
            for count in (plan.minibatch_size, 6):
                assert trainer.step(case.batch(count, seed=count)) > 0
                assert trainer.evaluate(case.batch(count, seed=count)) > 0
    finally:
        case.model.load_state_dict(start)


@pytest.mark.parametrize("case", ["modules"], indirect=True)
@pytest.mark.parametrize("mode", ["pp", "dp"])
def test_modules_run_without_a_graph_train_on_several_devices_at_once(case: Case, mode: str) -> None:
    for chaos_seed in range(5):
        _train_both(case, _plan(case, mode, 3, 2, 3), steps=1, chaos_seed=chaos_seed)


@pytest.mark.parametrize("case", ["gpt2"], indirect=True)
def test_every_switch_gives_the_same_numbers(case: Case) -> None:
    plan = _plan(case, "pp", 2, 2, 3)
    for changes in ({"prefetch": 0}, {"prefetch": 2}, {"peer_transfers": False}, {"just_in_time_update": False}):
        _train_both(case, plan.with_(**changes), steps=2)


@pytest.mark.parametrize("case", ["gpt2"], indirect=True)
def test_equal_microbatches_on_one_device_equal_plain_pytorch_to_the_bit_where_no_sum_is_reordered(case: Case) -> None:
    """One microbatch: every sum has the order of plain PyTorch's."""
    start = copy.deepcopy(case.model.state_dict())
    plan = _plan(case, "pp", 2, 4, 4).with_(minibatch_size=4)
    plain = copy.deepcopy(case.model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (case.model, plain))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Trainer(case.layers, ours, plan, _machine(2), profile=case.costs) as trainer:
            for step in range(3):
                batch = case.batch(4, seed=step)
                assert trainer.step(batch) == _plain(case, plain, theirs, plan, step, batch)
        for (name, a), (_, b) in zip(case.model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(a, b), name
    finally:
        torch.set_num_threads(threads)
        case.model.load_state_dict(start)


@pytest.mark.parametrize("case", ["gpt2"], indirect=True)
def test_a_smaller_last_minibatch_trains_too(case: Case) -> None:
    start = copy.deepcopy(case.model.state_dict())
    plan = _plan(case, "dp", 3, 2, 2)
    plain = copy.deepcopy(case.model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (case.model, plain))
    try:
        with Trainer(case.layers, ours, plan, _machine(3), profile=case.costs) as trainer:
            for step, count in enumerate((MINIBATCH, 2, 1, MINIBATCH)):
                batch = case.batch(count, seed=step)
                loss = trainer.step(batch)
                assert loss == pytest.approx(
                    _plain(case, plain, theirs, plan.for_minibatch(count), step, batch), rel=1e-5
                )
        _assert_same(case, plain, ours, theirs)
    finally:
        case.model.load_state_dict(start)


CHAOS_PLANS = int(os.environ.get("HARMONY_CHAOS_PLANS", "60"))


@pytest.mark.parametrize(
    ("case", "count", "tight_kib", "eps"),
    [
        ("dropout", CHAOS_PLANS, (6, 40), 1e-5),
        ("small gpt2", min(20, CHAOS_PLANS), (100, 800), 1e-5),
        ("batchnorm", min(20, CHAOS_PLANS), (8, 40), 1e-3),
    ],
    indirect=["case"],
)
@pytest.mark.timeout(600)
def test_random_plans_under_chaos_equal_plain_pytorch(
    case: Case, count: int, tight_kib: tuple[int, int], eps: float
) -> None:
    """Every op is delayed at random: a missing dependency would show as NaN, a budget error or another number.

    GPT-2 has a parameter that the first and the last layer share; BatchNorm's statistics move with every microbatch.
    """
    ran = 0
    for seed in range(10 * count):
        rng = random.Random(seed)
        plan = toys.random_plan(rng, len(case.layers), max_size=13, equal_sizes=bool(case.layers.couples_samples))
        share = rng.choice((0.0, 0.5, 1.0))
        plan = plan.with_(device_updates=[pack for pack in updatable(plan, case.costs) if rng.random() < share])
        memory = rng.choice(("64MiB", f"{rng.randint(*tight_kib)}KiB"))
        if case.layers.couples_samples and min(_microbatch_sizes(plan)) < 2:
            continue  # no statistics of one sample
        try:
            _train_both(case, plan, steps=1, chaos_seed=seed, memory=memory, eps=eps)
        except PlanDoesNotFitError:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}: {plan} with {memory} per device")
            raise
        ran += 1
        if ran == count:
            break
    assert ran == count


def _microbatch_sizes(plan: Plan) -> Iterator[int]:
    for position in range(plan.num_devices):
        for start, stop in microbatches(*plan.share(position), plan.backward_microbatch_size):
            yield stop - start
