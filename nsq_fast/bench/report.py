"""What is shown of a run: tables of text for the terminal, charts, one HTML file that stands alone, the page for the
documentation, figures for README and tuning.

Everything is computed from the file of the run; nothing is written by hand but the method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError, counted, printable
from nsq_fast.page import COLOURS, DASHES, STYLE, duration, variables

from .clients import CORE_FLOOR, OURS
from .results import (
    INSTRUCTIONS,
    METRICS,
    ClientResult,
    Run,
    Scenario,
    figure,
    limit_of,
    quantile,
    shown,
    value_of,
)
from .runner import explained
from .suite import Judged, figure_in, floor_of, judge, titles

_CLOSED = (
    "rate", "rate/floor", "spread", "megabytes", "cpu", "cpu/floor", INSTRUCTIONS, f"{INSTRUCTIONS}/floor",
    "server_cpu", "p50", "p99", "peak", "limit",
)  # fmt: skip
_LATENCY = ("rate", "cpu", "server_cpu", "p50", "p95", "p99", "p999", "max", "peak", "limit")
_START = ("package", "import", "import/floor", "first", "first/floor", "peak")
_IDLE = ("busy", "peak")
_LONGEST_REASON = 100
_OF_FLOOR = "/floor"


def table(scenario: Scenario, cores: int) -> Iterator[list[str]]:
    """The head, then a row for each client; one that failed says why."""
    columns = _columns(scenario)
    yield ["client", *map(_head, columns)]
    for result in scenario.clients:
        if result.rounds:
            yield [result.client, *(_cell(scenario, result, column, cores) for column in columns)]
        else:
            yield [result.client, f"failed: {reason_of(result)}", *([""] * (len(columns) - 1))]


def reason_of(result: ClientResult) -> str:
    """Why a client failed, in a line: the last one of what it wrote is that of the exception."""
    lines = result.failure.splitlines() or ["no reason was given"]
    return printable(lines[-1].strip(), _LONGEST_REASON)


def markdown(head: Sequence[str], *body: Sequence[str]) -> str:
    """A table for Markdown; all columns but the first are numbers."""
    line, *lines = (f"| {' | '.join(row)} |" for row in (head, *body))
    return "\n".join([line, f"|---|{'---:|' * (len(head) - 1)}", *lines])


def _columns(scenario: Scenario) -> list[str]:
    settings = scenario.settings
    wanted = {"idle": _IDLE, "start": _START}.get(settings.kind, _LATENCY if settings.rate else _CLOSED)
    return [column for column in wanted if _is_measured(scenario, column)]


def _is_measured(scenario: Scenario, column: str) -> bool:
    if column in ("spread", "limit"):
        return True
    if column.endswith(_OF_FLOOR) and (_floor_in(scenario) is None or len(scenario.clients) == 1):
        return False
    name = column.removesuffix(_OF_FLOOR)
    return any(value_of(result, name, 1) is not None for result in scenario.clients)


def _head(column: str) -> str:
    name = column.removesuffix(_OF_FLOOR)
    if name != column:
        return f"{METRICS[name].title if name in METRICS else name}, of the floor"
    if name not in METRICS:
        return f"{name}/message" if name == INSTRUCTIONS else name
    metric = METRICS[name]
    return metric.title if metric.title == metric.unit else f"{metric.title}, {metric.unit}"


def _cell(scenario: Scenario, result: ClientResult, column: str, cores: int) -> str:
    if column == "spread":
        rate = value_of(result, "rate")
        return f"{rate.spread:.0%}" if rate and len(result.rounds) > 1 else "-"
    if column == "limit":
        return limit_of(result, cores)
    name, size = column.removesuffix(_OF_FLOOR), scenario.settings.size
    value = value_of(result, name, size)
    if name == column:
        return shown(value, name)
    floor = _floor_in(scenario)
    unit = value_of(floor, name, size) if floor else None
    return f"{value.over(unit):.2f}x" if value and unit and unit.median else "-"


def _floor_in(scenario: Scenario) -> ClientResult | None:
    return scenario.client(floor_of(scenario.name))


_DRAWN = ("rate", "cpu")
_DRAWN_OF = {"idle": ("busy", "peak"), "start": ("import", "first")}


def title_of(scenario: Scenario) -> str:
    """What a scenario is called for people."""
    return titles().get(scenario.name, scenario.name)


def _charts_of(scenario: Scenario) -> Iterator[str]:
    for metric in _DRAWN_OF.get(scenario.settings.kind, _DRAWN):
        if found := _bars(scenario, metric):
            yield bars(_title(metric), found)
    if curves := list(_curves(scenario)):
        yield by_share("latency, by the share of messages that were as fast", curves)


def pictures(run: Run) -> Iterator[tuple[str, str]]:
    """The charts of the documentation: the names of their files, and SVG."""
    for name, title, found in _docs_charts(run):
        yield name, bars(title, found, alone=True)


def _docs_charts(run: Run) -> Iterator[tuple[str, str, list[Bar]]]:
    for name, metric in DOCS_CHARTS:
        scenario = run.scenario(name)
        if scenario and (found := _bars(scenario, metric)):
            yield f"{name}-{metric}.svg", f"{title_of(scenario)}: {_title(metric)}", found


def _title(metric: str) -> str:
    about = METRICS[metric]
    unit = "" if about.unit == about.title else f", {about.unit}"
    return f"{about.title}{unit} ({'more' if about.more_is_better else 'less'} is better)"


def _bars(scenario: Scenario, metric: str) -> list[Bar]:
    found = []
    for result in scenario.clients:
        value = value_of(result, metric, scenario.settings.size)
        if value is not None:
            is_ours = result.client.startswith(OURS)
            found.append(Bar(result.client, value.median, shown(value, metric), value.low, value.high, is_ours))
    return found


def _curves(scenario: Scenario) -> Iterator[Line]:
    for result in scenario.clients:
        shares = sorted({share for each in result.rounds for share, _ in each.latency_us})
        points = []
        for share in shares:
            read = quantile(share)
            values = [value for each in result.rounds if (value := read(each, 0)) is not None]
            points.append((share, figure(values).median))
        if points:
            yield Line(result.client, points)


FIGURES = re.compile(r"(<!-- figures:begin[^>]*-->\n).*?(<!-- figures:end -->)", re.DOTALL)
DOCS_CHARTS = (("consume", "rate"), ("consume", "cpu"))
_README_ROWS = (
    ("consume, one FIN each: messages/s", "consume", "rate"),
    ("consume: client CPU per message", "consume", "cpu"),
    ("publish one at a time: messages/s", "publish-single", "rate"),
    ("publish, 100 callers: messages/s", "publish-concurrent", "rate"),
    ("publish to handler at 10,000/s: p99", "latency", "p99"),
)
_TUNING_ROWS = (
    ("consume, `max_in_flight=10`", "in-flight-10", OURS),
    ("consume, `max_in_flight=100`", "in-flight-100", OURS),
    ("consume, `max_in_flight=1000`", "in-flight-1000", OURS),
    ("consume, `max_in_flight=10000`", "in-flight-10000", OURS),
    ("the same from 100 connections: 100 RDYs", "connections-100", OURS),
    ("handlers that wait, `concurrency=100`", "sleep", OURS),
    ("consume, `batch_handler`", "consume", f"{OURS} batches"),
    ("publish from 100 greenlets", "publish-concurrent", OURS),
    ("the same with `linger`", "publish-concurrent", f"{OURS} linger"),
    ("10,000 messages/s, each sent at once", "latency", OURS),
    ("the same, nsqd's output buffer on", "latency-buffered", OURS),
)
_TUNING_METRICS = ("rate", "cpu", "p50", "p99")
_README_CLIENTS = ("go-nsq", "asyncnsq", "ansq", "pynsq", "gnsq")
METHOD = Path(__file__).with_name("method.md").read_text(encoding="utf-8").strip()


def html(run: Run) -> str:
    """The report as one HTML document, without anything from outside: what follows from it first, the method last."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise ConfigError("the report is made by Jinja2: pip install 'nsq-fast[report]'") from error
    template = Environment(loader=PackageLoader(__package__, ""), autoescape=True).get_template("report.jinja")
    measured = [row for row in judge(run) if row.verdict != "not measured"]
    said = list(conclusion(run))
    if measured:
        said.append(f"{sum(row.verdict == 'met' for row in measured)} of {len(measured)} goals are met.")
    page: str = template.render(
        style=STYLE,
        about=run.about,
        conclusion=said,
        goals_head=Judged._fields,
        goals=measured,
        scenarios=[
            {
                "title": title_of(scenario),
                "made_on": _made_on(scenario),
                "charts": list(_charts_of(scenario)),
                "table": list(table(scenario, run.about.cores)),
            }
            for scenario in run.scenarios
        ],
        made_with=list(about_rows(run)),
        method=re.sub(r"(?<=\S)\n *(?=[^-\s])", " ", METHOD),  # its lines are as long as those of a file
    )
    return page


