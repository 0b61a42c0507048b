"""bf16 with fp32 master weights: what plain PyTorch under autocast gives, in half the weights' bytes."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, PlanError
from harmony_lab.lab import Lab
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan, difference, microbatches
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.planner.search import search
from harmony_lab.precision import Precision
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.estimate import estimate
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.precision import in_precision
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.program import TensorKind
from harmony_lab.runtime.host import HostStore
from harmony_lab.runtime.layout import Layout, Layouts
from harmony_lab.runtime.runner import step_seed
from harmony_lab.runtime.shadows import Shadows
from harmony_lab.trace import Trace
from harmony_lab.trainer import Trainer, simulate

SIZES = (1, 2, 3)
MACHINE = Machine.emulated(2, memory="64MiB", link="1e12")
PP = "pp minibatch=8 forward=3[0:1,1:2] backward=3[0:1,1:2,2:{}] devices=0,1 precision=bf16"
DP = "dp minibatch=8 forward=2[0:1] backward=2[0:1,1:{}] devices=0,1 precision=bf16"


class Gates(nn.Module):
    """Integers, booleans, a parameter that is multiplied with and a weight that only some ops may read in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("offsets", torch.arange(8))

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens) * self.scale
        x = torch.where(mask[..., None], self.first(x), x)
        return functional.cross_entropy(self.second(x).mean(1) + self.offsets, targets)


def gates_batch(count: int, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, 12, (count, 5), generator=generator),
        "mask": torch.rand(count, 5, generator=generator) > 0.5,
        "targets": torch.randint(0, 8, (count,), generator=generator),
    }


def loss_of(criterion: nn.Module | None, call: Callable[..., Any], batch: Any) -> Tensor:
    if criterion is not None:
        loss: Tensor = criterion(call(batch[0]), batch[1])
        return loss
    found = call(**batch)
    return found if isinstance(found, Tensor) else found.loss  # type: ignore[no-any-return]


def cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {name: value[start:stop] for name, value in batch.items()}
    return tuple(value[start:stop] for value in batch)


def subject(name: str) -> tuple[nn.Module, nn.Module | None, Callable[..., Any]]:
    """(model, loss, what makes batches)"""
    torch.manual_seed(0)
    match name:
        case "tied gpt2 with dropout":
            return models.gpt2(layers=2), None, models.gpt2_batch
        case "batch norm":
            return models.sequential(), nn.CrossEntropyLoss(), models.mlp_batch
        case "batch norm, as a graph":
            return models.MLP(), nn.CrossEntropyLoss(), models.mlp_batch
    return Gates(), None, gates_batch


@dataclass
class Case:
    """A model, and what it is trained with."""

    model: nn.Module
    criterion: nn.Module | None
    batch: Callable[..., Any]
    layers: LayerSequence
    costs: Profile


def costs_of(layers: LayerSequence, model: nn.Module, precision: str) -> Profile:
    sizes = SIZES[1:] if layers.couples_samples else SIZES  # batch norm has no statistics of one sample
    return profile(layers, MACHINE, optimizer_of(model), precision=precision, microbatch_sizes=sizes, trials=1)


class Plain:
    """The user's model with weights rounded to bf16, under autocast; fp32 gradients for the fp32 masters."""

    def __init__(self, case: Case, plan: Plan) -> None:
        self.layers, self.criterion, self.plan = case.layers, case.criterion, plan
        self.model = copy.deepcopy(case.model)
        self.optimizer = optimizer_of(self.model)

    def step(self, number: int, batch: Any, limit: float | None) -> float:
        masters = dict(self.model.named_parameters())
        rounded = {name: p.detach().bfloat16().float().requires_grad_() for name, p in masters.items()}
        state = {**rounded, **dict(self.model.named_buffers())}
        total = 0.0
        for start, stop in self.parts():

            def call(*args: Any, **given: Any) -> Any:
                kwargs = {**given, "use_cache": False} if "labels" in given else given
                return functional_call(self.model, state, args, kwargs)

            with (
                torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
                reproducible_randomness(self.layers, step_seed(0, number), (start, stop)),
            ):
                loss = loss_of(self.criterion, call, cut(batch, start, stop)) * (
                    (stop - start) / self.plan.minibatch_size
                )
            loss.backward()
            total += loss.item()
        for name, master in masters.items():
            master.grad = rounded[name].grad
        if limit is not None:
            nn.utils.clip_grad_norm_(masters.values(), limit)
        self.optimizer.step()
        return total

    def parts(self) -> Iterator[tuple[int, int]]:
        shares = [self.plan.share(position) for position in range(2 if self.plan.mode == "dp" else 1)]
        for share in shares:
            yield from microbatches(*share, self.plan.backward_microbatch_size)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # above the rounding of a gradient that is zero


