"""Dashboard: what happens between Lab, controls and pictures, without a front end."""

import gc
import re
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import harmony_lab as hl
from harmony_lab.notebook.dashboard import Dashboard
from harmony_lab.notebook.plot import Plot, _carried
from harmony_lab.notebook.requests import Requests
from harmony_lab.planner.baselines import BASELINES, baselines
from harmony_lab.units import format_bytes, format_change, format_seconds

PATIENCE_S = 60


@pytest.fixture
def dashboard(lab: hl.Lab, batches: list[Any]) -> Iterator[Dashboard]:
    lab.prepare()
    shown = Dashboard(lab, namespace=lambda: {"batches": batches, "model": object()})
    yield shown
    shown.close()
    assert shown.settle(PATIENCE_S)


def turn(dashboard: Dashboard, knob: str, value: Any) -> None:
    dashboard.knobs.controls[knob].value = value
    assert dashboard.settle(PATIENCE_S)


def look_at(dashboard: Dashboard, tab: str) -> None:
    """Open a tab, as the front end does."""
    dashboard.pictures.view.selected_index = dashboard.pictures.view.titles.index(tab)
    assert dashboard.settle(PATIENCE_S)


def other_prefetch(dashboard: Dashboard) -> int:
    return 0 if dashboard.lab.plan.prefetch else 1


def test_a_fresh_lab_is_profiled_and_searched_when_shown_then_filled_in(lab):
    dashboard = Dashboard(lab, namespace=dict)
    assert dashboard.table.rows == []
    assert dashboard.knobs.text.disabled
    dashboard.start()
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.table.num_choices == len(lab.result.candidates)
    assert len(dashboard.table.rows) == dashboard.table.num_choices + len(BASELINES)
    peak = f"emu1 {format_bytes(lab.result.candidates[0].peak_bytes[1])}"
    assert peak in dashboard.table.titles[0]
    assert dashboard.table.selected == 0
    assert lab.result.explain() in re.sub("</?b>", "", dashboard.header.value)
    assert dashboard.knobs.text.value == str(lab.plan)
    assert not dashboard.knobs.text.disabled
    assert dashboard.progress.layout.display == "none"
    assert dashboard.pictures.timeline.figure["data"]


def test_what_cannot_fit_is_said_in_the_panel(lab):
    lab.machine = lab.machine.with_(memory="20KiB")
    dashboard = Dashboard(lab, namespace=dict)
    dashboard.start()
    assert dashboard.settle(PATIENCE_S)
    assert "layer 0 does not fit into emu0" in dashboard.trouble.value
    assert dashboard.progress.layout.display == "none"
    assert dashboard.pictures.open == "What if"
    assert dashboard.pictures.view.layout.display == "flex"
    assert not dashboard.layers.again.disabled
    dashboard.machine.preset.value = "2x4090"
    assert dashboard.machine.settle(PATIENCE_S)
    assert "What binds is" in dashboard.machine.best_plan.value
    lab.machine = lab.machine.with_(memory="100KiB")
    dashboard.layers.again.click()
    assert dashboard.trouble.value == ""
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.knobs.text.value == str(lab.plan)


def test_where_layers_were_profiled_and_nothing_fits_the_page_tells_how_much_memory_suffices(lab):
    lab.measure()
    lab.machine = lab.machine.with_(memory="20KiB")
    dashboard = Dashboard(lab, namespace=dict)
    dashboard.start()
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.machine.settle(PATIENCE_S)
    size = re.search(r"With (.*?) per device there is a plan", dashboard.machine.status.value)[1]
    assert hl.search(lab.profile, lab.machine.with_(memory=size), 8).candidates
    look_at(dashboard, "Layers")
    assert dashboard.layers.plot.figure["data"]


