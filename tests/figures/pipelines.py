"""Programs and traces written by hand for the tests of figures."""

from functools import cache

import numpy as np
import pandas

from harmony_lab.costs import Cost, LayerCost, Profile
from harmony_lab.layers import TensorSpec
from harmony_lab.machine import HOST, Machine
from harmony_lab.program import Block, Op, OpKind, Program, Stream, TensorKind
from harmony_lab.trace import MemoryTimeline, Origin, Trace

MIB = 2**20

# Two devices, layers [0:2) on the first and the fused [2:4) on the second, two samples, one microbatch.
PIPELINE = f"""
harmony_lab.program 1 minibatch=2 layers=4 budgets={8 * MIB},{8 * MIB}
%0 weight d0 0:2 0:0 2097152
%1 input d0 0:2 0:2 4096
%2 activation d0 2:2 0:2 524288
%3 activation d1 2:2 0:2 524288
%4 weight d1 2:4 0:0 3145728
%5 saved d1 2:4 0:2 1048576
%6 gradient d1 2:4 0:0 3145728
%7 activation_gradient d1 2:2 0:2 262144
%8 gradient d-1 2:4 0:0 3145728
%9 activation_gradient d0 2:2 0:2 262144
%10 saved d0 0:2 0:2 1048576
%11 gradient d0 0:2 0:0 2097152
%12 gradient d-1 0:2 0:0 2097152
%13 activation d-1 2:2 0:2 524288
0 swap_in d0.swap_in 0:2 0:0 writes=0
1 swap_in d0.swap_in 0:2 0:2 writes=1
2 swap_in d1.swap_in 2:4 0:0 writes=4
3 forward d0.compute 0:2 0:2 reads=0,1 writes=2 after=0,1
4 send d0.peer_out 0:2 0:2 reads=2 after=3
5 recv d1.peer_in 2:4 0:2 reads=2 writes=3 after=4
6 swap_out d0.swap_out 2:2 0:2 reads=2 writes=13 after=3
7 forward d1.compute 2:4 0:2 reads=3,4 writes=5 after=2,5
8 backward d1.compute 2:4 0:2 reads=3,4,5 writes=6,7 frees=5 after=7
9 swap_out d1.swap_out 2:4 0:0 reads=6 writes=8 frees=6 after=8
10 send d1.peer_out 0:2 0:2 reads=7 after=8
11 recv d0.peer_in 0:2 0:2 reads=7 writes=9 after=10
12 update d-1.host 2:4 0:0 reads=8 frees=8 after=9
13 recompute d0.compute 0:2 0:2 reads=0,1 writes=10 after=3,6
14 backward d0.compute 0:2 0:2 reads=0,9,10 writes=11 frees=9,10 after=11,13
15 swap_out d0.swap_out 0:2 0:0 reads=11 writes=12 frees=11 after=14
16 update d-1.host 0:2 0:0 reads=12 frees=12 after=15
17 free d0.memory 0:2 0:0 frees=0,1,2 after=14
18 free d1.memory 2:4 0:0 frees=3,4,7 after=9,11
"""
_STARTS_MS = (0, 2, 0, 3, 7, 7, 7, 9, 14, 22, 22, 22, 26, 8, 23, 30, 33, 30, 26)
_ENDS_MS = (2, 3, 4, 7, 7, 9, 8, 14, 22, 26, 22, 23, 31, 12, 30, 33, 37, 30, 26)


def pipeline_trace(origin: Origin = Origin.PREDICTED) -> Trace:
    """One iteration of the two-device pipeline."""
    program = Program.parse(PIPELINE)
    return trace_of(program, np.array(_STARTS_MS) * 1e-3, np.array(_ENDS_MS) * 1e-3, origin)


def trace_of(program: Program, start_s: np.ndarray, end_s: np.ndarray, origin: Origin = Origin.PREDICTED) -> Trace:
    """The trace of a program at those times: moved bytes and memory are added up from its ops."""
    moved: dict[tuple[int, int, TensorKind], int] = {}
    for number in range(len(program.ops)):
        for source, destination, kind, num_bytes in program.transfers(number):
            moved[source, destination, kind] = moved.get((source, destination, kind), 0) + num_bytes
    return Trace(
        origin=origin,
        program=program,
        machine=Machine.emulated(program.num_devices, memory=program.budgets[0], link="2GB/s"),
        start_s=start_s,
        end_s=end_s,
        memory=tuple(_memory(program, device, start_s, end_s) for device in range(program.num_devices)),
        moved_bytes=moved,
    )


def _memory(program: Program, device: int, start_s: np.ndarray, end_s: np.ndarray) -> MemoryTimeline:
    kinds = tuple(TensorKind)
    events: list[tuple[float, int, int]] = []
    for number, op in enumerate(program.ops):
        for sign, blocks, when in ((1, op.writes, start_s), (-1, op.frees, end_s)):
            here = [program.blocks[b] for b in blocks if program.blocks[b].device == device]
            events += [(float(when[number]), sign * block.num_bytes, kinds.index(block.kind)) for block in here]
    events.sort()
    times = sorted({0.0, *(when for when, _, _ in events)})
    changes = np.zeros((len(times), len(kinds)), dtype=np.int64)
    places = {when: i for i, when in enumerate(times)}
    for when, change, kind in events:
        changes[places[when], kind] += change
    return MemoryTimeline(times_s=np.array(times), kinds=kinds, num_bytes=changes.cumsum(axis=0))


