"""Searches: of one model, each knowing what those before it have found best."""

from collections.abc import Sequence
from typing import Any

from harmony_lab.costs import Profile
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.search import SearchResult, search

__all__ = ["Searches"]

_MOST = 16


class Searches:
    """``search`` for one model after another search for it, on machines that may differ.

    A search tries some of very many plans, so that one for more memory may miss what one for less has found.  Here it
    is told: the best plan of each mode of the last searches competes in the next, where it can be.  Safe to use from
    any thread.
    """

    def __init__(self) -> None:
        self._known: tuple[Plan, ...] = ()  # of the latest search first

    def search(
        self, profile: Profile | Sequence[Profile], machine: Machine, minibatch_size: int, **options: Any
    ) -> SearchResult:
        """As ``harmony_lab.search``, with its ``options``; raises what that does."""
        result = search(profile, machine, minibatch_size, known=self._known, **options)
        of_modes = {found.plan.mode: found.plan for found in reversed(result.candidates)}
        self._known = tuple(dict.fromkeys((*of_modes.values(), *self._known)))[:_MOST]
        return result
