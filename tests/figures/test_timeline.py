"""Timelines show the trace's numbers, also where bars are merged."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
from figures.pipelines import long_trace, pipeline_trace, trace_of

from harmony_lab.figures.lanes import KINDS, lanes, thinned
from harmony_lab.figures.memory import memory_spec
from harmony_lab.figures.spec import spec_json
from harmony_lab.figures.theme import OP_COLOURS, label
from harmony_lab.figures.timeline import TIMELINE_LEFT, compare_figure, timeline_figure, timeline_spec
from harmony_lab.machine import HOST
from harmony_lab.program import Op, OpKind, Program, Stream
from harmony_lab.trace import Origin


def bar(figure, kind: OpKind, row: int | None = None):
    axis = None if row is None else ("y" if row == 1 else f"y{row}")
    return next(t for t in figure.data if t.name == label(kind) and axis in (None, t.yaxis))


def test_rows_are_devices_streams_in_order_and_the_host_comes_last() -> None:
    names = timeline_figure(pipeline_trace()).layout.yaxis.ticktext
    assert names[:5] == tuple(
        f"emu0 · {stream}" for stream in ("compute", "swap in", "swap out", "peer in", "peer out")
    )
    assert names[-1] == "host · updates"
    assert not any("memory" in name for name in names)


def test_bars_are_where_the_trace_puts_them() -> None:
    trace = pipeline_trace()
    drawn = bar(timeline_figure(trace), OpKind.BACKWARD)
    assert drawn.marker.color == OP_COLOURS[OpKind.BACKWARD]
    by_op = {
        int(row[0]): (start, length) for row, start, length in zip(drawn.customdata, drawn.base, drawn.x, strict=True)
    }
    assert by_op[14] == pytest.approx((23, 7))  # ms
    assert by_op[8] == pytest.approx((14, 8))
    assert timeline_figure(trace).layout.xaxis.title.text == "time (ms)"


def test_a_send_is_drawn_while_its_receiver_copies() -> None:
    trace = pipeline_trace()
    figure = timeline_figure(trace)
    send, receive = bar(figure, OpKind.SEND), bar(figure, OpKind.RECV)
    assert sorted(send.base) == pytest.approx(sorted(receive.base))
    assert sorted(send.x) == pytest.approx([1.0, 2.0])
    rows = figure.layout.yaxis.ticktext
    assert [rows[int(row)] for row in send.y] == ["emu0 · peer out", "emu1 · peer out"]
    assert send.hovertext == ("samples [0:2): 512 KiB", "samples [0:2): 256 KiB")


def test_the_title_says_where_time_is_virtual() -> None:
    trace = pipeline_trace()
    virtual = replace(trace, machine=replace(trace.machine, virtual_time=True))
    assert f"{trace.took} in virtual time" in timeline_figure(virtual).layout.title.text
    assert "virtual" not in timeline_figure(trace).layout.title.text


def test_frees_are_not_drawn() -> None:
    assert label(OpKind.FREE) not in {trace.name for trace in timeline_figure(pipeline_trace()).data}


def busy_by_row_and_kind(bars) -> dict[tuple[int, int], float]:
    return {
        (row, kind): float(bars.duration_s[(bars.row == row) & (bars.kind == kind)].sum())
        for row, kind in {*zip(bars.row.tolist(), bars.kind.tolist(), strict=True)}
    }


def test_merging_keeps_busy_time_bytes_and_ops_and_overlaps_nothing() -> None:
    trace = long_trace(20_000)
    bars = lanes(trace)
    few = thinned(bars, trace.makespan_s, limit=4000)
    assert len(bars) == 20_000
    assert len(few) <= 4000
    assert few.num_ops.sum() == len(bars)
    assert few.moved_bytes.sum() == bars.moved_bytes.sum() == sum(trace.moved_bytes.values())
    assert busy_by_row_and_kind(few) == pytest.approx(busy_by_row_and_kind(bars))
    for row in range(len(few.names)):
        start, length = few.start_s[few.row == row], few.duration_s[few.row == row]
        assert (start[:-1] + length[:-1] <= start[1:] + 1e-9).all()


def test_long_ops_stay_themselves_when_short_ones_merge() -> None:
    ops = [Op(OpKind.FORWARD, 0, Stream.COMPUTE, (0, 1), (0, 1)) for _ in range(5001)]
    lengths = np.full(5001, 1e-4)
    lengths[2500] = 1.0
    end = lengths.cumsum()
    program = Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=tuple(ops))
    few = thinned(lanes(trace_of(program, end - lengths, end)), float(end[-1]), limit=4000)
    long = few.select(few.number == 2500)
    assert long.num_ops.tolist() == [1]
    assert long.start_s == pytest.approx([0.25])
    assert few.duration_s.sum() == pytest.approx(1.5)


def test_few_ops_are_not_merged() -> None:
    trace = long_trace(3000)
    assert sum(len(t.x) for t in timeline_figure(trace).data if t.type == "bar") == len(trace.program.ops)


def test_three_thousand_ops_travel_in_less_than_300_kb() -> None:
    assert len(spec_json(timeline_spec(long_trace(3000)))) < 300_000


def test_a_hundred_thousand_ops_draw_and_travel_in_less_than_300_kb() -> None:
    trace = long_trace(100_000)
    spec = timeline_spec(trace)
    assert len(spec_json(spec)) < 300_000
    figure = go.Figure(spec)
    unit_s = {"ms": 1e-3, "s": 1.0}[figure.layout.xaxis.title.text[6:-1]]
    busy = sum(float(np.sum(t.x, dtype=np.float64)) for t in figure.data if t.type == "bar") * unit_s
    assert busy == pytest.approx(float((trace.end_s - trace.start_s).sum()), rel=1e-5)


def test_a_trace_without_ops_draws() -> None:
    empty = Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=())
    assert len(timeline_figure(trace_of(empty, np.zeros(0), np.zeros(0))).data) == 0


def test_compared_timelines_share_the_axis_of_the_longer_one() -> None:
    predicted = pipeline_trace()
    slower = trace_of(predicted.program, predicted.start_s * 2, predicted.end_s * 2, Origin.MEASURED)
    figure = compare_figure(predicted, slower)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis2.range[1] == pytest.approx(74, rel=0.01)
    first, second = bar(figure, OpKind.UPDATE, 1), bar(figure, OpKind.UPDATE, 2)
    assert np.asarray(second.base) == pytest.approx(2 * np.asarray(first.base))
    assert first.marker.color == second.marker.color
    assert [t.showlegend for t in (first, second)] == [True, False]


def test_lanes_know_their_owner_and_kind() -> None:
    bars = lanes(pipeline_trace())
    assert bars.owners[-1] == HOST
    assert {KINDS[kind] for kind in bars.kind.tolist()} == set(OpKind) - {OpKind.FREE, OpKind.ALL_REDUCE}


def test_memory_below_a_timeline_has_the_same_time_axis() -> None:
    trace = pipeline_trace()
    above, below = timeline_spec(trace)["layout"], memory_spec(trace, left=TIMELINE_LEFT)["layout"]
    for key in ("margin", "meta"):
        assert {**above[key], "t": 0} == {**below[key], "t": 0}
    assert above["xaxis"]["range"] == below["xaxis"]["range"]
