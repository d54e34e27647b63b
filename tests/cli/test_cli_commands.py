"""The commands against an embedded broker: what they publish, print and show, and how Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from click.testing import Result
from gevent import subprocess as gevent_subprocess
from prometheus_client import generate_latest
from support.cluster import Standalone
from support.commands import Servers, run
from support.http import ask
from support.http_server import Question, scripted_http
from support.servers import SERVERS, RealLookupd, RealNsqd, accepts, find_server, free_address
from support.waiting import PROCESS, WAIT, promptly, until
from support.wire import WireClient
from support.worker import Shown, exporter

from nsq_fast import Consumer, LookupdHTTPClient, Message, NsqdHTTPClient, Producer
from nsq_fast.broker import Broker, BrokerProcess, ClusterProcess
from nsq_fast.broker.process import ServerAddresses
from nsq_fast.client.http import parse_endpoint
from nsq_fast.config import LookupConfig
from nsq_fast.errors import NsqError
from nsq_fast.exporter import Cluster, Families
from nsq_fast.names import Address
from nsq_fast.testing import FaultyLink

ROOT = Path(__file__).parents[2]
OURS = [sys.executable, "-m", "nsq_fast"]
PYTHON = [sys.executable, "-c"]
HERE = {**os.environ, "PYTHONPATH": str(ROOT)}
FACES = ("--tcp-address", "--http-address", "--lookupd-listen-tcp-address", "--lookupd-listen-http-address")
ANY_PORTS = [word for face in FACES for word in (face, "127.0.0.1:0")]


def pub(topic: str, lines: bytes, *arguments: str) -> tuple[int, str]:
    """Publish what a file has; return the exit code and what was written to stderr."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(lines)
        file.flush()
        done = run("pub", topic, file.name, *arguments)
    assert done.stdout == ""
    return done.exit_code, done.stderr


