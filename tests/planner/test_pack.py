"""Bytes of packs with layers that have nothing to train."""

from dataclasses import replace

import toy_profiles as toys

from harmony_lab.planner.pack import PackCosts


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
