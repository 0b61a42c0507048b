"""run: a Program against a Profile and a Machine in virtual time.

A discrete-event simulation: an op starts when the one before it on its stream and all it waits for have ended.  Ops
that share something (links; the host's cores) progress together at max-min fair rates (``sharing``); others take their
profiled seconds.
"""

import heapq
from itertools import pairwise

import numpy as np

from harmony_lab.costs import Profile
from harmony_lab.errors import ProgramError
from harmony_lab.machine import HOST, Backend, Machine
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.sharing import Flow, SharedResources
from harmony_lab.trace import MemoryTimeline, Origin, Trace

__all__ = ["run"]

_KINDS = tuple(TensorKind)
_KIND_INDEX = {kind: i for i, kind in enumerate(_KINDS)}


def run(program: Program, profile: Profile, machine: Machine) -> Trace:
    """The predicted Trace of one iteration.

    Deterministic; the Program is taken as valid (``planner.check``).  Raises ``ProgramError`` where it cannot come to
    its end.
    """
    return _Simulation(program, profile, machine).trace()


class _Simulation:
    def __init__(self, program: Program, profile: Profile, machine: Machine) -> None:
        self.program, self.profile, self.machine = program, profile, machine
        self.emulated = [device.backend is Backend.EMULATED for device in machine.devices]
        self.now = 0.0
        hops = machine.capacities
        self.numbers = {hop: number for number, hop in enumerate(hops)}  # of resources: quicker to look up than hops
        self.cores = len(hops)
        self.shared = SharedResources(dict(enumerate([*hops.values(), float(machine.host.num_cores)])))
        self.routes: dict[tuple[int, int], tuple[tuple[int, ...], float]] = {}
        self.seconds: dict[tuple[OpKind, tuple[int, int], int, bool], float] = {}
        self.fixed: list[tuple[float, int]] = []  # (end, op) of ops that share nothing
        self.flows_left: dict[int, int] = {}
        self.latency: dict[int, float] = {}
        count = len(program.ops)
        self.start_s, self.end_s = np.full(count, np.nan), np.full(count, np.nan)
        self.waiting = [len(op.after) for op in program.ops]
        self.followers: list[list[int]] = [[] for _ in program.ops]
        for number, op in enumerate(program.ops):
            for other in op.after:
                self.followers[other].append(number)
        for queue in program.queues.values():
            for first, second in pairwise(queue):
                self.followers[first].append(second)
                self.waiting[second] += 1
        self.memory: list[list[tuple[float, int, int]]] = [[] for _ in machine.devices]  # (time, kind, bytes)
        self.moved: dict[tuple[int, int, TensorKind], int] = {}

    def trace(self) -> Trace:
        ready = [number for number, waits in enumerate(self.waiting) if waits == 0]
        done = 0
        while True:
            for number in ready:
                self._start(number)
            ended = self._advance()
            if not ended:
                break
            done += len(ended)
            ready = self._end(ended)
        if done < len(self.program.ops):
            stuck = next(number for number, end in enumerate(self.end_s) if np.isnan(end))
            raise ProgramError(
                "this program cannot come to its end", [f"op {stuck} ({self.program.ops[stuck]}) never runs"]
            )
        return Trace(
            origin=Origin.PREDICTED,
            program=self.program,
            machine=self.machine,
            start_s=self.start_s,
            end_s=self.end_s,
            memory=tuple(_timeline(events) for events in self.memory),
            moved_bytes=self.moved,
        )

    # -- events -------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        op = self.program.ops[number]
        self.start_s[number] = self.now
        for index in op.writes:
            block = self.program.blocks[index]
            if block.device != HOST:
                self.memory[block.device].append((self.now, _KIND_INDEX[block.kind], block.num_bytes))
        flows = self._transfer_flows(number, op) or self._core_flows(op)
        if flows:
            self.flows_left[number] = len(flows)
            for part, flow in enumerate(flows):
                self.shared.add((number, part), flow)
        else:
            heapq.heappush(self.fixed, (self.now + self._seconds(op), number))

    def _transfer_flows(self, number: int, op: Op) -> list[Flow]:
        by_route: dict[tuple[int, int], int] = {}
        for source, destination, kind, num_bytes in self.program.transfers(number):
            self.moved[source, destination, kind] = self.moved.get((source, destination, kind), 0) + num_bytes
            by_route[source, destination] = by_route.get((source, destination), 0) + num_bytes
        flows = []
        for ends, num_bytes in by_route.items():
            resources, latency_s = self.routes.get(ends) or self._route(ends)
            if latency_s:
                self.latency[number] = max(self.latency.get(number, 0.0), latency_s)
            flows.append(Flow(resources, float(num_bytes)))
        return flows

    def _route(self, ends: tuple[int, int]) -> tuple[tuple[int, ...], float]:
        route = self.machine.route(*ends)
        self.routes[ends] = tuple(self.numbers[hop] for hop in route), self.machine.latency_s(route)
        return self.routes[ends]

    def _core_flows(self, op: Op) -> list[Flow]:
        """Work on the host's cores: updates, and the computing of emulated devices."""
        if op.kind is OpKind.UPDATE:
            threads = self.machine.host.update_threads
        elif op.kind in _COMPUTING and self.emulated[op.device]:
            threads = self.machine.devices[op.device].compute_threads
        else:
            return []
        return [Flow((self.cores,), self._seconds(op), cap=1.0, weight=float(threads))]

    def _seconds(self, op: Op) -> float:
        keeps = op.kind is OpKind.FORWARD and any(self.program.blocks[b].kind is TensorKind.SAVED for b in op.writes)
        key = (op.kind, op.layers, op.samples[1] - op.samples[0], keeps)
        seconds = self.seconds.get(key)
        if seconds is None:
            seconds = self.seconds[key] = self._profiled_seconds(*key)
        return seconds

    def _profiled_seconds(self, kind: OpKind, pack: tuple[int, int], size: int, keeps: bool) -> float:
        """``keeps``: whether a forward saves what backward needs, and so takes as long as a recompute."""
        layers = range(*pack)
        match kind:
            case OpKind.UPDATE:
                return sum(self.profile.layers[layer].update_s for layer in layers)
            case OpKind.BACKWARD:
                return sum(self.profile.cost(layer, size).backward_s for layer in layers)
            case OpKind.RECOMPUTE | OpKind.FORWARD if keeps or kind is OpKind.RECOMPUTE:
                return sum(self.profile.cost(layer, size).recompute_s for layer in layers)
            case OpKind.FORWARD:
                return sum(self.profile.cost(layer, size).forward_s for layer in layers)
        return 0.0

    def _advance(self) -> list[int]:
        """Move to the next time at which ops end; returns them (empty: nothing is under way)."""
        while True:
            flow = self.shared.next_completion()
            if self.fixed and (flow is None or self.fixed[0][0] <= flow[0]):
                return self._fixed_ended()
            if flow is None:
                return []
            self.now, key = flow
            self.shared.advance(self.now)
            self.shared.remove(key)
            assert isinstance(key, tuple)
            number: int = key[0]
            self.flows_left[number] -= 1
            if self.flows_left[number] == 0:
                latency_s = self.latency.get(number)
                if not latency_s:
                    return [number]
                heapq.heappush(self.fixed, (self.now + latency_s, number))

    def _fixed_ended(self) -> list[int]:
        self.now = self.fixed[0][0]
        self.shared.advance(self.now)
        ended = []
        while self.fixed and self.fixed[0][0] <= self.now:
            ended.append(heapq.heappop(self.fixed)[1])
        return ended

    def _end(self, ended: list[int]) -> list[int]:
        ready = []
        for number in ended:
            self.end_s[number] = self.now
            for index in self.program.ops[number].frees:
                block = self.program.blocks[index]
                if block.device != HOST:
                    self.memory[block.device].append((self.now, _KIND_INDEX[block.kind], -block.num_bytes))
            for follower in self.followers[number]:
                self.waiting[follower] -= 1
                if self.waiting[follower] == 0:
                    ready.append(follower)
        return ready


_COMPUTING = (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD)


def _timeline(events: list[tuple[float, int, int]]) -> MemoryTimeline:
    """Bytes by kind after each event, in the order in which events happened."""
    deltas = np.zeros((len(events) + 1, len(_KINDS)), dtype=np.int64)
    for row, (_, kind, num_bytes) in enumerate(events, start=1):
        deltas[row, kind] = num_bytes
    times = np.array([0.0, *(time for time, _, _ in events)])
    return MemoryTimeline(times_s=times, kinds=_KINDS, num_bytes=np.cumsum(deltas, axis=0))
