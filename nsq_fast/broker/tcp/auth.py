"""The client of an auth server: asks it what the bearer of a secret may do.

nsqio/nsq: internal/auth/authorizations.go, QueryAnyAuthd.

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
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from nsq_fast.broker import go_json
from nsq_fast.broker.client import Endpoint, HttpClient
from nsq_fast.broker.http.router import ACCEPT_V1
from nsq_fast.errors import AuthFailed, HttpError
from nsq_fast.names import parse_address

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
    tls_options: Any = None,
) -> AuthState:
    """Ask the auth servers in turn, beginning anywhere, until one gives an answer.

    Args:
        addresses: ``host:port`` (asked for ``/auth`` over HTTP), or full URLs.
        tls: whether the client's connection is encrypted; ``common_name`` is that of its certificate.
        timeout: limit for each server in total, in seconds.
        tls_options: for auth servers over https: an SSLContext, or a mapping as for clients.

    Raises:
        AuthFailed: no server gave a usable answer; the text says why for each.
    """
    arguments = {
        "common_name": common_name,
        "remote_ip": remote_ip,
        "secret": secret,
        "tls": "true" if tls else "false",
    }
    start = random.randrange(len(addresses)) if addresses else 0
    failures = []
    for address in [*addresses[start:], *addresses[:start]]:
        answer = _try_query(address, arguments, method, timeout, tls_options)
        if isinstance(answer, AuthState):
            return answer
        failures.append(f"failed to auth against {address.partition('?')[0]} - {_reason(answer)}")
    raise AuthFailed("; ".join(failures) or "no auth server is configured")


def _try_query(
    address: str, arguments: dict[str, str], method: str, timeout: float, tls_options: Any
) -> AuthState | Exception:
    try:
        return _decode(_query(address, arguments, method, timeout, tls_options))
    except (HttpError, ValueError) as error:
        return error


def _reason(error: Exception) -> str:
    """Why a server gave no usable answer. Neither what was asked nor its reply: the secret may be in both."""
    if not isinstance(error, HttpError):
        return str(error)
    return error.text if error.status is None else f"HTTP status {error.status}"


def _query(address: str, arguments: dict[str, str], method: str, timeout: float, tls_options: Any) -> bytes:
    url = urlsplit(address if "://" in address else f"http://{address}/auth")
    default_port = 443 if url.scheme == "https" else 80
    client = HttpClient(
        Endpoint(url.scheme, parse_address(url.netloc, default_port)),
        timeout=timeout,
        headers={"Accept": ACCEPT_V1, "Content-Type": "application/x-www-form-urlencoded"},
        tls_options=tls_options,
        max_reply_size=MAX_ANSWER,
    )
    try:
        if method == "post":
            return client.request("POST", url.path, body=urlencode(arguments).encode()).body
        return client.request("GET", url.path, {**dict(parse_qsl(url.query)), **arguments}).body
    finally:
        client.close()


def _decode(body: bytes) -> AuthState:
    state = go_json.decode(body, AuthState)
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
