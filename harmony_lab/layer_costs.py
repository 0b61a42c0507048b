"""What one layer costs: seconds and bytes by microbatch size, and parameters that it shares."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Cost", "ForwardCost", "LayerCost", "SharedParameter"]


class Cost(NamedTuple):
    """What one run of one layer on one microbatch costs.

    Seconds are compute only.  Bytes are peaks *above* the layer's parameters, buffers, gradients and inputs, which the
    planner counts itself; each covers the allocations made while the layer runs, outputs and gradients of inputs
    included.

    ``forward_s``           forward without gradient
    ``recompute_s``         forward with gradient (what saves activations)
    ``backward_s``          backward alone
    ``forward_peak_bytes``  peak of forward without gradient
    ``saved_bytes``         what forward with gradient leaves alive for backward, outputs included
    ``recompute_peak_bytes``  peak of forward with gradient
    ``backward_peak_bytes``   peak of backward, ``saved_bytes`` and the outputs' gradients included
    ``spread``              how far repeated runs were apart: seconds are right to ± this share; None: not repeated
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    forward_peak_bytes: float
    saved_bytes: float
    recompute_peak_bytes: float
    backward_peak_bytes: float
    spread: float | None = None


class ForwardCost(NamedTuple):
    """The part of ``Cost`` that a forward without gradient needs."""

    forward_s: float
    forward_peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer.  Bytes of parameters count everything the layer reads, shared ones too; optimizer bytes and the
    seconds of the update count only parameters that no earlier layer shares.  Parameters, gradients and buffers are
    counted as laid out in a flat block: each padded to a multiple of 64 bytes (``layers.padded``).

    ``costs`` is parallel to the profile's ``microbatch_sizes``, ``forward_costs`` to its ``forward_only_sizes``.
    ``update_spread``: of ``update_s``, as in ``Cost``.  ``update_workspace_bytes``: temporaries of the optimizer's step
    for the layer; None: not measured.
    """

    name: str
    kind: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    updated_buffer_bytes: int
    optimizer_state_bytes: int
    update_s: float
    batch_inputs: tuple[str, ...]
    costs: tuple[Cost, ...]
    update_spread: float | None = None
    forward_costs: tuple[ForwardCost, ...] = ()
    update_workspace_bytes: int | None = None

    @property
    def largest_update_bytes(self) -> int:
        """Temporaries of the optimizer's step for the layer at most: where not measured, what optimizers that are not
        fused take for all its parameters at once, two of each."""
        return 2 * self.gradient_bytes if self.update_workspace_bytes is None else self.update_workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """A parameter or buffer that several layers read: counted once in a pack that holds more than one of them."""

    name: str
    num_bytes: int
    gradient_bytes: int
    layers: tuple[int, ...]
    is_buffer: bool = False