def run_beside(_link: object, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A command in a process of its own, while this one serves a link."""
    command = [*OURS, *arguments]
    return gevent_subprocess.run(command, capture_output=True, timeout=PROCESS, check=False)


class Command:
    """A command, or another program, in a process of its own, with a limit on how long anything may take."""

    def __init__(self, *arguments: str, program: Sequence[str] = OURS, **how: Any) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([*program, *arguments], **pipes, **how)
        self._timer = threading.Timer(PROCESS, self.process.kill)
        self._timer.start()

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self) -> str:
        return self.stdout.readline().decode()

    def interrupt(self, number: int = signal.SIGINT) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, error = self.process.communicate(timeout=PROCESS)
        self._timer.cancel()
        return self.process.returncode, error.decode()


@pytest.fixture
def start() -> Iterator[Any]:
    """A factory of ``Command``; those that still run are killed."""
    commands: list[Command] = []

    def make(*arguments: str, **how: Any) -> Command:
        commands.append(Command(*arguments, **how))
        return commands[-1]

    yield make
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.wait()


def test_pub_sends_lines_of_standard_input_and_of_files_and_tail_prints_them(
    broker: Servers, topic: str, tmp_path: Path
) -> None:
    nsqd = "--nsqd", str(broker.nsqd.tcp)
    command = [*OURS, "pub", topic, *nsqd]
    done = subprocess.run(command, input=b"one\ntwo\n\nthree", capture_output=True, timeout=PROCESS, check=False)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (0, b"", f"published 3 messages to {topic}\n")
    (tmp_path / "one").write_bytes(b"a\0b\0")
    (tmp_path / "two").write_bytes(b"c")
    files = [str(tmp_path / name) for name in ("one", "two")]
    assert "published 3 messages" in run("pub", topic, *files, "-0", *nsqd).output
    assert "published 2 messages" in run("pub", topic, files[0], "--delimiter", "\\0", *nsqd).output
    printed = run("tail", topic, "-n", "8", "--take-backlog", *nsqd)
    assert printed.exit_code == 0, printed.output
    assert sorted(printed.stdout.splitlines()) == ["a", "a", "b", "b", "c", "one", "three", "two"]


def each(flag: str, addresses: Iterable[object]) -> list[str]:
    return [word for address in addresses for word in (flag, str(address))]


def test_pub_to_several_nsqds_sends_each_message_once_or_to_all(broker: Servers, topic: str) -> None:
    flags = each("--nsqd", (nsqd.tcp for nsqd in broker.nsqds))
    assert pub(topic, b"x\n" * 10, "--batch", "1", "-q", *flags) == (0, "")
    assert sum(broker.depths(topic)) == 10
    assert pub(f"{topic}-all", b"a\nb\n", "--to-all", "-q", *flags) == (0, "")
    assert broker.depths(f"{topic}-all") == [2, 2]


def test_pub_keeps_to_its_rate(broker: Servers, topic: str, start: Any) -> None:
    command = start("pub", topic, "--nsqd", str(broker.nsqd.tcp), "--rate", "1", stdin=subprocess.PIPE)
    command.process.stdin.write(b"x\n" * 100)
    command.process.stdin.flush()
    watcher = start("tail", topic, "-n", "1", "--take-backlog", "--nsqd", str(broker.nsqd.tcp))
    assert watcher.line() == "x\n"
    code, error = command.interrupt()
    assert code == 130
    assert 1 <= int(error.split()[1]) < 50


def test_what_a_producer_refuses_is_one_line(broker: Servers, topic: str) -> None:
    nsqd = "--nsqd", str(broker.nsqd.tcp)
    code, error = pub(topic, b"x" * 100, *nsqd, "--producer-opt", "max_msg_size=10")
    assert code == 1
    assert error.startswith("Error: after 0 messages: ")
    assert len(error.splitlines()) == 1
    code, error = pub(topic, b"x", *nsqd, "--producer-opt", "linguer=1")
    assert (code, "did you mean 'linger'" in error) == (2, True)


def test_pub_says_what_it_waits_for_and_which_lookupds_lead_nowhere(topic: str, closed_port: int) -> None:
    with BrokerProcess(nsqds=0) as lonely:
        answers, refuses = f"http://{lonely.lookupd.http}", f"http://127.0.0.1:{closed_port}"
        flags = ["--lookupd", answers, "--lookupd", refuses, "--producer-opt", "publish_timeout=2"]
        code, text = pub(topic, b"one\n", *flags)
    *warnings, error = text.splitlines()
    assert code == 1
    assert any(line.startswith("warning: ") and "wait for an nsqd" in line and answers in line for line in warnings)
    assert error.startswith("Error: after 0 messages: ")
    assert f"lookup failed: {refuses}/lookup" in error
    assert f"does not know the topic, and names no other nsqd (lookup says: TOPIC_NOT_FOUND): {answers})" in error


@pytest.mark.parametrize("through", ["--nsqd", "--lookupd"])
def test_tail_refuses_to_take_the_backlog_of_a_topic_without_channels(
    broker: Servers, topic: str, through: str
) -> None:
    nsqd, http = str(broker.nsqd.tcp), str(broker.nsqd.http)
    flags = ["--nsqd", nsqd, "--nsqd-http", http] if through == "--nsqd" else [through, str(broker.lookupd.http)]
    pub(topic, b"one\ntwo\n", "--nsqd", nsqd)
    if through == "--lookupd":  # to which the nsqd says a moment later that it has the topic
        until(lambda: run("lookup", topic, *flags).exit_code == 0)
    refused = run("tail", topic, "-n", "2", *flags)
    assert refused.exit_code == 1
    assert len(refused.output.splitlines()) == 1
    for part in (topic, http, "no channel", "its 2 waiting messages", "--channel", "--take-backlog"):
        assert part in refused.output
    assert broker.depths(topic) == [2, 0]
    assert NsqdHTTPClient.from_url(http).stats(topic=topic)["topics"][0]["channels"] == []
    printed = run("tail", topic, "-n", "2", "--take-backlog", *flags)
    assert sorted(printed.stdout.splitlines()) == ["one", "two"]


def test_tail_takes_nothing_from_the_channels_there_are(broker: Servers, topic: str, start: Any) -> None:
    for client in broker.clients:
        client.create_topic(topic)
        client.create_channel(topic, "workers")
    flags = [
        *each("--nsqd", (nsqd.tcp for nsqd in broker.nsqds)),
        *each("--nsqd-http", (nsqd.http for nsqd in broker.nsqds)),
    ]
    command = start("tail", topic, "-n", "1", *flags)
    until(lambda: len(broker.channels(topic)) == 4)
    pub(topic, b"for all\n", "--nsqd", str(broker.nsqd.tcp))
    assert command.line() == "for all\n"
    assert command.wait() == (0, "")  # no nsqd had to wait for its turn
    (workers,) = broker.clients[0].stats(topic=topic, channel="workers")["topics"][0]["channels"]
    assert workers["depth"] == 1


def test_tail_refuses_when_it_cannot_see_whether_there_is_a_channel(
    broker: Servers, topic: str, nsq_link: Callable[[Address], FaultyLink]
) -> None:
    link = nsq_link(broker.nsqd.tcp)  # whoever listens one port above is not this nsqd
    refused = run_beside(link, "tail", topic, "--nsqd", str(link.address))
    assert refused.returncode == 1
    (line,) = refused.stderr.decode().splitlines()
    for part in ("cannot see", str(link.address), "--nsqd-http", "--channel", "--take-backlog"):
        assert part in line


def test_tail_refuses_where_lookup_does_not_say_how_to_ask(topic: str) -> None:
    faceless = {"channels": [], "producers": [{"broadcast_address": "127.0.0.1", "tcp_port": 1}]}
    with scripted_http(lambda question: question.answer(faceless)) as [lookupd]:
        refused = run("tail", topic, "--lookupd", str(lookupd.address))
    assert refused.exit_code == 1
    assert "nsqlookupd gives no HTTP address of nsqd 127.0.0.1:1" in refused.output


def test_tail_looks_for_http_one_port_above(topic: str) -> None:
    with neighbours() as server:
        admin = NsqdHTTPClient.from_url(server.http)
        admin.create_topic(topic)
        refused = run("tail", topic, "--nsqd", str(server.tcp))
        assert refused.exit_code == 1
        assert f"on nsqd {server.http} has no channel" in refused.output
        mistaken = run("tail", topic, "--nsqd", str(server.http))
        said = f"Error: {server.http} is the HTTP of an nsqd: --nsqd names its TCP, {server.tcp}\n"
        assert (mistaken.exit_code, mistaken.output) == (1, said)


@contextmanager
def neighbours() -> Iterator[ServerAddresses]:
    """An nsqd whose HTTP port is the one above its TCP port."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        addresses = {"nsqds": [{"tcp": ("127.0.0.1", port), "http": ("127.0.0.1", port + 1)}]}
        try:
            broker = BrokerProcess(lookupd=False, addresses=addresses)
            broker.start()
        except NsqError:  # somebody else has one of the ports
            continue
        with broker:
            yield broker.nsqd
        return


def test_tail_refuses_a_redesigned_topic_without_channels(redesigned: Servers, topic: str) -> None:
    assert redesigned.cluster is not None
    redesigned.cluster.create_topic(topic, 2, 1)
    check_refused(run("tail", topic, "-n", "1", *redesigned.flag), topic)


def check_refused(refused: Result, topic: str) -> None:
    assert refused.exit_code == 1
    for part in (topic, "no channel", "what is published meanwhile", "--take-backlog"):
        assert part in refused.output


def test_tail_refuses_on_a_real_redesigned_nsqd(topic: str, tmp_path: Path) -> None:
    if find_server("nsqd", "redesigned") is None:
        pytest.skip(f"no redesigned nsqd below {SERVERS}")
    nsqd = Standalone(tmp_path)
    try:
        client = WireClient(nsqd.tcp_address)
        assert client.command(f"INTERNAL_CREATE_TOPIC {topic} 0\n".encode()) == b"OK"
        client.close()
        places = ("--nsqd", str(nsqd.tcp_address), "--nsqd-http", str(nsqd.http_address))
        check_refused(run("tail", topic, *places), topic)
        stat = run("stat", "--once", "--nsqd", str(nsqd.http_address))
        assert stat.exit_code == 0, stat.output
        assert topic in stat.output
    finally:
        nsqd.stop()


def test_stat_shows_a_redesigned_cluster(redesigned: Servers, topic: str) -> None:
    assert redesigned.cluster is not None
    redesigned.cluster.create_topic(topic, 2, 2, channels=["workers"], multi_part=True)
    assert pub(topic, b"a\nb\n", "-q", *redesigned.flag) == (0, "")
    shown = run("stat", "--once", "--json", "--topic", topic, *redesigned.flag)
    assert shown.exit_code == 0, shown.output
    rows = {row["channel"]: row for row in json.loads(shown.stdout)}
    assert (rows[""]["messages"], rows[""]["paused"]) == (2, False), "each partition once, though it has two replicas"
    assert (rows[""]["depth"], rows[""]["backend_depth"]) == (0, 0), "nsqd says how many bytes were ever written"
    assert (rows["workers"]["depth"], rows["workers"]["backend_depth"]) == (2, 2)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGINT,),
        (signal.SIGTERM,),
        (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT),  # those that come at once are one
    ],
    ids=lambda numbers: numbers[0].name,
)
def test_tail_prints_several_topics_and_ends_cleanly_at_a_signal(
    broker: Servers, topic: str, start: Any, numbers: Sequence[signal.Signals]
) -> None:
    nsqd = str(broker.nsqd.tcp)
    other = f"{topic}-other"
    command = start("tail", topic, other, "--print-topic", "--channel", "kept", "--nsqd", nsqd)
    for name in (topic, other):
        pub(name, b"hello\n", "--nsqd", nsqd)
        assert command.line() == f"{name} | hello\n"
    for number in numbers[:-1]:
        command.process.send_signal(number)
    assert command.interrupt(numbers[-1]) == (0, "")


