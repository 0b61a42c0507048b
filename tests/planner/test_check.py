"""check finds what is wrong with a Program and names the ops."""

import pytest
import toy_profiles as toys

from harmony_lab.errors import ProgramError
from harmony_lab.plan import Plan
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.lower import lower
from harmony_lab.program import Op, OpKind, Program, TensorKind

PLAN = Plan.parse("pp minibatch=8 forward=2[0:2,2:4] backward=2[0:2,2:4,4:6] devices=0,1")


def program(plan: Plan = PLAN, memory_bytes: int = 8_000_000) -> Program:
    made = lower(plan, toys.profile(6), toys.gpus(2, memory_bytes=memory_bytes))
    check(made)
    return made


def changed(original: Program, number: int, **fields: object) -> Program:
    ops = list(original.ops)
    ops[number] = ops[number]._replace(**fields)
    return Program(
        minibatch_size=original.minibatch_size,
        num_layers=original.num_layers,
        budgets=original.budgets,
        blocks=original.blocks,
        ops=tuple(ops),
    )


def numbers(of: Program, kind: OpKind) -> list[int]:
    return [number for number, op in enumerate(of.ops) if op.kind is kind]


@pytest.mark.parametrize("mode", ["pp", "dp"])
def test_without_any_one_edge_for_data_a_program_is_rejected(mode: str) -> None:
    """Lowering adds an edge only where it is not implied; those beside data only keep buffers to two."""
    original = program(PLAN.with_(mode=mode))
    rejected = named = needless = 0
    for number, op in enumerate(original.ops):
        for edge in op.after:
            without = changed(original, number, after=tuple(other for other in op.after if other != edge))
            try:
                check(without)
            except ProgramError as error:
                rejected += 1
                named += all(v.startswith(("op ", "block ", "device ", "…")) for v in error.violations)
            else:
                data = set(op.reads) & set(original.ops[edge].writes)
                assert not data, f"{op} needs what {original.ops[edge]} writes"
                needless += 1
    assert named == rejected > needless


def test_a_missing_edge_is_named() -> None:
    original = program()
    number = numbers(original, OpKind.FORWARD)[0]
    with pytest.raises(
        ProgramError, match=rf"op {number} \(forward \[0:2\] samples 0:2 on d0.compute\) may read block"
    ):
        check(changed(original, number, after=()))


def test_a_double_free_is_named() -> None:
    original = program()
    first = next(op for op in original.ops if op.frees)
    number = numbers(original, OpKind.UPDATE)[-1]
    with pytest.raises(ProgramError, match="is freed twice"):
        check(changed(original, number, frees=(*original.ops[number].frees, first.frees[0])))


def test_a_block_never_freed_is_named() -> None:
    original = program()
    number = next(i for i, op in enumerate(original.ops) if op.kind is OpKind.BACKWARD)
    with pytest.raises(ProgramError, match="is never freed"):
        check(changed(original, number, frees=()))


def test_an_unmatched_send_and_an_unmatched_receive_are_named() -> None:
    original = program()
    send = numbers(original, OpKind.SEND)[0]
    with pytest.raises(ProgramError, match="which no op sends"):
        check(changed(original, send, kind=OpKind.FREE, reads=()))
    recv = numbers(original, OpKind.RECV)[0]
    with pytest.raises(ProgramError, match="which no op receives"):
        check(changed(original, recv, kind=OpKind.SWAP_IN, reads=()))


def test_a_budget_that_some_interleaving_exceeds_is_named() -> None:
    original = program()
    tight = Program(
        minibatch_size=original.minibatch_size,
        num_layers=original.num_layers,
        budgets=(peak_bytes(original)[0] - 1, original.budgets[1]),
        blocks=original.blocks,
        ops=original.ops,
    )
    with pytest.raises(ProgramError, match=r"device 0 may need .* when op \d+"):
        check(tight)


def test_waiting_for_a_later_op_is_a_deadlock() -> None:
    original = program()
    with pytest.raises(ProgramError, match="which comes later: a deadlock"):
        check(changed(original, 3, after=(7,)))


def test_an_update_before_the_last_read_of_its_weights_is_named() -> None:
    original = program(PLAN.with_(devices=(0,)))
    update = numbers(original, OpKind.UPDATE)[0]
    early = Op(OpKind.UPDATE, -1, original.ops[update].stream, (0, 2), (0, 0))
    ops = (early, *(op._replace(after=tuple(a + 1 for a in op.after)) for op in original.ops))
    moved = Program(minibatch_size=8, num_layers=6, budgets=original.budgets, blocks=original.blocks, ops=ops)
    with pytest.raises(ProgramError, match=r"op 0 \(update .* may change weights that op 1"):
        check(moved)


def test_a_swap_in_that_misses_samples_is_named() -> None:
    original = program(PLAN.with_(devices=(0,)))
    number = next(
        i
        for i, op in enumerate(original.ops)
        if op.kind is OpKind.SWAP_IN and op.reads and original.blocks[op.writes[0]].kind is TensorKind.ACTIVATION
    )
    with pytest.raises(ProgramError, match="needs all of activation"):
        check(changed(original, number, reads=()))


def test_every_violation_is_listed_at_once() -> None:
    original = program()
    forwards = numbers(original, OpKind.FORWARD)[:2]
    broken = original
    for number in forwards:
        broken = changed(broken, number, after=(), frees=())
    with pytest.raises(ProgramError) as caught:
        check(broken)
    assert len(caught.value.violations) >= 3
