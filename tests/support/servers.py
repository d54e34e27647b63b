"""NSQ servers as child processes that are started again on the ports that they had.

Binaries of real ones are looked for below NSQ_FAST_SERVERS (default
~/.cache/nsq-fast/servers), in ``original`` and ``redesigned``.

A port that was looked up and let go belongs to whoever asks next: on a busy machine another process has it before the
server that it was meant for. So a socket stays bound to it that does not listen: connections are refused, the system
gives the port to nobody, and a server that asks for it by its number gets it (SO_REUSEADDR, which Go and gevent set
for what listens).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsq_fast import NsqdHTTPClient
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from support.http import without
from support.waiting import WAIT, block_until, until

SERVERS = Path(os.environ.get("NSQ_FAST_SERVERS", "~/.cache/nsq-fast/servers")).expanduser()
EMBEDDED_NSQD = (
    sys.executable,
    "-c",
    "import sys; from nsq_fast.broker.executable import main; sys.exit(main('nsqd', sys.argv[1:]))",
)
"""`nsq-fast nsqd` without the command line, whose modules take as long to import as the server's."""
_held: list[socket.socket] = []
_LISTENING = re.compile(r"(TCP|HTTP|HTTPS): listening on (\S+):(\d+)")


def find_server(name: str, family: str = "original") -> Path | None:
    """The path of a server's binary, or None where there is none."""
    path = SERVERS / family / name
    return path if os.access(path, os.X_OK) else None


def free_address() -> Address:
    """An address where nothing listens, unless the test has something listen there. Held until the process ends."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _held.append(sock)
    return Address(*sock.getsockname())


def is_free(address: Address) -> bool:
    """Whether the system would give the port to a program, for an outgoing connection or for a server."""
    with socket.socket() as sock:  # without SO_REUSEADDR, with which a port that is only bound may be taken
        try:
            sock.bind(address)
        except OSError:
            return False
    return True


def accepts(address: Address) -> bool:
    """Whether something listens there; False where connections are refused."""
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True


class Daemon:
    """One child process with its command line, so that it can be ended and started again as it was.

    Args:
        log: where what it writes goes, for those that do not read it.
        how: of ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str], log: Path = Path(os.devnull), **how: Any) -> None:
        self.command = [*command]
        self._log, self._how = log, how
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, start_new_session=True, text=True, **self._how
            )

    def check(self) -> None:
        """Raise RuntimeError, with what it said last, when it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            said = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.command[0]} ended with {self._process.returncode}:\n{said}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: the system goes on taking connections and bytes for it."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        block_until(lambda: all(_state(each) == "T" for each in threads.iterdir()), "the server stopped")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class ServerProcess(Daemon):
    """One server: started on free ports, killed and restarted on the same ports.

    Args:
        command: the program; None: the real one of ``kind``.

    Attributes:
        log: the lines that it has written, the last of them.
    """

    kind = ""
    faces: tuple[str, ...] = ("TCP", "HTTP")

    def __init__(self, *flags: str, command: Sequence[str] | None = None) -> None:
        binary = find_server(self.kind)
        if command is None and binary is None:
            raise FileNotFoundError(f"no {self.kind} below {SERVERS}")
        super().__init__([str(binary)] if command is None else command)
        self._flags = flags
        self._addresses = {face: free_address() for face in self.faces}
        self.log: deque[str] = deque(maxlen=10_000)
        self.start()

    @property
    def tcp_address(self) -> Address:
        return self._addresses["TCP"]

    @property
    def http_address(self) -> Address:
        return self._addresses["HTTP"]

    @property
    def https_address(self) -> Address:
        return self._addresses["HTTPS"]

    def start(self) -> None:
        """Start, on the ports of the last time; return when every face listens."""
        addresses = [f"-{face.lower()}-address={self._addresses[face]}" for face in self.faces]
        self._process = subprocess.Popen(
            [*self.command, *addresses, *self._flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            errors="replace",  # it logs what clients send
            start_new_session=True,  # Ctrl-C is for us
        )
        ready = threading.Event()
        threading.Thread(target=self._follow, args=(self._process, ready), daemon=True).start()
        if not ready.wait(WAIT):
            self.kill()
            raise TimeoutError(f"{self.command} did not start:\n" + "\n".join([*self.log][-20:]))

    def _follow(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        seen: set[str] = set()
        assert process.stderr is not None
        for line in process.stderr:
            self.log.append(line.rstrip())
            found = _LISTENING.search(line)
            if found:  # another place than asked for, where a flag of the test says so
                face, host, port = found.groups()
                self._addresses[face] = Address(host, int(port))
                seen.add(face)
            if seen >= set(self.faces):
                ready.set()
        process.stderr.close()


class RealLookupd(ServerProcess):
    kind = "nsqlookupd"

    def __init__(self, *flags: str) -> None:
        super().__init__("-broadcast-address=127.0.0.1", *flags)


class RealNsqd(ServerProcess):
    """An nsqd; ``command``: another program than the real one, such as EMBEDDED_NSQD."""

    kind = "nsqd"

    def __init__(self, data_path: Path, *flags: str, https: bool = False, command: Sequence[str] | None = None) -> None:
        if https:
            self.faces = ("TCP", "HTTP", "HTTPS")
        else:  # with a certificate it would listen on a fixed port
            flags = ("-https-address=127.0.0.1:0", *flags)
        super().__init__("-broadcast-address=127.0.0.1", f"-data-path={data_path}", *flags, command=command)

    @property
    def address(self) -> str:
        return str(self.tcp_address)

    @property
    def http(self) -> Address:
        return self.http_address

    def forget(self) -> bool:
        """Delete all topics; whether it is as one that was just started: it answers, and nobody uses it any more."""
        if self._process is None:
            return False
        self.log.clear()
        try:
            with NsqdHTTPClient(*self.http, timeout=2.0) as client:
                until(lambda: not _users(client), 2.0)
                for topic in client.stats()["topics"]:
                    client.delete_topic(topic["topic_name"])
        except (NsqError, AssertionError):
            return False
        return True

    def go_down(self) -> None:
        """SIGKILL; a real one gets SIGTERM: killed, it comes back without some messages that it had begun to send."""
        if self.command == [*EMBEDDED_NSQD]:
            self.kill()
        else:
            self.stop()


def _users(client: NsqdHTTPClient) -> list[Any]:
    """Connections of consumers, and those over which something was published."""
    stats = client.stats()
    channels = (channel for topic in stats["topics"] for channel in topic["channels"])
    return [*(stats.get("producers") or ()), *(user for channel in channels for user in channel["clients"])]


def of_release(expected: Any, found: Any) -> Any:
    """What is expected, without zones where none are found: nsqd 1.3.0 knows of none, nsqd since its release does."""
    return expected if "topology_" in str(found) else without(expected, lambda key: key.startswith("topology_"))


def _state(thread: Path) -> str:
    """The state of a thread of /proc: T when it is stopped, and for one that is gone."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "T"
