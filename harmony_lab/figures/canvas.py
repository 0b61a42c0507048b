"""Canvas: the pieces static SVG pictures are made of, written compactly."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from harmony_lab.figures.theme import FONT_FAMILY

__all__ = ["SURFACE", "WIDTH", "Panel", "legend", "line", "number", "picture", "rectangle", "text", "x_axis", "y_axis"]

WIDTH: Final = 960
SURFACE: Final = "#FFFFFF"
_INK: Final = "#3A4048"
_GRID: Final = "#DDE1E6"
_CHARACTER: Final = 6.4  # pixels, about, of a letter at the size of labels
_LEGEND_ROW: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plot area in pixels, and the values at its left, right, bottom and top edge."""

    left: float
    top: float
    width: float
    height: float
    x_start: float = 0.0
    x_stop: float
    y_start: float = 0.0
    y_stop: float = 1.0

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + (value - self.x_start) / ((self.x_stop - self.x_start) or 1.0) * self.width

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_start) / ((self.y_stop - self.y_start) or 1.0) * self.height


def picture(height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """A complete ``<svg>``.

    It brings its own light surface; a page with other colours sets ``--hl-surface``, ``--hl-ink`` and ``--hl-grid``.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {number(height)}" width="100%" '
        f'style="max-width:{WIDTH}px;height:auto" font-family="{escape(FONT_FAMILY)}" font-size="12" fill="{_INK}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        f'<rect width="100%" height="100%" rx="6" fill="{SURFACE}" style="fill:var(--hl-surface,{SURFACE})"/>'
        f'<g style="fill:var(--hl-ink,{_INK})">{text(16, 24, title, size=14, bold=True)}{"".join(parts)}</g></svg>'
    )


def number(value: float) -> str:
    """A coordinate: at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    size: int = 12,
    bold: bool = False,
    colour: str | None = None,
) -> str:
    look = "" if anchor == "start" else f' text-anchor="{anchor}"'
    look += "" if size == 12 else f' font-size="{size}"'
    look += ' font-weight="600"' if bold else ""
    look += f' fill="{colour}"' if colour else ""
    return f'<text x="{number(x)}" y="{number(y)}"{look}>{escape(content)}</text>'


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{number(width)}" height="{number(height)}"'
    return f'<rect x="{number(x)}" y="{number(y)}" {size} fill="{colour}"/>'


def line(x1: float, y1: float, x2: float, y2: float, *, colour: str | None = None, dashed: bool = False) -> str:
    """A thin line; without a colour, that of the grid."""
    look = f'stroke="{colour}"' if colour else f'stroke="{_GRID}" style="stroke:var(--hl-grid,{_GRID})"'
    look += ' stroke-dasharray="6 4" stroke-width="1.5"' if dashed else ""
    return f'<path d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" {look}/>'


def x_axis(panel: Panel, ticks: Sequence[tuple[float, str]], name: str) -> list[str]:
    """Vertical grid lines at ``ticks``, their texts below and the axis' name at the right end of them."""
    parts = [line(panel.x(value), panel.top, panel.x(value), panel.bottom) for value, _ in ticks]
    parts += [text(panel.x(value), panel.bottom + 16, label, anchor="middle", size=11) for value, label in ticks]
    parts.append(text(panel.right, panel.bottom + 32, name, anchor="end", size=11))
    return parts


def y_axis(panel: Panel, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """Horizontal grid lines at ``ticks`` and their texts on the left."""
    parts = [line(panel.left, panel.y(value), panel.right, panel.y(value)) for value, _ in ticks]
    parts += [text(panel.left - 8, panel.y(value) + 4, label, anchor="end", size=11) for value, label in ticks]
    return parts


def legend(left: float, top: float, entries: Sequence[tuple[str, str]]) -> tuple[list[str], float]:
    """Colour patches with names, in as many rows as they need; and the height they take."""
    parts: list[str] = []
    x, y = left, top
    for colour, name in entries:
        width = 18 + _CHARACTER * len(name) + 16
        if x > left and x + width > WIDTH - 10:
            x, y = left, y + _LEGEND_ROW
        parts += [rectangle(x, y, 11, 11, colour), text(x + 16, y + 10, name, size=11)]
        x += width
    return parts, y + _LEGEND_ROW - top
