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
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1d2430;--soft:#667085;--line:#dfe3e8;--grid:#e4e7ec;
--bad:#b42318;--badpaper:#fef0ee;--fine:#18794e;--colour1:#2f6fde;--colour2:#e08a1e;--colour3:#d13c4b;--colour4:#7a5cd6}
@media(prefers-color-scheme:dark){:root{--paper:#14171c;--card:#1b2027;--ink:#e6e9ee;--soft:#98a2b3;--line:#303743;
--grid:#333b48;--bad:#ff8a80;--badpaper:#3a1f1f;--fine:#6ccf9c;--colour1:#6ea3ff;--colour2:#f0ac4e;--colour3:#ff7b87;
--colour4:#ab94ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1320px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0}header p{margin:4px 0 20px;color:var(--soft)}
h2{font-size:18px;margin:36px 0 10px}h3{font-size:15px;margin:18px 0 6px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(138px,1fr));gap:10px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tiles span,.tiles small{display:block;color:var(--soft);font-size:12.5px}
.tiles b{font-size:22px;font-variant-numeric:tabular-nums}
.tiles .bad{background:var(--badpaper);border-color:var(--bad)}.tiles .bad b{color:var(--bad)}
.tiles .fine b{color:var(--fine)}
.note{border-left:3px solid var(--colour2);padding:2px 10px;margin:12px 0 0;color:var(--soft)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0 16px}
table{border-collapse:collapse;font-size:12px;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 6px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:600}
thead tr:first-child th{text-align:center;border-bottom:0;padding-bottom:0}
td.name,#groups thead tr:last-child th:nth-child(-n+3){text-align:left}td.zero{color:var(--soft)}
td.bad{color:var(--bad);background:var(--badpaper);font-weight:600}
#slowest td:first-child,#slowest th:first-child,#slowest td:last-child,#slowest th:last-child,
#sources td:first-child,#sources th:first-child,#sources td:last-child,#sources th:last-child,
#lost td:first-child,#lost th:first-child,#duplicates td:first-child,#duplicates th:first-child,
#violations td:first-child,#violations th:first-child,#skews td:first-child,#skews th:first-child{text-align:left}
#slowest td:last-child{white-space:normal;min-width:340px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:12px}
svg{max-width:100%;height:auto;display:block}svg text{font-family:inherit}
figure.full{margin-bottom:10px;width:fit-content;max-width:100%}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 16px;font-size:14px}dt{font-weight:600}
dd{margin:0;color:var(--soft)}
@media(max-width:640px){dl{display:block}dd{margin-bottom:8px}}
@media print{body{background:#fff}.wide,figure{break-inside:avoid}}
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
