"""NSQ servers as child processes that are started again on the ports that they had.

Binaries of real ones are looked for below NSQ_FAST_SERVERS (default
~/.cache/nsq-fast/servers), in ``original`` and ``redesigned``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from nsq_fast.names import Address
from support.ports import free_address
from support.waiting import WAIT, block_until

SERVERS = Path(os.environ.get("NSQ_FAST_SERVERS", "~/.cache/nsq-fast/servers")).expanduser()
EMBEDDED_NSQD = (sys.executable, "-m", "nsq_fast", "nsqd")
_LISTENING = re.compile(r"(TCP|HTTP|HTTPS): listening on (\S+):(\d+)")


def find_server(name: str, family: str = "original") -> Path | None:
    """The path of a server's binary, or None where there is none."""
    path = SERVERS / family / name
    return path if os.access(path, os.X_OK) else None


class ServerProcess:
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
        self._command = [str(binary)] if command is None else [*command]
        self._flags = flags
        self._addresses = {face: free_address() for face in self.faces}
        self._process: subprocess.Popen[str] | None = None
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
        self._process = subprocess.Popen(
            [*self._command, *self._address_flags(), *self._flags],
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
            raise TimeoutError(f"{self._command} did not start:\n" + "\n".join([*self.log][-20:]))

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._end("kill")

    def stop(self) -> None:
        """End the process with SIGTERM."""
        self._end("terminate")

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: the system goes on taking connections and bytes for it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        block_until(lambda: all(_state(each) == "T" for each in threads.iterdir()), "the server stopped")

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """SIGKILL, then start again on the same ports."""
        self.kill()
        self.start()

    def _end(self, how: str) -> None:
        if self._process is None:
            return
        getattr(self._process, how)()
        try:
            self._process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _address_flags(self) -> list[str]:
        return [f"-{face.lower()}-address={self._addresses[face]}" for face in self.faces]

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

    def go_down(self) -> None:
        """SIGKILL; a real one gets SIGTERM: killed, it comes back without some messages that it had begun to send."""
        if self._command == [*EMBEDDED_NSQD]:
            self.kill()
        else:
            self.stop()


def _state(thread: Path) -> str:
    """The state of a thread of /proc: T when it is stopped, and for one that is gone."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "T"
