"""`nsq-fast bench` on the embedded broker, in small runs: what it measures, writes, shows and compares."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import select
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from support.browser import Browser, check_readable
from support.waiting import WAIT

from nsq_fast.bench import results
from nsq_fast.bench.clients import PROGRAMS, Client, names
from nsq_fast.bench.report import FIGURES, docs, html, readme_block, table, tuning_block
from nsq_fast.bench.results import (
    INSTRUCTIONS,
    About,
    ClientResult,
    Figure,
    Round,
    Run,
    Scenario,
    Settings,
    limit_of,
    load,
    value_of,
    verdict_on,
)
from nsq_fast.bench.runner import (
    MOST_ROUNDS,
    Task,
    explained,
    knee_of,
    per_message,
    run_scenarios,
)
from nsq_fast.bench.servers import Server
from nsq_fast.bench.suite import in_turns, is_settled, judge, middle, plans
from nsq_fast.cli import main
from nsq_fast.names import Address

ONE_ROUND = ["--count", "2000", "--rounds", "1"]
OURS = ["--client", "nsq_fast"]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    target = tmp_path / "run.json"
    done = bench(*arguments, "--json", str(target))
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def rounds_of(run: dict[str, Any], client: str = "nsq_fast") -> list[dict[str, Any]]:
    scenario = run["scenarios"][0]
    result = next(each for each in scenario["clients"] if each["client"] == client)
    assert result["failure"] == ""
    rounds: list[dict[str, Any]] = result["rounds"]
    return rounds


def test_what_cannot_be_measured_here_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example for tornado runs where nsq_fast does."""
    monkeypatch.setattr("shutil.which", lambda *args, **options: None)
    clients = ("--client", "tornado example", "--client", "pynsq", "--peer-python", "/bin/false")
    done = bench("consume", *ONE_ROUND, *clients, "--instructions", "--json", str(tmp_path / "run.json"))
    assert (done.exit_code, "instructions/message" in done.output) == (0, False)
    assert "left out: pynsq needs an interpreter that has pynsq: pip install pynsq, and --peer-python\n" in done.output
    assert "not counted: instructions are counted by valgrind, which is not installed\n" in done.output
    assert len(rounds_of(json.loads((tmp_path / "run.json").read_text()), "tornado example")) == 1


def test_consume_writes_every_round_with_versions_machine_and_settings(tmp_path: Path) -> None:
    run = measured(tmp_path, "consume", "--count", "2000", "--rounds", "2", *OURS, "--client", "floor: core")
    assert {"nsq_fast", "git_commit", "python", "cpu", "cores", "date", "clients"} <= run["about"].keys()
    scenario = run["scenarios"][0]
    assert (scenario["settings"]["count"], scenario["settings"]["size"]) == (2000, 200)
    assert scenario["server"] == "embedded nsqd"
    assert scenario["loop_ms"] > 1
    for client in ("nsq_fast", "floor: core"):
        rounds = rounds_of(run, client)
        assert len(rounds) == 2
        for each in rounds:
            assert each["messages"] == 2000 - 1 - 200  # the first tenth is left out
            assert each["seconds"] > 0
            assert each["cpu_seconds"] > 0
            assert each["peak_kib"] > 1000
            assert each["server_cpu_seconds"] >= 0


FACES = ("nsq_fast", "nsq_fast aio", "nsq_fast threads")
DROP_IN = "nsq_fast as gnsq"
FLOORED = ("nsq_fast", "floor: core")


