"""Words for people: what a peer said, made safe to show (on one line, without control characters, of bounded length);
and a number with its noun, or its unit.
"""

from __future__ import annotations

MAX_LENGTH = 500


def printable(said: str | bytes, limit: int = MAX_LENGTH) -> str:
    """Text of a peer for a log record, the message of an exception or a terminal.

    Whatever is not printable is escaped, so that it can neither begin a line of its own nor steer a terminal. What is
    longer than ``limit`` is cut, and ends with the number of characters (of bytes, if it came as bytes) left out.
    """
    shown = said[:limit]
    text = shown if isinstance(shown, str) else shown.decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    left_out = len(said) - len(shown)
    return f"{text}... ({left_out} more)" if left_out else text


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 message``, ``2,000 messages``; ``plural`` where an s does not make it: ``2 queries``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def seconds(value: float) -> str:
    """``0.25 s``, ``12.3 s``, ``10,800 s``: three digits, and no power of ten."""
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
