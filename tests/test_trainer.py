"""Trainer beside plain PyTorch: evaluation, several minibatches in one update, clipping, verification."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from torch import nn

from harmony_lab.certificate import Certificate
from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.search import search
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.estimate import estimate
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.runtime.runner import step_seed
from harmony_lab.trainer import Trainer, simulate

PLANS = {
    "one device": "dp minibatch=8 forward=2[0:2] backward=2[0:2,2:{n}] devices=0",
    "dp": "dp minibatch=8 forward=2[0:2] backward=2[0:2,2:{n}] devices=0,1",
    "pp": "pp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:{n}] devices=0,1",
}


def machine(**options: Any) -> Machine:
    return Machine.emulated(2, memory="64MiB", link="1e12", **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, **options)


class Case:
    """A model, its layers and costs; ``batch(count, seed)`` and the plain loss of a batch."""

    def __init__(self, name: str) -> None:
        self.language = name == "gpt2"
        self.model: nn.Module = models.gpt2(layers=2) if self.language else models.sequential()
        if not self.language:
            self.model.append(nn.Dropout(0.3))
        self.criterion = nn.CrossEntropyLoss()
        self.layers: LayerSequence = decompose(self.model, self.batch(2), None if self.language else self.criterion)
        sizes = (1, 2, 4, 8) if self.language else (2, 4, 8)
        self.costs: Profile = profile(self.layers, machine(), adamw(self.model), microbatch_sizes=sizes, trials=1)

    def batch(self, count: int, seed: int = 1, ignored: int = 0) -> Any:
        """``ignored``: that many labels of each sample count for nothing."""
        if not self.language:
            return models.mlp_batch(count, seed=seed)
        batch = models.gpt2_batch(count, seed=seed)
        batch["labels"][:, 16 - ignored :] = -100
        return batch

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.language:
            loss: torch.Tensor = model(**batch, use_cache=False).loss
        else:
            loss = self.criterion(model(batch[0]), batch[1])
        return loss

    def plan(self, name: str) -> Plan:
        return Plan.parse(PLANS[name].format(n=len(self.layers)))

    def trainer(self, plan: str, optimizer: torch.optim.Optimizer, **options: Any) -> Trainer:
        return Trainer(self.layers, optimizer, self.plan(plan), machine(), profile=self.costs, **options)


@pytest.fixture(scope="module", params=["gpt2", "batchnorm"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def gpt2() -> Case:
    return Case("gpt2")


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models are shared by tests: they are put back as they were."""
    cases = [request.getfixturevalue(name) for name in ("case", "gpt2") if name in request.fixturenames]
    before = [copy.deepcopy(case.model.state_dict()) for case in cases]
    yield
    for one, state in zip(cases, before, strict=True):
        one.model.load_state_dict(state)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# -- evaluate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("count", [8, 5])
def test_evaluating_equals_the_plain_model_in_eval_mode_and_changes_nothing(case: Case, plan: str, count: int) -> None:
    batch = case.batch(count, seed=3)
    plain = copy.deepcopy(case.model).eval()
    with torch.no_grad():
        expected = case.loss(plain, batch).item()
    optimizer = adamw(case.model)
    modes = [module.training for module in case.model.modules()]
    before = state_of(case.model)
    with case.trainer(plan, optimizer) as trainer:
        assert trainer.evaluate(batch) == pytest.approx(expected, rel=1e-6)
        assert trainer.evaluate(batch) == trainer.evaluate(batch)
        assert_equal(state_of(case.model), before)
        assert trainer.last_trace is not None
        kinds = {str(op.kind) for op in trainer.last_trace.program.ops}
    assert not kinds & {"backward", "recompute", "update"}
    assert modes == [module.training for module in case.model.modules()]
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_evaluating_between_steps_sees_what_was_trained_and_leaves_training_as_it_was(case: Case) -> None:
    plain = copy.deepcopy(case.model)
    batches = [case.batch(8, seed=seed) for seed in range(4)]
    with case.trainer("pp", adamw(case.model)) as trainer:
        for batch in batches:
            trainer.step(batch)
        expected = state_of(case.model)
    case.model.load_state_dict(plain.state_dict())
    with case.trainer("pp", adamw(case.model)) as trainer:
        for number, batch in enumerate(batches):
            trainer.step(batch)
            evaluated = trainer.evaluate(batches[0])
            mirror = copy.deepcopy(case.model).eval()
            with torch.no_grad():
                assert evaluated == pytest.approx(case.loss(mirror, batches[0]).item(), rel=1e-6), number
        assert trainer.step_count == 4
        assert_equal(state_of(case.model), expected, 1e-6)


