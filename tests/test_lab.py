"""Lab: from profile to run on a small model, as notebook, script and command line use it."""

import _thread
import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp_batch
from torch import nn
from torch.nn.functional import cross_entropy

from harmony_lab.errors import HarmonyError, PlanDoesNotFitError, PlanError, TrainingError
from harmony_lab.lab import Lab, Preview
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Mode, Plan
from harmony_lab.run import RunStatus

MINIBATCH = 8
Batch = tuple[torch.Tensor, torch.Tensor]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    widths = [8, 64, 64, 64, 64, 5]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(*blocks)


def small_lab(model: nn.Module, *, memory: str = "256KiB", lr: float = 0.05) -> Lab:
    return Lab(
        model,
        mlp_batch(MINIBATCH),
        torch.optim.SGD(model.parameters(), lr=lr),
        loss_fn=cross_entropy,
        minibatch_size=MINIBATCH,
        machine=Machine.emulated(2, memory=memory),
    )


def batches(count: int) -> list[Batch]:
    return [mlp_batch(MINIBATCH, seed=seed) for seed in range(count)]


def plain_training(data: list[Batch], *, lr: float = 0.05) -> nn.Module:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in data:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Whatever a test does, its threads have ended with it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = small_lab(small_model())
    yield lab
    lab.close()


def test_prepare_profiles_searches_and_chooses_the_best_plan(lab: Lab) -> None:
    heard: list[str] = []
    lab.subscribe(heard.append)
    lab.prepare()
    assert lab.profile is not None
    assert lab.result is not None
    assert lab.plan == lab.result.best
    assert lab.predicted is not None
    assert lab.predicted.program.minibatch_size == MINIBATCH
    assert [event for event in heard if event != "progress"] == ["profile", "result", "plan"]
    assert "progress" in heard
    assert lab.progress is None


def test_a_lab_cuts_and_combines_losses_as_decompose_is_told_to() -> None:
    batch = torch.randn(MINIBATCH, 8), torch.randn(MINIBATCH, 5)
    given = {"minibatch_size": MINIBATCH, "machine": Machine.emulated(1), "loss_fn": lambda out, y: (out - y).std()}
    with pytest.raises(HarmonyError, match='loss_reduction="mean"'):
        Lab(small_model(), batch, **given)
    with Lab(small_model(), batch, **given, cut=["2", "4"], loss_reduction="mean") as lab:
        assert lab.layers.loss_reduction == "mean"
        assert [layer.name for layer in lab.layers.layers][1:] == ["2", "4"]


def test_prepare_does_nothing_twice(lab: Lab) -> None:
    lab.prepare()
    profile, result = lab.profile, lab.result
    lab.prepare()
    assert lab.profile is profile
    assert lab.result is result


def test_launched_run_trains_the_users_model_as_plain_pytorch_does() -> None:
    model, data = small_model(), batches(6)
    lab = small_lab(model)
    run = lab.launch(data, 6).wait(120)
    lab.close()
    assert run.status is RunStatus.FINISHED
    assert len(run.losses) == 6
    for trained, plain in zip(model.parameters(), plain_training(data).parameters(), strict=True):
        torch.testing.assert_close(trained, plain)


def test_after_a_run_parameters_have_their_own_storage() -> None:
    model = small_model()
    small_lab(model).launch(batches(2), 2).wait(120)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def test_smaller_last_batch_trains_and_is_noted() -> None:
    model, data = small_model(), [*batches(2), mlp_batch(3, seed=9)]
    run = small_lab(model).launch(data, 3).wait(120)
    assert any("a batch of 3 ran instead of 8" in note for note in run.notes)
    for trained, plain in zip(model.parameters(), plain_training(data).parameters(), strict=True):
        torch.testing.assert_close(trained, plain)


def test_measured_traffic_and_memory_are_as_predicted() -> None:
    lab = small_lab(small_model())
    run = lab.launch(batches(2), 2).wait(120)
    assert set(run.swap_bytes) == {run.predicted.swap_bytes}
    assert all(
        peak <= budget for peaks in run.peak_bytes for peak, budget in zip(peaks, lab.machine.budgets, strict=True)
    )
    used = {op.device for op in run.predicted.program.ops} - {HOST}  # so small a model may be best on one device
    assert all(peaks[device] > 0 for peaks in run.peak_bytes for device in used)


