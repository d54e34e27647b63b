"""The page that the traces are reported on, and the command that makes it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import trace_logs
from support.browser import Browser, check_readable
from support.trace_logs import BAD_LINES, SECOND, Figures, Planted, run

from nsq_fast.cli import main
from nsq_fast.client.trace import TraceRecord
from nsq_fast.spark.trace import TraceSettings, html, local_figures
from nsq_fast.spark.trace.page import Bar, Line, Piece, bars, by_share, duration, over_time

# The report as a browser shows it: its numbers are those of an independent computation on the same logs.


pytest.importorskip("duckdb", reason="no duckdb: pip install 'nsq-fast[trace]'")

COUNTS = Figures._fields[:9]

POINTS = {"latency_p50_ns": "p50", "latency_p95_ns": "p95", "latency_p99_ns": "p99", "latency_max_ns": "longest"}

UNITS = {"ns": 1, "µs": 1000, "ms": 10**6, "s": SECOND, "min": 60 * SECOND, "h": 3600 * SECOND}


class Report:
    """A report on a log with planted faults."""

    def __init__(self, folder: Path) -> None:
        log = trace_logs.good_log(250, seed=7)
        self.planted: Planted = trace_logs.plant(log)
        self.records: list[TraceRecord] = trace_logs.records_of(log)
        self.path = folder / "report.html"
        logs = trace_logs.write_logs(self.records, folder / "logs")
        self.path.write_text(html(local_figures(logs, TraceSettings(window=1))), encoding="utf-8")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return Report(tmp_path_factory.mktemp("report"))


class Page(HTMLParser):
    """What a page shows: figures by row and name, tables by the id of what is around them, all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[tuple[str, str], str] = {}
        self.exact: dict[tuple[str, str], int] = {}
        self.tables: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.legends: list[str] = []
        self.conclusion = ""
        self.lengths: list[float] = []  # of the bars of the slowest messages, in percent
        self._group = self._section = ""
        self._figure: tuple[str, str] | None = None
        self._is_in_legend = False
        self._bars = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._section = found.get("id") or self._section
        self._is_in_legend = tag == "li" or (self._is_in_legend and tag in ("i", "svg", "path"))
        if tag in ("h2", "figcaption"):
            self._bars = ""
        elif found.get("class") == "bar" and self._bars == "lives":
            self.lengths.append(0.0)
        elif tag == "i" and self._bars == "lives" and self.lengths:
            self.lengths[-1] += float(re.findall(r"([\d.]+)%", found.get("style") or "")[0])
        if tag == "tr":
            self._group = found.get("data-group") or ""
            self.tables.setdefault(self._section, []).append("")
        self._figure = None
        if name := found.get("data-figure"):
            self._figure = (self._group, name)
            if title := found.get("title"):
                self.exact[self._figure] = int(title.removesuffix(" ns").replace(",", ""))

    def handle_data(self, data: str) -> None:
        if self._figure:
            self.figures[self._figure] = data
            self._figure = None
        if self._is_in_legend:
            self.legends.append(data)
        if self._section == "conclusion":
            self.conclusion += data
        if data.startswith("From publish to FIN"):
            self._bars = "lives"
        if rows := self.tables.get(self._section):
            rows[-1] += f"{data} "


@pytest.fixture(scope="module")
def page(report: Report, browser: Browser) -> Page:
    return Page(browser.dom(report.path))


def expected_of(report: Report) -> dict[str, Figures]:
    found = trace_logs.figures_of(report.records, report.planted)
    return {
        f"{topic}|{'' if partition is None else partition}|{channel}": figures
        for (topic, partition, channel), figures in found.items()
    }


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_figures_of_every_group_and_their_totals_are_right(report: Report, page: Page) -> None:
    expected = expected_of(report)
    shown = {
        group: {name: number(page.figures[group, name]) for name in COUNTS}
        for group in {group for group, _ in page.figures if group}
    }
    assert shown == {group: {name: getattr(each, name) for name in COUNTS} for group, each in expected.items()}
    for group, each in expected.items():
        for name, field in POINTS.items():
            assert page.exact[group, name] == getattr(each, field)
            value, unit = page.figures[group, name].split()
            assert float(value) * UNITS[unit] == pytest.approx(getattr(each, field), rel=0.006)
    totals = {name: sum(getattr(each, name) for each in expected.values()) for name in COUNTS[:6]}
    totals |= {"redelivered": sum(sum(each[6:9]) for each in expected.values()), "problems": len(BAD_LINES)}
    assert {name: number(page.figures["", name]) for name in totals} == totals


