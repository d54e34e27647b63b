"""What commands print on terminals of 60, 80 and 120 columns: nothing is cut off, and no server steers the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from support.commands import Answering, serving

from nsq_fast.bench import results
from nsq_fast.cli import main

RUN = Path(__file__).parents[2] / "docs" / "performance.json"
WIDTHS = pytest.mark.parametrize("width", [60, 80, 120])
_STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
CHANNEL = {
    "depth": 7, "backend_depth": 3, "in_flight_count": 2, "deferred_count": 1, "requeue_count": 4, "timeout_count": 5,
    "message_count": 123_456_789, "client_count": 1, "paused": False,
}  # fmt: skip
GREETINGS = "greetings-to-everybody-who-reads-this-name"


class Server(Answering):
    """An nsqd and nsqlookupd whose names are long, or steer terminals."""

    names = (GREETINGS, GREETINGS)

    def do_GET(self) -> None:
        topic, channel = self.names
        stats = {**CHANNEL, "topic_name": topic, "channels": [{**CHANNEL, "channel_name": channel}]}
        nsqd = {"broadcast_address": "127.0.0.1", "tcp_port": 1, "http_port": 2, "version": channel}
        found = {"topics": [stats]} if self.path.startswith("/stats") else {"channels": [channel], "producers": [nsqd]}
        self.answer(200, found)


class Steering(Server):
    names = ("t\x1b[2J[red]opic", "ch\n[bold]annel\x07")


@pytest.fixture(params=[Server])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as address:
        yield str(address)


def run(width: int, *arguments: str) -> Result:
    """A command that takes its output for a terminal."""
    terminal = {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}
    return CliRunner(env=terminal).invoke(main, arguments)


def check_fits(result: Result, width: int, *shown: str) -> None:
    """Assert that nothing goes over the edge, and that all of it is there."""
    text = _STEERING.sub("", result.stdout)
    assert text.strip()
    assert max(len(line.rstrip("\r")) for line in text.splitlines()) <= width
    assert "…" not in text
    together = "".join(text.split())
    for words in shown:
        assert "".join(words.split()) in together, (words, text)


def commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command there is."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


@WIDTHS
def test_every_help_fits(width: int) -> None:
    for path in commands():
        done = CliRunner().invoke(main, [*path, "--help"], prog_name="nsq-fast", terminal_width=width)
        assert done.exit_code == 0
        check_fits(done, width, " ".join(("Usage: nsq-fast", *path)))


@WIDTHS
def test_stat_fits(server: str, width: int) -> None:
    check_fits(run(width, "stat", "--once", "--nsqd", server), width, GREETINGS, "123,456,789", "clients", "inflt")


@WIDTHS
def test_lookup_fits(server: str, width: int) -> None:
    check_fits(run(width, "lookup", "orders", "--lookupd", server), width, "127.0.0.1:1", "127.0.0.1:2", GREETINGS)


@WIDTHS
def test_bench_compare_fits(width: int, tmp_path: Path) -> None:
    run_of_docs = results.load(RUN)
    run_of_docs.scenarios = run_of_docs.scenarios[:2]
    (tmp_path / "run.json").write_text(results.as_json(run_of_docs))
    done = run(width, "bench", "compare", "--all", str(tmp_path / "run.json"), str(tmp_path / "run.json"))
    check_fits(done, width, "nsq_fast batches", "verdict")


@WIDTHS
def test_bench_scenarios_fit(width: int) -> None:
    clients = ("--client", "nsq_fast", "--client", "nsq_fast linger")
    quick = ("--mode", "concurrent", "--count", "1000", "--rounds", "1")
    done = run(width, "bench", "publish", *clients, *quick)
    check_fits(done, width, "nsq_fast linger", "messages/s", "embedded nsqd")


@pytest.mark.slow
@WIDTHS
def test_demo_fits(width: int) -> None:
    done = run(width, "demo", "--messages", "200", "--topics", "1", "--ordered-messages", "0", "--no-traces")
    check_fits(done, width, "200 messages", "1 topic, ", "messages per second", "deferred")


@pytest.mark.parametrize("server", [Steering], indirect=True)
@WIDTHS
def test_names_that_servers_send_are_escaped(server: str, width: int) -> None:
    stat = run(width, "stat", "--once", "--nsqd", server).stdout
    lookup = run(width, "lookup", "orders", "--lookupd", server).stdout
    for text in (stat, lookup):
        assert "\x1b[2J" not in text
        assert "\x07" not in text
    check = ("t\\x1b[2J[red]opic", "ch\\n[bold]annel\\x07")
    together = "".join(_STEERING.sub("", stat).split())
    assert all(name in together for name in check)
    assert check[1] in "".join(_STEERING.sub("", lookup).split())
