"""Lab: one model on one machine, from profile to run; the same for notebook, script and command line."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmony_lab.compiled import is_ready, say_so, wait_for_compiling
from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.forecast import Forecast
from harmony_lab.lab_arguments import check_kinds, check_optimizer, require_folder
from harmony_lab.lab_contents import fragment_html, write_report
from harmony_lab.lab_costs import costs_on, forecast_on, why_only_planned
from harmony_lab.layers import LayerSequence
from harmony_lab.listeners import Listeners
from harmony_lab.machine import Machine
from harmony_lab.ownership import take_over
from harmony_lab.plan import Mode, Plan
from harmony_lab.planner.search import SearchResult, Switches
from harmony_lab.planner.searches import Searches
from harmony_lab.planner.warm import warm_up
from harmony_lab.precision import Precision
from harmony_lab.preview import Preview, preview, repacked
from harmony_lab.profiler.compiling import compile_layers
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.steps import ProgressCallback
from harmony_lab.progress import Progress
from harmony_lab.run import Run, StepRecord
from harmony_lab.trace import Trace
from harmony_lab.trainer import Trainer
from harmony_lab.training_plan import deferred

if TYPE_CHECKING:
    import torch

    from harmony_lab.certificate import Certificate

__all__ = ["Lab", "Preview", "Progress"]


class Lab:
    """One model on one machine: ``measure``, ``search``, ``choose``, ``launch``; no widgets.

    ``model``, ``example_batch``, ``loss_fn``, ``layers``, ``cut``, ``loss_reduction``: as in ``decompose``.
    ``optimizer``: the user's own torch.optim optimizer over the model's parameters; planning works without one,
    training does not.  ``machine``: by default ``Machine.detect()``; also a preset's name, such as ``"4x1080ti"``.

    A machine that is not at hand can be planned for: costs are then estimated (``harmony_lab.estimate``) and nothing
    can be launched; ``only_planned`` says so.  The same goes for a model on the meta device, which takes no memory.

    ``precision``: what to compute in, ``"fp32"`` or ``"bf16"`` (see ``harmony_lab.precision``).  It may be changed:
    choosing a plan of another precision profiles in that one too, the first time, and is what ``measure`` and
    ``search`` go on with.  ``searches`` remembers what was best, for the next search and for what-if machines.

    ``seed`` fixes random masks, others in every step.  Steps are counted on from run to run (``steps_trained``), so a
    run that follows another draws the masks that one longer run would have drawn.  ``compile``: run the layers as
    machine code (see ``compile_layers``).

    Safe to use from any thread.  ``subscribe`` tells of ``"profile"``, ``"result"``, ``"plan"``, ``"run"`` (a run
    began or changed its status), ``"progress"`` and ``"closed"``, on the thread where it happens.  A new Lab over the
    same model closes the older one.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        example_batch: Any,
        optimizer: "torch.optim.Optimizer | None" = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        minibatch_size: int,
        machine: Machine | str | None = None,
        precision: Precision | str = Precision.FP32,
        layers: Sequence[Any] | None = None,
        cut: Sequence[str] | None = None,
        loss_reduction: str | None = None,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        if not isinstance(minibatch_size, int) or minibatch_size < 1:
            raise HarmonyError(f"minibatch_size must be a whole number of at least 1, got {minibatch_size!r}")
        check_kinds(optimizer, machine, loss_fn)
        self.optimizer = optimizer
        self.minibatch_size = minibatch_size
        self.machine = Machine.preset(machine) if isinstance(machine, str) else machine or Machine.detect()
        self.seed = seed
        self._precision = Precision.of(precision)
        self._state = threading.RLock()  # held for moments: fields below
        self._work = threading.RLock()  # held for long: one measurement, search or launch at a time
        self._listeners = Listeners()
        self._profiles: dict[Precision, Profile] = {}
        self.searches = Searches()
        self._result: SearchResult | None = None
        self._preview: Preview | None = None
        self._run: Run | None = None
        self._progress: Progress | None = None
        self._closed = False
        self._earlier_steps = 0  # of the runs before the last one
        warm_up()
        decomposed = decompose(model, example_batch, loss_fn, layers=layers, cut=cut, loss_reduction=loss_reduction)
        check_optimizer(optimizer, decomposed)
        self.layers: LayerSequence = compile_layers(decomposed) if compile else decomposed
        take_over(model, self)  # last, so that the older Lab works on where this one cannot be made

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        """Of the chosen plan; before, what was asked for."""
        return self._precision

    @property
    def profile(self) -> Profile | None:
        """In that precision."""
        return self._profiles.get(self._precision)

    def has_profile(self, precision: Precision | str) -> bool:
        """Whether layers have been profiled in that precision: choosing a plan of another one takes as long."""
        return Precision.of(precision) in self._profiles

    @property
    def result(self) -> SearchResult | None:
        """The last search's ranking."""
        return self._result

    @property
    def plan(self) -> Plan | None:
        """The chosen plan: the best one after a search, until ``choose`` takes another."""
        preview = self._preview
        return None if preview is None else preview.plan

    @property
    def predicted(self) -> Trace | None:
        """The chosen plan's simulated iteration."""
        preview = self._preview
        return None if preview is None else preview.trace

    @property
    def chosen(self) -> Preview | None:
        """The chosen plan with its program and simulated iteration."""
        return self._preview

    @property
    def run(self) -> Run | None:
        """The last run, under way or over."""
        return self._run

    @property
    def steps_trained(self) -> int:
        """Steps that the runs of this Lab have trained by now."""
        with self._state:
            return self._earlier_steps + (0 if self._run is None else len(self._run.losses))

    @property
    def only_planned(self) -> str:
        """Why this Lab estimates costs and cannot train, in a sentence; empty where it measures and trains."""
        return why_only_planned(self.layers, self.machine)

    @property
    def progress(self) -> Progress | None:
        """How far the part under way is; None between parts."""
        return self._progress

    @property
    def closed(self) -> bool:
        return self._closed

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call back with each event's name; returns what ends the subscription."""
        return self._listeners.subscribe(callback)

    # -- from profile to plan -------------------------------------------------------------------------------------

    def measure(self, progress: ProgressCallback | None = None, *, cache: bool = True) -> Profile:
        """Profile every kind of layer on the machine's devices.  Forgets profiles and results from before.

        ``cache=False``: measure also what was measured before.  A machine that is not at hand is estimated.
        """
        with self._work:
            measured = self._measured(self._precision, progress, cache=cache)
            with self._state:
                self._profiles, self._result, self._preview = {self._precision: measured}, None, None
        self._listeners.notify("profile")
        return measured

    def _measured(
        self, precision: Precision, progress: ProgressCallback | None = None, *, cache: bool = True
    ) -> Profile:
        self._must_be_free("measure")
        try:
            return costs_on(
                self.layers,
                self.machine,
                self.optimizer,
                precision=precision,
                minibatch_size=self.minibatch_size,
                cache=cache,
                progress=self._reporter("profile", progress),
            )
        finally:
            self._progress = None

    def _costs_in(self, precision: Precision, progress: ProgressCallback | None = None) -> Profile:
        """The profile in that precision, measured where there is none."""
        found = self._profiles.get(precision)
        if found is not None:
            return found
        with self._work:
            found = self._profiles.get(precision) or self._measured(precision, progress)
            with self._state:
                self._profiles = {**self._profiles, precision: found}
        if precision is self._precision:
            self._listeners.notify("profile")
        return found

    def search(
        self,
        progress: ProgressCallback | None = None,
        *,
        modes: Sequence[Mode | str] = tuple(Mode),
        precisions: Sequence[Precision | str] = (),
        max_grad_norm: float | None = None,
    ) -> SearchResult:
        """Rank the plans that fit and choose the best; profiles first where that was not done yet.

        ``precisions``: to rank plans of together, by default the Lab's alone.  ``max_grad_norm``: as ``launch`` will
        have it; plans are then ranked by what they take where updates wait for the norm of all gradients.

        Raises ``PlanDoesNotFitError`` when nothing fits, naming what is missing.
        """
        with self._work:
            self._must_be_open("search")
            wanted = [Precision.of(precision) for precision in precisions] or [self._precision]
            measured = [self._costs_in(precision, progress) for precision in dict.fromkeys(wanted)]
            report = self._reporter("search", progress)
            if not is_ready():
                report(0, 1, "the planner is being compiled, once; a minute or more")
            wait_for_compiling(say_so if progress is None and not self._listeners else None)
            try:
                result = self.searches.search(
                    measured,
                    self.machine,
                    self.minibatch_size,
                    modes=tuple(Mode(mode) for mode in modes),
                    switches=Switches(deferred_updates=max_grad_norm is not None),
                    progress=report,
                )
            finally:
                self._progress = None
            with self._state:
                self._result = result
            self._listeners.notify("result")
            self.choose(result.best)
        return result

    def prepare(self, progress: ProgressCallback | None = None) -> "Lab":
        """Do whatever of measuring, searching and choosing was not done yet."""
        with self._work:
            if self._result is None or self._preview is None:
                self.search(progress)
        return self

    def preview(self, plan: Plan | str) -> Preview:
        """Lower and simulate a plan or its text, also one that does not fit; nothing is chosen."""
        self._must_be_open("preview")
        plan = Plan.of(plan)
        return preview(plan, self._costs_in(plan.precision), self.machine)

    def choose(self, plan: Plan | str | int) -> Preview:
        """Take that plan (or its text), or that rank of the last search (0 is the best), for the next launch.

        A plan of another precision than the last is profiled for first, unless that was done before.

        A plan that does not fit can be looked at; ``launch`` refuses it.
        """
        with self._work:  # so that no other profile arrives between
            preview = self.preview(self._candidate(plan) if isinstance(plan, int) else plan)
            with self._state:
                switched = self._precision is not preview.plan.precision
                self._preview, self._precision = preview, preview.plan.precision
        if switched:
            self._listeners.notify("profile")
        self._listeners.notify("plan")
        return preview

    def _candidate(self, rank: int) -> Plan:
        if self._result is None:
            raise HarmonyError(f"there is no ranking to take rank {rank} from: call search() first")
        candidates = self._result.candidates
        if not 0 <= rank < len(candidates):
            raise HarmonyError(
                f"the ranking has {len(candidates)} plans, 0 to {len(candidates) - 1}; rank {rank} was asked for"
            )
        return candidates[rank].plan

    def with_packs(
        self,
        *,
        num_forward_packs: int | None = None,
        num_backward_packs: int | None = None,
        plan: Plan | None = None,
        **knobs: Any,
    ) -> Plan:
        """``plan``, by default the chosen one, with other numbers of packs and knobs; see ``preview.repacked``."""
        base = plan or self.plan or self.prepare().plan
        assert base is not None
        return repacked(
            base,
            self._costs_in(base.precision),
            num_forward_packs=num_forward_packs,
            num_backward_packs=num_backward_packs,
            **knobs,
        )

    # -- training -------------------------------------------------------------------------------------------------

    def launch(
        self,
        data: Iterable[Any],
        steps: int,
        *,
        record_every: int = 1,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        stop_on_nan: bool = False,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Run:
        """Train with the chosen plan on a thread of its own; returns at once.

        ``data``: batches, such as a DataLoader; started over when used up.  ``record_every``: steps between two
        recorded traces.  ``accumulate``: minibatches per step.  ``max_grad_norm``, ``stop_on_nan``: see ``Trainer``.
        ``on_step``: called after every step, for logging.

        Where gradients are clipped, updates are made beside the next step's forward, if nobody looks at the weights
        between two steps: with ``on_step`` or several minibatches per step they come at the end of each.  ``data`` must
        not look at them either.

        Raises ``HarmonyError`` while another run is under way, ``PlanDoesNotFitError`` and ``HostMemoryError`` where
        the devices' or the host's memory does not suffice.
        """
        with self._work:
            self._must_be_free("launch")
            first_step = self.steps_trained
            trainer = self._trainer(
                accumulate=accumulate,
                max_grad_norm=max_grad_norm,
                overlap_updates=accumulate == 1 and on_step is None,
                stop_on_nan=stop_on_nan,
            )
            try:
                if trainer.plan != self.plan:
                    self.choose(trainer.plan)  # so that what is measured can be set beside what was predicted
                run = Run(
                    trainer,
                    trainer.plan,
                    data,
                    steps,
                    num_samples=lambda batch: self.layers.flatten_batch(batch)[1]["batch"],
                    record_every=record_every,
                    accumulate=accumulate,
                    on_step=on_step,
                )
            except BaseException:
                trainer.close()
                raise
            run.subscribe(self._on_run_event)
            with self._state:
                if self._closed:
                    trainer.close()
                self._must_be_open("launch")
                self._run, self._earlier_steps = run, first_step
                run.start()
        self._listeners.notify("run")
        return run

    def verify(
        self, batches: Sequence[Any], *, tolerance: float | None = None, shortened: bool | None = None
    ) -> "Certificate":
        """Train copies a step on each batch, with the chosen plan and in plain PyTorch: see ``Trainer.verify``."""
        with self._work:
            self._must_be_free("verify")
            with self._trainer() as trainer:
                return trainer.verify(batches, tolerance=tolerance, shortened=shortened)

    def evaluate(self, batch: Any) -> float:
        """The loss of a minibatch in eval mode, under the chosen plan: see ``Trainer.evaluate``."""
        with self._work:
            self._must_be_free("evaluate")
            with self._trainer() as trainer:
                return trainer.evaluate(batch)

    def forecast(self, *, accumulate: int = 1, max_grad_norm: float | None = None) -> Forecast:
        """What training under the chosen plan takes of the devices' and the host's memory; arguments as ``launch``."""
        with self._work:
            self._must_be_open("forecast")
            optimizer, plan, costs = self._to_train(max_grad_norm, overlap=accumulate == 1)
            return forecast_on(self.machine, plan.trace, self.layers, optimizer, costs, accumulate=accumulate)

    def _trainer(self, **options: Any) -> Trainer:
        if self.only_planned:
            raise HarmonyError(f"this Lab cannot train. {self.only_planned} To train: Machine.detect() or emulated()")
        optimizer, chosen, measured = self._to_train()
        plan = chosen.plan  # the trainer puts updates off itself where it must, and says so
        if not options.get("overlap_updates"):
            plan = plan.with_(overlapped_update=False)
        return Trainer(
            self.layers,
            optimizer,
            plan,
            self.machine,
            profile=measured,
            seed=self.seed,
            first_step=self.steps_trained,
            **options,
        )

    def _to_train(
        self, max_grad_norm: float | None = None, *, overlap: bool = False
    ) -> "tuple[torch.optim.Optimizer, Preview, Profile]":
        """What training needs, with updates that wait where gradients are clipped."""
        if self.optimizer is None:
            raise HarmonyError(
                "this Lab has no optimizer, so it can plan but not train: "
                "give one, such as Lab(model, batch, torch.optim.AdamW(model.parameters()), ...)"
            )
        if self._preview is None:
            self.prepare()
        chosen = self._preview
        assert chosen is not None
        measured = self._costs_in(chosen.plan.precision)
        if max_grad_norm is not None:
            chosen = self.preview(deferred(chosen.plan, max_grad_norm, overlap))
        return self.optimizer, chosen, measured

    def _on_run_event(self, event: str) -> None:
        if event == "status":
            self._listeners.notify("run")

    def close(self) -> None:
        """Stop a run and take no more work.  The model stays the user's, with its weights."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            run = self._run
        if run is not None:
            run.stop()
        self._listeners.notify("closed")

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _must_be_open(self, what: str) -> None:
        if self._closed:
            raise HarmonyError(f"cannot {what}: this Lab is closed, by close() or by a newer Lab over the same model")

    def _must_be_free(self, what: str) -> None:
        self._must_be_open(what)
        if self._run is not None and self._run.active:
            raise HarmonyError(
                f"cannot {what} while a run is under way ({self._run}): call run.stop() or run.wait() first"
            )

    def _reporter(self, stage: str, callback: ProgressCallback | None) -> ProgressCallback:
        def report(done: int, total: int, text: str) -> None:
            self._progress = Progress(stage=stage, done=done, total=total, text=text)
            self._listeners.notify("progress")
            if callback is not None:
                callback(done, total, text)

        return report

    # -- on screen ------------------------------------------------------------------------------------------------

    def report(self, path: str | Path) -> Path:
        """Write one HTML page with the ranking, timelines, memory and losses; returns its path."""
        require_folder(Path(path), "report")
        return write_report(self, Path(path))

    def __repr__(self) -> str:
        stage = "closed" if self._closed else str(self._run or self.plan or "not planned yet")
        return f"<Lab of {self.layers!r} on {self.machine}; {stage}>"

    def _repr_html_(self) -> str:
        return fragment_html(self)