@pytest.fixture(scope="module", params=["tied gpt2 with dropout", "batch norm", "batch norm, as a graph", "integers"])
def case(request: pytest.FixtureRequest) -> Case:
    model, criterion, make = subject(request.param)
    layers = decompose(model, make(2), criterion)
    return Case(model, criterion, make, layers, costs_of(layers, model, "bf16"))


@pytest.mark.parametrize(("text", "limit"), [(PP, None), (DP, 0.1)], ids=["pp", "dp, clipped"])
def test_training_equals_plain_pytorch_under_autocast(case: Case, text: str, limit: float | None) -> None:
    model, start = case.model, copy.deepcopy(case.model.state_dict())
    plan = Plan.parse(text.format(len(case.layers)))
    plain, mine = Plain(case, plan), optimizer_of(model)
    with Trainer(case.layers, mine, plan, MACHINE, profile=case.costs, max_grad_norm=limit) as trainer:
        for number in range(3):
            batch = case.batch(8, seed=number)
            assert trainer.step(batch) == pytest.approx(plain.step(number, batch, limit), rel=1e-5)
        for (key, ours), theirs in zip(model.state_dict().items(), plain.model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
            assert ours.dtype is theirs.dtype
    model.load_state_dict(start)


@pytest.fixture(scope="module")
def gpt2() -> Case:
    model = models.gpt2(layers=2, dropout=0.1)
    layers = decompose(model, models.gpt2_batch(2))
    return Case(model, None, models.gpt2_batch, layers, costs_of(layers, model, "bf16"))


def plan_of(case: Case, text: str = PP) -> Plan:
    return Plan.parse(text.format(len(case.layers)))


def test_a_hundred_steps_lose_as_fp32_does_within_one_per_cent(gpt2: Case) -> None:
    """fp32 in plain PyTorch, with the same dropout masks."""
    start, batches = copy.deepcopy(gpt2.model.state_dict()), [gpt2.batch(2, seed=seed) for seed in range(4)]
    plain = copy.deepcopy(gpt2.model)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (gpt2.model, plain))
    plan = "dp minibatch=2 forward=1[] backward=1[0:4] devices=0 precision=bf16"
    losses = []
    with Trainer(gpt2.layers, ours, plan, MACHINE, profile=gpt2.costs) as trainer:
        for number in range(100):
            batch = batches[number % 4]
            with reproducible_randomness(gpt2.layers, step_seed(0, number), (0, 2)):
                loss = plain(**batch, use_cache=False).loss
            theirs.zero_grad()
            loss.backward()
            theirs.step()
            losses.append((trainer.step(batch), loss.item()))
    gpt2.model.load_state_dict(start)
    assert losses[-1][1] < 0.5 * losses[0][1], "the task is too hard to tell anything"
    assert [ours for ours, _ in losses] == pytest.approx([theirs for _, theirs in losses], rel=0.01)


ALONE = "dp minibatch=8 forward=2[0:2] backward=2[0:1,1:2,2:{}] devices=0 prefetch=0 precision=bf16"


