"""How pages look: colours for light and dark, and a layout that holds from a telephone to a wide screen.

The four colours keep apart for people who see red and green alike, and each also comes with a pattern of its own, so
that nothing is said by colour alone. Each has three times the lightness of the card it is drawn on, or a third; texts
have four and a half times.
"""

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
code{font-size:.92em}
.conclusion{background:var(--card);border:1px solid var(--line);border-left:6px solid var(--fine);border-radius:8px;
padding:12px 16px;margin:0 0 14px}
.conclusion p{margin:0 0 4px}.conclusion p:first-child{font-size:18px;font-weight:600}
.conclusion.bad{border-left-color:var(--bad)}.conclusion.bad p:first-child{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(138px,1fr));gap:10px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tiles span,.tiles small{display:block;color:var(--soft);font-size:12.5px}
.tiles b{font-size:22px;font-variant-numeric:tabular-nums}
.tiles .bad{background:var(--badpaper);border-color:var(--bad)}.tiles .bad b{color:var(--bad)}
.tiles .fine b{color:var(--fine)}
.note{border-left:3px solid var(--colour2);padding:2px 10px;margin:12px 0 0;color:var(--soft)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0 16px}
table{border-collapse:collapse;font-size:12.5px;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 7px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:600}
td[colspan]{text-align:left;white-space:normal}
td.bad{color:var(--bad);background:var(--badpaper);font-weight:600}td.fine{color:var(--fine)}td.zero{color:var(--soft)}
table.named td:first-child,table.named th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
table{overflow-wrap:normal}table.words td,table.words th{text-align:left;white-space:normal}
figure{margin:0 0 10px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
figcaption{font-weight:600;font-size:13.5px;margin-bottom:6px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:12px;align-items:start}
svg{max-width:100%;height:auto;display:block}svg.chart{width:100%}
svg text{font-family:inherit;fill:var(--ink)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:0 0 6px;padding:0;font-size:12.5px}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{flex:none}.legend i{width:14px;height:14px;flex:none}
.bar{display:grid;grid-template-columns:minmax(0,15em) minmax(0,1fr) minmax(0,13em);gap:2px 12px;align-items:center;
margin:5px 0;font-size:13px}
.bar b{font-weight:700}.bar .value{font-variant-numeric:tabular-nums}
.track{position:relative;display:flex;height:16px}
.track i{height:100%;flex:none}
.kind1{background:var(--colour1)}
.kind2{background:repeating-linear-gradient(45deg,var(--colour2) 0 5px,var(--card) 5px 7px)}
.kind3{background:repeating-linear-gradient(-45deg,var(--colour3) 0 3px,var(--card) 3px 6px)}
.kind4{background:repeating-linear-gradient(90deg,var(--colour4) 0 2px,var(--card) 2px 5px)}
.kind5{background:var(--bad)}.kind6{background:var(--soft)}
.track u{position:absolute;top:4px;height:8px;border:solid var(--ink);border-width:0 1.5px;opacity:.85}
.track u::after{content:"";position:absolute;left:0;right:0;top:3px;height:1.5px;background:var(--ink)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 16px;font-size:14px}dt{font-weight:600}
dd{margin:0;color:var(--soft)}
@media(max-width:640px){main{padding:16px 12px 40px}dl{display:block}dd{margin-bottom:8px}
.bar{grid-template-columns:minmax(0,1fr) auto}.bar .label,.bar .track{grid-column:1/-1}.bar .track{order:2}
.bar .label{grid-column:1/2}.bar .value{grid-column:2/3;text-align:right;max-width:55vw}
svg.chart text{font-size:15px}svg.chart .every-other{display:none}}
@media print{body{background:#fff}.wide,figure{break-inside:avoid}}
"""
STYLE = variables() + _LAYOUT
