"""Knobs: plan to controls and back."""

import pytest
import toy_profiles

from harmony_lab.errors import PlanError
from harmony_lab.notebook.knobs import Knobs, microbatch_choices
from harmony_lab.plan import Mode, Pack, Plan

PLAN = Plan.parse("dp minibatch=8 forward=2[0:1,1:5] backward=4[0:2,2:5,5:8] devices=0,1 prefetch=1 peer=on update=jit")
PROFILE = toy_profiles.profile(8)


def test_unturned_knobs_give_the_same_plan():
    assert Knobs.of(PLAN).apply(PLAN, PROFILE) == PLAN


def test_switches_and_sizes_leave_the_packs_alone():
    knobs = Knobs.of(PLAN).turn(
        mode=Mode.PP, prefetch=0, peer_transfers=False, just_in_time_update=False, forward_microbatch_size=8
    )
    turned = knobs.apply(PLAN, PROFILE)
    assert turned == PLAN.with_(
        mode=Mode.PP, prefetch=0, peer_transfers=False, just_in_time_update=False, forward_microbatch_size=8
    )


def test_another_number_of_backward_packs_balances_both_directions():
    turned = Knobs.of(PLAN).turn(num_backward_packs=4).apply(PLAN, PROFILE)
    assert turned.backward_packs == (Pack(0, 2), Pack(2, 4), Pack(4, 6), Pack(6, 8))
    assert turned.forward_packs == (Pack(0, 3), Pack(3, 6))


def test_another_number_of_forward_packs_leaves_backward_packs_alone():
    turned = Knobs.of(PLAN).turn(num_forward_packs=5).apply(PLAN, PROFILE)
    assert turned.backward_packs == PLAN.backward_packs
    assert [pack.stop - pack.start for pack in turned.forward_packs] == [1] * 5


def test_counts_beyond_what_the_layers_allow_are_cut():
    turned = Knobs.of(PLAN).turn(num_forward_packs=99, num_backward_packs=99).apply(PLAN, PROFILE)
    assert len(turned.backward_packs) == 8
    assert len(turned.forward_packs) == 7


def test_one_backward_pack_has_no_forward_packs_and_back_again():
    fused = Knobs.of(PLAN).turn(num_backward_packs=1).apply(PLAN, PROFILE)
    assert fused.forward_packs == ()
    assert Knobs.of(fused).turn(num_backward_packs=2).apply(fused, PROFILE).forward_packs == (Pack(0, 4),)


def test_sizes_that_break_invariants_are_refused_with_the_reason():
    with pytest.raises(PlanError, match="forward_microbatch_size must lie between 1 and the minibatch size 8"):
        Knobs.of(PLAN).turn(forward_microbatch_size=9).apply(PLAN, PROFILE)


def test_microbatch_choices_are_what_the_profile_covers_and_the_size_at_hand():
    assert microbatch_choices(PROFILE, 6) == (1, 2, 3, 4, 5, 6)
    assert microbatch_choices(PROFILE, 64) == tuple(range(1, 9))
    assert microbatch_choices(PROFILE, 64, 12)[-1] == 12
