"""Reductions: lowers what becomes of a pack's gradients: summed over devices, brought to the host, applied."""

from collections.abc import Mapping, Sequence
from functools import cache

from harmony_lab.costs import Profile
from harmony_lab.machine import HOST
from harmony_lab.planner.build import ProgramBuilder
from harmony_lab.planner.compose import Task
from harmony_lab.program import OpKind, Stream

__all__ = ["Reductions"]


class Reductions:
    """Emits ALL_REDUCE, the swap-out of gradients and UPDATE.

    ``swapped_out``: per device, the ops that have taken gradients to the host so far.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        profile: Profile,
        stages: Mapping[int, Sequence[Task]],
        *,
        peers: bool,
        just_in_time: bool,
    ) -> None:
        self.swapped_out: dict[int, list[int]] = {task.device: [] for tasks in stages.values() for task in tasks}
        self._builder, self._profile, self._stages = builder, profile, stages
        self._peers, self._just_in_time = peers, just_in_time
        self._complete: dict[int, dict[int, tuple[int, int]]] = {}  # stage: device: gradients, last backward op
        self._on_host: dict[int, list[int]] = {}  # stage: host blocks
        self._users = cache(self._find_users)

    def complete(self, task: Task, gradients: int, last_backward: int) -> None:
        """A device has all gradients of a pack: when every device has, reduce them; bring them out; update."""
        group = self._stages[task.stage]
        complete = self._complete.setdefault(task.stage, {})
        complete[task.device] = gradients, last_backward
        if len(group) == 1 or not self._peers:
            self._swap_out(task, gradients, after=(last_backward,))
        elif len(complete) == len(group):
            self._all_reduce(group, complete)
        if self._just_in_time and len(complete) == len(group):
            self._update(task.stage)

    def update_all(self) -> None:
        """The updates that were put off to the end, if they were."""
        if not self._just_in_time:
            for stage in self._on_host:
                self._update(stage)

    def _all_reduce(self, group: Sequence[Task], complete: Mapping[int, tuple[int, int]]) -> None:
        blocks = tuple(complete[task.device][0] for task in group)
        last = [complete[task.device][1] for task in group]
        reductions = tuple(
            self._builder.emit(OpKind.ALL_REDUCE, task.device, Stream.PEER_IN, task.pack, reads=blocks, after=last)[0]
            for task in group
        )
        root = group[0].stage % len(group)  # packs take turns, so that every device's link carries some
        self._swap_out(group[root], blocks[root], after=reductions)
        for position, task in enumerate(group):
            if position != root:
                self._builder.emit(OpKind.FREE, task.device, Stream.MEMORY, task.pack, frees=(blocks[position],))

    def _swap_out(self, task: Task, block: int, after: tuple[int, ...]) -> None:
        op, (written,) = self._builder.emit(
            OpKind.SWAP_OUT,
            task.device,
            Stream.SWAP_OUT,
            task.pack,
            reads=(block,),
            writes=(self._builder.blocks[block]._replace(device=HOST),),
            frees=(block,),
            after=after,
        )
        self._on_host.setdefault(task.stage, []).append(written)
        self.swapped_out[task.device].append(op)

    def _update(self, stage: int) -> None:
        """The optimizer's step for the parameters that the pack owns.

        Gradients of a parameter that packs share wait on the host for the pack of its first layer.
        """
        needed = [(other, block) for other, blocks in self._on_host.items() for block in blocks]
        reads = [block for other, block in needed if stage in self._users(other)]
        frees = [block for other, block in needed if stage == max(self._users(other))]
        self._builder.emit(OpKind.UPDATE, HOST, Stream.HOST, self._stages[stage][0].pack, reads=reads, frees=frees)

    def _find_users(self, stage: int) -> frozenset[int]:
        """Stages whose update needs the gradients of this stage's pack: its own, and those that own what it shares."""
        start, stop = self._stages[stage][0].pack
        owners = {
            min(shared.layers)
            for shared in self._profile.shared
            if shared.gradient_bytes and any(start <= layer < stop for layer in shared.layers)
        }
        users = {stage}
        for other, (task, *_) in self._stages.items():
            if task.backward and any(task.pack.start <= owner < task.pack.stop for owner in owners):
                users.add(other)
        return frozenset(users)
