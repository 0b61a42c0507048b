"""Knobs: a plan as the few values that a user turns, and back; no widgets."""

from dataclasses import dataclass, replace
from typing import Any

from harmony_lab.costs import Profile
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.pack import balanced_packs

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
        backward = self._backward_packs(base, profile)
        return base.with_(
            mode=self.mode,
            forward_microbatch_size=self.forward_microbatch_size,
            forward_packs=self._forward_packs(base, backward[-1].start, profile),
            backward_microbatch_size=self.backward_microbatch_size,
            backward_packs=backward,
            prefetch=self.prefetch,
            peer_transfers=self.peer_transfers,
            just_in_time_update=self.just_in_time_update,
        )

    def _backward_packs(self, base: Plan, profile: Profile) -> tuple[Pack, ...]:
        count = max(1, min(self.num_backward_packs, base.num_layers))
        if count == len(base.backward_packs):
            return base.backward_packs
        return balanced_packs(profile, 0, base.num_layers, count, self.backward_microbatch_size, forward=False)

    def _forward_packs(self, base: Plan, stop: int, profile: Profile) -> tuple[Pack, ...]:
        """Packs of the layers before ``stop``, where the fused pack starts."""
        if stop == 0:
            return ()
        count = max(1, min(self.num_forward_packs, stop))
        if count == len(base.forward_packs) and stop == base.fused_pack.start:
            return base.forward_packs
        return balanced_packs(profile, 0, stop, count, self.forward_microbatch_size, forward=True)


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