@pytest.mark.parametrize("text", [PP, DP, ALONE], ids=["pp", "dp", "alone"])
def test_weights_move_in_half_the_bytes_as_predicted_and_memory_is_as_predicted(gpt2: Case, text: str) -> None:
    plan, start = plan_of(gpt2, text), copy.deepcopy(gpt2.model.state_dict())
    full = costs_of(gpt2.layers, gpt2.model, "fp32")
    before = simulate(plan.with_(precision="fp32"), full, MACHINE)
    with Trainer(gpt2.layers, optimizer_of(gpt2.model), plan, MACHINE, profile=gpt2.costs) as trainer:
        trainer.step(gpt2.batch(8))
        measured, predicted = trainer.last_trace, trainer.predicted
        assert measured is not None
        assert measured.moved_bytes == predicted.moved_bytes
        assert moved(before, TensorKind.WEIGHT) == 2 * moved(measured, TensorKind.WEIGHT) > 0
        assert moved(before, TensorKind.GRADIENT) == moved(measured, TensorKind.GRADIENT) > 0
        for bound, seen in zip(peak_bytes(predicted.program), measured.peak_bytes, strict=True):
            assert seen <= bound
            assert seen >= 0.95 * bound or text != ALONE  # elsewhere it depends on timing what meets
        weights, forecast = full.weight_bytes(0, len(full)), trainer.forecast()
        assert forecast.weight_bytes == weights + weights // 2
        assert trainer.host_bytes >= forecast.weight_bytes + forecast.optimizer_state_bytes
    gpt2.model.load_state_dict(start)


def moved(trace: Trace, kind: TensorKind) -> int:
    return sum(num_bytes for (_, _, moving), num_bytes in trace.moved_bytes.items() if moving is kind)


def test_whatever_changed_the_masters_between_steps_counts(gpt2: Case) -> None:
    """A write to ``.data`` leaves no version behind."""
    start, batch = copy.deepcopy(gpt2.model.state_dict()), gpt2.batch(8)
    plain = Plain(gpt2, plan_of(gpt2))
    with Trainer(gpt2.layers, optimizer_of(gpt2.model), plan_of(gpt2), MACHINE, profile=gpt2.costs) as trainer:
        assert trainer.step(batch) == pytest.approx(plain.step(0, batch, None), rel=1e-5)
        for change in (
            lambda model: [p.data.clamp_(-0.01, 0.01) for p in model.parameters()],
            lambda model: model.load_state_dict(start),
        ):
            change(gpt2.model)
            change(plain.model)
            assert trainer.step(batch) == pytest.approx(plain.step(trainer.step_count - 1, batch, None), rel=1e-5)
            change(plain.model)
            change(gpt2.model)
            plain.model.eval()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                state = {name: p.bfloat16().float() for name, p in plain.model.named_parameters()}
                expected = functional_call(plain.model, state, (), {**batch, "use_cache": False}).loss.item()
            plain.model.train()
            assert trainer.evaluate(batch) == pytest.approx(expected, rel=1e-3)
    gpt2.model.load_state_dict(start)


def test_a_pack_waits_for_its_own_shadows_only() -> None:
    masters = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}
    gate, arrived = threading.Event(), threading.Event()

    class Slow(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name == "b":
                gate.wait()
            return super().__getitem__(name)

    def wait() -> None:
        shadows.wait_for(["b"])
        arrived.set()

    layout = Layout.of((name, tensor.shape, torch.bfloat16) for name, tensor in masters.items())
    shadows = Shadows(Slow(masters), layout)
    waiting = threading.Thread(target=wait)
    with shadows.renewing():
        shadows.wait_for(["a"])
        waiting.start()
        assert not arrived.wait(0.05)
        gate.set()
        waiting.join()
    copies = layout.views(shadows.arena.memory)
    assert all(torch.equal(copies[name].float(), tensor) for name, tensor in masters.items())
    shadows.close()


def test_packs_are_read_once_their_shadows_are_made() -> None:
    layers = decompose(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), (torch.ones(2, 1),) * 2, nn.MSELoss())
    layers = in_precision(layers, "bf16")
    layouts = Layouts(layers)
    store = HostStore(layers, layouts)
    waited: list[str] = []

    class Seen(Shadows):
        def wait_for(self, names: Iterable[str]) -> None:
            waited.extend(names)

    store.shadows = Seen(layers.tensors, store.moving)
    store.reader(layers, layouts).parts_of((1, 2))
    assert waited == list(layers.layers[1].parameters)
    store.close()


def test_an_op_that_mixes_types_is_refused_with_its_layer() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x).scatter(1, torch.zeros_like(x, dtype=torch.long), self.first(x)).mean()

    layers = decompose(Mixed(), (torch.randn(4, 4),))
    with pytest.raises(HarmonyError, match=r"layer first cannot compute in bf16: scatter"):
        in_precision(layers, "bf16")


