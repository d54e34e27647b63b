"""A ``Broker`` in a process of its own: it has its own core, and can be killed.

``BrokerProcess`` starts ``python -m nsq_fast.broker.servers.process``. The child reads
one JSON line with what to run, answers with one line of its addresses when they
all listen, then takes one command a line (the fault switches, or a method to call)
and answers each.
It stops, saving its state, on SIGTERM, SIGINT or the end of its input; so it
never outlives its parent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from gevent import Greenlet, Timeout
from gevent.fileobject import FileObjectPosix

from nsq_fast.errors import NotRunning, NsqError
from nsq_fast.names import Address

from .broker import Broker
from .group import ServerGroup, serve
from .nsqd import NsqdServer
from .startable import Startable

START_TIMEOUT = 15.0
STOP_TIMEOUT = 10.0


class ServerAddresses(msgspec.Struct, frozen=True):
    """Where a server of a broker process listens. ``https`` is None without a certificate."""

    tcp: Address
    http: Address
    https: Address | None = None


class _Addresses(msgspec.Struct):
    nsqds: list[ServerAddresses]
    lookupds: list[ServerAddresses]

    @property
    def lookupd(self) -> ServerAddresses | None:
        return self.lookupds[0] if self.lookupds else None


class BrokerProcess(Startable):
    """A broker as a child process. Use it in a ``with``, or call ``start`` and ``stop``.

    Args:
        nsqds: how many nsqds.
        lookupd: whether there is an nsqlookupd, at which they register.
        data_path: where messages and metadata are kept; None keeps nothing.
        options: of the nsqds, as for ``Broker``.
    """

    _module = "nsq_fast.broker.servers.process"

    def __init__(
        self, nsqds: int = 1, lookupd: bool = True, data_path: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self._settings: dict[str, Any] = {
            "nsqds": nsqds,
            "lookupd": lookupd,
            "data_path": None if data_path is None else os.fspath(data_path),
            **options,
        }
        self._addresses = _Addresses([], [])
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None

    @property
    def nsqds(self) -> list[ServerAddresses]:
        """The addresses of the nsqds. Known once it has been started; the same after a restart."""
        return self._addresses.nsqds

    @property
    def nsqd(self) -> ServerAddresses:
        """The addresses of the first nsqd."""
        return self._addresses.nsqds[0]

    @property
    def lookupd(self) -> ServerAddresses:
        """The addresses of the nsqlookupd."""
        if self._addresses.lookupd is None:
            raise NotRunning("the broker has no nsqlookupd")
        return self._addresses.lookupd

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether the child is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the child and return when it serves, on the addresses of the last time if there was one.

        Without effect when it runs already. Raises NsqError when the child ends instead, with its reason on stderr.
        """
        if self.is_running:
            return
        self.kill()
        root = str(Path(__file__).parents[3])
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which still needs the broker to end cleanly
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        )
        assert self._process.stdout is not None
        self._output = FileObjectPosix(self._process.stdout.fileno(), "rb", closefd=False)
        try:
            self._addresses = msgspec.json.decode(self._request(self._settings, START_TIMEOUT), type=_Addresses)
        except BaseException:
            self.kill()
            raise
        addresses = msgspec.to_builtins(self._addresses)
        self._settings["addresses"] = {**addresses, "lookupd": next(iter(addresses["lookupds"]), None)}

    def stop(self) -> None:
        """End the child with SIGTERM: it saves its state first. Without effect when it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(TimeoutError), Timeout(STOP_TIMEOUT, TimeoutError()):
            self._output.read()
        self.kill()

    def kill(self) -> None:
        """End the child with SIGKILL. Without effect when it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._output.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None

    def restart(self) -> None:
        """SIGKILL, then start again on the same addresses and data."""
        self.kill()
        self.start()

    def set_faults(self, target: str, **switches: Any) -> None:
        """Turn fault switches (see ``Faults``) of ``nsqd0.tcp``, ``nsqd0.http``, ..., ``lookupd.http``.

        Raises NsqError when there is no such target or switch.
        """
        if isinstance(switches.get("lie"), bytes):
            switches["lie"] = switches["lie"].decode("latin-1")
        self._call("set_faults", target, switches)

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> None:
        question = {"method": method, "arguments": arguments, "keywords": keywords}
        answer = msgspec.json.decode(self._request(question, STOP_TIMEOUT))
        if answer is not None:
            raise NsqError(answer)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise NotRunning("the broker process is not running")
        return self._process

    def _request(self, question: Any, timeout: float) -> bytes:
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(question) + b"\n")
        process.stdin.flush()
        with Timeout(timeout, TimeoutError("the broker process does not answer")):
            answer: bytes = self._output.readline()
        if not answer:
            raise NsqError(f"the broker process ended, with status {process.wait()}")
        return answer


def main() -> None:
    """The child."""
    run(Broker)


def run(make: Callable[..., ServerGroup]) -> None:
    """Start what ``make`` makes of the settings on stdin, and execute the commands that follow them."""
    commands = FileObjectPosix(sys.stdin.fileno(), "rb", closefd=False)
    group = make(**msgspec.json.decode(commands.readline()))
    follower: Greenlet[..., Any] = Greenlet(_run_commands, commands, group)
    follower.link(lambda _: group.end())

    def ready() -> None:
        _write_line(_describe(group))
        follower.start()

    serve(group, ready)


def _run_commands(commands: Any, group: ServerGroup) -> None:
    for line in commands:
        command = msgspec.json.decode(line)
        _write_line(_execute(group, **command))


def _execute(group: ServerGroup, method: str, arguments: list[Any], keywords: dict[str, Any]) -> str | None:
    try:
        if method == "set_faults":
            _set_faults(group, *arguments)
        else:
            getattr(group, method)(*arguments, **keywords)
    except NsqError as error:
        return str(error)
    return None


def _set_faults(group: ServerGroup, target: str, switches: dict[str, Any]) -> None:
    faults = group.faults.get(target)
    if faults is None:
        raise NsqError(f"no such target: {target}; there are {', '.join(group.faults)}")
    if isinstance(switches.get("lie"), str):
        switches["lie"] = switches["lie"].encode("latin-1")
    faults.set(**switches)


def _describe(group: ServerGroup) -> _Addresses:
    addresses = _Addresses([], [])
    for server in group.servers.values():
        if isinstance(server, NsqdServer):
            addresses.nsqds.append(ServerAddresses(server.tcp_address, server.http_address, server.https_address))
        else:
            addresses.lookupds.append(ServerAddresses(server.tcp_address, server.http_address))
    return addresses


def _write_line(answer: Any) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
