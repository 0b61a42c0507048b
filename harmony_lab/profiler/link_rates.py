"""What was measured of links: the rate of each copy, and the machine with these rates."""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from harmony_lab.machine import HOST, Machine
from harmony_lab.units import format_rate

if TYPE_CHECKING:
    import pandas

__all__ = ["LinkProbe", "LinkRate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """One measurement.

    ``at_once``: how many copies of this kind ran at a time, this one among them.  ``pinned``: of the host's memory;
    None between devices and for emulated ones.  ``verified``: whether all bytes arrived as they left.
    """

    source: int
    destination: int
    at_once: int
    pinned: bool | None
    bytes_per_s: float
    verified: bool


@dataclass(frozen=True, kw_only=True)
class LinkProbe:
    """``machine``: with the rates measured.  ``rates``: all that was measured."""

    machine: Machine
    rates: tuple[LinkRate, ...]

    def rate(self, source: int, destination: int, *, at_once: int = 1, pinned: bool | None = None) -> float:
        """The first measurement of that copy; ``pinned`` None: of any."""
        for item in self.rates:
            if (item.source, item.destination, item.at_once) == (source, destination, at_once):
                if pinned in (None, item.pinned):
                    return item.bytes_per_s
        raise KeyError((source, destination, at_once, pinned))

    def to_frame(self) -> "pandas.DataFrame":
        """A row per measurement."""
        import pandas

        names = [field for field in LinkRate.__dataclass_fields__ if field not in ("source", "destination")]
        return pandas.DataFrame(
            {
                "source": self._name(item.source),
                "destination": self._name(item.destination),
                **{name: getattr(item, name) for name in names},
            }
            for item in self.rates
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Per measurement, as text: the copy, how many at once, the host's memory, the rate, whether data arrived."""
        return [
            (
                f"{self._name(item.source)} → {self._name(item.destination)}",
                "alone" if item.at_once == 1 else f"{item.at_once} at once",
                "" if item.pinned is None else "pinned" if item.pinned else "pageable",
                format_rate(item.bytes_per_s),
                "right" if item.verified else "wrong data",
            )
            for item in self.rates
        ]

    def _name(self, device: int) -> str:
        return "host" if device == HOST else self.machine.devices[device].name

    def __str__(self) -> str:
        wrong = sum(not item.verified for item in self.rates)
        peers = self.machine.peers_words
        return (
            f"{self.machine}; {len(self.rates)} copies measured, "
            f"{'all data right' if not wrong else f'{wrong} with wrong data'}, between devices {peers}"
        )

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(map(str.ljust, row, (*widths, 0))) for row in rows]
        return "\n".join([f"<LinkProbe of {self}>", *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in self.rows())
        return (
            f"<p>{escape(str(self))}</p><table><thead><tr><th>copy</th><th></th><th>host memory</th><th>rate</th>"
            f"<th>data</th></tr></thead><tbody>{rows}</tbody></table>"
        )
