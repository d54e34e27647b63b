"""`nsq-fast bench` on the embedded broker, in small runs: what it measures, writes, shows and compares."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nsq_fast.bench import results
from nsq_fast.cli import main

SMALL = ["--count", "2000", "--rounds", "2"]
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


def test_the_example_for_tornado_runs_where_nsq_fast_does(tmp_path: Path) -> None:
    run = measured(tmp_path, "consume", *SMALL, "--client", "tornado example", "--peer-python", "/bin/false")
    assert len(rounds_of(run, "tornado example")) == 2


def test_what_a_client_needs_that_is_not_there_is_said() -> None:
    done = bench("consume", *SMALL, *OURS, "--client", "pynsq", "--peer-python", "/bin/false")
    assert "left out: pynsq needs an interpreter that has pynsq: pip install pynsq, and --peer-python\n" in done.output


def test_a_count_that_nothing_here_can_make_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **options: None)
    done = bench("consume", *SMALL, "--client", "floor: core", "--instructions")
    assert "not counted: instructions are counted by valgrind, which is not installed\n" in done.output
    assert (done.exit_code, "instructions/message" in done.output) == (0, False)


def test_consume_writes_every_round_with_versions_machine_and_settings(tmp_path: Path) -> None:
    run = measured(tmp_path, "consume", *SMALL, *OURS, "--client", "floor: core")
    assert {"nsq_fast", "git_commit", "python", "cpu", "cores", "date", "clients"} <= run["about"].keys()
    scenario = run["scenarios"][0]
    assert (scenario["settings"]["count"], scenario["settings"]["size"], scenario["server"]) == (
        2000,
        200,
        "embedded nsqd",
    )
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
ALL = (*FACES, "nsq_fast as gnsq")
FLOORED = ("nsq_fast", "floor: core")


@pytest.mark.parametrize(
    ("arguments", "clients", "messages", "has_latency"),
    [
        ("publish --mode single --count 1000", ALL, 1000, True),
        ("publish --mode concurrent --count 1000", ALL, 1000, False),
        ("publish --mode batch --count 1000", ALL, 1000, False),
        ("roundtrip --count 1000", ("nsq_fast", "nsq_fast aio", "nsq_fast as gnsq", "floor: core"), 899, True),
        ("consume --count 2000", ALL, 1799, False),
        ("consume --connections 3 --count 2000", FLOORED, 1799, False),
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


def test_ordered_runs_on_the_embedded_cluster(tmp_path: Path) -> None:
    run = measured(tmp_path, "ordered", "--count", "400", "--rounds", "1", "--partitions", "2", *OURS)
    assert rounds_of(run)[0]["messages"] > 300
    assert run["scenarios"][0]["server"] == "embedded cluster"


def test_without_a_count_a_client_is_kept_busy_for_the_duration(tmp_path: Path) -> None:
    run = measured(tmp_path, "consume", "--duration", "0.2", "--rounds", "1", *OURS)
    (each,) = rounds_of(run)
    assert each["messages"] > 200
    assert 0.02 < each["seconds"] < 20.0


def test_one_kind_of_server_at_a_time() -> None:
    done = bench("consume", "--embedded", "--nsqd", "127.0.0.1:1")
    assert done.exit_code == 2
    assert "one of" in done.output


def test_a_folder_without_nsqd_is_refused(tmp_path: Path) -> None:
    done = bench("consume", "--servers", str(tmp_path), *OURS)
    assert done.exit_code == 2
    assert "nsqd" in done.output


@pytest.mark.parametrize(
    ("scenario", "clients"),
    [
        ("consume", ("nsq_fast batches", "nsq_fast columns", "floor: batches")),
        ("consume-tls", ("floor: core",)),
        ("consume-snappy", ("floor: core",)),
        ("consume-deflate", ("floor: core",)),
        ("publish-batch", ("floor: ready bytes",)),
        ("publish-concurrent", ("nsq_fast separate", "floor: pipelined")),
        ("publish-key", ("nsq_fast keyed",)),
        ("ordered-1", ("nsq_fast", "floor: ordered")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_goals_compare_is_measured(tmp_path: Path, scenario: str, clients: tuple[str, ...]) -> None:
    small = ("--only", scenario, "--short", "--rounds", "1", "--duration", "0.002", "--patience", "0")
    run = measured(tmp_path, "suite", *small, *(word for name in clients for word in ("--client", name)))
    for client in clients:
        (each,) = rounds_of(run, client)
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
    """A run of two scenarios with two clients."""
    target = tmp_path_factory.mktemp("suite") / "run.json"
    small = ("--only", "consume", "--only", "publish-single", "--duration", "0.05", "--rounds", "2", "--patience", "0")
    clients = ("--client", "nsq_fast", "--client", "floor: core")
    done = bench("suite", *small, *clients, "--json", str(target))
    assert done.exit_code == 0, done.output
    assert "consume: client CPU per message" in done.output
    return target


def test_compare_with_itself_finds_no_change(suite_run: Path) -> None:
    done = bench("compare", str(suite_run), str(suite_run), "--json")
    assert done.exit_code == 0
    assert {each["verdict"] for each in json.loads(done.stdout)} == {"same"}


def nine_times_slower(each: results.Round) -> results.Round:
    return results.Round(
        messages=each.messages, seconds=each.seconds * 9, cpu_seconds=each.cpu_seconds * 9, peak_kib=each.peak_kib
    )


def test_compare_fails_when_a_client_became_slower(suite_run: Path, tmp_path: Path) -> None:
    run = results.load(suite_run)
    for scenario in run.scenarios:
        for client in scenario.clients:
            if client.client == "nsq_fast":
                client.rounds = [nine_times_slower(each) for each in client.rounds]
    slower = tmp_path / "slower.json"
    slower.write_text(results.as_json(run))
    done = bench("compare", str(suite_run), str(slower))
    assert done.exit_code == 1
    assert "worse" in done.output
    assert bench("compare", str(slower), str(suite_run)).exit_code == 0
    assert bench("compare", str(suite_run), str(slower), "--client", "floor: core").exit_code == 0
    assert bench("compare", str(suite_run), str(slower), "--relative-to", "floor: core").exit_code == 1


@pytest.mark.parametrize(("more", "code"), [(1.02, 0), (1.08, 1)])
def test_what_was_counted_is_compared_and_figures_are_chosen_by_name(
    suite_run: Path, tmp_path: Path, more: float, code: int
) -> None:
    paths = []
    for number, factor in enumerate((1.0, more)):
        run = results.load(suite_run)
        for client in run.scenarios[0].clients:
            client.counted["instructions"] = 1000.0 * factor
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(results.as_json(run))
    done = bench("compare", *map(str, paths), "--figure", "instructions/message", "--json")
    assert done.exit_code == code
    assert {each["metric"] for each in json.loads(done.stdout)} == {"instructions/message"}


def test_the_report_stands_alone_and_has_the_numbers_of_the_run(suite_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html, docs = tmp_path / "report.html", tmp_path / "performance.md"
    assert bench("report", str(suite_run), "--html", str(html), "--docs", str(docs)).exit_code == 0
    page, text = html.read_text(), docs.read_text()
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
    run = results.load(suite_run)
    run.about.cpu, run.about.python = "another one", "3.99"
    for scenario in run.scenarios:
        scenario.server = "nsqd 9.9"
    (tmp_path / "other.json").write_text(results.as_json(run))
    same = bench("compare", str(suite_run), str(suite_run))
    assert "warning" not in same.output
    done = bench("compare", str(suite_run), str(tmp_path / "other.json"))
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