def test_a_knob_changes_the_plan_the_figures_and_the_deltas(dashboard):
    before = [plot.figure for plot in (dashboard.pictures.timeline, dashboard.pictures.memory)]
    turn(dashboard, "prefetch", other_prefetch(dashboard))
    turn(dashboard, "backward_microbatch_size", 1)
    lab = dashboard.lab
    assert lab.plan.backward_microbatch_size == 1
    assert dashboard.knobs.text.value == str(lab.plan)
    assert [plot.figure for plot in (dashboard.pictures.timeline, dashboard.pictures.memory)] != before
    change = lab.predicted.makespan_s / lab.result.candidates[0].step_s - 1
    assert format_change(change) in dashboard.figures.value
    assert dashboard.table.selected == 0  # the reference stays


def test_moves_while_busy_are_superseded_by_the_last(dashboard, monkeypatch):
    busy, go_on = threading.Event(), threading.Event()
    chosen: list[int] = []
    choose = dashboard.lab.choose

    def slow_choose(plan: Any) -> Any:
        chosen.append(plan.backward_microbatch_size)
        busy.set()
        go_on.wait(PATIENCE_S)
        return choose(plan)

    monkeypatch.setattr(dashboard.lab, "choose", slow_choose)
    control = dashboard.knobs.controls["backward_microbatch_size"]
    sizes = [size for size in control.options if size != control.value]
    control.value = sizes[0]
    busy.wait(PATIENCE_S)
    for size in sizes[1:]:
        control.value = size
    go_on.set()
    assert dashboard.settle(PATIENCE_S)
    assert chosen == [sizes[0], sizes[-1]]
    assert dashboard.lab.plan.backward_microbatch_size == sizes[-1] == control.value


def test_choosing_in_a_cell_moves_the_controls_without_an_echo(dashboard, monkeypatch):
    result = dashboard.lab.result
    rank = next(r for r, c in enumerate(result.candidates) if c.plan.backward_packs != result.best.backward_packs)
    calls: list[Any] = []
    choose = dashboard.lab.choose
    monkeypatch.setattr(dashboard.lab, "choose", lambda plan: calls.append(plan) or choose(plan))
    dashboard.lab.choose(rank)
    assert dashboard.settle(PATIENCE_S)
    assert calls == [rank]
    plan = result.candidates[rank].plan
    assert dashboard.knobs.controls["num_backward_packs"].value == len(plan.backward_packs)
    assert dashboard.table.selected == rank


def test_a_row_of_the_table_is_chosen_and_becomes_the_reference(dashboard):
    dashboard.table.selected = 1  # as the front end does
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.lab.plan == dashboard.lab.result.candidates[1].plan
    assert "against candidate 1" in dashboard.figures.value


def test_a_candidate_is_picked_in_the_scatter(dashboard):
    look_at(dashboard, "Candidates")
    rank = len(dashboard.lab.result.candidates) - 1
    dashboard.pictures.candidates._handle_custom_msg({"picked": rank}, [])  # as the page does
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.lab.plan == dashboard.lab.result.candidates[rank].plan
    assert dashboard.table.selected == rank


def test_baselines_stand_below_the_plans_and_cannot_be_chosen(dashboard):
    assert dashboard.settle_effects(PATIENCE_S)
    table, count = dashboard.table, len(dashboard.lab.result.candidates)
    assert table.num_choices == count
    rows = {row[1]: (row, title) for row, title in zip(table.rows[count:], table.titles[count:], strict=True)}
    assert set(rows) == set(BASELINES)
    found = baselines(dashboard.lab.profile, dashboard.lab.machine, dashboard.lab.minibatch_size)
    for one in found:
        row, title = rows[one.name]
        assert row[4] == ("–" if one.step_s is None else format_seconds(one.step_s))
        assert (one.reason or str(one)) in title