def test_only_one_run_at_a_time(lab: Lab) -> None:
    run = lab.launch(batches(1), 100_000)
    with pytest.raises(HarmonyError, match=r"run\.stop\(\)"):
        lab.launch(batches(1), 1)
    run.stop()
    assert run.status is RunStatus.STOPPED
    assert lab.launch(batches(1), 1).wait(120).status is RunStatus.FINISHED


def test_new_lab_over_the_same_model_stops_and_closes_the_older() -> None:
    model = small_model()
    older = small_lab(model)
    run = older.launch(batches(1), 100_000)
    newer = small_lab(model)
    assert run.status is RunStatus.STOPPED
    assert older.closed
    with pytest.raises(HarmonyError, match="newer Lab"):
        older.launch(batches(1), 1)
    assert newer.launch(batches(1), 1).wait(120).status is RunStatus.FINISHED
    newer.close()


def test_lab_and_model_are_freed_when_dropped() -> None:
    model = small_model()
    lab = small_lab(model)
    lab.launch(batches(1), 1).wait(120)
    lab.close()
    watched = [weakref.ref(lab), weakref.ref(model)]
    del lab, model
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_failing_launches_leave_memory_flat_and_the_model_usable() -> None:
    model = small_model()
    lab = small_lab(model).prepare()
    bad = (torch.zeros(MINIBATCH, 8), torch.full((MINIBATCH,), 99))
    alive = []
    for _ in range(6):
        with pytest.raises(TrainingError):
            lab.launch([bad], 2).wait(120)
        alive.append(live_tensors())
    assert len(set(alive[1:])) == 1
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert lab.launch(batches(1), 1).wait(120).status is RunStatus.FINISHED
    assert any(not torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
    lab.close()


def test_choose_takes_a_rank_and_predicts_it(lab: Lab) -> None:
    lab.prepare()
    assert lab.result is not None
    last = len(lab.result.candidates) - 1
    preview = lab.choose(last)
    assert preview.fits
    assert lab.plan == lab.result.candidates[last].plan
    assert preview.trace.makespan_s == pytest.approx(lab.result.candidates[last].step_s)
    with pytest.raises(HarmonyError, match="rank"):
        lab.choose(last + 1)


def test_packs_can_be_counted_anew(lab: Lab) -> None:
    lab.prepare()
    plan = lab.with_packs(num_backward_packs=2, num_forward_packs=1, mode=Mode.PP, backward_microbatch_size=4)
    assert (len(plan.backward_packs), len(plan.forward_packs)) == (2, 1)
    assert plan.mode is Mode.PP
    assert plan.backward_microbatch_size == 4
    assert lab.preview(plan).trace.makespan_s > 0
    one = lab.with_packs(num_backward_packs=1)
    assert one.forward_packs == ()
    most = lab.with_packs(num_backward_packs=10_000)
    assert len(most.backward_packs) == len(lab.layers)
    with pytest.raises(PlanError):
        lab.with_packs(backward_microbatch_size=0)


def test_plan_that_does_not_fit_is_previewed_and_refused_at_launch() -> None:
    lab = small_lab(small_model(), memory="64KiB")
    lab.prepare()
    preview = lab.choose(lab.with_packs(num_backward_packs=1))
    assert not preview.fits
    assert preview.problem is not None
    assert max(preview.trace.peak_bytes) > 64 * 1024
    with pytest.raises(PlanDoesNotFitError):
        lab.launch(batches(1), 1)
    lab.close()


def test_model_that_cannot_fit_is_refused_with_layer_and_bytes() -> None:
    lab = small_lab(small_model(), memory="8KiB")
    with pytest.raises(PlanDoesNotFitError, match=r"layer.*KiB"):
        lab.search()
    assert lab.plan is None
    lab.close()


def test_without_an_optimizer_a_lab_plans_but_does_not_train() -> None:
    lab = Lab(
        small_model(),
        mlp_batch(MINIBATCH),
        loss_fn=cross_entropy,
        minibatch_size=MINIBATCH,
        machine=Machine.emulated(1, memory="1MiB"),
    )
    assert lab.search().best.minibatch_size == MINIBATCH
    with pytest.raises(HarmonyError, match="no optimizer"):
        lab.launch(batches(1), 1)
    lab.close()


def test_an_optimizer_that_cannot_train_pack_by_pack_is_refused_at_once() -> None:
    model = small_model()
    with pytest.raises(HarmonyError, match="LBFGS cannot update a model pack by pack"):
        Lab(model, mlp_batch(8), torch.optim.LBFGS(model.parameters()), loss_fn=cross_entropy, minibatch_size=8)


def test_a_report_into_no_folder_is_refused_with_its_name(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(HarmonyError, match=r"there is no folder .*none; make it"):
        lab.report(tmp_path / "none" / "report.html")


def test_closed_lab_takes_no_work_and_says_so(lab: Lab) -> None:
    lab.close()
    with pytest.raises(HarmonyError, match="closed"):
        lab.measure()


def test_static_form_grows_with_the_work_done(lab: Lab) -> None:
    assert "<img" not in lab._repr_html_()
    assert "%load_ext harmony_lab" in lab._repr_html_()
    lab.prepare()
    planned = lab._repr_html_()
    assert "<img" in planned
    assert str(lab.plan) in planned.replace("&#x27;", "'")
    run = lab.launch(batches(2), 2).wait(120)
    assert "Loss" in lab._repr_html_()
    assert "<img" in run._repr_html_()


def test_report_is_one_page_that_loads_nothing(lab: Lab, tmp_path: Path) -> None:
    lab.launch(batches(2), 2).wait(120)
    page = lab.report(tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page


# -- one launch after another -------------------------------------------------------------------------------------


def dropout_lab(*, lr: float, first_step: int = 0) -> Lab:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 5))
    return Lab(
        model,
        mlp_batch(MINIBATCH),
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        loss_fn=cross_entropy,
        minibatch_size=MINIBATCH,
        machine=Machine.emulated(1),
        first_step=first_step,
    )


def test_a_lab_that_goes_on_draws_the_masks_that_would_have_come() -> None:
    with dropout_lab(lr=0.0) as whole, dropout_lab(lr=0.0, first_step=2) as later:
        losses = whole.launch(batches(1), 4).wait(120).losses
        assert later.launch(batches(1), 2).wait(120).losses == losses[2:]
        assert len(set(losses)) == later.steps_trained == 4


def test_steps_before_are_counted_from_none() -> None:
    with pytest.raises(HarmonyError, match="first_step must be a whole number of at least 0, got -1"):
        dropout_lab(lr=0.0, first_step=-1)


def test_a_second_launch_draws_other_masks() -> None:
    lab = dropout_lab(lr=0.0)
    first = lab.launch(batches(1), 2).wait(120).losses
    second = lab.launch(batches(1), 2).wait(120).losses
    assert len({*first, *second}) == 4
    assert lab.steps_trained == 4
    lab.close()


def test_training_in_three_launches_equals_one() -> None:
    data = batches(6)
    whole, parts = dropout_lab(lr=0.1), dropout_lab(lr=0.1)
    losses = whole.launch(data, 6).wait(120).losses
    found = [
        loss for at, stop in ((0, 2), (2, 3), (3, 6)) for loss in parts.launch(data[at:], stop - at).wait(120).losses
    ]
    assert found == pytest.approx(losses, rel=1e-6)
    for a, b in zip(parts.layers.model.parameters(), whole.layers.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    whole.close()
    parts.close()


def test_a_layer_frozen_between_two_launches_is_refused_not_trained(lab: Lab) -> None:
    lab.launch(batches(1), 1).wait(120)
    frozen = lab.layers.model[0][0].weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    with pytest.raises(HarmonyError, match=r"'0\.0\.weight' frozen.*new Lab"):
        lab.launch(batches(1), 1)
    assert torch.equal(frozen, before)


def test_a_lab_that_cannot_be_made_leaves_the_older_one_and_its_run_alone() -> None:
    model = small_model()
    lab = small_lab(model)
    run = lab.launch(batches(1), 100_000)
    for fault in ({"minibatch_size": 0}, {"example_batch": mlp_batch(MINIBATCH, features=7)}):
        given = {"example_batch": mlp_batch(MINIBATCH), "minibatch_size": MINIBATCH, **fault}
        with pytest.raises(Exception, match=r"minibatch_size|shape|size"):
            Lab(model, loss_fn=cross_entropy, machine=Machine.emulated(1), **given)
    assert run.active
    run.stop()
    assert not lab.closed
    assert lab.launch(batches(1), 1).wait(120).status is RunStatus.FINISHED
    lab.close()


def test_a_run_without_a_thread_has_failed_and_the_lab_goes_on(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            lab.launch(batches(1), 1)
    assert lab.run is not None
    assert lab.run.status is RunStatus.FAILED
    for parameter in lab.layers.model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert lab.launch(batches(1), 1).wait(120).status is RunStatus.FINISHED


def _no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_finished_run_keeps_what_it_recorded_but_neither_model_nor_data(lab: Lab) -> None:
    model = small_model()
    other = small_lab(model)
    data = iter(batches(2))
    run = other.launch(data, 2).wait(120)
    other.close()
    watched = [weakref.ref(other), weakref.ref(model), weakref.ref(other.layers)]
    del other, model
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]
    assert len(run.losses) == 2
    assert run.trace is not None


def test_a_plan_is_never_chosen_over_a_profile_that_was_replaced_meanwhile(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow look at a plan is under way when the model is measured again."""
    lab.prepare()
    plan = lab.plan
    assert plan is not None
    looking, measured = threading.Event(), threading.Event()
    look = lab.preview

    def slowly(given: Plan) -> Preview:
        looking.set()
        found = look(given)
        measured.wait(0.5)
        return found

    monkeypatch.setattr(lab, "preview", slowly)
    chooser = threading.Thread(target=lambda: lab.choose(plan))
    chooser.start()
    assert looking.wait(30)
    lab.measure()
    measured.set()
    chooser.join(30)
    assert lab.chosen is None


# -- training that does not go well -------------------------------------------------------------------------------


def assert_as_plain(model: nn.Module, plain: nn.Module) -> None:
    for trained, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert trained.untyped_storage().nbytes() == trained.nbytes
        torch.testing.assert_close(trained, expected, equal_nan=True)


def test_a_model_in_eval_mode_is_pointed_out_where_the_user_gave_it() -> None:
    with pytest.warns(UserWarning, match="is in eval mode") as warned:
        small_lab(small_model().eval()).close()
    assert [warning.filename for warning in warned] == [__file__]


def test_a_loss_that_is_not_a_number_trains_on_as_in_plain_pytorch() -> None:
    model = small_model()
    data = [*batches(1), (torch.full((MINIBATCH, 8), torch.nan), batches(1)[0][1]), *batches(1)]
    lab = small_lab(model)
    run = lab.launch(data, 3).wait(120)
    lab.close()
    assert [loss == loss for loss in run.losses] == [True, False, False]
    assert run.notes == ("the loss became nan in step 2; weights from there on may be of no use",)
    assert_as_plain(model, plain_training(data))


def test_one_batch_in_place_of_several_is_trained_on_again_and_again(lab: Lab) -> None:
    one = batches(1)[0]
    run = lab.launch(one, 3).wait(120)
    assert_as_plain(lab.layers.model, plain_training([one] * 3))
    assert len(run.losses) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (batches(1)[0][0], "the batch is a Tensor, expected a sequence of 2"),
        ((batches(1)[0][0].double(), batches(1)[0][1]), r"all as one: .* is torch.float64, expected torch.float32"),
        ([(1, 2)], r"the batch\[0\] is a int, expected a tensor"),
        (7, "the batch is a int"),
    ],
)
def test_what_holds_no_batch_is_refused_before_anything_is_made_ready(lab: Lab, data: Any, message: str) -> None:
    with pytest.raises(HarmonyError, match=f"or one were expected.*{message}"):
        lab.launch(data, 3)
    assert lab.run is None


def test_data_that_fails_leaves_the_weights_of_the_step_before() -> None:
    def failing() -> Iterator[Batch]:
        yield from batches(2)
        raise OSError("the disk is gone")

    model = small_model()
    lab = small_lab(model)
    with pytest.raises(TrainingError, match="step 3 of 9: OSError: the disk is gone"):
        lab.launch(failing(), 9).wait(120)
    lab.close()
    assert_as_plain(model, plain_training(batches(2)))


def test_an_interrupt_stops_after_a_whole_step() -> None:
    model, data = small_model(), batches(1)
    lab = small_lab(model).prepare()
    run = lab.launch(data, 100_000)
    run.subscribe(lambda event: _thread.interrupt_main() if len(run.losses) == 3 else None)
    with pytest.raises(KeyboardInterrupt):
        run.wait(120)
    assert run.status is RunStatus.STOPPED
    lab.close()
    assert_as_plain(model, plain_training(data * len(run.losses)))


def test_sparse_embeddings_train_as_in_plain_pytorch() -> None:
    """Gradients are dense here; the optimizer computes the same with them."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 5))

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    ours, plain = model(), model()
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(20, (MINIBATCH, 3), generator=generator), torch.randint(5, (MINIBATCH,), generator=generator)
    lab = Lab(ours, batch, sgd(ours), loss_fn=cross_entropy, minibatch_size=MINIBATCH, machine=Machine.emulated(2))
    lab.launch([batch], 3).wait(120)
    lab.close()
    optimizer = sgd(plain)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(plain(batch[0]), batch[1]).backward()
        optimizer.step()
    assert_as_plain(ours, plain)


def test_a_plan_may_be_given_as_its_text() -> None:
    lab = small_lab(small_model())
    lab.prepare()
    assert lab.plan is not None
    text = str(lab.plan.with_(prefetch=0))
    assert lab.choose(text).plan == Plan.parse(text)
    lab.close()


# -- machines that are not at hand --------------------------------------------------------------------------------


def test_a_machine_that_is_not_at_hand_is_estimated_and_planned_for() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = mlp_batch(MINIBATCH)
    with Lab(model, data, optimizer, loss_fn=cross_entropy, minibatch_size=MINIBATCH, machine="4x1080ti") as lab:
        assert lab.machine == Machine.preset("4x1080ti")
        assert "4x1080ti is not at hand" in lab.only_planned
        lab.prepare()
        assert lab.profile is not None
        assert "estimated" in lab.profile.device
        assert lab.forecast().available_bytes == lab.machine.host.memory_bytes
        with pytest.raises(HarmonyError, match=r"this Lab cannot train\. 4x1080ti is not at hand"):
            lab.launch([data], 1)
        assert "not at hand" in lab._repr_html_()


class MeanOfSquares(nn.Module):
    """Its forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def test_a_model_without_data_is_planned_for_on_any_machine_with_gpus() -> None:
    with torch.device("meta"):
        model = MeanOfSquares()
    with Lab(model, torch.zeros(4, 8), minibatch_size=4, machine="2x4090") as lab:
        assert "on the meta device" in lab.only_planned
        assert lab.prepare().plan is not None


def test_machines_here_are_measured(lab: Lab) -> None:
    assert not lab.only_planned
    assert "estimated" not in lab.measure().device


def test_measuring_again_goes_past_the_cache(lab: Lab) -> None:
    lab.measure()
    assert lab.measure().cached
    assert not lab.measure(cache=False).cached


def test_labs_are_made_on_several_threads_at_once() -> None:
    """torch.export keeps what it does in globals."""
    labs: list[Lab] = []
    threads = [threading.Thread(target=lambda: labs.append(new_tangled_lab())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(labs) == len(threads)
    for lab in labs:
        lab.close()


class Tangled(torch.nn.Module):
    """Needs to be exported: no chain of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return ((x - y) ** 2).mean()


def new_tangled_lab() -> Lab:
    model = Tangled()
    machine = Machine.emulated(1, memory="1MiB", link="1GB/s")
    batch = (torch.randn(4, 16), torch.randn(4, 16))
    return Lab(model, batch, torch.optim.SGD(model.parameters(), lr=0.1), minibatch_size=4, machine=machine)
