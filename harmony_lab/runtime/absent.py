"""Which parameters a block lacks, because a block of an earlier layer on its device has them.

Where layers on one device share a parameter, a program may have it there once, in the block of the first of them; the
blocks of the others are smaller by it (``planner.layerwise``).
"""

from collections.abc import Iterable

from harmony_lab.errors import ProgramError
from harmony_lab.layers import LayerSequence
from harmony_lab.program import Op, OpKind, Program, TensorKind
from harmony_lab.runtime.layout import Layouts

__all__ = ["NONE_ABSENT", "absent_parameters"]

NONE_ABSENT: frozenset[str] = frozenset()
_LAID_OUT = (TensorKind.WEIGHT, TensorKind.GRADIENT)
_COPYING = (OpKind.SWAP_IN, OpKind.SWAP_OUT, OpKind.RECV)


def absent_parameters(program: Program, layers: LayerSequence, layouts: Layouts) -> dict[int, frozenset[str]]:
    """By block, for those that lack some."""
    smaller = {
        index
        for index, block in enumerate(program.blocks)
        if block.kind in _LAID_OUT and block.num_bytes != layouts.of(block.kind, block.layers).num_bytes
    }
    if not smaller:
        return {}
    held: dict[int, set[tuple[int, int]]] = {}
    for block in program.blocks:
        if block.kind is TensorKind.WEIGHT:
            held.setdefault(block.device, set()).add(block.layers)
    absent: dict[int, frozenset[str]] = {}
    found = smaller.intersection(program.resident)
    for op in program.ops:
        for index in found.intersection(op.reads):  # by the device that it is for
            absent[index] = _shared(program, index, held.get(op.device, ()), layers)
            _must_match(program, index, absent[index], layouts)
        for index in op.writes:
            if index in smaller:
                source = _source(op, index, program)
                device = program.blocks[index].device
                shared = _shared(program, index, held.get(device, ()), layers) if source is None else absent[source]
                absent[index] = shared
                _must_match(program, index, absent[index], layouts)
    return absent


def _source(op: Op, index: int, program: Program) -> int | None:
    """The block that this one is a copy of."""
    if op.kind not in _COPYING:
        return None
    block = program.blocks[index]
    return next((i for i in op.reads if program.blocks[i]._replace(device=block.device) == block), None)


def _shared(program: Program, index: int, held: Iterable[tuple[int, int]], layers: LayerSequence) -> frozenset[str]:
    """``held``: the layers whose weights are on the device."""
    block = program.blocks[index]
    earlier = (pack for pack in held if pack[0] < block.layers[0])
    before = {name for pack in earlier for name in layers.parameters_of(*pack)}
    return frozenset(name for name in layers.parameters_of(*block.layers) if name in before)


def _must_match(program: Program, index: int, absent: frozenset[str], layouts: Layouts) -> None:
    block = program.blocks[index]
    num_bytes = layouts.of(block.kind, block.layers, absent).num_bytes
    if num_bytes != block.num_bytes:
        raise ProgramError(
            "this program is of another model, or of one whose devices get weights of another type",
            [f"%{index} {block} has {block.num_bytes} bytes, its parameters take {num_bytes}"],
        )
