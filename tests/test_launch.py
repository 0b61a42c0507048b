"""What a Lab trains with: clipping, several minibatches per step, logging, verification, evaluation."""

import copy
import math
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import models
import pytest
import torch

from harmony_lab.errors import HarmonyError, TrainingError
from harmony_lab.lab import Lab
from harmony_lab.machine import Machine
from harmony_lab.run import RunStatus, StepRecord

MACHINE = Machine.emulated(2, memory="64MiB", link="1e12")
PLAN = "pp minibatch=4 forward=2[0:1,1:2] backward=2[0:2,2:4] devices=0,1"
BATCHES = [models.gpt2_batch(4, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    model = models.gpt2(layers=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    with Lab(model, BATCHES[0], optimizer, minibatch_size=4, machine=MACHINE) as made:
        made.choose(PLAN)
        yield made


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """With the model, the optimizer and the plan as they were at first."""
    model = copy.deepcopy(shared.layers.model.state_dict())
    optimizer = copy.deepcopy(shared.optimizer.state_dict()) if shared.optimizer else {}
    yield shared
    shared.layers.model.load_state_dict(model)
    assert shared.optimizer is not None
    shared.optimizer.load_state_dict(optimizer)
    shared.choose(PLAN)


def test_the_plan_that_was_chosen_without_a_search_is_launched(lab: Lab) -> None:
    assert lab.result is None
    assert str(lab.launch(BATCHES, 1).wait(60).plan).startswith(PLAN)
    assert lab.result is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 2.5}, r"steps must be a whole number of at least 1, got 2\.5"),
        ({"record_every": 0}, "record_every must be a whole number of at least 1, got 0"),
        ({"accumulate": 1.5}, r"accumulate must be a whole number of at least 1, got 1\.5"),
        ({"accumulate": True}, "accumulate must be a whole number of at least 1, got True"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a number above 0, or None to clip nothing, got '1'"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a number above 0, .* got nan"),
        ({"on_step": 3}, "on_step must be a function of a StepRecord, or None, got 3"),
    ],
)
def test_what_a_run_cannot_be_asked_for_is_refused_before_it_begins(
    lab: Lab, given: dict[str, Any], message: str
) -> None:
    before = lab.run
    with pytest.raises(HarmonyError, match=message):
        lab.launch(BATCHES, **{"steps": 3, **given})
    assert lab.run is before


def test_a_clipped_run_equals_plain_pytorch_and_tells_its_norms(lab: Lab) -> None:
    plain = copy.deepcopy(lab.layers.model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-5)
    records: list[StepRecord] = []
    run = lab.launch(BATCHES, 3, max_grad_norm=0.2, on_step=records.append).wait(60)
    norms = []
    for batch in BATCHES[:3]:
        theirs.zero_grad()
        plain(**batch, use_cache=False).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2).item())
        theirs.step()
    assert run.grad_norms == pytest.approx(norms, rel=1e-4)
    assert [record.grad_norm for record in records] == list(run.grad_norms)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(lab.layers.model.state_dict()[name], value, rtol=1e-4, atol=2e-6)


def test_a_paused_run_has_the_weights_of_the_steps_it_counts(lab: Lab) -> None:
    plain = copy.deepcopy(lab.layers.model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-5)
    second = threading.Event()

    def data() -> Iterator[object]:
        for number in count():
            if number == 1:
                second.set()
            yield BATCHES[number % len(BATCHES)]

    run = lab.launch(data(), 1000)
    assert second.wait(60)
    run.pause()
    assert run.status is RunStatus.PAUSED
    weights = copy.deepcopy(lab.layers.model.state_dict())
    assert len(run.losses) >= 2, "a pause holds when the step under way is done"
    run.stop()
    for number in range(len(run.losses)):
        theirs.zero_grad()
        plain(**BATCHES[number % len(BATCHES)], use_cache=False).loss.backward()
        theirs.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-6 * len(run.losses))


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({}, "updates come beside the next iteration's forward"),
        ({"accumulate": 2}, "updates come beside the next iteration's forward"),
        ({"on_step": print}, "updates come at the end"),
    ],
)
def test_a_clipped_run_says_when_updates_come_and_its_traces_can_be_compared(
    lab: Lab, options: dict[str, Any], when: str
) -> None:
    run = lab.launch(BATCHES, 3, max_grad_norm=1.0, **options).wait(60)
    assert when in run.notes[0]
    assert not run.plan.just_in_time_update
    assert lab.plan == run.plan
    assert run.trace is not None
    assert run.trace.program == run.predicted.program


def test_a_run_of_several_minibatches_per_step_is_that_of_larger_ones(lab: Lab) -> None:
    plain = copy.deepcopy(lab.layers.model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-5)
    run = lab.launch(BATCHES, 2, accumulate=2).wait(60)
    losses = []
    for pair in (BATCHES[:2], BATCHES[2:]):
        theirs.zero_grad()
        loss = plain(**{name: torch.cat([batch[name] for batch in pair]) for name in pair[0]}, use_cache=False).loss
        loss.backward()
        theirs.step()
        losses.append(loss.item())
    assert run.losses == pytest.approx(losses, rel=1e-5)


def test_a_run_that_stops_on_a_loss_that_is_not_finite_leaves_the_weights_before_it(lab: Lab) -> None:
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        yield BATCHES[0]
        with torch.no_grad():  # between two steps
            for parameter in lab.layers.model.parameters():
                parameter.mul_(math.nan)
        yield BATCHES[1]

    run = lab.launch(batches(), 2, stop_on_nan=True)
    with pytest.raises(TrainingError, match="is nan\nNo weights were updated"):
        run.wait(60)
    assert run.status is RunStatus.FAILED
    assert len(run.losses) == 1


def test_verifying_and_evaluating_leave_model_and_steps_as_they_were(lab: Lab) -> None:
    before = {name: value.clone() for name, value in lab.layers.model.state_dict().items()}
    steps = lab.steps_trained
    certificate = lab.verify(BATCHES[:2])
    assert certificate.passed, certificate
    assert certificate.steps == 2
    mirror = copy.deepcopy(lab.layers.model).eval()
    with torch.no_grad():
        expected = mirror(**BATCHES[3], use_cache=False).loss.item()
    assert lab.evaluate(BATCHES[3]) == pytest.approx(expected, rel=1e-6)
    assert lab.steps_trained == steps
    assert all(torch.equal(value, before[name]) for name, value in lab.layers.model.state_dict().items())
    owners = [parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in lab.layers.model.parameters()]
    assert all(owners)


def test_without_an_optimizer_there_is_nothing_to_verify() -> None:
    model = models.gpt2(layers=2, dropout=0.0)
    with Lab(model, BATCHES[0], minibatch_size=4, machine=MACHINE) as lab:
        with pytest.raises(HarmonyError, match="has no optimizer"):
            lab.verify(BATCHES[:1])
        with pytest.raises(HarmonyError, match="has no optimizer"):
            lab.forecast()
