"""check finds what is wrong with a Program and names the ops."""

import random
import re
from dataclasses import replace

import pytest
import toy_profiles as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from random_settings import setting
from reachability import Finding, lost_orders, most_bytes

from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST
from harmony_lab.plan import Plan
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.program import Block, Op, OpKind, Program, Stream, TensorKind

PLAN = Plan.parse("pp minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0,1")
SEEDS = st.integers(0, 2**32)

MESSAGES = {
    "read": r"op (\d+) .* may read block %(\d+) .* before op (\d+) .* has written it",
    "free": r"op (\d+) .* may free block %(\d+) .* while op (\d+) .* still uses it",
    "change": r"op (\d+) .* may read block %(\d+) .* before op (\d+) .* has changed it",
    "update": r"op (\d+) .* may change weights that op (\d+) .* still reads",
    "lost": r"what op (\d+) .* changes of block %(\d+) .* is lost",
    "store": r"op (\d+) .* may change in the store what op (\d+) .* still reads",
    "unsent": r"op (\d+) .* must wait for op (\d+) .*, which sends what it receives",
    "budget": r"device (\d+) may need .* of its .* when op (\d+) .* runs \(\d+ ops exceed the budget\)",
}
SHOWN = 20  # violations that are listed


def program(plan: Plan = PLAN, memory_bytes: int = 8_000_000) -> Program:
    made = lower(plan, toys.profile(6), toys.gpus(2, memory_bytes=memory_bytes))
    check(made)
    return made


def changed(original: Program, number: int, **fields: object) -> Program:
    ops = list(original.ops)
    ops[number] = ops[number]._replace(**fields)
    return replace(original, ops=tuple(ops))


def without_edge(original: Program, number: int, edge: int) -> Program:
    return changed(original, number, after=tuple(other for other in original.ops[number].after if other != edge))


def numbers(of: Program, kind: OpKind) -> list[int]:
    return [number for number, op in enumerate(of.ops) if op.kind is kind]


def found(by_check: Program) -> set[Finding]:
    """What check says, as kinds and numbers; each message must be of a known kind."""
    try:
        check(by_check)
    except ProgramError as error:
        return {_finding(violation) for violation in error.violations[:SHOWN]}
    return set()


def _finding(violation: str) -> Finding:
    for kind, pattern in MESSAGES.items():
        match = re.fullmatch(pattern, violation)
        if match:
            return kind, *map(int, match.groups())
    raise AssertionError(f"an unknown message: {violation}")


# -- order -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS)
def test_a_program_without_an_edge_is_rejected_exactly_where_an_order_is_lost(seed: int) -> None:
    """And then for that: the ops and blocks named are those that a search through all edges finds."""
    original = setting(seed).program
    rng = random.Random(seed)
    edges = [(number, edge) for number, op in enumerate(original.ops) for edge in op.after]
    for number, edge in rng.sample(edges, min(4, len(edges))):
        broken = without_edge(original, number, edge)
        expected = lost_orders(broken)
        over = [most > budget for most, budget in zip(most_bytes(broken), broken.budgets, strict=True)]
        named = found(broken)
        orders = {finding for finding in named if finding[0] != "budget"}
        if len(expected) < SHOWN:
            assert orders == expected
            assert {finding[1] for finding in named - orders} == {d for d, exceeds in enumerate(over) if exceeds}
        else:
            assert orders <= expected
            assert len(named) == SHOWN


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS)
def test_what_a_program_may_need_at_most_is_what_a_search_through_all_edges_finds(seed: int) -> None:
    made = setting(seed).program
    assert peak_bytes(made) == most_bytes(made)
    number = random.Random(seed).randrange(len(made.ops))
    loose = changed(made, number, after=())
    assert peak_bytes(loose) == most_bytes(loose)


@pytest.mark.parametrize("mode", ["pp", "dp"])
def test_no_edge_that_brings_data_is_needless(mode: str) -> None:
    """Lowering adds an edge only where it is not implied; those that can go promise memory or keep buffers to two."""
    original = program(PLAN.with_(mode=mode))
    needless = rejected = 0
    for number, op in enumerate(original.ops):
        for edge in op.after:
            if found(without_edge(original, number, edge)):
                rejected += 1
            else:
                needless += 1
                assert not {*op.reads} & {*original.ops[edge].writes}
    assert rejected > needless


def test_a_missing_edge_is_named() -> None:
    original = program()
    number = numbers(original, OpKind.FORWARD)[0]
    with pytest.raises(
        ProgramError, match=rf"op {number} \(forward \[0:2\] samples 0:2 on d0.compute\) may read block"
    ):
        check(changed(original, number, after=()))


def test_waiting_for_a_later_op_or_for_itself_is_a_deadlock() -> None:
    original = program()
    for later in (3, 7):
        with pytest.raises(ProgramError, match=rf"op 3 .* waits for op {later} .*, which comes later: a deadlock"):
            check(changed(original, 3, after=(later,)))


