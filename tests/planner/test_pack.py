"""What packs need, and partitions into packs."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import toy_profiles as toys
from hypothesis import given
from hypothesis import strategies as st

from harmony_lab.costs import Profile, SharedParameter
from harmony_lab.layers import TensorSpec
from harmony_lab.plan import Pack
from harmony_lab.planner.pack import PackCosts, balanced_packs, partitions
from harmony_lab.planner.partition import best_partitions, cut, furthest_stops


def test_layers_below_the_first_trainable_one_save_nothing() -> None:
    profile = toys.profile(6, frozen=3)
    costs = PackCosts(profile)
    saved = [profile.cost(layer, 2).saved_bytes for layer in range(6)]
    last_frozen_value = profile.boundary_bytes(3, 2)
    assert costs.saved_bytes(0, 6, 2) == last_frozen_value + sum(saved[3:])
    assert costs.saved_bytes(3, 6, 2) == sum(saved[3:])
    trained = replace(profile, layers=tuple(replace(layer, gradient_bytes=64) for layer in profile.layers))
    assert PackCosts(trained).saved_bytes(0, 6, 2) == sum(saved)


def test_a_frozen_layer_counts_where_it_alone_needs_most() -> None:
    profile = toys.profile(6, frozen=3)
    hungry = profile.layers[1].costs
    peak = 10 * max(cost.recompute_peak_bytes for cost in hungry)
    layer = replace(profile.layers[1], kind=99, costs=tuple(c._replace(recompute_peak_bytes=peak) for c in hungry))
    profile = replace(profile, layers=(profile.layers[0], layer, *profile.layers[2:]))
    costs = PackCosts(profile)
    alive = costs.saved_bytes(0, 6, 2) + costs.recompute_workspace(0, 6, 2)
    assert alive == profile.boundary_bytes(1, 2) + peak


def uneven(rng: random.Random, num_layers: int) -> Profile:
    """A profile whose layers all differ, with ties, buffers, frozen layers and values that pass by layers."""
    profile = toys.profile(num_layers, buffers=rng.random() < 0.5, frozen=rng.choice((0, 0, 2)))
    layers = []
    for index, layer in enumerate(profile.layers):
        costs = tuple(
            cost._replace(
                forward_s=rng.random(),
                backward_s=rng.random(),
                forward_peak_bytes=rng.randint(0, 10**5),
                saved_bytes=rng.randint(0, 10**5),
                recompute_peak_bytes=rng.randint(0, 2 * 10**5),
                backward_peak_bytes=rng.randint(0, 3 * 10**5),
            )
            for cost in layer.costs
        )
        layers.append(replace(layer, kind=index, costs=costs))
    boundaries = [list(values) for values in profile.boundaries]
    for number in range(2):
        first, last = sorted(rng.sample(range(1, num_layers), 2))
        value = TensorSpec(
            name=f"passing{number}",
            shape=(rng.randint(1, 10_000),),
            dtype="float32",
            item_bytes=4,
            batch_dim=0,
            requires_grad=rng.random() < 0.5,
        )
        for boundary in range(first, last + 1):
            boundaries[boundary].append(value)
    readers = tuple(sorted(rng.sample(range(num_layers), 3)))
    shared = SharedParameter(name="tied", num_bytes=64_000, gradient_bytes=64_000, layers=readers)
    return replace(profile, layers=tuple(layers), boundaries=tuple(map(tuple, boundaries)), shared=(shared,))


@pytest.mark.parametrize("seed", range(10))
def test_tables_of_all_packs_hold_what_each_pack_needs(seed: int) -> None:
    rng = random.Random(seed)
    costs = PackCosts(uneven(rng, 7))
    stashed = set(rng.sample(range(1, 7), 2))
    forward = costs.needs(4, forward=True, stash_at=stashed)
    backward = costs.needs(4, forward=False)
    for start, stop in combinations(range(8), 2):
        keep = tuple(b for b in range(start + 1, stop + 1) if b == stop or b in stashed)
        assert forward[start, stop] == costs.forward_bytes(start, stop, 4, keep)
        assert backward[start, stop] == costs.backward_bytes(start, stop, 4)
    assert not np.tril(forward).any()


@pytest.mark.parametrize("seed", range(10))
def test_state_of_packs_counts_what_layers_share_once(seed: int) -> None:
    profile = uneven(random.Random(seed), 7)
    costs = PackCosts(profile)
    for start, stop in combinations(range(8), 2):
        assert costs.weight_bytes(start, stop) == profile.weight_bytes(start, stop)
        assert costs.gradient_bytes(start, stop) == profile.gradient_bytes(start, stop)
        assert costs.buffer_bytes(start, stop) == profile.buffer_bytes(start, stop)


def test_seconds_of_packs_are_sums_over_their_layers_also_between_measured_sizes() -> None:
    profile = uneven(random.Random(1), 7)
    costs = PackCosts(profile)
    for size in (1, 3, 8):
        rows = [profile.cost(layer, size) for layer in range(2, 6)]
        assert costs.forward_s(2, 6, size) == pytest.approx(sum(row.forward_s for row in rows))
        assert costs.recompute_s(2, 6, size) == pytest.approx(sum(row.recompute_s for row in rows))
        assert costs.backward_s(2, 6, size) == pytest.approx(sum(row.backward_s for row in rows))


@given(seed=st.integers(0, 10**6), num_layers=st.integers(1, 7))
def test_partitions_are_optimal_for_every_number_of_packs(seed: int, num_layers: int) -> None:
    rng = random.Random(seed)
    seconds = np.array([rng.choice((0.0, 1.0, rng.random())) for _ in range(num_layers)])
    fits = np.array([[a < b and rng.random() < 0.8 for b in range(num_layers + 1)] for a in range(num_layers + 1)])
    start = rng.randrange(num_layers)
    stop = rng.randint(start + 1, num_layers)
    found = best_partitions(seconds, fits, start, stop, range(10))
    for count in range(1, stop - start + 1):
        splits = [list(pairwise((start, *cuts, stop))) for cuts in combinations(range(start + 1, stop), count - 1)]
        allowed = [split for split in splits if all(fits[pack] for pack in split)]
        if not allowed:
            assert count not in found
            continue
        packs = found.pop(count)
        assert list(packs) in allowed
        least = min(max(sum(seconds[a:b]) for a, b in split) for split in allowed)
        assert max(sum(seconds[a:b]) for a, b in packs) == pytest.approx(least, abs=1e-11)
    assert not found


@given(
    seconds=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=9),
    sizes=st.lists(st.integers(1, 10), min_size=9, max_size=9),
    budget=st.integers(8, 40),
    data=st.data(),
)
def test_the_quick_cut_finds_what_the_exact_partition_finds(seconds, sizes, budget, data) -> None:
    num_layers = len(seconds)
    summed, held = np.cumsum([0.0, *seconds]), np.cumsum([0, *sizes[:num_layers]])
    needs = held[None, :] - held[:, None]
    fits = (needs > 0) & (needs <= budget)
    start = data.draw(st.integers(0, num_layers - 1))
    stop = data.draw(st.integers(start + 1, num_layers))
    exact = best_partitions(np.array(seconds), fits, start, stop, range(1, num_layers + 1))
    for count in range(1, num_layers + 2):
        edges = np.zeros(count + 1, dtype=np.int64)
        assert cut(summed, furthest_stops(fits), start, stop, count, edges) == (count in exact)
        if count in exact:
            packs = list(pairwise(edges.tolist()))
            assert (edges[0], edges[-1]) == (start, stop)
            assert all(fits[pack] for pack in packs)
            slowest = max(summed[last] - summed[first] for first, last in packs)
            least = max(summed[last] - summed[first] for first, last in exact[count])
            assert least * (1 - 1e-9) <= slowest <= least * (1 + 2e-4)


def test_what_the_slowest_pack_leaves_open_is_shared_out_evenly() -> None:
    seconds = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0])
    fits = np.triu(np.ones((8, 8), dtype=np.bool_), k=1)
    assert best_partitions(seconds, fits, 0, 6, (2, 3)) == {
        2: (Pack(0, 3), Pack(3, 6)),
        3: (Pack(0, 2), Pack(2, 4), Pack(4, 6)),
    }
    packs = best_partitions(seconds, fits, 0, 7, (3,))[3]
    assert [pack.stop - pack.start for pack in packs] == [5, 1, 1]


@pytest.mark.parametrize("seed", range(10))
def test_partitions_keep_the_memory_cap(seed: int) -> None:
    rng = random.Random(seed)
    costs = PackCosts(uneven(rng, 7))
    budget = int(np.median(costs.needs(2, forward=False)[np.triu_indices(8, k=1)]))
    found = partitions(costs, 0, 7, 2, forward=False, budget_bytes=budget, counts=range(1, 8))
    assert found
    for count, packs in found.items():
        assert len(packs) == count
        assert all(costs.backward_bytes(pack.start, pack.stop, 2) <= budget for pack in packs)
    assert list(costs.reach(2, budget, forward=False)) == [
        max((stop for stop in range(start + 1, 8) if costs.backward_bytes(start, stop, 2) <= budget), default=start)
        for start in range(7)
    ]


def test_stashed_boundaries_count_against_the_memory_of_forward_packs() -> None:
    costs = PackCosts(toys.profile(8, activation_bytes=10_000))
    budget = costs.forward_bytes(0, 8, 8, keep=(8,))
    whole = {1: (Pack(0, 8),)}
    assert partitions(costs, 0, 8, 8, forward=True, budget_bytes=budget, counts=(1,)) == whole
    stash = tuple(range(1, 8))
    assert not partitions(costs, 0, 8, 8, forward=True, budget_bytes=budget, counts=(1,), stash_at=stash)


def test_packs_respect_the_memory_cap() -> None:
    costs = PackCosts(toys.profile(8))
    found = partitions(costs, 0, 8, 2, forward=False, budget_bytes=5_000_000, counts=(2, 4))
    assert list(found) == [4]
    packs = found[4]
    assert all(costs.backward_bytes(pack.start, pack.stop, 2) <= 5_000_000 for pack in packs)
    assert balanced_packs(toys.profile(8), 2, 8, 3, 1, forward=True) == (Pack(2, 4), Pack(4, 6), Pack(6, 8))
