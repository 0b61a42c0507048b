"""What a machine can take at most, and what of the host's memory a plan needs."""

import random
from dataclasses import replace

import pytest
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.layers import padded
from harmony_lab.machine import HOST, Backend, Machine
from harmony_lab.places import place
from harmony_lab.plan import Pack, Plan
from harmony_lab.planner.limits import host_memory, host_problem, limits
from harmony_lab.planner.lower import lower
from harmony_lab.program import Program, TensorKind

LARGE = {"memory_bytes": 10**9}


def one_layer_plan(num_layers: int, forward: int, backward: int) -> Plan:
    packs = tuple(Pack(layer, layer + 1) for layer in range(num_layers))
    return Plan(
        mode="pp",
        minibatch_size=8,
        forward_microbatch_size=forward,
        forward_packs=packs[:-1],
        backward_microbatch_size=backward,
        backward_packs=packs,
        devices=(0,),
        prefetch=0,
    )


def with_host(machine: Machine, memory_bytes: int) -> Machine:
    return replace(machine, host=replace(machine.host, memory_bytes=memory_bytes))


# -- microbatches and models ------------------------------------------------------------------------------------------


def test_the_largest_microbatches_fit_and_the_next_ones_do_not() -> None:
    profile, machine = toys.profile(4, activation_bytes=200_000), toys.gpus(1, memory_bytes=5_000_000)
    found = limits(profile, machine)
    assert found.backward.size == found.backward.next_size - 1 < profile.largest_microbatch
    lower(one_layer_plan(4, found.backward.size, found.backward.size), profile, machine)
    with pytest.raises(PlanDoesNotFitError) as too_large:
        lower(one_layer_plan(4, found.backward.size, found.backward.next_size), profile, machine)
    assert found.backward.needed_bytes == pytest.approx(too_large.value.needed_bytes, abs=100)
    assert found.backward.needed_bytes > 5_000_000
    assert found.backward.size < found.forward.size


def test_the_layer_that_binds_is_named_with_what_it_needs() -> None:
    profile = toys.profile(4)
    fat = replace(profile.layers[2], name="fat", kind=1, parameter_bytes=4_000_000, gradient_bytes=4_000_000)
    profile = replace(profile, layers=(*profile.layers[:2], fat, profile.layers[3]))
    found = limits(profile, toys.gpus(1, memory_bytes=8_200_000))
    assert (found.backward.layer, found.backward.layer_name) == (2, "fat")
    assert f"{found.backward.next_size} would take 7.92 MiB" in str(found.backward)
    assert "in layer 2, fat" in str(found.backward)


def test_where_memory_does_not_bind_the_profile_does() -> None:
    found = limits(toys.profile(4), toys.gpus(1, **LARGE))
    assert (found.forward.size, found.forward.layer) == (8, None)
    assert str(found.backward) == "8, the largest profiled"


def test_the_host_bounds_how_deep_a_model_of_such_layers_can_be() -> None:
    profile = toys.profile(4)  # 4 MB of weights, 4 of gradients, 8 of optimizer state
    found = limits(profile, with_host(toys.gpus(2), 64_000_000))
    assert found.deepest == pytest.approx(4.0)
    plan = one_layer_plan(4, 2, 2)
    with_plan = limits(profile, with_host(toys.gpus(2), 64_000_000), plan)
    assert with_plan.deepest < 4.0
    assert with_plan.host is not None
    assert with_plan.model_bytes == 16_000_000 + with_plan.host.stash_bytes
    assert 0 < with_plan.host.stash_bytes < 1000  # the stash lies where gradients come to lie, but for alignment
    assert "4.0 times as many of these layers" in str(found)
    assert "0.25 times as many" in str(limits(profile, with_host(toys.gpus(2), 4_000_000), plan))


def test_emulated_devices_take_their_memory_from_the_host() -> None:
    machine = Machine.emulated(2, memory=10_000_000, host_memory=100_000_000)
    assert limits(toys.profile(4), machine).deepest == pytest.approx(80 / 16)