def test_tail_ends_quietly_when_nobody_reads_any_more(broker: Servers, topic: str, start: Any) -> None:
    nsqd = str(broker.nsqd.tcp)
    command = start("tail", topic, "--channel", "kept", "--nsqd", nsqd)
    pub(topic, b"one\n", "--nsqd", nsqd)
    assert command.line() == "one\n"
    command.stdout.close()
    pub(topic, b"two\n", "--nsqd", nsqd)
    assert command.process.wait(PROCESS) == 0
    assert command.process.stderr.read() == b""


def test_pub_ends_at_ctrl_c_though_its_input_is_silent(broker: Servers, topic: str, start: Any) -> None:
    command = start("pub", topic, "--nsqd", str(broker.nsqd.tcp), stdin=subprocess.PIPE)
    command.process.stdin.write(b"hello\n")
    command.process.stdin.flush()
    watcher = start("tail", topic, "-n", "1", "--take-backlog", "--nsqd", str(broker.nsqd.tcp))
    assert watcher.line() == "hello\n"
    assert command.interrupt() == (130, f"published 1 message to {topic}\n")


def test_lookup_shows_the_nsqds_of_a_topic(broker: Servers, topic: str) -> None:
    admin = NsqdHTTPClient.from_url(broker.nsqd.http)
    lookupd = "--lookupd", str(broker.lookupd.http)
    unknown = run("lookup", topic, *lookupd)
    assert (unknown.exit_code, unknown.output) == (1, f"no nsqd has {topic}\n")
    admin.create_topic(topic)
    admin.create_channel(topic, "readers")

    def find() -> Any:
        return json.loads(run("lookup", topic, *lookupd, "--json").stdout)

    found = until(lambda: (answer := find())["channels"] and answer)  # nsqd registers what it has by and by
    assert (found["topic"], found["channels"]) == (topic, ["readers"])
    assert [nsqd["tcp"] for nsqd in found["nsqds"]] == [str(broker.nsqd.tcp)]
    shown = run("lookup", topic, *lookupd)
    assert shown.exit_code == 0
    assert str(broker.nsqd.tcp) in shown.output
    assert "channels: readers" in shown.output


