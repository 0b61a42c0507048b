"""lower: a Plan as a Program, ops on streams with edges for data, order and memory.

One pack's group of microbatches on one device, weights prefetched for the next::

    swap-in    W0 x0 W1 x1    x2    x3          W2 ...
    compute          F0   F1    F2    F3        (next pack)
    swap-out            y0   y1    y2    y3

Everything is buffered twice and no more: inputs of microbatch n wait until n - 2 has been computed, its outputs until
those of n - 2 have left, weights of the pack after next until the present pack's are dropped.  So a device holds what
it can use and no more.
"""

from typing import NamedTuple

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.machine import HOST, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.build import ProgramBuilder
from harmony_lab.planner.compose import Task, Unit, compose, ordered_units, validate
from harmony_lab.planner.pack import PackCosts
from harmony_lab.program import Block, OpKind, Program, Stream, TensorKind

__all__ = ["lower"]

Samples = tuple[int, int]
STATE: Samples = (0, 0)


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
        lowering = _Lowering(plan, profile, machine, costs, tasks, without_prefetch)
        try:
            return lowering.run(units, allow_overrun=False)
        except PlanDoesNotFitError as error:
            # What was fetched ahead may be what is too much: fetch that pack in its turn.
            ahead = lowering.fetched_ahead(error.device)
            if ahead:
                without_prefetch |= ahead
            elif allow_overrun:
                return _Lowering(plan, profile, machine, costs, tasks, without_prefetch).run(units, allow_overrun=True)
            else:
                raise


class _Offer(NamedTuple):
    """A block that a peer will fetch."""

    block: int
    send: int


