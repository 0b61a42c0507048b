"""lower: a Plan as a Program, ops on streams with edges for data, order and memory.

One pack's group of microbatches on one device, weights prefetched for the next::

    swap-in    W0 x0 W1 x1    x2    x3          W2 ...
    compute          F0   F1    F2    F3        (next pack)
    swap-out            y0   y1    y2    y3

Everything is buffered twice and no more: inputs of microbatch n wait until n - 2 has been computed, its outputs until
those of n - 2 have left, weights of the pack after next until the present pack's are dropped.  So a device holds what
it can use and no more.
"""

from collections.abc import Sequence

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.build import ProgramBuilder
from harmony_lab.planner.compose import Task, Unit, compose, ordered_units, validate
from harmony_lab.planner.crossings import Crossings
from harmony_lab.planner.pack import PackCosts
from harmony_lab.planner.reductions import Reductions
from harmony_lab.program import Block, OpKind, Program, Stream, TensorKind

__all__ = ["lower"]

_STATE = (0, 0)  # the samples of what belongs to none


def lower(
    plan: Plan, profile: Profile, machine: Machine, *, allow_overrun: bool = False, costs: PackCosts | None = None
) -> Program:
    """The Program of one iteration under ``plan``.

    Raises ``PlanError`` where the plan does not suit the model or machine, and ``PlanDoesNotFitError`` where a device's
    memory does not suffice, unless ``allow_overrun``: then the Program exceeds its budgets (to be looked at, not run).
    """
    validate(plan, profile, machine)
    costs = costs or PackCosts(profile)
    tasks = compose(plan, profile)
    units = ordered_units(tasks, costs)
    without_prefetch: set[tuple[int, int]] = set()
    while True:
        lowering = _Lowering(plan, profile, machine, costs, tasks, without_prefetch, allow_overrun=False)
        try:
            return lowering.run(units)
        except PlanDoesNotFitError as error:
            # What was fetched ahead may be what is too much: fetch that pack in its turn.
            ahead = lowering.fetched_ahead(error.device)
            if ahead:
                without_prefetch |= ahead
            elif allow_overrun:
                return _Lowering(plan, profile, machine, costs, tasks, without_prefetch, allow_overrun=True).run(units)
            else:
                raise