def test_stat_shows_depth_over_all_nsqds(broker: Servers, topic: str) -> None:
    pub(topic, b"a\nb\n", "--to-all", *each("--nsqd", (nsqd.tcp for nsqd in broker.nsqds)))
    servers = each("--nsqd", (nsqd.http for nsqd in broker.nsqds))
    for where in (servers, ["--lookupd", str(broker.lookupd.http)]):
        result = run("stat", "--once", "--json", "--topic", topic, *where)
        (row,) = json.loads(result.stdout)
        assert (row["topic"], row["channel"], row["depth"], row["messages"]) == (topic, "", 4, 4)
    for nsqd in broker.nsqds:
        NsqdHTTPClient.from_url(nsqd.http).create_channel(topic, "workers")
    result = run("stat", "--once", "--json", "--topic", topic, "--channel", "workers", *servers)
    (row,) = json.loads(result.stdout)
    assert (row["depth"], row["clients"], row["ready"], row["stalled"]) == (4, 0, 0, "no client")
    shown = run("stat", "--count", "2", "--interval", "10ms", "--topic", topic, *servers)
    assert shown.exit_code == 0
    assert shown.output.count(topic) == 4
    assert shown.output.count("no client") == 2


LATE = 0.5


def answer_late(question: Question) -> None:
    """Each time it is asked the nsqd has got a thousand messages more."""
    time.sleep(LATE)  # sleep: the server is slow
    counts = {"depth": 0, "backend_depth": 0, "message_count": 1000 * len(question.server.targets)}
    question.answer({"topics": [{"topic_name": "orders", "channels": [], **counts}]})


def test_stat_reckons_its_rate_over_the_time_that_has_passed(start: Any) -> None:
    with scripted_http(answer_late) as [nsqd]:
        command = start("stat", "--count", "2", "--interval", "10ms", "--nsqd", str(nsqd.address))
        tables = command.stdout.read().decode()
    *_, row = (line.split() for line in tables.splitlines() if "orders" in line)
    rate = int(row[-2].replace(",", ""))
    assert 0 < rate <= 1000 / LATE


def test_stat_of_a_topic_that_no_nsqd_has_says_so_and_fails(broker: Servers, topic: str) -> None:
    server = ["--nsqd", str(broker.nsqd.http)]
    channel = ["--topic", f"{topic}-there", "--channel", "nobody"]
    pub(f"{topic}-there", b"there\n", "--nsqd", str(broker.nsqd.tcp))
    assert run("stat", "--once", *channel[:2], *server).exit_code == 0
    for what, named in ((["--topic", topic], topic), (channel, f"channel nobody of {topic}-there")):
        for form, said in (([], f"no nsqd has {named}\n"), (["--json"], "[]\n")):
            missing = run("stat", "--count", "2", "--interval", "10ms", *what, *server, *form)
            assert (missing.exit_code, missing.stdout) == (1, 2 * said)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_stat_ends_when_nobody_reads_any_more(broker: Servers, start: Any, form: list[str]) -> None:
    command = start("stat", *form, "--interval", "10ms", "--nsqd", str(broker.nsqd.http))
    assert command.line()
    command.stdout.close()
    assert (command.process.wait(PROCESS), command.process.stderr.read()) == (0, b"")