@pytest.mark.parametrize("kind", ["lost", "duplicates", "violations"])
def test_each_fault_is_shown_with_its_message(report: Report, page: Page, kind: str) -> None:
    rows = page.tables[kind][1:]
    planted: set[Any] = getattr(report.planted, kind)
    assert len(rows) == len(planted)
    for topic, partition, channel, internal_id in planted:
        name = f"{topic}{'' if partition is None else f'/{partition}'} {channel} {internal_id} "
        assert sum(row.startswith(name) for row in rows) == 1


def test_the_slowest_message_clocks_and_bad_lines_are_shown(report: Report, page: Page) -> None:
    first = page.tables["slowest"][1]
    for words in (str(report.planted.slowest[3]), "20.0 s", "FIN of attempt 1"):
        assert words in first
    assert any("consumer on 10.0.0.9" in row for row in page.tables["skews"])
    assert any(BAD_LINES[0] in row for row in page.tables["sources"])


def test_every_channel_has_its_charts(page: Page) -> None:
    charts = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "chart"]
    bars = [attributes for tag, attributes in page.tags if attributes.get("class") == "bars"]
    assert (len(charts), len(bars)) == (2 * 3, 2)
    assert {"p50", "p99", "end to end", "in queue", "handling", "lost"} <= set(page.legends)


def test_the_conclusion_comes_first(report: Report, page: Page) -> None:
    text = report.path.read_text()
    assert text.index('id="conclusion"') < text.index('id="totals"')
    groups = expected_of(report).values()
    for words, name in (("lost", "lost"), ("finished more than once", "duplicates"), ("out of order", "violations")):
        assert re.search(rf"\b{sum(getattr(each, name) for each in groups)} [a-z ]*{words}", page.conclusion)


def test_slow_messages_are_drawn_on_one_scale(page: Page) -> None:
    longest, *others = page.lengths
    assert longest == pytest.approx(100, abs=0.5)
    assert all(length < longest for length in others)


def test_deliveries_that_overlap_are_drawn_within_the_scale(tmp_path: Path) -> None:
    delivery: Any = trace_logs.good_log(1)["orders", 0, "billing", 100][0]
    for attempts, outcome, begin, end in ((1, "TIMEOUT", 10, 30), (2, "REQ", 20, 25), (3, "FIN", 28, 40)):
        times = {"time": delivery.timestamp + end * SECOND, "handling_time": float(end - begin)}
        record = trace_logs.changed(delivery, attempts=attempts, outcome=outcome, **times)
        with (tmp_path / "some.log").open("a") as log:
            log.write(f"{record}\n")
    (length,) = Page(html(local_figures(tmp_path / "some.log"))).lengths
    assert length == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)], ids=["wide and light", "small and dark"])
def test_it_can_be_read_on_any_screen(report: Report, browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    check_readable(browser, report.path, width, dark, tmp_path / "picture.png")


def test_the_page_stands_alone(report: Report, page: Page) -> None:
    text = report.path.read_text()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (999_900, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (123_456_789, "123 ms"),
        (90 * SECOND, "90.0 s"),
        (150 * SECOND, "2.5 min"),
        (-2_000_000, "-2.00 ms"),
    ],
)
def test_durations_have_three_digits_and_a_unit(value: int | None, text: str) -> None:
    assert duration(value) == text


def test_charts_are_well_formed_and_to_scale() -> None:
    rows = [Bar("a<b", [Piece(4, 50, "")], "50"), Bar("b", [Piece(1, 100, "")], "100")]
    first, second = (float(width) for width in re.findall(r"max\(2px,([\d.]+)%\)", bars("t", rows, {})))
    assert second == pytest.approx(2 * first, rel=0.01)
    for lines in ([Line("a", [(0, 10.0), (50, 100.0), (99, 5000.0), (100, 20000.0)])], []):
        xml.etree.ElementTree.fromstring(by_share("Latency", lines))


def test_points_that_stand_alone_are_whole_rings_of_different_sizes() -> None:
    """Dashes break a ring; of rings of one size at one place all but the last are hidden."""
    lines = [Line(name, ((0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 4.0))) for name in ("p50", "p95", "max")]
    shown = over_time("End to end", lines)
    rings = re.findall(r"<circle [^>]*>", shown)
    assert all("stroke-dasharray:none" in ring for ring in rings)
    assert len({re.search(r'r="(\d+)"', ring)[1] for ring in rings}) == len(rings) == 3


