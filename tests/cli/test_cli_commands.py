"""The commands against an embedded broker: what they publish, print and show, and how Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

from nsq_fast import NsqdHTTPClient
from nsq_fast.broker import BrokerProcess
from nsq_fast.cli import main

LIMIT = 30.0


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(nsqds=2) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return f"topic-{uuid.uuid4().hex[:8]}"


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def depth(broker: BrokerProcess, topic: str) -> list[int]:
    """The topic's depth on each nsqd."""
    depths = []
    for nsqd in broker.nsqds:
        topics = NsqdHTTPClient.from_url(nsqd.http).stats(topic=topic)["topics"]
        depths.append(topics[0]["depth"] if topics else 0)
    return depths


class Command:
    """A command in a process of its own, with a limit on how long anything may take."""

    def __init__(self, *arguments: str, **streams: Any) -> None:
        command = [sys.executable, "-m", "nsq_fast", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams)
        self._timer = threading.Timer(LIMIT, self.process.kill)
        self._timer.start()

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self) -> str:
        """The next line it prints."""
        return self.stdout.readline().decode()

    def interrupt(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal; return the exit code and what it wrote to stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it wrote to stderr."""
        _, error = self.process.communicate(timeout=LIMIT)
        self._timer.cancel()
        return self.process.returncode, error.decode()


@pytest.fixture
def start() -> Iterator[Any]:
    """A factory of ``Command``; those that still run are killed."""
    commands: list[Command] = []

    def make(*arguments: str, **streams: Any) -> Command:
        commands.append(Command(*arguments, **streams))
        return commands[-1]

    yield make
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.wait()


def test_pub_sends_the_lines_of_standard_input_and_tail_prints_them(broker: BrokerProcess, topic: str) -> None:
    nsqd = str(broker.nsqd.tcp)
    published = run("pub", topic, "--nsqd", nsqd, stdin=b"one\ntwo\n\nthree")
    assert published.exit_code == 0, published.output
    assert "published 3 messages" in published.output
    printed = run("tail", topic, "-n", "3", "--nsqd", nsqd)
    assert printed.exit_code == 0, printed.output
    assert sorted(printed.stdout.splitlines()) == ["one", "three", "two"]


def test_pub_finds_nsqds_through_lookupd_and_so_does_tail(broker: BrokerProcess, topic: str) -> None:
    lookupd = str(broker.lookupd.http)
    assert run("pub", topic, "--lookupd", lookupd, "-q", stdin=b"a\nb\n").exit_code == 0
    printed = run("tail", topic, "-n", "2", "--lookupd", lookupd, "--print-topic")
    assert sorted(printed.stdout.splitlines()) == [f"{topic} | a", f"{topic} | b"]


def test_pub_reads_files_with_another_delimiter(broker: BrokerProcess, topic: str, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"a\nb\0c\0")
    (tmp_path / "two").write_bytes(b"d")
    files = [str(tmp_path / name) for name in ("one", "two")]
    result = run("pub", topic, *files, "-0", "--nsqd", str(broker.nsqd.tcp))
    assert "published 3 messages" in result.output
    result = run("pub", topic, files[0], "--delimiter", "b\\0", "--nsqd", str(broker.nsqd.tcp))
    assert result.exit_code == 0


def test_pub_to_all_sends_every_message_to_every_nsqd(broker: BrokerProcess, topic: str) -> None:
    flags = [flag for nsqd in broker.nsqds for flag in ("--nsqd", str(nsqd.tcp))]
    assert run("pub", topic, "--to-all", *flags, stdin=b"a\nb\n").exit_code == 0
    assert depth(broker, topic) == [2, 2]


def test_pub_to_several_nsqds_sends_each_message_once(broker: BrokerProcess, topic: str) -> None:
    flags = [flag for nsqd in broker.nsqds for flag in ("--nsqd", str(nsqd.tcp))]
    assert run("pub", topic, *flags, "--batch", "1", stdin=b"x\n" * 10).exit_code == 0
    assert sum(depth(broker, topic)) == 10


def test_pub_keeps_to_its_rate(broker: BrokerProcess, topic: str, start: Any) -> None:
    command = start("pub", topic, "--nsqd", str(broker.nsqd.tcp), "--rate", "1", stdin=subprocess.PIPE)
    command.process.stdin.write(b"x\n" * 100)
    command.process.stdin.flush()
    watcher = start("tail", topic, "-n", "1", "--nsqd", str(broker.nsqd.tcp))
    assert watcher.line() == "x\n"
    code, error = command.interrupt()
    assert code == 130
    assert 1 <= int(error.split()[1]) < 50


def test_pub_refuses_a_line_that_is_too_long(broker: BrokerProcess, topic: str) -> None:
    limit = "max_msg_size=10"
    result = run("pub", topic, "--nsqd", str(broker.nsqd.tcp), "--producer-opt", limit, stdin=b"x" * 100)
    assert result.exit_code == 1
    assert "Error: after 0 messages: " in result.output


def test_pub_takes_no_option_that_does_not_exist(broker: BrokerProcess, topic: str) -> None:
    result = run("pub", topic, "--nsqd", str(broker.nsqd.tcp), "--producer-opt", "linguer=1", stdin=b"x")
    assert result.exit_code == 2
    assert "did you mean 'linger'" in result.output


def test_tail_hands_back_what_it_does_not_print(broker: BrokerProcess, topic: str) -> None:
    nsqd = str(broker.nsqd.tcp)
    run("pub", topic, "--nsqd", nsqd, stdin=b"".join(b"%d\n" % number for number in range(10)))
    seen: list[str] = []
    for _ in range(2):
        seen += run("tail", topic, "-n", "5", "--channel", "kept", "--nsqd", nsqd).stdout.splitlines()
    assert sorted(seen) == [str(number) for number in range(10)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tail_ends_cleanly_at_a_signal(broker: BrokerProcess, topic: str, start: Any, number: int) -> None:
    nsqd = str(broker.nsqd.tcp)
    other = f"{topic}-other"
    command = start("tail", topic, other, "--print-topic", "--nsqd", nsqd)
    run("pub", topic, "--nsqd", nsqd, stdin=b"hello\n")
    assert command.line() == f"{topic} | hello\n"
    run("pub", other, "--nsqd", nsqd, stdin=b"there\n")
    assert command.line() == f"{other} | there\n"
    assert command.interrupt(number) == (0, "")


def test_tail_ends_quietly_when_nobody_reads_any_more(broker: BrokerProcess, topic: str, start: Any) -> None:
    nsqd = str(broker.nsqd.tcp)
    command = start("tail", topic, "--nsqd", nsqd)
    run("pub", topic, "--nsqd", nsqd, stdin=b"one\n")
    assert command.line() == "one\n"
    command.stdout.close()
    run("pub", topic, "--nsqd", nsqd, stdin=b"two\n")
    assert command.process.wait(LIMIT) == 0
    assert command.process.stderr.read() == b""


def test_pub_ends_at_ctrl_c_though_its_input_is_silent(broker: BrokerProcess, topic: str, start: Any) -> None:
    command = start("pub", topic, "--nsqd", str(broker.nsqd.tcp), stdin=subprocess.PIPE)
    command.process.stdin.write(b"hello\n")
    command.process.stdin.flush()
    watcher = start("tail", topic, "-n", "1", "--nsqd", str(broker.nsqd.tcp))
    assert watcher.line() == "hello\n"
    assert command.interrupt() == (130, f"published 1 messages to {topic}\n")


def test_lookup_shows_the_nsqds_of_a_topic(broker: BrokerProcess, topic: str) -> None:
    NsqdHTTPClient.from_url(broker.nsqd.http).create_channel(topic, "readers")
    lookupd = str(broker.lookupd.http)
    found = json.loads(run("lookup", topic, "--lookupd", lookupd, "--json").stdout)
    assert found["topic"] == topic
    assert [nsqd["tcp"] for nsqd in found["nsqds"]] == [str(broker.nsqd.tcp)]
    assert found["channels"] == ["readers"]
    shown = run("lookup", topic, "--lookupd", lookupd)
    assert shown.exit_code == 0
    assert str(broker.nsqd.tcp) in shown.output
    assert "channels: readers" in shown.output


def test_lookup_of_an_unknown_topic_fails(broker: BrokerProcess, topic: str) -> None:
    result = run("lookup", topic, "--lookupd", str(broker.lookupd.http))
    assert result.exit_code == 1
    assert result.output == f"no nsqd has {topic}\n"


def test_stat_shows_depth_over_all_nsqds(broker: BrokerProcess, topic: str) -> None:
    flags = [flag for nsqd in broker.nsqds for flag in ("--nsqd", str(nsqd.tcp))]
    run("pub", topic, "--to-all", *flags, stdin=b"a\nb\n")
    servers = [flag for nsqd in broker.nsqds for flag in ("--nsqd", str(nsqd.http))]
    for where in (servers, ["--lookupd", str(broker.lookupd.http)]):
        result = run("stat", "--once", "--json", "--topic", topic, *where)
        (row,) = json.loads(result.stdout)
        assert (row["topic"], row["channel"], row["depth"], row["messages"]) == (topic, "", 4, 4)
    shown = run("stat", "--count", "2", "--interval", "10ms", "--topic", topic, *servers)
    assert shown.exit_code == 0
    assert shown.output.count(topic) == 2


def test_stat_ends_at_ctrl_c(broker: BrokerProcess, start: Any) -> None:
    command = start("stat", "--json", "--interval", "1h", "--nsqd", str(broker.nsqd.http))
    assert isinstance(json.loads(command.line()), list)
    assert command.interrupt() == (0, "")


def test_broker_serves_until_ctrl_c_and_keeps_its_data(topic: str, tmp_path: Path, start: Any) -> None:
    ports = ["--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--lookupd-listen-tcp-address"]
    flags = [*ports, "127.0.0.1:0", "--lookupd-listen-http-address", "127.0.0.1:0", "--data-path", str(tmp_path)]
    command = start("broker", "--json", *flags)
    servers = json.loads(command.line())
    nsqd = servers["nsqds"][0]["tcp"]
    assert run("pub", topic, "--nsqd", nsqd, stdin=b"kept\n").exit_code == 0
    assert json.loads(run("lookup", topic, "--json", "--lookupd", servers["lookupd"]["http"]).stdout)["nsqds"]
    assert command.interrupt() == (0, "")

    command = start("broker", "--json", "--no-lookupd", *flags)
    servers = json.loads(command.line())
    assert servers["lookupd"] is None
    assert run("tail", topic, "-n", "1", "--nsqd", servers["nsqds"][0]["tcp"]).stdout == "kept\n"
    assert command.interrupt(signal.SIGTERM) == (0, "")


def test_broker_says_so_when_its_port_is_taken(broker: BrokerProcess) -> None:
    result = run("broker", "--no-lookupd", "--tcp-address", str(broker.nsqd.tcp))
    assert result.exit_code == 1
    assert result.output.startswith("Error: cannot start: ")
    assert len(result.output.splitlines()) == 1


def check_summary(summary: dict[str, Any], messages: int) -> None:
    assert summary["ended"] == "done"
    assert summary["published"] == messages
    assert summary["finished"] + summary["given_up"] == messages
    assert summary["given_up"] == messages // 1000
    assert (summary["lost"], summary["duplicated"], summary["publish_failed"]) == (0, 0, 0)
    assert summary["delivered"] > messages
    assert min(summary[name] for name in ("failed", "requeued", "touched", "answered_later")) > 0
    assert summary["latency_p50_ms"] <= summary["latency_p99_ms"]


def test_demo_loses_nothing_on_its_own_broker(start: Any) -> None:
    command = start("demo", "--messages", "4000", "--json")
    summary = json.loads(command.line())
    assert command.wait() == (0, "")
    check_summary(summary, 4000)
    assert summary["left_on_server"] == 0


def test_demo_runs_on_servers_that_are_there_already(broker: BrokerProcess) -> None:
    for where in (["--lookupd", str(broker.lookupd.http)], ["--nsqd", str(broker.nsqd.tcp)]):
        result = run("demo", "--messages", "2000", "--topics", "2", "--json", *where)
        assert result.exit_code == 0, result.output
        check_summary(json.loads(result.stdout), 2000)


def test_demo_prints_a_summary_for_people() -> None:
    result = run("demo", "--messages", "2000")
    assert result.exit_code == 0, result.output
    for word in ("published", "lost", "duplicated", "messages per second", "latency p99 ms", "done in"):
        assert word in result.output


def test_demo_is_interrupted_with_130(start: Any) -> None:
    command = start("demo", "--messages", "5000000", env={**os.environ, "COLUMNS": "200"})
    assert command.process.stderr is not None
    assert command.process.stderr.readline().startswith(b"published ")
    code, error = command.interrupt()
    assert code == 130
    assert "Traceback" not in error
