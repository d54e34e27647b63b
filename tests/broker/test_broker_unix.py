"""Unix sockets as addresses of an nsqd, the original's and ours."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import Answer, parse
from support.servers import Daemon, find_server
from support.waiting import WAIT, until

from nsq_fast.broker import Broker, BrokerProcess, InThread, LookupdServer, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.errors import ConfigError

OK = b"\0\0\0\x06\0\0\0\0OK"
PUB = b"  V2PUB t\n\0\0\0\x01x"


def exchange(path: Path, data: bytes, size: int = 1 << 20) -> bytes:
    """What comes back, until so many bytes or the end."""
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


def test_commands_and_requests_are_answered_on_paths(start: Any, tmp_path: Path) -> None:
    start()
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


def test_a_path_has_the_permissions_of_the_umask_and_goes_with_the_server(start: Any, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        start()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(tmp_path / "t").st_mode) == 0o750
    start.stop()
    assert not (tmp_path / "t").exists()
    start()
    assert get(tmp_path / "h", "/ping").body == b"OK"


def test_an_nsqd_on_paths_is_registered_with_the_ports_it_is_told_to_have(start: Any, tmp_path: Path) -> None:
    with LookupdServer() as lookupd:
        ports = {"broadcast_tcp_port": 4150, "broadcast_http_port": 4151, "broadcast_address": "front"}
        start(lookupd, **ports)
        exchange(tmp_path / "t", PUB, len(OK))
        until(lambda: lookupd.db.topics() == ["t"])
        until(lambda: [peer.tcp_port for peer in lookupd.db.peers.values()] == [4150])


def test_one_that_has_no_ports_to_tell_is_registered_nowhere(start: Any, tmp_path: Path) -> None:
    with LookupdServer() as lookupd:
        start(lookupd)
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
        assert not lookupd.db.peers


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


def test_several_nsqds_in_a_process_of_their_own_count_their_paths(tmp_path: Path) -> None:
    with BrokerProcess(2, tcp_address=f"unix:{tmp_path}/t") as broker:
        assert [str(nsqd.tcp) for nsqd in broker.nsqds] == [f"unix:{tmp_path}/t", f"unix:{tmp_path}/t.1"]
        broker.restart()
        assert exchange(tmp_path / "t.1", PUB, len(OK)) == OK
        assert broker.messages("t") == [b"x"]


def test_a_broker_in_a_thread_has_paths(tmp_path: Path) -> None:
    with InThread(Broker, tcp_address=f"{tmp_path}/t", http_address=f"{tmp_path}/h") as broker:
        assert exchange(tmp_path / "t", PUB, len(OK)) == OK
        assert broker.messages("t") == [b"x"]


def test_the_command_takes_paths(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nsq_fast", "broker", "--json", "--nsqds", "2", "--no-lookupd"]
    command += ["--tcp-address", f"unix:{tmp_path}/t", "--http-address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        assert [nsqd["tcp"] for nsqd in shown["nsqds"]] == [f"unix:{tmp_path}/t", f"unix:{tmp_path}/t.1"]
        assert exchange(tmp_path / "t.1", PUB, len(OK)) == OK
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
