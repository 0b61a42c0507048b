"""Static pictures: the figures as inline SVG, for saved notebooks, exports and pages without scripts."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import floor, log10
from typing import Final

import numpy as np

from harmony_lab.figures.canvas import (
    WIDTH,
    Panel,
    legend,
    line,
    number,
    picture,
    rectangle,
    text,
    x_axis,
    y_axis,
)
from harmony_lab.figures.critical import CriticalPath, critical_line, critical_path
from harmony_lab.figures.curves import thinned_losses
from harmony_lab.figures.footprint import INCLUDED, Footprint, footprints
from harmony_lab.figures.lanes import KINDS, Lanes, lanes, thinned
from harmony_lab.figures.link_load import hop_name, link_load
from harmony_lab.figures.scales import byte_unit, ticks, time_unit
from harmony_lab.figures.theme import (
    ACCENT_COLOUR,
    ALARM_COLOUR,
    BUDGET_COLOUR,
    CRITICAL_COLOUR,
    OP_COLOURS,
    SEQUENTIAL,
    TENSOR_COLOURS,
    ink_on,
    label,
)
from harmony_lab.figures.volumes import Volumes, volumes_of_packs
from harmony_lab.program import TensorKind
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_rate

__all__ = ["links_svg", "loss_svg", "memory_svg", "swaps_svg", "timeline_svg"]

_MOST_BARS: Final = 2400
_MOST_POINTS: Final = 400
_MOST_VALUES: Final = 4000
_ROW: Final = 22
_BAR: Final = 15
_MOST_ROWS: Final = 40
_MOST_LOSSES: Final = 800
_STRETCHES: Final = 160


# -- timeline ---------------------------------------------------------------------------------------------------------


def timeline_svg(trace: Trace, *, until_s: float | None = None) -> str:
    """The timeline; the axis reaches to ``until_s``, by default to the makespan."""
    end_s = trace.makespan_s if until_s is None else until_s
    unit = time_unit(end_s)
    every = lanes(trace)
    bars = thinned(every, trace.makespan_s, limit=_MOST_BARS)
    used = sorted(set(bars.kind.tolist()))
    colours = [(OP_COLOURS[KINDS[k]], label(KINDS[k])) for k in used] + [(CRITICAL_COLOUR, "critical path")]
    head, head_height = legend(16, 36, colours)
    left = 24 + 6.6 * max((len(name) for name in bars.names), default=0)
    top = 44 + head_height
    panel = Panel(
        left=left, top=top, width=WIDTH - left - 24, height=_ROW * max(1, len(bars.names)), x_stop=end_s / unit.size
    )
    parts = [*head, *x_axis(panel, ticks(panel.x_stop), f"time ({unit.name})")]
    for row, name in enumerate(bars.names):
        parts.append(text(panel.left - 8, panel.top + _ROW * row + 15, name, anchor="end"))
        if row and bars.owners[row] != bars.owners[row - 1]:
            parts.append(line(16, panel.top + _ROW * row, panel.right, panel.top + _ROW * row))
    path = critical_path(trace)
    parts += [*_bar_paths(bars, panel, unit.size), *_critical_path(path, trace, panel, every, unit.size)]
    title = f"{str(trace.origin).capitalize()} iteration: {trace.took}"
    if path.ops:
        parts.append(text(panel.left, panel.bottom + 32, f"critical path: {path.words()}", size=11))
    return picture(panel.bottom + 44, title, str(trace), parts)


def _critical_path(path: CriticalPath, trace: Trace, panel: Panel, every: Lanes, unit_s: float) -> Iterator[str]:
    for drawn in critical_line(path, trace, every, unit_s):
        ys = panel.top + _ROW * drawn["y"].astype(float) + _ROW / 2
        xs = panel.left + drawn["x"].astype(float) / (panel.x_stop or 1.0) * panel.width
        points = "L".join(f"{number(x)} {number(y)}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True))
        yield f'<path d="M{points}" fill="none" stroke="{CRITICAL_COLOUR}" stroke-width="1.5"/>'


def _bar_paths(bars: Lanes, panel: Panel, unit_s: float) -> Iterator[str]:
    """A stroked path per row and kind: ``m`` to the next bar, ``h`` along it, in tenths of a pixel."""
    scale = panel.width / (panel.x_stop * unit_s or 1.0) * 10
    starts = np.rint(panel.left * 10 + bars.start_s * scale).astype(np.int64)
    ends = np.rint(panel.left * 10 + (bars.start_s + bars.duration_s) * scale).astype(np.int64)
    gaps = np.where(ends - starts >= 60, 6, 0)  # keeps neighbours of one kind apart
    lengths = np.maximum(ends - starts - gaps, 8)
    for row in range(len(bars.names)):
        for position, kind in enumerate(KINDS):
            chosen = np.flatnonzero((bars.row == row) & (bars.kind == position))
            if not len(chosen):
                continue
            at, steps = 0, []
            for start, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
                steps.append(f"m{_tenths(start - at)} 0h{_tenths(length)}")
                at = start + length
            middle = panel.top + _ROW * row + _ROW / 2
            yield (
                f'<path d="M0 {number(middle)}{"".join(steps)}" fill="none" stroke="{OP_COLOURS[kind]}" '
                f'stroke-width="{_BAR}"/>'
            )


def _tenths(value: int) -> str:
    whole, rest = divmod(abs(value), 10)
    digits = f"{whole or ''}.{rest}" if rest else str(whole)
    return f"-{digits}" if value < 0 else digits


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_svg(trace: Trace) -> str:
    """A panel per device: stacked areas by tensor kind under the dashed budget; a peak beyond it is red."""
    devices = footprints(trace, most_points=_MOST_POINTS, most_values=_MOST_VALUES)
    time = time_unit(trace.makespan_s)
    size = byte_unit(max(max(d.peak_bytes, d.budget_bytes) for d in devices))
    used = [kind for kind in TensorKind if any(kind in device.kinds for device in devices)]
    parts, head_height = legend(16, 54, [(TENSOR_COLOURS[kind], label(kind)) for kind in used])
    parts.append(text(16, 42, INCLUDED, size=11))
    top = 80 + head_height
    for device in devices:
        ceiling = max(device.peak_bytes, device.budget_bytes) * 1.08 / size.size
        panel = Panel(
            left=80, top=top, width=WIDTH - 104, height=110, x_stop=trace.makespan_s / time.size, y_stop=ceiling or 1.0
        )
        last = device is devices[-1]
        marks = ticks(panel.x_stop)
        parts += x_axis(
            panel, marks if last else [(value, "") for value, _ in marks], f"time ({time.name})" if last else ""
        )
        parts += y_axis(panel, [(v, f"{t} {size.name}") for v, t in ticks(panel.y_stop, most=5)])
        parts += _areas(device, panel, time.size, size.size)
        parts += _budget(device.words(trace), device, panel, size.size)
        top = panel.bottom + 40
    return picture(top + 4, f"Memory, {trace.origin}", _memory_words(trace, devices), parts)


def _areas(device: Footprint, panel: Panel, unit_s: float, unit_bytes: float) -> Iterator[str]:
    """From the whole stack down to its lowest kind, each painted over the one before, down to the base line."""
    xs = np.rint((panel.left + device.times_s / unit_s / (panel.x_stop or 1.0) * panel.width) * 10).astype(np.int64)
    stacked = device.num_bytes.cumsum(axis=1) / unit_bytes
    ys = np.rint((panel.bottom - stacked / panel.y_stop * panel.height) * 10).astype(np.int64)
    for column in reversed(range(len(device.kinds))):
        path = _steps(xs.tolist(), ys[:, column].tolist(), round(panel.bottom * 10))
        yield f'<path d="{path}" fill="{TENSOR_COLOURS[device.kinds[column]]}"/>'


def _steps(xs: list[int], ys: list[int], base: int) -> str:
    """A step curve closed along ``base``; tenths of a pixel, relative, steps that change nothing left out."""
    x, y = xs[0], base
    path = [f"M{_tenths(x)} {_tenths(y)}"]
    for next_x, next_y in zip(xs, ys, strict=True):
        if next_y != y:
            path.append((f"h{_tenths(next_x - x)}" if next_x != x else "") + f"v{_tenths(next_y - y)}")
            x, y = next_x, next_y
    return "".join(path) + f"H{_tenths(xs[-1])}V{_tenths(base)}z"


def _budget(words: str, device: Footprint, panel: Panel, unit_bytes: float) -> Iterator[str]:
    colour = ALARM_COLOUR if device.over_budget else None
    level = panel.y(device.budget_bytes / unit_bytes)
    yield line(panel.left, level, panel.right, level, colour=colour or BUDGET_COLOUR, dashed=True)
    yield text(panel.left, panel.top - 6, words, bold=device.over_budget, colour=colour)


def _memory_words(trace: Trace, devices: Sequence[Footprint]) -> str:
    return f"Bytes alive over one iteration. {'; '.join(d.words(trace) for d in devices)}. Includes {INCLUDED}."


# -- swap volume ------------------------------------------------------------------------------------------------------


def swaps_svg(trace: Trace) -> str:
    """Bytes that each pack moves, by direction and tensor kind; beyond 40 packs the ones that move most."""
    volumes = volumes_of_packs(trace)
    title = f"Bytes moved by pack, {format_bytes(trace.swap_bytes)} swapped in all"
    shown = _largest_rows(volumes)
    if len(shown) < len(volumes.rows):
        title += f" (the {len(shown)} largest of {len(volumes.rows)} packs)"
    left, top, height = 110.0, 84.0, 24.0
    width = (WIDTH - left - 24) / max(1, len(volumes.columns))
    parts: list[str] = []
    for column, (way, kind) in enumerate(volumes.columns):
        centre = left + width * (column + 0.5)
        words = f"{label(kind)} {way}".split()
        for place, word in enumerate(words):
            parts.append(text(centre, top - 8 - 13 * (len(words) - 1 - place), word, anchor="middle", size=11))
    most = max(volumes.num_bytes.max(initial=0), 1)
    for place, row in enumerate(shown):
        y = top + height * place
        parts.append(text(left - 8, y + 16, volumes.rows[row], anchor="end"))
        for column, num_bytes in enumerate(volumes.num_bytes[row].tolist()):
            if num_bytes:
                parts += _cell(left + width * column, y, width, height, num_bytes, most)
    told = "; ".join(f"{volumes.rows[row]}: {format_bytes(volumes.num_bytes[row].sum())}" for row in shown)
    return picture(top + height * max(1, len(shown)) + 16, title, told or "nothing is moved", parts)


def _largest_rows(volumes: Volumes) -> list[int]:
    totals = volumes.num_bytes.sum(axis=1)
    return sorted(np.argsort(-totals, kind="stable")[:_MOST_ROWS].tolist())


def _cell(x: float, y: float, width: float, height: float, num_bytes: int, most: int) -> Iterator[str]:
    decades = log10(most / num_bytes)
    shade = max(0, len(SEQUENTIAL) - 1 - floor(decades * 1.5))
    yield rectangle(x + 1, y + 1, width - 2, height - 2, SEQUENTIAL[shade])
    ink = ink_on(SEQUENTIAL[shade])
    yield text(x + width / 2, y + 16, format_bytes(num_bytes), anchor="middle", size=11, colour=ink)


# -- links ------------------------------------------------------------------------------------------------------------


def links_svg(trace: Trace) -> str:
    """How full every link is over time, a row per link and direction."""
    load = link_load(trace, num_stretches=_STRETCHES)
    time = time_unit(trace.makespan_s)
    rates = load.capacities.tolist()
    names = [f"{hop_name(hop)}  {format_rate(rate)}" for hop, rate in zip(load.hops, rates, strict=True)]
    left = 24 + 6.6 * max(map(len, names), default=0)
    panel = Panel(
        left=left,
        top=44,
        width=WIDTH - left - 24,
        height=_ROW * max(1, len(names)),
        x_stop=trace.makespan_s / time.size or 1.0,
    )
    parts = x_axis(panel, ticks(panel.x_stop), f"time ({time.name})")
    shades = np.clip(np.ceil(load.shares * (len(SEQUENTIAL) - 1) - 1e-6), 0, len(SEQUENTIAL) - 1).astype(np.int64)
    for row, name in enumerate(names):
        y = panel.top + _ROW * row
        parts.append(text(panel.left - 8, y + 15, name, anchor="end"))
        edges = np.flatnonzero(np.diff(shades[row], prepend=-1, append=-1)).tolist()  # stretches of one shade
        parts += [
            rectangle(
                panel.left + panel.width * first / _STRETCHES,
                y + 3,
                panel.width * (stop - first) / _STRETCHES,
                _ROW - 5,
                SEQUENTIAL[shades[row][first]],
            )
            for first, stop in pairwise(edges)
        ]
    busy = "; ".join(
        f"{name}: {share:.0%} of what it could" for name, share in zip(names, load.shares.mean(1), strict=True)
    )
    return picture(panel.bottom + 44, "Link load over time", busy or "nothing is moved", parts)


# -- loss -------------------------------------------------------------------------------------------------------------


def loss_svg(losses: Sequence[float]) -> str:
    """Loss by step, the first step being 1."""
    finite = [loss for loss in losses if np.isfinite(loss)]
    if not finite:
        return picture(60, "Loss: no step yet", "no loss yet", [])
    low, high = min(finite), max(finite)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    panel = Panel(
        left=64,
        top=44,
        width=WIDTH - 88,
        height=180,
        x_stop=max(2, len(losses)),
        y_start=low - room,
        y_stop=high + room,
    )
    x_marks = [(value, f"{value:.0f}") for value, _ in ticks(panel.x_stop) if float(value).is_integer()]
    parts = [*x_axis(panel, x_marks, "step"), *y_axis(panel, _between(panel.y_start, panel.y_stop))]
    kept = thinned_losses(losses, _MOST_LOSSES)
    points = [(panel.x(i + 1), panel.y(losses[i])) for i in kept if np.isfinite(losses[i])]
    path = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    parts.append(f'<path d="M{path}" fill="none" stroke="{ACCENT_COLOUR}" stroke-width="2" stroke-linejoin="round"/>')
    title = f"Loss: {losses[0]:#.4g} → {losses[-1]:#.4g}"
    return picture(panel.bottom + 44, title, f"{title} over {len(losses)} steps", parts)


def _between(low: float, high: float) -> list[tuple[float, str]]:
    """Round values from ``low`` to ``high``, with as many decimals as tell them apart."""
    marks = ticks(high - low, most=5)
    step = marks[1][0] if len(marks) > 1 else high - low
    decimals = max(0, -floor(log10(step) + 1e-9))
    first = -floor(-low / step)
    return [(i * step, f"{i * step:.{decimals}f}") for i in range(first, floor(high / step + 1e-9) + 1)]
