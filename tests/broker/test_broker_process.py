"""Brokers here and in processes of their own: addresses, ports, Unix sockets, and the original's programs."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import Answer, ask, channel_figures, create, parse, post
from support.processes import piped
from support.servers import SERVERS, Daemon, accepts, find_server, free_address, is_free
from support.waiting import WAIT, until

from nsq_fast.broker import (
    Broker,
    BrokerProcess,
    ClusterProcess,
    InThread,
    LookupdServer,
    NsqdOptions,
    NsqdServer,
    RedesignedCluster,
)
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.names import Address

# A broker here and a broker in a process of its own: addresses, faults, restarts, ends.


ROOT = Path(__file__).parents[2]
_GROUPS = ("nsqds", "lookupds")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(nsqds=2) as process:
        yield process


def producers(lookupd: Any, topic: str) -> list[tuple[int, int]]:
    """The TCP and HTTP ports of the nsqds that a lookup names."""
    answer = ask(lookupd.http_address, "GET", f"/lookup?topic={topic}").json
    return [(producer["tcp_port"], producer["http_port"]) for producer in answer.get("producers", [])]


def ports(nsqd: Any) -> tuple[int, int]:
    return nsqd.tcp_address.port, nsqd.http_address.port


def test_a_broker_serves_at_once_and_its_nsqds_are_registered_also_after_a_kill() -> None:
    with Broker(nsqds=2) as broker:
        lookupd, nsqd = broker.lookupd, broker.nsqds[1]
        assert lookupd is not None

        def registered() -> list[int]:
            nodes = ask(lookupd.http_address, "GET", "/nodes").json["producers"]
            return sorted(node["tcp_port"] for node in nodes)

        both, before = sorted(each.tcp_address.port for each in broker.nsqds), nsqd.tcp_address
        assert registered() == both
        ask(nsqd.http_address, "POST", "/topic/create?topic=t")
        until(lambda: producers(lookupd, "t") == [ports(nsqd)])
        nsqd.kill()
        assert not nsqd.is_running
        until(lambda: registered() == [broker.nsqds[0].tcp_address.port])
        nsqd.start()
        assert nsqd.wait_registered(5)
        assert (nsqd.tcp_address, registered()) == (before, both)


def test_a_broker_without_lookupd() -> None:
    with Broker(lookupd=False) as broker:
        assert broker.lookupd is None
        assert ask(broker.nsqd.http_address, "GET", "/ping").body == b"OK"
        assert set(broker.faults) == {"nsqd0.tcp", "nsqd0.http"}


def test_a_port_in_use_is_an_error_and_nothing_stays_open() -> None:
    with Broker() as broker:
        second = Broker(tcp_address=str(broker.nsqd.tcp_address))
        with pytest.raises(OSError, match="in use"):
            second.start()
        assert second.lookupd is not None
        with pytest.raises(ConnectionRefusedError):
            ask(second.lookupd.http_address, "GET", "/ping")


def test_faults_of_a_process(broker: BrokerProcess) -> None:
    broker.set_faults("lookupd.http", lie=b"\xff[]")
    assert ask(broker.lookupd.http, "GET", "/topics").body == b"\xff[]"
    broker.set_faults("lookupd.http", lie=None)
    assert ask(broker.lookupd.http, "GET", "/topics").json.keys() == {"topics"}
    with pytest.raises(NsqError, match="no such target: nsqd7"):
        broker.set_faults("nsqd7.tcp", drop_replies=True)
    with pytest.raises(NsqError, match="did you mean 'drop_replies'"):
        broker.set_faults("nsqd0.tcp", drop_reply=True)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (Broker, {"max_message_size": 1}, "unknown option 'max_message_size'; did you mean 'max_msg_size'"),
        (Broker, {"nsqds": -1}, "nsqds=-1: must be a whole number, 0 or more"),
        (RedesignedCluster, {"takeover_delays": 1}, "did you mean 'takeover_delay'"),
        (RedesignedCluster, {"nodes": 0}, "nodes=0: must be a whole number, 1 or more"),
        (BrokerProcess, {"max_message_size": 1}, "unknown option 'max_message_size'"),
        (BrokerProcess, {"nsqds": -1}, "nsqds=-1: must be a whole number, 0 or more"),
        (BrokerProcess, {"data_path": 1}, "data_path=1: must be a path"),
        (ClusterProcess, {"nodes": "2"}, "nodes='2': must be a whole number, 1 or more"),
        (ClusterProcess, {"takeover_delay": -1}, "takeover_delay=-1.0: must be a number, at least 0"),
        (ClusterProcess, {"addresses": 1}, "addresses=1: must be a mapping"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    make: Callable[..., object], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "t.diskqueue.000000.dat").touch()
    process = BrokerProcess(data_path=tmp_path)
    with pytest.raises(NsqError, match="is of the original nsqd"):
        process.start()
    assert not process.is_running


DIES = """
import os
from nsq_fast.broker import BrokerProcess
broker = BrokerProcess(lookupd=False)
broker.start()
print(broker.nsqd.http.port, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_does_not_outlive_its_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, env=environment, check=False)
    assert parent.returncode == -signal.SIGKILL
    address = Address("127.0.0.1", int(parent.stdout))
    until(lambda: not accepts(address))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_with_its_state_saved(tmp_path: Path, number: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "nsq_fast.broker.process", "Broker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"lookupd": False, "data_path": str(tmp_path)}).encode() + b"\n")
    child.stdin.flush()
    http = json.loads(child.stdout.readline())["value"]["nsqds"][0]["http"]
    ask(tuple(http), "POST", "/pub?topic=t", b"x")
    child.send_signal(number)
    assert child.wait(10) == 0
    child.stdin.close()
    child.stdout.close()
    with Broker(lookupd=False, data_path=tmp_path) as broker:
        assert ask(broker.nsqd.http_address, "GET", "/stats?format=json").json["topics"][0]["depth"] == 1


# A stopped server's ports are there for its next start: nobody else gets them in between.


@pytest.mark.parametrize("make", [NsqdServer, LookupdServer, BrokerProcess])
def test_a_server_finds_its_ports_again(make: Callable[[], Any]) -> None:
    with make() as started:

        def addresses() -> list[Any]:
            servers = [started.nsqd, started.lookupd] if make is BrokerProcess else [started]
            return [address for server in servers for address in (server.tcp_address, server.http_address)]

        before = addresses()
        for end in (started.stop, started.kill):
            end()
            for address in before:
                assert not accepts(address)
                assert not is_free(address)
            started.start()
            assert addresses() == before
            assert all(map(accepts, before))


def test_a_cluster_and_its_nodes_find_their_ports_again() -> None:
    given = {name: [{"tcp": free_address(), "http": free_address()} for _ in range(2)] for name in _GROUPS}
    with ClusterProcess(nodes=2, lookupds=2, addresses=given) as process:
        nsqds, lookupds = process.nsqds, process.lookupds
        process.restart()
        assert (process.nsqds, process.lookupds) == (nsqds, lookupds)
        address = process.nsqds[1].tcp
        assert address == given["nsqds"][1]["tcp"]
        process.kill_node(1)
        assert not accepts(address)
        assert not is_free(address)
        process.restart_node(1)
        assert accepts(address)


@pytest.mark.parametrize("make", [Broker, RedesignedCluster, BrokerProcess])
def test_the_end_of_a_with_lets_the_ports_go(make: Callable[[], Any]) -> None:
    with make() as group:
        nsqd = group.nsqds[0]
        address = nsqd.tcp if make is BrokerProcess else nsqd.tcp_address
        group.kill()
        assert not is_free(address)
    assert is_free(address)


def test_ports_of_a_server_that_is_gone_are_let_go() -> None:
    server = LookupdServer()
    server.start()
    address = server.tcp_address
    server.stop()
    assert not is_free(address)
    del server
    gc.collect()
    assert is_free(address)


def test_another_server_may_be_started_on_a_port_that_is_held_or_let_go() -> None:
    with NsqdServer() as server:
        server.stop()
        with BrokerProcess(lookupd=False, tcp_address=str(server.tcp_address)) as other:
            assert other.nsqd.tcp == server.tcp_address
            with pytest.raises(OSError, match=f"in use.*{server.tcp_address.port}"):
                server.start()
        server.start()
        assert accepts(server.tcp_address)
        server.stop()
        server.release_ports()
        assert is_free(server.tcp_address)
        server.start()
        assert accepts(server.tcp_address)


# Unix sockets as addresses of an nsqd, the original's and ours.


OK = b"\0\0\0\x06\0\0\0\0OK"

PUB = b"  V2PUB t\n\0\0\0\x01x"


def exchange(path: Path, data: bytes, size: int = 1 << 20) -> bytes:
    received = b""
    with socket.socket(socket.AF_UNIX) as sock, Timeout(WAIT, TimeoutError(path)):
        sock.connect(str(path))
        sock.sendall(data)
        while len(received) < size and (chunk := sock.recv(65536)):
            received += chunk
    return received


def get(path: Path, target: str) -> Answer:
    return parse(exchange(path, f"GET {target} HTTP/1.0\r\n\r\n".encode()))


@pytest.fixture(params=["embedded", "original"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Start an nsqd that listens on ``t`` and ``h``, and is to register; ``start.stop()`` ends it as SIGTERM does."""
    stops: list[Callable[[], Any]] = []

    def run(lookupd: LookupdServer | None = None, **options: Any) -> None:
        options |= {"tcp_address": f"{tmp_path}/t", "http_address": f"{tmp_path}/h", "data_path": str(tmp_path)}
        lookupds = () if lookupd is None else (str(lookupd.tcp_address),)
        if request.param == "embedded":
            server = NsqdServer(NsqdOptions(lookupd_tcp_addresses=lookupds, **options))
            server.start()
            stops.append(server.stop)
        else:
            flags = [f"-{name.replace('_', '-')}={value}" for name, value in options.items()]
            flags += [f"-lookupd-tcp-address={address}" for address in lookupds]
            daemon = Daemon([str(find_server("nsqd", "original")), *flags], tmp_path / "log")
            daemon.start()
            stops.append(daemon.stop)
            until(lambda: daemon.check() or (tmp_path / "h").exists())
            assert get(tmp_path / "h", "/ping").body == b"OK"  # from then on it listens to SIGTERM

    run.is_ours = request.param == "embedded"  # type: ignore[attr-defined]
    run.stop = lambda: stops.pop()()  # type: ignore[attr-defined]
    yield run
    while stops:
        stops.pop()()


def test_paths_are_answered_on_have_the_permissions_of_the_umask_and_go_with_the_server(
    start: Any, tmp_path: Path
) -> None:
    mask = os.umask(0o027)
    try:
        start()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(tmp_path / "t").st_mode) == 0o750
    assert exchange(tmp_path / "t", PUB, len(OK)) == OK
    info = get(tmp_path / "h", "/info").json
    assert (info["tcp_port"], info["http_port"]) == (-1, -1)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "t"))
        sock.sendall(b"  V2SUB t c\n")
        assert sock.recv(100) == OK
        (topic,) = get(tmp_path / "h", "/stats?format=json").json["topics"]
        (client,) = topic["channels"][0]["clients"]
        assert (client["client_id"], client["hostname"], client["remote_address"]) == ("", "", "@")
    start.stop()
    assert not (tmp_path / "t").exists()
    start()
    assert get(tmp_path / "h", "/ping").body == b"OK"


def test_an_nsqd_on_paths_is_registered_only_with_ports_that_it_is_told_to_have(start: Any, tmp_path: Path) -> None:
    with LookupdServer() as lookupd:
        start(lookupd)
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
        assert not lookupd.db.peers
        start.stop()
        start(lookupd, broadcast_tcp_port=4150, broadcast_http_port=4151, broadcast_address="front")
        exchange(tmp_path / "t", PUB, len(OK))
        until(lambda: lookupd.db.topics() == ["t"])
        until(lambda: [peer.tcp_port for peer in lookupd.db.peers.values()] == [4150])


def test_a_path_that_a_killed_server_has_left_is_taken_over_here(start: Any, tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "t"))
    left.close()
    if start.is_ours:
        start()
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
    else:
        with pytest.raises(RuntimeError, match="address already in use"):
            start()


def test_a_path_is_taken_from_no_server_that_listens_and_no_other_file(tmp_path: Path) -> None:
    with NsqdServer(NsqdOptions(tcp_address=f"unix:{tmp_path}/t")) as served:
        assert str(served.tcp_address) == f"unix:{tmp_path}/t"
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
        other = NsqdServer(NsqdOptions(tcp_address=f"{tmp_path}/t"))
        with pytest.raises(OSError, match="Address already in use"):
            other.start()
        served.restart()
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
    (tmp_path / "t").write_text("no socket")
    with pytest.raises(OSError, match="Address already in use"):
        other.start()
    assert (tmp_path / "t").read_text() == "no socket"


def test_several_nsqds_count_up_from_what_is_given(tmp_path: Path) -> None:
    broker = Broker(nsqds=3, tcp_address="127.0.0.1:4150", http_address="127.0.0.1:0")
    assert [nsqd.options.tcp_address for nsqd in broker.nsqds] == ["127.0.0.1:4150", "127.0.0.1:4160", "127.0.0.1:4170"]
    assert len({nsqd.options.node_id for nsqd in broker.nsqds}) == 3
    with BrokerProcess(2, tcp_address=f"unix:{tmp_path}/t") as process:
        assert [str(nsqd.tcp) for nsqd in process.nsqds] == [f"unix:{tmp_path}/t", f"unix:{tmp_path}/t.1"]
        process.restart()
        assert exchange(tmp_path / "t.1", PUB, len(OK)) == OK
        assert process.messages("t") == [b"x"]


def test_a_broker_in_a_thread_has_paths(tmp_path: Path) -> None:
    with InThread(Broker, tcp_address=f"{tmp_path}/t", http_address=f"{tmp_path}/h") as broker:
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
        assert broker.messages("t") == [b"x"]


def test_the_command_takes_paths(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nsq_fast", "broker", "--json", "--no-lookupd"]
    command += ["--tcp-address", f"unix:{tmp_path}/t", "--http-address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["nsqds"][0]["tcp"] == f"unix:{tmp_path}/t"
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
        process.terminate()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda path: NsqdServer(NsqdOptions(tcp_address="unix:")),
        lambda path: NsqdServer(NsqdOptions(https_address=path)),
        lambda path: Broker(lookupd_options={"tcp_address": path}),
        lambda path: RedesignedCluster(1, tcp_address=path),
    ],
)
def test_a_path_is_refused_where_the_real_servers_have_none(make: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        make(f"unix:{tmp_path}/t")


# The original's own programs work against the embedded broker unchanged.


TIMEOUT = 20


@pytest.fixture
def start_app() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start one of the original's programs, by name and arguments; ended after the test."""
    with piped() as start:

        def make(name: str, *arguments: object) -> subprocess.Popen[str]:
            binary = find_server(name)
            if binary is None:
                pytest.skip(f"no {name} below {SERVERS}")
            return start(binary, *arguments)

        yield make


def test_to_nsq_publishes_lines_that_nsq_tail_finds_and_prints(
    broker: BrokerProcess, start_app: Callable[..., Any]
) -> None:
    program = start_app("to_nsq", "-topic=lines", f"-nsqd-tcp-address={broker.nsqd.tcp}")
    program.communicate("one\ntwo\nthree\n", timeout=TIMEOUT)
    assert program.returncode == 0
    topic = ask(broker.nsqd.http, "GET", "/stats?format=json&topic=lines").json["topics"][0]
    assert (topic["message_count"], topic["message_bytes"]) == (3, 11)
    until(lambda: producers(broker.lookupd, "lines"))
    program = start_app("nsq_tail", "-topic=lines", f"-lookupd-http-address={broker.lookupd.http}", "-n=3")
    output, _ = program.communicate(timeout=TIMEOUT)
    assert sorted(output.split()) == ["one", "three", "two"]
    assert program.returncode == 0


def test_nsq_to_file_writes_every_message(broker: BrokerProcess, start_app: Callable[..., Any], tmp_path: Path) -> None:
    bodies = [b"line %d" % number for number in range(1000)]
    post(broker.nsqd, "/mpub?topic=filed", b"\n".join(bodies))
    until(lambda: producers(broker.lookupd, "filed"))
    program = start_app(
        "nsq_to_file", "-topic=filed", f"-lookupd-http-address={broker.lookupd.http}", f"-output-dir={tmp_path}"
    )

    def figures() -> Any:
        return channel_figures(broker.nsqd, "filed", "nsq_to_file") or {"clients": []}

    until(lambda: sum(client["message_count"] for client in figures()["clients"]) == 1000)
    program.terminate()  # writes and finishes what it holds
    program.communicate(timeout=TIMEOUT)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir()).splitlines()
    assert sorted(written) == sorted(bodies)
    until(lambda: figures()["client_count"] == 0)
    assert (figures()["depth"], figures()["in_flight_count"]) == (0, 0)


def test_nsq_stat_shows_a_channel(broker: BrokerProcess, start_app: Callable[..., Any]) -> None:
    create(broker.nsqd, "statted", "c")
    post(broker.nsqd, "/mpub?topic=statted", b"a\nb\nc")
    until(lambda: channel_figures(broker.nsqd, "statted", "c")["depth"] == 3)
    for source in (f"-nsqd-http-address={broker.nsqd.http}", f"-lookupd-http-address={broker.lookupd.http}"):
        program = start_app("nsq_stat", "-topic=statted", "-channel=c", source, "-count=2", "-interval=50ms")
        output, errors = program.communicate(timeout=TIMEOUT)
        figures = [re.findall(r"\d+", line) for line in output.splitlines() if re.match(r"^\s*\d", line)]
        assert figures, (output, errors)
        assert figures[0] == ["0", "0", "3", "3", "0", "0", "0", "0", "0", "3", "0"]


def test_nsqadmin_shows_and_administers(broker: BrokerProcess, start_app: Callable[..., Any]) -> None:
    create(broker.nsqd, "administered", "c")
    post(broker.nsqd, "/mpub?topic=administered", b"a\nb\nc")
    until(lambda: producers(broker.lookupd, "administered"))
    program = start_app("nsqadmin", "-http-address=127.0.0.1:0", f"-lookupd-http-address={broker.lookupd.http}")
    admin = None
    while admin is None:
        found = re.search(r"HTTP: listening on ([\d.]+):(\d+)", program.stderr.readline())
        admin = found and (found[1], int(found[2]))

    nodes = ask(admin, "GET", "/api/nodes").json["nodes"]
    assert sorted(node["tcp_port"] for node in nodes) == sorted(nsqd.tcp.port for nsqd in broker.nsqds)
    topic = ask(admin, "GET", "/api/topics/administered").json
    assert (topic["message_count"], topic["channels"][0]["channel_name"], topic["depth"]) == (3, "c", 0)
    assert ask(admin, "GET", "/api/topics/administered/c").json["depth"] == 3
    node = ask(admin, "GET", f"/api/nodes/{broker.nsqd.http}").json
    assert "administered" in [item["topic_name"] for item in node["topics"]]

    action = json.dumps({"action": "pause"}).encode()
    assert ask(admin, "POST", "/api/topics/administered/c", action).status == 200
    assert channel_figures(broker.nsqd, "administered", "c")["paused"]
    assert ask(admin, "DELETE", "/api/topics/administered").status == 200
    assert ask(broker.nsqd.http, "GET", "/stats?format=json&topic=administered").json["topics"] is None
    assert "administered" not in ask(broker.lookupd.http, "GET", "/topics").json["topics"]


def test_the_originals_nsqd_registers_at_our_lookupd(broker: BrokerProcess, real_nsqd: Callable[..., Any]) -> None:
    lookupd = broker.lookupd
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp}")
    create(nsqd, "real", "c")
    until(lambda: producers(lookupd, "real") == [ports(nsqd)])
    until(lambda: ask(lookupd.http, "GET", "/channels?topic=real").json["channels"] == ["c"])
    # A topic that is new to it gets the channels that others have, which it asks our nsqlookupd for.
    create(broker.nsqd, "ours", "elsewhere")
    until(lambda: ask(lookupd.http, "GET", "/channels?topic=ours").json["channels"])
    post(nsqd, "/topic/create?topic=ours")
    assert channel_figures(nsqd, "ours", "elsewhere")
    nsqd.stop()
    until(lambda: not producers(lookupd, "real"))


def test_our_nsqd_registers_at_the_originals_lookupd(real_lookupd: Callable[..., Any]) -> None:
    lookupd = real_lookupd()
    with BrokerProcess(lookupd=False, lookupd_tcp_addresses=[str(lookupd.tcp_address)]) as process:
        until(lambda: ask(lookupd.http_address, "GET", "/nodes").json["producers"])
        create(process.nsqd)
        until(lambda: producers(lookupd, "t") == [ports(process.nsqd)])
        post(process.nsqd, "/channel/delete?topic=t&channel=c")
        post(process.nsqd, "/topic/delete?topic=t")
        until(lambda: not producers(lookupd, "t"))


# The embedded cluster in a process of its own. More of it: tests/servers/test_bad_days.py.


@pytest.fixture(scope="module")
def cluster_process() -> Iterator[ClusterProcess]:
    """Three nodes, two nsqlookupds, a topic."""
    with ClusterProcess(nodes=3, lookupds=2, takeover_delay=0.05) as cluster_process:
        cluster_process.create_topic("t", 3, 2, ordered=True, channels=["ch"])
        yield cluster_process


def test_the_leader_of_a_partition_is_one_of_its_nodes(cluster_process: ClusterProcess) -> None:
    assert {cluster_process.leader_of("t", number) for number in range(3)} == set(cluster_process.nsqds)
    before = cluster_process.leader_of("t", 0)
    cluster_process.isolate_node(before)
    until(lambda: cluster_process.leader_of("t", 0) != before)
    cluster_process.heal_node(node=before)
    cluster_process.wait_stable()
    with pytest.raises(NsqError, match="there is no partition 9 of 't'"):
        cluster_process.leader_of("t", 9)


def test_what_cannot_be(cluster_process: ClusterProcess) -> None:
    with pytest.raises(NsqError, match="there is no node 7"):
        cluster_process.kill_node(7)
    with pytest.raises(NsqError, match="No node is available"):
        cluster_process.create_topic("large", 3, 3)
    with pytest.raises(NsqError, match="unexpected keyword argument 'order'"):
        cluster_process.create_topic("t", order=True)
    assert cluster_process.depth("none") == 0  # the process goes on
