"""Charts by matplotlib, as SVG that is light or dark as its reader prefers: bars with their spread, and curves.

A chart ``alone`` is a file of its own, and has the colours in it; without, they are those of the page around it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from io import StringIO
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError
from nsq_fast.page import COLOURS, DASHES, duration, variables

_WIDTH = 5.0  # inches, of 72 units of a drawing: letters of 12 can be read on a telephone, too
_BAR = 0.28
_SERIES = tuple(f"colour{number}" for number in range(1, 5))
_SHARES = (50.0, 90.0, 99.0, 99.9, 100.0)


class Bar(NamedTuple):
    """A figure, its text, and the range that a mark shows."""

    label: str
    value: float
    text: str
    low: float
    high: float
    is_ours: bool


class Line(NamedTuple):
    label: str
    points: Sequence[tuple[float, float]]


def _new(height: float) -> Any:
    """An empty figure, and its axes. Raises ConfigError."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("charts are drawn by matplotlib: pip install 'nsq-fast[report]'") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    ink, card = COLOURS["ink"][0], COLOURS["card"][0]
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "nsq_fast", "font.family": "sans-serif", "font.size": 12}
        | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
        | dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), card)
    )
    return pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")


def _svg(figure: Any, title: str, alone: bool) -> str:
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left", wrap=True)
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    pyplot.close(figure)
    text = out.getvalue()
    for name in ("ink", "card", "soft", *_SERIES):
        text = text.replace(f": {COLOURS[name][0]}", f": var(--{name})")
    text = text[text.index("<svg") :].replace("<svg", '<svg class="chart" role="img"', 1)
    if alone:
        text = re.sub("<defs>", f"<style>{variables()}</style><defs>", text, count=1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def bars(title: str, rows: Sequence[Bar], alone: bool = False) -> str:
    """Bars on one scale from 0, the first at the top."""
    figure, axes = _new(0.6 + _BAR * len(rows))
    drawn = axes.barh(
        range(len(rows)),
        [row.value for row in rows],
        xerr=[[row.value - row.low for row in rows], [row.high - row.value for row in rows]],
        color=[COLOURS[_SERIES[0] if row.is_ours else "soft"][0] for row in rows],
        ecolor=COLOURS["ink"][0],
    )
    axes.bar_label(drawn, [row.text for row in rows], padding=6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.is_ours else "normal")
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    return _svg(figure, title, alone)


def _draw(axes: Any, lines: Sequence[Line]) -> None:
    """Lines are told apart by their dashes as well as by their colours."""
    for number, line in enumerate(lines):
        dash = DASHES[number % len(DASHES)]
        look = "-" if dash == "none" else (0, [float(part) for part in dash.split()])
        colour = COLOURS[_SERIES[number % len(_SERIES)]][0]
        axes.plot(*zip(*line.points, strict=True), color=colour, linestyle=look, label=line.label)


def over_seconds(title: str, unit: str, lines: Sequence[Line], alone: bool = False) -> str:
    figure, axes = _new(4.0 + 0.2 * len(lines))
    _draw(axes, lines)
    axes.set(ylabel=unit, xlabel="seconds", ylim=(0, None))
    figure.legend(loc="outside lower left", frameon=False)
    return _svg(figure, title, alone)


def _nines(share: float) -> float:
    return -math.log10(max(1 - share / 100, 1e-4))


def by_share(title: str, lines: Sequence[Line]) -> str:
    """Microseconds over the share of messages that were as fast, in percent; each nine takes as much room."""
    figure, axes = _new(3.0 + 0.2 * len(lines))
    _draw(axes, [Line(line.label, [(_nines(share), value) for share, value in line.points]) for line in lines])
    axes.set_xticks([_nines(share) for share in _SHARES], [f"{share:g} %" for share in _SHARES[:-1]] + ["max"])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: duration(value))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False)
    return _svg(figure, title, alone=False)