def test_precision_is_a_knob_that_plan_and_profile_must_agree_on(gpt2: Case) -> None:
    plan = plan_of(gpt2)
    assert plan.precision is Precision.BF16
    assert "precision" not in str(plan.with_(precision="fp32"))
    assert Plan.parse(str(plan)) == plan == Plan.from_json(plan.to_json())
    assert difference(plan.with_(precision="fp32"), plan) == "precision: fp32 → bf16"
    assert Profile.from_json(gpt2.costs.to_json()) == gpt2.costs
    with pytest.raises(PlanError, match="the plan computes in fp32, the profile is of bf16: profile"):
        lower(plan.with_(precision="fp32"), gpt2.costs, MACHINE)
    with pytest.raises(HarmonyError, match="fp16 needs loss scaling"):
        in_precision(gpt2.layers, "fp16")
    with pytest.raises(PlanError, match="precision= is fp32 or bf16"):
        Plan.parse(f"{plan.with_(precision='fp32')} precision=fp16")


def test_in_precision_leaves_what_it_was_given_and_goes_back(gpt2: Case) -> None:
    low = in_precision(gpt2.layers, "bf16")
    assert in_precision(low, "bf16") is low
    assert in_precision(low, "fp32") is gpt2.layers
    assert not any(spec.shadow for spec in gpt2.layers.state.values())
    assert low.fingerprint == gpt2.layers.fingerprint
    assert {spec.dtype for boundary in low.boundaries for spec in boundary} == {"float32"}  # GPT-2's residual stream


def test_an_estimate_has_the_bytes_of_a_measurement_and_the_rate_of_bf16(gpt2: Case) -> None:
    wide = decompose(
        nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3))), (torch.ones(2, 2048),) * 2, nn.MSELoss()
    )
    full, low = (estimate(wide, "3090", precision=p, microbatch_sizes=[64]) for p in ("fp32", "bf16"))
    assert low.weight_bytes(0, 3) * 2 == full.weight_bytes(0, 3) == low.master_bytes
    assert low.cost(1, 64).backward_s < 0.75 * full.cost(1, 64).backward_s
    estimated = estimate(gpt2.layers, "3090", precision="bf16", microbatch_sizes=SIZES)
    for mine, theirs in zip(estimated.layers, gpt2.costs.layers, strict=True):
        assert [cost.saved_bytes for cost in mine.costs] == [cost.saved_bytes for cost in theirs.costs]


def test_plans_of_both_precisions_are_ranked_together(gpt2: Case) -> None:
    """Where links bind, half the bytes win."""
    slow = Machine.emulated(2, memory="400KB", link="2MB/s")
    costs = [costs_of(gpt2.layers, gpt2.model, precision) for precision in ("fp32", "bf16")]
    found = search(costs, slow, 3, modes=["dp"], shown=2)
    assert {candidate.plan.precision for candidate in found.candidates} == {"fp32", "bf16"}
    assert found.best.precision is Precision.BF16
    assert found.lower_bound_s <= found.candidates[0].step_s
    with pytest.raises(PlanError, match="different precisions"):
        search(costs[:1] * 2, slow, 3)


def test_a_lab_profiles_again_for_a_plan_of_another_precision(gpt2: Case) -> None:
    model = copy.deepcopy(gpt2.model)
    events: list[str] = []
    with Lab(model, gpt2.batch(2), optimizer_of(model), minibatch_size=2, machine=MACHINE) as lab:
        lab.search(modes=["dp"])
        lab.subscribe(events.append)
        assert (lab.precision, lab.has_profile("bf16")) == ("fp32", False)
        fp32, plan = lab.profile, lab.plan
        assert plan is not None
        lab.choose(lab.with_packs(precision="bf16"))
        assert "progress" in events
        assert lab.profile is not None
        assert (lab.precision, lab.profile.precision) == ("bf16", "bf16")
        assert lab.verify([gpt2.batch(2)]).passed
        run = lab.launch([gpt2.batch(2)], 2)
        run.wait()
        assert run.plan.precision is Precision.BF16
        lab.choose(plan)
        assert lab.profile is fp32
