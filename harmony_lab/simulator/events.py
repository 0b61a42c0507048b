"""events: ops and flows through virtual time; compiled.

An op starts when the op before it on its stream and all that it waits for have ended.  It takes its seconds, or as long
as its flows (``sharing``), and then its tail.
"""

from typing import NamedTuple

import numpy as np

from harmony_lab.compiled import Floats, Ints, compiled
from harmony_lab.sharing import FlowColumns, fill_rates

__all__ = ["NEVER", "Flows", "Graph", "Times", "follow"]

NEVER = -1.0


class Graph(NamedTuple):
    """Ops: their edges, the stream of each, and how long each takes beside its flows."""

    after: Ints
    after_end: Ints
    stream: Ints
    seconds: Floats  # of ops without flows
    tail_s: Floats  # after those, or after the last flow


class Flows(NamedTuple):
    """Work over shared resources, op by op: ``amount[f]`` units that belong to op ``op[f]``."""

    op: Ints
    amount: Floats
    shared: FlowColumns


class Times(NamedTuple):
    """When ops start and end, ``NEVER`` where they do not, and in which order they do."""

    start_s: Floats
    end_s: Floats
    started: Ints
    ended: Ints


class _State(NamedTuple):
    """What is under way: flows in order of arrival, and ops that end at a known time."""

    under_way: Ints
    left: Floats  # by flow
    rate: Floats
    timed: Ints
    end_s: Floats  # by op
    counts: Ints


_FLOWS, _TIMED, _EVENTS = 0, 1, 2  # of counts


@compiled
def follow(g: Graph, f: Flows) -> Times:
    """Run everything that can run."""
    count = len(g.stream)
    times = Times(np.full(count, NEVER), np.full(count, NEVER), np.zeros(count, np.int64), np.zeros(count, np.int64))
    waiting, follower, follower_end = _followers(g)
    flows_left = np.zeros(count, np.int64)
    for op in f.op:
        flows_left[op] += 1
    flow_end = np.cumsum(flows_left)
    s = _State(
        np.zeros(len(f.op) + 1, np.int64),
        f.amount.copy(),
        np.zeros(len(f.op)),
        np.zeros(count + 1, np.int64),
        np.zeros(count),
        np.zeros(3, np.int64),
    )
    ready, ended = np.zeros(count, np.int64), np.zeros(count, np.int64)
    num_ready = 0
    for op in range(count):
        if waiting[op] == 0:
            ready[num_ready] = op
            num_ready += 1
    now = 0.0
    while True:
        for i in range(num_ready):
            op = ready[i]
            times.start_s[op] = now
            times.started[op] = s.counts[_EVENTS]
            s.counts[_EVENTS] += 1
            if flows_left[op] == 0:
                _time(s, op, now + g.seconds[op] + g.tail_s[op])
            for flow in range(flow_end[op] - flows_left[op], flow_end[op]):
                s.under_way[s.counts[_FLOWS]] = flow
                s.counts[_FLOWS] += 1
        if num_ready > 0:
            fill_rates(f.shared, s.under_way[: s.counts[_FLOWS]], s.rate)
        now, num_ended = _advance(g, f, s, flows_left, now, ended)
        if num_ended == 0:
            return times
        num_ready = 0
        for i in range(num_ended):
            op = ended[i]
            times.end_s[op] = now
            times.ended[op] = s.counts[_EVENTS]
            s.counts[_EVENTS] += 1
            for j in range(follower_end[op - 1] if op > 0 else 0, follower_end[op]):
                waiting[follower[j]] -= 1
                if waiting[follower[j]] == 0:
                    ready[num_ready] = follower[j]
                    num_ready += 1


@compiled
def _followers(g: Graph) -> tuple[Ints, Ints, Ints]:
    """How many ops each waits for, and those that wait for each; the next one on its stream is among them."""
    count = len(g.stream)
    before = np.full(count, -1)
    waiting, follower_end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    if count == 0:
        return waiting, follower_end, follower_end
    newest = np.full(g.stream.max() + 1, -1)
    begin = 0
    for op in range(count):
        before[op] = newest[g.stream[op]]
        newest[g.stream[op]] = op
        waiting[op] = g.after_end[op] - begin
        for i in range(begin, g.after_end[op]):
            follower_end[g.after[i]] += 1
        if before[op] >= 0:
            waiting[op] += 1
            follower_end[before[op]] += 1
        begin = g.after_end[op]
    follower_end = np.cumsum(follower_end)
    filled = np.zeros(count, np.int64)
    filled[1:] = follower_end[:-1]
    follower = np.zeros(follower_end[-1], np.int64)
    begin = 0
    for op in range(count):
        for i in range(begin, g.after_end[op]):
            follower[filled[g.after[i]]] = op
            filled[g.after[i]] += 1
        begin = g.after_end[op]
    for op in range(count):
        if before[op] >= 0:
            follower[filled[before[op]]] = op
    return waiting, follower, follower_end


@compiled
def _time(s: _State, op: int, end_s: float) -> None:
    s.timed[s.counts[_TIMED]] = op
    s.counts[_TIMED] += 1
    s.end_s[op] = end_s


@compiled
def _advance(g: Graph, f: Flows, s: _State, flows_left: Ints, now: float, ended: Ints) -> tuple[float, int]:
    """Move to the next time at which ops end; that time, and how many are in ``ended`` (0: nothing is under way)."""
    while True:
        first, first_s = -1, np.inf
        for i in range(s.counts[_FLOWS]):
            flow = s.under_way[i]
            takes_s = s.left[flow] / s.rate[flow]
            if takes_s < first_s:
                first, first_s = i, takes_s
        known_s = np.inf
        for i in range(s.counts[_TIMED]):
            known_s = min(known_s, s.end_s[s.timed[i]])
        flow_s = now + first_s
        if s.counts[_TIMED] > 0 and known_s <= flow_s:
            _progress(s, known_s - now)
            return known_s, _timed_ended(s, known_s, ended)
        if first < 0:
            return now, 0
        _progress(s, flow_s - now)
        now = flow_s
        op = f.op[s.under_way[first]]
        s.counts[_FLOWS] -= 1
        for i in range(first, s.counts[_FLOWS]):
            s.under_way[i] = s.under_way[i + 1]
        fill_rates(f.shared, s.under_way[: s.counts[_FLOWS]], s.rate)
        flows_left[op] -= 1
        if flows_left[op] == 0:
            if g.tail_s[op] > 0:
                _time(s, op, now + g.tail_s[op])
            else:
                ended[0] = op
                return now, 1


@compiled
def _progress(s: _State, elapsed_s: float) -> None:
    if elapsed_s > 0:
        for i in range(s.counts[_FLOWS]):
            flow = s.under_way[i]
            s.left[flow] = max(0.0, s.left[flow] - s.rate[flow] * elapsed_s)


@compiled
def _timed_ended(s: _State, now: float, ended: Ints) -> int:
    """Take out the ops that have ended by now, in order of their numbers."""
    count = kept = 0
    for i in range(s.counts[_TIMED]):
        op = s.timed[i]
        if s.end_s[op] <= now:
            ended[count] = op
            count += 1
        else:
            s.timed[kept] = op
            kept += 1
    s.counts[_TIMED] = kept
    ended[:count].sort()
    return count
