"""Role: what a minibatch is to the update of its step."""

from collections.abc import Iterator
from enum import StrEnum

__all__ = ["Role", "roles"]


class Role(StrEnum):
    ALONE = "alone"  # all of its step, whose update it makes
    ADDING = "adding"  # one of several: its gradients are added to those of the others
    LAST = "last"  # of several: makes the update, with the gradients of all
    LEAVING = "leaving"  # first of a step that leaves its updates to the next one: makes those that were left to it


def roles(num_minibatches: int, *, leaves: bool) -> Iterator[Role]:
    """Of each minibatch of a step, in order.  ``leaves``: its updates to the next one."""
    if leaves:
        yield Role.LEAVING
        yield from [Role.ADDING] * (num_minibatches - 1)
    elif num_minibatches == 1:
        yield Role.ALONE
    else:
        yield from [Role.ADDING] * (num_minibatches - 1)
        yield Role.LAST
