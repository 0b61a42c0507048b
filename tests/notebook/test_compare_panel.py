"""Two plans compared in the dashboard, and another machine asked about."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import harmony_lab as hl
from harmony_lab.figures.comparison import change
from harmony_lab.machine import HOST, Machine
from harmony_lab.notebook.dashboard import Dashboard
from harmony_lab.notebook.sides import Sides
from harmony_lab.notebook.what_if import WhatIf, host_rate, varied
from harmony_lab.profiler.links import LinkProbe, LinkRate
from harmony_lab.units import format_rate, format_seconds

PATIENCE_S = 60


@pytest.fixture
def dashboard(lab: hl.Lab, batches: list[Any]) -> Iterator[Dashboard]:
    lab.prepare()
    shown = Dashboard(lab, namespace=lambda: {"batches": batches})
    yield shown
    shown.close()
    assert shown.settle_effects(PATIENCE_S)
    assert shown.machine.settle(PATIENCE_S)


def look_at(dashboard: Dashboard, tab: str) -> None:
    dashboard.pictures.view.selected_index = dashboard.pictures.view.titles.index(tab)
    assert dashboard.settle(PATIENCE_S)


def answered(dashboard: Dashboard) -> None:
    for _ in range(2):  # an answer is painted, a plan taken from it asks again
        assert dashboard.machine.settle(PATIENCE_S)
        assert dashboard.settle(PATIENCE_S)


def test_nothing_is_drawn_before_it_is_looked_at(dashboard):
    assert not dashboard.compare.timelines.figure
    assert not dashboard.pictures.links.figure
    look_at(dashboard, "Links")
    assert dashboard.pictures.links.figure["data"]
    assert not dashboard.compare.timelines.figure


def test_two_candidates_are_drawn_on_the_same_axes_with_what_differs(dashboard):
    look_at(dashboard, "Compare")
    dashboard.compare.a.value, dashboard.compare.b.value = "0", "2"
    assert dashboard.settle(PATIENCE_S)
    layout = dashboard.compare.timelines.figure["layout"]
    assert layout["xaxis"]["range"] == layout["xaxis2"]["range"]
    axes = [plot.figure["layout"]["yaxis"]["range"] for plot in dashboard.compare.memory]
    assert axes[0] == axes[1]
    assert "A: candidate 0" in dashboard.compare.table.value
    assert "B: candidate 2" in dashboard.compare.table.value


def test_a_plan_is_compared_with_a_baseline_or_told_why_there_is_none(dashboard):
    look_at(dashboard, "Compare")
    dashboard.compare.b.value = "zero-infinity order"
    assert dashboard.settle(PATIENCE_S)
    assert "B: zero-infinity order" in dashboard.compare.table.value
    dashboard.compare.b.value = "dp, in memory"
    assert dashboard.settle(PATIENCE_S)
    assert "dp, in memory" in dashboard.compare.table.value


def test_the_plan_at_hand_is_compared_as_it_changes(dashboard):
    look_at(dashboard, "Compare")
    dashboard.compare.b.value = "plan"
    assert dashboard.settle(PATIENCE_S)
    before = dashboard.compare.table.value
    dashboard.knobs.controls["backward_microbatch_size"].value = 1
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.compare.table.value != before


def test_minibatches_that_differ_are_compared_per_sample(dashboard):
    lab = dashboard.lab
    before = lab.predicted
    dashboard.knobs.controls["minibatch_size"].value = 4
    assert dashboard.settle(PATIENCE_S)
    words, _ = change(lab.predicted.makespan_s / 4, before.makespan_s / 8)
    assert f"{words} per sample" in dashboard.figures.value
    look_at(dashboard, "Compare")
    dashboard.compare.a.value, dashboard.compare.b.value = "0", "zero-infinity order"
    assert dashboard.settle(PATIENCE_S)
    table = dashboard.compare.table.value
    assert "<td>8 samples</td><td>4 samples</td>" in table
    assert f"step, per sample</th><td>{format_seconds(before.makespan_s / 8)}</td>" in table
    dashboard.machine.memory.field.value = "1MiB"
    answered(dashboard)
    assert dashboard.machine.best.preview.plan.minibatch_size == 4


def test_candidates_are_simulated_once_per_search(lab):
    lab.prepare()
    sides = Sides(lab, 2, lambda: None)
    names, traces = sides.candidate_traces()
    assert names == ["candidate 0", "candidate 1"]
    lab.choose(lab.plan.with_(prefetch=1 - min(1, lab.plan.prefetch)))
    assert all(a is b for a, b in zip(traces, sides.candidate_traces()[1], strict=True))
    assert sides.side("1").trace is traces[1]
    lab.search()
    assert sides.side("1").trace is not traces[1]


def test_another_machine_gets_a_plan_of_its_own_and_the_lab_keeps_its_machine(dashboard):
    lab, panel = dashboard.lab, dashboard.machine
    own, plan = lab.machine, lab.plan
    panel.memory.field.value = "1MiB"
    answered(dashboard)
    machine = own.with_(memory="1MiB")
    assert panel.best.preview.plan == hl.search(lab.profile, machine, 8).best
    assert "What binds is" in panel.best_plan.value
    assert "The plan at hand, there" in panel.shown_plan.value
    assert (lab.machine, lab.plan) == (own, plan)
    assert ("the best plan of the what-if machine", "what-if") in dashboard.compare.a.options
    best = panel.best.preview.plan
    panel.take.click()
    answered(dashboard)
    assert lab.plan == best
    assert panel.best.preview.plan == best


def test_reset_returns_to_the_machine_as_it_is(dashboard):
    panel = dashboard.machine
    panel.devices.value = 4
    panel.link.slider.value = panel.link.slider.options[0][1]
    answered(dashboard)
    assert panel.best.preview.trace.machine.num_devices == 4
    panel.reset.click()
    answered(dashboard)
    assert panel.best is None
    assert panel.best_plan.value == ""
    assert panel.devices.value == 2
    assert panel.link.field.value == "954 MiB/s"
    assert "what-if" not in [key for _, key in dashboard.compare.a.options]


def test_a_preset_is_planned_for_with_estimated_costs(dashboard):
    dashboard.machine.preset.value = "2x4090"
    answered(dashboard)
    assert "NVIDIA GeForce RTX 4090, estimated" in dashboard.machine.status.value
    assert dashboard.machine.best.preview.trace.machine == Machine.preset("2x4090")


@pytest.mark.parametrize(("field", "text"), [("preset", "4x9999"), ("memory", "lots"), ("link", "8 Gbit")])
def test_what_cannot_be_read_is_said(dashboard, field, text):
    panel = dashboard.machine
    control = panel.preset if field == "preset" else getattr(panel, field).field
    control.value = text
    answered(dashboard)
    assert "harmony-error" in panel.status.value
    assert panel.best is None


def test_a_machine_on_which_nothing_fits_says_what_is_missing(dashboard):
    dashboard.machine.memory.field.value = "10KiB"
    answered(dashboard)
    assert "does not fit" in dashboard.machine.status.value + dashboard.machine.shown_plan.value
    assert dashboard.machine.best is None


def test_of_many_questions_the_last_is_answered(dashboard, monkeypatch):
    searched: list[int] = []
    told: set[Any] = set()
    first, go_on = threading.Event(), threading.Event()

    def slow_search(profile: Any, machine: Machine, minibatch: int, *, progress: Any, known: Any) -> Any:
        searched.append(machine.num_devices)
        told.update(known)
        first.set()
        go_on.wait(PATIENCE_S)
        progress(0, 1, "")
        return hl.search(profile, machine, minibatch)

    monkeypatch.setattr("harmony_lab.planner.searches.search", slow_search)
    panel = dashboard.machine
    panel.devices.value = 3
    assert first.wait(PATIENCE_S)
    for count in (4, 5, 6):
        panel.devices.value = count
    go_on.set()
    answered(dashboard)
    assert searched == [3, 6]  # the first was broken off
    assert dashboard.lab.result.best in told  # and may be the best there too
    assert panel.best.preview.trace.machine.num_devices == 6


def test_links_are_measured_on_request_and_told(dashboard, monkeypatch):
    machine = dashboard.lab.machine
    rate = LinkRate(source=HOST, destination=1, at_once=1, pinned=None, bytes_per_s=5e9, verified=True)
    found = LinkProbe(machine=machine, rates=(rate,))
    monkeypatch.setattr("harmony_lab.profiler.links.probe_links", lambda asked: found if asked == machine else None)
    dashboard.machine.measure.click()
    answered(dashboard)
    assert "host → emu1" in dashboard.machine.measured.value
    assert format_rate(5e9) in dashboard.machine.measured.value
    assert not dashboard.machine.measure.disabled


def test_varied_machines_keep_what_was_not_asked_for():
    machine = Machine.preset("2x4090, pcie4 x8 behind a switch")
    more = varied(machine, num_devices=3, memory_bytes=2**30)
    assert more.budgets == (2**30,) * 3
    assert len({device.name for device in more.devices}) == 3
    assert more.route(HOST, 2)[0] == machine.route(HOST, 0)[0]
    assert host_rate(varied(machine, link_bytes_per_s=5e9)) == 5e9
    assert varied(machine, num_devices=1).num_devices == 1
    assert WhatIf().machine(machine) == machine


def test_verify_first_shows_the_certificate_and_trains_nothing(dashboard):
    weights = [parameter.detach().clone() for parameter in dashboard.lab.layers.model.parameters()]
    dashboard.launcher.verify.click()
    assert dashboard.launcher.launch.disabled
    assert dashboard.settle(PATIENCE_S)
    assert "gradients" in dashboard.launcher.certificate.value
    assert "equals" in dashboard.launcher.certificate.value
    assert dashboard.lab.run is None
    after = list(dashboard.lab.layers.model.parameters())
    assert all(bool((a == b).all()) for a, b in zip(weights, after, strict=True))
    assert not dashboard.launcher.launch.disabled


def test_data_that_runs_out_is_not_used_up_by_verifying(lab, batches):
    lab.prepare()
    dashboard = Dashboard(lab, namespace=lambda: {"data": iter(batches)})
    dashboard.launcher.verify.click()
    assert dashboard.settle(PATIENCE_S)
    assert "once only" in dashboard.launcher.message.value
    dashboard.close()