def test_a_layer_that_fits_no_device_leaves_no_depth() -> None:
    found = limits(toys.profile(4), toys.gpus(1, memory_bytes=1_000_000))
    assert (found.backward.size, found.deepest) == (0, 0.0)
    assert "layer 3 (layer3) is too large for a device" in str(found)
    assert "none (1 would take 2.00 MiB in layer 3" in str(found)
    assert "<td>" in found._repr_html_()


# -- the host's memory ------------------------------------------------------------------------------------------------


def most_on_host(program: Program) -> int:
    """The most that host blocks take at once, where each op runs after those that it must come after alone."""
    alive = most = 0
    for op in program.ops:
        sizes = [program.blocks[index].num_bytes for index in op.writes if program.blocks[index].device == HOST]
        alive += sum(sizes)
        most = max(most, alive)
        alive -= sum(program.blocks[index].num_bytes for index in op.frees if program.blocks[index].device == HOST)
    return most


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_host_memory_is_what_blocks_are_given_there(seed: int) -> None:
    rng = random.Random(seed)
    profile, machine = toys.profile(6, tied=rng.random() < 0.5), toys.gpus(3, **LARGE)
    program = lower(toys.random_plan(rng, 6), profile, machine)
    needed = host_memory(program, profile, machine)
    waiting = needed.gradient_bytes + needed.stash_bytes
    on_host = [block for block in program.blocks if block.device == HOST]
    assert waiting == place(program, profile).num_bytes.get(HOST, 0)
    assert most_on_host(program) <= waiting <= sum(padded(block.num_bytes) for block in on_host)
    largest = max((block.num_bytes for block in on_host if block.kind is TensorKind.GRADIENT), default=0)
    assert largest <= needed.gradient_bytes
    assert needed.host_bytes == profile.weight_bytes(0, 6) + profile.optimizer_state_bytes + waiting
    assert needed.pinned_bytes == needed.host_bytes - profile.optimizer_state_bytes


def test_nothing_is_pinned_for_emulated_devices_but_they_are_made_of_host_memory() -> None:
    profile, machine = toys.profile(4), Machine.emulated(1, memory=20_000_000, host_memory=10**9)
    needed = host_memory(lower(one_layer_plan(4, 2, 2), profile, machine), profile, machine)
    assert needed.pinned_bytes == 0
    assert 0 < needed.emulated_bytes <= 20_000_000
    assert "of emulated devices" in str(needed)
    assert machine.devices[0].backend is Backend.EMULATED


def test_a_host_one_byte_too_small_is_a_problem_told_in_bytes() -> None:
    profile, machine, plan = toys.profile(4), toys.gpus(1, **LARGE), one_layer_plan(4, 2, 2)
    program = lower(plan, profile, machine)
    needed = host_memory(program, profile, machine).host_bytes
    assert host_problem(plan, profile, with_host(machine, needed)) == ""
    assert host_problem(plan, profile, with_host(machine, needed), program=program) == ""
    problem = host_problem(plan, profile, with_host(machine, needed - 1), program=program)
    assert "MiB, more than the host's" in problem
    assert "3.81 MiB of weights" in problem


def test_padding_counts_where_nothing_shares_memory() -> None:
    """Losses of a few bytes each lie apart by a line of the cache."""
    profile, machine = toys.profile(3, activation_bytes=100), toys.gpus(3, **LARGE)
    plan = Plan.parse("pp minibatch=7 forward=6[0:2] backward=6[0:2,2:3] devices=1,2,0 update=end mirrored=on")
    program = lower(plan, profile, machine)
    needed = host_memory(program, profile, machine)
    waiting = sum(block.num_bytes for block in program.blocks if block.device == HOST)
    assert needed.gradient_bytes + needed.stash_bytes > waiting
    assert host_problem(plan, profile, with_host(machine, needed.host_bytes - 1), program=program) != ""
