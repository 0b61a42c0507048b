"""Knobs: a plan as the few values that a user turns, and back; no widgets."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from harmony_lab.costs import Profile
from harmony_lab.plan import Mode, Plan
from harmony_lab.preview import repacked

__all__ = ["Knobs", "microbatch_choices"]

_MOST_CHOICES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What can be turned with one control each; boundaries of packs are edited in the plan's text form."""

    mode: Mode
    forward_microbatch_size: int
    backward_microbatch_size: int
    num_forward_packs: int
    num_backward_packs: int
    prefetch: int
    peer_transfers: bool
    just_in_time_update: bool

    @classmethod
    def of(cls, plan: Plan) -> "Knobs":
        return cls(
            mode=plan.mode,
            forward_microbatch_size=plan.forward_microbatch_size,
            backward_microbatch_size=plan.backward_microbatch_size,
            num_forward_packs=len(plan.forward_packs),
            num_backward_packs=len(plan.backward_packs),
            prefetch=plan.prefetch,
            peer_transfers=plan.peer_transfers,
            just_in_time_update=plan.just_in_time_update,
        )

    def turn(self, **changes: Any) -> "Knobs":
        return replace(self, **changes)

    def apply(self, base: Plan, profile: Profile) -> Plan:
        """``base`` with these knobs.  Its packs stay unless their number changes; then they are balanced in time.

        Raises ``PlanError`` where the result breaks invariants.
        """
        before, others = Knobs.of(base), asdict(self)
        counts = {name: others.pop(name) for name in ("num_forward_packs", "num_backward_packs")}
        turned = {name: count for name, count in counts.items() if count != getattr(before, name)}
        return repacked(base, profile, **turned, **others)


def microbatch_choices(profile: Profile, minibatch_size: int, *also: int) -> tuple[int, ...]:
    """Microbatch sizes worth offering: all that the profile covers; of many, those measured, powers of two and divisors
    of the minibatch.  ``also`` are among them in any case.
    """
    smallest = profile.microbatch_sizes[0]
    largest = min(profile.largest_microbatch, minibatch_size)
    sizes = set(range(smallest, largest + 1))
    if len(sizes) > _MOST_CHOICES:
        sizes = {
            size
            for size in sizes
            if size in profile.microbatch_sizes or minibatch_size % size == 0 or size & (size - 1) == 0
        }
    return tuple(sorted(sizes | set(also)))
