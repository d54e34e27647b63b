"""The summary of a run as lines of at most 80 characters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .run import Outcome

WIDTH = 80
_COLUMN = 11


def render(outcome: Outcome) -> str:
    """The table of a run, its violations, and the verdict."""
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"{outcome.name}: {outcome.seconds:,.0f} s, seed {outcome.seed}"
    yield "-" * WIDTH
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.faults.items())) or "none"
    yield from _folded("faults", faults)
    yield from _folded("publishes", ", ".join(f"{count:,} {what}" for what, count in outcome.publishes.items()))
    yield from _folded("garbled", f"{outcome.garbled:,} deliveries of a changed body, each handed back")
    if outcome.resources:
        first, last = outcome.resources[0], outcome.resources[-1]
        yield from _folded(
            "resources",
            f"{first.rss >> 20} -> {last.rss >> 20} MiB, {first.fds} -> {last.fds} file descriptors, "
            f"{first.greenlets} -> {last.greenlets} greenlets",
        )
    yield ""
    columns = next(iter(outcome.channels.values()), {})
    yield f"{'channel':<20}" + "".join(f"{column:>{_COLUMN}}" for column in columns)
    for channel, row in outcome.channels.items():
        yield f"{channel:<20}" + "".join(f"{value:>{_COLUMN},}" for value in row.values())
    yield from _folded("", "forgiven: not finished by anybody when the only nsqd that may have had them was killed")
    yield ""
    for violation in outcome.violations:
        yield from textwrap.wrap(f"VIOLATED  {violation}", WIDTH, subsequent_indent=" " * 10)
    yield "PASS" if outcome.passed else "INTERRUPTED" if outcome.is_interrupted else "FAIL"


def _folded(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name:<12}{text}", WIDTH, subsequent_indent=" " * 12, drop_whitespace=True)