def test_what_only_shows_has_not_failed_when_nobody_reads(broker: Servers, topic: str) -> None:
    pub(topic, b"there\n", "-q", "--to-all", "--nsqd", str(broker.nsqd.tcp))
    command = [*OURS, "lookup", topic, "--lookupd", str(broker.lookupd.http)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        done.stdout.close()
        assert (done.wait(PROCESS), done.stderr and done.stderr.read()) == (0, "")


def test_stat_ends_at_ctrl_c(broker: Servers, start: Any) -> None:
    command = start("stat", "--json", "--interval", "1h", "--nsqd", str(broker.nsqd.http))
    assert isinstance(json.loads(command.line()), list)
    assert command.interrupt() == (0, "")


def test_broker_serves_until_ctrl_c_and_keeps_its_data(topic: str, tmp_path: Path, start: Any) -> None:
    flags = [*ANY_PORTS, "--data-path", str(tmp_path)]
    command = start("broker", "--json", *flags)
    servers = json.loads(command.line())
    nsqd = servers["nsqds"][0]["tcp"]
    assert pub(topic, b"kept\n", "-q", "--nsqd", nsqd) == (0, "")
    assert json.loads(run("lookup", topic, "--json", "--lookupd", servers["lookupd"]["http"]).stdout)["nsqds"]
    assert command.interrupt() == (0, "")

    command = start("broker", "--json", "--no-lookupd", *flags)
    servers = json.loads(command.line())
    assert servers["lookupd"] is None
    printed = run("tail", topic, "-n", "1", "--take-backlog", "--nsqd", servers["nsqds"][0]["tcp"])
    assert printed.stdout == "kept\n"
    assert command.interrupt(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_broker_prints_how_to_create_a_topic_and_that_works(nodes: str, start: Any) -> None:
    command = start("broker", "--redesigned", "--nodes", nodes, *ANY_PORTS)
    while not (line := command.line()).startswith("a topic:"):
        assert line
    url = line.split("'")[1]
    address, _, path = url.removeprefix("http://").partition("/")
    assert ask(tuple(address.split(":")), "POST", f"/{path}").status == 200, line
    assert command.interrupt() == (0, "")


def test_broker_measures_the_latencies_that_it_is_asked_for(topic: str, start: Any) -> None:
    flag = "--e2e-processing-latency-percentile"
    command = start("broker", "--json", "--no-lookupd", *ANY_PORTS, flag, "0.99", flag, "0.5")
    admin = NsqdHTTPClient.from_url(json.loads(command.line())["nsqds"][0]["http"])
    admin.create_topic(topic)
    admin.create_channel(topic, "c")
    assert "percentiles" in admin.stats(topic=topic)["topics"][0]["channels"][0]["e2e_processing_latency"]
    assert command.interrupt() == (0, "")


def test_broker_runs_a_redesigned_cluster_that_is_ready_for_topics(topic: str, start: Any) -> None:
    flags = [*ANY_PORTS, "--allow-write-with-nochannels"]
    command = start("broker", "--json", "--redesigned", "--nodes", "2", "--lookupds", "2", *flags)
    servers = json.loads(command.line())
    assert len(servers["nsqds"]) == len(servers["lookupds"]) == 2
    with LookupdHTTPClient.from_url(servers["lookupd"]["http"]) as lookupd:
        listed = [f"{node['NodeIP']}:{node['HttpPort']}" for node in lookupd.list_lookupds()["lookupdnodes"]]
        lookupd.create_topic(topic, partition_num=2, replicator=1)
    assert listed == [each["http"] for each in servers["lookupds"]]
    assert pub(topic, b"there\n", "-q", "--lookupd", listed[1]) == (0, "")
    assert command.interrupt() == (0, "")


@pytest.mark.parametrize("command", [("broker", "--no-lookupd"), ("with-broker", "--no-lookupd")], ids=" ".join)
def test_a_port_in_use_is_one_line(broker: Servers, command: tuple[str, ...]) -> None:
    program = ["true"] if "with-broker" in command else []
    result = run(*command, "--tcp-address", str(broker.nsqd.tcp), *program)
    assert result.exit_code == 1
    assert result.output.startswith("Error: cannot start: ")
    assert str(broker.nsqd.tcp) in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("command", [("stat", "--once", "--nsqd"), ("lookup", "t", "--lookupd")], ids=" ".join)
def test_a_tcp_port_given_for_http_is_recognized(broker: Servers, command: tuple[str, ...]) -> None:
    server = broker.nsqd if "--nsqd" in command else broker.lookupd
    result = run(*command, str(server.tcp))
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    for part in (str(server.tcp), "no HTTP", "4151", "4161"):
        assert part in line


def test_servers_of_the_environment_serve_every_command(
    broker: Servers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSQ_LOOKUPD_HTTP_ADDRESSES", str(broker.lookupd.http))
    code, error = pub(topic, b"one\n")
    assert code == 0
    found = f"nsqlookupd http://{broker.lookupd.http} (from NSQ_LOOKUPD_HTTP_ADDRESSES); --lookupd names another"
    assert error.splitlines() == [found, f"published 1 message to {topic}"]
    for command in (("tail", topic, "-n", "1", "--take-backlog"), ("lookup", topic), ("stat", "--once")):
        result = run(*command)
        assert result.exit_code == 0, result.output
        assert found in result.stderr


def check_summary(summary: dict[str, Any], messages: int) -> None:
    assert summary["ended"] == "done"
    assert summary["published"] == messages
    assert summary["finished"] + summary["given_up"] == messages
    assert summary["given_up"] == messages // 1000
    assert (summary["lost"], summary["duplicated"], summary["publish_failed"]) == (0, 0, 0)
    assert summary["delivered"] > messages
    assert min(summary[name] for name in ("failed", "requeued", "touched", "answered_later")) > 0
    assert summary["latency_p50_ms"] <= summary["latency_p99_ms"]


def check_ordered_summary(summary: dict[str, Any], messages: int) -> None:
    assert summary["ended"] == "done"
    assert (summary["published"], summary["finished"], summary["publish_failed"]) == (messages, messages, 0)
    assert (summary["lost"], summary["order_violations"]) == (0, 0)
    assert summary["traces_published"] == summary["traces_joined"] == messages


def test_demo_loses_nothing_on_its_own_broker(start: Any) -> None:
    command = start("demo", "--messages", "4000", "--json", "--no-traces")
    summary = json.loads(command.line())
    assert command.wait() == (0, "")
    check_summary(summary, 4000)
    assert summary["left_on_server"] == 0
    check_ordered_summary(summary["ordered"], 400)
    assert summary["ordered"]["leader_moves"] == 1


def test_demo_runs_its_ordered_part_on_a_redesigned_cluster_and_leaves_nothing_there() -> None:
    with ClusterProcess(nodes=2, lookupds=2) as cluster:
        seed = str(cluster.lookupds[1].http)
        result = run("demo", "--messages", "1000", "--json", "--no-traces", "--lookupd", seed)
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        assert list(summary) == ["ordered"]
        check_ordered_summary(summary["ordered"], 1000)
        assert summary["ordered"]["leader_moves"] == 0
        assert LookupdHTTPClient.from_url(seed).topics()["topics"] == []


def test_demo_finds_servers_through_lookupd_and_leaves_nothing_on_them(broker: Servers) -> None:
    result = run("demo", "--messages", "2000", "--topics", "2", "--json", "--lookupd", str(broker.lookupd.http))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    check_summary(summary, 2000)
    assert summary["left_on_server"] == 0
    topics = NsqdHTTPClient.from_url(broker.nsqd.http).stats()["topics"]
    assert not [topic for topic in topics if topic["topic_name"].startswith("demo-")]


def test_a_report_on_traces_that_fails_is_no_failure_and_leaves_nothing(tmp_path: Path) -> None:
    folders = tmp_path / "bin", tmp_path / "temporary"
    for folder in folders:
        folder.mkdir()
    (folders[0] / "java").write_text("#!/bin/sh\necho 'openjdk version \"17\"' >&2\nexit 1\n")
    (folders[0] / "java").chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(folders[1]), "PATH": str(folders[0]), "JAVA_HOME": ""}
    sizes = ("--messages", "200", "--topics", "1", "--ordered-messages", "50")
    command = [*OURS, "demo", "--json", *sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS, check=False)
    assert (done.returncode, "traces" in json.loads(done.stdout)) == (0, False), done.stderr
    assert done.stderr.splitlines()[-1].startswith("no trace report: ")
    assert list(folders[1].iterdir()) == []


def test_demo_is_interrupted_with_130(start: Any) -> None:
    command = start("demo", "--messages", "5000000", env={**os.environ, "COLUMNS": "200"})
    assert command.process.stderr is not None
    assert command.process.stderr.readline().startswith(b"published ")
    code, error = command.interrupt()
    assert code == 130
    assert "Traceback" not in error


# A program as it is, on embedded servers that end with it.


def with_broker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*OURS, "with-broker", *arguments]
    return subprocess.run(
        command, env={**HERE, **environment}, capture_output=True, text=True, timeout=PROCESS, check=False
    )


@pytest.mark.parametrize("servers", [["--nsqds", "2"], ["--redesigned", "--kind", "--nodes", "2"], ["--no-lookupd"]])
def test_commands_find_the_servers_and_the_exit_code_is_that_of_the_program(servers: list[str]) -> None:
    ours = " ".join(OURS)
    program = f"echo hello | {ours} pub t -q && {ours} tail t -n 1 --channel c && exit 7"
    done = with_broker(*servers, "--topic", "t/c", "--", "sh", "-c", program, NSQD_TCP_ADDRESSES="nsqd.invalid:4150")
    assert (done.returncode, done.stdout) == (7, "hello\n"), done.stderr


def test_a_program_that_knows_one_address_finds_a_server_there_that_is_gone_with_it() -> None:
    tcp, http = free_address(), free_address()
    program = f"{' '.join(OURS)} stat --once --nsqd {http} --topic orders"
    places = ["--no-lookupd", "--tcp-address", str(tcp), "--http-address", str(http)]
    done = with_broker(*places, "--topic", "orders/billing", "--topic", "orders/search", *program.split())
    assert (done.returncode, "billing" in done.stdout, "search" in done.stdout) == (0, True, True), done.stderr
    assert not accepts(tcp)
    assert not accepts(http)


def test_a_worker_is_on_these_servers_whatever_it_declares_and_sigterm_is_passed_on(tmp_path: Path, start: Any) -> None:
    (tmp_path / "app.py").write_text(
        "from nsq_fast.threads import Producer\n"
        "from nsq_fast.worker import subscribe\n"
        "elsewhere = {'nsqd_tcp_addresses': 'nsqd.invalid', 'lookupd_http_addresses': 'lookupd.invalid'}\n"
        "@subscribe('orders', 'billing', **elsewhere)\n"
        "def bill(consumer, message):\n"
        "    print('billed', message.body.decode(), flush=True)\n"
        "@subscribe('new_orders', 'billing', **elsewhere)\n"
        "def bill_new(consumer, message):\n"
        "    print('billed', message.body.decode(), flush=True)\n"
    )
    ours = " ".join(OURS)
    publish = f"echo a book | {ours} pub orders -q; echo a pen | {ours} pub new_orders -q"
    program = ["--", "sh", "-c", f"{publish}; exec {ours} run app"]
    command = start("with-broker", "--topic", "orders/billing", *program, cwd=tmp_path, env=HERE)
    assert {command.line() for _ in range(2)} == {"billed a book\n", "billed a pen\n"}
    code, _ = command.interrupt(signal.SIGTERM)
    assert code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_a_signal_ends_has_the_exit_code_of_shells(number: int) -> None:
    assert with_broker("sh", "-c", f"kill -{int(number)} $$").returncode == 128 + number


def test_what_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for program, code in (("no-such-program", 127), (str(tmp_path / "text"), 126)):
        done = with_broker("--no-lookupd", program)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(f"Error: cannot run {program}: ")
        assert len(done.stderr.splitlines()) == 1


def test_the_servers_outlive_an_interrupt_until_the_program_has_ended(tmp_path: Path, start: Any) -> None:
    """As of a terminal's Ctrl-C, which both get."""
    (tmp_path / "program.py").write_text(
        "import os, signal, urllib.request\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"  # one that comes before the wait is waited for
        "open('ready', 'w').close()\n"
        "signal.sigwait([signal.SIGINT])\n"
        "url = f\"http://{os.environ['NSQD_HTTP_ADDRESSES']}/ping\"\n"
        "print(urllib.request.urlopen(url).read().decode(), flush=True)\n"
        "raise SystemExit(5)\n"
    )
    program = "with-broker", sys.executable, "program.py"
    command = start(*program, cwd=tmp_path, env=HERE, start_new_session=True)
    until((tmp_path / "ready").exists)
    os.killpg(command.process.pid, signal.SIGINT)
    assert (command.line(), command.wait()[0]) == ("OK\n", 5)


# The programs of the README run as they stand: only the address of the nsqlookupd is changed.


README = ROOT / "README.md"
README_CONSUMER, README_PRODUCER, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_consumer_prints_what_the_producer_publishes_and_ends_at_ctrl_c(start: Any) -> None:
    expected = {"hello", "hello in a while", *(f"hello {number}" for number in range(100))}
    with BrokerProcess() as broker:

        def started(program: str) -> Command:
            assert "127.0.0.1:4161" in program
            found: Command = start(
                program.replace("127.0.0.1:4161", str(broker.lookupd.http)), program=PYTHON, cwd=ROOT
            )
            return found

        assert started(README_PRODUCER).wait() == (0, "")
        consumer = started(README_CONSUMER)
        assert {consumer.line() for _ in expected} == {f"1 {text}\n" for text in expected}
        assert consumer.interrupt() == (0, "")


# `nsq-fast exporter`: what Prometheus reads of servers of both dialects.


def shown(metrics: list[Any]) -> Shown:
    return Shown(generate_latest(SimpleNamespace(collect=lambda: metrics)).decode())  # type: ignore[arg-type]


def cluster_of(lookupd: object, timeout: float = WAIT) -> Cluster:
    config = LookupConfig(lookupd_timeout=timeout)
    return Cluster([], [parse_endpoint(str(lookupd), 0)], timeout=timeout, lookup_config=config)


@pytest.mark.slow
def test_a_real_cluster_is_shown(real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]) -> None:
    lookupd = real_lookupd()
    flags = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-e2e-processing-latency-percentile=0.5,0.99")
    first, second = real_nsqd(*flags), real_nsqd(*flags)
    held: list[Message] = []

    def handle(consumer: Consumer, message: Message) -> None:
        if message.body == b"held":
            message.enable_async()
            held.append(message)

    for nsqd, bodies in ((first, [b"held", b"done"]), (second, [b"done"])):
        with NsqdHTTPClient(*nsqd.http_address) as client:
            client.create_topic("orders")
            for channel in ("billing", "waiting", "tail#ephemeral"):
                client.create_channel("orders", channel)
        with Producer(str(nsqd.tcp_address)) as producer:
            for body in bodies:
                producer.publish("orders", body)
    addresses = [str(each.tcp_address) for each in (first, second)]
    consumer = Consumer("orders", "billing", addresses, message_handler=handle, max_in_flight=4)
    consumer.start(block=False)
    with exporter("--lookupd", str(lookupd.http_address)) as read:
        now = until(lambda: (now := Shown(read("/metrics")))("channel_messages_total", channel="billing") == 3 and now)
        until(lambda: held)
        now = until(lambda: (now := Shown(read("/metrics")))("channel_in_flight", channel="billing") == 1 and now)
        assert read("/healthz") == "ok\n"
    consumer.close(drain=False)
    name = str(first.http_address)
    assert now("nsqd_up") == 2
    assert now("nsqlookupd_up", nsqlookupd=str(lookupd.http_address)) == 1
    assert now("channel_clients", channel="billing") == 2
    assert [now("channel_depth", channel=each) for each in ("billing", "waiting")] == [0, 3]
    assert now("topic_messages_total", topic="orders") == 3
    assert now("topic_messages_total", topic="orders", nsqd=name) == 2
    assert now("channel_messages_total", channel="tail#ephemeral") is None
    assert now("channel_paused", channel="billing") == 0
    latencies = [now("channel_e2e_latency_seconds", channel="billing", quantile=each) for each in ("0.5", "0.99")]
    assert all(each is not None and 0 < each < 3600 for each in latencies)


