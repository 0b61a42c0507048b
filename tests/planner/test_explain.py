"""What binds a plan, what would help it, and what each of its switches buys."""

import json
from dataclasses import replace
from html import escape

import pytest
import toy_profiles as toys

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import Bridge, Machine
from harmony_lab.plan import Pack, Plan, difference
from harmony_lab.planner.baselines import baselines
from harmony_lab.planner.check import peak_bytes
from harmony_lab.planner.explain import _why, ablation, advice, what_binds
from harmony_lab.planner.lower import lower
from harmony_lab.planner.result import Candidate, SearchResult
from harmony_lab.program import OpKind
from harmony_lab.simulator.engine import run
from harmony_lab.units import format_change

PROFILE, MACHINE = toys.profile(8, overhead_s=0.002), toys.gpus(2)
AMPLE = toys.gpus(1, memory_bytes=10**9)
MIRRORED = Plan.parse(
    "pp minibatch=16 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0,1 mirrored=on "
    "resident=0:2,2:4,4:6 kept=2:4,4:6 stash=2,4"
)
PLAIN = MIRRORED.with_(mirrored=False, resident_packs=(), kept_packs=(), device_stash=())
ROOMY = toys.gpus(2, memory_bytes=10**8)


def result_of(*plans: Plan, profile: Profile = PROFILE, machine: Machine = ROOMY) -> SearchResult:
    steps = [(run(lower(plan, profile, machine), profile, machine).makespan_s, plan) for plan in plans]
    found = [Candidate(plan, step_s, profile, machine) for step_s, plan in sorted(steps, key=lambda step: step[0])]
    return SearchResult(candidates=tuple(found), rejected=(), lower_bound_s=found[0].step_s / 1.25)


def explained(plan: Plan, machine: Machine = MACHINE) -> str:
    trace = run(lower(plan, PROFILE, machine), PROFILE, machine)
    return what_binds(plan, trace, peak_bytes(trace.program))


# -- what binds -------------------------------------------------------------------------------------------------------


def test_the_pack_that_needs_most_of_the_fullest_device_is_named() -> None:
    plan = Plan.parse("pp minibatch=8 forward=2[0:1,1:4,4:6] backward=2[0:1,1:4,4:6,6:8] devices=0,1 prefetch=0")
    peak = max(peak_bytes(lower(plan, PROFILE, MACHINE)))
    text = explained(plan)
    assert "during backward of pack 1 [1:4]" in text
    assert f"gpu1 needs up to {peak / 2**20:.2f} MiB of 7.63 MiB" in text


def test_computing_names_what_is_computed_twice() -> None:
    machine = toys.gpus(2, memory_bytes=10**8)
    twice = explained(MIRRORED.with_(kept_packs=()), machine)
    kept = explained(MIRRORED.with_(kept_packs=MIRRORED.forward_packs), machine)
    spent = dict.fromkeys(OpKind, 0.0)
    trace = run(lower(MIRRORED.with_(kept_packs=()), PROFILE, machine), PROFILE, machine)
    for span in trace.spans():
        spent[span.op.kind] += span.end_s - span.start_s
    share = spent["recompute"] / (spent["forward"] + spent["recompute"] + spent["backward"])
    assert f", {share:.0%} of it recomputing)" in twice
    assert "recomputing" not in kept


def test_a_slow_link_binds_with_its_direction() -> None:
    text = explained(MIRRORED, toys.gpus(2, memory_bytes=10**8, link=1e6))
    assert text.startswith("What binds is the link host-switch to the devices (")


def test_the_hosts_memory_and_a_bridge_bind_by_name() -> None:
    on = toys.gpus(2, memory_bytes=10**8)
    slow = replace(on, host=replace(on.host, memory_bytes_per_s=1e6))
    assert explained(MIRRORED, slow).startswith("What binds is the host memory (")
    assert "host memory twice as fast" in [one.change for one in advice(MIRRORED, PROFILE, slow)]
    bridged = replace(on, bridges=(Bridge(first="gpu1", second="gpu0", bytes_per_s=1e3),))
    assert explained(MIRRORED, bridged).startswith("What binds is the bridge gpu1-gpu0 to gpu")


# -- what would help --------------------------------------------------------------------------------------------------


def test_advice_is_what_the_simulator_says_of_the_changed_machine() -> None:
    machine, plan = toys.gpus(2, link=1e6, memory_bytes=10**8), PLAIN
    first, *others = advice(plan, PROFILE, machine)
    assert all(first.saved >= other.saved >= 0.02 for other in others)
    by_change = {one.change: one for one in (first, *others)}
    links = by_change["links twice as fast"]
    faster = toys.gpus(2, link=2e6, peer_link=4e9, memory_bytes=10**8)
    before = run(lower(plan, PROFILE, machine), PROFILE, machine).makespan_s
    assert links.step_s == run(lower(plan, PROFILE, faster), PROFILE, faster).makespan_s
    assert links.saved == pytest.approx(1 - links.step_s / before)
    assert links.saved == pytest.approx(first.saved, rel=0.01)  # so slow a link is what binds


