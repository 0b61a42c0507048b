"""Updates that a step leaves for the next one: training is that of plain PyTorch, whatever comes between."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from plain_training import breaking
from torch import Tensor, nn

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, StepCancelledError, TrainingError
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.program import OpKind
from harmony_lab.run import Run
from harmony_lab.runtime.host import HostStore
from harmony_lab.runtime.shadows import Shadows
from harmony_lab.runtime.workers import Workers
from harmony_lab.schedules import Schedules
from harmony_lab.step_record import StepRecord
from harmony_lab.trainer import Trainer

MACHINE = Machine.emulated(2, memory="1MiB", link=1e12)
PLANS = {
    "dp": "dp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0,1 update=next",
    "dp through the host": "dp minibatch=8 forward=2[0:1,1:3] backward=2[0:2,2:3,3:4] devices=0,1 peer=off update=next",
    "pp": "pp minibatch=8 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0,1 update=next",
}
NUM_MINIBATCHES = (1, 2, 1, 3, 2)  # of steps that follow each other
Batch = tuple[Tensor, Tensor]
PROFILES: dict[object, Profile] = {}


class Tied(nn.Module):
    """The first and the last layer are one parameter; the third has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.middle(self.first(x))))
        return result


class Linears(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 6))


class Frozen(Linears):
    def __init__(self) -> None:
        super().__init__()
        self[1].requires_grad_(False)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 6, generator=generator).unbind()) for _ in range(count)]


def steps() -> list[list[Batch]]:
    """The minibatches of each step."""
    remaining = iter(batches(sum(NUM_MINIBATCHES)))
    return [list(itertools.islice(remaining, count)) for count in NUM_MINIBATCHES]


def joined(minibatches: list[Batch]) -> Batch:
    inputs, targets = (torch.cat(parts) for parts in zip(*minibatches, strict=True))
    return inputs, targets


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def made(
    kind: Callable[[], nn.Module], plan: str, *, before: Callable[[], None] | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Trainer]:
    """``before``: called before the second layer runs."""
    torch.manual_seed(0)
    model = kind()
    optimizer = adamw(model)
    layers = decompose(model, batches(1)[0], nn.MSELoss(), cut=[name for name, _ in model.named_children()])
    precision = Plan.parse(plan).precision
    if (kind, precision) not in PROFILES:
        PROFILES[kind, precision] = profile(
            layers, MACHINE, optimizer, precision=precision, microbatch_sizes=(2,), trials=1
        )
    if before is not None:
        layers = breaking(layers, 1, before)
    costs = PROFILES[kind, precision]
    return model, optimizer, Trainer(layers, optimizer, plan, MACHINE, profile=costs, **options)


