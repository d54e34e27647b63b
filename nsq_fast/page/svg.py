"""The parts of a drawing: its frame, its texts, its colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

WIDTH = 760


class Theme(msgspec.Struct, frozen=True):
    """Colours, as SVG takes them."""

    paper: str
    ink: str
    grid: str
    colours: tuple[str, ...]


LIGHT = Theme(
    "#fff",
    "#000",
    "#ddd",
    (
        "#1f77b4",
        "#ff7f0e",
        "#2ca02c",
        "#d62728",
        "#9467bd",
        "#8c564b",
        "#e377c2",
        "#7f7f7f",
        "#bcbd22",
        "#17becf",
    ),
)
# The page says, in CSS, what these are; that may depend on whether it is light or dark.
OF_PAGE = Theme("none", "var(--ink)", "var(--grid)", tuple(f"var(--colour{number})" for number in range(1, 5)))


def text(x: float, y: float, words: str, anchor: str, is_bold: bool = False, colour: str = "") -> str:
    """A line of text at a point: ``anchor`` is start, middle or end."""
    weight = ' font-weight="bold"' if is_bold else ""
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}{fill}>{escape(words)}</text>'


def drawing(height: float, title: str, parts: Sequence[str], theme: Theme = LIGHT) -> str:
    """The whole SVG, with its title above the parts."""
    ink = "" if theme is LIGHT else f' fill="{theme.ink}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}"'
            f' viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12" role="img"{ink}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="{theme.paper}"/>',
            f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
            *parts,
            "</svg>",
        ]
    )
