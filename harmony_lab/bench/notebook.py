"""Benchmark of the dashboard: bytes to open it and per knob, milliseconds from a knob to new figures, bytes saved."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harmony_lab.figures.memory import memory_spec
from harmony_lab.figures.spec import spec_json
from harmony_lab.figures.timeline import timeline_spec
from harmony_lab.lab import Lab
from harmony_lab.trace import MemoryTimeline, Trace

__all__ = [
    "PATIENCE_S",
    "bench_notebook",
    "gpt2_xl_lab",
    "recording",
    "repeated",
    "saved_bytes",
    "to_json",
    "widgets_state",
]

_CONTEXT = 1024
_MINIBATCH = 64
_MACHINE = "4x1080ti"
_TABS = ("Links", "Swaps", "Candidates", "Compare")  # drawn anew with every plan, beside the one open at first
_SPANS = 100_000
_TRIES = 3
PATIENCE_S = 300.0
_MODEL_LAYERS, _WIDTH, _HEADS = 48, 1600, 25


def gpt2_xl_lab(num_layers: int = _MODEL_LAYERS) -> Lab:
    """A GPT-2 XL without data, on four GTX 1080 Ti, minibatches of 64; fewer layers for a quick look."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=num_layers, n_embd=_WIDTH, n_head=_HEADS, n_positions=_CONTEXT, use_cache=False)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    ids = torch.zeros(2, _CONTEXT, dtype=torch.long, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"input_ids": ids, "labels": ids}
    return Lab(model, batch, optimizer, minibatch_size=_MINIBATCH, machine=_MACHINE)


def bench_notebook(
    lab: Lab,
    *,
    num_turns: int = 40,
    num_turns_per_tab: int = 6,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> dict[str, Any]:
    """The figures of one dashboard.

    ``open_bytes``: all that is sent to a page that shows it, plotly.js included.  ``knob_ms_*``: from the change of a
    control to the last message with a figure; the medians are of ``num_turns`` changes beside timeline and memory, the
    worst also of ``num_turns_per_tab`` beside other tabs, whose own are ``knob_ms_by_tab``.
    ``knob_bytes_median``: all that a change sends, the effects of every knob included.  ``saved_bytes``: of the
    notebook, widgets' state included.  ``draw_100k_s``: timeline and memory of 100,000 spans, until they can be sent.
    """
    from harmony_lab.notebook.dashboard import Dashboard
    from harmony_lab.notebook.plot import packed_plotly

    lab.prepare()
    total = num_turns + 4
    progress(1, total, "planned")
    others = set(widgets_state())
    with recording() as sent:
        dashboard = Dashboard(lab, namespace=dict)
        dashboard.settle_effects(PATIENCE_S)
        open_bytes = sent.num_bytes + len(packed_plotly())
        turns = []
        for number, (name, value) in enumerate(_turns(dashboard.knobs.controls, num_turns)):
            turns.append(_turn(dashboard, sent, name, value))
            progress(2 + number, total, name)
        by_tab = {tab: _turns_in(tab, dashboard, sent, num_turns_per_tab) for tab in _TABS}
        progress(num_turns + 2, total, "tabs")
        num_saved = saved_bytes([(dashboard.view, lab)], others)
        dashboard.close()
    progress(num_turns + 3, total, "100,000 spans")
    assert lab.predicted is not None
    milliseconds = [seconds * 1e3 for seconds, _ in turns]
    found = {
        "open_bytes": open_bytes,
        "knob_bytes_median": round(statistics.median(num_bytes for _, num_bytes in turns)),
        "knob_ms_median": round(statistics.median(milliseconds), 1),
        "knob_ms_worst": round(max(*milliseconds, *by_tab.values()), 1),
        "knob_ms_by_tab": {tab: round(worst, 1) for tab, worst in by_tab.items()},
        "saved_bytes": num_saved,
        "draw_100k_s": round(_draw_seconds(lab.predicted), 3),
        "num_ops": len(lab.predicted.program.ops),
    }
    progress(total, total, "done")
    return found


def to_json(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1))


# -- messages -----------------------------------------------------------------------------------------------------


class _Sent:
    """Bytes that went to the page, and when the last figure did."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.last_figure_s = 0.0

    def add(self, data: Any, buffers: Any) -> None:
        sizes = [memoryview(buffer).nbytes for buffer in buffers or ()]
        self.num_bytes += len(json.dumps(data, default=str)) + sum(sizes)
        if (data or {}).get("content") == {"figure": True}:
            self.last_figure_s = time.perf_counter()


@contextmanager
def recording() -> Iterator[_Sent]:
    """Take the place of the kernel's connection: widgets made meanwhile tell what they would have sent."""
    import comm
    from comm.base_comm import BaseComm

    sent = _Sent()

    class Recorder(BaseComm):
        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            sent.add(data, buffers)

    before = comm.create_comm
    comm.create_comm = lambda *arguments, **keys: Recorder(*arguments, **keys)
    try:
        yield sent
    finally:
        comm.create_comm = before


