"""`nsq-fast bench scale`: what it measures on the embedded broker, and what it says of a curve."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.browser import Browser, check_readable

from nsq_fast.bench.results import About
from nsq_fast.bench.scale import Curve, Point, ScaleRun, explained, html, knee_of, limit_of, picture_of, rows
from nsq_fast.cli import main

ABOUT = About(date="today", nsq_fast="", git_commit="", python="", gevent="", system="", cpu="", cores=4, memory_mib=1)


def scale(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "scale", *arguments], catch_exceptions=False)


def curve(*rates: float, client: float = 0.5, server: float = 1.0, together: float = 1.0, nsqds: int = 2) -> Curve:
    """A curve with a point for 1, 2, 4 ... processes; CPU is in cores."""
    points = [
        Point(
            processes=2**number,
            messages=int(rate),
            seconds=1.0,
            cpu_seconds=client,
            server_cpu_seconds=server,
            p99_us=100.0,
            together=together,
        )
        for number, rate in enumerate(rates)
    ]
    return Curve(kind="consume", nsqds=nsqds, connections=2, size=200, server="nsqd", points=points)


@pytest.mark.parametrize(
    ("rates", "processes"), [((100, 200, 400), 4), ((100, 190, 200), 2), ((100, 90, 80), 1), ((100,), 1)]
)
def test_the_knee_is_where_more_processes_bring_less_than_a_tenth(rates: tuple[float, ...], processes: int) -> None:
    assert knee_of(curve(*rates)).processes == processes


def test_the_limit_is_a_core_of_each_nsqd() -> None:
    """1 s of the servers' CPU for 500,000 messages: 2 µs for each."""
    assert limit_of(curve(250_000, 500_000)) == pytest.approx(1_000_000)


@pytest.mark.parametrize(
    ("client", "server", "reason"),
    [
        (2.0, 1.9, "the machine is the limit"),
        (1.9, 1.0, "each process has a core of its own to the full"),
        (0.5, 1.0, "they wait for each other"),
    ],
)
def test_the_knee_is_explained_by_who_used_what(client: float, server: float, reason: str) -> None:
    said = " ".join(explained(curve(250_000, 500_000, client=client, server=server), cores=4))
    assert "2 processes handle 500,000 messages/s, and no more were measured." in said
    assert reason in said
    assert "understated" not in said


def test_processes_that_did_not_run_together_are_said() -> None:
    said = " ".join(explained(curve(100, 190, 200, together=0.4), cores=4))
    assert "The 4 processes were all at work for 40% of the time only" in said
    assert "2 processes handle 190 messages/s, and up to 4, more bring less than a tenth." in said


def test_the_report_has_the_figures_the_limit_and_the_reason() -> None:
    found = curve(250_000, 500_000)
    page = html(ScaleRun(about=ABOUT, curves=[found]))
    for text in ("500,000", "limit: a core of each nsqd", "1,000,000", "they wait for each other", "2 (knee)"):
        assert text in page
    assert not re.search(r"""(?:src|href)=|@import|url\(|<script""", page)
    shown = [text for text in xml.etree.ElementTree.fromstring(picture_of(found)).itertext() if text.strip()]
    assert {"250,000", "500,000", "1,000,000"} <= set(shown)
    assert [row[0] for row in rows(found)] == ["1", "2 (knee)"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_can_be_read_on_any_screen(browser: Browser, tmp_path: Path, width: int) -> None:
    page = tmp_path / "scale.html"
    page.write_text(html(ScaleRun(about=ABOUT, curves=[curve(250_000, 480_000, 500_000)])), encoding="utf-8")
    check_readable(browser, page, width, width == 400, tmp_path / "picture.png")


def test_processes_share_out_nsqds_and_are_measured_together(tmp_path: Path) -> None:
    target, page = tmp_path / "run.json", tmp_path / "run.html"
    small = ("--nsqds", "2", "--processes", "2", "--processes", "1", "--duration", "0.02")
    done = scale(*small, "--kind", "consume", "--kind", "both", "--json", str(target), "--html", str(page))
    assert done.exit_code == 0, done.output
    assert "(knee)" in done.output
    consume, both = json.loads(target.read_text())["curves"]
    for found in (consume, both):
        assert (found["nsqds"], found["connections"]) == (2, 2)
        first, second = found["points"]
        assert (first["processes"], second["processes"]) == (1, 2)
        assert second["messages"] == 2 * first["messages"] > 0
        assert first["cpu_seconds"] > 0
        assert first["together"] == 1.0
    assert both["points"][1]["p99_us"] > 0
    assert consume["points"][1]["p99_us"] is None
    assert page.read_text().startswith("<!doctype html>")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = scale("--kind", "publish", "--processes", "1", "--duration", "0.02", "--json", "/dev/full")
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "Error: cannot write /dev/full: No space left on device"
