"""Certificate: how far training under a plan is from plain PyTorch, as found by running both."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

__all__ = ["Certificate", "Difference"]

_SAME_GRADIENTS = "0 is equal to the bit; parameters and optimizer state: after updates with the same gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference of one kind, relative to what is compared, and where it was found."""

    what: str
    largest: float
    where: str
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.largest <= self.tolerance  # not so where it is NaN

    def __str__(self) -> str:
        at = f" ({self.where})" if self.where and self.largest else ""
        return f"{self.what}: {self.largest:.2g} of {self.tolerance:.0e} allowed{at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What ``Trainer.verify`` found in ``steps`` steps of ``plan``.

    ``differences``: of losses, gradients, parameters, optimizer state and buffers.  Losses are compared relative to the
    loss; gradients and buffers relative to the largest element of each; parameters and optimizer state too, after
    updating with the same gradients (see ``verification.verify``).  ``losses`` of both, step by step.

    ``shortened_from``: the layers of a model that the host has no room for copies of; verified was one of its
    ``num_layers`` with layers that repeat left out, under the same plan for those.
    """

    model: str
    plan: str
    steps: int
    differences: tuple[Difference, ...]
    losses: tuple[tuple[float, float], ...]
    num_layers: int
    shortened_from: int | None = None

    @property
    def passed(self) -> bool:
        return all(difference.passed for difference in self.differences)

    def __getitem__(self, what: str) -> Difference:
        """The difference of ``"loss"``, ``"gradients"``, ``"parameters"``, ``"optimizer state"`` or ``"buffers"``."""
        return _by_name(self.differences)[what]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "harmony_lab.certificate",
            "version": 1,
            "model": self.model,
            "plan": self.plan,
            "steps": self.steps,
            "passed": self.passed,
            "differences": [asdict(difference) for difference in self.differences],
            "losses": [list(pair) for pair in self.losses],
            "num_layers": self.num_layers,
            "shortened_from": self.shortened_from,
        }

    @property
    def _subject(self) -> str:
        if self.shortened_from is None:
            return self.model
        return f"{self.model}, shortened to {self.num_layers} of its {self.shortened_from} layers,"

    def __str__(self) -> str:
        verdict = "equals" if self.passed else "DIFFERS from"
        lines = [
            f"{self._subject} under {self.plan}",
            f"{verdict} plain PyTorch in {_steps(self.steps)}; largest differences:",
        ]
        lines += [f"  {'ok' if d.passed else 'NOT OK'}  {d}" for d in self.differences]
        lines += [f"({_SAME_GRADIENTS})"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        verdict = "equals" if self.passed else "<b>differs from</b>"
        rows = "".join(
            f"<tr><th>{escape(d.what)}</th><td>{d.largest:.2g}</td><td>{d.tolerance:.0e}</td>"
            f"<td>{'✓' if d.passed else '✗'}</td><td>{escape(d.where)}</td></tr>"
            for d in self.differences
        )
        return (
            f"<p>{escape(self._subject)} under <code>{escape(self.plan)}</code> {verdict} plain PyTorch in "
            f"{_steps(self.steps)}.</p><table><thead><tr><th></th><th>largest difference</th><th>allowed</th><th></th>"
            f"<th>where</th></tr></thead><tbody>{rows}</tbody></table><p>{_SAME_GRADIENTS}</p>"
        )


def _steps(count: int) -> str:
    return f"{count} step" + ("s" if count != 1 else "")


def _by_name(differences: Sequence[Difference]) -> Mapping[str, Difference]:
    return {difference.what: difference for difference in differences}
