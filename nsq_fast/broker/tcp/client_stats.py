"""The figures of a client as /stats gives them (nsqio/nsq: nsqd/client_v2.go, ClientV2Stats)."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

from .identify import Profile, Upgrades


class Client(Protocol):
    """What the figures are made of; see ``Connection``."""

    remote_address: str
    state: int
    profile: Profile
    upgrades: Upgrades
    rdy: int
    message_count: int
    finish_count: int
    requeue_count: int
    connected_at: float
    auth: Any
    pub_counts: dict[str, int]
    tls_socket: Any

    @property
    def in_flight(self) -> Sized:
        """The messages that it has."""
        ...


def client_stats(client: Client) -> dict[str, Any]:
    """The figures of a client under the original's JSON names."""
    profile = client.profile
    stats: dict[str, Any] = {
        "client_id": profile.client_id,
        "hostname": profile.hostname,
        "version": "V2",
        "remote_address": client.remote_address,
        "state": client.state,
        "ready_count": client.rdy,
        "in_flight_count": len(client.in_flight),
        "message_count": client.message_count,
        "finish_count": client.finish_count,
        "requeue_count": client.requeue_count,
        "connect_ts": int(client.connected_at),
        "sample_rate": profile.sample_rate,
        "deflate": client.upgrades.deflate,
        "snappy": client.upgrades.snappy,
        "user_agent": profile.user_agent,
        "topology_zone": profile.topology_zone,
        "topology_region": profile.topology_region,
        "tls": client.upgrades.tls,
    }
    if client.auth is not None:
        stats |= {
            "authed": bool(client.auth.authorizations),
            "auth_identity": client.auth.identity,
            "auth_identity_url": client.auth.identity_url,
        }
    if client.pub_counts:
        stats["pub_counts"] = [{"topic": topic, "count": count} for topic, count in client.pub_counts.items()]
    return {**stats, **_tls_stats(client.tls_socket)}


def _tls_stats(tls_socket: Any) -> dict[str, Any]:
    cipher = tls_socket.cipher() if tls_socket is not None else None
    protocol = (tls_socket.selected_alpn_protocol() or "") if cipher else ""
    return {
        "tls_cipher_suite": cipher[0] if cipher else "",
        "tls_version": cipher[1].replace("v", "", 1) if cipher else "",
        "tls_negotiated_protocol": protocol,
        "tls_negotiated_protocol_is_mutual": bool(protocol),
    }
