"""Programs whose updates come beside the forward of the next iteration."""

import random

import numpy as np
import pytest
import toy_profiles as toys

from harmony_lab.errors import PlanError, ProgramError
from harmony_lab.plan import Plan
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.explain_waiting import waiting_for_gradients
from harmony_lab.planner.lower import lower
from harmony_lab.planner.search import Switches, search
from harmony_lab.program import OpKind, Program, TensorKind
from harmony_lab.runtime.ordering import updating_after
from harmony_lab.simulator.engine import makespan_s, run
from harmony_lab.units import format_seconds

PLAN = Plan.parse("pp minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0,1 update=next")
MACHINE = toys.gpus(3, memory_bytes=10**9)


@pytest.mark.parametrize("seed", range(60))
def test_the_same_happens_in_no_more_time_and_memory_than_with_updates_at_the_end(seed: int) -> None:
    rng = random.Random(seed)
    num_layers = rng.randint(3, 9)
    profile = toys.profile(
        num_layers,
        tied=rng.random() < 0.5,
        buffers=rng.random() < 0.3,
        frozen=rng.choice((0, 0, 1)),
        update_s=rng.choice((0.001, 0.02, 0.1)),
    )
    plan = toys.random_plan(rng, num_layers).with_(just_in_time_update=False, device_updates=())
    end, between = (lower(plan.with_(overlapped_update=one), profile, MACHINE) for one in (False, True))
    check(between)
    assert peak_bytes(between) == peak_bytes(end)
    waiting = run(updating_after(end, all_gradients=True), profile, MACHINE)
    overlapped = run(between, profile, MACHINE)
    assert overlapped.moved_bytes == waiting.moved_bytes
    assert overlapped.makespan_s <= waiting.makespan_s * 1.001  # transfers may share a link in another way
    assert Program.parse(str(between)) == between


def test_a_pack_comes_in_once_its_update_is_made_and_others_are_made_meanwhile() -> None:
    profile = toys.profile(6, update_s=0.05)
    program = lower(PLAN, profile, MACHINE)
    trace = run(program, profile, MACHINE)
    updates = [number for number, op in enumerate(program.ops) if op.kind is OpKind.UPDATE]
    assert [program.ops[number].layers for number in updates] == [(0, 2), (2, 4), (4, 6)]
    fetched = {
        program.blocks[block].layers: number
        for number, op in reversed(list(enumerate(program.ops)))
        for block in op.writes
        if op.kind is OpKind.SWAP_IN and program.blocks[block].kind is TensorKind.WEIGHT
    }
    starts = [trace.start_s[fetched[layers]] for layers in ((0, 2), (2, 4), (4, 6))]
    np.testing.assert_allclose(starts, trace.end_s[updates])
    waiting = updating_after(lower(PLAN.with_(overlapped_update=False), profile, MACHINE), all_gradients=True)
    assert trace.makespan_s < makespan_s(waiting, profile, MACHINE) - 0.1


def test_waiting_costs_what_it_does_once_per_update() -> None:
    profile = toys.profile(6, update_s=0.05)
    just_in_time = PLAN.with_(overlapped_update=False, just_in_time_update=True)
    waits_s, other_s = (makespan_s(lower(plan, profile, MACHINE), profile, MACHINE) for plan in (PLAN, just_in_time))
    told = [waiting_for_gradients(PLAN, waits_s, PLAN, profile, MACHINE, count) for count in (1, 4)]
    assert f"{format_seconds(waits_s)} a step instead of" in told[0]
    assert f"{format_seconds(waits_s + 3 * other_s)} a step of 4 minibatches instead of" in told[1]
    assert told[1].endswith(f"{(waits_s - other_s) / (4 * other_s):+.1%}")


def test_weights_that_come_in_before_they_are_updated_are_found() -> None:
    program = lower(PLAN, toys.profile(6), MACHINE)
    for number, op in enumerate(program.ops):
        if op.kind is OpKind.SWAP_IN and op.after and op.after[0] < 3:  # one of the updates
            ops = list(program.ops)
            ops[number] = op._replace(after=op.after[1:])
            broken = Program(**{**vars_of(program), "ops": tuple(ops)})
            with pytest.raises(ProgramError, match="may change weights that"):
                check(broken)


def vars_of(program: Program) -> dict[str, object]:
    names = ("minibatch_size", "num_layers", "budgets", "blocks", "ops", "resident")
    return {name: getattr(program, name) for name in names}


def test_a_search_for_clipped_training_ranks_by_what_it_takes_and_tells_what_that_costs() -> None:
    profile, machine = toys.profile(6, update_s=0.05), toys.gpus(2, memory_bytes=6_000_000)
    result = search(profile, machine, 8, switches=Switches(deferred_updates=True), shown=4)
    assert all(found.plan.overlapped_update and not found.plan.device_updates for found in result.candidates)
    best = result.candidates[0]
    assert best.step_s == pytest.approx(best.trace().makespan_s)
    assert result.lower_bound_s <= best.step_s
    just_in_time = makespan_s(
        lower(best.plan.with_(just_in_time_update=True, overlapped_update=False), profile, machine), profile, machine
    )
    assert f"instead of {format_seconds(just_in_time)}, {best.step_s / just_in_time - 1:+.1%}" in result.explain()


def test_the_text_of_a_plan_tells_when_it_updates() -> None:
    assert Plan.parse(str(PLAN)) == PLAN
    assert Plan.from_json(PLAN.to_json()) == PLAN
    with pytest.raises(PlanError, match="overlapped_update needs just_in_time_update off"):
        PLAN.with_(just_in_time_update=True)
    with pytest.raises(PlanError, match="update= is jit, end or next, got 'later'"):
        Plan.parse(str(PLAN).replace("update=next", "update=later"))