def test_a_frozen_nsqd_is_shown_as_away_and_keeps_nobody_waiting(
    real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]
) -> None:
    lookupd = real_lookupd()
    frozen, well = (real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2))
    with NsqdHTTPClient(*well.http_address) as client:
        client.create_topic("orders")
    cluster = cluster_of(lookupd.http_address, timeout=2.0)
    until(lambda: shown(cluster.scrape())("nsqd_up") == 2)
    frozen.freeze()
    try:
        with promptly():
            now = shown(cluster.scrape())
        up = [now("nsqd_up", nsqd=str(each.http_address)) for each in (frozen, well)]
        assert up == [0, 1]
        assert now("topic_depth", topic="orders") == 0
    finally:
        frozen.thaw()
    until(lambda: shown(cluster.scrape())("nsqd_up") == 2)
    well.kill()  # lookup forgets it: it is remembered here
    until(lambda: shown(cluster.scrape())("nsqd_up", nsqd=str(well.http_address)) == 0)


def test_where_lookup_is_away_the_nsqds_that_were_known_are_asked(nsq_broker: Broker) -> None:
    nsqd, lookupd = nsq_broker.nsqd, nsq_broker.lookupd
    cluster = cluster_of(lookupd.http_address)
    until(lambda: shown(cluster.scrape())("nsqd_up") == 1)
    lookupd.stop()
    until(lambda: shown(cluster.scrape())("nsqlookupd_up") == 0)
    assert shown(cluster.scrape())("nsqd_up", nsqd=str(nsqd.http_address)) == 1


