"""Lab: one model on one machine, from profile to run; the same for notebook, script and command line."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmony_lab.batches import to_train_on
from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.forecast import Forecast
from harmony_lab.lab_arguments import check_kinds, check_optimizer, require_folder
from harmony_lab.lab_contents import fragment_html, write_report
from harmony_lab.lab_costs import forecast_on
from harmony_lab.lab_planning import Planning
from harmony_lab.machine import Machine
from harmony_lab.ownership import take_over
from harmony_lab.planner.warm import warm_up
from harmony_lab.precision import Precision
from harmony_lab.preview import Preview
from harmony_lab.profiler.compiling import compile_layers
from harmony_lab.profiler.decompose import decompose
from harmony_lab.progress import Progress
from harmony_lab.run import Run, StepRecord
from harmony_lab.trainer import Trainer
from harmony_lab.training_arguments import check_count, check_training
from harmony_lab.training_plan import deferred

if TYPE_CHECKING:
    import torch

    from harmony_lab.certificate import Certificate

__all__ = ["Lab", "Preview", "Progress"]


class Lab(Planning):
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
    run that follows another draws the masks that one longer run would have drawn.  ``first_step``: how many were
    trained before this Lab, to go on in the same way.  ``compile``: run the layers as machine code (see
    ``compile_layers``).

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
        first_step: int = 0,
        compile: bool = False,
    ) -> None:
        check_count("minibatch_size", minibatch_size)
        check_count("first_step", first_step, least=0)
        check_kinds(optimizer, machine, loss_fn)
        machine = Machine.preset(machine) if isinstance(machine, str) else machine or Machine.detect()
        precision = Precision.of(precision)
        warm_up()
        decomposed = decompose(model, example_batch, loss_fn, layers=layers, cut=cut, loss_reduction=loss_reduction)
        check_optimizer(optimizer, decomposed)
        super().__init__(
            compile_layers(decomposed) if compile else decomposed, optimizer, machine, minibatch_size, precision
        )
        self.seed = seed
        self._run: Run | None = None
        self._earlier_steps = first_step  # and those of the runs before the last one
        take_over(model, self)  # last, so that the older Lab works on where this one cannot be made

    @property
    def run(self) -> Run | None:
        """The last run, under way or over."""
        return self._run

    @property
    def steps_trained(self) -> int:
        """Steps that the runs of this Lab have trained by now, and ``first_step`` before them."""
        with self._state:
            return self._earlier_steps + (0 if self._run is None else len(self._run.losses))

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

        ``data``: batches, such as a DataLoader; started over when used up; or one.  ``record_every``: steps between two
        recorded traces.  ``accumulate``: minibatches per step.  ``max_grad_norm``, ``stop_on_nan``: see ``Trainer``.
        ``on_step``: called after every step, for logging or a scheduler; what it raises ends the run.

        Where gradients are clipped, updates are made beside the next step's forward, if nobody looks at the weights
        between two steps: with ``on_step`` they come at the end of each.  ``data`` must not look at them either.

        Raises ``HarmonyError`` while another run is under way, ``PlanDoesNotFitError`` and ``HostMemoryError`` where
        the devices' or the host's memory does not suffice.
        """
        check_training(
            steps=steps,
            record_every=record_every,
            accumulate=accumulate,
            max_grad_norm=max_grad_norm,
            on_step=on_step,
        )
        with self._work:
            self._must_be_free("launch")
            batches = to_train_on(data, self.layers.flatten_batch)
            first_step = self.steps_trained
            trainer = self._trainer(
                accumulate=accumulate,
                max_grad_norm=max_grad_norm,
                overlap_updates=on_step is None,
                stop_on_nan=stop_on_nan,
            )
            try:
                if trainer.plan != self.plan:
                    self.choose(trainer.plan)  # so that what is measured can be set beside what was predicted
                run = Run(
                    trainer,
                    trainer.plan,
                    batches,
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
        check_training(accumulate=accumulate, max_grad_norm=max_grad_norm)
        with self._work:
            self._must_be_open("forecast")
            optimizer, chosen, costs = self._to_train(max_grad_norm, overlap=True)
            return forecast_on(self.machine, chosen, self.layers, optimizer, costs, accumulate=accumulate)

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
            chosen = self.preview(deferred(chosen.plan, overlap))
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

    def _must_be_free(self, what: str) -> None:
        self._must_be_open(what)
        if self._run is not None and self._run.active:
            raise HarmonyError(
                f"cannot {what} while a run is under way ({self._run}): call run.stop() or run.wait() first, or "
                "%harmony stop in a notebook"
            )

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
