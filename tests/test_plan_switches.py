"""What may stay on a device, as knobs of a plan: which combinations make sense, and their text and JSON."""

import json
import random

import pytest
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.errors import PlanError
from harmony_lab.plan import Pack, Plan, difference

# Seven stages on three devices: 0:2 runs first and last, on device 0; 2:4 on device 1 forward and on device 2 backward.
ROUND = Plan.parse("pp minibatch=8 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0,1,2")
MIRRORED = ROUND.with_(mirrored=True)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_plan_reads_back_from_its_text_and_json(seed: int) -> None:
    rng = random.Random(seed)
    plan = toys.random_plan(rng, rng.randint(2, 10))
    if plan.just_in_time_update:
        plan = plan.with_(device_updates=[pack for pack in plan.backward_packs if rng.random() < 0.3])
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (ROUND.with_(mode="dp"), {"mirrored": True}, "mirrored is for pp"),
        (MIRRORED, {"resident_packs": ((0, 4),)}, "resident_packs: 0:4 must be both a forward and a backward pack"),
        (MIRRORED, {"resident_packs": ((6, 8),)}, "resident_packs: 6:8 must be both a forward and a backward pack"),
        (
            ROUND,
            {"resident_packs": ((2, 4),)},
            r"resident_packs: 2:4 runs .* on different devices; .*resident=\(\) for",
        ),
        (MIRRORED, {"kept_packs": ((0, 2),)}, "kept_packs: 0:2 must be one of resident_packs"),
        (
            MIRRORED,
            {"resident_packs": ((0, 2),), "kept_packs": ((0, 2),), "forward_microbatch_size": 4},
            "need forward and backward microbatches of one size",
        ),
        (MIRRORED, {"device_stash": (2,), "forward_microbatch_size": 4}, "microbatches of one size"),
        (MIRRORED, {"device_stash": (3,)}, "device_stash: no backward pack starts at boundary 3"),
        (MIRRORED, {"device_stash": (0,)}, "device_stash: no backward pack starts at boundary 0"),
        (
            ROUND,
            {"device_stash": (2,)},
            r"at boundary 2 are on different devices; .*mirrored=True may .*stash=\(\) for none",
        ),
        (MIRRORED, {"device_stash": (6,)}, "device_stash: forward and backward at boundary 6 are on different devices"),
        (ROUND, {"device_updates": ((0, 4),)}, "device_updates: 0:4 must be one of backward_packs"),
        (ROUND, {"device_updates": ((0, 2), (0, 2))}, "device_updates: a pack is updated once, got 0:2,0:2"),
        (ROUND, {"device_updates": ((0, 2),), "just_in_time_update": False}, "need just_in_time_update"),
        (ROUND, {"device_updates": ((0, 2),), "precision": "bf16"}, "device_updates need precision fp32"),
    ],
)
def test_what_cannot_stay_is_named(plan: Plan, changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.with_(**changes)


def test_weights_may_stay_wherever_a_pack_runs_forward_and_backward_on_one_device() -> None:
    assert MIRRORED.with_(resident_packs=((0, 2), (2, 4), (4, 6))).resident_packs == ((0, 2), (2, 4), (4, 6))
    ROUND.with_(mode="dp", resident_packs=((0, 2),))
    ROUND.with_(devices=(0,), resident_packs=((0, 2),))
    ROUND.with_(resident_packs=((0, 2),))


def test_mirrored_backward_packs_run_where_the_forward_of_their_first_layer_ran() -> None:
    plan = ROUND.with_(forward_packs=((0, 3), (3, 4), (4, 6)), mirrored=True)
    where = [plan.backward_devices(pack) for pack in plan.backward_packs]
    assert where == [(0,), (0,), (2,), (0,)]  # 0:3 on 0, 3:4 on 1, 4:6 on 2; the last pack in its turn
    assert ROUND.backward_devices(Pack(0, 2)) == (0,)
    assert ROUND.backward_devices(Pack(2, 4)) == (2,)


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        ROUND.with_(resident_packs=((0, 4),), kept_packs=((2, 4),), device_stash=(3,), prefetch=-1)
    assert len(caught.value.violations) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "zz"}, "mode must be dp or pp, got 'zz'"),
        ({"prefetch": 1.5}, "prefetch must be a whole number, got 1.5"),
        ({"peer_transfers": "off"}, "peer_transfers must be True or False, got 'off'"),
        ({"devices": 2}, r"devices must be whole numbers like \(0, 1\), got 2"),
        ({"device_stash": "2"}, "device_stash must be whole numbers"),
        ({"resident_packs": (0, 2)}, r"resident_packs must be packs like \(\(0, 2\), \(2, 5\)\), got \(0, 2\)"),
        (
            {"recompute": False},
            "'recompute' is no knob of a plan\n.* there are mode, .*kept_packs.*text .*peer=, update=",
        ),
        ({"update": "late"}, "update= is jit, end or next, got 'late'"),
        ({"update": True}, "update= is jit, end or next, got True"),
        ({"peer": "of"}, "peer= is on or off, got 'of'"),
        ({"forward": "4"}, r"forward= takes a microbatch size and packs like 4\[0:3,3:6\], got '4'"),
        ({"peer": "off", "peer_transfers": False}, "peer_transfers is given twice"),
    ],
)
def test_values_that_are_none_of_their_knob_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        MIRRORED.with_(**changes)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_knobs_may_be_turned_in_the_words_of_the_text(seed: int) -> None:
    rng = random.Random(seed)
    a, b = toys.random_plan(rng, 6), toys.random_plan(rng, 6)
    mode, *words = str(b).split()
    nothing_stays = {"resident": "", "kept": "", "stash": "", "optimizer": "", "mirrored": "off", "precision": "fp32"}
    assert a.with_(mode=mode, **nothing_stays | dict(word.split("=") for word in words)) == b


