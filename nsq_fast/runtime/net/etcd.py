"""Reading etcd by its v2 API, which the redesigned servers use: a key, a folder, and waiting for a change.

The members of a cluster are asked in turn: one that fails is passed over until
the others have failed, too.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from gevent import Timeout

from nsq_fast.errors import ConfigError, HttpError, NsqError, RemoteProtocolError
from nsq_fast.names import listed

from .http import Endpoint, HttpClient, Reply, parse_endpoint

T = TypeVar("T")

DEFAULT_ETCD_PORT = 2379
# etcd: Documentation/v2/errors.md, EcodeKeyNotFound
KEY_NOT_FOUND = 404
MAX_REPLY_SIZE = 8 * 1024 * 1024
# Longer than any watch: its limit is the caller's.
_WATCH_MARGIN = 5.0


class EtcdNode(msgspec.Struct):
    """A key, or a folder: what the v2 API says of it."""

    key: str = ""
    value: str = ""
    modifiedIndex: int = 0
    dir: bool = False
    nodes: list[EtcdNode] = []


class EtcdAnswer(NamedTuple):
    """A node as it is, and the state of the cluster in which it was so: later changes have a higher number."""

    node: EtcdNode
    state: int


class _WireAnswer(msgspec.Struct):
    node: EtcdNode | None = None


class EtcdClient:
    """Reads one etcd cluster.

    Args:
        addresses: ``host``, ``host:port``, ``http://...`` or ``https://...``, one or several. Default port 2379.
        timeout: limit in seconds for a request, watches excepted.
        username, password: of etcd's basic authentication; both or none.
        tls_options: for https: an ssl.SSLContext or a mapping: cafile, certfile, keyfile, server_hostname, verify.

    Raises ConfigError for what cannot be used.
    """

    def __init__(
        self,
        addresses: Any,
        *,
        timeout: float,
        username: str | None = None,
        password: str | None = None,
        tls_options: Any = None,
    ) -> None:
        endpoints = _endpoints(addresses)
        if (username is None) is not (password is None):
            raise ConfigError("etcd: username and password belong together: give both, or none")
        headers = {} if username is None else {"Authorization": _basic(username, password or "")}
        self._clients = [
            HttpClient(
                endpoint, timeout=timeout, headers=headers, tls_options=tls_options, max_reply_size=MAX_REPLY_SIZE
            )
            for endpoint in endpoints
        ]

    def __str__(self) -> str:
        return ", ".join(sorted(str(client.endpoint) for client in self._clients))

    def get(self, key: str) -> EtcdAnswer | None:
        """What is at ``key``, with all that is below it; None when there is nothing.

        Raises HttpError when no member answers, RemoteProtocolError when one sends what is not of etcd.
        """
        return self._ask_each(lambda client: _get(client, key))

    def changed(self, key: str, state: int, limit: float) -> bool:
        """Wait until something at ``key`` or below it changes after ``state``; False after ``limit`` seconds.

        A state that etcd remembers no longer counts as a change. Raises HttpError when no member answers.
        """
        expired = Timeout(limit)
        try:
            with expired:
                return self._ask_each(lambda client: _wait(client, key, state, limit))
        except Timeout as error:
            if error is not expired:
                raise
            return False

    def close(self) -> None:
        """Close the idle connections; the client can be used again."""
        for client in self._clients:
            client.close()

    def _ask_each(self, ask: Callable[[HttpClient], T]) -> T:
        error: NsqError | None = None
        for client in list(self._clients):
            try:
                return ask(client)
            except HttpError as failure:
                if failure.status is not None and failure.status < 500:
                    raise  # the others would say the same
                error = failure
            except RemoteProtocolError as failure:
                error = failure
            self._clients.remove(client)
            self._clients.append(client)
        assert error is not None
        raise error


def _get(client: HttpClient, key: str) -> EtcdAnswer | None:
    try:
        reply = client.request("GET", f"/v2/keys{key}", {"recursive": "true", "sorted": "true"})
    except HttpError as error:
        if error.status == KEY_NOT_FOUND:
            return None
        raise
    return _answer(client, reply)


def _answer(client: HttpClient, reply: Reply) -> EtcdAnswer:
    try:
        node = msgspec.json.decode(reply.body, type=_WireAnswer).node
        state = int(reply.headers.get("x-etcd-index", ""))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RemoteProtocolError(f"{client.endpoint}: not a reply of etcd's v2 API: {error}") from error
    if node is None:
        raise RemoteProtocolError(f"{client.endpoint}: not a reply of etcd's v2 API: it names no node")
    return EtcdAnswer(node, state)


def _wait(client: HttpClient, key: str, state: int, limit: float) -> bool:
    query = {"wait": "true", "recursive": "true", "waitIndex": str(state + 1)}
    try:
        client.request("GET", f"/v2/keys{key}", query, timeout=limit + _WATCH_MARGIN)
    except HttpError as error:
        # etcd: Documentation/v2/errors.md, EcodeEventIndexCleared: status 400
        if error.status != 400:
            raise
    return True


def _endpoints(addresses: Any) -> Sequence[Endpoint]:
    found = list(dict.fromkeys(parse_endpoint(each, DEFAULT_ETCD_PORT) for each in listed(addresses, "etcd addresses")))
    if not found:
        raise ConfigError("no etcd address is given")
    return found


def _basic(username: str, password: str) -> str:
    return f"Basic {b64encode(f'{username}:{password}'.encode()).decode()}"