class Counting(nn.Module):
    """Counts its calls in a buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


def test_a_model_that_changes_in_eval_mode_is_refused_by_name() -> None:
    model = Counting()
    layers = decompose(model, models.mlp_batch(2), nn.CrossEntropyLoss())
    plan = "dp minibatch=2 forward=2[] backward=2[0:1] devices=0"
    with (
        Trainer(layers, torch.optim.SGD(model.parameters(), lr=0.1), plan, machine()) as trainer,
        pytest.raises(HarmonyError, match="Counting updates buffer 'calls'"),
    ):
        trainer.evaluate(models.mlp_batch(2))
    assert model.calls == 0


def test_modules_run_in_sequence_are_evaluated_in_eval_mode_each() -> None:
    model = nn.Sequential(*models.sequential(), nn.Dropout(0.5))
    criterion = nn.CrossEntropyLoss()
    layers = decompose(model, models.mlp_batch(4), criterion, layers=list(model))
    batch = models.mlp_batch(4, seed=5)
    plan = f"pp minibatch=4 forward=2[0:2] backward=2[0:2,2:{len(layers)}] devices=0,1"
    with Trainer(layers, adamw(model), plan, machine()) as trainer:
        trainer.step(models.mlp_batch(4))
        found = trainer.evaluate(batch)
    model.eval()
    with torch.no_grad():
        assert found == pytest.approx(criterion(model(batch[0]), batch[1]).item(), rel=1e-6)


def test_a_model_larger_than_the_devices_is_evaluated_within_their_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Tanh()) for _ in range(12)))
    batch = torch.randn(6, 64), torch.randn(6, 64)
    layers = decompose(model, batch, nn.MSELoss())
    small = Machine.emulated(2, memory="80KiB", link="1e12")
    assert sum(small.budgets) < layers.parameter_bytes
    packs = ",".join(f"{k}:{k + 1}" for k in range(12))
    plan = f"pp minibatch=6 forward=2[{packs.removesuffix(',11:12')}] backward=2[{packs}] devices=0,1"
    with Trainer(layers, adamw(model), plan, small) as trainer:
        found, trace = trainer.evaluate(batch), trainer.last_trace
    assert trace is not None
    assert max(trace.peak_bytes) <= small.budgets[0]
    model.eval()
    with torch.no_grad():
        assert found == pytest.approx(nn.functional.mse_loss(model(batch[0]), batch[1]).item(), rel=1e-6)


class WithHelper(nn.Module):
    """A head that only training looks at, before the blocks that both run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.helper = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        extra = nn.functional.cross_entropy(self.helper(x), y) if self.training else None
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = nn.functional.cross_entropy(self.head(x), y)
        return loss if extra is None else loss + 0.3 * extra


def test_a_part_that_only_training_runs_is_left_out_of_evaluation() -> None:
    torch.manual_seed(0)
    model = WithHelper()
    x, y = models.mlp_batch(4)
    layers = decompose(model, {"x": x, "y": y}, cut=["helper", "blocks.0", "blocks.2"])
    names = [layer.name for layer in layers.layers]
    assert names[1:] == ["helper", "blocks.0", "blocks.2"]
    mode = "pp minibatch=4 forward=2[0:2,2:3] backward=2[{}3:4] devices=0,1"
    with Trainer(layers, adamw(model), mode.format("0:2,2:3,"), machine()) as trainer:
        trainer.step({"x": x, "y": y})
        with pytest.raises(HarmonyError, match="cannot be cut in eval mode: cut: module helper computes nothing"):
            trainer.evaluate({"x": x, "y": y})
    layers = decompose(model, {"x": x, "y": y}, cut=["blocks.0", "blocks.2"])
    plan = "pp minibatch=4 forward=2[0:1,1:2] backward=2[0:2,2:3] devices=0,1"
    with Trainer(layers, adamw(model), plan, machine()) as trainer:
        trainer.step({"x": x, "y": y})
        found = trainer.evaluate({"x": x, "y": y})
    model.eval()
    with torch.no_grad():
        assert found == pytest.approx(model(x, y).item(), rel=1e-6)


