"""What may stay on a device, as knobs of a plan: which combinations make sense, and their text and JSON."""

import json
import random

import pytest
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.errors import PlanError
from harmony_lab.plan import Pack, Plan

# Seven stages on three devices: 0:2 runs first and last, on device 0; 2:4 on device 1 forward and on device 2 backward.
ROUND = Plan.parse("pp minibatch=8 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0,1,2")
MIRRORED = ROUND.with_(mirrored=True)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_plan_reads_back_from_its_text_and_json(seed: int) -> None:
    rng = random.Random(seed)
    plan = toys.random_plan(rng, rng.randint(2, 10))
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (ROUND.with_(mode="dp"), {"mirrored": True}, "mirrored is for pp"),
        (MIRRORED, {"resident_packs": ((0, 4),)}, "resident_packs: 0:4 must be both a forward and a backward pack"),
        (MIRRORED, {"resident_packs": ((6, 8),)}, "resident_packs: 6:8 must be both a forward and a backward pack"),
        (ROUND, {"resident_packs": ((2, 4),)}, r"resident_packs: 2:4 runs .* on different devices \(see mirrored\)"),
        (MIRRORED, {"kept_packs": ((0, 2),)}, "kept_packs: 0:2 must be one of resident_packs"),
        (
            MIRRORED,
            {"resident_packs": ((0, 2),), "kept_packs": ((0, 2),), "forward_microbatch_size": 4},
            "need forward and backward microbatches of one size",
        ),
        (MIRRORED, {"device_stash": (2,), "forward_microbatch_size": 4}, "microbatches of one size"),
        (MIRRORED, {"device_stash": (3,)}, "device_stash: no backward pack starts at boundary 3"),
        (MIRRORED, {"device_stash": (0,)}, "device_stash: no backward pack starts at boundary 0"),
        (ROUND, {"device_stash": (2,)}, r"device_stash: boundary 2 is needed on another device .* \(see mirrored\)"),
        (MIRRORED, {"device_stash": (6,)}, "device_stash: boundary 6 is needed on another device"),
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