def test_what_does_not_exist_is_named() -> None:
    original = program()
    with pytest.raises(ProgramError, match=r"op 3 .* waits for op 100000, which does not exist"):
        check(changed(original, 3, after=(100_000,)))
    for field in ("reads", "writes", "frees"):
        with pytest.raises(ProgramError, match=r"op 3 .* names block %100000, which does not exist"):
            check(changed(original, 3, **{field: (100_000,)}))
    with pytest.raises(ProgramError, match=r"op 3 .* runs on device 7, there are 2"):
        check(changed(original, 3, device=7))


# -- blocks ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_any_block_freed_twice_is_named_with_both_ops(seed: int) -> None:
    original = setting(seed).program
    rng = random.Random(seed)
    first = rng.choice([number for number, op in enumerate(original.ops) if op.frees])
    block = rng.choice(original.ops[first].frees)
    second = rng.choice([number for number in range(len(original.ops)) if number != first])
    broken = changed(original, second, frees=(*original.ops[second].frees, block))
    one, other = sorted((first, second))
    with pytest.raises(ProgramError, match=rf"block %{block} .* is freed twice: by op {one} .* and by op {other} "):
        check(broken)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_any_block_that_stays_forever_is_named(seed: int) -> None:
    original = setting(seed).program
    rng = random.Random(seed)
    freers = [n for n, op in enumerate(original.ops) if any(original.blocks[b].device != HOST for b in op.frees)]
    number = rng.choice(freers)
    block = rng.choice([b for b in original.ops[number].frees if original.blocks[b].device != HOST])
    broken = changed(original, number, frees=tuple(b for b in original.ops[number].frees if b != block))
    with pytest.raises(ProgramError, match=rf"block %{block} .* is never freed; op \d+"):
        check(broken)


def test_a_block_written_by_no_op_or_by_two_is_named() -> None:
    original = program()
    number = numbers(original, OpKind.BACKWARD)[0]
    block = original.ops[number].writes[0]
    with pytest.raises(ProgramError, match=rf"block %{block} .* must be written by one op, it is written by no op"):
        check(changed(original, number, writes=original.ops[number].writes[1:]))
    with pytest.raises(ProgramError, match=rf"block %{block} .* it is written by op {number} .*, op {number + 1} "):
        check(changed(original, number + 1, writes=(*original.ops[number + 1].writes, block)))


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_an_unmatched_send_and_an_unmatched_receive_are_named() -> None:
    original = program()
    send = numbers(original, OpKind.SEND)[0]
    with pytest.raises(ProgramError, match="which no op sends"):
        check(changed(original, send, kind=OpKind.FREE, reads=()))
    recv = numbers(original, OpKind.RECV)[0]
    with pytest.raises(ProgramError, match="which no op receives"):
        check(changed(original, recv, kind=OpKind.SWAP_IN, reads=()))


def test_what_is_received_twice_is_named() -> None:
    original = program()
    first, second = numbers(original, OpKind.RECV)[:2]
    with pytest.raises(ProgramError, match=rf"op {second} .* receives block .*, which no op sends"):
        check(changed(original, second, reads=original.ops[first].reads))


@pytest.mark.parametrize("kind", [OpKind.RECV, OpKind.SWAP_OUT])
@pytest.mark.parametrize(
    "other",
    [
        {"kind": TensorKind.SAVED},
        {"layers": (1, 1)},
        {"samples": (0, 1)},
        {"num_bytes": 12},
    ],
)
def test_a_copy_into_something_else_is_named(kind: OpKind, other: dict[str, object]) -> None:
    original = program()
    number = numbers(original, kind)[0]
    into = original.ops[number].writes[0]
    blocks = list(original.blocks)
    blocks[into] = blocks[into]._replace(**other)
    with pytest.raises(ProgramError, match=rf"op {number} .* copies .* into "):
        check(replace(original, blocks=tuple(blocks)))


def test_a_copy_of_less_than_is_written_is_named() -> None:
    original = program()
    number = numbers(original, OpKind.SWAP_OUT)[0]
    with pytest.raises(ProgramError, match=rf"op {number} .* copies nothing into "):
        check(changed(original, number, reads=()))


def _resliced(pieces: list[tuple[int, int]], wanted: tuple[int, int]) -> Program:
    """Swaps samples of a boundary out in those pieces and in again as one."""
    blocks: list[Block] = []
    ops: list[Op] = []
    for first, last in pieces:
        at = len(blocks)
        samples = (first, last)
        blocks += [Block(TensorKind.ACTIVATION, device, (1, 1), samples, 4 * (last - first)) for device in (0, HOST)]
        ops.append(Op(OpKind.FORWARD, 0, Stream.COMPUTE, (0, 1), samples, writes=(at,)))
        ops.append(
            Op(OpKind.SWAP_OUT, 0, Stream.SWAP_OUT, (1, 1), samples, (at,), (at + 1,), (at,), after=(len(ops) - 1,))
        )
    host = tuple(range(1, len(blocks), 2))
    blocks.append(Block(TensorKind.ACTIVATION, 0, (1, 1), wanted, 4 * (wanted[1] - wanted[0])))
    target = len(blocks) - 1
    ops.append(
        Op(OpKind.SWAP_IN, 0, Stream.SWAP_IN, (1, 1), wanted, host, (target,), host, tuple(range(1, len(ops), 2)))
    )
    ops.append(Op(OpKind.FREE, 0, Stream.MEMORY, (1, 1), wanted, frees=(target,), after=(len(ops) - 1,)))
    return Program(minibatch_size=32, num_layers=2, budgets=(10_000,), blocks=tuple(blocks), ops=tuple(ops))


