"""work: what every op of a Program takes, under a Profile and on a Machine: seconds, or flows over links and cores."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Floats, Ints, compiled
from harmony_lab.costs import Profile
from harmony_lab.emulation import Emulation, computing_s, moving_s
from harmony_lab.machine import HOST, Backend, Machine
from harmony_lab.program import (
    OP_CODES,
    TENSOR_CODES,
    BlockColumns,
    OpColumns,
    OpKind,
    Program,
    Stream,
    TensorKind,
    shard_bounds,
)
from harmony_lab.sharing import FlowColumns
from harmony_lab.simulator.events import Flows, Graph

__all__ = ["Work", "work_of"]

_FORWARD, _RECOMPUTE, _BACKWARD, _UPDATE, _SWAP_IN, _SWAP_OUT, _SEND, _RECV, _ALL_REDUCE, _FREE = (
    OP_CODES[kind] for kind in OpKind
)
_SAVED, _WEIGHT, _GRADIENT, _OPTIMIZER = (
    TENSOR_CODES[k] for k in (TensorKind.SAVED, TensorKind.WEIGHT, TensorKind.GRADIENT, TensorKind.OPTIMIZER)
)
_NUM_STREAMS = len(Stream)


class Work(NamedTuple):
    """``moved[r, k]``: bytes of tensor kind k over the route numbered r = (source + 1) · (devices + 1) + destination +
    1, where the host is -1."""

    graph: Graph
    flows: Flows
    moved: Ints


def work_of(program: Program, profile: Profile, machine: Machine) -> Work:
    ops, blocks = program.op_columns, program.block_columns
    count = len(ops.kind)
    seconds = _seconds(program, profile)
    _set_device_updates(program, profile, machine, seconds)
    route_end, resource, latency_s, capacity = _routes(machine)
    core_route = len(route_end) - 1
    size = machine.num_devices + 1
    op, route, num_bytes, moved = _transfers(ops, blocks, size)
    tail_s = np.zeros(count)
    np.maximum.at(tail_s, op, latency_s[route])
    tail_s += _release_s(program, machine)

    threads = _threads(ops, machine)
    if profile.emulation is not None and machine.virtual_time:
        seconds[ops.kind <= _UPDATE] += profile.emulation.alone_s
    on_cores_s = seconds.copy()
    if profile.emulation is not None and not machine.virtual_time:
        _add_emulation(profile.emulation, ops, machine, (op, num_bytes), on_cores_s, threads, tail_s)
    on_cores = np.flatnonzero(threads)
    op, route, amount = (
        np.concatenate([op, on_cores]),
        np.concatenate([route, np.full(len(on_cores), core_route)]),
        np.concatenate([num_bytes.astype(np.float64), on_cores_s[on_cores]]),
    )
    cap = np.where(route == core_route, 1.0, np.inf)
    weight = np.where(route == core_route, threads[op], 1.0)
    order = np.argsort(op, kind="stable")
    columns = FlowColumns(route[order], cap[order], weight[order], route_end, resource, capacity)
    graph = Graph(ops.after, ops.after_end, (ops.device + 1) * _NUM_STREAMS + ops.stream, seconds, tail_s)
    return Work(graph, Flows(op[order], amount[order], columns), moved)


def _threads(ops: OpColumns, machine: Machine) -> Floats:
    """Host cores that each op works on: updates, and what emulated devices compute unless in virtual time; 0: none."""
    emulated = [device.backend is Backend.EMULATED and not machine.virtual_time for device in machine.devices]
    of_device = [d.compute_threads if e else 0 for d, e in zip(machine.devices, emulated, strict=True)]
    computing = np.array([*of_device, 0], dtype=np.float64)[ops.device]  # the host, -1, is the last
    threads: Floats = np.where(ops.kind <= _UPDATE, computing, 0.0)
    threads[(ops.kind == _UPDATE) & (ops.device == HOST)] = machine.host.update_threads
    return threads


def _add_emulation(
    emulation: Emulation,
    ops: OpColumns,
    machine: Machine,
    carried: tuple[Ints, Ints],
    on_cores_s: Floats,
    threads: Floats,
    tail_s: Floats,
) -> None:
    """What emulated devices take of the host's cores beside kernels: running the op and, for transfers, copying.

    ``carried``: (op, bytes) of transfers, whose copies go on while the links count them.
    """
    emulated = np.array([*(device.backend is Backend.EMULATED for device in machine.devices), True])[ops.device]
    op, num_bytes = carried
    copied = np.zeros(len(ops.kind))
    np.add.at(copied, op, num_bytes)
    moves = emulated & np.isin(ops.kind, (_SWAP_IN, _SWAP_OUT, _RECV, _ALL_REDUCE))
    on_cores_s[moves] = moving_s(emulation, copied[moves])
    threads[moves] = 1.0
    works = emulated & (ops.kind <= _UPDATE)
    on_cores_s[works] = computing_s(emulation, on_cores_s[works])
    tail_s[moves | works] += emulation.waking_s


def _release_s(program: Program, machine: Machine) -> Floats:
    """What devices need to give memory back, after the op that frees a pack's weights."""
    ops = program.op_columns
    seconds = np.zeros(len(ops.kind))
    of_device = np.array([*(device.release_s for device in machine.devices), 0.0])
    if of_device.any():
        freer = np.repeat(np.arange(len(ops.kind)), np.diff(ops.frees_end, prepend=0))
        weights = freer[program.block_columns.kind[ops.frees] == _WEIGHT]
        seconds[weights] = of_device[ops.device[weights]]
    return seconds


