"""Reports of a run: one HTML file that stands alone, the page for the documentation, the figures for the README.

Everything is computed from the file of the run; nothing is written by hand but the method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from nsq_fast.errors import ConfigError
from nsq_fast.page.document import document, table

from .figures import figure
from .goals import CORE_FLOOR, OURS, figure_in, judge
from .pictures import charts_of, core_chart, title_of
from .results import Run
from .tables import CORE_HEADER, core_rows, header, markdown, rows

README_BLOCK = re.compile(r"(<!-- figures:begin[^>]*-->\n).*?(<!-- figures:end -->)", re.DOTALL)
README_CHARTS = (("consume", "rate"), ("consume", "cpu"))
_README_ROWS = (
    ("consume, one FIN each: messages/s", "consume", "rate"),
    ("consume: client CPU per message", "consume", "cpu"),
    ("publish one at a time: messages/s", "publish-single", "rate"),
    ("publish, 100 callers: messages/s", "publish-concurrent", "rate"),
    ("publish to handler at 10,000/s: p99", "latency", "p99"),
)
_README_CLIENTS = ("go-nsq", "asyncnsq", "ansq", "pynsq", "gnsq")
_STYLE = """
body{font:15px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px}td,th{border:1px solid #ccc;padding:3px 8px;text-align:right}
td:first-child,th:first-child,h1+table td{text-align:left}
.missed{color:#b00}.met{color:#070}svg{max-width:100%;height:auto}
"""
METHOD = """
How to repeat it: `nsq-fast bench suite --servers DIR --json run.json`, where DIR has an nsqd binary, then
`nsq-fast bench report run.json --docs docs/performance.md`. NSQ_FAST_PEER_PYTHON names an interpreter that has the
other Python clients; go-nsq is built where Go is.

- Each client is a process of its own, with the least program its manual suggests: a handler that counts, and an answer
  for each message. Clients take turns on the same server, in each of several rounds; a figure is the median of the
  rounds, the spread is their range as a share of it. The first tenth of a round is left out.
- A consumer finds its backlog on the server. How many messages a client gets is found by shorter rounds before, so that
  each works for about the same time.
- Scenarios that are held against each other, from one connection to a hundred, take turns in the same way.
- CPU is user and system time of the client's process, over messages. The server's is read from /proc at the same
  moments.
- *speed*, at the top, is how fast the machine was in between, before each scenario. Where it is another, so is all that
  is given in microseconds or messages a second.
- *limit* says what kept a client from being faster: `client`, it used a core or more; `machine`, client and server
  together used all cores; `server`, the server used a core or more; `waiting`, neither: they waited for each other.
- At a rate, messages are due at times fixed in advance, and latency counts from the time a message was due, so a stall
  counts for every message it delayed.
- System calls are counted by perf (strace where perf cannot) as the difference of a long and a short run.

What it does not show: other machines, a network (all is on loopback, client and server share the cores), disks (the
server keeps its queue in memory), handlers that do work, clusters under failure. Absolute figures are those of this
machine on that day; carry only the ratios elsewhere. Where the limit was not the client, messages/s compares what the
server and the client did together, and CPU per message is the figure that tells clients apart.
"""


def html(run: Run) -> str:
    """The report as one HTML document, without anything from outside."""
    title = "nsq_fast benchmark"
    parts = [
        f"<h1>{title}</h1>",
        table(["", ""], about_rows(run)),
        *_html_goals(run),
        *_html_scenarios(run),
        *_html_core(run),
        f"<h2>Method</h2><pre>{escape(METHOD.strip())}</pre>",
    ]
    return document(title, _STYLE, parts)


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
    yield ["Python, gevent", f"{about.python}, {about.gevent}"]
    yield ["clients", clients]


def _html_goals(run: Run) -> Iterator[str]:
    judged = [each for each in judge(run) if each.verdict != "not measured"]
    if judged:
        yield "<h2>Goals</h2><table><tr><th>what</th><th>target</th><th>actual</th><th></th></tr>"
        for each in judged:
            cells = "".join(f"<td>{escape(text)}</td>" for text in (each.what, each.target, each.actual))
            yield f'<tr>{cells}<td class="{each.verdict}">{each.verdict}</td></tr>'
        yield "</table>"


def _html_scenarios(run: Run) -> Iterator[str]:
    for scenario in run.scenarios:
        yield f"<h2>{escape(title_of(scenario))}</h2><p>{escape(scenario.server)}</p>"
        yield table(header(scenario), rows(scenario, run.about.cores))
        yield from (chart for _, chart in charts_of(scenario))


def _html_core(run: Run) -> Iterator[str]:
    if run.core:
        yield "<h2>The compiled core</h2>"
        yield table(CORE_HEADER, core_rows(run))
        yield core_chart(run)


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
        parts.append(f"{scenario.server}, {scenario.settings.rounds} rounds.")
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


def fill_readme(text: str, run: Run) -> str:
    """A README with its figures replaced. Raises ConfigError when the marks are missing."""
    if not README_BLOCK.search(text):
        raise ConfigError("the file has no <!-- figures:begin --> and <!-- figures:end -->")
    return README_BLOCK.sub(lambda marks: f"{marks[1]}{readme_block(run)}{marks[2]}", text)


def write_charts(run: Run, folder: Path) -> list[Path]:
    """Write the charts that the README shows, as SVG files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, metric in README_CHARTS:
        scenario = run.scenario(name)
        chart = dict(charts_of(scenario)).get(metric) if scenario else None
        if chart:
            written.append(folder / f"{name}-{metric}.svg")
            written[-1].write_text(chart + "\n")
    return written
