"""The texts and the style of the report, and how its figures are written."""

from __future__ import annotations

from typing import Any

_UNITS = ((86_400_000_000_000, "d"), (3_600_000_000_000, "h"), (60_000_000_000, "min"))


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def percent(part: float, whole: float) -> str:
    """A share that is 100 % only when nothing is missing."""
    if not whole:
        return "none"
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.999):.3f} %"


def duration(value_ns: int | None) -> str:
    """A duration with three significant digits and the unit that suits it."""
    if value_ns is None:
        return "-"
    size = abs(value_ns)
    for unit, name in _UNITS:
        if size >= 2 * unit:
            return f"{value_ns / unit:.3g} {name}"
    for unit, name in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if size >= unit * 0.9995:
            return f"{value_ns / unit:#.3g} {name}".replace(". ", " ")
    return f"{value_ns} ns"


def place(row: dict[str, Any]) -> str:
    """Where a message is, and its internal id."""
    partition = "" if row["partition"] is None else f"/{row['partition']}"
    return f"{row['topic']}{partition} {row['channel']} {row['internal_id']}"


STYLE = """
#groups td,#groups th{padding:4px 4.5px;font-size:11.5px}
thead tr:first-child th{text-align:center;border-bottom:0;padding-bottom:0}
td.name,#groups thead tr:last-child th:nth-child(-n+3),#slowest td:last-child,#slowest th:last-child,
#sources td:last-child,#sources th:last-child{text-align:left}
#slowest td:last-child{white-space:normal;min-width:340px}
"""

DEFINITIONS = """<dl>
<dt>message</dt><dd>A message is counted once for each channel that is known for its topic, in the window of time in
which it was published.</dd>
<dt>lost</dt><dd>Published, or delivered, and finished by no delivery, though the logs go on for the grace period after
it was published. Before that it is pending.</dd>
<dt>duplicates</dt><dd>Messages with more than one FIN in a channel.</dd>
<dt>order</dt><dd>Messages finished by their first delivery, after one with a higher internal id or offset in the same
partition and channel. Messages that were delivered again are neither judged nor compared with. Judged are
subscriptions that tell offsets, ordered and advanced ones, unless the report was asked for more or less.</dd>
<dt>delivered again</dt><dd>By what ended the delivery before: REQ, a timeout, or unknown, when no record says it: the
consumer died, or its connection did, or its FIN did not arrive.</dd>
<dt>end to end</dt><dd>From when the server stored the message, by its clock, to its first FIN, by the consumer's.</dd>
<dt>in queue</dt><dd>From then to the first recorded receipt by a consumer.</dd>
<dt>handling</dt><dd>From receipt to FIN, of the delivery that was finished first.</dd>
<dt>percentiles</dt><dd>Values that occurred, by rank: exact up to 10,000 messages, beyond that off by at most one rank
in 10,000.</dd>
<dt>clocks</dt><dd>A message that was received, or acknowledged, more than a millisecond before it was published shows
that a clock is behind that of the nsqd, by that much at least. Durations are shown as measured.</dd>
</dl>"""