class _Lowering:
    """Lowers one plan once, unit by unit."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        machine: Machine,
        costs: PackCosts,
        tasks: tuple[Task, ...],
        without_prefetch: set[tuple[int, int]],
        *,
        allow_overrun: bool,
    ) -> None:
        self.plan, self.profile, self.costs = plan, profile, costs
        self.without_prefetch = without_prefetch
        self.tasks_of: dict[int, list[Task]] = {}  # by device
        self.stages: dict[int, list[Task]] = {}
        for task in tasks:
            self.tasks_of.setdefault(task.device, []).append(task)
            self.stages.setdefault(task.stage, []).append(task)
        stashed = {task.pack.start for task in tasks if task.backward and not task.fused} - {0}
        peers = plan.peer_transfers and machine.peer_transfers
        self.builder = ProgramBuilder(machine.budgets, allow_overrun=allow_overrun)
        self.crossings = Crossings(self.builder, costs, self.stages, stashed, peers=peers)
        self.reductions = Reductions(
            self.builder, profile, self.stages, peers=peers, just_in_time=plan.just_in_time_update
        )
        self.current = {device: of_device[0].stage for device, of_device in self.tasks_of.items()}
        self.state: dict[tuple[int, int], tuple[int, ...]] = {}  # (device, stage): blocks of weights and buffers
        self.gradients: dict[tuple[int, int], int] = {}  # (device, stage): block of gradients
        self.computed: dict[int, list[int]] = {device: [] for device in self.tasks_of}  # the last op of each unit

    def run(self, units: list[Unit]) -> Program:
        for tasks in self.tasks_of.values():
            self._fetch_state(tasks[0], after=())
        for unit in units:
            self.current[unit.task.device] = unit.task.stage
            self._unit(unit)
        self.reductions.update_all()
        return self.builder.program(self.plan.minibatch_size, self.plan.num_layers)

    def fetched_ahead(self, device: int) -> set[tuple[int, int]]:
        """(device, stage) of the packs whose weights came to that device before their turn."""
        return {key for key in self.state if key[0] == device and key[1] > self.current[device]}

    # -- one microbatch of one pack -----------------------------------------------------------------------------------

    def _unit(self, unit: Unit) -> None:
        task = unit.task
        room = _one_before_last(self.computed[task.device])
        if unit.is_first:  # in its turn, unless it has been prefetched
            self._fetch_state(task, after=self.computed[task.device][-1:])
        inputs = self._fetch_inputs(unit, room)
        gradient: tuple[int, ...] = ()
        if task.backward and not task.fused:
            kind = TensorKind.ACTIVATION_GRADIENT
            gradient = self.crossings.fetch(unit, kind, task.pack.stop, last_use=True, after=room)
        if unit.is_first:
            self._prefetch(task)
        if task.backward:
            self._backward(unit, inputs, gradient)
        else:
            self._forward(unit, inputs)
        if unit.is_last and self._updates_buffers(task):
            self._buffers_out(task)

    def _fetch_inputs(self, unit: Unit, room: list[int]) -> tuple[int, ...]:
        """The parts of the batch that the pack reads, and the values of its start boundary."""
        task = unit.task
        start, stop = task.pack
        batch: tuple[int, ...] = ()
        num_bytes = self.costs.batch_input_bytes(start, stop, unit.num_samples)
        if num_bytes:
            block = Block(TensorKind.INPUT, task.device, task.pack, unit.samples, num_bytes)
            _, batch = self.builder.emit(
                OpKind.SWAP_IN, task.device, Stream.SWAP_IN, task.pack, unit.samples, writes=(block,), after=room
            )
        last_use = task.backward or start not in self.crossings.stashed
        return (*batch, *self.crossings.fetch(unit, TensorKind.ACTIVATION, start, last_use=last_use, after=room))

    def _forward(self, unit: Unit, inputs: tuple[int, ...]) -> None:
        start, stop = unit.task.pack
        keep = tuple(b for b in range(start + 1, stop + 1) if b == stop or b in self.crossings.stashed)
        workspace = self.costs.forward_workspace(start, stop, unit.num_samples, keep)
        outputs = [self.crossings.block(TensorKind.ACTIVATION, unit, b) for b in keep]
        room = _one_before_last(self.crossings.swapped_out[unit.task.device])
        used = (*inputs, *self._state_to_drop(unit))
        op, written = self._compute(OpKind.FORWARD, unit, inputs, outputs, workspace, frees=used, after=room)
        self.computed[unit.task.device].append(op)
        for boundary, block in zip(keep, written, strict=True):
            self.crossings.pass_on(unit, TensorKind.ACTIVATION, boundary, block)

    def _backward(self, unit: Unit, inputs: tuple[int, ...], gradient: tuple[int, ...]) -> None:
        task = unit.task
        start, stop = task.pack
        key = (task.device, task.stage)
        saved = self._forward_that_saves(unit, inputs)
        outputs = []
        gradient_bytes = self.costs.gradient_bytes(start, stop)
        if unit.is_first and gradient_bytes:
            outputs.append(Block(TensorKind.GRADIENT, task.device, task.pack, _STATE, gradient_bytes))
        goes_on = task.stage + 1 in self.stages and self.costs.boundary_gradient_bytes(start, unit.num_samples) > 0
        if goes_on:
            outputs.append(self.crossings.block(TensorKind.ACTIVATION_GRADIENT, unit, start))
        accumulated = (self.gradients[key],) if key in self.gradients else ()
        used = (*inputs, saved, *gradient)
        room = _one_before_last(self.crossings.swapped_out[task.device])
        if unit.is_first:
            room += _one_before_last(self.reductions.swapped_out[task.device])
        op, written = self._compute(
            OpKind.BACKWARD,
            unit,
            (*used, *accumulated),
            outputs,
            self.costs.backward_workspace(start, stop, unit.num_samples),
            frees=(*used, *self._state_to_drop(unit)),
            after=room,
        )
        self.computed[task.device].append(op)
        if unit.is_first and gradient_bytes:
            self.gradients[key] = written[0]
        if goes_on:
            self.crossings.pass_on(unit, TensorKind.ACTIVATION_GRADIENT, start, written[-1])
        if unit.is_last and gradient_bytes:
            self.reductions.complete(task, self.gradients[key], op)

    def _forward_that_saves(self, unit: Unit, inputs: tuple[int, ...]) -> int:
        """The forward with gradient before a backward: the fused pack's only one, with the loss; others' recompute."""
        task = unit.task
        start, stop = task.pack
        size = unit.num_samples
        saved = Block(TensorKind.SAVED, task.device, task.pack, unit.samples, self.costs.saved_bytes(start, stop, size))
        workspace = self.costs.recompute_workspace(start, stop, size)
        if not task.fused:
            _, (saved_block,) = self._compute(OpKind.RECOMPUTE, unit, inputs, [saved], workspace)
            return saved_block
        loss = self.crossings.block(TensorKind.ACTIVATION, unit, stop)
        _, (saved_block, loss_block) = self._compute(OpKind.FORWARD, unit, inputs, [saved, loss], workspace)
        self.crossings.to_host(loss_block, frees=(loss_block,))
        return saved_block

    def _compute(
        self,
        kind: OpKind,
        unit: Unit,
        reads: tuple[int, ...],
        writes: list[Block],
        workspace_bytes: int,
        *,
        frees: tuple[int, ...] = (),
        after: list[int] | None = None,
    ) -> tuple[int, tuple[int, ...]]:
        task = unit.task
        workspace = Block(TensorKind.WORKSPACE, task.device, task.pack, unit.samples, workspace_bytes)
        return self.builder.emit(
            kind,
            task.device,
            Stream.COMPUTE,
            task.pack,
            unit.samples,
            reads=(*self.state[task.device, task.stage], *reads),
            writes=writes,
            frees=frees,
            temporary=(workspace,) if workspace_bytes else (),
            after=after or (),
        )

    # -- weights and buffers ------------------------------------------------------------------------------------------

    def _fetch_state(self, task: Task, after: Sequence[int]) -> None:
        key = (task.device, task.stage)
        if key in self.state:
            return
        start, stop = task.pack
        sizes = {
            TensorKind.WEIGHT: self.costs.weight_bytes(start, stop),
            TensorKind.BUFFER: self.costs.buffer_bytes(start, stop),
        }
        blocks = [Block(kind, task.device, task.pack, _STATE, size) for kind, size in sizes.items() if size]
        self.state[key] = ()
        if blocks:
            _, written = self.builder.emit(
                OpKind.SWAP_IN, task.device, Stream.SWAP_IN, task.pack, writes=blocks, after=after
            )
            self.state[key] = written

    def _prefetch(self, task: Task) -> None:
        tasks = self.tasks_of[task.device]
        position = tasks.index(task)
        for later in tasks[position + 1 : position + 1 + self.plan.prefetch]:
            if (later.device, later.stage) in self.without_prefetch:
                return
            self._fetch_state(later, after=self.computed[task.device][-1:])

    def _updates_buffers(self, task: Task) -> bool:
        return (task.fused or not task.backward) and self.profile.updated_buffer_bytes(*task.pack) > 0

    def _state_to_drop(self, unit: Unit) -> tuple[int, ...]:
        """State that the pack's last op frees; buffers that forward has updated stay until they are swapped out."""
        if not unit.is_last:
            return ()
        blocks = self.state[unit.task.device, unit.task.stage]
        if self._updates_buffers(unit.task):
            return tuple(b for b in blocks if self.builder.blocks[b].kind is not TensorKind.BUFFER)
        return blocks

    def _buffers_out(self, task: Task) -> None:
        blocks = self.state[task.device, task.stage]
        buffers = tuple(b for b in blocks if self.builder.blocks[b].kind is TensorKind.BUFFER)
        after = [op for block in buffers for op in self.builder.users(block)]
        self.builder.emit(
            OpKind.SWAP_OUT, task.device, Stream.SWAP_OUT, task.pack, reads=buffers, frees=buffers, after=after
        )


def _one_before_last(ops: list[int]) -> list[int]:
    """The op whose end leaves one of two buffers free; none while there are fewer."""
    return ops[-2:-1]
