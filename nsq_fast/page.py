"""How pages for people look: light or dark as their reader prefers, with nothing from outside. No I/O."""

from __future__ import annotations

# Name -> (light, dark). ``colour1`` to ``colour4`` are those of series and of pieces of bars.
COLOURS = {
    "paper": ("#fbfbfa", "#14171c"),
    "card": ("#ffffff", "#1b2027"),
    "ink": ("#1d2430", "#e6e9ee"),
    "soft": ("#5b6472", "#a3acba"),
    "line": ("#dfe3e8", "#303743"),
    "grid": ("#c9cfd8", "#465061"),
    "bad": ("#a3271c", "#ff7b72"),
    "badpaper": ("#fef0ee", "#3a1f1f"),
    "fine": ("#146a47", "#6ccf9c"),
    "colour1": ("#0061a8", "#2f81f7"),
    "colour2": ("#c77700", "#e3b341"),
    "colour3": ("#8a3ffc", "#d2a8ff"),
    "colour4": ("#30363d", "#6e7681"),
}
# Lines are told apart by these as well; SVG's stroke-dasharray.
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "1 5")


def variables() -> str:
    """The colours as CSS variables, light and dark."""

    def block(which: int) -> str:
        return "".join(f"--{name}:{shades[which]};" for name, shades in COLOURS.items())

    return f":root{{color-scheme:light dark;{block(0)}}}\n@media(prefers-color-scheme:dark){{:root{{{block(1)}}}}}\n"


_LAYOUT = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}
main{max-width:1320px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0}header p{margin:4px 0 16px;color:var(--soft)}
h2{font-size:18px;margin:36px 0 10px}h3{font-size:15px;margin:18px 0 6px}
.conclusion{background:var(--card);border:1px solid var(--line);border-left:6px solid var(--fine);border-radius:8px;
padding:12px 16px;margin:0 0 14px}
.conclusion p{margin:0 0 4px}.conclusion p:first-child{font-size:18px;font-weight:600}
.conclusion.bad{border-left-color:var(--bad)}.conclusion.bad p:first-child{color:var(--bad)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0 16px}
table{border-collapse:collapse;font-size:12.5px;width:100%;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:4px 7px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:600}
td.bad{color:var(--bad);background:var(--badpaper);font-weight:600}td.fine{color:var(--fine)}
table.named td:first-child,table.named th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
table.words td,table.words th{text-align:left;white-space:normal}
figure{margin:0 0 10px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:12px;align-items:start}
svg{max-width:100%;height:auto;display:block}svg.chart{width:100%}
svg text{font-family:inherit;fill:var(--ink)}
@media(max-width:640px){main{padding:16px 12px 40px}}
@media print{body{background:#fff}.wide,figure{break-inside:avoid}}
"""
STYLE = variables() + _LAYOUT


def duration(microseconds: float) -> str:
    """A duration with the unit that suits it."""
    if microseconds < 1:
        return f"{microseconds * 1000:g} ns"
    for size, unit in ((1e3, "µs"), (1e6, "ms")):
        if microseconds < size:
            return f"{microseconds / size * 1e3:g} {unit}"
    return f"{microseconds / 1e6:g} s"
