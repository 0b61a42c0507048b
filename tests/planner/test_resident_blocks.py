"""Blocks that stay on a device between iterations, and updates there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import toy_profiles as toys

from harmony_lab.errors import ProgramError
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.precision import Precision
from harmony_lab.program import Block, Op, OpKind, Program, Stream, TensorKind
from harmony_lab.simulator.engine import run


def staying(**fields: object) -> Program:
    """One layer's iteration in memory: weights and optimizer state are there before and after."""
    kinds = [TensorKind.WEIGHT, TensorKind.OPTIMIZER, TensorKind.SAVED, TensorKind.GRADIENT]
    blocks = [Block(kind, 0, (0, 1), (0, 1) if kind is TensorKind.SAVED else (0, 0), 100) for kind in kinds]
    ops = [
        Op(OpKind.FORWARD, 0, Stream.COMPUTE, (0, 1), (0, 1), reads=(0,), writes=(2,)),
        Op(OpKind.BACKWARD, 0, Stream.COMPUTE, (0, 1), (0, 1), reads=(0, 2), writes=(3,), frees=(2,)),
        Op(OpKind.UPDATE, 0, Stream.COMPUTE, (0, 1), (0, 0), reads=(0, 1, 3), frees=(3,)),
    ]
    made = Program(minibatch_size=1, num_layers=1, budgets=(400,), blocks=blocks, ops=ops, resident=(0, 1))
    return replace(made, **fields)


def test_resident_blocks_count_from_the_start_and_stay() -> None:
    check(staying())
    assert peak_bytes(staying()) == (400,)
    assert Program.parse(str(staying())).resident == (0, 1)
    with pytest.raises(ProgramError, match="device 0 may need 400 B of its 399 B"):
        check(staying(budgets=(399,)))


def test_a_resident_block_must_be_there_in_the_end() -> None:
    ops = list(staying().ops)
    ops[1] = ops[1]._replace(frees=(0, 2))
    with pytest.raises(ProgramError, match=r"%0 \(weight\[0:1\] on d0\) is resident, but in the end there is none"):
        check(staying(ops=ops[:2], blocks=staying().blocks[:4]))


def test_a_resident_block_is_not_written() -> None:
    ops = list(staying().ops)
    ops[0] = ops[0]._replace(writes=(0, 2))
    with pytest.raises(ProgramError, match="must be written by no op, as it is resident"):
        check(staying(ops=ops))


def test_what_a_device_updates_must_not_be_lost() -> None:
    ops, blocks = list(staying().ops), [*staying().blocks, staying().blocks[0]]
    fetched = Op(OpKind.SWAP_IN, 0, Stream.SWAP_IN, (0, 1), (0, 0), writes=(4,), after=(2,))
    ops[2] = ops[2]._replace(frees=(0, 3))
    with pytest.raises(ProgramError, match=r"changes of block %0 \(weight\[0:1\] on d0\) is lost"):
        check(staying(ops=[*ops, fetched], blocks=blocks))
    ops[2] = ops[2]._replace(frees=(3,))
    out = Op(OpKind.SWAP_OUT, 0, Stream.SWAP_OUT, (0, 1), (0, 0), reads=(0,), frees=(0,), after=(2,))
    check(staying(ops=[*ops, out, fetched._replace(after=(3,))], blocks=blocks))
    with pytest.raises(ProgramError, match="may change in the store what"):
        check(staying(ops=[*ops, out, fetched], blocks=blocks, budgets=(600,)))


def test_updates_on_a_device_take_the_bytes_over_its_memory() -> None:
    machine = toys.gpus(1, memory_bytes=400)
    fast = replace(machine, devices=(replace(machine.devices[0], memory_bytes_per_s=1000.0),))
    profile = toys.profile(1, update_s=0.25)
    look = Op(OpKind.UPDATE, 0, Stream.COMPUTE, (0, 1), (0, 0), reads=(3,))
    program = staying(ops=[*staying().ops[:2], look, staying().ops[2]])
    check(program)
    traces = [run(program, profile, m) for m in (fast, machine)]
    taken = [float(seconds) for trace in traces for seconds in (trace.end_s - trace.start_s)[2:]]
    # unknown speed: as on the host, where weights, gradients and state (twice that) are read, all but gradients written
    assert taken == pytest.approx([100 / 1000, (2 * 100 + 2 * 100 + 100) / 1000, 0.25 / 7, 0.25])


