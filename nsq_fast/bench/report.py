"""What is shown of a run: tables of text for the terminal, charts, one HTML file that stands alone, the page for the
documentation, figures for README and tuning.

Everything is computed from the file of the run; nothing is written by hand but the method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nsq_fast.errors import ConfigError
from nsq_fast.page import STYLE
from nsq_fast.printable import printable

from . import charts
from .clients import CORE_FLOOR, OURS
from .counting import INSTRUCTIONS, SYSCALLS
from .figures import COUNTED, METRICS, figure, limit_of, quantile, shown, value_of
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


def markdown(head: Sequence[str], body: Iterator[list[str]]) -> str:
    """A table for Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


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
        return f"{name}/message" if name in COUNTED else name
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
        if bars := _bars(scenario, metric):
            yield charts.bars(_title(metric), bars)
    if curves := list(_curves(scenario)):
        yield charts.by_share("latency, by the share of messages that were as fast", curves)


def pictures(run: Run) -> Iterator[tuple[str, str]]:
    """The charts of the documentation: the names of their files, and SVG."""
    for name, title, bars in _docs_charts(run):
        yield name, charts.bars(title, bars, alone=True)


def _docs_charts(run: Run) -> Iterator[tuple[str, str, list[charts.Bar]]]:
    for name, metric in DOCS_CHARTS:
        scenario = run.scenario(name)
        if scenario and (bars := _bars(scenario, metric)):
            yield f"{name}-{metric}.svg", f"{title_of(scenario)}: {_title(metric)}", bars


def _title(metric: str) -> str:
    about = METRICS[metric]
    unit = "" if about.unit == about.title else f", {about.unit}"
    return f"{about.title}{unit} ({'more' if about.more_is_better else 'less'} is better)"


def _bars(scenario: Scenario, metric: str) -> list[charts.Bar]:
    found = []
    for result in scenario.clients:
        value = value_of(result, metric, scenario.settings.size)
        if value is not None:
            is_ours = result.client.startswith(OURS)
            found.append(charts.Bar(result.client, value.median, shown(value, metric), value.low, value.high, is_ours))
    return found


def _curves(scenario: Scenario) -> Iterator[charts.Line]:
    for result in scenario.clients:
        shares = sorted({share for each in result.rounds for share, _ in each.latency_us})
        points = []
        for share in shares:
            read = quantile(share)
            values = [value for each in result.rounds if (value := read(each, 0)) is not None]
            points.append((share, figure(values).median))
        if points:
            yield charts.Line(result.client, points)


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
  One that is still not known says so, with the range it is in.
- Spark runs with two threads. Its floor is the same query over Arrow batches that were ready before; of a write, two
  processes without Spark that publish ready bodies. Client CPU is that of its JVM and its Python processes. JVMs are
  warmed up, but for the first table of a session; a stream is measured from the end of its first micro-batch.
- Scenarios that are held against each other, from one connection to a hundred, take turns in the same way.
- CPU is user and system time of the client's process, over messages. The server's is read from /proc at the same
  moments.
- *speed*, at the top, is how fast the machine was in between, before each scenario. Where it is another, so is all that
  is given in microseconds or messages a second.
- *scheduling* is `real time` where the run was started with `chrt -r 1`, which its processes inherit: the others of the
  machine then wait for them, and ratios vary less. Unless `sysctl kernel.sched_rt_runtime_us` is -1, Linux stops such
  processes for up to 50 ms of a second, which latencies show.
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

The compiled core alone is measured by `make bench`, with pytest-benchmark.

What it does not show: other machines, a network (all is on loopback, client and server share the cores), disks (the
server keeps its queue in memory), handlers that do work, clusters under failure. Absolute figures are those of this
machine on that day; carry only the ratios elsewhere. Where the limit was not the client, messages/s compares what the
server and the client did together, and CPU per message is the figure that tells clients apart.
"""


def html(run: Run) -> str:
    """The report as one HTML document, without anything from outside: what follows from it first, the method last."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise ConfigError("the report is made by Jinja2: pip install 'nsq-fast[report]'") from error
    template = Environment(loader=PackageLoader(__package__, ""), autoescape=True).get_template("report.jinja")
    goals = [each for each in judge(run) if each.verdict != "not measured"]
    said = list(conclusion(run)) or ["nsq_fast was not measured."]
    if goals:
        said.append(f"{sum(each.verdict == 'met' for each in goals)} of {len(goals)} goals are met.")
    page: str = template.render(
        style=STYLE,
        about=run.about,
        conclusion=said,
        goals=[(each.what, each.target, each.actual, each.verdict) for each in goals],
        scenarios=[
            {
                "title": title_of(scenario),
                "made_on": _made_on(scenario),
                "charts": list(_charts_of(scenario)),
                "head": header(scenario),
                "rows": list(rows(scenario, run.about.cores)),
            }
            for scenario in run.scenarios
        ],
        made_with=list(about_rows(run)),
        method=METHOD.strip(),
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
    rounds = scenario.settings.rounds
    return f"{scenario.server}, {rounds} round{'' if rounds == 1 else 's'}"


def docs(run: Run) -> str:
    """The page of the documentation, as Markdown; the charts are beside it, in ``charts``."""
    parts = [
        "# Performance",
        *(f"![{title}](charts/{name})" for name, title, _ in _docs_charts(run)),
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