def test_targets_that_do_not_count_do_not_count_in_evaluation(gpt2: Case) -> None:
    batch = gpt2.batch(8)
    batch["labels"][:3, 2:] = -100
    plain = copy.deepcopy(gpt2.model).eval()
    with gpt2.trainer("dp", adamw(gpt2.model), chaos_seed=3) as trainer, torch.no_grad():
        assert trainer.evaluate(batch) == pytest.approx(gpt2.loss(plain, batch).item(), rel=1e-6)


# -- several minibatches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_several_minibatches_in_one_update_weigh_by_the_tokens_that_count(
    gpt2: Case, plan: str, max_grad_norm: float | None
) -> None:
    """Minibatches of 8, 8 and 3 samples, with 15, 9 and 2 tokens of each that count."""
    plain = copy.deepcopy(gpt2.model)
    ours, theirs = adamw(gpt2.model), adamw(plain)
    with gpt2.trainer(plan, ours, max_grad_norm=max_grad_norm) as trainer:
        for step in range(3):
            batches = [
                gpt2.batch(count, seed=3 * step + number, ignored=ignored)
                for number, (count, ignored) in enumerate([(8, 0), (8, 6), (3, 13)])
            ]
            whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            theirs.zero_grad()
            with reproducible_randomness(gpt2.layers, step_seed(0, step), (0, 19)):
                loss = gpt2.loss(plain, whole)
            loss.backward()
            if max_grad_norm is not None:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
            theirs.step()
            assert trainer.accumulate(batches) == pytest.approx(loss.item(), rel=1e-5)
            if max_grad_norm is not None:
                assert trainer.last_norm == pytest.approx(norm.item(), rel=1e-4)
    assert trainer.step_count == 3
    assert_equal(state_of(gpt2.model), state_of(plain), 1e-4)


def test_equal_minibatches_equal_what_plain_pytorch_accumulates(gpt2: Case) -> None:
    """``(loss / len(batches)).backward()`` for each, without dropout, to the bit of one microbatch each."""
    model = models.gpt2(layers=2, dropout=0.0)
    layers = decompose(model, models.gpt2_batch(2))
    plain = copy.deepcopy(model)
    theirs = adamw(plain)
    plan = f"dp minibatch=4 forward=4[0:2] backward=4[0:2,2:{len(layers)}] devices=0"
    with Trainer(layers, adamw(model), plan, machine()) as trainer:
        for step in range(3):
            batches = [models.gpt2_batch(4, seed=10 * step + number) for number in range(3)]
            theirs.zero_grad()
            losses = [plain(**batch, use_cache=False).loss / 3 for batch in batches]
            for loss in losses:
                loss.backward()
            theirs.step()
            assert trainer.accumulate(batches) == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    assert_equal(state_of(model), state_of(plain), 1e-6)