def test_resident_blocks_are_in_the_memory_timeline_from_the_start() -> None:
    (memory,) = run(staying(), toys.profile(1), toys.gpus(1, memory_bytes=400)).memory
    kinds = list(memory.kinds)
    assert memory.num_bytes[0, kinds.index(TensorKind.WEIGHT)] == 100
    assert memory.total_bytes.tolist()[0] == memory.total_bytes.tolist()[-1] == 200
    assert memory.peak_bytes == 400


def test_the_runtime_refuses_what_it_does_not_know() -> None:
    from harmony_lab.runtime.executor import Executor

    executor = Executor(SimpleNamespace(enter_worker=None), toys.gpus(1))
    for shadows, count in ((False, 2), (True, 3)):
        training = SimpleNamespace(layers=SimpleNamespace(precision=Precision.BF16, has_shadows=shadows))
        with pytest.raises(ProgramError, match="can be simulated, not run") as error:
            executor.run(staying(), training, None, None)
        assert len(error.value.violations) == count
    executor.close()


def test_the_runtime_has_one_store_for_devices_that_update_the_same_layers() -> None:
    """What one of them brings back comes after the others have fetched what they change."""
    from harmony_lab.runtime.runnable import require_runnable

    blocks = [Block(TensorKind.WEIGHT, device, (0, 1), (0, 0), 100) for device in (0, 1)]
    ops = [Op(OpKind.SWAP_IN, d, Stream.SWAP_IN, (0, 1), (0, 0), writes=(d,)) for d in (0, 1)]
    ops += [Op(OpKind.UPDATE, d, Stream.COMPUTE, (0, 1), (0, 0), reads=(d,), after=(d,)) for d in (0, 1)]
    ops += [Op(OpKind.SWAP_OUT, d, Stream.SWAP_OUT, (0, 1), (0, 0), (d,), (), (d,), (2 + d,)) for d in (0, 1)]
    made = Program(minibatch_size=1, num_layers=1, budgets=(300, 300), blocks=blocks, ops=ops)
    check(made)
    layers = SimpleNamespace(has_shadows=False)
    with pytest.raises(ProgramError, match=r"op 4 .* may change on the host what op 1 .* still fetches"):
        require_runnable(made, layers)
    ops[2:4] = [op._replace(after=(0, 1)) for op in ops[2:4]]
    require_runnable(replace(made, ops=ops), layers)


def test_what_a_device_updates_must_not_be_fetched_by_another_meanwhile() -> None:
    """Unless that one updates the same layers: then each has a store of its own."""
    weights, gradients = (
        Block(TensorKind.WEIGHT, 0, (0, 1), (0, 0), 100),
        Block(TensorKind.GRADIENT, 0, (0, 1), (0, 0), 100),
    )
    blocks = [weights, gradients, weights._replace(device=1)]
    ops = [
        Op(OpKind.SWAP_IN, 0, Stream.SWAP_IN, (0, 1), (0, 0), writes=(0,)),
        Op(OpKind.BACKWARD, 0, Stream.COMPUTE, (0, 1), (0, 1), reads=(0,), writes=(1,), after=(0,)),
        Op(OpKind.UPDATE, 0, Stream.COMPUTE, (0, 1), (0, 0), reads=(0, 1), frees=(1,)),
        Op(OpKind.SWAP_OUT, 0, Stream.SWAP_OUT, (0, 1), (0, 0), reads=(0,), frees=(0,), after=(2,)),
        Op(OpKind.SWAP_IN, 1, Stream.SWAP_IN, (0, 1), (0, 0), writes=(2,), after=(3,)),
        Op(OpKind.FREE, 1, Stream.MEMORY, (0, 1), (0, 0), frees=(2,), after=(4,)),
    ]
    made = Program(minibatch_size=1, num_layers=1, budgets=(300, 300), blocks=blocks, ops=ops)
    check(made)
    loose = [*ops[:4], ops[4]._replace(after=()), ops[5]]
    with pytest.raises(ProgramError, match=r"op 3 .* may change in the store what op 4 .* still reads"):
        check(replace(made, ops=loose))
    own = Op(OpKind.UPDATE, 1, Stream.COMPUTE, (0, 1), (0, 0), reads=(2,), after=(4,))
    out = Op(OpKind.SWAP_OUT, 1, Stream.SWAP_OUT, (0, 1), (0, 0), reads=(2,), frees=(2,), after=(5,))
    check(replace(made, ops=[*loose[:5], own, out]))
