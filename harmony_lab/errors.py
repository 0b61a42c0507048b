"""The errors users meet.  Each says what was given, what was expected and what to do."""

from collections.abc import Sequence

__all__ = [
    "DecomposeError",
    "DeviceMemoryError",
    "HarmonyError",
    "HostMemoryError",
    "OutOfRangeError",
    "PlanDoesNotFitError",
    "PlanError",
    "ProgramError",
    "QuantityError",
    "StepCancelledError",
    "TrainingError",
]


class HarmonyError(Exception):
    """Base of every error that harmony_lab raises for its users."""


class _Violations(HarmonyError):
    """Several problems found in one pass, all listed."""

    def __init__(self, what: str, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(what + ":\n" + "\n".join(f"  - {violation}" for violation in self.violations))


class PlanError(_Violations, ValueError):
    """A plan breaks invariants; ``violations`` lists every one."""


class ProgramError(_Violations, ValueError):
    """A program is not valid; ``violations`` names the ops."""


class PlanDoesNotFitError(HarmonyError):
    """A plan needs more memory than a device has.

    ``device`` is its index, ``needed_bytes`` what is alive at once at the worst moment, ``budget_bytes`` what there is.
    """

    def __init__(self, message: str, *, device: int, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(message)
        self.device = device
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class QuantityError(HarmonyError, ValueError):
    """Text that should be a size or a rate is not."""


class DeviceMemoryError(HarmonyError, MemoryError):
    """A device's budget was exceeded while running; names op, bytes and budget."""


class HostMemoryError(HarmonyError, MemoryError):
    """The host has less memory than is needed; refused before anything is allocated."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class DecomposeError(HarmonyError):
    """A model cannot be cut into layers that mean the same; says where and what to do."""


class OutOfRangeError(HarmonyError, ValueError):
    """A profile was asked for a microbatch size beyond what was measured."""


class TrainingError(HarmonyError):
    """Training stopped; says which step, what happened and in what state the weights are."""


class StepCancelledError(TrainingError):
    """A step was ended by ``cancel`` before its first update: nothing of the model was changed."""