def test_a_loss_of_several_terms_is_that_of_all_minibatches_together() -> None:
    """Two classifications, each with labels of its own to ignore."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

        def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            logits = self.head(torch.tanh(self.body(x)))
            return nn.functional.cross_entropy(logits, first) + 0.5 * nn.functional.cross_entropy(-logits, second)

    def batch(count: int, seed: int, ignored: tuple[int, int]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = [torch.randint(0, 5, (count,), generator=generator) for _ in range(2)]
        for label, skip in zip(labels, ignored, strict=True):
            label[:skip] = -100
        return {"x": torch.randn(count, 8, generator=generator), "first": labels[0], "second": labels[1]}

    torch.manual_seed(0)
    model = Both()
    plain = copy.deepcopy(model)
    layers = decompose(model, batch(4, 0, (1, 0)), cut=["head"])
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    plan = "dp minibatch=4 forward=2[0:1] backward=2[0:1,1:2] devices=0,1"
    with Trainer(layers, torch.optim.SGD(model.parameters(), lr=0.1), plan, machine()) as trainer:
        for step in range(2):
            batches = [batch(4, 2 * step, (3, 0)), batch(4, 2 * step + 1, (0, 2))]
            theirs.zero_grad()
            loss = plain(**{name: torch.cat([b[name] for b in batches]) for name in batches[0]})
            loss.backward()
            theirs.step()
            assert trainer.accumulate(batches) == pytest.approx(loss.item(), rel=1e-5)
    assert_equal(state_of(model), state_of(plain), 1e-5)


def test_statistics_move_with_every_minibatch_of_an_update_and_not_at_all_when_it_fails() -> None:
    case = Case("batchnorm")
    plain = copy.deepcopy(case.model)
    batches = [case.batch(8, seed=1), case.batch(8, seed=2)]
    with torch.no_grad():
        for batch in batches:
            for start in (0, 2, 4, 6):
                plain(batch[0][start : start + 2])
    before = state_of(case.model)
    broken = (batches[1][0], torch.full((8,), 99))  # no such class
    with case.trainer("one device", torch.optim.SGD(case.model.parameters(), lr=0.0)) as trainer:
        with pytest.raises(TrainingError, match="No weights were updated"):
            trainer.accumulate([batches[0], broken])
        assert_equal(state_of(case.model), before)
        assert trainer.step_count == 0
        trainer.accumulate(batches)
    assert_equal(state_of(case.model), state_of(plain), 1e-5)


def test_no_minibatch_at_all_is_refused(gpt2: Case) -> None:
    with gpt2.trainer("dp", adamw(gpt2.model)) as trainer, pytest.raises(HarmonyError, match="at least one minibatch"):
        trainer.accumulate([])


# -- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "suggested"), [(None, True), (False, True), (True, False)])
def test_a_fused_step_is_suggested_where_there_is_one(case: Case, fused: bool | None, suggested: bool) -> None:
    optimizer = torch.optim.AdamW(case.model.parameters(), fused=fused)
    with case.trainer("one device", optimizer) as trainer:
        assert any("fused=True" in note for note in trainer.notes) is suggested


@pytest.mark.parametrize(
    ("plan", "chaos_seed"), [("one device", None), ("dp", None), ("dp", 5), ("pp", None), ("pp", 5)]
)
def test_clipped_training_equals_clip_grad_norm(case: Case, plan: str, chaos_seed: int | None) -> None:
    """GPT-2's embedding and head are one parameter, whose gradient counts once in the norm."""
    plain = copy.deepcopy(case.model)
    ours, theirs = adamw(case.model), adamw(plain)
    chosen = case.plan(plan)
    shares = [(0, 8)] if chosen.mode == "pp" else [chosen.share(k) for k in range(chosen.num_devices)]
    norms = []
    with case.trainer(plan, ours, max_grad_norm=0.5, chaos_seed=chaos_seed) as trainer:
        assert "update=end" in str(trainer.plan)
        assert "update=end" in trainer.notes[0]
        for step in range(3):
            batch = case.batch(8, seed=step)
            theirs.zero_grad()
            for start, stop in shares:
                for first in range(start, stop, 2):
                    last = min(first + 2, stop)
                    part = (
                        {name: value[first:last] for name, value in batch.items()}
                        if case.language
                        else tuple(value[first:last] for value in batch)
                    )
                    with reproducible_randomness(case.layers, step_seed(0, step), (first, last)):
                        loss = case.loss(plain, part)
                    (loss * ((last - first) / 8)).backward()
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
            theirs.step()
            trainer.step(batch)
            assert trainer.last_norm == pytest.approx(norms[-1], rel=1e-4)
    assert max(norms) > 0.5
    assert_equal(state_of(case.model), state_of(plain), 1e-4)


def test_one_microbatch_is_clipped_to_the_bit() -> None:
    model = models.gpt2(layers=2, dropout=0.0)
    plain = copy.deepcopy(model)
    layers = decompose(model, models.gpt2_batch(2))
    theirs = adamw(plain)
    plan = f"pp minibatch=4 forward=4[0:1,1:2] backward=4[0:2,2:{len(layers)}] devices=0,1"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Trainer(layers, adamw(model), plan, machine(), max_grad_norm=0.3) as trainer:
            for step in range(3):
                batch = models.gpt2_batch(4, seed=step)
                theirs.zero_grad()
                plain(**batch, use_cache=False).loss.backward()
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
                theirs.step()
                trainer.step(batch)
                assert trainer.last_norm == norm.item()
        assert_equal(state_of(model), state_of(plain))
    finally:
        torch.set_num_threads(threads)