def families(topics: list[dict[str, Any]], with_ephemeral: bool = False) -> Shown:
    found = Families(with_ephemeral)
    found.add_stats("nsqd", {"topics": topics})
    return shown(found.all())


def test_ephemeral_names_are_left_out_unless_wanted() -> None:
    channel = {"channel_name": "c#ephemeral", "depth": 3}
    topics = [{"topic_name": "t", "depth": 1, "channels": [channel]}, {"topic_name": "t#ephemeral", "depth": 7}]
    for with_ephemeral, topic, found in ((False, 1, None), (True, 8, 3)):
        now = families(topics, with_ephemeral)
        assert (now("topic_depth"), now("channel_depth")) == (topic, found)


def test_clients_are_counted_by_every_version() -> None:
    for channel, clients in (({"client_count": 2}, 2), ({"client_num": 3}, 3), ({"clients": [{}]}, 1), ({}, 0)):
        named = {"channel_name": "c", "depth_ts_nano": 5_000_000_000, **channel}
        now = families([{"topic_name": "t", "channels": [named]}])
        assert (now("channel_clients"), now("channel_oldest_timestamp_seconds")) == (clients, 5.0)


def test_an_address_that_is_taken_is_named(closed_port: int) -> None:
    result = run("exporter", "--nsqd", "127.0.0.1:4151", "--http", f"127.0.0.1:{closed_port}")
    assert (result.exit_code, "cannot listen there" in result.output) == (2, True)


def test_it_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = run("exporter", "--http", "127.0.0.1:0")
    assert (result.exit_code, "pip install 'nsq-fast[metrics]'" in result.output) == (1, True)
