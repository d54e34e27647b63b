"""What is shown of a run: tables of text for the terminal, charts, one HTML file that stands alone, the page for the
documentation, figures for README and tuning.

Everything is computed from the file of the run; nothing is written by hand but the method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from nsq_fast.errors import ConfigError
from nsq_fast.page import OTHERS, STYLE, Bar, Line, Piece, bars, by_share, document, picture, prose, table
from nsq_fast.printable import printable

from .clients import CORE_FLOOR, OURS
from .counting import INSTRUCTIONS, SYSCALLS
from .figures import METRICS, Figure, figure, limit_of, quantile, shown, value_of
from .results import ClientResult, Run, Scenario
from .suite import figure_in, floor_of, judge, titles

_CLOSED = (
    "rate", "rate/floor", "spread", "megabytes", "cpu", "cpu/floor", INSTRUCTIONS, f"{INSTRUCTIONS}/floor",
    "server_cpu", SYSCALLS, "p50", "p99", "peak", "limit",
)  # fmt: skip
_LATENCY = ("rate", "cpu", "server_cpu", "p50", "p95", "p99", "p999", "max", "peak", "limit")
_START = ("package", "import", "import/floor", "first", "first/floor", "peak")
_IDLE = ("busy", "peak")
_LONGEST_REASON = 100
_OF_FLOOR = "/floor"
_COUNTED = (INSTRUCTIONS, SYSCALLS)
_HEADS = {"spread": "spread", "limit": "limit", **{name: f"{name}/message" for name in _COUNTED}}


def header(scenario: Scenario) -> list[str]:
    return ["client", *(_head(column) for column in _columns(scenario))]


def rows(scenario: Scenario, cores: int) -> Iterator[list[str]]:
    """A row for each client; one that failed says why."""
    columns = _columns(scenario)
    for result in scenario.clients:
        if result.rounds:
            yield [result.client, *(_cell(scenario, result, column, cores) for column in columns)]
        else:
            yield [result.client, f"failed: {reason_of(result)}", *([""] * (len(columns) - 1))]


def reason_of(result: ClientResult) -> str:
    """Why a client failed, in a line: the last one of what it wrote is that of the exception."""
    lines = result.failure.splitlines() or ["no reason was given"]
    return printable(lines[-1].strip(), _LONGEST_REASON)


def core_rows(run: Run) -> Iterator[list[str]]:
    """Group, workload, nanoseconds a message, spread."""
    for each in run.core:
        value = figure(each.ns_per_message)
        yield [
            each.group,
            each.name,
            f"{value.median:,.1f}",
            f"{value.spread:.0%}" if len(each.ns_per_message) > 1 else "-",
        ]


CORE_HEADER = ["group", "workload", "ns/message", "spread"]


def markdown(head: Sequence[str], body: Iterator[list[str]]) -> str:
    """A table for Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def _columns(scenario: Scenario) -> list[str]:
    settings = scenario.settings
    wanted = {"idle": _IDLE, "start": _START}.get(settings.kind, _LATENCY if settings.rate else _CLOSED)
    return [column for column in wanted if _is_measured(scenario, column)]


def _is_measured(scenario: Scenario, column: str) -> bool:
    if (name := column.removesuffix(_OF_FLOOR)) in _COUNTED:
        return any(name in result.counted for result in scenario.clients)
    if column in _HEADS:
        return True
    if column.endswith(_OF_FLOOR):
        return _floor_in(scenario) is not None and len(scenario.clients) > 1
    return any(value_of(result, column, 1) is not None for result in scenario.clients)


def _head(column: str) -> str:
    if column in _HEADS:
        return _HEADS[column]
    if (name := column.removesuffix(_OF_FLOOR)) in _COUNTED:
        return f"{name}, of the floor"
    metric = METRICS[name]
    if column.endswith(_OF_FLOOR):
        return f"{metric.title}, of the floor"
    return metric.title if metric.title == metric.unit else f"{metric.title}, {metric.unit}"


def _cell(scenario: Scenario, result: ClientResult, column: str, cores: int) -> str:
    if column == "spread":
        rate = value_of(result, "rate")
        return f"{rate.spread:.0%}" if rate and len(result.rounds) > 1 else "-"
    if column == "limit":
        return limit_of(result, cores)
    if column in _COUNTED:
        value = result.counted.get(column)
        return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if column.endswith(_OF_FLOOR):
        return _of_floor(scenario, result, column.removesuffix(_OF_FLOOR))
    return shown(value_of(result, column, scenario.settings.size), column)


def _floor_in(scenario: Scenario) -> ClientResult | None:
    return scenario.client(floor_of(scenario.name))


def _of_floor(scenario: Scenario, result: ClientResult, metric: str) -> str:
    floor = _floor_in(scenario)
    if metric in _COUNTED:
        ours, of = result.counted.get(metric), floor.counted.get(metric) if floor else None
        return f"{ours / of:.2f}x" if ours and of else "-"
    unit = value_of(floor, metric, scenario.settings.size) if floor else None
    value = value_of(result, metric, scenario.settings.size)
    return f"{value.over(unit):.2f}x" if value and unit and unit.median else "-"