def test_a_plan_that_does_not_fit_is_drawn_with_what_it_exceeds_and_not_launched(dashboard):
    turn(dashboard, "num_backward_packs", 1)
    assert dashboard.lab.predicted.program.budgets[0] < max(dashboard.lab.predicted.peak_bytes)
    assert "does not fit" in dashboard.figures.value
    assert dashboard.pictures.memory.figure["data"]
    assert dashboard.launcher.launch.disabled
    assert "does not fit" in dashboard.launcher.reason.value
    assert dashboard.lab.chosen.problem in dashboard.launcher.launch.tooltip
    turn(dashboard, "num_backward_packs", len(dashboard.lab.result.best.backward_packs))
    assert not dashboard.launcher.launch.disabled
    assert dashboard.launcher.reason.value == ""


def test_a_typed_plan_is_taken_and_a_broken_one_is_explained_beside_the_text(dashboard):
    plan = dashboard.lab.plan
    dashboard.knobs.text.value = "dp minibatch=8"
    assert dashboard.settle(PATIENCE_S)
    assert "backward= is missing" in dashboard.knobs.message.value
    assert dashboard.lab.plan == plan
    typed = plan.with_(prefetch=other_prefetch(dashboard))
    dashboard.knobs.text.value = str(typed)
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.lab.plan == typed
    assert dashboard.knobs.controls["prefetch"].value == typed.prefetch
    assert dashboard.knobs.message.value == ""


def test_a_plan_for_other_layers_is_refused_in_the_panel(dashboard):
    plan = dashboard.lab.plan
    dashboard.knobs.text.value = "dp minibatch=8 forward=4[] backward=4[0:99] devices=0"
    assert dashboard.settle(PATIENCE_S)
    assert "harmony-error" in dashboard.knobs.message.value
    assert dashboard.lab.plan == plan


def test_reset_returns_to_the_chosen_candidate(dashboard):
    turn(dashboard, "prefetch", other_prefetch(dashboard))
    turn(dashboard, "num_backward_packs", 2)
    dashboard.knobs.reset.click()
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.lab.plan == dashboard.lab.result.best


def test_launch_trains_with_the_plan_shown_and_stop_stops(dashboard, batches):
    turn(dashboard, "prefetch", other_prefetch(dashboard))
    assert dashboard.launcher.source.value == "batches"
    dashboard.launcher.steps.value = 100_000
    dashboard.launcher.launch.click()
    assert dashboard.settle(PATIENCE_S)
    run = dashboard.lab.run
    assert run.active
    assert dashboard.layers.again.disabled
    assert run.plan == dashboard.lab.plan
    stepped = threading.Event()
    run.subscribe(lambda event: stepped.set() if event == "step" else None)
    assert stepped.wait(PATIENCE_S)
    panel = dashboard.launcher.panel
    assert panel.run is run
    assert dashboard.launcher.launch.disabled
    panel.stop.click()
    run.wait(PATIENCE_S)
    assert panel.settle(PATIENCE_S)
    assert dashboard.settle(PATIENCE_S)
    assert run.status == "stopped"
    assert "stopped" in panel.headline.value
    assert panel.curve.figure["data"][0]["y"]
    assert not dashboard.launcher.launch.disabled
    assert not dashboard.layers.again.disabled
    assert not dashboard.pictures.measured.figure
    look_at(dashboard, "Measured")
    assert dashboard.pictures.measured.figure["data"]


def test_data_that_is_not_there_is_said_before_anything_starts(dashboard):
    dashboard.launcher.source.value = "lodaer"
    dashboard.launcher.launch.click()
    assert "no &#x27;lodaer&#x27; in this notebook" in dashboard.launcher.message.value
    assert "batches" in dashboard.launcher.message.value
    assert dashboard.lab.run is None


def test_a_run_launched_in_a_cell_appears(dashboard, batches):
    run = dashboard.lab.launch(batches, 2).wait(PATIENCE_S)
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.launcher.panel.run is run


