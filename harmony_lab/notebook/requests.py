"""Requests: plans that a view asked for and that may still arrive; History: plans that were shown."""

import threading
from typing import NamedTuple

from harmony_lab.plan import Plan

__all__ = ["History", "Past", "Requests"]

_MOST_REMEMBERED = 100


class Requests:
    """Plans that this view asked the Lab to choose and that may still arrive, oldest first.

    They tell a variation of the reference from a plan that was chosen elsewhere.  A number is given when the user turns
    or chooses, the plan follows on another thread; what was asked for meanwhile takes the place of what still waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = self._answered = 0
        self._plans: list[tuple[Plan, int]] = []

    def next_number(self) -> int:
        with self._lock:
            self._newest += 1
            return self._newest

    def is_newest(self, number: int) -> bool:
        return number == self._newest

    def answered(self, number: int) -> None:
        """The Lab has told of the plan, or refused it."""
        with self._lock:
            self._answered = max(self._answered, number)

    @property
    def is_waiting(self) -> bool:
        """Whether the user has moved on, and the answer is still to come."""
        with self._lock:
            return self._newest > self._answered

    def asked(self, plan: Plan, number: int) -> None:
        with self._lock:
            self._plans.append((plan, number))

    def arrived(self, plan: Plan) -> int | None:
        """The number of the request that this plan answers, None for one from elsewhere; older requests are dropped."""
        with self._lock:
            for position in reversed(range(len(self._plans))):
                if self._plans[position][0] == plan:
                    del self._plans[:position]
                    return self._plans[0][1]
        return None

    def forget(self) -> None:
        with self._lock:
            self._plans.clear()


class Past(NamedTuple):
    """A plan that was shown, and whether it was chosen as such rather than made by turning knobs."""

    plan: Plan
    chosen: bool


class History:
    """Plans in the order in which they were shown, each once in a row."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: list[Past] = []

    def arrived(self, plan: Plan, *, chosen: bool) -> None:
        with self._lock:
            if not self._past or self._past[-1].plan != plan:
                self._past = [*self._past[1 - _MOST_REMEMBERED :], Past(plan, chosen)]

    def back(self) -> Past | None:
        """Forget the newest and give the one before; None where there is none."""
        with self._lock:
            if len(self._past) < 2:
                return None
            self._past.pop()
            return self._past[-1]

    @property
    def can_go_back(self) -> bool:
        return len(self._past) > 1
