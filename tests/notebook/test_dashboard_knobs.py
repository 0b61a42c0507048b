"""Knobs of the dashboard: packs cut by hand, undo, files, and what each knob is said to do."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import harmony_lab as hl
from harmony_lab.figures.comparison import change
from harmony_lab.figures.timeline import timeline_spec
from harmony_lab.notebook.dashboard import Dashboard
from harmony_lab.notebook.knobs import Knobs, Updates, devices_text
from harmony_lab.notebook.plot import Plot

PATIENCE_S = 60


@pytest.fixture
def dashboard(lab: hl.Lab, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.chdir(tmp_path)
    lab.prepare()
    lab.choose("pp minibatch=8 forward=4[0:1,1:3] backward=2[0:1,1:3,3:5] devices=0,1")
    shown = Dashboard(lab, namespace=dict)
    yield shown
    shown.close()
    assert shown.settle_effects(PATIENCE_S)


def settled(dashboard: Dashboard) -> hl.Plan:
    assert dashboard.settle(PATIENCE_S)
    return dashboard.lab.plan


def bounds(packs: Any) -> list[tuple[int, int]]:
    return [tuple(pack) for pack in packs]


def test_a_cut_dragged_on_the_strip_changes_the_packs_alone(dashboard):
    before = dashboard.lab.plan
    assert dashboard.knobs.strip.backward == [1, 3]
    dashboard.knobs.strip.backward = [2, 3]  # as the page does
    plan = settled(dashboard)
    assert bounds(plan.backward_packs) == [(0, 2), (2, 3), (3, 5)]
    assert plan.with_(backward_packs=before.backward_packs) == before
    assert dashboard.knobs.cuts["backward"].value == "2, 3"


def test_forward_packs_end_where_the_fused_pack_starts(dashboard):
    dashboard.knobs.strip.backward = [1, 4]
    assert bounds(settled(dashboard).forward_packs) == [(0, 1), (1, 4)]
    dashboard.knobs.strip.backward = [1]
    assert bounds(settled(dashboard).forward_packs) == [(0, 1)]
    assert dashboard.knobs.strip.forward == []


def test_typed_cuts_are_taken_and_impossible_ones_explained(dashboard):
    dashboard.knobs.cuts["backward"].value = "every 2"
    assert bounds(settled(dashboard).backward_packs) == [(0, 2), (2, 4), (4, 5)]
    dashboard.knobs.cuts["forward"].value = "1 7"
    settled(dashboard)
    assert "no pack can start before layer 7: layers 1 to 3 can start one" in dashboard.knobs.message.value
    dashboard.knobs.cuts["forward"].value = "one"
    settled(dashboard)
    assert "like &#x27;2, 4, 6&#x27;" in dashboard.knobs.message.value


def test_knobs_after_a_cut_keep_it(dashboard):
    dashboard.knobs.strip.backward = [2, 3]
    settled(dashboard)
    dashboard.knobs.controls["prefetch"].value = 0
    plan = settled(dashboard)
    assert plan.prefetch == 0
    assert bounds(plan.backward_packs) == [(0, 2), (2, 3), (3, 5)]


def test_undo_goes_back_step_by_step_also_to_another_candidate(dashboard):
    assert dashboard.knobs.undo.disabled
    first = dashboard.lab.plan
    dashboard.table.selected = 1
    second = settled(dashboard)
    dashboard.knobs.controls["prefetch"].value = 1 - min(1, second.prefetch)
    third = settled(dashboard)
    assert len({first, second, third}) == 3
    dashboard.knobs.undo.click()
    assert settled(dashboard) == second
    assert "against candidate 1" in dashboard.figures.value
    dashboard.knobs.undo.click()
    assert settled(dashboard) == first
    assert dashboard.knobs.undo.disabled


def test_a_refused_knob_leaves_the_others_alone_and_undo_takes_it_back_first(dashboard):
    first, order = dashboard.lab.plan, dashboard.knobs.controls["devices"]
    dashboard.knobs.controls["prefetch"].value = 1 - min(1, first.prefetch)
    second = settled(dashboard)
    order.value = "0, 5"
    assert settled(dashboard) == second
    assert "harmony-error" in dashboard.knobs.message.value
    dashboard.knobs.undo.click()
    assert settled(dashboard) == second
    assert (order.value, dashboard.knobs.message.value) == ("0, 1", "")
    order.value = "0, 5"
    settled(dashboard)
    dashboard.knobs.controls["backward_microbatch_size"].value = 1
    third = settled(dashboard)
    assert (third.backward_microbatch_size, third.devices) == (1, second.devices)
    assert order.value == "0, 1"
    for plan in (second, first):
        dashboard.knobs.undo.click()
        assert settled(dashboard) == plan


def test_a_refused_plan_is_not_what_knobs_are_turned_from(dashboard):
    before = dashboard.lab.plan
    dashboard.knobs.text.value = "dp minibatch=8 forward=4[] backward=4[0:99] devices=0"
    assert settled(dashboard) == before
    dashboard.knobs.controls["backward_microbatch_size"].value = 1
    assert settled(dashboard) == before.with_(backward_microbatch_size=1)


def test_minibatch_and_order_of_devices_are_knobs(dashboard):
    dashboard.knobs.controls["devices"].value = "1, 0"
    assert settled(dashboard).devices == (1, 0)
    dashboard.knobs.controls["minibatch_size"].value = 2
    plan = settled(dashboard)
    assert (plan.minibatch_size, plan.forward_microbatch_size) == (2, 2)
    dashboard.knobs.controls["devices"].value = "first"
    settled(dashboard)
    assert "like &#x27;0, 1&#x27;" in dashboard.knobs.message.value


def test_a_knob_whose_turn_changes_the_choices_of_others_is_one_turn(dashboard):
    events: list[str] = []
    dashboard.lab.subscribe(events.append)
    sizes = dashboard.knobs.controls["forward_microbatch_size"].options
    dashboard.knobs.controls["minibatch_size"].value = 2
    settled(dashboard)
    assert dashboard.knobs.controls["forward_microbatch_size"].options != sizes
    assert settled(dashboard).forward_microbatch_size == 2
    assert events.count("plan") == 1


@pytest.mark.parametrize("name", ["my plan.txt", "plan.json"])
def test_a_plan_is_saved_and_loaded(dashboard, tmp_path, name):
    kept = dashboard.lab.plan
    dashboard.knobs.file.name.value = name
    dashboard.knobs.file.save.click()
    assert (tmp_path / name).exists()
    dashboard.table.selected = 0
    assert settled(dashboard) != kept
    dashboard.knobs.file.load.click()
    assert settled(dashboard) == kept


def test_a_file_without_a_plan_is_explained(dashboard, tmp_path):
    (tmp_path / "plan.txt").write_text("buy milk")
    dashboard.knobs.file.load.click()
    assert "this is not a plan" in dashboard.knobs.message.value
    (tmp_path / "plan.json").write_text("{")
    for name in ("plan.json", "nowhere.txt"):
        dashboard.knobs.file.name.value = name
        dashboard.knobs.file.load.click()
        assert name in dashboard.knobs.message.value


def test_every_knob_says_what_it_does(dashboard):
    lab = dashboard.lab
    reference = lab.chosen
    dashboard.knobs.controls["backward_microbatch_size"].value = 1
    plan = settled(dashboard)
    assert dashboard.settle_effects(PATIENCE_S)
    texts = {name: effect.value.replace("&nbsp;", " ") for name, effect in dashboard.knobs.effects.items()}
    assert {name for name in texts if not texts[name]} <= {"num_stashed", "num_resident_packs", "num_kept_packs"}
    step = change(lab.predicted.makespan_s, reference.trace.makespan_s)[0]
    assert f"instead of 2: step {step}" in texts["backward_microbatch_size"]  # what was turned: against before
    with_none = lab.preview(plan.with_(prefetch=0)).trace.makespan_s
    other = change(with_none, lab.predicted.makespan_s)[0]
    assert f"with 0: step {other}" in texts["prefetch"]  # what was not: what turning it would do
    assert "with data parallel" in texts["mode"]
    assert "per sample" in texts["minibatch_size"]


def test_another_precision_is_profiled_when_it_is_turned_to(dashboard):
    assert dashboard.settle_effects(PATIENCE_S)
    precision, effect = dashboard.knobs.controls["precision"], dashboard.knobs.effects["precision"]
    assert "with bf16: layers are profiled in it first" in effect.value
    precision.value = "bf16"
    assert settled(dashboard).precision == "bf16"
    assert dashboard.lab.profile.precision == "bf16"
    assert dashboard.progress.layout.display == "none"
    assert "in fp32 and bf16" in dashboard.header.value
    assert dashboard.settle_effects(PATIENCE_S)
    assert "instead of fp32: step " in effect.value
    precision.value = "fp32"
    assert settled(dashboard).precision == "fp32"
    assert dashboard.settle_effects(PATIENCE_S)
    assert "with bf16: step " in effect.value


def test_the_forecast_follows_the_steps(dashboard):
    assert dashboard.settle_effects(PATIENCE_S)
    dashboard.launcher.steps.value = 7
    assert "7 steps take" in dashboard.launcher.expected.value
    assert "100 KiB" in dashboard.launcher.expected.value  # of each device


def at_once(tasks: Sequence[Callable[[], Any]]) -> None:
    """Each on a thread of its own, as a kernel may run callbacks."""
    start, errors = threading.Barrier(len(tasks)), []

    def run(task: Callable[[], Any]) -> None:
        start.wait(PATIENCE_S)
        try:
            task()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []


def shown_knobs(dashboard: Dashboard) -> dict[str, Any]:
    return {name: control.value for name, control in dashboard.knobs.controls.items()}


def knobs_of(plan: hl.Plan) -> dict[str, Any]:
    knobs = {name: getattr(Knobs.of(plan), name) for name in Knobs.__dataclass_fields__}
    return knobs | {"devices": devices_text(plan.devices)}


def test_knobs_turned_on_several_threads_at_once_are_all_taken(dashboard):
    controls = dashboard.knobs.controls
    wanted = {
        "prefetch": 0 if controls["prefetch"].value else 2,
        "peer_transfers": not controls["peer_transfers"].value,
        "updates": Updates.EACH if controls["updates"].value is Updates.END else Updates.END,
        "backward_microbatch_size": 1,
        "devices": "1, 0",
    }
    at_once([lambda name=name, value=value: setattr(controls[name], "value", value) for name, value in wanted.items()])
    plan = settled(dashboard)
    assert {name: knobs_of(plan)[name] for name in wanted} == wanted | {"devices": devices_text((1, 0))}


def test_turns_clicks_and_choices_on_several_threads_end_in_one_plan_everywhere(dashboard):
    controls, knobs = dashboard.knobs.controls, dashboard.knobs

    def often(*values: Callable[[], Any]) -> Callable[[], None]:
        return lambda: [value() for _ in range(3) for value in values]

    def turn(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(controls[name], "value", value)

    at_once(
        [
            often(turn("prefetch", 0), turn("prefetch", 2)),
            often(turn("num_backward_packs", 2), turn("num_backward_packs", 4)),
            often(turn("peer_transfers", False), knobs.undo.click),
            often(lambda: setattr(dashboard.pictures.view, "selected_index", 1), knobs.reset.click),
            often(lambda: setattr(dashboard.table, "selected", 1), lambda: setattr(dashboard.table, "selected", 0)),
            often(lambda: dashboard.lab.choose(2)),
        ]
    )
    plan = settled(dashboard)
    assert shown_knobs(dashboard) == knobs_of(plan)
    assert knobs.text.value == str(plan)
    assert (dashboard.trouble.value, knobs.message.value) == ("", "")
    dashboard.pictures.view.selected_index = 0
    settled(dashboard)
    assert dashboard.pictures.timeline.figure == Plot(timeline_spec(dashboard.lab.predicted)).figure