def test_a_word_for_one_knob_takes_its_value_too() -> None:
    turned = MIRRORED.with_(peer=False, stash=(2,), resident=((0, 2),), minibatch=12)
    assert turned == MIRRORED.with_(peer="off", stash="2", resident="0:2", minibatch="12")
    assert not turned.peer_transfers
    assert turned.device_stash == (2,)


def test_a_difference_names_the_knobs_and_the_packs_that_are_not_the_same() -> None:
    other = MIRRORED.with_(
        forward_packs=((0, 2), (2, 3), (3, 6)), prefetch=0, peer_transfers=False, resident_packs=((0, 2),)
    )
    assert difference(MIRRORED, other).splitlines() == [
        "forward_packs: 2:4,4:6 → 2:3,3:6 (3 → 3 packs, 1 as before)",
        "prefetch: 1 → 0",
        "peer_transfers: on → off",
        "resident_packs: none → 0:2",
    ]
    assert difference(MIRRORED, MIRRORED.with_(fingerprint="other")) == ""


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_that_differ_say_so_in_either_direction(seed: int) -> None:
    rng = random.Random(seed)
    a, b = toys.random_plan(rng, 6), toys.random_plan(rng, 6)
    there, back = difference(a, b).splitlines(), difference(b, a).splitlines()
    assert bool(there) == (a != b)
    assert [line.split(":")[0] for line in there] == [line.split(":")[0] for line in back]


@pytest.mark.parametrize("given", [42, None, ("dp",)])
def test_what_is_neither_a_plan_nor_a_text_is_named(given: object) -> None:
    with pytest.raises(PlanError, match=f"expected a harmony_lab.Plan or its text, got a {type(given).__name__}"):
        Plan.of(given)  # type: ignore[arg-type]


def test_json_without_some_of_the_knobs_says_which_are_missing() -> None:
    data = ROUND.to_json()
    del data["devices"], data["backward_packs"], data["prefetch"]
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data)
    assert caught.value.violations == ("backward_packs is missing", "devices is missing")
