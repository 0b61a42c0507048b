"""Static pictures are small, valid, described in words and drawn from the same numbers and colours."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from figures.pipelines import MIB, long_trace, pipeline_trace, trace_of

from harmony_lab.figures.svg import loss_svg, memory_svg, swaps_svg, timeline_svg
from harmony_lab.figures.theme import ALARM_COLOUR, OP_COLOURS, TENSOR_COLOURS
from harmony_lab.program import OpKind, Program, TensorKind

NAMESPACE = "{http://www.w3.org/2000/svg}"
PICTURES = (timeline_svg, memory_svg, swaps_svg)


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{NAMESPACE}text")]


def bar_lengths(svg: str, kind: OpKind) -> list[float]:
    """Lengths of the bars of one kind, in pixels."""
    paths = [
        node.get("d") for node in ET.fromstring(svg).iter(f"{NAMESPACE}path") if node.get("stroke") == OP_COLOURS[kind]
    ]
    return [float(length) for path in paths for length in re.findall(r"h([\d.]+)", path)]


@pytest.mark.parametrize("draw", PICTURES)
@pytest.mark.parametrize("num_ops", [3000, 100_000])
def test_pictures_are_xml_of_less_than_60_kb(draw, num_ops: int) -> None:
    svg = draw(long_trace(num_ops))
    ET.fromstring(svg)
    assert len(svg.encode()) < 60_000


@pytest.mark.parametrize("draw", PICTURES)
def test_pictures_scale_and_speak(draw) -> None:
    root = ET.fromstring(draw(pipeline_trace()))
    assert root.get("viewBox")
    assert root.get("role") == "img"
    assert root.find(f"{NAMESPACE}title").text
    assert root.find(f"{NAMESPACE}desc").text


def test_bars_are_as_long_as_their_ops() -> None:
    trace = pipeline_trace()
    svg = timeline_svg(trace)
    pixels_per_ms = max(bar_lengths(svg, OpKind.BACKWARD)) / 8
    for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.RECV):
        expected = [round(s.end_s * 1e3 - s.start_s * 1e3) for s in trace.spans() if s.op.kind is kind]
        assert sorted(bar_lengths(svg, kind)) == pytest.approx(
            sorted(ms * pixels_per_ms for ms in expected), abs=0.8
        ), kind


def test_an_axis_can_reach_beyond_the_iteration_to_compare() -> None:
    trace = pipeline_trace()
    alone, beside = timeline_svg(trace), timeline_svg(trace, until_s=2 * trace.makespan_s)
    assert max(bar_lengths(beside, OpKind.BACKWARD)) == pytest.approx(
        max(bar_lengths(alone, OpKind.BACKWARD)) / 2, abs=0.8
    )


def test_timelines_name_rows_units_and_kinds() -> None:
    words = texts(timeline_svg(pipeline_trace()))
    assert {"emu0 · compute", "host · updates", "time (ms)", "swap in", "receive"} <= set(words)


def test_memory_shows_peaks_budgets_and_colours_of_the_kinds() -> None:
    svg = memory_svg(pipeline_trace())
    assert "emu1: peak 7.75 MiB of 8.00 MiB in this prediction" in texts(svg)
    assert "8 MiB" in texts(svg)
    assert TENSOR_COLOURS[TensorKind.SAVED] in svg
    assert "stroke-dasharray" in svg
    assert ALARM_COLOUR not in svg


def test_the_stack_is_as_high_as_the_peak() -> None:
    svg = memory_svg(pipeline_trace())
    saved = TENSOR_COLOURS[TensorKind.SAVED]
    paths = [n.get("d") for n in ET.fromstring(svg).iter(f"{NAMESPACE}path") if n.get("fill") == saved]
    dashes = [n.get("d") for n in ET.fromstring(svg).iter(f"{NAMESPACE}path") if n.get("stroke-dasharray")]
    for path, dash, peak in zip(paths, dashes, pipeline_trace().peak_bytes, strict=True):
        y = base = float(re.match(r"M[\d.]+ ([\d.]+)", path).group(1))
        highest = base
        for step in re.findall(r"v(-?[\d.]+)", path):
            y += float(step)
            highest = min(highest, y)
        budget_y = float(re.match(r"M[\d.]+ ([\d.]+)", dash).group(1))
        assert (base - highest) / (base - budget_y) == pytest.approx(peak / (8 * MIB), abs=0.005)


def test_a_peak_beyond_the_budget_is_red() -> None:
    svg = memory_svg(long_trace(100, budget=30 * MIB))
    assert ALARM_COLOUR in svg
    assert any("too much" in words for words in texts(svg))


def test_swap_cells_carry_their_bytes() -> None:
    words = texts(swaps_svg(pipeline_trace()))
    assert words.count("2.00 MiB") == 2  # weights in and gradients out of the first pack
    assert words.count("3.00 MiB") == 2
    assert {"[0:2) F", "[2:4) B", "[0:2) B"} <= set(words)


def test_many_packs_are_cut_to_the_largest_and_the_title_says_so() -> None:
    assert "(the 40 largest of 48 packs)" in texts(swaps_svg(long_trace(3000)))[0]


def test_the_loss_curve_ends_where_the_losses_end() -> None:
    svg = loss_svg([4.0, 3.0, 2.0])
    assert texts(svg)[0] == "Loss: 4.000 → 2.000"
    path = next(n.get("d") for n in ET.fromstring(svg).iter(f"{NAMESPACE}path") if n.get("stroke-linejoin"))
    points = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    assert len(points) == 3
    (_, first), (_, middle), (_, last) = points
    assert middle - first == pytest.approx(last - middle, abs=0.2)
    assert last > first


@pytest.mark.parametrize(
    "losses", [[], [2.5], [1.0, 1.0], [3.0, float("nan"), 2.0], [float("inf")], list(np.linspace(9, 1, 50_000))]
)
def test_any_losses_draw(losses: list[float]) -> None:
    svg = loss_svg(losses)
    ET.fromstring(svg)
    assert len(svg) < 60_000
    paths = [node.get("d") for node in ET.fromstring(svg).iter(f"{NAMESPACE}path")]
    assert not any("nan" in path or "inf" in path for path in paths)


def test_a_program_without_ops_draws() -> None:
    empty = trace_of(Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=()), np.zeros(0), np.zeros(0))
    for draw in PICTURES:
        ET.fromstring(draw(empty))
