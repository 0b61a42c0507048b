"""Two plans beside each other: same axes, and what differs."""

import pytest
from figures.pipelines import pipeline_trace, trace_of

from harmony_lab.figures.comparison import (
    Side,
    change,
    comparison_html,
    comparison_memory_specs,
    comparison_rows,
    comparison_timeline_spec,
)


def sides() -> tuple[Side, Side]:
    trace = pipeline_trace()
    slower = trace_of(trace.program, trace.start_s * 2, trace.end_s * 2)
    return Side("candidate 0", "plan a", trace, (5, 7)), Side("candidate 1", "plan <b>", slower, (5, 6))


def test_rows_tell_values_changes_and_which_is_worse() -> None:
    rows = {row.what: row for row in comparison_rows(*sides())}
    assert rows["step"][1:] == ("37.0 ms", "74.0 ms", "+100.0%", True)
    assert rows["throughput"].change == "−50.0%"
    assert rows["throughput"].worse
    assert rows["peak of a device, at most"].worse is False
    assert rows["swapped in all"].change == "±0%"
    assert rows["swapped: gradients"].a == "5.00 MiB"


def test_changes_from_nothing_have_no_share() -> None:
    assert change(3, 0) == ("from nothing", True)
    assert change(0, 0) == ("", None)
    assert change(11, 10, more_is_worse=False) == ("+10.0%", False)


def test_both_have_the_same_axes() -> None:
    spec = comparison_timeline_spec(*sides())
    assert spec["layout"]["xaxis"]["range"] == spec["layout"]["xaxis2"]["range"]
    one, other = comparison_memory_specs(*sides())
    assert one["layout"]["xaxis"]["range"] == other["layout"]["xaxis"]["range"] == spec["layout"]["xaxis"]["range"]
    assert spec["layout"]["xaxis"]["range"] == pytest.approx([0, 74.37])
    assert one["layout"]["yaxis"]["range"] == other["layout"]["yaxis"]["range"]


def test_the_static_form_has_table_pictures_and_escaped_plans() -> None:
    html = comparison_html(*sides())
    assert "plan &lt;b&gt;" in html
    assert "+100.0%" in html
    assert html.count("<img") == 4


def test_changes_are_told_in_per_cent_and_large_ones_as_factors():
    assert change(1.1, 1.0) == ("+10.0%", True)
    assert change(0.5, 1.0) == ("−50.0%", False)
    assert change(5_000_000, 64) == ("× 78,125", True)
