"""Tables: rankings, profiles and comparisons as static HTML, every number with its unit."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from harmony_lab.costs import Profile
from harmony_lab.trace import Trace
from harmony_lab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

__all__ = ["candidates_html", "facts_html", "profile_html", "table_html", "traces_html"]


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, escaped here."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def facts_html(facts: Mapping[str, str]) -> str:
    """Names and values, two columns."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def candidates_html(frame: "pandas.DataFrame", limit: int = 10) -> str:
    """The best ``limit`` rows of a ranking (``SearchResult.to_frame``); of those that read the same the first."""
    head = (
        "rank",
        "mode",
        "forward",
        "backward",
        "iteration",
        "samples/s",
        "peak memory, at most",
        "swapped",
        "peer",
        "idle",
    )
    unlike: dict[tuple[str, ...], list[str]] = {}
    for row in frame.to_dict("records"):
        texts = _candidate(row)
        unlike.setdefault(tuple(texts[1:]), texts)
        if len(unlike) == limit:
            break
    table = table_html(head, unlike.values())
    left = len(frame) - len(unlike)
    return table + (f"<p>and {left} more</p>" if left > 0 else "")


def _candidate(row: Mapping[Any, Any]) -> list[str]:
    return [
        str(row["rank"]),
        str(row["mode"]),
        _packs(row["num_forward_packs"], row["forward_microbatch_size"]),
        _packs(row["num_backward_packs"], row["backward_microbatch_size"]),
        format_seconds(row["step_s"]),
        f"{row['samples_per_s']:.3g}",
        format_bytes(row["peak_bytes"]),
        format_bytes(row["swap_bytes"]),
        format_bytes(row["peer_bytes"]),
        f"{row['bubble_fraction']:.0%}",
    ]


def _packs(count: int, microbatch_size: int) -> str:
    """``"3 packs × 8"``; without forward packs, the one backward pack runs every forward itself."""
    return f"{count} pack{'' if count == 1 else 's'} × {microbatch_size}" if count else "in backward"


def profile_html(profile: Profile, microbatch_size: int | None = None) -> str:
    """A row per layer, for microbatches of that size (default: the largest profiled).

    Raises ``OutOfRangeError`` beyond the sizes profiled.
    """
    size = profile.largest_microbatch if microbatch_size is None else microbatch_size
    rows = []
    for index, layer in enumerate(profile.layers):
        cost = profile.cost(index, size)
        rows.append(
            (
                str(index),
                layer.name,
                format_bytes(layer.parameter_bytes),
                format_bytes(layer.optimizer_state_bytes),
                format_seconds(cost.forward_s),
                format_seconds(cost.backward_s),
                format_bytes(cost.saved_bytes),
                format_seconds(layer.update_s),
            )
        )
    head = ("layer", "name", "parameters", "optimizer state", "forward", "backward", "saved activations", "host update")
    return f"<p>Microbatches of {size}; {escape(profile.device)}.</p>" + table_html(head, rows)


def traces_html(traces: Sequence[Trace]) -> str:
    """Iterations side by side, a column each: time, traffic, idle share and every device's peak against its budget."""
    rows = [
        ("iteration", *(format_seconds(trace.makespan_s) for trace in traces)),
        ("swapped between devices and host", *(format_bytes(trace.swap_bytes) for trace in traces)),
        ("moved between devices", *(format_bytes(trace.peer_bytes) for trace in traces)),
        ("devices not computing", *(f"{trace.bubble_fraction:.0%}" for trace in traces)),
    ]
    for device, budget in enumerate(traces[0].program.budgets):
        name = traces[0].machine.devices[device].name
        peaks = (format_bytes(trace.peak_bytes[device]) for trace in traces)
        rows.append((f"peak memory of {name} in this iteration, budget {format_bytes(budget)}", *peaks))
    return table_html(("", *(str(trace.origin) for trace in traces)), rows)