def test_gradients_below_the_limit_are_not_touched(gpt2: Case) -> None:
    batch = gpt2.batch(8)
    with gpt2.trainer("pp", torch.optim.SGD(gpt2.model.parameters(), lr=0.1)) as trainer:
        trainer.step(batch)
        assert trainer.last_norm is None
        expected = state_of(gpt2.model)
    gpt2.model.load_state_dict(copy.deepcopy(Case("gpt2").model.state_dict()))
    with gpt2.trainer("pp", torch.optim.SGD(gpt2.model.parameters(), lr=0.1), max_grad_norm=1e9) as trainer:
        trainer.step(batch)
    assert_equal(state_of(gpt2.model), expected)


def test_a_limit_that_is_no_norm_is_refused(gpt2: Case) -> None:
    with pytest.raises(HarmonyError, match="max_grad_norm must be a number above 0, or None to clip nothing, got 0"):
        gpt2.trainer("pp", adamw(gpt2.model), max_grad_norm=0)


@pytest.mark.parametrize("given", [-1, "x", 2.5])
def test_steps_before_are_a_whole_number(gpt2: Case, given: Any) -> None:
    with pytest.raises(HarmonyError, match="first_step must be a whole number of at least 0, got"):
        gpt2.trainer("pp", adamw(gpt2.model), first_step=given)


def test_one_minibatch_is_not_taken_for_several_to_accumulate(gpt2: Case) -> None:
    batch = gpt2.batch(8)
    expected = "accumulate takes a list of minibatches, got a (dict|tuple)"
    with gpt2.trainer("pp", adamw(gpt2.model)) as trainer, pytest.raises(HarmonyError, match=expected):
        trainer.accumulate(batch)


def test_a_plan_that_a_lab_has_not_made_yet_is_said_to_come_with_prepare(gpt2: Case) -> None:
    with pytest.raises(HarmonyError, match=r"got a NoneType; a Lab has a plan after lab.prepare\(\)"):
        Trainer(gpt2.layers, adamw(gpt2.model), None, Machine.emulated(1))  # type: ignore[arg-type]


