"""The sources of dynamic configuration that come with nsq_fast: a file, an HTTP server, an etcd."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from gevent import sleep

from nsq_fast.config_source import ConfigDocument
from nsq_fast.errors import ConfigError, HttpError
from nsq_fast.protocol.dynamic_config import MAX_DOCUMENT_SIZE
from nsq_fast.runtime.net.etcd import EtcdClient
from nsq_fast.runtime.net.http import HttpClient, parse_endpoint

_HTTP_PORTS = {"http": 80, "https": 443}
NOT_MODIFIED = 304
WATCH_LIMIT = 60.0


class FileConfigSource:
    """A file, read again when it has changed: TOML where its name ends in ``.toml``, JSON otherwise.

    Replace it as a whole (write another one, then rename it): half a document is refused.

    Args:
        path: of the file. It need not exist yet.
        interval: seconds between two looks at it.
    """

    def __init__(self, path: str | os.PathLike[str], interval: float = 1.0) -> None:
        self._path = os.fspath(path)
        self._interval = _positive("interval", interval)
        self._form = _form_of(self._path)

    def __str__(self) -> str:
        return f"file {self._path}"

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """As ConfigSource has it. Raises OSError."""
        while True:
            status = os.stat(self._path)
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if last is None or mark != last.mark:
                return ConfigDocument(self._read(), mark, self._form)
            sleep(self._interval)

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:
            return file.read(MAX_DOCUMENT_SIZE + 1)


class HttpConfigSource:
    """A document of an HTTP server, asked for again and again; ETags save the server from sending it each time.

    Args:
        url: of the document. TOML where its path ends in ``.toml``, JSON otherwise.
        interval: seconds between two questions.
        timeout: limit in seconds for one.
        authorization: the Authorization header.
        tls_options: for https: an ssl.SSLContext or a mapping: cafile, certfile, keyfile, server_hostname, verify.

    Raises ConfigError for what cannot be used.
    """

    def __init__(
        self,
        url: str,
        interval: float = 10.0,
        *,
        timeout: float = 5.0,
        authorization: str | None = None,
        tls_options: Any = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _HTTP_PORTS or not parts.netloc or parts.fragment:
            raise ConfigError("url: must be http://host:port/path or https://host:port/path")
        self._interval = _positive("interval", interval)
        self._target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        self._form = _form_of(parts.path)
        endpoint = parse_endpoint(f"{parts.scheme}://{parts.netloc}", _HTTP_PORTS[parts.scheme])
        self._shown = f"{endpoint}{parts.path}"
        self._http = HttpClient(
            endpoint,
            timeout=_positive("timeout", timeout),
            headers={} if authorization is None else {"Authorization": authorization},
            tls_options=tls_options,
            max_reply_size=MAX_DOCUMENT_SIZE,
        )

    def __str__(self) -> str:
        return self._shown

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """As ConfigSource has it. Raises HttpError."""
        if last is not None:
            sleep(self._interval)
        while True:
            found = self._ask(last)
            if found is not None:
                return found
            sleep(self._interval)

    def _ask(self, last: ConfigDocument | None) -> ConfigDocument | None:
        """The document, unless it is the last one."""
        tag = last.mark if last is not None else None
        headers = {"If-None-Match": tag} if isinstance(tag, str) and tag else None
        try:
            reply = self._http.request("GET", self._target, headers=headers)
        except HttpError as error:
            if error.status == NOT_MODIFIED and last is not None:
                return None
            raise
        if last is not None and reply.body == last.content:
            return None
        return ConfigDocument(reply.body, reply.headers.get("etag", ""), self._form)


class EtcdConfigSource:
    """A key of an etcd with the v2 API, which the redesigned servers use, too; changes come at once.

    Args:
        addresses: members of the etcd cluster, as ``host:port``, ``http://...`` or ``https://...``. Default port 2379.
        key: whose value is the document. TOML where it ends in ``.toml``, JSON otherwise.
        timeout: limit in seconds for one request.
        username, password: of etcd's basic authentication.
        tls_options: for https: an ssl.SSLContext or a mapping: cafile, certfile, keyfile, server_hostname, verify.

    Raises ConfigError for what cannot be used.
    """

    def __init__(
        self,
        addresses: Any,
        key: str,
        *,
        timeout: float = 5.0,
        username: str | None = None,
        password: str | None = None,
        tls_options: Any = None,
    ) -> None:
        if not isinstance(key, str) or not key.startswith("/") or not (key.isascii() and key.isprintable()):
            raise ConfigError(f"key={key!r}: must be a path such as /nsq/clients.json")
        self._key = key
        self._form = _form_of(key)
        self._etcd = EtcdClient(
            addresses,
            timeout=_positive("timeout", timeout),
            username=username,
            password=password,
            tls_options=tls_options,
        )
        self._shown = f"etcd {self._etcd}, key {key}"

    def __str__(self) -> str:
        return self._shown

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """As ConfigSource has it. Raises HttpError, RemoteProtocolError, LookupError where there is no such key."""
        while True:
            answer = self._etcd.get(self._key)
            if answer is None:
                raise LookupError(f"etcd has no key {self._key}")
            if last is None or answer.node.modifiedIndex != last.mark:
                return ConfigDocument(answer.node.value, answer.node.modifiedIndex, self._form)
            self._etcd.changed(self._key, answer.state, WATCH_LIMIT)


def _form_of(name: str) -> str:
    return "toml" if name.endswith(".toml") else "json"


def _positive(name: str, seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{name}={seconds!r}: must be a number of seconds above 0")
    return float(seconds)
