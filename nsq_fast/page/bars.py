"""Bars of HTML: they take the width there is, and their labels and figures are text that folds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import msgspec

from .document import element

WORST, OTHERS = 5, 6


class Piece(msgspec.Struct, frozen=True):
    """A part of a bar. ``kind`` is 1 to 4, each with its colour and pattern; WORST for what must not be; or OTHERS,
    for what is there to compare with.
    """

    kind: int
    size: float
    about: str = ""


class Bar(msgspec.Struct, frozen=True):
    """A row: what it is of, its pieces one after the other, its figure as text, and the range that a mark shows."""

    label: str
    pieces: Sequence[Piece]
    text: str
    low: float | None = None
    high: float | None = None
    is_ours: bool = False


def bars(title: str, rows: Sequence[Bar], kinds: Mapping[int, str] | None = None) -> str:
    """A figure of bars on one scale from 0. ``kinds`` says what each kind of piece is, where there are several."""
    longest = max((_reach(row) for row in rows), default=0.0) or 1.0
    shown = "".join(_row(row, 100 / longest) for row in rows)
    return figure(title, (_legend(kinds) if kinds else "") + shown, "bars")


def figure(title: str, content: str, name: str = "") -> str:
    """Content that is HTML already, under its title."""
    return element("figure", element("figcaption", escape(title)) + content, {"class": name} if name else None)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Pairs of a mark, HTML already, and what it means."""
    items = "".join(f"<li>{mark}{escape(words)}</li>" for mark, words in entries)
    return element("ul", items, {"class": "legend"})


def _legend(kinds: Mapping[int, str]) -> str:
    return legend((f'<i class="kind{kind}"></i>', name) for kind, name in kinds.items())


def _reach(row: Bar) -> float:
    return max(sum(piece.size for piece in row.pieces), row.high or 0.0)


def _row(row: Bar, scale: float) -> str:
    pieces = "".join(_piece(piece, scale) for piece in row.pieces if piece.size > 0)
    if row.low is not None and row.high is not None and row.high > row.low:
        pieces += f'<u style="left:{row.low * scale:.2f}%;width:{(row.high - row.low) * scale:.2f}%"></u>'
    weight = "b" if row.is_ours else "span"
    label = element(weight, escape(row.label), {"class": "label"})
    value = element(weight, escape(row.text), {"class": "value"})
    track = element("span", pieces, {"class": "track"})
    return element("div", label + track + value, {"class": "bar"})


def _piece(piece: Piece, scale: float) -> str:
    width = f"width:max(2px,{piece.size * scale:.2f}%)"
    about = {"title": piece.about} if piece.about else {}
    return element("i", "", {"class": f"kind{piece.kind}", "style": width, **about})