_DRAWN = ("rate", "cpu")
_DRAWN_OF = {"idle": ("busy", "peak"), "start": ("import", "first")}
_OURS = 1


def title_of(scenario: Scenario) -> str:
    """What a scenario is called for people."""
    return titles().get(scenario.name, scenario.name)


def charts_of(scenario: Scenario) -> Iterator[str]:
    """The figures of a scenario, as HTML."""
    for metric in _DRAWN_OF.get(scenario.settings.kind, _DRAWN):
        rows = _rows(scenario, metric)
        if rows:
            yield bars(_title(metric), rows)
    curves = list(_curves(scenario))
    if curves:
        yield by_share("latency, by the share of messages that were as fast", curves)


def picture_of(scenario: Scenario, metric: str) -> str:
    """Bars of one metric over the clients as an SVG that stands alone; empty where nobody has it."""
    rows = _rows(scenario, metric)
    return picture(f"{title_of(scenario)}: {_title(metric)}", rows) if rows else ""


def _title(metric: str) -> str:
    about = METRICS[metric]
    unit = "" if about.unit == about.title else f", {about.unit}"
    return f"{about.title}{unit} ({'more' if about.more_is_better else 'less'} is better)"


def _rows(scenario: Scenario, metric: str) -> list[Bar]:
    found = []
    for result in scenario.clients:
        value = value_of(result, metric, scenario.settings.size)
        if value is not None:
            found.append(_bar(result.client, value, shown(value, metric), result.client.startswith("nsq_fast")))
    return found


def _bar(label: str, value: Figure, text: str, is_ours: bool) -> Bar:
    pieces = [Piece(_OURS if is_ours else OTHERS, value.median)]
    return Bar(label, pieces, text, low=value.low, high=value.high, is_ours=is_ours)


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


def core_chart(run: Run) -> str:
    """Bars of the compiled core's workloads, as HTML; empty where they were not measured."""
    found = []
    for each in run.core:
        value = figure(each.ns_per_message)
        found.append(_bar(f"{each.group}: {each.name}", value, f"{value.median:,.1f} ns", True))
    return bars("nanoseconds a message (less is better)", found) if found else ""


FIGURES = re.compile(r"(<!-- figures:begin[^>]*-->\n).*?(<!-- figures:end -->)", re.DOTALL)
README_CHARTS = (("consume", "rate"), ("consume", "cpu"))
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
METHOD = """
How to repeat it: `nsq-fast bench suite --servers DIR --json run.json`, where DIR has an nsqd binary, then
`nsq-fast bench report run.json --docs docs/performance.md`. NSQ_FAST_PEER_PYTHON names an interpreter that has the
other Python clients; go-nsq is built where Go is.

- Each client is a process of its own, with the least program its manual suggests: a handler that counts, and an answer
  for each message. Clients take turns on the same server, in each of several rounds; a figure is the median of the
  rounds, the spread is their range as a share of it. The first tenth of a round is left out.
- A consumer finds its backlog on the server. How many messages a client gets is found by shorter rounds before, so that
  each works for about the same time.
- A *floor* does the same with the same server by the compiled core on a blocking socket, and nothing else. *of the
  floor* is a figure over that of the floor in the same run, so that a slow machine judges as a fast one does.
- A goal that is such a ratio takes the median of the ratios of the rounds. While that is not known to 10 %, by the
  order of the ratios and with a confidence of 90 %, the clients take further turns: at most 15, within `--patience`.
  One that is still not known says so, with the range it is in; `nsq-fast bench suite --more run.json` goes on with it.
- Spark runs with two threads. Its floor is the same query over Arrow batches that were ready before; of a write, two
  processes without Spark that publish ready bodies. Client CPU is that of its JVM and its Python processes. JVMs are
  warmed up, but for the first table of a session; a stream is measured from the end of its first micro-batch.
- Scenarios that are held against each other, from one connection to a hundred, take turns in the same way.
- CPU is user and system time of the client's process, over messages. The server's is read from /proc at the same
  moments.
- *speed*, at the top, is how fast the machine was in between, before each scenario. Where it is another, so is all that
  is given in microseconds or messages a second.
- *scheduling* is `real time` where the run was started with `chrt -r 1`, which its processes inherit: the others of the
  machine then wait for them, and ratios vary less.
- *limit* says what kept a client from being faster: `client`, it used a core or more; `machine`, client and server
  together used all cores; `server`, the server used a core or more; `waiting`, neither: they waited for each other.
- At a rate, messages are due at times fixed in advance, and latency counts from the time a message was due, so a stall
  counts for every message it delayed.
- *half of the peak rate* is half of what the slowest of the clients manages with 100 messages on their way.
- What an import takes is CPU time; the time to the first message begins with `start()`, lookup included.
- System calls are counted by perf (strace where perf cannot) as the difference of a long and a short run, and so are
  instructions, by valgrind, of the clients that goals compare. Instructions are those of the client without the
  system's. They do not depend on what else the machine does, so they tell clients apart that CPU time cannot; behind
  valgrind a client is so slow that a consumer always finds as much as it can read.

What it does not show: other machines, a network (all is on loopback, client and server share the cores), disks (the
server keeps its queue in memory), handlers that do work, clusters under failure. Absolute figures are those of this
machine on that day; carry only the ratios elsewhere. Where the limit was not the client, messages/s compares what the
server and the client did together, and CPU per message is the figure that tells clients apart.
"""