def test_advice_follows_what_binds() -> None:
    compute_bound = [one.change for one in advice(PLAIN, PROFILE, ROOMY)]
    assert compute_bound[0] == "devices that compute twice as fast"
    assert "links twice as fast" not in compute_bound
    slow_host = toys.profile(8, update_s=1.0)
    found = [one.change for one in advice(PLAIN, slow_host, ROOMY)]
    assert set(found[:3]) == {
        "devices with twice the memory",  # which update for themselves
        "updates on the host twice as fast",
        "minibatches of 32 instead of 16",
    }


def test_twice_the_memory_is_advised_where_more_can_stay_then() -> None:
    plan = Plan.parse("pp minibatch=16 forward=2[0:2,2:4,4:6] backward=2[0:2,2:4,4:6,6:8] devices=0")
    profile = toys.profile(8)
    tight = max(peak_bytes(lower(plan, profile, toys.gpus(1))))
    found = {one.change for one in advice(plan, profile, toys.gpus(1, memory_bytes=tight))}
    assert "devices with twice the memory" in found
    ample = {one.change for one in advice(plan.with_(forward_packs=(), backward_packs=((0, 8),)), profile, AMPLE)}
    assert "devices with twice the memory" not in ample


def test_copies_between_devices_are_advised_where_there_are_none() -> None:
    machine = replace(toys.gpus(2, link=2e6, memory_bytes=10**8), peer_transfers=False)
    profile = toys.profile(8, activation_bytes=400_000, weight_bytes=100_000)
    plan = Plan.parse("pp minibatch=8 forward=1[0:2,2:4,4:6] backward=1[0:2,2:4,4:6,6:8] devices=0,1 peer=off")
    changes = [one.change for one in advice(plan, profile, machine)]
    assert "copies between devices without the host" in changes
    direct = [one.change for one in advice(plan, profile, replace(machine, peer_transfers=True))]
    assert "copies between devices without the host" not in direct


# -- the search's explanation -----------------------------------------------------------------------------------------


def test_the_explanation_tells_the_gap_and_the_best_advice_in_text_that_html_leaves_alone() -> None:
    result = result_of(PLAIN, MIRRORED)
    text = result.explain()
    assert "25.0% above" in text
    assert f"What would help: {result.advice[0]}" in text
    assert escape(text) == text
    bound = replace(result, lower_bound_s=result.candidates[0].step_s)
    assert "No such plan can be faster" in bound.explain()


def test_only_a_plan_of_one_pack_is_called_plain_training() -> None:
    one = PLAIN.with_(forward_packs=(), backward_packs=((0, 8),))
    assert "as in plain training" in result_of(one).explain()
    assert "as in plain training" not in result_of(PLAIN).explain()


def test_a_result_as_json_gives_back_its_plans() -> None:
    result = result_of(PLAIN, MIRRORED, PLAIN.with_(prefetch=0))
    data = json.loads(json.dumps(result.to_json()))
    assert [Plan.from_json(row["plan"]) for row in data["candidates"]] == [c.plan for c in result.candidates]
    assert [Plan.parse(row["text"]) for row in data["candidates"]] == [c.plan for c in result.candidates]
    assert data["candidates"][0]["step_s"] == result.candidates[0].step_s
    assert data["gap"] == pytest.approx(data["candidates"][0]["step_s"] / data["lower_bound_s"] - 1)
    assert Machine.from_json(data["machine"]) == ROOMY
    assert data["explanation"] == result.explain()


# -- what switches buy ------------------------------------------------------------------------------------------------

SWITCHES = {
    "just-in-time update": {"just_in_time_update"},
    "peer transfers": {"peer_transfers"},
    "packing": {"forward_packs", "backward_packs", "resident_packs", "kept_packs", "device_stash"},
    "prefetch": {"prefetch"},
    "kept activations": {"kept_packs"},
    "stash on the device": {"device_stash"},
    "resident weights": {"resident_packs", "kept_packs"},
    "staying": {"mirrored", "resident_packs", "kept_packs", "device_stash"},
}


def test_each_row_is_the_plan_with_that_switch_off_as_simulated() -> None:
    machine = toys.gpus(2, memory_bytes=10**8, link=1e8)
    found = ablation(MIRRORED, PROFILE, machine)
    assert [row.switch for row in found.rows] == ["grouping", *SWITCHES]
    for row in found.rows[1:]:
        assert row.plan is not None
        trace = run(lower(row.plan, PROFILE, machine), PROFILE, machine)
        assert (row.step_s, row.swap_bytes) == (trace.makespan_s, trace.swap_bytes)
        assert row.peak_bytes == max(peak_bytes(trace.program))
        assert row.loss == pytest.approx(row.step_s / found.step_s - 1)
        changed = {line.split(":")[0] for line in difference(MIRRORED, row.plan).splitlines()}
        assert changed <= SWITCHES[row.switch]
        assert changed
    assert found["prefetch"].loss > 0.001
    assert found["kept activations"].loss > 0.01
    assert found["resident weights"].swap_bytes > found.swap_bytes
    assert found["staying"].plan == MIRRORED.with_(mirrored=False, resident_packs=(), kept_packs=(), device_stash=())