@cache
def long_trace(num_ops: int, num_devices: int = 4, budget: int = 64 * MIB) -> Trace:
    """Devices that swap in, run forward, run backward and swap out, over and over, with streams overlapping."""
    blocks: list[Block] = []
    ops: list[Op] = []
    starts: list[float] = []
    ends: list[float] = []
    rng = np.random.default_rng(0)
    clock = [0.0] * num_devices

    def op(
        kind: OpKind,
        device: int,
        stream: Stream,
        layers: tuple[int, int],
        at: float,
        last: float,
        **lists: tuple[int, ...],
    ) -> None:
        ops.append(Op(kind, device, stream, layers, (0, 4), **lists))
        starts.append(at)
        ends.append(at + last)

    step = 0
    while len(ops) + 5 <= num_ops:
        device, layers = step % num_devices, (step % 48, step % 48 + 1)
        at, length = clock[device], float(rng.uniform(0.5, 1.5)) * 1e-3
        first = len(blocks)
        blocks += [
            Block(TensorKind.WEIGHT, device, layers, (0, 0), 8 * MIB),
            Block(TensorKind.SAVED, device, layers, (0, 4), 24 * MIB),
            Block(TensorKind.GRADIENT, device, layers, (0, 0), 8 * MIB),
            Block(TensorKind.GRADIENT, HOST, layers, (0, 0), 8 * MIB),
        ]
        weight, saved, gradient, kept = range(first, first + 4)
        op(OpKind.SWAP_IN, device, Stream.SWAP_IN, layers, at, length, writes=(weight,))
        op(OpKind.RECOMPUTE, device, Stream.COMPUTE, layers, at + length, length, reads=(weight,), writes=(saved,))
        op(
            OpKind.BACKWARD,
            device,
            Stream.COMPUTE,
            layers,
            at + 2 * length,
            2 * length,
            reads=(weight, saved),
            writes=(gradient,),
            frees=(weight, saved),
        )
        op(
            OpKind.SWAP_OUT,
            device,
            Stream.SWAP_OUT,
            layers,
            at + 4 * length,
            length,
            reads=(gradient,),
            writes=(kept,),
            frees=(gradient,),
        )
        op(OpKind.UPDATE, HOST, Stream.HOST, layers, step * 2e-3, 1e-3, reads=(kept,), frees=(kept,))
        clock[device] = at + 4 * length
        step += 1
    program = Program(
        minibatch_size=4, num_layers=49, budgets=(budget,) * num_devices, blocks=tuple(blocks), ops=tuple(ops)
    )
    return trace_of(program, np.array(starts), np.array(ends))


def small_profile(num_layers: int = 12, first_name: str = "embedding") -> Profile:
    """Layers of two kinds, microbatches of 1 to 4."""

    def cost(scale: float) -> Cost:
        return Cost(1e-3 * scale, 1.2e-3 * scale, 2e-3 * scale, 1e6 * scale, 3e6 * scale, 3.5e6 * scale, 5e6 * scale)

    layers = tuple(
        LayerCost(
            name=first_name if i == 0 else f"block.{i}",
            kind=int(i > 0),
            parameter_bytes=6 * MIB if i == 0 else 2 * MIB,
            gradient_bytes=2 * MIB,
            buffer_bytes=0,
            updated_buffer_bytes=0,
            optimizer_state_bytes=4 * MIB,
            update_s=1e-4,
            batch_inputs=("tokens",) if i == 0 else (),
            costs=tuple(cost(size * (0.4 if i == 0 else 1.0)) for size in (1, 2, 4)),
        )
        for i in range(num_layers)
    )
    hidden = TensorSpec(name="hidden", shape=(64, 128), dtype="float32", item_bytes=4, batch_dim=0, requires_grad=True)
    tokens = TensorSpec(name="tokens", shape=(64,), dtype="int64", item_bytes=8, batch_dim=0)
    return Profile(
        model="Tiny<GPT>",
        fingerprint="abc",
        device="emulated",
        microbatch_sizes=(1, 2, 4),
        layers=layers,
        boundaries=((), *(((hidden,),) * (num_layers - 1)), ()),
        batch=(tokens,),
    )


def ranking() -> pandas.DataFrame:
    """Twelve candidates, shaped as ``SearchResult.to_frame``."""
    return pandas.DataFrame(
        {
            "rank": rank,
            "plan": "pp minibatch=8 forward=2[0:2] backward=2[0:2,2:4] devices=0,1",
            "mode": "pp" if rank % 3 else "dp",
            "precision": "fp32",
            "forward_microbatch_size": 2,
            "backward_microbatch_size": 2,
            "num_forward_packs": 1,
            "num_backward_packs": 2,
            "step_s": 0.31 + 0.05 * rank,
            "samples_per_s": 8 / (0.31 + 0.05 * rank),
            "peak_bytes": (4 + rank % 5) * MIB,
            "swap_bytes": 20 * MIB,
            "peer_bytes": MIB,
            "bubble_fraction": 0.25,
            "gap": 0.1 + 0.02 * rank,
        }
        for rank in range(12)
    )