# -- knobs --------------------------------------------------------------------------------------------------------


def _turns(controls: dict[str, Any], count: int) -> Iterator[tuple[str, Any]]:
    """Changes of every kind of knob, one after the other, back and forth."""
    names = (
        "num_backward_packs",
        "backward_microbatch_size",
        "prefetch",
        "num_forward_packs",
        "peer_transfers",
        "mode",
    )
    for number in range(count):
        name = names[number % len(names)]
        control = controls[name]
        if name in ("num_backward_packs", "num_forward_packs"):
            yield name, control.value + (1 if number // len(names) % 2 == 0 and control.value < control.max else -1)
        elif name == "prefetch":
            yield name, (control.value + 1) % 3
        elif name == "peer_transfers":
            yield name, not control.value
        else:
            values = [value[1] if isinstance(value, tuple) else value for value in control.options]
            yield name, values[(values.index(control.value) + 1) % len(values)]


def _turn(dashboard: Any, sent: _Sent, name: str, value: Any) -> tuple[float, int]:
    """(seconds until the figures were sent, bytes sent in all) for one change, as the page makes it."""
    before, begin = sent.num_bytes, time.perf_counter()
    dashboard.knobs.controls[name].value = value
    assert dashboard.settle(PATIENCE_S), f"{name}={value} took too long"
    settled_s = time.perf_counter()
    seconds = (sent.last_figure_s if sent.last_figure_s > begin else settled_s) - begin  # equal figures are not sent
    dashboard.settle_effects(PATIENCE_S)
    return seconds, sent.num_bytes - before


def _turns_in(tab: str, dashboard: Any, sent: _Sent, count: int) -> float:
    """The most milliseconds that one of so many changes takes while that tab is open."""
    view = dashboard.pictures.view
    view.selected_index = view.titles.index(tab)
    assert dashboard.settle(PATIENCE_S), f"{tab} took too long"
    turns = [_turn(dashboard, sent, name, value) for name, value in _turns(dashboard.knobs.controls, count)]
    return max(seconds for seconds, _ in turns) * 1e3


def saved_bytes(shown: Sequence[tuple[Any, Any]], others: set[str]) -> int:
    """Of a notebook that shows these: (view, what it is of); widgets, their state but of ``others``, static forms."""
    outputs = []
    for view, value in shown:
        outputs += [view._repr_mimebundle_(), {"text/html": value._repr_html_(), "text/plain": repr(value)}]
    state = {name: value for name, value in widgets_state().items() if name not in others}
    return len(json.dumps({"outputs": outputs, "metadata": state}, default=str))


def widgets_state() -> dict[str, Any]:
    """Of all widgets that are open, by name."""
    from ipywidgets import Widget

    state: dict[str, Any] = Widget.get_manager_state()["state"]
    return state


# -- many spans ---------------------------------------------------------------------------------------------------


def _draw_seconds(trace: Trace) -> float:
    many = repeated(trace, -(-_SPANS // len(trace.program.ops)))
    tries = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        spec_json(timeline_spec(many))
        spec_json(memory_spec(many))
        tries.append(time.perf_counter() - begin)
    return min(tries)  # other work on the machine only adds


def repeated(trace: Trace, times: int) -> Trace:
    """That many iterations one after the other, as one trace."""
    program, length_s = trace.program, trace.makespan_s
    count = len(program.ops)
    ops = tuple(
        op._replace(after=tuple(other + count * turn for other in op.after))
        for turn in range(times)
        for op in program.ops
    )
    shift = np.repeat(np.arange(times) * length_s, count)
    memory = []
    for timeline in trace.memory:
        stretch = np.repeat(np.arange(times) * length_s, len(timeline.times_s))
        memory.append(
            MemoryTimeline(
                times_s=np.tile(timeline.times_s, times) + stretch,
                kinds=timeline.kinds,
                num_bytes=np.tile(timeline.num_bytes, (times, 1)),
            )
        )
    return replace(
        trace,
        program=replace(program, ops=ops),
        start_s=np.tile(trace.start_s, times) + shift,
        end_s=np.tile(trace.end_s, times) + shift,
        memory=tuple(memory),
        moved_bytes={key: num_bytes * times for key, num_bytes in trace.moved_bytes.items()},
    )
