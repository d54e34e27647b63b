"""Two etcds with the v2 API: a stand-in in this process, and the real one in another."""

from __future__ import annotations

import json
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode

from gevent.event import Event
from gevent.pool import Pool
from gevent.pywsgi import WSGIServer

from nsq_fast.errors import HttpError
from nsq_fast.names import Address
from nsq_fast.runtime import HttpClient, parse_endpoint

from .cluster import etcd_command
from .ports import free_address
from .waiting import WAIT, until

LOOKUPDS = "/NSQMetaData/{}/NsqlookupdInfo/NsqlookupdNodes/Node-{}"


class Etcd(Protocol):
    """What a test does with either."""

    address: Address

    def put(self, key: str, value: str) -> None:
        """Set a key."""

    def delete(self, key: str) -> None:
        """Remove a key."""

    def start(self) -> None:
        """Serve, as before."""

    def stop(self) -> None:
        """Serve no more."""


def register(etcd: Etcd, cluster: str, name: str, http: Address) -> None:
    """Do what an nsqlookupd does when it starts."""
    node = {"ID": name, "NodeIP": http.host, "TcpPort": "1", "HttpPort": str(http.port), "RpcPort": "2", "Epoch": 0}
    etcd.put(LOOKUPDS.format(cluster, name), json.dumps(node))


def unregister(etcd: Etcd, cluster: str, name: str) -> None:
    """Do what becomes of that when the nsqlookupd is gone for a while."""
    etcd.delete(LOOKUPDS.format(cluster, name))


class StandInEtcd:
    """GET, and waiting for what comes after an index; what is older than ``oldest`` is forgotten.

    Attributes:
        requests: their paths with the query.
    """

    def __init__(self, *, user: str | None = None, ssl_context: Any = None) -> None:
        self.address = free_address()
        self.requests: list[str] = []
        self.oldest = 0
        self._values: dict[str, tuple[str, int]] = {}
        self._changes: list[tuple[int, str]] = []
        self._index = 10
        self._changed = Event()
        self._authorization = None if user is None else f"Basic {b64encode(user.encode()).decode()}"
        self._tls = {} if ssl_context is None else {"ssl_context": ssl_context}
        self._server: Any = None
        self.start()

    def put(self, key: str, value: str) -> None:
        self._change(key)
        self._values[key] = (value, self._index)

    def delete(self, key: str) -> None:
        self._change(key)
        del self._values[key]

    def forget(self) -> None:
        """Remember no change of before: a client that waits for one of them is told so."""
        self.oldest = self._index

    def start(self) -> None:
        pool = Pool(100)  # what is in a pool ends when the server does
        self._server = WSGIServer(tuple(self.address), self._serve, log=None, error_log=None, spawn=pool, **self._tls)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(timeout=0)
        self._server.close()

    def _change(self, key: str) -> None:
        self._index += 1
        self._changes.append((self._index, key))
        changed, self._changed = self._changed, Event()
        changed.set()

    def _serve(self, request: dict[str, Any], begin: Callable[..., Any]) -> Iterator[bytes]:
        key, query = request["PATH_INFO"].removeprefix("/v2/keys"), parse_qs(request["QUERY_STRING"])
        self.requests.append(f"{request['PATH_INFO']}?{request['QUERY_STRING']}")
        if self._authorization not in (None, request.get("HTTP_AUTHORIZATION")):
            status, found = "401 Unauthorized", {"errorCode": 110, "message": "The request requires authentication"}
        elif "wait" in query and int(query["waitIndex"][0]) <= self.oldest:
            status, found = "400 Bad Request", {"errorCode": 401, "message": "The event is outdated and cleared"}
        else:
            if "wait" in query:
                self._wait(key, int(query["waitIndex"][0]))
            node = self._node(key)
            status = "404 Not Found" if node is None else "200 OK"
            found = {"errorCode": 100, "message": "Key not found"} if node is None else {"action": "get", "node": node}
        begin(status, [("X-Etcd-Index", str(self._index)), ("Content-Type", "application/json")])
        yield json.dumps(found).encode()

    def _wait(self, key: str, index: int) -> None:
        def has_changed() -> bool:
            return any(number >= index and f"{each}/".startswith(f"{key}/") for number, each in self._changes)

        while not has_changed():
            self._changed.wait(WAIT)

    def _node(self, key: str) -> dict[str, Any] | None:
        if key in self._values:
            value, index = self._values[key]
            return {"key": key, "value": value, "modifiedIndex": index, "createdIndex": index}
        below = sorted(each for each in self._values if each.startswith(f"{key}/"))
        return {"key": key, "dir": True, "nodes": [self._node(each) for each in below]} if below else None


class RealEtcd:
    """An etcd of this machine in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.address = free_address()
        self._command = etcd_command(path / "etcd", self.address.port, free_address().port)
        self._log = path / "etcd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = HttpClient(parse_endpoint(str(self.address), 0), timeout=WAIT)
        self.start()

    def put(self, key: str, value: str) -> None:
        self._http.request("PUT", f"/v2/keys{key}?{urlencode({'value': value})}")

    def delete(self, key: str) -> None:
        self._http.request("DELETE", f"/v2/keys{key}")

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return self._http.request("GET", "/health").status == 200
        except HttpError:
            return False


def has_etcd() -> bool:
    """Whether this machine has one."""
    return shutil.which("etcd") is not None
