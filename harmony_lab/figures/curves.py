"""Curves: which points of a long curve a figure needs."""

from collections.abc import Sequence

import numpy as np

__all__ = ["thinned_losses"]


def thinned_losses(losses: Sequence[float], most: int) -> list[int]:
    """At most ``most`` indices, ascending: of equally long stretches the lowest and the highest value, what is not a
    number as both, and the first and the last of all.
    """
    count = len(losses)
    if count <= most:
        return list(range(count))
    values = np.asarray(losses, dtype=np.float64)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), max(1, (most - 2) // 2)):
        low = np.where(np.isnan(values[stretch]), -np.inf, values[stretch])
        high = np.where(np.isnan(values[stretch]), np.inf, values[stretch])
        kept |= {int(stretch[low.argmin()]), int(stretch[high.argmax()])}
    return sorted(kept)
