"""Plans at work: simulate one, train with one.  Here planner, profiler and runtime meet."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan, microbatches
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.program import Program
from harmony_lab.simulator.engine import run
from harmony_lab.trace import Trace

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Trainer", "simulate"]


def simulate(plan: Plan | Program | str, profile: Profile, machine: Machine) -> Trace:
    """The predicted Trace of one iteration of a Plan, a plan's text or a Program.

    Raises ``PlanError`` where a plan does not suit the model, ``PlanDoesNotFitError`` where it does not fit the
    devices.
    """
    program = plan if isinstance(plan, Program) else lower(Plan.of(plan), profile, machine)
    return run(program, profile, machine)


class Trainer:
    """Trains ``layers`` with ``optimizer`` under ``plan``, one minibatch a step, in this process.

    The user's own parameters are trained, by the user's own optimizer; ``model.state_dict()`` is current after every
    step.  Without ``profile`` the layers are profiled first, for the plan's microbatch sizes.  A minibatch of another
    size than the plan's runs under the same schedule, made for its size.

    ``seed`` fixes random masks (see ``reproducible_randomness``), others in every step.  ``first_step``: how many
    steps were trained before, so that training that goes on draws the masks it would have drawn without the break.
    ``chaos_seed`` delays every op of emulated devices at random, to show missing dependencies.

    Use it as a context manager, or ``close()`` it: then threads end and parameters get their own storage back.
    """

    def __init__(
        self,
        layers: LayerSequence,
        optimizer: "Optimizer",
        plan: Plan | str,
        machine: Machine,
        *,
        profile: Profile | None = None,
        seed: int = 0,
        first_step: int = 0,
        chaos_seed: int | None = None,
    ) -> None:
        from harmony_lab.profiler.measure import profile as measure
        from harmony_lab.runtime.runner import Runner

        plan = Plan.of(plan)
        self.layers, self.plan, self.machine = layers, plan, machine
        if profile is None:
            profile = measure(layers, machine, optimizer, microbatch_sizes=_sizes_to_measure(plan, layers))
        self.profile = profile
        self._programs: dict[int, Program] = {}
        self._lowered(plan.minibatch_size)  # a plan that cannot run is refused before the parameters are touched
        self._runner = Runner(
            layers, optimizer, machine, self._lowered, seed=seed, first_step=first_step, chaos_seed=chaos_seed
        )

    def step(self, batch: Any) -> float:
        """One iteration on a minibatch as the model takes it: forward, backward, update.  Returns the minibatch's loss.

        Raises ``TrainingError`` when something inside fails, saying which layers had been updated; the next step can be
        taken.
        """
        return self._runner.step(batch)

    @property
    def step_count(self) -> int:
        """Steps trained, with those before ``first_step``."""
        return self._runner.step_count

    @property
    def last_trace(self) -> Trace | None:
        """What was measured in the last step."""
        return self._runner.last_trace

    @property
    def predicted(self) -> Trace:
        """What the simulator says of the plan, to set beside ``last_trace``."""
        return run(self._lowered(self.plan.minibatch_size), self.profile, self.machine)

    def close(self) -> None:
        """End all threads, free the devices, give the parameters their own storage; safe to call twice."""
        self._runner.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lowered(self, minibatch_size: int) -> Program:
        from harmony_lab.runtime.buffers import check_buffers

        program = self._programs.get(minibatch_size)
        if program is None:
            plan = self.plan
            if minibatch_size != plan.minibatch_size:
                plan = plan.for_minibatch(minibatch_size)
            program = lower(plan, self.profile, self.machine)
            check(program)
            check_buffers(program, self.layers)
            self._programs[minibatch_size] = program
        return program


def _sizes_to_measure(plan: Plan, layers: LayerSequence) -> list[int]:
    """Microbatch sizes that a plan runs, with the smallest, so that those of smaller minibatches can be interpolated.

    Where samples meet in a layer that is two: batch norm has no statistics of one.
    """
    shares = [plan.share(position) for position in range(plan.num_devices)]
    chosen = (plan.forward_microbatch_size, plan.backward_microbatch_size)
    run = {stop - start for share in shares for size in chosen for start, stop in microbatches(*share, size)}
    smallest = min(2, plan.minibatch_size) if layers.couples_samples else 1
    return sorted(run | {smallest})
