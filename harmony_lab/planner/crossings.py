"""Crossings: lowers what crosses a boundary, values forward and their gradients back, by peer or through the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harmony_lab.machine import HOST
from harmony_lab.planner.build import ProgramBuilder
from harmony_lab.planner.compose import Task, Unit
from harmony_lab.planner.pack import PackCosts
from harmony_lab.program import Block, OpKind, Stream, TensorKind

__all__ = ["Crossings"]

Samples = tuple[int, int]


class _Offer(NamedTuple):
    """A block that a peer will fetch."""

    block: int
    send: int


class Crossings:
    """Emits the transfers of ACTIVATION and ACTIVATION_GRADIENT blocks, and knows where each is.

    ``stashed``: boundaries whose values stay on the host for a backward pack that starts there.  ``swapped_out``: per
    device, the ops that have taken outputs to the host so far.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        costs: PackCosts,
        stages: Mapping[int, Sequence[Task]],
        stashed: set[int],
        *,
        peers: bool,
    ) -> None:
        self.stashed = stashed
        self.swapped_out: dict[int, list[int]] = {task.device: [] for tasks in stages.values() for task in tasks}
        self._builder, self._costs, self._stages, self._peers = builder, costs, stages, peers
        self._offers: dict[tuple[TensorKind, int, int], dict[Samples, _Offer]] = {}  # (kind, boundary, to device)
        self._host: dict[tuple[TensorKind, int], dict[Samples, int]] = {}  # (kind, boundary): host blocks

    def block(self, kind: TensorKind, unit: Unit, boundary: int) -> Block:
        """What that boundary's values, or their gradients, take on the unit's device."""
        gradient = kind is TensorKind.ACTIVATION_GRADIENT
        count = self._costs.boundary_gradient_bytes if gradient else self._costs.boundary_bytes
        return Block(kind, unit.task.device, (boundary, boundary), unit.samples, count(boundary, unit.num_samples))

    def fetch(
        self, unit: Unit, kind: TensorKind, boundary: int, *, last_use: bool, after: Sequence[int]
    ) -> tuple[int, ...]:
        """One microbatch's blocks at a boundary, from the peer that offers them or else from the host.

        ``last_use``: the host need not keep them any longer.
        """
        wanted = self.block(kind, unit, boundary)
        if not wanted.num_bytes:
            return ()
        offer = self._offers.get((kind, boundary, unit.task.device), {}).pop(unit.samples, None)
        if offer is not None:
            return self._receive(offer, wanted, after)
        start, stop = unit.samples
        kept = self._host.get((kind, boundary), {})
        pieces = {part: block for part, block in kept.items() if part[0] < stop and start < part[1]}
        done = [part for part in pieces if last_use and part[1] <= stop]
        _, written = self._builder.emit(
            OpKind.SWAP_IN,
            wanted.device,
            Stream.SWAP_IN,
            wanted.layers,
            wanted.samples,
            reads=tuple(pieces.values()),
            writes=(wanted,),
            frees=tuple(kept.pop(part) for part in done),
            after=after,
        )
        return written

    def _receive(self, offer: _Offer, wanted: Block, after: Sequence[int]) -> tuple[int, ...]:
        builder = self._builder
        source = builder.blocks[offer.block].device
        kept_too = any(builder.ops[op].kind is OpKind.SWAP_OUT for op in builder.users(offer.block))
        _, written = builder.emit(
            OpKind.RECV,
            wanted.device,
            Stream.PEER_IN,
            wanted.layers,
            wanted.samples,
            reads=(offer.block,),
            writes=(wanted,),
            frees=() if kept_too else (offer.block,),
            after=(offer.send, *after),
        )
        if kept_too:
            builder.emit(OpKind.FREE, source, Stream.MEMORY, wanted.layers, wanted.samples, frees=(offer.block,))
        return written

    def pass_on(self, unit: Unit, kind: TensorKind, boundary: int, block: int) -> None:
        """Send a block to the device that runs the next pack, keep a copy on the host for backward, or both."""
        forward = kind is TensorKind.ACTIVATION
        receiver = self._receiver(unit) if not forward or boundary == unit.task.pack.stop else None
        if receiver is not None:
            send, _ = self._builder.emit(
                OpKind.SEND, unit.task.device, Stream.PEER_OUT, (boundary, boundary), unit.samples, reads=(block,)
            )
            self._offers.setdefault((kind, boundary, receiver), {})[unit.samples] = _Offer(block, send)
        if receiver is None:
            self.to_host(block, frees=(block,))
        elif forward and boundary in self.stashed:
            self.to_host(block, frees=())

    def _receiver(self, unit: Unit) -> int | None:
        """The device that fetches this unit's output directly; None where it goes through the host."""
        following = self._stages[unit.task.stage + 1]
        if not self._peers or any(later.device == unit.task.device for later in following):
            return None
        return following[0].device if unit.samples in following[0].samples else None

    def to_host(self, block: int, *, frees: tuple[int, ...]) -> None:
        """Copy a block of this device to the host."""
        content = self._builder.blocks[block]
        op, (written,) = self._builder.emit(
            OpKind.SWAP_OUT,
            content.device,
            Stream.SWAP_OUT,
            content.layers,
            content.samples,
            reads=(block,),
            writes=(content._replace(device=HOST),),
            frees=frees,
        )
        self._host.setdefault((content.kind, content.layers[0]), {})[content.samples] = written
        self.swapped_out[content.device].append(op)
