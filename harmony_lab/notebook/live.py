"""RunPanel: a run under way, with its loss, its pace beside the predicted one, and Pause and Stop."""

import statistics
from html import escape
from typing import Any

import ipywidgets

from harmony_lab.figures.loss import loss_spec
from harmony_lab.notebook.plot import Plot
from harmony_lab.notebook.sensors import readings, readings_text
from harmony_lab.notebook.text import Tile, error_html, note_html, stylesheet_html, tiles_html
from harmony_lab.notebook.weak import weakly
from harmony_lab.notebook.worker import Worker
from harmony_lab.planner.check import peak_bytes
from harmony_lab.run import Run, RunStatus
from harmony_lab.units import format_bytes, format_seconds

__all__ = ["RunPanel", "run_tiles"]

_REST_S = 0.2  # between two paintings: a page need not follow thousand steps a second
_RECENT = 20  # steps whose pace tells how long the others take
_GROWTH = 1.02  # the curve is sent again when it has grown by this much: long runs stay cheap
_WORDS = {
    RunStatus.RUNNING: "training",
    RunStatus.PAUSED: "paused",
    RunStatus.STOPPED: "stopped",
    RunStatus.FINISHED: "finished",
    RunStatus.FAILED: "failed",
}


def run_tiles(run: Run) -> list[Tile]:
    """Loss, step time and throughput, measured, beside what was predicted."""
    losses, step_s, trace = run.losses, run.step_s, run.trace
    if not losses or not step_s:
        return [Tile("predicted step", _predicted_step(run))]
    median_s = statistics.median(step_s)
    predicted = run.predicted
    shown = [
        Tile("loss", f"{losses[-1]:.4f}", f"from {losses[0]:.4f}"),
        Tile("step, median", format_seconds(median_s), f"predicted {_predicted_step(run)}"),
        Tile("throughput", _pace(run, median_s), f"predicted {_pace(run, run.accumulate * predicted.makespan_s)}"),
    ]
    if trace is not None:
        what = "the last step" if run.accumulate == 1 else "a minibatch"
        shown += [
            Tile(
                f"peak of {what}",
                format_bytes(max(trace.peak_bytes)),
                f"predicted at most {format_bytes(max(peak_bytes(predicted.program)))}",
            ),
            Tile(
                f"swapped in {what}",
                format_bytes(trace.swap_bytes),
                f"predicted {format_bytes(predicted.swap_bytes)}",
            ),
        ]
    return shown


def _pace(run: Run, step_s: float) -> str:
    return f"{run.accumulate * run.plan.minibatch_size / step_s:.3g} samples/s"


def _predicted_step(run: Run) -> str:
    """One update may be made of several minibatches, one iteration each."""
    text = format_seconds(run.accumulate * run.predicted.makespan_s)
    return text if run.accumulate == 1 else f"{text} for {run.accumulate} minibatches"


class RunPanel:
    """A view of one run; ``view`` is the widget.  Its threads end when the run does or when it is closed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._drawn_steps = 0
        self._painter = Worker("harmony-lab run panel", self._failed, pause_s=_REST_S)
        self._hand = Worker("harmony-lab run control", self._failed)
        self._stopper = Worker("harmony-lab run stop", self._failed)  # its own: a pause may be waited for
        self._asked = ""  # what the run was asked for and has not done yet, in words
        self.headline = ipywidgets.HTML()
        self.figures = ipywidgets.HTML()
        self.trouble = ipywidgets.HTML()
        self.curve = Plot(loss_spec(()))
        self.pause = ipywidgets.Button(description="Pause", icon="pause", tooltip="hold still after the current step")
        self.stop = ipywidgets.Button(
            description="Stop",
            icon="stop",
            button_style="warning",
            tooltip="stop at once, or after the current step if that has begun to update; weights are kept",
        )
        self.pause.on_click(weakly(self._pause))
        self.stop.on_click(weakly(self._stop))
        self.view = ipywidgets.VBox(
            [
                ipywidgets.HTML(stylesheet_html()),
                self.headline,
                ipywidgets.HBox([self.pause, self.stop]),
                self.trouble,
                self.figures,
                self.curve,
            ]
        )
        self.view.add_class("harmony-lab")
        self._unsubscribe = run.subscribe(self._event)
        self._paint()
        if not run.active:  # it may have ended before the subscription
            self._unsubscribe()

    def close(self) -> None:
        """Follow the run no longer; the last state stays visible."""
        self._unsubscribe()
        self._painter.close()
        self._hand.close()
        self._stopper.close()

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything asked for is done and painted; False when that took longer."""
        return all(worker.wait_idle(timeout_s) for worker in (self._hand, self._stopper, self._painter))

    def _event(self, _: str) -> None:
        self._painter.submit("paint", self._paint)

    def _paint(self) -> None:
        run = self.run
        active, losses = run.active, run.losses
        asked = self._asked if active and run.status is not RunStatus.PAUSED else ""
        self.headline.value = _headline(run, len(losses), asked)
        sensors = readings_text(readings(run.predicted.machine)) if active else ""
        self.figures.value = tiles_html(run_tiles(run), sensors, None)
        if losses and (not active or len(losses) >= self._drawn_steps * _GROWTH):
            self.curve.show(loss_spec(losses))
            self._drawn_steps = len(losses)
        self.trouble.value = _trouble(run)
        self.pause.description, self.pause.icon = (
            ("Resume", "play") if run.status is RunStatus.PAUSED else ("Pause", "pause")
        )
        if not active:
            self.pause.disabled = self.stop.disabled = True
            self.stop.button_style = ""  # nothing to warn of any more
            self._unsubscribe()

    def _pause(self, _: Any) -> None:
        if self.run.status is RunStatus.PAUSED:
            self.run.resume()
        else:
            self._ask("pausing after the current step …")
            self._hand.submit("pause", self._hold)

    def _hold(self) -> None:
        self.run.pause()
        if not self.stop.disabled:
            self._asked = ""
            self.pause.disabled = not self.run.active
        self._painter.submit("paint", self._paint)

    def _stop(self, _: Any) -> None:
        self.stop.disabled = True
        self._ask("stopping …")
        self._stopper.submit("stop", self.run.stop)

    def _ask(self, words: str) -> None:
        self.pause.disabled = True
        self._asked = words
        self.headline.value = _headline(self.run, len(self.run.losses), words)

    def _failed(self, error: Exception) -> None:
        self.trouble.value = error_html(str(error))


def _headline(run: Run, done: int, asked: str) -> str:
    share = 100 * done / run.steps
    return (
        f"<b>{asked or _WORDS[run.status]}</b>: step {done} of {run.steps}{_left(run, done)}"
        f'<div class="harmony-bar" role="progressbar" aria-valuenow="{done}" aria-valuemax="{run.steps}">'
        f'<div style="width: {share:.1f}%"></div></div>'
    )


def _left(run: Run, done: int) -> str:
    """How long the steps to come take, at the pace of the last ones."""
    recent = run.step_s[-_RECENT:]
    if not recent or run.status is not RunStatus.RUNNING:
        return ""
    return f", about {format_seconds((run.steps - done) * statistics.median(recent))} left"


def _trouble(run: Run) -> str:
    notes = "".join(note_html(note) for note in run.notes)
    if run.error is None:
        return notes
    where = "".join(f"<pre>{escape(note)}</pre>" for note in getattr(run.error, "__notes__", ()))
    details = f"<details><summary>where it happened</summary>{where}</details>" if where else ""
    return error_html(str(run.error)) + details + notes
