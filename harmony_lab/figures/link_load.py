"""Link load: how much of every link's capacity is used when, as a heatmap over one iteration."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from harmony_lab.compiled import Ints
from harmony_lab.figures.moves import moves
from harmony_lab.figures.scales import time_unit
from harmony_lab.figures.spec import Spec, time_range
from harmony_lab.figures.theme import SEQUENTIAL, looks
from harmony_lab.machine import HOST, Direction, Hop
from harmony_lab.trace import Trace
from harmony_lab.units import format_rate

__all__ = ["LinkLoad", "hop_name", "link_load", "link_load_spec"]

_STRETCHES: Final = 240
_ARROWS: Final = {Direction.DOWN: "↓", Direction.UP: "↑", Direction.BOTH: "↕"}
_Floats = npt.NDArray[np.float64]


class LinkLoad(NamedTuple):
    """``num_bytes[hop, i]`` over that link and direction between ``edges_s[i]`` and ``edges_s[i + 1]``."""

    hops: tuple[Hop, ...]
    edges_s: _Floats
    num_bytes: _Floats
    capacities: _Floats  # bytes per second, by hop

    @property
    def shares(self) -> _Floats:
        """Of what the link could have carried in that time."""
        possible = self.capacities[:, None] * np.diff(self.edges_s)[None, :]
        result: _Floats = np.divide(self.num_bytes, possible, out=np.zeros_like(self.num_bytes), where=possible > 0)
        return result


def link_load(trace: Trace, *, num_stretches: int = _STRETCHES) -> LinkLoad:
    """Bytes over every link in equally long stretches of the iteration; an op's bytes are spread evenly over its time.

    Links that carry nothing are left out.
    """
    carried = _over_hops(trace)
    hops = tuple(sorted(carried, key=lambda hop: (hop.link, hop.direction)))
    edges = np.linspace(0.0, trace.makespan_s, num_stretches + 1)
    least_s = (trace.makespan_s / num_stretches or 1.0) * 1e-3  # a copy that took no time still has a place
    rows = []
    for hop in hops:
        numbers, num_bytes = carried[hop]
        start = trace.start_s[numbers]
        rows.append(np.diff(_carried(start, np.maximum(trace.end_s[numbers], start + least_s), num_bytes, edges)))
    capacities = np.array([trace.machine.capacities[hop] for hop in hops])
    return LinkLoad(hops, edges, np.array(rows).reshape(len(hops), num_stretches), capacities)


def _over_hops(trace: Trace) -> dict[Hop, tuple[Ints, Ints]]:
    """Ops whose bytes go over each link, and how many."""
    moved = moves(trace.program)
    size = trace.machine.num_devices + 1
    routes, of_route = np.unique((moved.source - HOST) * size + moved.destination - HOST, return_inverse=True)
    over: dict[Hop, list[int]] = {}
    for number, route in enumerate(routes.tolist()):
        for hop in trace.machine.route(route // size + HOST, route % size + HOST):
            over.setdefault(hop, []).append(number)
    times = {hop: np.bincount(numbers, minlength=len(routes))[of_route] for hop, numbers in over.items()}
    return {hop: (np.repeat(moved.op, count), np.repeat(moved.num_bytes, count)) for hop, count in times.items()}


def _carried(start_s: _Floats, end_s: _Floats, num_bytes: npt.NDArray[np.int64], at_s: _Floats) -> _Floats:
    """Bytes carried until each of the times: the sum of ramps, one per transfer."""
    rate = num_bytes / (end_s - start_s)
    times = np.concatenate([start_s, end_s])
    order = np.argsort(times, kind="stable")
    slope = np.concatenate([rate, -rate])[order].cumsum()
    times = times[order]
    total = np.concatenate([[0.0], (slope[:-1] * np.diff(times)).cumsum()])
    carried: _Floats = np.interp(at_s, times, total, left=0.0)
    return carried


def hop_name(hop: Hop) -> str:
    """``"host-switch ↓"``: an arrow down leads away from the host; ``"gpu0-gpu1 ↓"``: over a bridge to the second."""
    return f"{hop.link} {_ARROWS[hop.direction]}"


def link_load_spec(trace: Trace, *, left: int = 130) -> Spec:
    """A row per link and direction, time to the right, dark where the link is full."""
    load = link_load(trace)
    unit = time_unit(trace.makespan_s)
    title = (
        f"Link load over time, {trace.origin}<br>"
        "<sup>share of each link's rate in one direction that all transfers over it take together</sup>"
    )
    layout = looks(title=title, height=145 + 26 * max(2, len(load.hops)), legend=False, left=left)
    if not load.hops:
        note = {"text": "nothing is moved", "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
        return {"data": [], "layout": layout | {"annotations": [note]}}
    length_s = float(load.edges_s[1] - load.edges_s[0])
    rates = load.capacities.tolist()
    heat = {
        "type": "heatmap",
        "x0": length_s / 2 / unit.size,
        "dx": length_s / unit.size,
        "y": [f"{hop_name(hop)}  {format_rate(rate)}" for hop, rate in zip(load.hops, rates, strict=True)],
        "z": load.shares.astype(np.float32),
        "zmin": 0.0,
        "zmax": 1.0,
        "colorscale": [[i / (len(SEQUENTIAL) - 1), colour] for i, colour in enumerate(SEQUENTIAL)],
        "colorbar": {"tickformat": ".0%", "thickness": 12, "outlinewidth": 0, "nticks": 3},
        "ygap": 3,
        "hovertemplate": f"%{{y}}<br>%{{x:.4~g}} {unit.name}: %{{z:.0%}} used<extra></extra>",
    }
    layout["xaxis"] = {
        "title": {"text": f"time ({unit.name})"},
        "range": time_range(trace.makespan_s, unit.size),
        "showgrid": False,
    }
    layout["yaxis"] = {"autorange": "reversed", "showgrid": False, "type": "category", "fixedrange": True}
    return {"data": [heat], "layout": layout}