def plain(model: nn.Module, data: list[Batch], limit: float) -> tuple[list[Tensor], list[float]]:
    """What plain PyTorch makes of it, with microbatches of all samples: for models without statistics."""
    optimizer = adamw(model)
    scheduler = decaying(optimizer)
    norms = []
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        scheduler.step()
    return list(model.parameters()), norms


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("chaos_seed", [None, 1])
def test_clipped_training_with_a_scheduler_is_that_of_plain_pytorch(plan: str, chaos_seed: int | None) -> None:
    model, optimizer, trainer = made(Linears, PLANS[plan], max_grad_norm=0.2, chaos_seed=chaos_seed)
    expected, norms = plain(copy.deepcopy(model), [joined(minibatches) for minibatches in steps()], 0.2)
    assert max(norms) > 0.2
    with trainer:
        scheduler = decaying(optimizer)
        for minibatches, norm in zip(steps(), norms, strict=True):
            trainer.accumulate(minibatches, leave_updates=True)
            scheduler.step()
            assert trainer.last_norm == pytest.approx(norm, rel=1e-4)
        trainer.finish()
        torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-4, atol=1e-6)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 2**5)
    torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chaos_seed", range(2))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_leaving_updates_changes_no_bit_of_tied_parameters_statistics_and_state(
    chaos_seed: int, precision: str
) -> None:
    found = []
    for leaves in (False, True):
        model, optimizer, trainer = made(
            Tied, f"{PLANS['pp']} precision={precision}", max_grad_norm=(0.2, None)[chaos_seed], chaos_seed=chaos_seed
        )
        with trainer:
            losses = [trainer.accumulate(minibatches, leave_updates=leaves) for minibatches in steps()]
            assert trainer.plan.overlapped_update
        found.append((losses, model.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_a_step_leaves_is_in_its_trace_as_predicted() -> None:
    _, _, trainer = made(Linears, PLANS["pp"], max_grad_norm=0.2)
    with trainer:
        for batch in batches(2):
            trainer.step(batch, leave_updates=True)
        assert trainer.last_trace is not None
        assert trainer.last_trace.program == trainer.predicted.program
        assert "(update=next)" in trainer.notes[0]
        trainer.step(batches(1)[0])
        assert trainer.last_trace.program.ops[-1].kind is OpKind.UPDATE


class Reference:
    """The same in plain PyTorch, a step at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = adamw(self.model)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.2)
        self.optimizer.step()

    def assert_equal(self, model: nn.Module) -> None:
        torch.testing.assert_close(list(model.parameters()), list(self.model.parameters()), rtol=1e-4, atol=1e-6)


def test_a_step_that_fails_makes_the_updates_left_to_it_and_training_goes_on() -> None:
    model, _, trainer = made(Linears, PLANS["dp"], max_grad_norm=0.2, stop_on_nan=True)
    reference, data = Reference(model), batches(3)
    with trainer:
        for batch in data[:2]:
            trainer.step(batch, leave_updates=True)
            reference.step(batch)
        with pytest.raises(TrainingError, match="No weights were updated"):
            trainer.step((data[2][0], torch.full((8, 6), torch.nan)), leave_updates=True)
        reference.assert_equal(model)
        assert trainer.step_count == 2
        trainer.step(data[2], leave_updates=True)
        reference.step(data[2])
        trainer.step(data[0])  # makes those first, then its own
        reference.step(data[0])
        reference.assert_equal(model)


@pytest.mark.parametrize("ends", [TrainingError, StepCancelledError, KeyboardInterrupt])
def test_several_minibatches_that_end_half_way_make_the_updates_left_to_them_and_put_statistics_back(
    ends: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = steps()[1:4]
    broken = [second[0], (second[0][0], torch.full((8, 6), torch.nan))] if ends is TrainingError else [*second, *first]
    run, found, cancels = Workers.run, [], iter([ends is StepCancelledError])

    def interrupted(workers: Workers, *arguments: Any) -> None:
        run(workers, *arguments)
        raise KeyboardInterrupt  # when the first minibatch is done

    def cancel_second() -> None:
        if trainer.step_count == 1 and trainer.last_trace is not before and next(cancels, False):
            assert trainer.cancel()

    for disturbs in (False, True):
        model, optimizer, trainer = made(
            Tied, PLANS["pp"], max_grad_norm=0.2, stop_on_nan=True, before=cancel_second if disturbs else None
        )
        with trainer:
            trainer.accumulate(first, leave_updates=disturbs)
            before = trainer.last_trace
            if disturbs:
                monkeypatch.setattr(Workers, "run", interrupted if ends is KeyboardInterrupt else run)
                with pytest.raises(ends):
                    trainer.accumulate(broken, leave_updates=True)
                monkeypatch.undo()
            found.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])))
            assert trainer.step_count == 1
            trainer.accumulate(third, leave_updates=disturbs)
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(found[2:], found[:2], rtol=0, atol=0)


def test_a_step_that_is_refused_or_cannot_begin_leaves_weights_current(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> None:
        raise MemoryError

    def refuses(*arguments: Any, **options: Any) -> None:
        raise HarmonyError("no room")

    model, _, trainer = made(Linears, PLANS["pp"], max_grad_norm=0.2)
    reference, data = Reference(model), batches(3)
    with trainer:
        trainer.step(data[0], leave_updates=True)
        reference.step(data[0])
        with pytest.raises(HarmonyError, match="does not fit"):
            trainer.step((torch.randn(8, 5), data[0][1]), leave_updates=True)
        reference.assert_equal(model)
        trainer.step(data[1], leave_updates=True)
        reference.step(data[1])
        monkeypatch.setattr(Schedules, "require_memory", refuses)
        with pytest.raises(HarmonyError, match="no room"):
            trainer.accumulate(data, leave_updates=True)
        reference.assert_equal(model)
        trainer.step(data[2], leave_updates=True)
        reference.step(data[2])
        monkeypatch.setattr(HostStore, "reading", breaks)
        with pytest.raises(MemoryError):
            trainer.step(data[0], leave_updates=True)
        reference.assert_equal(model)


def test_an_update_that_fails_holds_up_no_pack_that_comes_in_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pack is frozen, so it waits for no update."""
    packs = "forward=2[0:1,1:2] backward=2[0:1,1:2,2:4]"
    _, optimizer, trainer = made(Frozen, f"pp minibatch=8 {packs} devices=0,1 precision=bf16 update=next")
    step, wait_for, waits = optimizer.step, Shadows.wait_for, threading.Event()

    def breaks() -> None:
        assert waits.wait(60)
        raise OSError("disk full")

    def told(shadows: Shadows, names: Iterable[str]) -> None:
        waits.set()  # by the second device, for its first pack
        wait_for(shadows, names)

    with trainer:
        trainer.step(batches(1)[0], leave_updates=True)
        monkeypatch.setattr(optimizer, "step", breaks)
        monkeypatch.setattr(Shadows, "wait_for", told)
        with pytest.raises(TrainingError, match="disk full"):
            trainer.step(batches(1)[0], leave_updates=True)
        monkeypatch.setattr(optimizer, "step", step)


def test_an_update_that_fails_keeps_no_other_from_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, trainer = made(Linears, PLANS["pp"], max_grad_norm=0.2)
    reference, data = Reference(model), batches(2)
    first, step = next(model.parameters()), optimizer.step

    def breaks() -> None:
        if first.grad is not None:
            raise OSError("disk full")
        step()

    with trainer:
        trainer.step(data[0], leave_updates=True)
        reference.step(data[0])
        monkeypatch.setattr(optimizer, "step", breaks)
        with pytest.raises(TrainingError, match="disk full\nOf the step before, the update of layers 0:2 may be incom"):
            trainer.finish()
        monkeypatch.undo()
        others = [list(one.parameters())[4:] for one in (model, reference.model)]  # of layers 2:4
        torch.testing.assert_close(*others, rtol=1e-4, atol=1e-6)
        model.load_state_dict(reference.model.state_dict())
        trainer.step(data[1], leave_updates=True)  # by other moments, for those that failed
        monkeypatch.setattr(optimizer, "step", breaks)
        with pytest.raises(TrainingError, match="layers 0:2 may be incomplete; the others are made"):
            trainer.step(data[1], leave_updates=True)
        monkeypatch.undo()
        assert trainer.step_count == 2


def test_an_interrupt_that_comes_when_all_is_done_loses_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, trainer = made(Linears, PLANS["pp"], max_grad_norm=0.2)
    reference, data = Reference(model), batches(3)
    run = Workers.run

    def interrupted(workers: Workers, *arguments: Any) -> None:
        run(workers, *arguments)
        raise KeyboardInterrupt

    with trainer:
        for number, batch in enumerate(data):
            reference.step(batch)
            if number != 1:
                trainer.step(batch, leave_updates=True)
                continue
            monkeypatch.setattr(Workers, "run", interrupted)
            with pytest.raises(KeyboardInterrupt) as caught:
                trainer.step(batch, leave_updates=True)
            monkeypatch.undo()
            assert caught.value.__notes__ == ["All of this step was done, its updates are made."]
            assert trainer.step_count == number + 1
            reference.assert_equal(model)
    reference.assert_equal(model)


def test_a_cancelled_step_makes_the_updates_left_to_it() -> None:
    def cancel_third() -> None:
        if trainer.step_count == 2:
            assert trainer.cancel()

    model, _, trainer = made(Linears, PLANS["pp"], max_grad_norm=0.2, before=cancel_third)
    reference, data = Reference(model), batches(3)
    with trainer:
        for batch in data[:2]:
            trainer.step(batch, leave_updates=True)
            reference.step(batch)
        with pytest.raises(StepCancelledError):
            trainer.step(data[2], leave_updates=True)
        reference.assert_equal(model)
        assert trainer.evaluate(data[2]) == pytest.approx(
            nn.functional.mse_loss(reference.model(data[2][0]), data[2][1]).item(), rel=1e-5
        )


def test_whoever_looks_at_weights_after_every_step_sees_those_of_that_step() -> None:
    model, _, trainer = made(Linears, PLANS["dp"], max_grad_norm=0.2)
    reference, data, records = Reference(model), batches(3), []

    def look(record: StepRecord) -> None:
        reference.assert_equal(model)
        records.append(record)

    def fail(record: StepRecord) -> None:
        raise ConnectionError("no server")

    with trainer:
        remove = trainer.on_step(look)
        for batch in data[:2]:
            reference.step(batch)
            trainer.step(batch, leave_updates=True)
        assert [record.step for record in records] == [1, 2]
        assert records[1].trace is trainer.last_trace
        assert records[1].num_samples == 8
        remove()
        remove_failing = trainer.on_step(fail)
        with pytest.raises(ConnectionError, match="no server"):
            trainer.step(data[2])
        remove_failing()
        reference.step(data[2])
        reference.assert_equal(model)
        assert len(records) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_paused_run_has_made_all_updates(count: int) -> None:
    model, _, trainer = made(Linears, PLANS["pp"], max_grad_norm=0.2)
    reference, data = Reference(model), batches(4)
    third, go_on = threading.Event(), threading.Event()

    def loader() -> Iterator[Batch]:
        for number in itertools.count():
            if number == 2:
                third.set()
            if number > 2:
                go_on.wait(0.1)  # so that few steps are taken until it is paused
            yield data[number % len(data)]

    run = Run(trainer, trainer.plan, loader(), 10_000, num_samples=lambda batch: len(batch[0]), accumulate=count)
    run.start()
    assert third.wait(60)
    run.pause()
    go_on.set()
    weights = copy.deepcopy(model)
    for number in range(len(run.losses)):
        minibatches = [data[(number * count + part) % len(data)] for part in range(count)]
        reference.step(joined(minibatches))
    run.stop()
    reference.assert_equal(weights)
    reference.assert_equal(model)
