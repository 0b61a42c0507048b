"""Knobs: plan to controls and back."""

import pytest
import toy_profiles

from harmony_lab.errors import PlanError
from harmony_lab.notebook.knobs import Knobs, Updates, cuts_text, microbatch_choices, parse_cuts
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.preview import recut

PLAN = Plan.parse("dp minibatch=8 forward=2[0:1,1:5] backward=4[0:2,2:5,5:8] devices=0,1 prefetch=1 peer=on update=jit")
PROFILE = toy_profiles.profile(8)


def test_unturned_knobs_give_the_same_plan():
    assert Knobs.of(PLAN).apply(PLAN, PROFILE) == PLAN


def test_switches_and_sizes_leave_the_packs_alone():
    knobs = Knobs.of(PLAN).turn(
        mode=Mode.PP, prefetch=0, peer_transfers=False, updates=Updates.END, forward_microbatch_size=8
    )
    turned = knobs.apply(PLAN, PROFILE)
    assert turned == PLAN.with_(
        mode=Mode.PP, prefetch=0, peer_transfers=False, just_in_time_update=False, forward_microbatch_size=8
    )


@pytest.mark.parametrize("before", Updates)
@pytest.mark.parametrize("after", Updates)
def test_updates_come_when_they_are_turned_to_from_any_other_time(before: Updates, after: Updates):
    base = Knobs.of(PLAN).turn(updates=before).apply(PLAN, PROFILE)
    turned = Knobs.of(base).turn(updates=after).apply(base, PROFILE)
    assert Updates.of(turned) is after
    assert f"update={dict(zip(Updates, ('jit', 'end', 'next'), strict=True))[after]}" in str(turned)


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


STAYING = Plan.parse(
    "dp minibatch=8 forward=4[0:2,2:5] backward=4[0:2,2:5,5:8] devices=0,1 resident=0:2,2:5 kept=2:5 stash=2,5"
)


def test_what_stays_on_the_devices_is_kept_where_it_can():
    turned = Knobs.of(STAYING).turn(prefetch=0).apply(STAYING, PROFILE)
    assert turned == STAYING.with_(prefetch=0)
    smaller = Knobs.of(STAYING).turn(forward_microbatch_size=2).apply(STAYING, PROFILE)
    assert (smaller.resident_packs, smaller.kept_packs, smaller.device_stash) == (STAYING.resident_packs, (), ())


def test_forward_packs_that_were_the_backward_packs_follow_them():
    turned = Knobs.of(STAYING).turn(num_backward_packs=4).apply(STAYING, PROFILE)
    assert turned.forward_packs == turned.backward_packs[:-1]
    assert turned.resident_packs == turned.forward_packs[-2:]
    assert turned.kept_packs == turned.forward_packs[-1:]
    moved = recut(STAYING, backward_cuts=(3, 6))
    assert moved.forward_packs == moved.resident_packs == (Pack(0, 3), Pack(3, 6))


def test_counts_of_what_stays_take_the_last_ones():
    turned = Knobs.of(STAYING).turn(num_resident_packs=1, num_stashed=1).apply(STAYING, PROFILE)
    assert (turned.resident_packs, turned.kept_packs, turned.device_stash) == ((Pack(2, 5),), (Pack(2, 5),), (5,))
    assert Knobs.of(turned).turn(num_resident_packs=0).apply(turned, PROFILE).kept_packs == ()


def test_data_parallel_plans_are_not_mirrored():
    mirrored = Plan.parse("pp minibatch=8 forward=4[0:2,2:5] backward=4[0:2,2:5,5:8] devices=0,1 mirrored=on")
    assert not Knobs.of(mirrored).turn(mode=Mode.DP).apply(mirrored, PROFILE).mirrored


def test_cuts_are_read_and_written():
    assert parse_cuts("2, 4 6", 8) == (2, 4, 6)
    assert parse_cuts("every 3", 8) == (3, 6)
    assert parse_cuts("  ", 8) == ()
    assert parse_cuts(cuts_text((1, 5)), 8) == (1, 5)
    with pytest.raises(PlanError, match="like '2, 4, 6'"):
        parse_cuts("2-4", 8)
