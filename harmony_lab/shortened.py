"""Shortened: a model with layers that repeat left out, its plan and profile; for what the whole has no room for.

Layers [i, j) are left out where others of the same kinds stay and layer j can take what layer i would have been given:
the values of boundaries i and j are the same, but for names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.layers import Layer, LayerSequence, StateSpec, TensorSpec
from harmony_lab.plan import Pack, Plan

__all__ = ["kept_layers", "shortened", "shortened_plan", "shortened_profile"]

_Boundaries = Sequence[Sequence[TensorSpec]]


def kept_layers(layers: LayerSequence) -> tuple[int, ...]:
    """The layers of the shortest such model: at least one of every kind; all where none can be left out."""
    kept, longest = list(range(len(layers))), len(layers)
    while (found := _longest_gap(layers, kept, longest)) is not None:
        start, stop = found
        kept[start:stop] = []
        longest = stop - start  # a longer one in what is left could have been left out with this one
    return tuple(kept)


def _longest_gap(layers: LayerSequence, kept: Sequence[int], at_most: int) -> tuple[int, int] | None:
    """Of what is kept by now."""
    kinds = [layers.layers[index].kind for index in kept]
    for length in range(min(len(kept) - 2, at_most), 0, -1):
        for start in range(1, len(kept) - length):
            stop = start + length
            others = {*kinds[:start], *kinds[stop:]}
            if set(kinds[start:stop]) <= others and _partners(layers.boundaries, kept[start], kept[stop]) is not None:
                return start, stop
    return None


def _partners(boundaries: _Boundaries, before: int, after: int) -> dict[str, str] | None:
    """By name of a value of the later boundary, the one of the earlier boundary to take for it; None: there are none
    such."""
    early, late = boundaries[before], boundaries[after]
    common = {spec.name for spec in early} & {spec.name for spec in late}
    ours, theirs = ([spec for spec in specs if spec.name not in common] for specs in (early, late))
    if [replace(spec, name="") for spec in ours] != [replace(spec, name="") for spec in theirs]:
        return None
    return {to.name: of.name for of, to in zip(ours, theirs, strict=True)}


def _renamed(boundaries: _Boundaries, kept: Sequence[int]) -> list[dict[str, str]]:
    """For each kept layer, and for what comes after the last, names of values as the layers before know them."""
    names: dict[str, str] = {}
    found = []
    for before, index in zip((-1, *kept), (*kept, len(boundaries) - 1), strict=True):
        if index != before + 1:
            partners = _partners(boundaries, before + 1, index)
            assert partners is not None, "layers were left out between boundaries that differ"
            names = {**names, **{late: names.get(early, early) for late, early in partners.items()}}
        found.append(dict(names))
    return found


def shortened(layers: LayerSequence, kept: Sequence[int], model: Any) -> LayerSequence:
    """The kept layers, over the same tensors.  ``model``: a module to stand for them, which nobody calls."""
    renamed = _renamed(layers.boundaries, kept)
    made = tuple(_with_names(layers.layers[index], names) for index, names in zip(kept, renamed, strict=False))
    read = {name for layer in made for name in (*layer.parameters, *layer.buffers)}
    names = {layer.name for layer in made}
    return replace(
        layers,
        model=model,
        layers=made,
        boundaries=_boundaries(layers.boundaries, kept, renamed),
        state=_specs(layers.state, kept),
        buffer_state=_specs(layers.buffer_state, kept),
        tensors={name: tensor for name, tensor in layers.tensors.items() if name in read},
        couples_samples=tuple(name for name in layers.couples_samples if name in names),
        buffer_decay={name: decay for name, decay in layers.buffer_decay.items() if name in read},
        recipe=None,
        in_fp32=None,
    )


def _with_names(layer: Layer, names: Mapping[str, str]) -> Layer:
    return replace(layer, inputs=tuple(names.get(name, name) for name in layer.inputs))


def _boundaries(
    boundaries: _Boundaries, kept: Sequence[int], renamed: Sequence[Mapping[str, str]]
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Before each kept layer, and at the end."""
    return tuple(
        tuple(replace(spec, name=names.get(spec.name, spec.name)) for spec in boundaries[index])
        for index, names in zip((*kept, len(boundaries) - 1), renamed, strict=True)
    )


def _specs(specs: Mapping[str, StateSpec], kept: Sequence[int]) -> dict[str, StateSpec]:
    position = {index: number for number, index in enumerate(kept)}
    found = {}
    for name, spec in specs.items():
        reading = tuple(position[index] for index in spec.layers if index in position)
        if reading:
            found[name] = replace(spec, layers=reading)
    return found


def shortened_profile(profile: Profile, layers: LayerSequence, kept: Sequence[int]) -> Profile:
    """Of ``layers``, which are the kept ones of the profile's."""
    position = {index: number for number, index in enumerate(kept)}
    reading = [(one, tuple(position[index] for index in one.layers if index in position)) for one in profile.shared]
    return replace(
        profile,
        layers=tuple(profile.layers[index] for index in kept),
        boundaries=layers.boundaries,
        shared=tuple(replace(one, layers=where) for one, where in reading if len(where) > 1),
        couples_samples=layers.couples_samples,
        serial_buffers=tuple(name for name in profile.serial_buffers if name in layers.buffer_state),
        master_bytes=layers.parameter_bytes if profile.master_bytes else 0,
    )


def shortened_plan(plan: Plan, kept: Sequence[int]) -> Plan:
    """The same with packs of what is kept of theirs; what stays on devices does where it still can."""

    def packs(of: Sequence[Pack]) -> tuple[Pack, ...]:
        cut = [[n for n, index in enumerate(kept) if pack.start <= index < pack.stop] for pack in of]
        return tuple(Pack(inside[0], inside[-1] + 1) for inside in cut if inside)

    made = replace(
        plan,
        forward_packs=packs(plan.forward_packs),
        backward_packs=packs(plan.backward_packs),
        mirrored=False,
        resident_packs=(),
        kept_packs=(),
        device_stash=(),
        device_updates=(),
    )
    starts = [pack.start for pack in packs([pack for pack in plan.backward_packs if pack.start in plan.device_stash])]
    staying: tuple[dict[str, Any], ...] = (
        {"mirrored": plan.mirrored},
        {"resident_packs": packs(plan.resident_packs)},
        {"kept_packs": packs(plan.kept_packs)},
        {"device_stash": tuple(starts)},
        {"device_updates": packs(plan.device_updates)},
    )
    for change in staying:
        try:
            made = made.with_(**change)
        except PlanError:  # another number of packs goes another way round the devices
            continue
    return made
