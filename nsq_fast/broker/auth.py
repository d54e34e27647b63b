"""The client of an auth server: asks it what the bearer of a secret may do.

``query_auth`` is called by nsqd on AUTH, and again when an ``AuthState`` has
expired. It blocks its greenlet for ``timeout`` at most. Every answer is checked
whole (permissions, regular expressions, ttl) before it counts: an auth server
that answers nonsense is one that did not answer.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import msgspec
from gevent import Timeout
from gevent.ssl import SSLContext
from geventhttpclient import URL, HTTPClient, HTTPParseError

from nsq_fast.broker.http import ACCEPT_V1
from nsq_fast.errors import AuthFailed

PUBLISH = "publish"
SUBSCRIBE = "subscribe"
MAX_ANSWER = 1024 * 1024


class Authorization(msgspec.Struct, frozen=True):
    """One grant: these permissions, on topics and channels that match these regular expressions."""

    topic: str = ""
    channels: list[str] = []
    permissions: list[str] = []

    def allows(self, topic: str, channel: str, permission: str) -> bool:
        """Whether the grant covers it. Expressions match anywhere in a name, as in the original."""
        return (
            permission in self.permissions
            and _compile(self.topic).search(topic) is not None
            and any(_compile(pattern).search(channel) for pattern in self.channels)
        )


class AuthState(msgspec.Struct, frozen=True):
    """What an identity may do, for ``ttl`` seconds."""

    ttl: int = 0
    authorizations: list[Authorization] = []
    identity: str = ""
    identity_url: str = ""

    def allowed(self, topic: str, channel: str, permission: str) -> bool:
        """Whether any grant covers it. To publish, pass an empty channel: grants must match that too."""
        return any(grant.allows(topic, channel, permission) for grant in self.authorizations)


def query_auth(
    addresses: Sequence[str],
    secret: str,
    remote_ip: str,
    *,
    tls: bool = False,
    common_name: str = "",
    method: str = "get",
    timeout: float = 5.0,
    ssl_context: SSLContext | None = None,
) -> AuthState:
    """Ask the auth servers in turn, beginning anywhere, until one gives an answer.

    Args:
        addresses: ``host:port`` (asked for ``/auth`` over HTTP), or full URLs.
        timeout: limit for each server in total, in seconds.

    Raises:
        AuthFailed: no server gave a usable answer; the text says why for each.
    """
    arguments = urlencode(
        {"common_name": common_name, "remote_ip": remote_ip, "secret": secret, "tls": "true" if tls else "false"}
    )
    start = random.randrange(len(addresses)) if addresses else 0
    failures = []
    for address in [*addresses[start:], *addresses[:start]]:
        answer = _try_query(address, arguments, method, timeout, ssl_context)
        if isinstance(answer, AuthState):
            return answer
        failures.append(f"failed to auth against {address} - {answer}")
    raise AuthFailed("; ".join(failures) or "no auth server is configured")


def _try_query(
    address: str, arguments: str, method: str, timeout: float, ssl_context: SSLContext | None
) -> AuthState | Exception:
    try:
        return _query(address, arguments, method, timeout, ssl_context)
    except (OSError, ValueError, HTTPParseError) as error:
        return error


def _query(address: str, arguments: str, method: str, timeout: float, ssl_context: SSLContext | None) -> AuthState:
    url = URL(address if "://" in address else f"http://{address}/auth")
    options: dict[str, Any] = {}
    if ssl_context is not None:
        options["ssl_context_factory"] = lambda: ssl_context
    client = HTTPClient.from_url(url, connection_timeout=timeout, network_timeout=timeout, **options)
    with Timeout(timeout, TimeoutError("timed out")):
        try:
            return _decode(*_request(client, url, arguments, method))
        finally:
            client.close()


def _request(client: HTTPClient, url: URL, arguments: str, method: str) -> tuple[int, bytes]:
    headers = {"Accept": ACCEPT_V1}
    if method == "post":
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        response = client.post(url.request_uri, body=arguments.encode(), headers=headers)
    else:
        joint = "&" if "?" in url.request_uri else "?"
        response = client.get(f"{url.request_uri}{joint}{arguments}", headers=headers)
    body = bytes(response.read(MAX_ANSWER + 1))
    if len(body) > MAX_ANSWER:
        raise ValueError(f"answer is larger than {MAX_ANSWER} bytes")
    return int(response.status_code), body


def _decode(status: int, body: bytes) -> AuthState:
    if status != HTTPStatus.OK:
        raise ValueError(f"got response {status} {body[:200]!r}")
    state = msgspec.json.decode(body, type=AuthState)
    for grant in state.authorizations:
        _check(grant)
    if state.ttl <= 0:
        raise ValueError(f"invalid TTL {state.ttl} (must be >0)")
    return state


def _check(grant: Authorization) -> None:
    unknown = set(grant.permissions) - {PUBLISH, SUBSCRIBE}
    if unknown:
        raise ValueError(f"unknown permission {min(unknown)}")
    try:
        for pattern in (grant.topic, *grant.channels):
            _compile(pattern)
    except re.error as error:
        raise ValueError(f"unable to compile {error.pattern!r}: {error}") from None


@functools.lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
