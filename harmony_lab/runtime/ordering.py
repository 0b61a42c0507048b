"""Edges that make updates of weights wait for more than their own gradients."""

from dataclasses import replace

from harmony_lab.errors import ProgramError
from harmony_lab.program import OpKind, Program, TensorKind

__all__ = ["updating_after"]


def updating_after(program: Program, *, all_gradients: bool = False, all_losses: bool = False) -> Program:
    """The same program, in which the first update waits until all gradients, or all losses, are on the host.

    Updates of one stream run one after the other, so the others wait with its first.  Raises ``ProgramError`` where a
    gradient leaves its device only after an update, as under just-in-time updates.
    """
    updates = [number for number, op in enumerate(program.ops) if op.kind is OpKind.UPDATE]
    if not updates or not (all_gradients or all_losses):
        return program
    wanted: set[int] = set()
    if all_gradients:
        wanted |= {block for number in updates for block in program.ops[number].reads}
    if all_losses:
        ends = (program.num_layers, program.num_layers)
        wanted |= {
            index
            for index, block in enumerate(program.blocks)
            if block.kind is TensorKind.ACTIVATION and block.layers == ends and block.device < 0
        }
    writers = {number for number, op in enumerate(program.ops) if not wanted.isdisjoint(op.writes)}
    late = sorted(number for number in writers if number > updates[0])
    if late:
        raise ProgramError(
            "updates cannot wait for all gradients here",
            [
                f"op {number} ({program.ops[number]}) comes after op {updates[0]} ({program.ops[updates[0]]}): put "
                "updates off to the end (update=end)"
                for number in late[:3]
            ],
        )
    ops = list(program.ops)
    for number in {(ops[number].device, ops[number].stream): number for number in reversed(updates)}.values():
        ops[number] = ops[number]._replace(after=tuple(sorted({*ops[number].after, *writers})))
    return replace(program, ops=tuple(ops))