def test_what_stays_in_a_pack_stays_in_its_layers_without_packing() -> None:
    plan = ablation(MIRRORED, PROFILE, toys.gpus(2, memory_bytes=10**8))["packing"].plan
    assert plan is not None
    assert plan.resident_packs == tuple((layer, layer + 1) for layer in range(6))
    assert plan.kept_packs == plan.resident_packs[2:]
    assert (plan.num_layers, len(plan.forward_packs), len(plan.backward_packs)) == (8, 7, 8)


def test_grouping_off_is_the_streaming_baseline() -> None:
    (baseline,) = baselines(PROFILE, ROOMY, 16, names=("zero-infinity order",))
    row = ablation(PLAIN, PROFILE, ROOMY)["grouping"]
    assert (row.step_s, row.swap_bytes) == (baseline.step_s, baseline.swap_bytes)
    assert row.plan is None
    assert f"for each microbatch of {baseline.microbatch_size}" in row.instead


def test_switches_that_a_plan_does_without_say_so() -> None:
    plan = Plan.parse("pp minibatch=8 forward=2[0:1,1:2] backward=2[0:1,1:2,2:3] devices=0 prefetch=0 update=end")
    found = ablation(plan, toys.profile(3), AMPLE)
    reasons = {row.switch: row.reason for row in found.rows if row.step_s is None}
    assert reasons == {
        "just-in-time update": "the plan updates at the end",
        "peer transfers": "the plan is for one device",
        "packing": "the plan has packs of one layer",
        "prefetch": "the plan fetches nothing ahead",
        "staying": "the plan leaves nothing on the devices",
    }
    hostbound = replace(toys.gpus(2, memory_bytes=10**8), peer_transfers=False)
    assert "do not reach each other" in ablation(MIRRORED, PROFILE, hostbound)["peer transfers"].reason


def test_a_variant_that_is_not_possible_says_why() -> None:
    whole = toys._value("whole", 10, batch_dim=None)
    profile = replace(PROFILE, boundaries=(PROFILE.boundaries[0], (whole,), *PROFILE.boundaries[2:]))
    plan = Plan.parse("pp minibatch=8 forward=4[0:4] backward=2[0:4,4:8] devices=0,1")
    row = ablation(plan, profile, toys.gpus(2, memory_bytes=10**8))["packing"]
    assert row.step_s is row.loss is row.swap_bytes is None
    sizes = "microbatch sizes must be equal: a value at boundary 1 has no batch dimension"
    assert row.reason == f"packs of one layer: {sizes}"


def test_a_variant_that_does_not_fit_says_by_how_much_and_not_what_to_do() -> None:
    with pytest.raises(PlanDoesNotFitError, match="use smaller packs") as caught:
        lower(MIRRORED, PROFILE, toys.gpus(2, memory_bytes=2_000_000))
    assert _why(caught.value).endswith("its budget is 1.91 MiB")


def test_one_pack_that_a_device_updates_is_split_into_layers_but_for_what_they_share() -> None:
    whole = Plan.parse("pp minibatch=8 forward=8[] backward=2[0:8] devices=0").with_(device_updates=(Pack(0, 8),))
    row = ablation(whole, toys.profile(8, tied=True), AMPLE)["packing"]
    assert row.plan is not None
    assert row.step_s is not None
    assert row.plan.device_updates == tuple((layer, layer + 1) for layer in range(1, 7))
    assert row.plan.forward_microbatch_size == 2


def test_what_is_hardly_busy_does_not_bind() -> None:
    fast = toys.gpus(1, memory_bytes=10**9, link=1e15, peer_link=1e15)
    profile = toys.profile(8, layer_s=10.0, update_s=1e-6)
    plan = Plan.parse("pp minibatch=8 forward=2[0:4] backward=2[0:4,4:8] devices=0")
    trace = run(lower(plan, profile, fast), profile, fast)
    text = what_binds(plan, trace, peak_bytes(trace.program))
    assert text.startswith("What binds is computing (100% of the time, ")
    assert ", then" not in text


def test_the_plan_itself_must_fit() -> None:
    with pytest.raises(PlanDoesNotFitError):
        ablation(MIRRORED, PROFILE, toys.gpus(2, memory_bytes=2_000_000))


def test_the_table_has_every_switch_within_eighty_columns() -> None:
    found = ablation(MIRRORED, PROFILE, toys.gpus(2, memory_bytes=10**8))
    text, frame = str(found), found.to_frame()
    assert all(len(line) <= 80 for line in text.splitlines())
    for row in found.rows:
        assert row.switch in text
        assert format_change(row.loss) in text
        assert f"<th>{row.switch}</th>" in found._repr_html_()
    assert list(frame.switch) == [row.switch for row in found.rows]
    assert Plan.parse(frame.plan[1]) == found.rows[1].plan
    assert json.loads(json.dumps(found.to_json()))["rows"][1]["plan"] == frame.plan[1]
