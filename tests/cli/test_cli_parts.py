"""The pieces of the commands that need no server: splitting, accounting, adding up, reading arguments."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.commands import run
from support.http_server import Question, scripted_http

from nsq_fast._codec import Message
from nsq_fast.bench import results
from nsq_fast.broker import BrokerProcess
from nsq_fast.cli import COMMANDS, main, options, servers
from nsq_fast.cli.console import grid, notes
from nsq_fast.cli.demo import Ledger
from nsq_fast.cli.pub import split
from nsq_fast.cli.stat import ChannelStats, Stalls, add_up
from nsq_fast.cli.tail import json_line
from nsq_fast.errors import BodyInvalid, PublishFailed
from nsq_fast.names import Address


@given(st.lists(st.binary(max_size=20), max_size=20), st.sampled_from([b"\n", b"\0", b"--", b"aab"]), st.data())
def test_split_gives_the_same_messages_however_the_stream_is_cut(
    lines: list[bytes], delimiter: bytes, data: st.DataObject
) -> None:
    stream = delimiter.join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = [message for messages in split(chunks, delimiter, limit=1000) for message in messages]
    assert found == [line for line in stream.split(delimiter) if line]


def test_split_does_not_hold_a_stream_without_delimiters() -> None:
    with pytest.raises(BodyInvalid, match="more than 100 bytes"):
        next(split([b"x" * 102], b"\n", limit=100))


def refuse() -> None:
    raise PublishFailed("no")


@pytest.mark.parametrize(
    ("refused", "finished", "given_up", "settled", "lost", "duplicated"),
    [
        ((8, 9), (0, 1, 2, 8), (3,), 5, 4, 0),  # lost: published and never settled
        ((), (0, 1, 1, 2, 2, 2, *[3] * 1000), (), 4, 6, 3),  # duplicated: finished more than once
        ((), range(5), (0, *range(5, 10)), 10, 0, 0),  # settled once, though it is finished and given up
        ((9,), range(1, 10), (), 9, 1, 0),  # what was not confirmed settles for nothing else
    ],
)
def test_ledger_counts_what_became_of_each_message(
    refused: Sequence[int], finished: Sequence[int], given_up: Sequence[int], settled: int, lost: int, duplicated: int
) -> None:
    def published(ledger: Ledger) -> None:
        for number in range(10):
            ledger.account(range(number, number + 1), refuse if number in refused else lambda: None)

    def handled(ledger: Ledger) -> None:
        for mark, numbers in ((ledger.mark_finished, finished), (ledger.mark_given_up, given_up)):
            for number in numbers:
                mark(number)

    for order in ((published, handled), (handled, published)):  # a message may come before the reply to its publish
        ledger = Ledger(10)
        for step in order:
            step(ledger)
        assert (ledger.published, ledger.publish_failed) == (10 - len(refused), len(refused))
        assert (ledger.finished, ledger.given_up) == (len(set(finished)), len(given_up))
        assert (ledger.settled, ledger.lost, ledger.duplicated) == (settled, lost, duplicated)
        assert ledger.is_whole is (not lost)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nsq-fast", "st"], {"plain,stat"}),
        (["nsq-fast", "run", "--handlers", ""], {"plain,gevent", "plain,threads"}),
        (["nsq-fast", "run", "--log-format", "j"], {"plain,json"}),
    ],
)
def test_shells_complete_commands_and_values(words: list[str], expected: set[str]) -> None:
    variables = {
        "_NSQ_FAST_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    shown = CliRunner().invoke(main, prog_name="nsq-fast", env=variables).output
    assert set(shown.split()) == expected


def stats(topic: str, channel: str, depth: int, paused: bool = False) -> dict[str, object]:
    counts = {"depth": depth, "backend_depth": depth // 2, "message_count": depth * 10, "paused": False}
    flow = {"in_flight_count": 1, "deferred_count": 2, "requeue_count": 3, "timeout_count": 4, "client_count": 5}
    channels = [{**counts, **flow, "channel_name": channel, "paused": paused}]
    return {"topics": [{**counts, "topic_name": topic, "channels": channels}]}


def test_stats_of_several_nsqds_are_added_up() -> None:
    rows = add_up([stats("t", "c", 10), stats("t", "c", 20, paused=True), stats("a", "c", 1), {"topics": None}])
    assert [(row.topic, row.channel) for row in rows] == [("a", ""), ("a", "c"), ("t", ""), ("t", "c")]
    total = rows[-1]
    assert (total.depth, total.backend_depth, total.memory_depth, total.messages) == (30, 15, 15, 300)
    assert (total.in_flight, total.deferred, total.requeued, total.timed_out, total.clients) == (2, 4, 6, 8, 10)
    assert total.paused
    assert total.unanswered == 36


def test_clients_of_a_redesigned_channel_are_counted_where_they_are_not_listed() -> None:
    channel = {**CHANNEL, "channel_name": "c", "client_count": None, "client_num": 3, "clients": None}
    topic = {"topic_name": "t", "topic_partition": "0", "depth": 900, "message_count": 9, "channels": [channel]}
    of_topic, of_channel = add_up([{"topics": [topic]}])
    assert (of_topic.depth, of_topic.messages, of_channel.clients, of_channel.depth) == (0, 9, 3, 7)


WAITS = ChannelStats("t", "c", depth=10, messages=100, clients=2, ready=5)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (WAITS, WAITS._replace(depth=0), ""),
        (WAITS, WAITS._replace(paused=True), "paused"),
        (WAITS, WAITS._replace(ready=0), "RDY 0"),
        (WAITS, WAITS._replace(ready=0, clients=0), "no client"),
        (WAITS, WAITS, "not pushed, 7 s"),
        (WAITS, WAITS._replace(depth=15, messages=105), "not pushed, 7 s"),
        (WAITS, WAITS._replace(depth=8, in_flight=2), "unanswered, 7 s"),
        (WAITS, WAITS._replace(depth=0, in_flight=10), "unanswered, 7 s"),
        (WAITS, WAITS._replace(depth=8, in_flight=2, ready=0), "unanswered, 7 s"),
        (WAITS, WAITS._replace(depth=8, in_flight=2, requeued=4), "requeued, 7 s"),
        (WAITS, WAITS._replace(depth=8, in_flight=2, timed_out=1), "requeued, 7 s"),
        (WAITS, WAITS._replace(depth=9, messages=100), ""),
        (WAITS, WAITS._replace(depth=19, messages=110, in_flight=0), ""),
        (WAITS._replace(channel=""), WAITS._replace(channel=""), ""),
    ],
)
def test_a_channel_says_why_nothing_of_what_waits_is_done(
    before: ChannelStats, after: ChannelStats, reason: str
) -> None:
    stalls = Stalls()
    assert stalls.look(before, 10.0) == ""
    assert stalls.look(after, 17.0) == reason


def test_it_stalls_since_something_was_done_last() -> None:
    stalls = Stalls()
    found = [stalls.look(WAITS._replace(depth=10 - done), at) for at, done in ((0.0, 0), (2.0, 0), (4.0, 1), (6.0, 1))]
    assert found == ["", "not pushed, 2 s", "", "not pushed, 2 s"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2.0), ("0.5", 0.5), ("200ms", 0.2), ("2s", 2.0), ("1.5m", 90.0), ("1h", 3600.0)]
)
def test_durations_are_seconds_or_carry_a_unit(text: str, seconds: float) -> None:
    assert options.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["max_in_flight=2=3", "max-in-flight,2=3"])
def test_a_pair_is_written_as_here_or_as_in_tools_of_nsq(text: str) -> None:
    assert options.pair(text) == ("max_in_flight", "2=3")


@pytest.mark.parametrize(
    ("kind", "texts", "says"),
    [
        (options.duration, ["", "soon", "2 weeks", "-1", "1s2", "ms"], "is not a duration"),
        (options.pair, ["", "alone", "=3", ",3"], "is not name=value"),
        (options.address(4150), ["host:port", ":1", "host:0"], "host|port|:1"),
    ],
)
def test_what_is_none_of_its_kind_is_refused(kind: options.Kind, texts: list[str], says: str) -> None:
    for text in texts:
        with pytest.raises(click.BadParameter, match=says):
            kind(text)


def test_addresses_get_the_default_port() -> None:
    assert options.address(4150)("example") == Address("example", 4150)
    assert str(servers.endpoint(4161)("https://example")) == "https://example:4161"


HEAD = ("topic", "channel", "total", "in flight", "clients")
ROWS = [("orders", "a-channel-with-a-long-name", "1,234,567", "2,500", "12"), ("orders", "", "9", "0", "")]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name_length", [6, 40, 64])
def test_a_table_fits_any_terminal_and_shows_everything(width: int, name_length: int) -> None:
    rows = [("x" * name_length, *row[1:]) for row in ROWS]
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(grid(HEAD, rows, width, title="all channels", names=2))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    together = "".join(shown.split())
    for cell in ("all channels", *(cell for row in rows for cell in row[1:] if cell), "clients", "total"):
        assert cell.replace(" ", "") in together
    assert together.count("x") >= 2 * name_length


@pytest.mark.parametrize("width", [60, 80, 120])
def test_remarks_are_folded(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(notes("what came of it", [("messages per second", "1,234,567.8", "first 95 % answered, " * 4)]))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert "1,234,567.8" in shown
    assert shown.count("answered") == 4


@pytest.mark.usefixtures("no_servers_here")
def test_without_any_server_it_is_said_how_to_name_one() -> None:
    with pytest.raises(click.UsageError) as raised:
        servers.Servers().found()
    for part in ("--nsqd HOST:PORT or --lookupd HOST:PORT", "NSQD_TCP_ADDRESSES", "4150 or 4161", "127.255.255.254"):
        assert part in str(raised.value)


def found(nsqds: Sequence[Any] = (), quiet: bool = False) -> tuple[list[str], list[str]]:
    """nsqds, nsqlookupds; they need not be there."""
    there = servers.Servers(nsqds, face=servers.NSQD_HTTP).found(quiet)
    return list(map(str, there.nsqds)), list(map(str, there.lookupds))


@pytest.mark.usefixtures("no_servers_here")
def test_servers_of_the_environment_are_used_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSQD_HTTP_ADDRESSES", "one two:5000")
    assert found() == (["http://one:4151", "http://two:5000"], [])
    assert "http://two:5000 (from NSQD_HTTP_ADDRESSES); --nsqd names another" in capsys.readouterr().err
    monkeypatch.setenv("NSQ_LOOKUPD_HTTP_ADDRESSES", "seed,other:9000")
    assert found(quiet=True) == ([], ["http://seed:4161", "http://other:9000"])
    assert capsys.readouterr().err == ""
    assert found([Address("mine", 1)]) == (["mine:1"], [])
    monkeypatch.setenv("NSQ_LOOKUPD_HTTP_ADDRESSES", "seed:x")
    with pytest.raises(click.UsageError, match="NSQ_LOOKUPD_HTTP_ADDRESSES: invalid port 'x'"):
        found()


@pytest.mark.usefixtures("no_servers_here")
def test_servers_that_answer_on_this_machine_are_used_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(servers, "LOCAL", "127.0.0.1")
        monkeypatch.setattr(servers, "LOOKUPD", servers.LOOKUPD._replace(port=server.getsockname()[1]))
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert found() == ([], [address])
        assert f"nsqlookupd {address} (it answers here); --lookupd names another" in capsys.readouterr().err
        monkeypatch.setenv("NSQD_HTTP_ADDRESSES", "one")
        assert found() == (["http://one:4151"], [])  # what is named comes before what is found


def test_tail_prints_as_json_what_no_terminal_obeys() -> None:
    body = "\x1b[2J\x9b2J\x7f\u00e9"
    line = json_line(Message(1, 1, b"0123456789abcdef", body.encode(), ext=b"no json"))
    assert line.decode().isprintable()
    shown = json.loads(line)
    assert (shown["body"], shown["headers_base64"]) == (body, "bm8ganNvbg==")


# Wrong arguments and servers that are not there: one line that says what to do, never a traceback.


pytestmark = pytest.mark.usefixtures("no_servers_here")


def test_the_list_of_commands_says_what_each_is_for() -> None:
    result = run("--help")
    lines = [line.split(maxsplit=1) for line in result.output.partition("Commands:")[2].strip().splitlines()]
    assert [line[0] for line in lines] == list(COMMANDS)
    assert all(len(line[1]) > 10 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pub"], "Missing argument 'TOPIC'"),
        (["pub", "t"], "--nsqd HOST:PORT or --lookupd HOST:PORT"),
        (["pub", "no topic", "--nsqd", "h"], "invalid topic name 'no topic'"),
        (["pub", "t", "--nsqd", "h:x"], "invalid port 'x'"),
        (["pub", "t", "--nsqd", "h", "--lookupd", "h"], "not both"),
        (["pub", "t", "--lookupd", "h", "--to-all"], "--to-all needs --nsqd"),
        (["pub", "t", "--nsqd", "h", "--delimiter", ""], "--delimiter must not be empty"),
        (["pub", "t", "/no/such/file", "--nsqd", "h"], "does not exist"),
        (["pub", "t", "--nsqd", "h", "--key", "k", "--partition", "1"], "give --key or --partition, not both"),
        (["pub", "t", "--nsqd", "h", "--partition", "-1"], "'--partition': -1 is not in the range"),
        (["pub", "t", "--nsqd", "h", "--defer", "-1s"], "'-1s' is not a duration"),
        (["tail", "--nsqd", "h"], "which TOPIC"),
        (["tail", "t", "--nsqd", "h", "--channel", "a b"], "invalid channel name 'a b'"),
        (["tail", "t", "--nsqd", "h", "--consumer-opt", "x"], "is not name=value"),
        (["tail", "t", "--nsqd", "h", "--consumer-opt", "topic=x"], "'topic' is set by the command"),
        (["pub", "t", "--nsqd", "h", "--producer-opt", "nsqd_tcp_addresses=x"], "'nsqd_tcp_addresses' is set by"),
        (["lookup", "t"], "--lookupd HOST:PORT"),
        (["stat"], "--nsqd HOST:PORT or --lookupd HOST:PORT"),
        (["stat", "--nsqd", "h", "--channel", "c"], "--channel needs --topic"),
        (["stat", "--nsqd", "h", "--interval", "0"], "'--interval': '0': must be more than 0"),
        (["exporter", "--nsqd", "h", "--http", "1:2:3"], "--http='1:2:3': must be host:port, or :port for all"),
        (["run", "os", "--http", "1:2:3"], "http='1:2:3': must be host:port, or :port for all"),
        (["bench", "consume", "--embedded", "--nsqd", "h:1"], "give one of --embedded, --nsqd, "),
        (["bench", "consume", "--servers", "/"], "/nsqd is not there"),
        (["bench", "consume", "--embedded", "--duration", "0ms"], "'--duration': '0ms': must be more than 0"),
        (["bench", "compare", __file__, __file__, "--threshold", "nan"], "'nan' is not a share: a number, 0 or more"),
        (["bench", "suite", "--only", "consume", "--only", "publsh"], "'publsh' is not one of"),
        (["demo", "--messages", "0"], "--messages"),
        (["demo", "--trace-html", "/dev/null/x.html", "--messages", "9"], "/dev/null/x.html cannot be written"),
        (["demo", "--nsqd", "h", "--lookupd", "h"], "not both"),
        (["broker", "--nsqds", "0", "--no-lookupd"], "nothing to run"),
        (["broker", "--max-rdy-count", "0"], "max_rdy_count"),
        (["broker", "--tls-required", "true"], "tls_cert"),
        (["broker", "--statsd-address", "foo"], "statsd_address='foo': must be host:port"),
        (["broker", "--nodes", "3"], "--nodes: for --redesigned only"),
        (["broker", "--redesigned", "--mem-queue-size", "5"], "--mem-queue-size: not for --redesigned"),
        (["broker", "--redesigned", "--statsd-address", "a:1"], "--statsd-address: not for --redesigned"),
        (["broker", "--redesigned", "--lookupd-tcp-address", "a:1"], "--lookupd-tcp-address: not for --redesigned"),
        *(
            ([*command, "--tcp-address", "foo", *program], "tcp_address='foo': must be host:port")
            for command, program in [(["broker"], []), (["broker", "--redesigned"], []), (["with-broker"], ["true"])]
            for command in (command, [*command, "--nodes" if "--redesigned" in command else "--nsqds", "2"])
        ),
        (["broker", "--lookupd-listen-tcp-address", "foo"], "of the nsqlookupd: tcp_address='foo': must be host:port"),
        (["pub", "t", "--nsqd", "h", "--rate", "nan"], "--rate"),
        (["bench", "consume", "--rate", "inf"], "--rate"),
        (["bench", "consume", "--rate", "fast"], "'fast' is not a rate: a number, 0 or more"),
        (["bench", "idle", "--json", "/dev/null/x.json"], "/dev/null/x.json cannot be written: /dev/null is no folder"),
        (["run-as-gnsq", "/"], "no such file: /"),
        (["no-such-command"], "No such command"),
    ],
)
def test_wrong_arguments_give_one_line_that_says_what_to_do(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    error = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert len(error) == 1
    assert says in error[0]


def written_to(where: str, *arguments: str) -> tuple[int, str]:
    """The exit code of a command in a process of its own, and what it says on stderr."""
    command = shlex.join([sys.executable, "-m", "nsq_fast", *arguments])
    done = subprocess.run(
        ["sh", "-c", f"exec {command} {where}"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["nsqd", "--version"], ["demo", "--messages=9", "--no-traces"]])
def test_what_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    code, said = written_to(">/dev/full", *arguments)
    assert code == 1
    assert said.splitlines()[-1] == "Error: cannot write the output: No space left on device"
    assert "Traceback" not in said


def test_a_journal_is_named_from_the_folder_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.chdir(tmp_path)
    Path("journal").mkdir()
    Path("file").touch()
    result = run("journal", "ls", "journal")
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert result.stderr.startswith(f"{tmp_path / 'journal'} has no folder of a stream")
    for path in ("no", f"file://{tmp_path}/no", "file", f"file://{tmp_path}/file"):
        missing = run("journal", "ls", path)
        there = tmp_path / path.rpartition("/")[2]
        assert (missing.exit_code, missing.output) == (1, f"Error: there is no folder {there}\n")


def test_a_standard_output_that_is_closed_is_no_traceback() -> None:
    code, said = written_to(">&-", "nsqd", "--version")
    assert code == 0
    assert said.startswith("nsqd v")


def test_tail_needs_a_standard_output(tmp_path: Path) -> None:
    with BrokerProcess(lookupd=False) as process:
        servers = "--nsqd", str(process.nsqd.tcp), "--nsqd-http", str(process.nsqd.http)
        assert run("pub", "t", *servers[:2], __file__).exit_code == 0
        code, said = written_to(">&-", "tail", "t", "-c", "c", *servers)
        assert code == 2
        assert "standard output is closed" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["pub", "t", "--nsqd"],
        ["tail", "t", "--lookupd"],
        ["lookup", "t", "--lookupd"],
        ["stat", "--once", "--nsqd"],
        ["stat", "--once", "--lookupd"],
        ["demo", "--nsqd"],
    ],
    ids=" ".join,
)
def test_a_server_that_is_not_there_is_one_line(arguments: list[str], closed_port: int) -> None:
    result = run(*arguments, f"127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert f"127.0.0.1:{closed_port}" in result.output
    assert len(result.output.splitlines()) == 1


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsq_fast", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("nsq-fast, version ")


# What all_commands print on terminals of 60, 80 and 120 columns: nothing is cut off, and no server steers the
# terminal.


RUN = Path(__file__).parents[2] / "docs" / "performance.json"
_STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
CHANNEL = {
    "depth": 7, "backend_depth": 3, "in_flight_count": 2, "deferred_count": 1, "requeue_count": 4, "timeout_count": 5,
    "message_count": 123_456_789, "client_count": 1, "paused": False,
}  # fmt: skip
GREETINGS = "greetings-to-everybody-who-reads-this-name"


@contextmanager
def serving(topic: str, channel: str) -> Iterator[str]:
    """An nsqd and nsqlookupd that has these names."""
    stats = {**CHANNEL, "topic_name": topic, "channels": [{**CHANNEL, "channel_name": channel}]}
    nsqd = {"broadcast_address": "127.0.0.1", "tcp_port": 1, "http_port": 2, "version": channel}

    def answer(question: Question) -> None:
        asked_stats = question.target.startswith("/stats")
        question.answer({"topics": [stats]} if asked_stats else {"channels": [channel], "producers": [nsqd]})

    with scripted_http(answer) as [server]:
        yield str(server.address)


def run_at(width: int, *arguments: str) -> Result:
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


def all_commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command there is."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from all_commands(found, (*path, name))


@pytest.mark.parametrize("width", [60, 120])
def test_every_help_fits(width: int) -> None:
    for path in all_commands():
        done = CliRunner().invoke(main, [*path, "--help"], prog_name="nsq-fast", terminal_width=width)
        assert done.exit_code == 0
        assert len(done.stdout.splitlines()) > 5
        check_fits(done, width, " ".join(("Usage: nsq-fast", *path)))


# A table fits every width: test_a_table_fits_any_terminal_and_shows_everything.


def test_what_stat_lookup_and_bench_compare_show_fits(tmp_path: Path) -> None:
    with serving(GREETINGS, GREETINGS) as server:
        stat = run_at(60, "stat", "--once", "--nsqd", server)
        lookup = run_at(60, "lookup", "orders", "--lookupd", server)
    check_fits(stat, 60, GREETINGS, "123,456,789", "clients", "inflt")
    check_fits(lookup, 60, "127.0.0.1:1", "127.0.0.1:2", GREETINGS)
    run_of_docs = results.load(RUN)
    run_of_docs.scenarios = run_of_docs.scenarios[:2]
    (tmp_path / "run.json").write_text(results.as_json(run_of_docs))
    done = run_at(60, "bench", "compare", "--all", str(tmp_path / "run.json"), str(tmp_path / "run.json"))
    check_fits(done, 60, "nsq_fast batches", "verdict")


def test_bench_scenarios_fit() -> None:
    clients = ("--client", "nsq_fast", "--client", "nsq_fast linger")
    quick = ("--mode", "concurrent", "--count", "1000", "--rounds", "1")
    done = run_at(60, "bench", "publish", *clients, *quick)
    check_fits(done, 60, "nsq_fast linger", "messages/s", "embedded nsqd")


@pytest.mark.slow
def test_demo_fits() -> None:
    sizes = ("--messages", "200", "--topics", "1", "--ordered-messages", "50")
    done = run_at(60, "demo", *sizes, "--no-traces")
    said = ("published", "lost", "duplicated", "latency p99 ms", "done in", "order violations")
    check_fits(done, 60, "200 messages", "1 topic, ", "messages per second", "deferred", *said)


def test_names_that_servers_send_are_escaped() -> None:
    with serving("t\x1b[2J[red]opic", "ch\n[bold]annel\x07") as server:
        stat = run_at(80, "stat", "--once", "--nsqd", server).stdout
        lookup = run_at(80, "lookup", "orders", "--lookupd", server).stdout
    topic, channel = "t\\x1b[2J[red]opic", "ch\\n[bold]annel\\x07"
    for text, names in ((stat, (topic, channel)), (lookup, (channel,))):
        assert "\x1b[2J" not in text
        assert "\x07" not in text
        together = "".join(_STEERING.sub("", text).split())
        assert all(name in together for name in names)
