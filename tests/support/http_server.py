"""An HTTP server in threads of its own, whatever loop the test runs on, that answers as the test says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from nsq_fast.names import Address

T = TypeVar("T", bound="ThreadedServer")
Script = Callable[["Question"], object]


class Question:
    """One request, and the connection it came by."""

    def __init__(self, server: ScriptedHttp, sock: Any, head: str, body: bytes) -> None:
        self.server = server
        self.head = head
        self.body = body
        self.method, self.target, _ = head.split(" ", 2)
        self._sock = sock

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def answer(self, body: Any = b"OK", status: str = "200 OK") -> None:
        self.send(reply(body if isinstance(body, bytes) else json.dumps(body).encode(), status))

    def end(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def hang(self) -> None:
        """Return when the client has closed the connection, or the server stops."""
        with suppress(OSError):
            while self._sock.recv(4096):
                pass


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class ThreadedServer:
    """Serves connections, each in a thread of its own, from when it is made until ``stop``, also that at the end of its
    ``with``."""

    def __init__(self) -> None:
        self._socks: set[Any] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = Address(*self._listener.getsockname()[:2])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve(self, sock: Any) -> None:
        """One connection, to its end. It may raise OSError."""
        raise NotImplementedError

    def stop(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.add(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: Any) -> None:
        with suppress(OSError), sock:
            self.serve(sock)


class ScriptedHttp(ThreadedServer):
    """Calls ``script(question)`` for each request, in a thread for each connection.

    Attributes:
        targets: what was asked for, in order; ``connections``: how many were made.
        open: requests whose script has not returned; ``most``: how many there were at once.
    """

    def __init__(self, script: Script, ssl_context: Any = None) -> None:
        self.script = script
        self.targets: list[str] = []
        self.open = self.most = 0
        self.changed = threading.Condition()
        self._ssl_context = ssl_context
        super().__init__()

    def count(self, path: str) -> int:
        return sum(target.split("?")[0] == path for target in self.targets)

    @property
    def connections(self) -> int:
        return len(self._socks)

    def serve(self, sock: Any) -> None:
        if self._ssl_context is not None:
            sock = self._ssl_context.wrap_socket(sock, server_side=True)
        with sock.makefile("rb") as lines, sock:
            while head := _head(lines):
                size = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0)
                question = Question(self, sock, head, lines.read(size))
                with self.changed:
                    self.targets.append(question.target)
                    self.open += 1
                    self.most = max(self.most, self.open)
                    self.changed.notify_all()
                try:
                    if self.script(question) is False:
                        return
                finally:
                    with self.changed:
                        self.open -= 1
                        self.changed.notify_all()


def _head(lines: Any) -> str:
    """That of the next request; empty at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = lines.readline()
        if not line:
            return ""
        head += line
    return str(head, "latin-1")


@contextmanager
def scripted_http(*scripts: Script, ssl_context: Any = None) -> Iterator[list[ScriptedHttp]]:
    servers = [ScriptedHttp(script, ssl_context) for script in scripts]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