PIECES = st.tuples(st.integers(0, 15), st.integers(1, 8)).map(lambda piece: (piece[0], piece[0] + piece[1]))


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, min_size=1, max_size=6), wanted=PIECES)
def test_a_swap_in_needs_all_its_samples_however_they_are_cut(
    pieces: list[tuple[int, int]], wanted: tuple[int, int]
) -> None:
    given_samples = {sample for piece in pieces for sample in range(*piece)}
    made = _resliced(pieces, wanted)
    if given_samples >= {*range(*wanted)}:
        check(made)
    else:
        with pytest.raises(ProgramError, match="needs all of activation@1 samples"):
            check(made)


def test_a_swap_in_from_another_tensor_is_named() -> None:
    original = _resliced([(0, 4), (4, 8)], (0, 8))
    blocks = list(original.blocks)
    for block in (2, 3):
        blocks[block] = blocks[block]._replace(layers=(2, 2))
    with pytest.raises(ProgramError, match=r"needs all of activation@1 samples 0:8 on d0 from the host, it is given "):
        check(replace(original, blocks=tuple(blocks)))


# -- gradients and updates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pp", "dp"])
def test_gradients_read_before_the_last_microbatch_has_added_to_them_are_named(mode: str) -> None:
    """Their block was written by the first one, and is read by the last one: only its use tells what is missing."""
    original = program(PLAN.with_(mode=mode))
    kind = OpKind.ALL_REDUCE if mode == "dp" else OpKind.SWAP_OUT
    number = next(
        n
        for n in numbers(original, kind)
        if original.ops[n].reads and original.blocks[original.ops[n].reads[0]].kind is TensorKind.GRADIENT
    )
    block = original.ops[number].reads[0]
    adding = [n for n in numbers(original, OpKind.BACKWARD) if block in original.ops[n].reads + original.ops[n].writes]
    assert len(adding) > 1
    early = changed(original, number, after=tuple({*original.ops[number].after} - {adding[-1]} | {adding[-2]}))
    with pytest.raises(ProgramError, match=rf"op {number} .* may read block %{block} .* before op {adding[-1]} .* has"):
        check(early)


def test_an_update_before_the_last_read_of_its_weights_is_named() -> None:
    original = program(PLAN.with_(devices=(0,)))
    update = numbers(original, OpKind.UPDATE)[0]
    early = Op(OpKind.UPDATE, -1, original.ops[update].stream, (0, 2), (0, 0))
    ops = (early, *(op._replace(after=tuple(a + 1 for a in op.after)) for op in original.ops))
    readers = [number for number, op in enumerate(ops) if op.kind is OpKind.SWAP_IN and op.layers == (0, 2)]
    moved = replace(original, ops=ops)
    with pytest.raises(ProgramError, match=r"op 0 \(update .* may change weights that op 1") as caught:
        check(moved)
    named = {number for number in readers if any(f"that op {number} " in text for text in caught.value.violations)}
    assert named == {number for number in readers if _brings_weights(moved, number)}
    assert len(named) == 2  # forward and backward


def _brings_weights(of: Program, number: int) -> bool:
    return any(of.blocks[block].kind is TensorKind.WEIGHT for block in of.ops[number].writes)


# -- memory ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_a_budget_that_some_interleaving_exceeds_is_named(seed: int) -> None:
    original = setting(seed).program
    most = peak_bytes(original)
    check(replace(original, budgets=most))
    for device in range(original.num_devices):
        if most[device]:
            tight = tuple(n - (d == device) for d, n in enumerate(most))
            assert {finding[:2] for finding in found(replace(original, budgets=tight))} == {("budget", device)}


def test_every_violation_is_listed_at_once_up_to_a_limit() -> None:
    original = program()
    broken = original
    for number in numbers(original, OpKind.FORWARD)[:2]:
        broken = changed(broken, number, after=(), frees=())
    with pytest.raises(ProgramError) as caught:
        check(broken)
    assert len(caught.value.violations) >= 3
    for number in numbers(original, OpKind.BACKWARD):
        broken = changed(broken, number, after=(), frees=())
    with pytest.raises(ProgramError, match=r"… and \d+ more") as caught:
        check(broken)
    assert len(caught.value.violations) == SHOWN + 1


def test_a_program_without_ops_is_valid() -> None:
    check(Program(minibatch_size=1, num_layers=1, budgets=(1,), blocks=(), ops=()))
