"""Heatmaps and link figures add up to the bytes the trace moved."""

import random

import numpy as np
import pytest
import toy_profiles
from figures.pipelines import MIB, long_trace, pipeline_trace

from harmony_lab.figures.spec import spec_json
from harmony_lab.figures.swaps import candidate_heatmap, swap_heatmap, swap_spec
from harmony_lab.figures.theme import TENSOR_COLOURS, label
from harmony_lab.figures.utilisation import link_utilisation
from harmony_lab.figures.volumes import Way, volumes_of_packs
from harmony_lab.machine import HOST
from harmony_lab.planner.lower import lower
from harmony_lab.program import TensorKind
from harmony_lab.simulator.engine import run


def cell(volumes, row: str, way: Way, kind: TensorKind) -> int:
    return int(volumes.num_bytes[volumes.rows.index(row), volumes.columns.index((way, kind))])


def test_transfers_belong_to_the_pack_that_computes_with_them() -> None:
    volumes = volumes_of_packs(pipeline_trace())
    assert volumes.rows == ("[0:2) F", "[2:4) B", "[0:2) B")  # the fused pack's forward counts as backward
    assert cell(volumes, "[0:2) F", Way.IN, TensorKind.WEIGHT) == 2 * MIB
    assert cell(volumes, "[0:2) F", Way.OUT, TensorKind.ACTIVATION) == MIB // 2  # an op of boundary 2: its producer's
    assert cell(volumes, "[2:4) B", Way.PEER, TensorKind.ACTIVATION) == MIB // 2
    assert cell(volumes, "[0:2) B", Way.PEER, TensorKind.ACTIVATION_GRADIENT) == MIB // 4
    assert volumes.num_bytes.sum() == sum(pipeline_trace().moved_bytes.values())


@pytest.mark.parametrize("seed", range(12))
def test_cells_add_up_to_the_bytes_moved_for_any_plan(seed: int) -> None:
    rng = random.Random(seed)
    profile, machine = toy_profiles.profile(6, buffers=seed % 2 == 0), toy_profiles.gpus(3, memory_bytes=10**9)
    plan = toy_profiles.random_plan(rng, 6)
    trace = run(lower(plan, profile, machine), profile, machine)
    volumes = volumes_of_packs(trace)
    for way in Way:
        for kind in TensorKind:
            moved = sum(
                n
                for (source, destination, k), n in trace.moved_bytes.items()
                if k is kind and way is (Way.IN if source == HOST else Way.OUT if destination == HOST else Way.PEER)
            )
            column = volumes.columns.index((way, kind)) if (way, kind) in volumes.columns else None
            assert moved == (0 if column is None else volumes.num_bytes[:, column].sum())
    packs = {f"[{a}:{b}) F" for a, b in plan.forward_packs} | {f"[{a}:{b}) B" for a, b in plan.backward_packs}
    assert set(volumes.rows) <= packs


def test_the_heatmap_shows_the_volumes_with_units() -> None:
    trace = pipeline_trace()
    heat = swap_heatmap(trace).data[0]
    volumes = volumes_of_packs(trace)
    assert 10.0 ** np.nan_to_num(heat.z, nan=-np.inf) == pytest.approx(volumes.num_bytes, rel=1e-5)
    assert heat.text[0][0] == "2.00 MiB"
    assert list(heat.y) == list(volumes.rows)


def test_candidates_are_compared_by_what_they_moved() -> None:
    traces = [pipeline_trace(), long_trace(500)]
    heat = candidate_heatmap(["short", "long"], traces).data[0]
    sums = (10.0 ** np.nan_to_num(np.asarray(heat.z, dtype=float), nan=-np.inf)).sum(axis=1)
    assert sums == pytest.approx([sum(trace.moved_bytes.values()) for trace in traces], rel=1e-5)


def test_links_show_busy_shares_and_bytes_by_kind() -> None:
    trace = pipeline_trace()
    figure = link_utilisation(trace)
    busy = figure.data[0]
    assert dict(zip(busy.y, busy.x, strict=True))["emu0 · compute"] == pytest.approx(15 / 37)
    weights = next(t for t in figure.data if t.name == label(TensorKind.WEIGHT))
    assert weights.marker.color == TENSOR_COLOURS[TensorKind.WEIGHT]
    assert dict(zip(weights.y, weights.x, strict=True))["host-switch ↓"] == pytest.approx(5)
    drawn = sum(sum(t.x) for t in figure.data[1:]) * MIB
    assert drawn == pytest.approx(sum(trace.link_bytes.values()))


def test_nothing_moved_draws_and_says_so() -> None:
    figure = candidate_heatmap([], [])
    assert figure.layout.annotations[0].text == "nothing is moved"


def test_the_heatmap_of_a_long_trace_is_small() -> None:
    assert len(spec_json(swap_spec(long_trace(3000)))) < 50_000


def test_a_few_bytes_somewhere_leave_large_volumes_apart() -> None:
    heat = swap_spec(long_trace(200))["data"][0]
    assert heat["zmax"] - heat["zmin"] < 3.1
