"""Plans at work: simulate one, train with one.  Here planner, profiler and runtime meet."""

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harmony_lab.batches import listed, several, single
from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.forecast import Forecast, measured_state_bytes
from harmony_lab.layers import LayerSequence, require_layers
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.check import check
from harmony_lab.planner.explain_waiting import waiting_for_gradients
from harmony_lab.planner.lower import lower
from harmony_lab.program import Program
from harmony_lab.roles import Role
from harmony_lab.schedules import Schedules
from harmony_lab.simulator.engine import run
from harmony_lab.step_record import StepHooks, StepRecord
from harmony_lab.trace import Trace
from harmony_lab.training_arguments import check_count, check_training
from harmony_lab.training_plan import (
    deferred,
    machine_to_train_on,
    plan_as,
    sizes_to_measure,
    sizes_to_run,
    suggestions,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from harmony_lab.certificate import Certificate
    from harmony_lab.runtime.runner import Evaluation

__all__ = ["Trainer", "simulate"]

_log = logging.getLogger("harmony_lab")
_SEVERAL = "an update from several minibatches needs the gradients of all of them"


def simulate(plan: Plan | Program | str, profile: Profile, machine: Machine | str) -> Trace:
    """The predicted Trace of one iteration of a Plan, a plan's text or a Program.

    Raises ``PlanError`` where a plan does not suit the model, ``PlanDoesNotFitError`` where it does not fit the
    devices.
    """
    machine = Machine.of(machine)
    program = plan if isinstance(plan, Program) else lower(Plan.of(plan), profile, machine)
    return run(program, profile, machine)


class Trainer:
    """Trains ``layers`` with ``optimizer`` under ``plan``, one minibatch a step, in this process.

    The user's own parameters are trained, by the user's own optimizer; ``model.state_dict()`` is current after every
    step, unless that was asked to leave its updates to the next.  Layers compute in the plan's precision (see
    ``harmony_lab.precision``).  Without ``profile`` the layers are profiled first, for the plan's microbatch sizes.  A
    minibatch of another size than the plan's runs under the same schedule, made for its size; a larger one is refused
    where the host has no room for it.

    ``seed`` fixes random masks (see ``reproducible_randomness``), others in every step.  ``first_step``: how many
    steps were trained before, so that training that goes on draws the masks it would have drawn without the break.
    ``chaos_seed`` delays every op of emulated devices at random, to show missing dependencies.
    ``virtual_time``: emulated devices run one op at a time, and ``last_trace`` and ``predicted`` say what as many real
    ones that compute as fast would take; as on a machine with ``Machine.virtual_time``.  All but the times is real.

    ``accumulate``: how many minibatches an update will be made of (see the method), so that memory is asked for first.
    ``max_grad_norm``: gradients are clipped as by ``torch.nn.utils.clip_grad_norm_`` over all trained parameters.  That
    needs all gradients before the first update, so updates come at the end of the iteration (``update=end``), or, with
    ``overlap_updates`` or a plan that has it, beside the forward of the next (``update=next``), for steps that leave
    them to it (see ``step``).  ``notes`` tells what that costs; the host holds all gradients at once and reads them
    once more, which is all that ``predicted`` has not in.  Clipping, several minibatches and optimizers that keep
    parameters in attributes of their own (``only_on_host``) need the host to update: the packs of ``device_updates``
    are then updated there too; ``notes`` tells.
    ``stop_on_nan``: a loss that is not finite ends the step, before its first update.

    Raises ``HostMemoryError`` where the host's memory does not suffice (see ``forecast``), before anything is touched.

    Use it as a context manager, or ``close()`` it: then threads end and parameters get their own storage back.
    """

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: "Optimizer",
        plan: Plan | str,
        machine: Machine | str,
        *,
        profile: Profile | None = None,
        seed: int = 0,
        first_step: int = 0,
        chaos_seed: int | None = None,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        overlap_updates: bool = False,
        stop_on_nan: bool = False,
        virtual_time: bool = False,
    ) -> None:
        from harmony_lab.profiler.compiling import prepare
        from harmony_lab.profiler.precision import in_precision
        from harmony_lab.runtime.runner import Runner

        require_layers(layers, "Trainer")
        check_training(first_step=first_step, accumulate=accumulate, max_grad_norm=max_grad_norm)
        machine = machine_to_train_on(machine, virtual_time=virtual_time, chaos_seed=chaos_seed)
        self._optimizer, self._seed, self._max_grad_norm = optimizer, seed, max_grad_norm
        self._hooks = StepHooks()
        self.notes: tuple[str, ...] = ()
        given, plan = self._plans(Plan.of(plan), accumulate, overlap_updates)
        layers = in_precision(layers, plan.precision, machine)
        self.layers, self.plan, self.machine = layers, plan, machine
        profile = self.profile = self._costs(profile)
        self._waiting = {"all_gradients": max_grad_norm is not None, "all_losses": stop_on_nan}
        self._schedules = Schedules(
            plan, layers, optimizer, profile, machine, waiting=self._waiting, kept_bytes=lambda: self._runner.kept_bytes
        )
        lower_as = self._schedules.lower_as
        lower_as[Role.ALONE](plan.minibatch_size)  # a plan that cannot run is refused before parameters are touched
        if max_grad_norm is not None:
            self._note_waiting(given, accumulate)
        self._schedules.require_memory(accumulate=accumulate)
        prepare(layers, machine, sizes_to_run(plan))
        self._runner = Runner(
            layers,
            optimizer,
            machine,
            lower_as[Role.ALONE],
            lower_as=lower_as,
            seed=seed,
            first_step=first_step,
            chaos_seed=chaos_seed,
            max_grad_norm=max_grad_norm,
            stop_on_nan=stop_on_nan,
            evaluation=self._evaluation,
        )
        self.notes += suggestions(optimizer)

    def step(self, batch: Any, *, leave_updates: bool = False) -> float:
        """One iteration on a minibatch as the model takes it: forward, backward, update.  Returns the minibatch's loss.

        ``leave_updates``: under a plan with ``update=next`` the updates are left to the next step, of one minibatch or
        several, which makes them beside its (first) forward, so that devices need not wait.  Until then, or until
        ``finish``, parameters and the optimizer's state are those before this step: look at neither, and change
        neither, in between.  A learning rate scheduler may go on.  A step that fails or is cancelled makes the updates
        that were left to it all the same.

        Raises ``TrainingError`` when something inside fails, saying which layers had been updated; the next step can be
        taken.
        """
        return self._take([batch], leave_updates)

    def finish(self) -> None:
        """Make the updates that the last step has left, if it has; ``evaluate``, ``verify`` and ``close`` do so too."""
        self._runner.finish()

    def accumulate(self, batches: Sequence[Any], *, leave_updates: bool = False) -> float:
        """One update from several minibatches, as if they were one: returns the loss of all their samples together.

        So each minibatch weighs as much as it counts: samples, or targets that are not ignored.  Where they count the
        same that is what plain PyTorch does with ``(loss / len(batches)).backward()`` for each; where they count
        different numbers of tokens, that would be a mean of means and this is the mean over all tokens.  Random masks
        are those of one minibatch of all samples.  Gradients are added up in host memory, once more their size.
        ``leave_updates``: as for ``step``.

        Raises ``TrainingError`` like ``step``: buffers are then as they were before the first minibatch.
        """
        batches = several(batches, self.layers.flatten_batch)
        if not batches:
            raise HarmonyError("accumulate needs at least one minibatch, got an empty sequence")
        if self.plan.device_updates and len(batches) > 1:
            self._updating_on_host(self.plan, _SEVERAL)
        try:
            self._schedules.require_memory(accumulate=len(batches))
        except HarmonyError:
            self.finish()  # as where a step fails
            raise
        return self._take(batches, leave_updates)

    def on_step(self, callback: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call back after every step, on the thread that takes it; the function returned takes the callback away again.

        The step is done then, its updates are made, and what a callback raises arrives where ``step`` was called.
        """
        return self._hooks.add(callback)

    def _take(self, batches: Sequence[Any], leave_updates: bool) -> float:
        """Take a step; tell those who want to hear of it, and may look at the weights then."""
        begin_s = time.perf_counter()
        loss = self._runner.accumulate(batches, leave_updates=leave_updates and not self._hooks)
        if self._hooks:
            record = StepRecord(
                step=self.step_count,
                loss=loss,
                seconds=time.perf_counter() - begin_s,
                num_samples=sum(self.layers.flatten_batch(batch)[1]["batch"] for batch in batches),
                grad_norm=self.last_norm,
                trace=self.last_trace,
            )
            self._hooks.call(record)
        return loss

    def cancel(self) -> bool:
        """End the step that another thread is in, which then raises ``StepCancelledError``: the model, its buffers and
        the optimizer are as they were before it.

        A step that has begun to update weights is finished instead, for half a step would leave some layers updated and
        others not.  So with just-in-time updates a step can be cancelled until the backward of its last pack is done,
        with updates at the end until all backwards are.  False where no step was cancelled.
        """
        return self._runner.cancel()

    def evaluate(self, batch: Any) -> float:
        """The loss of the model in eval mode on a minibatch: forward only, pack by pack, as a plan's forward runs.

        What ``model.eval()`` would give: no dropout, batch norm with its running statistics; the model itself keeps its
        mode, and nothing of it changes.  The layers of eval mode are captured and profiled when this is first called.
        ``last_trace`` is then that of the evaluation.

        Raises ``HarmonyError`` for a model that changes its state in eval mode too.
        """
        return self._runner.evaluate(single(batch, self.layers.flatten_batch))

    def verify(
        self, batches: Sequence[Any], *, tolerance: float | None = None, shortened: bool | None = None
    ) -> "Certificate":
        """Train a step on each batch (or on the one given) beside plain PyTorch, on copies of model and optimizer, and
        compare.

        ``shortened``: with layers that repeat left out; None: where the host has no room for copies of all.

        See ``verification.verify``.  ``tolerance``: the largest relative difference that passes, by default 1e-4, or
        0.05 for parameters of 16 bits; for a plan in bf16 0.01 in losses and buffers and 0.2 in gradients.  Raises
        ``HostMemoryError`` where the copies have no room.
        """
        from harmony_lab.subjects import fitting, step_bytes
        from harmony_lab.verification import Subject, verify

        self.finish()
        batches = listed(batches, self.layers.flatten_batch)
        expected = self.forecast()
        subject = Subject(
            model=type(self.layers.model).__name__,
            layers=self.layers,
            optimizer=self._optimizer,
            plan=self.plan,
            machine=self.machine,
            lower=self._schedules.lower_as[Role.ALONE],
            seed=self._seed,
            first_step=self.step_count,
            max_grad_norm=self._max_grad_norm,
            step_bytes=step_bytes(expected, self.layers, self.profile, self.plan.backward_microbatch_size),
            optimizer_state_bytes=expected.optimizer_state_bytes,
        )
        return verify(fitting(subject, self.profile, shortened, self._waiting), batches, tolerance)

    def forecast(self, *, accumulate: int = 1) -> Forecast:
        """What training takes of the devices' and the host's memory.  ``accumulate``: minibatches per update."""
        check_count("accumulate", accumulate)
        return self._schedules.forecast(accumulate=accumulate)

    @property
    def step_count(self) -> int:
        """Steps trained, with those before ``first_step``."""
        return self._runner.step_count

    @property
    def last_trace(self) -> Trace | None:
        """What was measured in the last step, of several minibatches in the one with updates, or evaluation."""
        return self._runner.last_trace

    @property
    def last_norm(self) -> float | None:
        """The 2-norm of all gradients of the last step, before clipping; None without ``max_grad_norm``."""
        return self._runner.last_norm

    @property
    def host_bytes(self) -> int:
        """Counted: parameters, optimizer state, the memory kept for gradients and the stash, and what was added up in
        the last step."""
        return self._runner.host_bytes

    @property
    def predicted(self) -> Trace:
        """What the simulator says of the plan, to set beside ``last_trace``; under ``update=next`` of a step that makes
        the updates of another and leaves its own.

        Of one minibatch: where several make an update, the others only add their gradients up, which takes less.
        """
        return run(self._schedules.as_planned(), self.profile, self.machine)

    @property
    def closed(self) -> bool:
        return self._runner.closed

    def close(self) -> None:
        """End all threads, free the devices, give the parameters their own storage; safe to call twice."""
        self._runner.close()

    def __repr__(self) -> str:
        return f"<Trainer of {self.layers!r} on {self.machine}; step {self.step_count}; {self.plan}>"

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plans(self, plan: Plan, accumulate: int, overlap_updates: bool) -> tuple[Plan, Plan]:
        """The plan as it would be if gradients were not clipped, and as it is."""
        from harmony_lab.runtime.optimizer import only_on_host

        given = plan_as(Role.LAST, plan) if accumulate > 1 else plan
        if self._max_grad_norm is not None:
            plan = deferred(plan, overlap_updates)
        if plan.device_updates and accumulate > 1:
            plan = self._updating_on_host(plan, _SEVERAL)
        if plan.device_updates and (reason := only_on_host(self._optimizer)):
            plan = self._updating_on_host(plan, reason)
        return given, plan

    def _costs(self, profile: Profile | None) -> Profile:
        """Measured where none is given."""
        from harmony_lab.profiler.measure import profile as measure

        layers, optimizer, plan = self.layers, self._optimizer, self.plan
        if profile is None:
            profile = measure(layers, self.machine, optimizer, microbatch_sizes=sizes_to_measure(plan, layers))
        if plan.device_updates and not profile.optimizer_state_bytes and measured_state_bytes(layers, optimizer):
            raise HarmonyError(
                "the plan updates packs on devices, where this optimizer's state needs room, but the profile was made "
                "without an optimizer: profile with it, harmony_lab.profile(layers, machine, optimizer)"
            )
        return profile

    def _note_waiting(self, given: Plan, accumulate: int) -> None:
        """``given``: the plan as it would be if gradients were not clipped."""
        makespan_s = self.predicted.makespan_s
        waits = waiting_for_gradients(self.plan, makespan_s, given, self.profile, self.machine, accumulate)
        clipped = f"gradients are clipped by their norm, which is known when all of them are: {waits}"
        self.notes = (clipped, *self.notes)

    def _updating_on_host(self, plan: Plan, reason: str) -> Plan:
        """The plan without updates on devices, which is told once."""
        note = f"{reason}: packs that the plan updates on devices are updated on the host"
        if note not in self.notes:
            self.notes += (note,)
            _log.warning(note)
        return plan.with_(device_updates=())

    def _evaluation(self) -> "Evaluation":
        """The layers of eval mode, and how minibatches run through them."""
        from harmony_lab.planner.lower import lower_forward
        from harmony_lab.profiler.evaluation import evaluation_layers, evaluation_plan
        from harmony_lab.profiler.measure import profile as measure
        from harmony_lab.profiler.precision import in_precision
        from harmony_lab.runtime.runner import Evaluation

        layers = in_precision(evaluation_layers(self.layers), self.plan.precision, self.machine)
        plan = evaluation_plan(self.plan, self.layers, layers)
        costs = measure(layers, self.machine, microbatch_sizes=sizes_to_measure(plan, layers))

        def program(minibatch_size: int) -> Program:
            whole = minibatch_size == plan.minibatch_size
            lowered = lower_forward(plan if whole else plan.for_minibatch(minibatch_size), costs, self.machine)
            check(lowered)
            self._schedules.require_room(lowered, layers)
            return lowered

        return Evaluation(layers, program)
