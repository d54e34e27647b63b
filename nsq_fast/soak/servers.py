"""The servers of the original dialect: three nsqds and two nsqlookupds as processes, real ones or the embedded.

They listen on 127.0.0.1 and tell nsqlookupd that they are at ``FRONT``, where the proxies listen on the same ports; so
every client that asks lookup comes through a proxy.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from gevent import sleep, subprocess

from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.runtime import LookupdHTTPClient, NsqdHTTPClient

FRONT = "127.0.0.2"
MSG_TIMEOUT = 5.0
START_TIMEOUT = 30.0
END_TIMEOUT = 20.0
SHORTEST_LIFE = 1.0
"""Seconds that a server runs before it is killed. An nsqd that is killed a second time before it has synced opens a
file of its queues anew that it had begun before, and loses one message of each channel that it takes later; it says so
in its log: "positive depth at tail (1), data loss" (nsqio/go-diskqueue: diskqueue.go, checkTailCorruption)."""
_POLL = 0.02
_LISTENING = re.compile(r"(TCP|HTTP): listening on \S+?:(\d+)$", re.MULTILINE)
_HOST = "127.0.0.1"
_NSQD_FLAGS = (
    f"-broadcast-address={FRONT}",
    f"-msg-timeout={MSG_TIMEOUT:.0f}s",
    "-mem-queue-size=0",  # what waits is on disk, so that a restart brings it back
    "-sync-timeout=100ms",
    "-https-address=127.0.0.1:0",
)


def held_by(channel: dict[str, Any]) -> dict[str, int]:
    """What an nsqd holds for a channel, from a row of its ``/stats``, by state."""
    name = channel["channel_name"]
    return {
        f"{name} waiting": channel["depth"],
        f"{name} in flight": channel["in_flight_count"],
        f"{name} deferred": channel["deferred_count"],
    }


class ServerProcess:
    """One server. It is started again on the ports that it had."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self._command = list(command)
        self._log = folder / f"{name}.log"
        self._ports: dict[str, int] = {}
        self._process: Any = None
        self._started = 0.0

    @property
    def tcp(self) -> Address:
        """Where it listens."""
        return Address(_HOST, self._ports["TCP"])

    @property
    def http(self) -> Address:
        """Where its HTTP face listens."""
        return Address(_HOST, self._ports["HTTP"])

    def start(self) -> None:
        """Start it, and return when it serves. Raises NsqError when it ends, or takes too long."""
        addresses = [f"-{face.lower()}-address={_HOST}:{self._ports.get(face, 0)}" for face in ("TCP", "HTTP")]
        begin = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *addresses], stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        deadline = monotonic() + START_TIMEOUT
        while len(self._ports) < 2 or not self._answers():
            if self._process.poll() is not None or monotonic() > deadline:
                raise NsqError(f"{self.name} did not start:\n{self._read_log(begin)[-2000:]}")
            sleep(_POLL)
            self._ports.update((face, int(port)) for face, port in _LISTENING.findall(self._read_log(begin)))
        self._started = monotonic()

    def _read_log(self, begin: int) -> str:
        return self._log.read_bytes()[begin:].decode(errors="replace")

    def _answers(self) -> bool:
        with suppress(NsqError), NsqdHTTPClient(*self.http, timeout=1.0) as client:
            client.ping()
            return True
        return False

    def kill(self) -> None:
        """End it with SIGKILL, not before ``SHORTEST_LIFE``. Without effect when it does not run."""
        if self._process is not None:
            sleep(max(0.0, self._started + SHORTEST_LIFE - monotonic()))
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """End it with SIGTERM: it saves what it has. Raises NsqError when it does not end."""
        self._process.terminate()
        if self._process.wait(END_TIMEOUT) is None:
            raise NsqError(f"{self.name} did not end within {END_TIMEOUT:.0f} s of SIGTERM")
        self._process = None

    def freeze(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)


class OriginalServers:
    """Three nsqds that are registered at two nsqlookupds. Use it in a ``with``.

    Args:
        folder: for data and logs.
        binaries: a folder with nsqd and nsqlookupd; None: the embedded ones.
    """

    def __init__(self, folder: Path, binaries: Path | None = None) -> None:
        self._folder = folder
        self._binaries = binaries
        self.lookupds = [ServerProcess(f"lookupd{n}", self._program("nsqlookupd"), folder) for n in range(2)]
        self.nsqds: list[ServerProcess] = []

    @property
    def name(self) -> str:
        """What runs here, for people."""
        return "original, embedded" if self._binaries is None else "original, real"

    def __enter__(self) -> OriginalServers:
        try:
            for lookupd in self.lookupds:
                lookupd.start()
            for number in range(3):
                self._start_nsqd(number)
            self._wait_registered()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self.nsqds, *self.lookupds):
            server.kill()

    def server(self, name: str) -> ServerProcess:
        """By its name: nsqd0, ..., lookupd0, ..."""
        return next(server for server in (*self.nsqds, *self.lookupds) if server.name == name)

    def _program(self, kind: str) -> list[str]:
        return [sys.executable, "-m", "nsq_fast", kind] if self._binaries is None else [str(self._binaries / kind)]

    def _start_nsqd(self, number: int) -> None:
        data = self._folder / f"data{number}"
        data.mkdir()
        seeds = [f"-lookupd-tcp-address={lookupd.tcp}" for lookupd in self.lookupds]
        flags = [f"-data-path={data}", *_NSQD_FLAGS, *seeds]
        self.nsqds.append(ServerProcess(f"nsqd{number}", [*self._program("nsqd"), *flags], self._folder))
        self.nsqds[-1].start()

    def _wait_registered(self) -> None:
        deadline = monotonic() + START_TIMEOUT
        for lookupd in self.lookupds:
            with LookupdHTTPClient(*lookupd.http) as client:
                while len(client.nodes()["producers"]) < len(self.nsqds):
                    if monotonic() > deadline:
                        raise NsqError(f"the nsqds did not register at {lookupd.name}")
                    sleep(_POLL)