def test_closing_the_lab_ends_threads_and_leaves_the_last_state_visible(dashboard):
    dashboard.lab.close()
    assert dashboard.settle_effects(PATIENCE_S)
    assert "closed" in dashboard.message.value
    assert dashboard.knobs.text.disabled
    assert dashboard.launcher.launch.disabled
    assert dashboard.pictures.timeline.figure["data"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony-lab dashboard")]


def test_plotly_is_sent_when_a_page_asks_and_is_no_widgets_state(dashboard, monkeypatch):
    figures = [*vars(dashboard.pictures).values(), dashboard.layers.plot, Plot()]
    plots = [figure for figure in figures if isinstance(figure, Plot)]
    assert len(plots) == 10
    (library,) = _carried
    assert max(len(widget.get_state()["_esm"]) for widget in [library, *plots]) < 10_000
    sent: list[Any] = []
    monkeypatch.setattr(type(library), "send", lambda self, content, buffers: sent.append(buffers))
    library._handle_custom_msg({}, [])
    ((packed,),) = sent
    assert len(packed) < 2_000_000
    assert b"export default module.exports" in zlib.decompress(packed)


def test_widgets_alone_do_not_keep_a_dashboard_or_its_run_alive(batches):
    def shown() -> tuple[Any, ...]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        optimizer = torch.optim.Adam(model.parameters())
        machine = hl.Machine.emulated(1, memory="1MiB", link="1GB/s")
        lab = hl.Lab(
            model, batches[0], optimizer, loss_fn=torch.nn.functional.mse_loss, minibatch_size=8, machine=machine
        )
        dashboard = Dashboard(lab, namespace=dict)
        lab.launch(batches, 1).wait(PATIENCE_S)
        assert dashboard.settle(PATIENCE_S)
        lab.close()
        assert dashboard.settle_effects(PATIENCE_S)
        assert dashboard.launcher.panel.settle(PATIENCE_S)
        return weakref.ref(lab), weakref.ref(model), dashboard.view

    lab, model, view = shown()
    gc.collect()
    assert lab() is None
    assert model() is None
    assert view.comm is not None


def test_a_superseded_variation_that_arrives_late_is_not_taken_for_a_choice_from_elsewhere():
    plans = [hl.Plan.parse(f"dp minibatch=8 forward=1[] backward={size}[0:4] devices=0") for size in (1, 2, 4)]
    requests = Requests()
    first, second = requests.next_number(), requests.next_number()
    requests.asked(plans[0], first)
    requests.asked(plans[1], second)
    assert requests.arrived(plans[2]) is None
    assert requests.arrived(plans[0]) == first
    assert not requests.is_newest(first)
    assert requests.arrived(plans[1]) == second
    assert requests.is_newest(second)
    assert requests.arrived(plans[0]) is None  # the user has moved on: who chooses it now means it


def test_measuring_again_makes_a_new_profile_and_a_new_ranking(dashboard):
    before, result = dashboard.lab.profile, dashboard.lab.result
    look_at(dashboard, "Layers")
    assert str(before.device) in dashboard.layers.source.value
    assert f"0 {format_bytes(before.layers[0].parameter_bytes)} (20%)" in dashboard.layers.source.value
    dashboard.layers.again.click()
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.lab.profile is not before
    assert not dashboard.lab.profile.cached
    assert dashboard.lab.result is not result
    assert not dashboard.layers.again.disabled


def test_a_machine_that_is_not_at_hand_is_planned_for_and_cannot_be_launched(batches):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn = torch.nn.functional.mse_loss
    with hl.Lab(model, batches[0], optimizer, loss_fn=loss_fn, minibatch_size=8, machine="2x4090") as lab:
        dashboard = Dashboard(lab, namespace=lambda: {"batches": batches})
        dashboard.start()
        assert dashboard.settle_effects(PATIENCE_S)
        assert "2x4090 is not at hand" in dashboard.header.value
        assert "2x4090 is not at hand" in dashboard.launcher.reason.value
        assert dashboard.launcher.launch.disabled
        assert "256 GiB are available" in dashboard.launcher.expected.value
        assert dashboard.layers.again.layout.display == "none"
