"""Plain HTTP requests over gevent sockets, and what came back byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gevent import Timeout, socket

from support.waiting import WAIT


class Answer(NamedTuple):
    """An HTTP reply; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(address: Any, method: str, path: str, body: bytes = b"", ssl_context: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own. Header names are given with ``_`` for ``-``."""
    lines = {"Host": "test", "Connection": "close", "Content-Length": str(len(body))}
    lines.update({name.replace("_", "-"): value for name, value in headers.items()})
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return parse(exchange(address, head.encode() + body, ssl_context))


def exchange(address: Any, data: bytes, ssl_context: Any = None) -> bytes:
    with Timeout(WAIT, TimeoutError(f"no answer from {address}")), socket.create_connection(address) as sock:
        if ssl_context is not None:
            sock = ssl_context.wrap_socket(sock, server_hostname="localhost")
        sock.sendall(data)
        received = b""
        while chunk := sock.recv(65536):
            received += chunk
        return received


def parse(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return Answer(int(status.split()[1]), headers, body)


def _chunks(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, rest = data.partition(b"\r\n")
        yield rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]


def post(server: Any, path: str, body: bytes = b"") -> None:
    answer = ask(server.http_address, "POST", path, body)
    assert answer.status == 200, answer


def refusal(server: Any, path: str) -> tuple[int, str]:
    """The status of the answer to a POST, and its message, if there is one."""
    answer = ask(server.http_address, "POST", path)
    return answer.status, answer.json["message"] if answer.body else ""


def create(server: Any, topic: str = "t", channel: str = "c") -> None:
    post(server, f"/topic/create?topic={topic}")
    post(server, f"/channel/create?topic={topic}&channel={channel.replace('#', '%23')}")


def channel_figures(server: Any, topic: str = "t", channel: str = "c") -> dict[str, Any]:
    """What /stats says of a channel; nothing where there is none."""
    query = f"/stats?format=json&topic={topic}&channel={channel.replace('#', '%23')}"
    found = ask(server.http_address, "GET", query).json["topics"] or [{"channels": [{}]}]
    return dict(found[0]["channels"][0])


def without(value: Any, is_left_out: Callable[[str], bool]) -> Any:
    """A JSON value without some keys, wherever they are."""
    if isinstance(value, dict):
        return {key: without(item, is_left_out) for key, item in value.items() if not is_left_out(key)}
    return [without(item, is_left_out) for item in value] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    """The keys and types of a JSON value, with the values left out; a list has the shape of its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__