def conclusion(run: Run) -> Iterator[str]:
    """What the run says of nsq_fast, in sentences: how it does what, and what that is of what others do."""
    for title, scenario, metric in _README_ROWS:
        ours = figure_in(run, scenario, OURS, metric)
        if ours is None:
            continue
        others = [(other, _times(run, scenario, metric, other)) for other in _README_CLIENTS]
        beside = ", ".join(f"{times} than {other}" for other, times in others if times != "-")
        what = title.removesuffix(": messages/s")
        yield f"{what[0].upper()}{what[1:]}: {shown(ours, metric)}{_unit(metric)}" + (
            f"; better by {beside}." if beside else "."
        )
    of_many = [each for each in run.scenarios if any(it.processes > 1 for found in each.clients for it in found.rounds)]
    for each in of_many:
        yield f"{each.name}: {next(explained(each, run.about.cores))}"
    if not (of_many or any(each.client(OURS) for each in run.scenarios)):
        yield f"{OURS} was not measured."


def _unit(metric: str) -> str:
    return f" {METRICS[metric].unit.removesuffix('/message')}"


def about_rows(run: Run) -> Iterator[list[str]]:
    """What a run was made with and on."""
    about = run.about
    clients = ", ".join(f"{name} {version}".strip() for name, version in about.clients.items())
    yield ["date", about.date]
    yield ["nsq_fast", f"{about.nsq_fast}, commit {about.git_commit or 'unknown'}"]
    yield ["machine", f"{about.cpu}, {about.cores} cores, {about.memory_mib:,} MiB, {about.system}"]
    speeds = [scenario.loop_ms for scenario in run.scenarios if scenario.loop_ms]
    if speeds:
        speed = figure(speeds)
        yield ["speed", f"a million additions in Python: {speed.median:.0f} ms ({speed.low:.0f} to {speed.high:.0f})"]
    if about.scheduling:
        yield ["scheduling", about.scheduling]
    yield ["Python, gevent", f"{about.python}, {about.gevent}"]
    yield ["clients", clients]