@pytest.mark.parametrize(
    ("arguments", "clients", "messages", "has_latency"),
    [
        ("publish --mode single --count 1000", ("nsq_fast aio", "nsq_fast threads"), 1000, True),
        (
            "publish --mode concurrent --count 1000",
            (*FACES, DROP_IN, "nsq_fast separate", "floor: pipelined"),
            1000,
            False,
        ),
        ("publish --mode batch --count 1000", ("nsq_fast aio", DROP_IN, "floor: ready bytes"), 1000, False),
        ("roundtrip --count 1000", (*FLOORED, "nsq_fast aio", DROP_IN), 899, True),
        (
            "consume --count 2000",
            ("nsq_fast aio", "nsq_fast threads", DROP_IN, "nsq_fast batches", "floor: batches"),
            1799,
            False,
        ),
        ("consume --count 2000 --tls", ("floor: core",), 1799, False),
        ("consume --count 2000 --compression snappy", ("floor: core",), 1799, False),
        ("consume --count 2000 --compression deflate", ("floor: core",), 1799, False),
        ("consume --connections 3 --count 2000", FLOORED, 1799, False),
        ("ordered --count 400 --partitions 2", ("nsq_fast",), 359, False),
        ("ordered --count 400 --partitions 1", ("floor: ordered",), 359, False),
        ("idle --connections 10 --duration 0.2 --settle 0.3", FACES, 0, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_is_measured(
    tmp_path: Path, arguments: str, clients: tuple[str, ...], messages: int, has_latency: bool
) -> None:
    named = [word for name in clients for word in ("--client", name)]
    run = measured(tmp_path, *arguments.split(), "--rounds", "1", *named)
    for client in clients:
        (each,) = rounds_of(run, client)
        assert each["messages"] == messages
        shares = [share for share, _ in each["latency_us"]]
        values = [value for _, value in each["latency_us"]]
        assert bool(shares) is has_latency
        assert (shares, values) == (sorted(shares), sorted(values))


@pytest.mark.parametrize(
    ("kind", "clients"),
    [
        ("roundtrip --unbuffered", FLOORED),
        ("consume --unbuffered --settle 4", FLOORED),  # who starts later than the load finds a backlog
        ("publish", (*FLOORED, "nsq_fast aio")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_open_loop_keeps_its_rate_whatever_the_client_does(
    tmp_path: Path, kind: str, clients: tuple[str, ...]
) -> None:
    named = [word for name in clients for word in ("--client", name)]
    run = measured(tmp_path, *kind.split(), "--rate", "1000", "--count", "1600", "--rounds", "1", *named)
    for client in clients:
        (each,) = rounds_of(run, client)
        # A loop that waits for replies makes ten times as many; what a busy machine delays comes together afterwards.
        assert 50 < each["messages"] / each["seconds"] < 3000
        assert len(each["latency_us"]) > 5


def test_without_a_count_a_client_is_kept_busy_for_the_duration(tmp_path: Path) -> None:
    run = measured(tmp_path, "consume", "--duration", "0.2", "--rounds", "1", *OURS)
    (each,) = rounds_of(run)
    assert each["messages"] > 200
    assert 0.002 < each["seconds"] < 20.0  # how much 0.2 s are is found by shorter rounds, in which a machine may pause


@pytest.mark.parametrize(("scenario", "client"), [("consume", "nsq_fast columns"), ("publish-key", "nsq_fast keyed")])
def test_what_only_the_suite_measures_is_measured(tmp_path: Path, scenario: str, client: str) -> None:
    small = ("--only", scenario, "--short", "--rounds", "1", "--duration", "0.002", "--patience", "0")
    (each,) = rounds_of(measured(tmp_path, "suite", *small, "--client", client), client)
    assert each["messages"] > 0
    assert each["cpu_seconds"] > 0


def test_the_import_and_the_first_message_are_measured(tmp_path: Path) -> None:
    small = ("--only", "start", "--short", "--rounds", "1", "--patience", "0")
    run = measured(tmp_path, "suite", *small, *OURS, "--client", "floor: core")
    for client in ("nsq_fast", "floor: core"):
        (each,) = rounds_of(run, client)
        assert each["import_ms"] > 0
        assert each["first_ms"] > 0
    (ours,) = rounds_of(run, "nsq_fast")
    assert 0 < ours["package_ms"] < ours["import_ms"]


def test_the_suite_goes_on_when_a_server_fails_and_says_what_it_lacks(tmp_path: Path) -> None:
    broken = tmp_path / "nsqd"
    broken.write_text("#!/bin/sh\necho no room for it >&2\nexit 1\n")
    broken.chmod(0o755)
    target = tmp_path / "run.json"
    scenarios = ("--only", "publish-single", "--only", "ordered-1")  # the second is of the embedded cluster
    small = ("--rounds", "1", "--duration", "0.002", "--patience", "0", "--short", *OURS)
    done = bench("suite", *scenarios, *small, "--servers", str(tmp_path), "--json", str(target))
    assert done.exit_code == 1
    assert "not measured: publish-single: nsqd did not start:\nno room for it" in done.output
    assert done.output.rstrip().endswith("not measured, for the reasons given above: publish-single")
    assert [scenario.name for scenario in results.load(target).scenarios] == ["ordered-1"]
    alone = bench("suite", *scenarios[:2], *small, "--servers", str(tmp_path))
    assert (alone.exit_code, "nsqd did not start:\nno room for it" in alone.output) == (1, True)


@pytest.fixture(scope="module")
def suite_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a scenario with two clients."""
    target = tmp_path_factory.mktemp("suite") / "run.json"
    small = ("--only", "consume", "--duration", "0.05", "--rounds", "2", "--patience", "0")
    clients = ("--client", "nsq_fast", "--client", "floor: core")
    done = bench("suite", *small, *clients, "--json", str(target))
    assert done.exit_code == 0, done.output
    assert "consume: client CPU per message" in done.output
    return target


def changed(run_file: Path, path: Path, change: Callable[[Run], object]) -> str:
    """The name of a file of the same run, but for a change."""
    run = load(run_file)
    change(run)
    path.write_text(results.as_json(run))
    return str(path)


def make_ours_slower(run: Run) -> None:
    for ours in (client for scenario in run.scenarios for client in scenario.clients if client.client == "nsq_fast"):
        ours.rounds = [
            msgspec.structs.replace(each, seconds=9 * each.seconds, cpu_seconds=9 * each.cpu_seconds)
            for each in ours.rounds
        ]


def test_compare_fails_when_a_client_became_slower(suite_run: Path, tmp_path: Path) -> None:
    same = bench("compare", str(suite_run), str(suite_run), "--json")
    assert (same.exit_code, {each["verdict"] for each in json.loads(same.stdout)}) == (0, {"same"})
    slower = changed(suite_run, tmp_path / "slower.json", make_ours_slower)
    done = bench("compare", str(suite_run), slower)
    assert (done.exit_code, "worse" in done.output) == (1, True)
    assert bench("compare", slower, str(suite_run)).exit_code == 0
    assert bench("compare", str(suite_run), slower, "--client", "floor: core").exit_code == 0
    assert bench("compare", str(suite_run), slower, "--relative-to", "floor: core").exit_code == 1


@pytest.mark.parametrize(("more", "code"), [(1.02, 0), (1.08, 1)])
def test_what_was_counted_is_compared_and_figures_are_chosen_by_name(
    suite_run: Path, tmp_path: Path, more: float, code: int
) -> None:
    def counting(instructions: float) -> str:
        def count(run: Run) -> None:
            for client in run.scenarios[0].clients:
                client.counted["instructions"] = instructions

        return changed(suite_run, tmp_path / f"{instructions}.json", count)

    runs = counting(1000.0), counting(1000.0 * more)
    done = bench("compare", *runs, "--figure", "instructions/message", "--json")
    assert done.exit_code == code
    assert {each["metric"] for each in json.loads(done.stdout)} == {"instructions/message"}


@pytest.mark.parametrize("option", ["--client", "--figure", "--relative-to"])
def test_a_name_that_neither_run_has_does_not_pass_as_unchanged(suite_run: Path, option: str) -> None:
    done = bench("compare", str(suite_run), str(suite_run), "--client", "nsq_fast", option, "nsq_fasd")
    assert done.exit_code == 2
    assert f"{option} 'nsq_fasd': what both runs have is " in done.output


def test_the_report_stands_alone_and_has_the_numbers_of_the_run(suite_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html, docs = tmp_path / "report.html", tmp_path / "performance.md"
    assert bench("report", str(suite_run), "--html", str(html), "--docs", str(docs)).exit_code == 0
    page, text = html.read_text(), docs.read_text()
    assert "where DIR has an nsqd binary, then `nsq-fast bench" in page  # one line, which a narrow window breaks
    assert not re.search(r"""src=|href="[^#]|@import|url\([^#]|<script""", page)
    run = results.load(suite_run)
    speeds = [scenario.loop_ms for scenario in run.scenarios]
    assert f"({min(speeds):.0f} to {max(speeds):.0f})" in text
    for scenario in run.scenarios:
        for client in scenario.clients:
            rates = sorted(each.messages / each.seconds for each in client.rounds)
            shown = f"{(rates[0] + rates[1]) / 2:,.0f}"
            assert f"<td>{shown}</td>" in page
            assert f"| {shown} |" in text
            assert re.search(rf"<text [^>]*>{shown}</text>", page)  # the chart has it too


def test_the_readme_gets_ratios_between_its_marks_and_charts_beside(suite_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- figures:begin -->\nold\n<!-- figures:end -->\nafter\n")
    assert bench("report", str(suite_run), "--readme", str(readme), "--svg", str(tmp_path)).exit_code == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- figures:begin -->\n|")
    assert text.endswith("<!-- figures:end -->\nafter\n")
    assert "old" not in text
    for name in ("consume-rate.svg", "consume-cpu.svg"):
        assert xml.etree.ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


def test_a_file_that_cannot_be_written_is_one_line(suite_run: Path) -> None:
    done = bench("report", str(suite_run), "--docs", "/dev/full")
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "Error: cannot write /dev/full: No space left on device"


def test_compare_says_what_else_differs(suite_run: Path, tmp_path: Path) -> None:
    def elsewhere(run: Run) -> None:
        run.about.cpu, run.about.python = "another one", "3.99"
        for scenario in run.scenarios:
            scenario.server = "nsqd 9.9"

    assert "warning" not in bench("compare", str(suite_run), str(suite_run)).output
    done = bench("compare", str(suite_run), changed(suite_run, tmp_path / "other.json", elsewhere))
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    for part in ("another machine: ", "another Python: ", "another server: embedded nsqd before, nsqd 9.9 after"):
        assert sum(part in line for line in warnings) == 1


def test_a_report_must_be_told_what_to_write(suite_run: Path, tmp_path: Path) -> None:
    assert bench("report", str(suite_run)).exit_code == 2
    plain = tmp_path / "README.md"
    plain.write_text("no marks")
    assert bench("report", str(suite_run), "--readme", str(plain)).exit_code == 2
    (tmp_path / "no.json").write_text("{}")
    assert bench("report", str(tmp_path / "no.json"), "--html", str(tmp_path / "x.html")).exit_code == 2


def test_processes_share_out_nsqds_and_are_measured_together(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    small = ("--nsqds", "2", "--processes", "2", "--processes", "1", "--duration", "0.02")
    done = bench("scale", *small, "--kind", "consume", "--kind", "both", "--json", str(target))
    assert done.exit_code == 0, done.output
    assert "(knee)" in done.output
    run = load(target)
    for found in run.scenarios:
        assert "2 nsqds, 2 connections a process" in found.name
        assert [each.client for each in found.clients] == ["1 process", "2 processes"]
        (first,), (second,) = (each.rounds for each in found.clients)
        assert (first.processes, second.processes, second.nsqds) == (1, 2, 2)
        assert second.messages == 2 * first.messages > 0
        assert first.cpu_seconds > 0
        assert first.together == 1.0
    consume, both = (found.clients[1] for found in run.scenarios)
    assert (value_of(consume, "p99"), value_of(both, "p99") is not None) == (None, True)
    page = tmp_path / "run.html"
    assert bench("report", str(target), "--html", str(page)).exit_code == 0
    assert "<td>2 processes</td>" in page.read_text()
    assert re.search(
        r'id="conclusion"><p>Consume: 2 nsqds, 2 connections a process, 200 bytes: \d process', page.read_text()
    )
    same = bench("compare", str(target), str(target))
    assert (same.exit_code, "nothing changed" in same.output) == (0, True)


# The report of a run_of_docs as a browser shows it; and the figures of README, docs/performance.md and docs/tuning.md,
# which are those of the file of the run_of_docs: none by hand.


ROOT = Path(__file__).parents[2]
HOW = (
    "nsq-fast bench report docs/performance.json --docs docs/performance.md --readme README.md --tuning docs/tuning.md"
    " --svg docs/charts"
)


@pytest.fixture(scope="module")
def run_of_docs() -> Run:
    return load(ROOT / "docs" / "performance.json")


def test_the_page_is_that_of_the_run(run_of_docs: Run) -> None:
    assert (ROOT / "docs" / "performance.md").read_text() == docs(run_of_docs), f"write it again: {HOW}"


@pytest.mark.parametrize(("page", "block"), [("README.md", readme_block), ("docs/tuning.md", tuning_block)])
def test_figures_of_other_pages_are_those_of_the_run(run_of_docs: Run, page: str, block: Callable[[Run], str]) -> None:
    found = FIGURES.search((ROOT / page).read_text())
    assert found is not None
    assert block(run_of_docs) in found[0], f"write them again: {HOW}"


def test_the_run_was_made_with_other_clients_on_a_real_server(run_of_docs: Run) -> None:
    consume = run_of_docs.scenario("consume")
    assert consume is not None
    assert consume.server.startswith("nsqd v")
    assert {"nsq_fast", "go-nsq", "gnsq"} <= {each.client for each in consume.clients if each.rounds}


@pytest.fixture(scope="module")
def report_page(run_of_docs: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one scenario of each kind of table and charts."""
    pytest.importorskip("matplotlib")
    kinds = {(each.settings.kind, bool(each.settings.rate)): each for each in reversed(run_of_docs.scenarios)}
    path = tmp_path_factory.mktemp("page") / "report.html"
    some = msgspec.structs.replace(run_of_docs, scenarios=list(kinds.values())[::-1])
    path.write_text(html(some), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)], ids=["wide and light", "narrow and dark"])
def test_it_can_be_read_on_any_screen(
    report_page: Path, browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    check_readable(browser, report_page, width, dark, tmp_path / "picture.png")


@pytest.mark.parametrize(("client", "is_there"), [("nsq_fast", True), ("go-nsq", False)])
def test_what_was_measured_is_not_denied_where_no_conclusion_is_drawn_from_it(client: str, is_there: bool) -> None:
    clients = [ClientResult(client=client, rounds=[a_round()])]
    idle = Scenario(name="idle", settings=Settings(kind="idle"), server="nsqd", clients=clients)
    assert ("nsq_fast was not measured" in html(Run(about=results.about({}), scenarios=[idle]))) is not is_there


def test_the_conclusion_comes_first_and_the_method_last(report_page: Path) -> None:
    text = report_page.read_text()
    places = [
        text.index(each) for each in ('id="conclusion"', "<h2>Goals", "<h2>Consume", "<h2>Made with", "<h2>Method")
    ]
    assert places == sorted(places)


# The pieces of the benchmarking harness that need no server: figures, verdicts, limits, pacing, charts, goals.


def meter() -> ModuleType:
    """What the client programs share; they find it beside them, not in a package."""
    spec = importlib.util.spec_from_file_location("bench_meter", PROGRAMS / "meter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METER = meter()


def a_round(messages: int = 1000, seconds: float = 1.0, cpu: float = 0.5, server: float | None = None) -> Round:
    return Round(messages=messages, seconds=seconds, cpu_seconds=cpu, peak_kib=2048, server_cpu_seconds=server)


def test_metrics_of_rounds() -> None:
    result = ClientResult(
        client="x", rounds=[a_round(2000, 2.0, 1.0), a_round(2000, 1.0, 0.5), a_round(2000, 4.0, 2.0)]
    )
    assert value_of(result, "rate") == Figure(1000, 500, 2000)
    assert value_of(result, "megabytes", 500) == Figure(0.5, 0.25, 1.0)
    assert value_of(result, "cpu") == Figure(500, 250, 1000)
    assert value_of(result, "peak") == Figure(2, 2, 2)
    assert value_of(result, "server_cpu") is None
    assert value_of(result, "p99") is None


@pytest.mark.parametrize(
    ("before", "after", "more_is_better", "verdict"),
    [
        ((100, 95, 105), (104, 99, 109), True, "same"),
        ((100, 95, 105), (150, 140, 160), True, "better"),
        ((100, 95, 105), (150, 140, 160), False, "worse"),
        ((100, 50, 160), (150, 140, 160), True, "same"),
        ((100, 100, 100), (101, 101, 101), True, "same"),
        ((100, 100, 100), (90, 90, 90), True, "worse"),
    ],
)
def test_a_change_counts_when_it_is_more_than_the_spread(
    before: tuple[float, float, float], after: tuple[float, float, float], more_is_better: bool, verdict: str
) -> None:
    assert verdict_on(Figure(*before), Figure(*after), more_is_better) == verdict


@pytest.mark.parametrize(
    ("client", "server", "limit"),
    [
        (0.95, 0.2, "client"),
        (0.95, 0.95, "machine"),
        (0.3, 0.95, "server"),
        (0.3, 0.4, "waiting"),
        (0.3, None, "unknown"),
        (0.95, None, "client"),
    ],
)
def test_it_is_said_what_the_limit_was(client: float, server: float | None, limit: str) -> None:
    assert limit_of(ClientResult(client="x", rounds=[a_round(cpu=client, server=server)]), cores=2) == limit


@given(st.integers(1, 10**7), st.sampled_from(["single", "concurrent", "batch"]), st.integers(1, 300))
def test_counts_are_shared_out_evenly(count: int, mode: str, share: int) -> None:
    settings = Settings(kind="publish", mode=mode, concurrency=share, batch=share)
    found = settings.rounded(count)
    step = 1 if mode == "single" else share
    assert found % step == 0
    assert settings.warmup(found) % step == 0
    assert settings.warmup(found) > 0


@pytest.mark.parametrize(
    ("asked", "needed"),
    [({"tls": True}, "negotiate"), ({"compression": "snappy"}, "negotiate"), ({"connections": 10}, "spread"),
     ({"handler_sleep": 0.005}, "sleep"), ({"rate": 9.0}, "rate"), ({"partitions": 2}, "partitions")],
)  # fmt: skip
def test_clients_take_part_in_what_they_can_do(asked: dict[str, Any], needed: str) -> None:
    everything = frozenset({"negotiate", "spread", "sleep", "rate", "partitions"})
    settings = Settings(kind="consume", **asked)
    assert Client(name="able", command=("x",), can=frozenset({needed})).takes_part(settings)
    assert not Client(name="unable", command=("x",), can=everything - {needed}).takes_part(settings)
    assert not Client(name="other", command=("x",), can=everything, kinds=frozenset({"publish"})).takes_part(settings)


def test_an_open_loop_has_its_times_fixed_in_advance() -> None:
    pairs = list(METER.ticks(10_000, 1234))
    assert sum(many for _, many in pairs) == 1234
    gaps = {later[0] - earlier[0] for earlier, later in itertools.pairwise(pairs)}
    assert all(abs(gap - 1_000_000) < 1000 for gap in gaps)
    slow = list(METER.ticks(100, 5))
    assert [many for _, many in slow] == [1] * 5


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="this system has no real-time scheduling")
def test_a_run_says_that_the_system_stops_its_real_time_processes() -> None:
    program = (
        "import os; from nsq_fast.bench.results import scheduling; print(scheduling())\n"
        "try: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))\n"
        "except PermissionError: print('not permitted')\n"
        "else: print(scheduling())"
    )
    ordinary, real_time = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert ordinary == "ordinary"
    if real_time == "not permitted":
        pytest.skip("real-time scheduling is not permitted here")
    limit = Path("/proc/sys/kernel/sched_rt_runtime_us")
    is_limited = limit.exists() and limit.read_text().strip() != "-1"
    assert real_time.startswith("real time")
    assert ("sched_rt_runtime_us" in real_time) == is_limited


@pytest.mark.parametrize(
    ("writes", "found"),
    [
        ("desc: Cachegrind\nfn=main\n7 123\nsummary:  $((1000 + 3 * $2))", 3.0),  # a start costs 1,000
        ("summary: 1000", None),  # no more for more messages
        ("desc: killed on its way", None),
    ],
)
def test_what_a_message_costs_is_the_difference_of_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: str, found: float | None
) -> None:
    program = tmp_path / "valgrind"
    program.write_text(
        f'#!/bin/bash\nwhile [[ $1 == -* ]]; do out=${{1#*out-file=}}; shift; done\necho "{writes}" >$out\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(count: int, words: list[str]) -> None:
        subprocess.run([*words, "client", str(count)], check=True)

    assert per_message(run, 100, 300) == found
    assert per_message(run, 100, 100) is None
    assert per_message(lambda *_: None, 100, 300) is None, "nothing was written"


def test_figures_are_shown_as_shares_of_the_floor_and_a_goal_says_what_instructions_say() -> None:
    def counted(client: str, cpu: float, number: float) -> ClientResult:
        return msgspec.structs.replace(of_cpu(client, cpu), counted={INSTRUCTIONS: number})

    clients = counted("nsq_fast", 0.4, 2400), counted("floor: core", 0.4, 2000), of_cpu("floor: batches", 0.2)
    found = a_scenario("consume", *clients)
    assert ("at most 1.25x floor: core", "1.00x; by instructions 1.20x", "met") in judged(found)
    head, *body = table(found, 2)
    shown = ("client CPU, of the floor", "instructions/message", "instructions, of the floor")
    columns = [head.index(each) for each in shown]
    assert [[row[column] for column in columns] for row in body] == [
        ["1.00x", "2,400", "1.20x"], ["1.00x", "2,000", "1.00x"], ["0.50x", "-", "-"],
    ]  # fmt: skip
    assert shown[0] not in next(table(a_scenario("consume", of_cpu("nsq_fast", 0.6)), 2))


def test_a_client_that_failed_says_why_and_one_round_has_no_spread() -> None:
    failed = ClientResult(client="b", failure="it ended with status 1: Traceback\n  File x\nImportError: no\tmodule")
    found = a_scenario("consume", ClientResult(client="a", rounds=[a_round(1000, 1.0, 0.4)]), failed)
    head, first, second = table(found, 2)
    assert first[head.index("spread")] == "-"
    assert second[1] == "failed: ImportError: no\\tmodule"


def a_scenario(name: str, *clients: ClientResult) -> Scenario:
    return Scenario(name=name, settings=Settings(kind="consume"), server="x", clients=list(clients))


def judged(*scenarios: Scenario) -> list[tuple[str, str, str]]:
    here = About(date="", nsq_fast="", git_commit="", python="", gevent="", system="", cpu="", cores=2, memory_mib=1)
    return [(each.target, each.actual, each.verdict) for each in judge(Run(about=here, scenarios=list(scenarios)))]


def of_rate(client: str, rate: int, cpu: float) -> ClientResult:
    return ClientResult(client=client, rounds=[a_round(rate, 1.0, cpu)])


def test_goals_are_judged_by_the_figures_of_the_run() -> None:
    consume = [
        of_rate("nsq_fast", 1_000_000, 0.4),
        of_rate("go-nsq", 200_000, 0.8),
        of_rate("gnsq", 100_000, 1.0),
        of_rate("nsq_fast aio", 90_000, 0.9),
        of_rate("nsq_fast threads", 99_000, 0.9),
        of_rate("ansq", 20_000, 1.2),
    ]
    found = judged(
        a_scenario("consume", *consume),
        a_scenario("sleep", of_rate("nsq_fast", 15_000, 0.2), of_rate("nsq_fast aio", 12_000, 0.5)),
    )
    for goal in (
        ("at most 1.25x floor: core", "the run has no floor: core in consume", "not measured"),
        ("at most 0.125x go-nsq", "0.10x", "met"),
        ("at most 0.025x gnsq", "0.040x", "missed"),
        ("at least 3x go-nsq", "5.00x", "met"),
        ("at least 14x gnsq", "10.00x", "missed"),
        ("at least 7x asyncnsq", "the run has no asyncnsq in consume", "not measured"),
        ("at least 4x ansq", "4.50x", "met"),
        ("at most 0.2x ansq", "0.17x", "met"),
        ("at least 100,000/s", "99,000/s", "missed"),
        ("at least 0.9x nsq_fast", "0.80x", "missed"),
    ):
        assert goal in found


def test_spark_is_judged_beside_rows_that_were_ready() -> None:
    clients = [of_rate("nsq_fast Spark", 500_000, 0.9), of_rate("floor: ready rows", 1_000_000, 1.2)]
    for mode in ("stream", "read", "cold", "write"):
        found = judged(a_scenario(f"spark-{mode}", *clients))
        assert ("at least 0.6x floor: ready rows", "0.50x", "missed") in found
        assert (("at most 1.67x floor: ready rows", "1.50x", "met") in found) == (mode != "write")


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
def test_an_alarm_rings_when_it_is_due_and_once() -> None:
    alarm = METER.Alarm()
    due = time.time_ns() + 3_000_000
    alarm.set(due)
    assert select.select([alarm.descriptor], [], [], WAIT)[0]
    assert time.time_ns() >= due
    alarm.clear()
    assert not select.select([alarm.descriptor], [], [], 0)[0]
    os.close(alarm.descriptor)


def test_the_suite_measures_every_goal() -> None:
    latency = [(99, 100.0), (99.9, 200.0)]
    measured = msgspec.structs.replace(a_round(), latency_us=latency, package_ms=3.0, import_ms=20.0, first_ms=9.0)
    found = [
        a_scenario(plan.name, *[ClientResult(client=name, rounds=[measured]) for name in plan.clients or names()])
        for plan in plans(1.0, 1)
    ]
    assert "not measured" not in [verdict for _, _, verdict in judged(*found)]


def of_cpu(client: str, *cpu: float) -> ClientResult:
    return ClientResult(client=client, rounds=[a_round(1_000_000, 1.0, each) for each in cpu])


@pytest.mark.parametrize(("ours", "shown", "verdict"), [(0.45, "1.12x", "met"), (0.52, "1.30x", "missed")])
def test_a_share_is_the_ratio_of_rounds_that_took_turns(ours: float, shown: str, verdict: str) -> None:
    """A machine that is three times as slow in one round is so for both."""
    slow = (1, 3, 1, 2, 1)
    floor = of_cpu("floor: core", *(0.4 * by for by in slow))
    found = judged(a_scenario("consume", of_cpu("nsq_fast", *(ours * by for by in slow)), floor))
    assert ("at most 1.25x floor: core", shown, verdict) in found


def test_a_share_that_its_rounds_do_not_settle_says_so() -> None:
    floor = of_cpu("floor: core", 0.4, 0.4, 0.4)
    found = judged(a_scenario("consume", of_cpu("nsq_fast", 0.4, 0.6, 0.44), floor))
    assert ("at most 1.25x floor: core", "1.10x (1.00 to 1.50: not settled by 3 rounds)", "met") in found


def test_growth_is_held_against_that_of_the_floor() -> None:
    few = a_scenario("in-flight-10", of_cpu("nsq_fast", 4.0, 4.4), of_cpu("floor: core", 2.0, 2.2))
    many = a_scenario("in-flight-10000", of_cpu("nsq_fast", 1.0, 1.1), of_cpu("floor: core", 0.4, 0.44))
    assert ("at most 1.2x the same of floor: core", "0.80x", "met") in judged(few, many)


def test_the_middle_leaves_out_more_the_more_values_there_are() -> None:
    """With 90 % confidence: of 5 values none, of 8 the outermost, of 11 two at each end."""
    for many, low, high in ((2, 1, 2), (5, 1, 5), (7, 1, 7), (8, 2, 7), (11, 3, 9)):
        found = middle([float(number) for number in range(1, many + 1)])
        assert (found.low, found.high) == (low, high)


def test_a_ratio_is_settled_when_it_is_known_to_a_tenth() -> None:
    assert is_settled([1.0, 1.05, 1.02])
    assert not is_settled([1.0, 1.2, 1.02])
    assert not is_settled([1.0])
    assert is_settled([])  # nobody will measure it
    assert is_settled([9.0, 1.0, 1.01, 1.02, 1.02, 1.03, 1.04, 0.1])


def test_scenarios_that_are_held_against_each_other_take_turns() -> None:
    together = [[plan.name for plan in group] for group in in_turns(plans(1.0, 3))]
    assert ["connections-1", "connections-10", "connections-100"] in together
    assert ["consume"] in together
    assert [name for group in together for name in group] == [plan.name for plan in plans(1.0, 3)]


@contextmanager
def nowhere(settings: Settings) -> Iterator[Server]:
    yield Server("nowhere", (Address("127.0.0.1", 1),))


def reporting(name: str, messages: int, status: int = 0) -> Client:
    """A client that reports at once that it has published."""
    result = {"event": "result", "messages": messages, "seconds": 1.0, "cpu_seconds": 0.5, "peak_kib": 2048}
    code = f"import sys; print('warming up'); {status or f'print({json.dumps(result)!r})'}; sys.exit({status})"
    return Client(name=name, command=(sys.executable, "-c", code))


def test_scenarios_take_turns_round_by_round_and_one_that_fails_is_left_out() -> None:
    def task(name: str, *clients: Client, rounds: int = 2) -> Task:
        return Task(name, Settings(kind="publish", mode="single", count=1000, rounds=rounds), clients, nowhere)

    seen: list[str] = []
    few, many = run_scenarios(
        [task("few", reporting("a", 1), reporting("broken", 0, status=3)), task("many", reporting("a", 5), rounds=3)],
        seen.append,
    )
    assert seen == [
        "few: round 1 of 2, a", "few: round 1 of 2, broken", "many: round 1 of 3, a",
        "few: round 2 of 2, a", "many: round 2 of 3, a",
        "many: round 3 of 3, a",
    ]  # fmt: skip
    assert [each.messages for each in few.clients[0].rounds] == [1, 1]
    assert [each.messages for each in many.clients[0].rounds] == [5, 5, 5]
    assert few.clients[1].rounds == []
    assert "status 3" in few.clients[1].failure


def unsteady(name: str, cpu: list[float], noted: Path) -> Client:
    """A client that takes the CPU of the next of the numbers in each of its rounds, the last one for ever."""
    code = f"""
import json, pathlib
noted = pathlib.Path({str(noted)!r})
number = int(noted.read_text()) if noted.exists() else 0
noted.write_text(str(number + 1))
cpu = {cpu!r}[number:][:1] or {cpu[-1:]!r}
print(json.dumps(dict(event="result", messages=1000, seconds=1.0, cpu_seconds=cpu[0], peak_kib=1)))
"""
    return Client(name=name, command=(sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("ours", "patience", "taken"),
    [
        # 8 rounds: the outermost ratios are left out, 1.0 and 2.25; the others are all 1.25.
        ([0.4, 0.9, 0.5], 600, 8),
        ([0.4, 4.0, 0.5, 3.0] * MOST_ROUNDS, 600, MOST_ROUNDS),  # it never settles
        ([0.4, 4.0], 0, 2),  # without patience there are the rounds that were asked for
    ],
    ids=["settles", "never settles", "no patience"],
)
def test_those_that_are_compared_take_turns_until_their_ratio_is_settled(
    tmp_path: Path, ours: list[float], patience: float, taken: int
) -> None:
    clients = [
        unsteady("nsq_fast", ours, tmp_path / "ours"),
        unsteady("floor: core", [0.4], tmp_path / "floor"),
        unsteady("somebody else", [0.4], tmp_path / "else"),
    ]
    settings = Settings(kind="publish", mode="single", count=1000, rounds=2)
    (found,) = run_scenarios([Task("consume-tls", settings, clients, nowhere)], patience=patience)
    rounds = {each.client: len(each.rounds) for each in found.clients}
    assert rounds == {"nsq_fast": taken, "floor: core": taken, "somebody else": 2}


def test_a_share_of_the_peak_is_that_of_the_slowest() -> None:
    """The fast one handles 40,000 a second, the slow one 10,000."""
    settings = Settings(kind="publish", mode="single", rate_share=0.5, rounds=1, duration=0.1)
    (found,) = run_scenarios([Task("x", settings, [reporting("a", 40_000), reporting("b", 10_000)], nowhere)])
    assert found.settings.rate == 5000.0
    assert [len(each.rounds) for each in found.clients] == [1, 1]


@pytest.mark.parametrize("pauses", [[0.02] * 9, [0.2, 0.0]], ids=["in each", "a long one in the first"])
def test_a_pause_in_a_short_round_makes_the_others_no_shorter(tmp_path: Path, pauses: list[float]) -> None:
    """A message takes a microsecond; now and then another program has the machine."""
    code = f"""
import json, pathlib, sys
noted = pathlib.Path({str(tmp_path / "noted")!r})
number = int(noted.read_text()) if noted.exists() else 0
noted.write_text(str(number + 1))
count = json.loads(sys.argv[-1])["count"]
seconds = count / 1e6 + ({pauses!r}[number:] or [0])[0]
print(json.dumps(dict(event="result", messages=count, seconds=seconds, cpu_seconds=1.0, peak_kib=1)))
"""
    client = Client(name="a", command=(sys.executable, "-c", code))
    settings = Settings(kind="publish", mode="batch", duration=1.0, rounds=1)
    (found,) = run_scenarios([Task("x", settings, [client], nowhere)])
    assert found.clients[0].rounds[0].seconds == pytest.approx(1.0, abs=0.2)


# Many processes


def curve(*rates: float, client: float = 0.5, server: float = 1.0, together: float = 1.0, nsqds: int = 2) -> Scenario:
    """With 1, 2, 4 ... processes; CPU is in cores."""

    def result(processes: int, rate: float) -> ClientResult:
        figures = {"processes": processes, "nsqds": nsqds, "together": together}
        found = msgspec.structs.replace(a_round(int(rate), cpu=client, server=server), **figures)
        return ClientResult(client="1 process" if processes == 1 else f"{processes} processes", rounds=[found])

    clients = [result(2**number, rate) for number, rate in enumerate(rates)]
    return Scenario(name="Consume", settings=Settings(kind="consume"), server="nsqd", clients=clients)


@pytest.mark.parametrize(
    ("rates", "processes"), [((100, 200, 400), 4), ((100, 190, 200), 2), ((100, 90, 80), 1), ((100,), 1)]
)
def test_the_knee_is_where_more_processes_bring_less_than_a_tenth(rates: tuple[float, ...], processes: int) -> None:
    assert knee_of(curve(*rates)).rounds[0].processes == processes


@pytest.mark.parametrize(
    ("client", "server", "reason"),
    [
        (2.0, 1.9, "the machine is the limit"),
        (1.9, 1.0, "each process has a core of its own to the full"),
        (0.5, 1.9, "each nsqd has a core to the full"),
        (0.5, 1.0, "they wait for each other"),
    ],
)
def test_the_knee_is_explained_by_who_used_what(client: float, server: float, reason: str) -> None:
    said = " ".join(explained(curve(250_000, 500_000, client=client, server=server), cores=4))
    assert "2 processes handle 500,000 messages/s, and no more were measured." in said
    assert reason in said
    assert "understated" not in said
    # The servers need so many seconds of CPU for 500,000 messages.
    assert f"a core of each of the 2 nsqds gives {1_000_000 / server:,.0f} messages/s" in said


def test_processes_that_did_not_run_together_are_said() -> None:
    said = " ".join(explained(curve(100, 190, 200, together=0.4), cores=4))
    assert "The 4 processes were all at work for 40% of the time only" in said
    assert "2 processes handle 190 messages/s, and up to 4, more bring less than a tenth." in said
