"""Baselines from a process of its own."""

from harmony_lab.notebook.baselines_elsewhere import BaselinesElsewhere, is_large
from harmony_lab.notebook.dashboard import Dashboard
from harmony_lab.planner.baselines import BASELINES

PATIENCE_S = 120.0


def test_a_process_of_its_own_tells_the_same_baselines(lab, monkeypatch):
    lab.prepare()
    assert not is_large(lab.profile, lab.machine, lab.minibatch_size)
    rows = []
    for elsewhere in (True, False):
        monkeypatch.setattr("harmony_lab.notebook.at_rest.is_large", lambda *_, large=elsewhere: large)
        dashboard = Dashboard(lab, namespace=dict)
        assert dashboard.settle_effects(PATIENCE_S)
        table = dashboard.table
        rows.append(list(zip(table.rows, table.values, table.titles, strict=True))[table.num_choices :])
        dashboard.close()
    assert [texts[1] for texts, *_ in rows[0]] == list(BASELINES)
    assert rows[0] == rows[1]


def test_a_process_that_is_stopped_answers_no_more(lab):
    lab.measure()
    asked = BaselinesElsewhere(lab.profile, lab.machine, lab.minibatch_size, BASELINES)
    asked.stop()
    assert list(asked.answers()) == []


def test_a_dashboard_does_without_a_process_where_none_can_be_started(lab, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("harmony_lab.notebook.at_rest.is_large", lambda *_: True)
    monkeypatch.setattr("harmony_lab.notebook.at_rest.BaselinesElsewhere", refuse)
    lab.prepare()
    dashboard = Dashboard(lab, namespace=dict)
    assert dashboard.settle(PATIENCE_S)
    assert dashboard.settle_effects(PATIENCE_S)
    assert all("…" not in row for row in dashboard.table.rows)
    dashboard.close()
