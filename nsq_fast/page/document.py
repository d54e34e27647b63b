"""A document of HTML that stands alone, and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape


def document(title: str, style: str, parts: Iterable[str]) -> str:
    """The whole document."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{style}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def table(head: Sequence[str], body: Iterable[Sequence[str]], name: str = "named") -> str:
    """A table of texts in a box that scrolls where it is too narrow; without a head where that is empty.

    Args:
        name: ``named`` where the first column names the rows and stays in view, ``words`` where all is prose.
    """
    lines = [f'<div class="wide"><table class="{name}">']
    if any(head):
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    lines += [f"<tr>{_cells(row)}</tr>" for row in body]
    return "\n".join([*lines, "</table></div>"])


def _cells(row: Sequence[str]) -> str:
    """The cells of a row; the last that is not empty takes the place of the empty ones behind it."""
    filled = max((place for place, cell in enumerate(row, 1) if cell), default=0)
    spanned = f' colspan="{len(row) - filled + 1}"' if 0 < filled < len(row) else ""
    cells = row[: filled or len(row)]
    return "".join(
        f"<td{spanned if place == filled else ''}>{escape(cell)}</td>" for place, cell in enumerate(cells, 1)
    )


def prose(markdown: str) -> str:
    """Paragraphs and lists of Markdown, with its code and emphasis, as HTML."""
    return "\n".join(_block(block) for block in re.split(r"\n{2,}", markdown.strip()))


def _block(block: str) -> str:
    if not block.startswith("- "):
        return f"<p>{_inline(block)}</p>"
    items = "".join(f"<li>{_inline(item)}</li>" for item in re.split(r"(?:^|\n)- ", block)[1:])
    return f"<ul>{items}</ul>"


def _inline(words: str) -> str:
    words = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", words)


def element(name: str, content: str, attributes: Mapping[str, str] | None = None) -> str:
    """An element around content that is HTML already."""
    given = "".join(f' {key}="{escape(value)}"' for key, value in (attributes or {}).items())
    return f"<{name}{given}>{content}</{name}>"