# -- seconds ----------------------------------------------------------------------------------------------------------


def _seconds(program: Program, profile: Profile) -> Floats:
    """Profiled seconds of compute ops and updates; 0 of others."""
    ops = program.op_columns
    count = len(ops.kind)
    kind = ops.kind.copy()
    writer = np.repeat(np.arange(count), np.diff(ops.writes_end, prepend=0))
    saving = writer[program.block_columns.kind[ops.writes] == _SAVED]
    kind[saving] = _RECOMPUTE  # a forward that keeps what backward needs takes as long
    mine = np.flatnonzero(kind <= _UPDATE)
    layers, samples = program.num_layers + 1, program.minibatch_size + 1
    key = ((kind * layers + ops.start) * layers + ops.stop) * samples + ops.last - ops.first
    _, first, inverse = np.unique(key[mine], return_index=True, return_inverse=True)
    values = [
        _profiled_seconds(
            profile, int(kind[op]), int(ops.start[op]), int(ops.stop[op]), int(ops.last[op] - ops.first[op])
        )
        for op in mine[first].tolist()
    ]
    seconds = np.zeros(count)
    seconds[mine] = np.array(values)[inverse] if values else 0.0
    return seconds


def _profiled_seconds(profile: Profile, kind: int, start: int, stop: int, size: int) -> float:
    layers = range(start, stop)
    if kind == _UPDATE:
        return sum(profile.layers[layer].update_s for layer in layers)
    if kind == _BACKWARD:
        return sum(profile.cost(layer, size).backward_s for layer in layers)
    if kind == _RECOMPUTE:
        return sum(profile.cost(layer, size).recompute_s for layer in layers)
    return sum(profile.forward_cost(layer, size).forward_s for layer in layers)


def _set_device_updates(program: Program, profile: Profile, machine: Machine, seconds: Floats) -> None:
    """Updates on a device read and write weights and optimizer state and read gradients, as fast as its memory is; on
    one of unknown speed they take as long as on the host, those that only look at gradients their share of it."""
    ops, blocks = program.op_columns, program.block_columns
    reader = np.repeat(np.arange(len(ops.kind)), np.diff(ops.reads_end, prepend=0))
    mine = (ops.kind[reader] == _UPDATE) & (ops.device[reader] != HOST)
    reader, block = reader[mine], ops.reads[mine]
    times = np.where(np.isin(blocks.kind[block], (_WEIGHT, _OPTIMIZER)), 2, 1)
    rates = np.array([device.memory_bytes_per_s or np.nan for device in machine.devices])
    taken = np.zeros(len(ops.kind))
    np.add.at(taken, reader, times * blocks.num_bytes[block] / rates[ops.device[reader]])
    known = np.isfinite(taken) & (taken > 0)
    seconds[known] = taken[known]
    looks = np.isnan(taken)
    looks[reader[times == 2]] = False
    for op in np.flatnonzero(looks).tolist():
        layers = profile.layers[int(ops.start[op]) : int(ops.stop[op])]
        looked = sum(layer.gradient_bytes for layer in layers)
        changed = sum(layer.parameter_bytes + layer.optimizer_state_bytes for layer in layers)
        seconds[op] *= looked / (looked + 2 * changed)


