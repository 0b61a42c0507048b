"""The critical path: what the end of the iteration waited for, step by step."""

import numpy as np
import pytest
from figures.pipelines import pipeline_trace, trace_of

from harmony_lab.figures.critical import critical_line, critical_path
from harmony_lab.figures.lanes import lanes
from harmony_lab.figures.svg import timeline_svg
from harmony_lab.figures.theme import CRITICAL_COLOUR
from harmony_lab.figures.timeline import timeline_figure
from harmony_lab.program import Op, OpKind, Program, Stream


def test_it_leads_from_the_last_end_back_to_the_first_start() -> None:
    # update 16 waits for swap-out 15, that for backward 14, that for the gradient from the other device ...
    path = critical_path(pipeline_trace())
    assert path.ops == (2, 3, 4, 5, 7, 8, 10, 11, 14, 15, 16) or path.ops[-8:] == (5, 7, 8, 10, 11, 14, 15, 16)
    assert path.seconds[OpKind.BACKWARD] == pytest.approx(8e-3 + 7e-3)
    assert path.seconds[OpKind.UPDATE] == pytest.approx(4e-3)


def test_its_seconds_and_waits_make_up_the_iteration() -> None:
    trace = pipeline_trace()
    path = critical_path(trace)
    assert sum(path.seconds.values()) + path.waiting_s == pytest.approx(trace.makespan_s)


def test_a_stream_that_is_busy_is_waited_for_as_an_edge_is() -> None:
    ops = [
        Op(OpKind.SWAP_IN, 0, Stream.SWAP_IN, (0, 1), (0, 0)),
        Op(OpKind.FORWARD, 0, Stream.COMPUTE, (0, 1), (0, 1)),
        Op(OpKind.FORWARD, 0, Stream.COMPUTE, (1, 2), (0, 1), after=(0,)),
    ]
    program = Program(minibatch_size=1, num_layers=2, budgets=(1,), blocks=(), ops=tuple(ops))
    slow_compute = critical_path(trace_of(program, np.array([0.0, 0.0, 5.0]), np.array([1.0, 5.0, 6.0])))
    slow_link = critical_path(trace_of(program, np.array([0.0, 0.0, 5.0]), np.array([5.0, 1.0, 6.0])))
    assert slow_compute.ops == (1, 2)
    assert slow_link.ops == (0, 2)
    assert slow_link.words() == "swap in 83%, forward 17%"


def test_time_between_ops_is_waiting() -> None:
    ops = [
        Op(OpKind.FORWARD, 0, Stream.COMPUTE, (0, 1), (0, 1)),
        Op(OpKind.BACKWARD, 0, Stream.COMPUTE, (0, 1), (0, 1)),
    ]
    program = Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=tuple(ops))
    path = critical_path(trace_of(program, np.array([0.0, 3.0]), np.array([1.0, 4.0])))
    assert path.waiting_s == pytest.approx(2.0)
    assert path.words().endswith("waiting 50%")


def test_the_line_runs_along_the_ops_in_their_rows() -> None:
    trace = pipeline_trace()
    bars, path = lanes(trace), critical_path(trace)
    (line,) = critical_line(path, trace, bars, 1e-3)
    assert line["x"][-1] == pytest.approx(trace.makespan_s * 1e3)
    assert (np.diff(line["x"]) >= -1e-6).all()
    assert bars.names[line["y"][-1]] == "host · updates"
    assert len(line["x"]) == len(line["y"])


def test_timelines_show_it_interactive_and_static() -> None:
    trace = pipeline_trace()
    figure = timeline_figure(trace)
    assert [t.name for t in figure.data][-1] == "critical path"
    assert critical_path(trace).words() in figure.layout.title.text
    assert CRITICAL_COLOUR in timeline_svg(trace)


def test_an_empty_program_has_none() -> None:
    empty = Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=())
    path = critical_path(trace_of(empty, np.zeros(0), np.zeros(0)))
    assert path.ops == ()
    assert path.words() == ""
