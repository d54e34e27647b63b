"""AUTH: asks an auth server what a client may do, and again when the answer has expired."""

from __future__ import annotations

import functools
import logging
import random
import re
import time
from collections.abc import Sequence
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.broker.client import Endpoint, HttpClient
from nsq_fast.broker.connection import Connection
from nsq_fast.broker.go import decode_json
from nsq_fast.broker.http import ACCEPT_V1
from nsq_fast.broker.message import FatalError
from nsq_fast.errors import AuthFailed, HttpError, NsqError, printable
from nsq_fast.log_events import BROKER_AUTH_FAILED
from nsq_fast.names import parse_address

logger: logging.Logger = get_logger("nsq_fast.broker.auth")


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
) -> AuthState:
    """Ask the auth servers in turn, beginning anywhere, until one gives an answer.

    nsqio/nsq: internal/auth/authorizations.go, QueryAnyAuthd. Every answer is checked whole (permissions, regular
    expressions, ttl) before it counts: an auth server that answers nonsense is one that did not answer.

    Args:
        addresses: ``host:port`` (asked for ``/auth`` over HTTP), or full URLs.
        tls: whether the client's connection is encrypted; ``common_name`` is that of its certificate.
        timeout: limit for each server in total, in seconds.

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
        try:
            return _decode(_query(address, arguments, method, timeout))
        except (HttpError, ValueError) as error:  # noqa: PERF203
            failures.append(f"failed to auth against {address.partition('?')[0]} - {_reason(error)}")
    raise AuthFailed("; ".join(failures) or "no auth server is configured")


def _reason(error: Exception) -> str:
    """Why a server gave no usable answer. Neither what was asked nor its reply: the secret may be in both."""
    if not isinstance(error, HttpError):
        return str(error)
    return error.text if error.status is None else f"HTTP status {error.status}"


def _query(address: str, arguments: dict[str, str], method: str, timeout: float) -> bytes:
    url = urlsplit(address if "://" in address else f"http://{address}/auth")
    default_port = 443 if url.scheme == "https" else 80
    client = HttpClient(
        Endpoint(url.scheme, parse_address(url.netloc, default_port)),
        timeout=timeout,
        headers={"Accept": ACCEPT_V1, "Content-Type": "application/x-www-form-urlencoded"},
        max_reply_size=MAX_ANSWER,
    )
    try:
        if method == "post":
            return client.request("POST", url.path, body=urlencode(arguments).encode()).body
        return client.request("GET", url.path, {**dict(parse_qsl(url.query)), **arguments}).body
    finally:
        client.close()


def _decode(body: bytes) -> AuthState:
    state = decode_json(body, AuthState)
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


def authorize(conn: Connection, secret: bytes) -> bytes:
    """Find out what the bearer of ``secret`` may do; the JSON to answer with. Raises FatalError.

    nsqio/nsq: nsqd/protocol_v2.go, AUTH and CheckAuth.
    """
    if _has_permissions(conn):
        raise _refusal(conn, "E_INVALID", "already set")
    if not _is_enabled(conn):
        raise _refusal(conn, "E_AUTH_DISABLED", "disabled")
    conn.auth_secret = secret.decode("utf-8", "replace")
    _ask(conn)
    if not _has_permissions(conn):
        raise _refusal(conn, "E_UNAUTHORIZED", "no authorizations found")
    return msgspec.json.encode(
        {
            "identity": conn.auth.identity,
            "identity_url": conn.auth.identity_url,
            "permission_count": len(conn.auth.authorizations),
        }
    )


def _refusal(conn: Connection, code: str, text: str) -> FatalError:
    return FatalError(code, f"AUTH {text.capitalize() if conn.capitalizes else text}")


def require_permission(conn: Connection, command: str, topic: str, channel: str) -> None:
    """Raise FatalError unless the client may do this; without auth servers everybody may do everything."""
    if not _is_enabled(conn):
        return
    if not _has_permissions(conn):
        raise FatalError("E_AUTH_FIRST", f"AUTH required before {command}")
    if time.monotonic() >= conn.auth_expires_at:
        _ask(conn)
    if not conn.auth.allowed(topic, channel, SUBSCRIBE if channel else PUBLISH):
        raise FatalError("E_UNAUTHORIZED", f'AUTH failed for {command} on "{topic}" "{channel}"')


def _is_enabled(conn: Connection) -> bool:
    return bool(conn.nsqd.options.auth_http_addresses)


def _has_permissions(conn: Connection) -> bool:
    return conn.auth is not None and bool(conn.auth.authorizations)


def _ask(conn: Connection) -> None:
    options = conn.nsqd.options
    try:
        conn.auth = query_auth(
            options.auth_http_addresses,
            conn.auth_secret,
            conn.host,
            tls=conn.upgrades.tls,
            common_name=conn.common_name,
            method=options.auth_http_request_method,
            timeout=options.http_client_request_timeout,
        )
    except NsqError as error:
        # Why it failed is the server's business: the client may be anybody.
        logger.warning("%s: AUTH failed: %s", conn.remote_address, printable(str(error)), extra=BROKER_AUTH_FAILED)
        raise FatalError("E_AUTH_FAILED", "AUTH failed") from error
    conn.auth_expires_at = time.monotonic() + conn.auth.ttl
