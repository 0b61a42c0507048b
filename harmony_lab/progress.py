"""Progress: how far a long part of the work is."""

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long part is: ``stage`` is ``"profile"`` or ``"search"``."""

    stage: str
    done: int
    total: int
    text: str

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0