@pytest.mark.parametrize("span", [0.0, 0.05, 0.3, 0.7, 3.0, 60.0, 7200.0, 86_400.0 * 3])
def test_the_words_below_an_axis_of_time_do_not_overlap(span: float) -> None:
    """Neither in small letters, on a wide screen, nor in large ones, for which fewer words are shown."""
    begin = 1_700_000_000.0
    shown = over_time("End to end", [Line("p50", ((begin, 1.0), (begin + span, 3.0)))])
    pattern = r'<text x="([\d.]+)" y="254.0" text-anchor="(\w+)"( class="every-other")?>([^<]+)</text>'
    found = re.findall(pattern, shown)
    assert found
    for size, hidden in ((11, ()), (15, (' class="every-other"',))):
        places = []
        for x, anchor, name, words in found:
            width = 0.55 * size * len(words)
            if name not in hidden:
                left = float(x) - (width if anchor == "end" else width / 2)
                places.append((left, left + width))
        places.sort()
        assert all(before[1] < after[0] for before, after in pairwise(places)), places


# `nsq-fast trace-report`, and the end of `nsq-fast demo`: those that need no session of the tests.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one LOG"),
        (["x.log"], "say what to write"),
        (["x.log", "--html", "x.html", "--window", "soon"], "not a duration"),
        (["x.log", "--html", "x.html", "--window", "0"], "'--window': '0': must be more than 0"),
        (["x.log", "--html", "x.html", "--conf", "spark.ui.port"], "not name=value"),
        (["{missing}.log", "--html", "x.html"], "names no file"),
        (["{missing}.log", "--html", "x.html", "--local"], "names no file"),
        (["x.log", "--tables", "t", "--local"], "--tables is for Spark"),
        (["x.log", "--json", "--local", "--conf", "a=b"], "--conf is for Spark"),
    ],
)
def test_wrong_arguments_are_said_in_a_line(java: None, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["trace-report", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert isinstance(done.exception, SystemExit)  # and not a traceback


OLD_JAVA = "#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n"


@pytest.mark.parametrize(
    ("file", "text", "variable", "arguments", "told"),
    [
        ("none", "", "PATH", (), ("apt-get install openjdk-17-jre-headless", "Or report without Spark: --local")),
        ("bin/java", OLD_JAVA, "JAVA_HOME", (), ("newer Java than 8",)),
        ("pyspark.py", "raise ImportError('no pyspark')\n", "PYTHONPATH", (), ("pip install 'nsq-fast[spark]'",)),
        (
            "duckdb.py",
            "raise ModuleNotFoundError('no duckdb', name='duckdb')\n",
            "PYTHONPATH",
            ("--local",),
            ("pip install 'nsq-fast[trace]'",),
        ),
    ],
    ids=["no Java", "old Java", "no PySpark", "no DuckDB"],
)
def test_what_is_missing_is_said_with_how_to_get_it(
    tmp_path: Path, file: str, text: str, variable: str, arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    log = tmp_path / "some.log"
    log.write_text("INFO started\n")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / file).chmod(0o755)
    done = run("trace-report", log, "--json", *arguments, **{"JAVA_HOME": "", variable: str(tmp_path)})
    assert done.returncode == 1
    for words in told:
        assert words in done.stderr


def test_the_demo_ends_with_a_report_on_its_own_traces(java: None, tmp_path: Path) -> None:
    page = tmp_path / "traces.html"
    done = run("demo", "--messages", "2000", "--ordered-messages", "1000", "--trace-html", page, "--json")
    assert done.returncode == 0, done.stderr
    assert "Spark reports on them" in done.stderr  # it takes long, and nothing else is said meanwhile
    found = json.loads(done.stdout)["traces"]
    assert (found["finished"], found["lost"], found["violations"]) == (1000, 0, 0)
    assert "NSQ traces" in page.read_text()


def test_the_demo_says_in_a_line_why_there_is_no_report(tmp_path: Path) -> None:
    done = run("demo", "--messages", "1000", "--ordered-messages", "200", PATH=str(tmp_path), JAVA_HOME="")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "no trace report" in line]
    assert "Java" in line