# -- losses that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("chaos_seed", range(4))
def test_a_loss_that_is_not_finite_stops_the_step_before_any_update(plan: str, chaos_seed: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    layers = decompose(model, (torch.randn(4, 8), torch.randn(4, 1)), nn.MSELoss())
    good = torch.randn(8, 8), torch.randn(8, 1)
    bad = good[0], torch.tensor([[0.0]] * 7 + [[math.inf]])  # in the last microbatch
    chosen = PLANS[plan].format(n=len(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    with Trainer(layers, optimizer, chosen, machine(), stop_on_nan=True, chaos_seed=chaos_seed) as trainer:
        before = state_of(model)
        with pytest.raises(TrainingError, match=r"the loss of samples \d:8 is inf\nNo weights were updated"):
            trainer.step(bad)
        assert_equal(state_of(model), before)
        assert math.isfinite(trainer.step(good))
        assert trainer.step_count == 1
    with Trainer(layers, optimizer, chosen, machine(), chaos_seed=chaos_seed) as trainer:
        assert math.isinf(trainer.step(bad))


# -- verify -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_verifying_finds_equality_and_leaves_everything_as_it_was(case: Case, plan: str) -> None:
    optimizer = adamw(case.model)
    with case.trainer(plan, optimizer, max_grad_norm=1.0) as trainer:
        trainer.step(case.batch(8))
        before, state = state_of(case.model), copy.deepcopy(optimizer.state_dict())
        random_state = torch.get_rng_state()
        certificate = trainer.verify([case.batch(8, seed=7), case.batch(4, seed=8)])
        assert certificate.passed, certificate
        assert torch.equal(torch.get_rng_state(), random_state)
        assert trainer.step_count == 1
        assert_equal(state_of(case.model), before)
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
        trainer.step(case.batch(8, seed=9))
    assert certificate.steps == 2
    assert certificate["parameters"].largest == 0.0
    assert certificate["optimizer state"].largest == 0.0
    assert certificate["gradients"].largest < 1e-4
    assert certificate["buffers"].largest < 1e-5


def test_verifying_knows_learning_rate_schedulers_and_never_steps_the_users_optimizer(gpt2: Case) -> None:
    optimizer = torch.optim.SGD(gpt2.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with gpt2.trainer("dp", optimizer) as trainer:
        trainer.step(gpt2.batch(8))
        scheduler.step()
        before = state_of(gpt2.model)
        assert trainer.verify([gpt2.batch(8, seed=2)]).passed
        assert_equal(state_of(gpt2.model), before)


def test_a_wrong_gradient_is_found_and_named(gpt2: Case) -> None:
    with gpt2.trainer("pp", adamw(gpt2.model)) as trainer:
        layers = trainer.layers
        victim = layers.layers[1]

        def doubled(parameters: Any, *others: Any) -> Any:
            return victim.function([2 * p.detach() - p if p.requires_grad else p for p in parameters], *others)

        changed = victim.__class__(**{**{f: getattr(victim, f) for f in victim.__slots__}, "function": doubled})
        trainer.layers = layers.__class__(
            **{
                **{f: getattr(layers, f) for f in layers.__dataclass_fields__},
                "layers": (layers.layers[0], changed, *layers.layers[2:]),
            }
        )
        certificate = trainer.verify([gpt2.batch(8)])
    assert not certificate.passed
    assert certificate["gradients"].largest > 1
    assert set(victim.parameters) & {certificate["gradients"].where.split(",")[0]}
    assert "NOT OK  gradients" in str(certificate)
    assert "differs from" in certificate._repr_html_()


def test_one_batch_is_taken_for_a_list_of_it_and_the_other_way_round(gpt2: Case) -> None:
    with gpt2.trainer("one device", adamw(gpt2.model)) as trainer:
        batch = gpt2.batch(8)
        assert trainer.verify(batch).steps == 1
        assert trainer.evaluate([batch]) == trainer.evaluate(batch)
        with pytest.raises(HarmonyError, match="one minibatch was expected, got a list of 2"):
            trainer.evaluate([batch, batch])
        assert repr(trainer).startswith(f"<Trainer of {gpt2.layers!r} on 2 emulated: 2 devices")
        assert repr(trainer).endswith(f"step 0; {trainer.plan}>")


def test_a_machine_may_be_given_as_its_text_and_a_model_is_no_layers(gpt2: Case) -> None:
    found = search(gpt2.costs, "2x3090", 8, modes=("dp",), shown=1)
    assert found.best_trace.makespan_s == simulate(found.best, gpt2.costs, "2x3090").makespan_s
    assert estimate(gpt2.layers, "2x3090").device == estimate(gpt2.layers, "3090").device
    for use in (profile, estimate):
        with pytest.raises(HarmonyError, match=rf"{use.__name__} takes the layers of a model, got a GPT2.*decompose"):
            use(gpt2.model, "2x3090")
    with pytest.raises(HarmonyError, match="Trainer takes the layers of a model, got a GPT2"):
        Trainer(gpt2.model, adamw(gpt2.model), PLANS["dp"], "2x3090")  # type: ignore[arg-type]
    with pytest.raises(HarmonyError, match="search takes a Profile, or several, got a LayerSequence"):
        search(gpt2.layers, "2x3090", 8)  # type: ignore[arg-type]


def test_a_certificate_reads_well(gpt2: Case) -> None:
    with gpt2.trainer("pp", adamw(gpt2.model)) as trainer:
        certificate = trainer.verify([gpt2.batch(8)], tolerance=1e-3)
    assert isinstance(certificate, Certificate)
    assert "equals plain PyTorch in 1 step;" in str(certificate)
    assert certificate.to_json()["passed"] is True
    assert {row["what"]: row["tolerance"] for row in certificate.to_json()["differences"]}["buffers"] == 1e-3
    assert certificate._repr_html_().count("✓") == 5


def test_a_model_that_cannot_be_copied_is_refused_with_the_cure(gpt2: Case) -> None:
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    model = nn.Sequential(nn.Linear(8, 8), Uncopied(8, 1))
    layers = decompose(model, (torch.randn(2, 8), torch.randn(2, 1)), nn.MSELoss())
    plan = f"dp minibatch=2 forward=2[] backward=2[0:{len(layers)}] devices=0"
    with (
        Trainer(layers, torch.optim.SGD(model.parameters(), lr=0.1), plan, machine()) as trainer,
        pytest.raises(HarmonyError, match=r"Sequential cannot be copied .*no copies"),
    ):
        trainer.verify([(torch.randn(2, 8), torch.randn(2, 1))])