def _made_on(scenario: Scenario) -> str:
    return f"{scenario.server}, {counted(scenario.settings.rounds, 'round')}"


def docs(run: Run) -> str:
    """The page of the documentation, as Markdown; the charts are beside it, in ``charts``."""
    parts = [
        "# Performance",
        *(f"![{title}](charts/{name})" for name, title, _ in _docs_charts(run)),
        "Written by `nsq-fast bench report`; change the harness, not this page.",
        markdown(["run", ""], *about_rows(run)),
        "## Method",
        METHOD,
        "## Goals",
        markdown(Judged._fields, *judge(run)),
    ]
    for scenario in run.scenarios:
        parts += [f"## {title_of(scenario)}", f"{_made_on(scenario)}.", markdown(*table(scenario, run.about.cores))]
    return "\n\n".join(parts) + "\n"


def readme_block(run: Run) -> str:
    """The figures for the README: how many times better ours is than each other client, in one run."""
    head = ["nsq_fast, times better (below 1: worse) than", *_README_CLIENTS]
    body = [
        [title, *(_times(run, scenario, metric, other) for other in _README_CLIENTS)]
        for title, scenario, metric in _README_ROWS
    ]
    server = run.scenarios[0].server if run.scenarios else "no server"
    ours, floor = (figure_in(run, "consume", client, "cpu") for client in (OURS, CORE_FLOOR))
    lines = [markdown(head, *body), ""]
    if ours and floor:
        lines.append(
            f"Consuming takes {ours / floor:.1f} times the CPU of the compiled core alone on a blocking socket."
        )
    lines.append(
        f"One run on one machine against {server}, 200-byte messages; method and all figures: [docs/performance.md]."
    )
    return "\n".join(lines) + "\n\n[docs/performance.md]: docs/performance.md\n"


def _times(run: Run, scenario: str, metric: str, other: str) -> str:
    ours, theirs = figure_in(run, scenario, OURS, metric), figure_in(run, scenario, other, metric)
    if not ours or not theirs:
        return "-"
    ratio = ours / theirs if metric == "rate" else theirs / ours
    return f"{ratio:.1f}x"


def tuning_block(run: Run) -> str:
    """The figures for the page about tuning: what ours does with one option or another."""
    head = ["", "messages/s", *(f"{METRICS[each].title}, {METRICS[each].unit}" for each in _TUNING_METRICS[1:])]
    body = [
        [title, *(shown(figure_in(run, scenario, client, metric), metric) for metric in _TUNING_METRICS)]
        for title, scenario, client in _TUNING_ROWS
    ]
    return markdown(head, *body) + "\n"


def fill(text: str, block: str) -> str:
    """A page with the figures between its marks replaced. Raises ConfigError when the marks are missing."""
    if not FIGURES.search(text):
        raise ConfigError("the file has no <!-- figures:begin --> and <!-- figures:end -->")
    return FIGURES.sub(lambda marks: f"{marks[1]}{block}{marks[2]}", text)


# Charts: by matplotlib, as SVG that is light or dark as its reader prefers. A chart ``alone`` is a file of its own, and
# has the colours in it; without, they are those of the page around it.

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