# -- flows ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _routes(machine: Machine) -> tuple[Ints, Ints, Floats, Floats]:
    """Per route (see ``Work``), where its resources end, the resources one after the other, latencies; capacities.

    The last route is the host's cores.
    """
    numbers = {hop: number for number, hop in enumerate(machine.capacities)}
    places = range(HOST, machine.num_devices)
    ends, resources, latencies = [], [], []
    for source in places:
        for destination in places:
            route = machine.route(source, destination) if source != destination else ()
            resources += [numbers[hop] for hop in route]
            ends.append(len(resources))
            latencies.append(machine.latency_s(route))
    resources.append(len(numbers))
    capacity = np.array([*machine.capacities.values(), float(machine.host.num_cores)])
    return np.array([*ends, len(resources)]), np.array(resources), np.array([*latencies, 0.0]), capacity


def _transfers(ops: OpColumns, blocks: BlockColumns, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Flows of transfers (op, route, bytes), one per op and route; and all bytes moved."""
    most = len(ops.reads) + len(ops.writes) + 2 * size * int((ops.kind == _ALL_REDUCE).sum()) + 1
    flows, moved = np.zeros((3, most), np.int64), np.zeros((size * size, len(TensorKind)), np.int64)
    count = _fill_transfers(ops, blocks, size, flows, moved)
    op, route, amount = flows[:, :count]
    return op, route, amount, moved


_shard_bounds = compiled(shard_bounds)


@compiled
def _fill_transfers(ops: OpColumns, blocks: BlockColumns, size: int, flows: Ints, moved: Ints) -> int:
    count = 0
    for op in range(len(ops.kind)):
        kind = ops.kind[op]
        here = ops.device[op] + 1
        reads_begin = ops.reads_end[op - 1] if op > 0 else 0
        begin = count
        if kind == _SWAP_IN:
            for i in range(ops.writes_end[op - 1] if op > 0 else 0, ops.writes_end[op]):
                block = ops.writes[i]
                count = _add(flows, moved, begin, count, op, here, blocks.kind[block], blocks.num_bytes[block])
        elif kind == _SWAP_OUT:
            for i in range(reads_begin, ops.reads_end[op]):
                block = ops.reads[i]
                count = _add(flows, moved, begin, count, op, here * size, blocks.kind[block], blocks.num_bytes[block])
        elif kind == _RECV:
            for i in range(reads_begin, ops.reads_end[op]):
                block = ops.reads[i]
                route = (blocks.device[block] + 1) * size + here
                count = _add(flows, moved, begin, count, op, route, blocks.kind[block], blocks.num_bytes[block])
        elif kind == _ALL_REDUCE:
            shards = ops.reads_end[op] - reads_begin
            for rank in range(shards):
                block = ops.reads[reads_begin + rank]
                if blocks.device[block] + 1 == here:
                    start, stop = _shard_bounds(blocks.num_bytes[block], shards, rank)
            for i in range(reads_begin, ops.reads_end[op]):
                peer = blocks.device[ops.reads[i]] + 1
                if peer != here:
                    count = _add(flows, moved, begin, count, op, peer * size + here, _GRADIENT, stop - start)
                    count = _add(flows, moved, begin, count, op, here * size + peer, _GRADIENT, stop - start)
    return count


@compiled
def _add(flows: Ints, moved: Ints, begin: int, count: int, op: int, route: int, kind: int, num_bytes: int) -> int:
    """Add bytes to the op's flow over that route."""
    moved[route, kind] += num_bytes
    for i in range(begin, count):
        if flows[1, i] == route:
            flows[2, i] += num_bytes
            return count
    flows[0, count], flows[1, count], flows[2, count] = op, route, num_bytes
    return count + 1
