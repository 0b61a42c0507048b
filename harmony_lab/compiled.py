"""compiled: runs loops over numbers as machine code where numba is installed, as plain Python where it is not.

Functions marked ``@compiled`` keep to numbers, arrays and named tuples of arrays.  Machine code is made at the first
call and kept on disk beside the source (or in the user's cache folder), so that this happens once per installation.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

try:
    from numba import njit
except ImportError:  # planning works without it, about twenty times slower
    njit = None  # type: ignore[assignment] # mypy takes the import for granted

__all__ = ["Bool", "Float", "Floats", "Int", "Ints", "compiled"]

Int = Any  # int, np.int64 or what numba makes of it: what compiled functions pass to each other
Bool = Any
Float = Any
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """That function as machine code, where that is possible."""
    return function if njit is None else njit(cache=True, nogil=True)(function)  # type: ignore[return-value]
