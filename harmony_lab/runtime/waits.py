"""Waits: what each op of a program waits for, as counts that go down."""

from harmony_lab.program import Op, OpKind, Program, Stream

__all__ = ["Key", "Waits"]

Key = tuple[int, Stream]
_PASSIVE = frozenset({OpKind.SEND, OpKind.FREE})


class Waits:
    """Made once per program.

    ``queues``: of every thread, its ops in order.  Ops that take no time (``passive``) have no thread: whoever ends the
    last op they wait for does them too.  ``counts``: how many ops each op waits for, but those of its own thread.
    ``followers``: the ops that wait for each op.
    """

    def __init__(self, program: Program) -> None:
        ops = program.ops
        self.passive = [op.kind in _PASSIVE for op in ops]
        self.queues: dict[Key, tuple[int, ...]] = {}
        self.keys: list[Key] = [(op.device, op.stream) for op in ops]
        self.counts = [0] * len(ops)
        self.followers: list[list[int]] = [[] for _ in ops]
        before: dict[int, int] = {}
        for key, queue in program.queues.items():
            before.update(zip(queue[1:], queue, strict=False))
            active = tuple(index for index in queue if not self.passive[index])
            if active:
                self.queues[key] = active
        for index, op in enumerate(ops):
            for earlier in self._awaited(index, op, before):
                self.counts[index] += 1
                self.followers[earlier].append(index)

    def _awaited(self, index: int, op: Op, before: dict[int, int]) -> set[int]:
        awaited = {*op.after, *((before[index],) if index in before else ())}
        if self.passive[index]:
            return awaited
        return {other for other in awaited if self.passive[other] or self.keys[other] != self.keys[index]}
