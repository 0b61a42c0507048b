"""What ``check`` must find, worked out by brute force: all that must precede an op, as a set."""

from collections.abc import Iterator
from itertools import product

from harmony_lab.machine import HOST
from harmony_lab.program import Block, OpKind, Program, TensorKind

Finding = tuple[str, *tuple[int, ...]]

CHANGING = ((OpKind.BACKWARD,), (OpKind.ALL_REDUCE,), (OpKind.SWAP_OUT, OpKind.SEND, OpKind.RECV, OpKind.UPDATE))


def ended_before(program: Program) -> list[set[int]]:
    """By op: those that have ended, whatever the timing, when it starts."""
    newest: dict[tuple[int, str], int] = {}
    found: list[set[int]] = []
    for number, op in enumerate(program.ops):
        waits = {*op.after}
        if (op.device, op.stream) in newest:
            waits.add(newest[op.device, op.stream])
        found.append(waits.union(*(found[other] for other in waits)))
        newest[op.device, op.stream] = number
    return found


def lost_orders(program: Program) -> set[Finding]:
    """Every order of two ops that a program with each block written and freed once needs and does not have."""
    before = ended_before(program)
    return {
        *_of_blocks(program, before),
        *_of_gradients(program, before),
        *_of_updates(program, before),
        *_of_stores(program, before),
        *_of_transfers(program, before),
    }


def _of_blocks(program: Program, before: list[set[int]]) -> Iterator[Finding]:
    writer = {block: number for number, op in enumerate(program.ops) for block in op.writes}
    freer = {block: number for number, op in enumerate(program.ops) for block in op.frees}
    for number, op in enumerate(program.ops):
        written = [block for block in op.reads if block not in program.resident]
        yield from (("read", number, block, writer[block]) for block in written if writer[block] not in before[number])
        for block in (*op.writes, *op.reads):
            end = freer.get(block, number)
            if end != number and number not in before[end]:
                yield "free", end, block, number


def _of_transfers(program: Program, before: list[set[int]]) -> Iterator[Finding]:
    sender = {block: number for number, op in enumerate(program.ops) if op.kind is OpKind.SEND for block in op.reads}
    for number, op in enumerate(program.ops):
        if op.kind is OpKind.RECV:
            yield from (("unsent", number, sender[b]) for b in op.reads if sender[b] not in before[number])


def _of_gradients(program: Program, before: list[set[int]]) -> Iterator[Finding]:
    for block, (kind, device, *_) in enumerate(program.blocks):
        if kind is TensorKind.GRADIENT and device != HOST:
            users = [number for number, op in enumerate(program.ops) if block in (*op.reads, *op.writes)]
            groups = [[number for number in users if program.ops[number].kind in kinds] for kinds in CHANGING]
            for position, group in enumerate(groups):
                earlier = [number for other in groups[:position] for number in other]
                for late, early in product(group, earlier):
                    if early not in before[late]:
                        yield "change", late, block, early


def _of_updates(program: Program, before: list[set[int]]) -> Iterator[Finding]:
    for update, op in enumerate(program.ops):
        if op.kind is OpKind.UPDATE and op.device == HOST:
            for reader, other in enumerate(program.ops):
                brings = other.kind is OpKind.SWAP_IN and any(
                    program.blocks[block].kind is TensorKind.WEIGHT for block in other.writes
                )
                overlaps = other.layers[0] < op.layers[1] and op.layers[0] < other.layers[1]
                if brings and overlaps and reader not in before[update]:
                    yield "update", update, reader


def _of_stores(program: Program, before: list[set[int]]) -> Iterator[Finding]:
    """Weights that devices update: they go to the host after that, and come from there before or after."""
    updates = [(number, op) for number, op in enumerate(program.ops) if op.kind is OpKind.UPDATE and op.device != HOST]
    leaving = [number for number, op in enumerate(program.ops) if op.kind is OpKind.SWAP_OUT]
    coming = [number for number, op in enumerate(program.ops) if op.kind is OpKind.SWAP_IN]
    for update, op in updates:
        for out in leaving:
            for block in {*op.reads} & {*program.ops[out].reads}:
                if update not in before[out]:
                    yield "lost", update, block
    for out, reader in product(leaving, coming):
        pairs = product(_weights(program, program.ops[out].reads), _weights(program, program.ops[reader].writes))
        if out not in before[reader] and reader not in before[out]:
            for one, other in pairs:
                owns = any(op.device == other.device and _overlap(op.layers, other.layers) for _, op in updates)
                if _overlap(one.layers, other.layers) and (one.device == other.device or not owns):
                    yield "store", out, reader


def _weights(program: Program, blocks: tuple[int, ...]) -> list[Block]:
    return [program.blocks[block] for block in blocks if program.blocks[block].kind is TensorKind.WEIGHT]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def most_bytes(program: Program) -> tuple[int, ...]:
    """Per device, the most that may be alive when an op that allocates there starts, see ``program``."""
    before = ended_before(program)
    allocated = [0] * program.num_devices
    for block in program.resident:
        allocated[program.blocks[block].device] += program.blocks[block].num_bytes
    most = list(allocated)
    for number, op in enumerate(program.ops):
        wrote = set()
        for block in op.writes:
            _, device, *_, num_bytes = program.blocks[block]
            if device != HOST:
                allocated[device] += num_bytes
                wrote.add(device)
        for device in wrote:
            freed = sum(
                program.blocks[block].num_bytes
                for other in before[number]
                for block in program.ops[other].frees
                if program.blocks[block].device == device
            )
            most[device] = max(most[device], allocated[device] - freed)
    return tuple(most)
