"""AUTH, and what it permits: asks the auth server, and again when its answer has expired.

nsqio/nsq: nsqd/protocol_v2.go, AUTH and CheckAuth.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import msgspec

from nsq_fast.errors import NsqError
from nsq_fast.log_events import BROKER_AUTH_FAILED
from nsq_fast.printable import printable

from .auth import PUBLISH, SUBSCRIBE, query_auth
from .connection import Connection
from .frames import FatalError

logger = logging.getLogger("nsq_fast.broker.tcp.authorize")


class Refusals(NamedTuple):
    """The texts of what AUTH is refused with."""

    again: str = "AUTH already set"
    disabled: str = "AUTH disabled"
    nothing: str = "AUTH no authorizations found"


REFUSALS = Refusals()


def authorize(conn: Connection, secret: bytes, refusals: Refusals) -> bytes:
    """Find out what the bearer of ``secret`` may do; the JSON to answer with. Raises FatalError."""
    if _has_permissions(conn):
        raise FatalError("E_INVALID", refusals.again)
    if not _is_enabled(conn):
        raise FatalError("E_AUTH_DISABLED", refusals.disabled)
    conn.auth_secret = secret.decode("utf-8", "replace")
    _query(conn)
    if not _has_permissions(conn):
        raise FatalError("E_UNAUTHORIZED", refusals.nothing)
    return msgspec.json.encode(
        {
            "identity": conn.auth.identity,
            "identity_url": conn.auth.identity_url,
            "permission_count": len(conn.auth.authorizations),
        }
    )


def require_permission(conn: Connection, command: str, topic: str, channel: str) -> None:
    """Raise FatalError unless the client may do this; without auth servers everybody may do everything."""
    if not _is_enabled(conn):
        return
    if not _has_permissions(conn):
        raise FatalError("E_AUTH_FIRST", f"AUTH required before {command}")
    if time.monotonic() >= conn.auth_expires_at:
        _query(conn)
    if not conn.auth.allowed(topic, channel, SUBSCRIBE if channel else PUBLISH):
        raise FatalError("E_UNAUTHORIZED", f'AUTH failed for {command} on "{topic}" "{channel}"')


def _is_enabled(conn: Connection) -> bool:
    return bool(conn.nsqd.options.auth_http_addresses)


def _has_permissions(conn: Connection) -> bool:
    return conn.auth is not None and bool(conn.auth.authorizations)


def _query(conn: Connection) -> None:
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