class _Lowering:
    """Lowers one plan once, unit by unit; what ops of different units share is looked up here."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        machine: Machine,
        costs: PackCosts,
        tasks: tuple[Task, ...],
        without_prefetch: set[tuple[int, int]],
    ) -> None:
        self.plan, self.profile, self.costs = plan, profile, costs
        self.budgets = machine.budgets
        self.peers = plan.peer_transfers and machine.peer_transfers
        self.without_prefetch = without_prefetch
        self.tasks_of: dict[int, list[Task]] = {}  # by device
        self.stages: dict[int, list[Task]] = {}
        for task in tasks:
            self.tasks_of.setdefault(task.device, []).append(task)
            self.stages.setdefault(task.stage, []).append(task)
        self.stashed = {task.pack.start for task in tasks if task.backward and not task.fused} - {0}
        self.current: dict[int, int] = {}  # the stage each device is at
        self.state: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # (device, stage): weight and buffer blocks on the device
        self.gradients: dict[tuple[int, int], int] = {}  # (device, stage): gradient block on the device
        self.finished: dict[int, list[int]] = {}  # stage: each device's last backward op
        self.offers: dict[tuple[TensorKind, int, int], dict[Samples, _Offer]] = {}  # (kind, boundary, to device)
        self.host: dict[tuple[TensorKind, int], dict[Samples, int]] = {}  # (kind, boundary): host blocks
        self.host_gradients: dict[int, list[int]] = {}  # by stage
        self.computed: dict[int, list[int]] = {device: [] for device in self.tasks_of}  # last op of each unit
        self.left: dict[int, list[int]] = {device: [] for device in self.tasks_of}  # swap-outs of units' outputs
        self.gradients_left: dict[int, list[int]] = {device: [] for device in self.tasks_of}

    def run(self, units: list[Unit], *, allow_overrun: bool) -> Program:
        self.builder = ProgramBuilder(self.budgets, allow_overrun=allow_overrun)
        for device, tasks in self.tasks_of.items():
            self.current[device] = tasks[0].stage
            self._fetch_state(tasks[0])
        for unit in units:
            self.current[unit.task.device] = unit.task.stage
            self._unit(unit)
        if not self.plan.just_in_time_update:
            for stage in self.host_gradients:
                self._update(stage)
        return self.builder.program(self.plan.minibatch_size, self.plan.num_layers)

    def fetched_ahead(self, device: int) -> set[tuple[int, int]]:
        """(device, stage) of the packs whose weights came to that device before their turn."""
        return {key for key in self.state if key[0] == device and key[1] > self.current[device]}

    # -- one microbatch of one pack -----------------------------------------------------------------------------------

    def _unit(self, unit: Unit) -> None:
        task = unit.task
        if unit.is_first:  # in its turn, unless it has been prefetched
            self._fetch_state(task, after=tuple(self.computed[task.device][-1:]))
        inputs = self._fetch_inputs(unit)
        gradient: tuple[int, ...] = ()
        if task.backward and not task.fused:
            gradient = self._fetch_crossing(unit, TensorKind.ACTIVATION_GRADIENT, task.pack.stop, last_use=True)
        if unit.is_first:
            self._prefetch(task)
        if task.backward:
            self._backward(unit, inputs, gradient)
        else:
            self._forward(unit, inputs)
        if unit.is_last and self._updates_buffers(task):
            self._buffers_out(task)

    def _second_last(self, ops: dict[int, list[int]], device: int) -> tuple[int, ...]:
        """The op that makes room for a second buffer."""
        return tuple(ops[device][-2:-1])

    def _forward(self, unit: Unit, inputs: tuple[int, ...]) -> None:
        start, stop = unit.task.pack
        keep = tuple(b for b in range(start + 1, stop + 1) if b == stop or b in self.stashed)
        workspace = self.costs.forward_workspace(start, stop, _size(unit), keep)
        outputs = [self._crossing_block(TensorKind.ACTIVATION, unit, b) for b in keep]
        leaving = self._state_to_drop(unit)
        room = self._second_last(self.left, unit.task.device)
        op, written = self._compute(OpKind.FORWARD, unit, inputs, outputs, workspace, (*inputs, *leaving), after=room)
        self.computed[unit.task.device].append(op)
        for boundary, block in zip(keep, written, strict=True):
            self._pass_on(unit, TensorKind.ACTIVATION, boundary, block)

    def _backward(self, unit: Unit, inputs: tuple[int, ...], gradient: tuple[int, ...]) -> None:
        task = unit.task
        start, stop = task.pack
        size = _size(unit)
        saved = self._keep_for_backward(unit, inputs)
        outputs = []
        key = (task.device, task.stage)
        gradient_bytes = self.costs.gradient_bytes(start, stop)
        if unit.is_first and gradient_bytes:
            outputs.append(Block(TensorKind.GRADIENT, task.device, task.pack, STATE, gradient_bytes))
        goes_on = task.stage + 1 in self.stages and self.costs.boundary_gradient_bytes(start, size) > 0
        if goes_on:
            outputs.append(self._crossing_block(TensorKind.ACTIVATION_GRADIENT, unit, start))
        accumulated = (self.gradients[key],) if key in self.gradients else ()
        used = (*inputs, saved, *gradient)
        room = self._second_last(self.left, task.device)
        if unit.is_first:
            room += self._second_last(self.gradients_left, task.device)
        op, written = self._compute(
            OpKind.BACKWARD,
            unit,
            (*used, *accumulated),
            outputs,
            self.costs.backward_workspace(start, stop, size),
            frees=(*used, *self._state_to_drop(unit)),
            after=room,
        )
        self.computed[task.device].append(op)
        if unit.is_first and gradient_bytes:
            self.gradients[key] = written[0]
        if goes_on:
            self._pass_on(unit, TensorKind.ACTIVATION_GRADIENT, start, written[-1])
        if unit.is_last and gradient_bytes:
            self._gradients_complete(task, op)

    def _keep_for_backward(self, unit: Unit, inputs: tuple[int, ...]) -> int:
        """The forward that saves what backward needs: the fused pack's own, any other pack's recompute."""
        task = unit.task
        start, stop = task.pack
        saved = Block(
            TensorKind.SAVED, task.device, task.pack, unit.samples, self.costs.saved_bytes(start, stop, _size(unit))
        )
        workspace = self.costs.recompute_workspace(start, stop, _size(unit))
        if not task.fused:
            _, (saved_block,) = self._compute(OpKind.RECOMPUTE, unit, inputs, [saved], workspace)
            return saved_block
        loss = self._crossing_block(TensorKind.ACTIVATION, unit, stop)
        _, (saved_block, loss_block) = self._compute(OpKind.FORWARD, unit, inputs, [saved, loss], workspace)
        self._swap_out(unit, TensorKind.ACTIVATION, stop, loss_block, frees=(loss_block,))
        return saved_block

    def _compute(
        self,
        kind: OpKind,
        unit: Unit,
        reads: tuple[int, ...],
        writes: list[Block],
        workspace_bytes: int,
        frees: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
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
            after=after,
        )

    # -- weights and buffers ------------------------------------------------------------------------------------------

    def _fetch_state(self, task: Task, after: tuple[int, ...] = ()) -> None:
        key = (task.device, task.stage)
        if key in self.state:
            return
        start, stop = task.pack
        sizes = {
            TensorKind.WEIGHT: self.costs.weight_bytes(start, stop),
            TensorKind.BUFFER: self.costs.buffer_bytes(start, stop),
        }
        blocks = [Block(kind, task.device, task.pack, STATE, size) for kind, size in sizes.items() if size]
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
            self._fetch_state(later, after=tuple(self.computed[task.device][-1:]))

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

    # -- what crosses boundaries --------------------------------------------------------------------------------------

    def _fetch_inputs(self, unit: Unit) -> tuple[int, ...]:
        """The parts of the batch that the pack reads, and the values of its start boundary."""
        task = unit.task
        start, stop = task.pack
        batch: tuple[int, ...] = ()
        num_bytes = self.costs.batch_input_bytes(start, stop, _size(unit))
        if num_bytes:
            block = Block(TensorKind.INPUT, task.device, task.pack, unit.samples, num_bytes)
            room = self._second_last(self.computed, task.device)
            _, batch = self.builder.emit(
                OpKind.SWAP_IN, task.device, Stream.SWAP_IN, task.pack, unit.samples, writes=(block,), after=room
            )
        last_use = task.backward or start not in self.stashed
        return (*batch, *self._fetch_crossing(unit, TensorKind.ACTIVATION, start, last_use=last_use))

    def _fetch_crossing(self, unit: Unit, kind: TensorKind, boundary: int, *, last_use: bool) -> tuple[int, ...]:
        """A boundary's values (or their gradients) for one microbatch, from the peer that offers them or from the
        host."""
        task, samples = unit.task, unit.samples
        wanted = self._crossing_block(kind, unit, boundary)
        if not wanted.num_bytes:
            return ()
        where = (boundary, boundary)
        room = self._second_last(self.computed, task.device)
        offer = self.offers.get((kind, boundary, task.device), {}).pop(samples, None)
        if offer is not None:
            source = self.builder.blocks[offer.block].device
            others = [op for op in self.builder.users(offer.block) if self.builder.ops[op].kind is OpKind.SWAP_OUT]
            _, written = self.builder.emit(
                OpKind.RECV,
                task.device,
                Stream.PEER_IN,
                where,
                samples,
                reads=(offer.block,),
                writes=(wanted,),
                frees=() if others else (offer.block,),
                after=(offer.send, *room),
            )
            if others:
                self.builder.emit(OpKind.FREE, source, Stream.MEMORY, where, samples, frees=(offer.block,))
            return written
        kept = self.host.get((kind, boundary), {})
        pieces = {part: block for part, block in kept.items() if part[0] < samples[1] and samples[0] < part[1]}
        done = [part for part in pieces if last_use and part[1] <= samples[1]]
        _, written = self.builder.emit(
            OpKind.SWAP_IN,
            task.device,
            Stream.SWAP_IN,
            where,
            samples,
            reads=tuple(pieces.values()),
            writes=(wanted,),
            frees=tuple(kept.pop(part) for part in done),
            after=room,
        )
        return written

    def _pass_on(self, unit: Unit, kind: TensorKind, boundary: int, block: int) -> None:
        """Send a block to the device that runs the next pack, keep a copy on the host for backward, or both."""
        task, samples = unit.task, unit.samples
        forward = kind is TensorKind.ACTIVATION
        receiver = self._receiver(unit) if not forward or boundary == task.pack.stop else None
        if receiver is not None:
            send, _ = self.builder.emit(
                OpKind.SEND, task.device, Stream.PEER_OUT, (boundary, boundary), samples, reads=(block,)
            )
            self.offers.setdefault((kind, boundary, receiver), {})[samples] = _Offer(block, send)
        if receiver is None or (forward and boundary in self.stashed):
            self._swap_out(unit, kind, boundary, block, frees=() if receiver is not None else (block,))

    def _receiver(self, unit: Unit) -> int | None:
        """The device that fetches this unit's output directly; None where it goes through the host."""
        task = unit.task
        following = self.stages[task.stage + 1]
        if not self.peers or any(later.device == task.device for later in following):
            return None
        return following[0].device if unit.samples in following[0].samples else None

    def _swap_out(self, unit: Unit, kind: TensorKind, boundary: int, block: int, frees: tuple[int, ...]) -> None:
        where = (boundary, boundary)
        on_host = self.builder.blocks[block]._replace(device=HOST)
        op, (written,) = self.builder.emit(
            OpKind.SWAP_OUT,
            unit.task.device,
            Stream.SWAP_OUT,
            where,
            unit.samples,
            reads=(block,),
            writes=(on_host,),
            frees=frees,
        )
        self.host.setdefault((kind, boundary), {})[unit.samples] = written
        self.left[unit.task.device].append(op)

    def _crossing_block(self, kind: TensorKind, unit: Unit, boundary: int) -> Block:
        gradient = kind is TensorKind.ACTIVATION_GRADIENT
        count = self.costs.boundary_gradient_bytes if gradient else self.costs.boundary_bytes
        where = (boundary, boundary)
        return Block(kind, unit.task.device, where, unit.samples, count(boundary, _size(unit)))

    # -- gradients and updates ----------------------------------------------------------------------------------------

    def _gradients_complete(self, task: Task, last_backward: int) -> None:
        """A device has its gradients of a pack.  Sum them over devices, bring them to the host, update."""
        group = self.stages[task.stage]
        finished = self.finished.setdefault(task.stage, [])
        finished.append(last_backward)
        if self.peers and len(group) > 1:
            if len(finished) < len(group):
                return
            self._all_reduce(group, finished)
        else:
            self._gradients_out(task, after=(last_backward,))
        if self.plan.just_in_time_update and len(finished) == len(group):
            self._update(task.stage)

    def _all_reduce(self, group: list[Task], finished: list[int]) -> None:
        blocks = tuple(self.gradients[task.device, task.stage] for task in group)
        reductions = []
        for task in group:
            op, _ = self.builder.emit(
                OpKind.ALL_REDUCE, task.device, Stream.PEER_IN, task.pack, reads=blocks, after=finished
            )
            reductions.append(op)
        root = group[group[0].stage % len(group)]
        self._gradients_out(root, after=tuple(reductions))
        for task, block in zip(group, blocks, strict=True):
            if task is not root:
                self.builder.emit(OpKind.FREE, task.device, Stream.MEMORY, task.pack, frees=(block,))

    def _gradients_out(self, task: Task, after: tuple[int, ...]) -> None:
        block = self.gradients[task.device, task.stage]
        on_host = self.builder.blocks[block]._replace(device=HOST)
        op, (written,) = self.builder.emit(
            OpKind.SWAP_OUT,
            task.device,
            Stream.SWAP_OUT,
            task.pack,
            reads=(block,),
            writes=(on_host,),
            frees=(block,),
            after=after,
        )
        self.host_gradients.setdefault(task.stage, []).append(written)
        self.gradients_left[task.device].append(op)

    def _update(self, stage: int) -> None:
        """The optimizer's step for the pack.  Gradients of a parameter that packs share wait for the pack that owns
        it."""
        reads = [
            block for other, blocks in self.host_gradients.items() if stage in self._users(other) for block in blocks
        ]
        frees = [
            block
            for other, blocks in self.host_gradients.items()
            if stage == max(self._users(other))
            for block in blocks
        ]
        self.builder.emit(OpKind.UPDATE, HOST, Stream.HOST, self.stages[stage][0].pack, reads=reads, frees=frees)

    def _users(self, stage: int) -> set[int]:
        """Stages whose update needs the gradients of this stage's pack."""
        start, stop = self.stages[stage][0].pack
        owners = {
            min(shared.layers)
            for shared in self.profile.shared
            if shared.gradient_bytes and any(start <= layer < stop for layer in shared.layers)
        }
        elsewhere = {
            other
            for other, tasks in self.stages.items()
            if tasks[0].backward and any(tasks[0].pack.start <= owner < tasks[0].pack.stop for owner in owners)
        }
        return {stage} | elsewhere


def _size(unit: Unit) -> int:
    start, stop = unit.samples
    return stop - start
