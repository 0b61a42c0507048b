"""Figures of rankings, profiles and losses show the numbers they are given."""

import numpy as np
import pandas
import pytest
import toy_profiles
from figures.pipelines import MIB, ranking, small_profile

from harmony_lab.errors import OutOfRangeError
from harmony_lab.figures.candidates import candidates_scatter, candidates_spec
from harmony_lab.figures.loss import loss_curve, loss_spec
from harmony_lab.figures.profile import profile_figure
from harmony_lab.figures.spec import spec_json
from harmony_lab.figures.tables import candidates_html, profile_html
from harmony_lab.figures.theme import MODE_COLOURS, OP_COLOURS, TENSOR_COLOURS
from harmony_lab.plan import Mode
from harmony_lab.planner.search import search
from harmony_lab.program import OpKind, TensorKind


def test_every_candidate_is_a_point_of_its_modes_colour() -> None:
    frame = ranking()
    figure = candidates_scatter(frame)
    for points, mode in zip(figure.data, Mode, strict=False):
        rows = frame[frame["mode"] == mode.value]
        assert points.marker.color == MODE_COLOURS[mode]
        assert points.x == pytest.approx(rows["peak_bytes"] / MIB)
        assert points.y == pytest.approx(rows["step_s"] * 1e3)
        assert list(points.customdata) == rows["rank"].tolist()
    best = figure.data[-1]
    assert (best.x[0], best.y[0]) == pytest.approx((frame["peak_bytes"][0] / MIB, frame["step_s"][0] * 1e3))


def test_the_plan_at_hand_is_marked_at_its_own_memory_and_time() -> None:
    *_, mark = candidates_spec(ranking(), (3 * MIB, 0.25))["data"]
    assert (mark["name"], *mark["x"], *mark["y"]) == ("the plan at hand", 3.0, 250.0)


def test_few_steps_have_a_tick_each() -> None:
    assert loss_spec([2.0, 1.0])["layout"]["xaxis"]["dtick"] == 1
    assert "dtick" not in loss_spec([1.0] * 100)["layout"]["xaxis"]


def test_no_candidates_draw() -> None:
    assert len(candidates_scatter(ranking().iloc[:0]).data) == 0


def test_the_table_has_units_and_says_what_it_leaves_out() -> None:
    table = candidates_html(ranking(), limit=5)
    assert table.count("<tr>") == 6
    assert "310 ms" in table
    assert "MiB" in table
    assert "and 7 more" in table
    assert "more" not in candidates_html(ranking(), limit=12)


def test_of_candidates_that_read_the_same_the_table_shows_the_first() -> None:
    frame = pandas.concat([ranking().iloc[:1]] * 3 + [ranking().iloc[1:]], ignore_index=True)
    frame["rank"] = range(len(frame))
    table = candidates_html(frame, limit=2)
    assert "<tr><td>0</td>" in table
    assert "<tr><td>1</td>" not in table
    assert "<tr><td>3</td>" in table
    assert f"and {len(frame) - 2} more" in table


def test_one_pack_is_singular_and_no_forward_pack_is_said() -> None:
    frame = ranking().iloc[:1].assign(num_forward_packs=0, num_backward_packs=1, backward_microbatch_size=8)
    table = candidates_html(frame)
    assert "<td>in backward</td><td>1 pack × 8</td>" in table


@pytest.mark.parametrize("size", [None, 2, 3])
def test_profile_bars_are_the_costs_at_that_microbatch_size(size: int | None) -> None:
    profile = small_profile()
    figure = profile_figure(profile, size)
    forward, backward, parameters, saved, *_ = figure.data
    costs = [profile.cost(layer, size or 4) for layer in range(len(profile))]
    assert forward.y == pytest.approx([cost.forward_s * 1e3 for cost in costs])
    assert backward.y == pytest.approx([cost.backward_s * 1e3 for cost in costs])
    assert parameters.y == pytest.approx([layer.parameter_bytes / MIB for layer in profile.layers])
    assert saved.y == pytest.approx([cost.saved_bytes / MIB for cost in costs])
    assert forward.marker.color == OP_COLOURS[OpKind.FORWARD]
    assert saved.marker.color == TENSOR_COLOURS[TensorKind.SAVED]


def test_the_whole_models_seconds_are_drawn_against_the_microbatch_size() -> None:
    profile = small_profile()
    *_, forward, backward = profile_figure(profile, 2).data
    for line, name in ((forward, "forward_s"), (backward, "backward_s")):
        assert list(line.x) == list(profile.microbatch_sizes)
        sums = [sum(getattr(layer.costs[i], name) for layer in profile.layers) for i in range(len(line.x))]
        assert line.y == pytest.approx([seconds * 1e3 for seconds in sums])
        assert line.xaxis == "x4"


def test_a_profile_is_not_drawn_beyond_what_was_measured() -> None:
    with pytest.raises(OutOfRangeError):
        profile_figure(small_profile(), 8)


def test_the_profile_table_has_a_row_per_layer_and_escapes_names() -> None:
    table = profile_html(small_profile(3))
    assert table.count("<tr>") == 4
    assert "6.00 MiB" in table
    assert "<script>" not in profile_html(small_profile(3, first_name="<script>"))


def test_losses_are_drawn_by_step() -> None:
    line = loss_curve([3.0, 2.5, 2.0]).data[0]
    assert list(line.x) == [1, 2, 3]
    assert list(line.y) == [3.0, 2.5, 2.0]
    assert loss_curve([]).layout.title.text == "Loss: no step yet"


def test_a_long_curve_is_thinned_without_losing_its_extremes() -> None:
    losses = [3.0 + 0.1 * (step % 7) for step in range(10_000)]
    losses[4321], losses[8765], losses[5000] = 99.0, -1.0, float("nan")
    line = loss_curve(losses).data[0]
    shown = dict(zip(line.x, line.y, strict=True))
    assert len(shown) <= 2000
    assert (shown[4322], shown[8766], shown[1], shown[10_000]) == (99.0, -1.0, losses[0], losses[-1])
    assert all(shown[step] == losses[step - 1] for step in shown if step != 5001)
    assert np.isnan(shown[5001])
    assert (np.diff(line.x) > 0).all()
    assert len(spec_json(loss_spec(losses))) < 50_000


def test_the_planners_ranking_draws() -> None:
    result = search(toy_profiles.profile(4), toy_profiles.gpus(2), 4)
    frame = result.to_frame()
    assert list(frame.columns) == list(ranking().columns)
    assert sum(len(points.x) for points in candidates_scatter(frame).data[:-1]) == len(frame)
    assert str(len(frame)) in candidates_scatter(frame).layout.title.text
    assert 2 < candidates_html(frame, limit=len(frame)).count("<tr>") <= len(frame) + 1
