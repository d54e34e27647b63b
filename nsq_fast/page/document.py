"""A document of HTML that stands alone, and its tables."""

from __future__ import annotations

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


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table of texts; without a head where that is empty."""
    lines = ["<table>"]
    if any(head):
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return "\n".join([*lines, "</table>"])


def element(name: str, content: str, attributes: Mapping[str, str] | None = None) -> str:
    """An element around content that is HTML already."""
    given = "".join(f' {key}="{escape(value)}"' for key, value in (attributes or {}).items())
    return f"<{name}{given}>{content}</{name}>"