def html(run: Run) -> str:
    """The report as one HTML document, without anything from outside: what follows from it first, the method last."""
    title = "nsq_fast benchmark"
    about = run.about
    made = f"{about.date}, {about.cpu}, {about.cores} cores, {about.system}"
    parts = [
        f"<header><h1>{title}</h1><p>{escape(made)}</p></header>",
        _html_conclusion(run),
        *_html_goals(run),
        *_html_scenarios(run),
        *_html_core(run),
        "<h2>Made with</h2>",
        table(["", ""], about_rows(run), "words"),
        "<h2>Method</h2>",
        prose(METHOD),
    ]
    return document(title, STYLE, ["<main>", *parts, "</main>"])


def _html_conclusion(run: Run) -> str:
    judged = [each for each in judge(run) if each.verdict != "not measured"]
    missed = sum(each.verdict == "missed" for each in judged)
    lines = list(conclusion(run))
    if judged:
        lines.append(f"{len(judged) - missed} of {len(judged)} goals are met.")
    shown = "".join(f"<p>{escape(line)}</p>" for line in lines or ["nsq_fast was not measured."])
    return f'<section class="conclusion" id="conclusion">{shown}</section>'


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


def _html_goals(run: Run) -> Iterator[str]:
    judged = [each for each in judge(run) if each.verdict != "not measured"]
    if judged:
        yield '<h2>Goals</h2><div class="wide"><table class="words">'
        yield "<tr><th>what</th><th>target</th><th>actual</th><th>verdict</th></tr>"
        for each in judged:
            cells = "".join(f"<td>{escape(text)}</td>" for text in (each.what, each.target, each.actual))
            marked = {"met": "fine", "missed": "bad"}[each.verdict]
            yield f'<tr>{cells}<td class="{marked}">{each.verdict}</td></tr>'
        yield "</table></div>"


def _html_scenarios(run: Run) -> Iterator[str]:
    for scenario in run.scenarios:
        yield f"<h2>{escape(title_of(scenario))}</h2><p>{escape(_made_on(scenario))}</p>"
        yield f'<div class="pair">{"".join(charts_of(scenario))}</div>'
        yield table(header(scenario), rows(scenario, run.about.cores))


def _html_core(run: Run) -> Iterator[str]:
    if run.core:
        yield "<h2>The compiled core</h2>"
        yield core_chart(run)
        yield table(CORE_HEADER, core_rows(run))


def _made_on(scenario: Scenario) -> str:
    rounds = scenario.settings.rounds
    return f"{scenario.server}, {rounds} round{'' if rounds == 1 else 's'}"


def docs(run: Run) -> str:
    """The page of the documentation, as Markdown."""
    parts = [
        "# Performance",
        "Written by `nsq-fast bench report`; change the harness, not this page.",
        markdown(["run", ""], about_rows(run)),
        "## Method",
        METHOD.strip(),
    ]
    goals = [[each.what, each.target, each.actual, each.verdict] for each in judge(run)]
    parts += ["## Goals", markdown(["what", "target", "actual", "verdict"], iter(goals))]
    for scenario in run.scenarios:
        parts.append(f"## {title_of(scenario)}")
        parts.append(f"{_made_on(scenario)}.")
        parts.append(markdown(header(scenario), rows(scenario, run.about.cores)))
    if run.core:
        parts += ["## The compiled core", markdown(CORE_HEADER, core_rows(run))]
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
    lines = [markdown(head, iter(body)), ""]
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
    return markdown(head, iter(body)) + "\n"


def fill(text: str, block: str) -> str:
    """A page with the figures between its marks replaced. Raises ConfigError when the marks are missing."""
    if not FIGURES.search(text):
        raise ConfigError("the file has no <!-- figures:begin --> and <!-- figures:end -->")
    return FIGURES.sub(lambda marks: f"{marks[1]}{block}{marks[2]}", text)


def charts(run: Run) -> Iterator[tuple[str, str]]:
    """The charts that the README shows: the names of their files, and SVG."""
    for name, metric in README_CHARTS:
        scenario = run.scenario(name)
        chart = picture_of(scenario, metric) if scenario else ""
        if chart:
            yield f"{name}-{metric}.svg", chart + "\n"
