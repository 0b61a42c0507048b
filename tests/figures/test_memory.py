"""Memory timelines show the trace's bytes, and thinning loses no peak."""

from dataclasses import replace

import numpy as np
import pytest
from figures.pipelines import MIB, long_trace, pipeline_trace

from harmony_lab.figures.footprint import INCLUDED, footprints
from harmony_lab.figures.memory import memory_spec, memory_timeline
from harmony_lab.figures.spec import spec_json
from harmony_lab.figures.theme import ALARM_COLOUR, TENSOR_COLOURS, label
from harmony_lab.program import TensorKind
from harmony_lab.trace import MemoryTimeline, Origin


def stack_top_mib(figure, row: int) -> np.ndarray:
    axis = "y" if row == 1 else f"y{row}"
    areas = [t for t in figure.data if t.yaxis == axis and t.stackgroup]
    return np.sum([np.asarray(t.y, dtype=np.float64) for t in areas], axis=0)


@pytest.mark.parametrize("trace", [pipeline_trace(), long_trace(20_000)], ids=["short", "long"])
def test_the_stacks_top_reaches_the_traces_peak(trace) -> None:
    figure = memory_timeline(trace)
    for device, peak in enumerate(trace.peak_bytes):
        assert stack_top_mib(figure, device + 1).max() == pytest.approx(peak / MIB, rel=1e-6)


def test_areas_are_the_traces_bytes_by_kind() -> None:
    trace = pipeline_trace()
    memory = trace.memory[0]
    figure = memory_timeline(trace)
    area = next(t for t in figure.data if t.name == label(TensorKind.WEIGHT))
    weights = memory.num_bytes[:, memory.kinds.index(TensorKind.WEIGHT)] / MIB
    assert np.asarray(area.y)[: len(weights)] == pytest.approx(weights)
    assert area.fillcolor == TENSOR_COLOURS[TensorKind.WEIGHT]
    assert area.line.shape == "hv"


def test_the_last_step_reaches_the_end_of_the_iteration() -> None:
    figure = memory_timeline(pipeline_trace())
    assert figure.data[0].x[-1] == pytest.approx(37)


def test_thinning_keeps_the_peak_and_never_shows_less_than_there_is_at_a_stretch() -> None:
    trace = long_trace(40_000)
    for thin, full in zip(footprints(trace, most_points=500, most_values=10**9), trace.memory, strict=True):
        assert len(full.times_s) > 3000
        assert len(thin.times_s) <= 500
        assert (np.diff(thin.times_s) >= 0).all()
        assert thin.num_bytes.sum(axis=1).max() == full.peak_bytes
        totals = {*map(tuple, full.num_bytes.tolist())}
        columns = [full.kinds.index(kind) for kind in thin.kinds]
        shown = {tuple(row) for row in thin.num_bytes.tolist()}
        assert shown <= {tuple(row[c] for c in columns) for row in totals}


def test_a_spike_before_a_long_quiet_time_stays_a_spike() -> None:
    trace = pipeline_trace()
    times_s = np.append(np.linspace(0, 0.001, 5000), 0.037)
    num_bytes = np.full((5001, 1), 3 * MIB)
    num_bytes[[4990, 5000]] = [[7 * MIB], [MIB]]
    spiked = MemoryTimeline(times_s=times_s, kinds=(TensorKind.WEIGHT,), num_bytes=num_bytes)
    thin = footprints(replace(trace, memory=(spiked, spiked)), most_points=200, most_values=10**9)[0]
    shown = dict(zip(thin.times_s.tolist(), thin.num_bytes[:, 0].tolist(), strict=True))
    assert max(shown.values()) == 7 * MIB
    quiet = [num_bytes for time_s, num_bytes in shown.items() if 0.001 <= time_s < 0.037]
    assert quiet == [3 * MIB]


def test_the_budget_is_dashed_and_an_overrun_is_red_with_what_is_too_much() -> None:
    fitting, over = memory_timeline(pipeline_trace()), memory_timeline(long_trace(100, budget=30 * MIB))
    assert [line.y0 for line in fitting.layout.shapes] == [8, 8]
    assert {line.line.dash for line in fitting.layout.shapes} == {"dash"}
    assert ALARM_COLOUR not in fitting.to_json()
    assert {line.line.color for line in over.layout.shapes} == {ALARM_COLOUR}
    assert any("MiB too much" in note.text for note in over.layout.annotations)


def test_the_figure_says_what_its_numbers_include() -> None:
    assert INCLUDED in memory_timeline(pipeline_trace()).layout.title.text.replace("<br>", " ")
    assert "without framework context" in INCLUDED


def test_the_peak_stands_beside_the_budget_and_says_of_what_it_is() -> None:
    notes = [note.text for note in memory_timeline(pipeline_trace()).layout.annotations]
    assert notes == [
        "emu0: peak 5.75 MiB of 8.00 MiB in this prediction",
        "emu1: peak 7.75 MiB of 8.00 MiB in this prediction",
    ]
    measured = memory_timeline(pipeline_trace(Origin.MEASURED)).layout.annotations
    assert measured[0].text == "emu0: peak 5.75 MiB of 8.00 MiB in this measurement"


def test_a_device_that_holds_nothing_has_no_panel() -> None:
    trace = pipeline_trace()
    idle = replace(trace.memory[0], num_bytes=np.zeros_like(trace.memory[0].num_bytes))
    one = memory_timeline(replace(trace, memory=(idle, trace.memory[1])))
    assert [note.text.split(":")[0] for note in one.layout.annotations] == ["emu1"]
    assert {area.yaxis for area in one.data} == {"y"}
    none = memory_timeline(replace(trace, memory=(idle, idle)))
    assert len(none.layout.annotations) == 2


def test_panels_share_the_time_axis_and_do_not_overlap() -> None:
    layout = memory_timeline(pipeline_trace()).layout
    assert layout.xaxis.matches == "x2"
    assert layout.yaxis2.domain[0] == 0
    assert layout.yaxis2.domain[1] < layout.yaxis.domain[0]
    assert layout.yaxis.domain[1] == 1


@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_a_hundred_thousand_ops_travel_in_less_than_200_kb(num_devices: int) -> None:
    assert len(spec_json(memory_spec(long_trace(100_000, num_devices)))) < 200_000
