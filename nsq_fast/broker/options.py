"""Options of the embedded servers: the original's flags, with underscores for dashes, and those of a cluster.

Durations are seconds as floats. Addresses to listen on are ``host:port``, where
port 0 takes any free port; an empty address leaves that face out. An nsqd takes ``unix:path`` and ``/path``, too.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Mapping
from typing import Any

from msgspec.structs import force_setattr

from nsq_fast.config import Config, option
from nsq_fast.errors import ConfigError
from nsq_fast.names import parse_addresses

VERSION = "1.3.0"
"""What the broker reports as its version: that of the original nsqd whose behaviour it has."""

DEFAULT_NODE_ID = zlib.crc32(socket.gethostname().encode()) % 1024

SINGULAR = {
    "lookupd_tcp_addresses": "lookupd_tcp_address",
    "auth_http_addresses": "auth_http_address",
    "e2e_processing_latency_percentiles": "e2e_processing_latency_percentile",
}
"""Options that are given one by one as a flag."""

_CHOICES = {
    "auth_http_request_method": ("get", "post"),
    "tls_client_auth_policy": ("", "require", "require-verify"),
    "tls_min_version": ("tls1.0", "tls1.1", "tls1.2", "tls1.3"),
    "tls_required": ("false", "true", "tcp-https"),
}


class NsqdOptions(Config, frozen=True):
    tcp_address: str = option("127.0.0.1:0", "where clients connect: host:port, or unix:path")
    http_address: str = option("127.0.0.1:0", "where HTTP is served: host:port, or unix:path")
    https_address: str = option("", "where HTTPS is served; needs tls_cert")
    broadcast_address: str = option(
        "", "address that nsqlookupd gives to clients; empty: the host of tcp_address, or 127.0.0.1 if that is none"
    )
    broadcast_tcp_port: int = option(
        0, "TCP port for clients, from nsqlookupd; 0: the real one", minimum=0, maximum=65535
    )
    broadcast_http_port: int = option(
        0, "HTTP port for clients, from nsqlookupd; 0: the real one", minimum=0, maximum=65535
    )
    lookupd_tcp_addresses: tuple[str, ...] = option((), "nsqlookupds to register with")
    node_id: int = option(DEFAULT_NODE_ID, "number of this nsqd in the ids of its messages", minimum=0, maximum=1023)
    version: str = option(VERSION, "version reported to clients")

    auth_http_addresses: tuple[str, ...] = option((), "auth servers; with one or more, AUTH is required")
    auth_http_request_method: str = option("get", "HTTP method of requests to auth servers")
    http_client_connect_timeout: float = option(2.0, "limit to connect to an auth server", unit="s", minimum=0.001)
    http_client_request_timeout: float = option(5.0, "limit for an auth server's answer", unit="s", minimum=0.001)

    topology_region: str = option("", "region of this nsqd")
    topology_zone: str = option("", "zone of this nsqd")

    data_path: str | None = option(
        None, "folder for metadata and messages that survive a restart; None: nothing survives", kind=str
    )
    mem_queue_size: int = option(
        10_000,
        "messages that a channel keeps in memory; further ones wait on disk, and both are delivered in turns",
        minimum=0,
    )
    preserve_order: bool = option(
        False, "deliver the messages on disk after those in memory, in order; nsqd does not do that"
    )
    max_bytes_per_file: int = option(
        100 * 1024 * 1024, "size of a log segment on disk", unit="bytes", minimum=4096, maximum=2**40
    )
    sync_every: int = option(2500, "messages between two fsyncs", minimum=1)
    sync_timeout: float = option(2.0, "time between two fsyncs, and between two checkpoints", unit="s", minimum=0.01)

    queue_scan_interval: float = option(0.1, "time between two scans for timeouts", unit="s", minimum=0.001)
    queue_scan_refresh_interval: float = option(
        5.0,
        "time after which the list of channels to scan is renewed if no channel was created or deleted",
        unit="s",
        minimum=0.001,
    )
    queue_scan_selection_count: int = option(20, "channels that are scanned in each interval", minimum=1)
    queue_scan_worker_pool_max: int = option(4, "channels that are scanned before other work has its turn", minimum=1)
    queue_scan_dirty_percent: float = option(
        0.25, "share of channels with something to do; above it, more channels are scanned at once", minimum=0.0
    )
    msg_timeout: float = option(
        60.0, "a message that was not responded to for so long is requeued", unit="s", minimum=0.001
    )
    max_msg_timeout: float = option(
        900.0, "longest message timeout that a client may ask for or reach by TOUCH", unit="s", minimum=0.1
    )
    max_msg_size: int = option(1024 * 1024, "largest body of a message", unit="bytes", minimum=1, maximum=2**31 - 64)
    max_body_size: int = option(
        5 * 1024 * 1024, "largest body of a command", unit="bytes", minimum=5, maximum=2**31 - 64
    )
    max_req_timeout: float = option(3600.0, "longest delay of a requeue or deferred publish", unit="s", minimum=0.0)
    client_timeout: float = option(60.0, "twice the default heartbeat interval", unit="s", minimum=0.1)

    max_heartbeat_interval: float = option(60.0, "longest heartbeat interval a client may ask for", unit="s", minimum=1)
    max_rdy_count: int = option(2500, "highest RDY of a client", minimum=1, maximum=2**31 - 1)
    max_output_buffer_size: int = option(65536, "largest output buffer a client may ask for", unit="bytes", minimum=64)
    max_output_buffer_timeout: float = option(30.0, "longest output buffer timeout", unit="s", minimum=0.0)
    min_output_buffer_timeout: float = option(0.025, "shortest output buffer timeout", unit="s", minimum=0.0)
    output_buffer_timeout: float = option(
        0.25, "default output buffer timeout; 0: messages are sent at once", unit="s", minimum=0.0
    )
    max_channel_consumers: int = option(0, "most consumers on a channel; 0: no limit", minimum=0)

    e2e_processing_latency_percentiles: tuple[float, ...] = option(
        (), "which quantiles of the time from publish to FIN are shown, above 0 and up to 1; needs nsq-fast[e2e]"
    )
    e2e_processing_latency_window_time: float = option(
        600.0, "how long a latency is included in the quantiles", unit="s", minimum=0.001
    )

    statsd_address: str = option("", "host:port of a statsd to push to over UDP")
    statsd_prefix: str = option("nsq.%s", "prefix of statsd keys; %s is the host and port")
    statsd_interval: float = option(60.0, "time between pushes to statsd", unit="s", minimum=0.01)
    statsd_mem_stats: bool = option(True, "also push memory figures to statsd")
    statsd_udp_packet_size: int = option(508, "largest statsd packet", unit="bytes", minimum=64)
    statsd_exclude_ephemeral: bool = option(False, "do not push ephemeral topics and channels to statsd")

    tls_cert: str = option("", "certificate file")
    tls_key: str = option("", "key file")
    tls_client_auth_policy: str = option(
        "", "require or require-verify: clients need a certificate, which is verified; empty: they need none"
    )
    tls_root_ca_file: str = option("", "CA certificates that client certificates are checked with")
    tls_required: str = option(
        "false", "whether clients must use TLS: false, true, or tcp-https, which leaves plain HTTP open"
    )
    tls_min_version: str = option("tls1.0", "lowest version of TLS: tls1.0, tls1.1, tls1.2, tls1.3")
    deflate: bool = option(True, "offer deflate")
    max_deflate_level: int = option(6, "highest deflate level", minimum=1, maximum=9)
    snappy: bool = option(True, "offer snappy")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_listen_addresses(self, "tcp_address", "http_address", "https_address", paths="-HA." not in self.version)
        _check_servers(self)
        _check_percentiles(self)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(repr, choices))}")
        if self.tls_client_auth_policy and self.tls_required == "false":
            self._set("tls_required", "true")
        if bool(self.tls_cert) is not bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key: one without the other is of no use")
        if self.tls_required != "false" and not (self.tls_cert and self.tls_key):
            raise ConfigError("tls_required: cannot require TLS of clients without tls_cert and tls_key")
        if not self.broadcast_address:
            self._set("broadcast_address", _told_to_clients(self.tcp_address))


class LookupdOptions(Config, frozen=True):
    tcp_address: str = option("127.0.0.1:0", "where nsqds connect")
    http_address: str = option("127.0.0.1:0", "where HTTP is served")
    broadcast_address: str = option(
        "", "address of this nsqlookupd; empty: the host of http_address, or 127.0.0.1 if that is none"
    )
    inactive_producer_timeout: float = option(
        300.0, "an nsqd that was silent for so long is no longer named", unit="s", minimum=0.01
    )
    tombstone_lifetime: float = option(45.0, "how long a tombstone hides an nsqd", unit="s", minimum=0.0)
    version: str = option(VERSION, "version reported to clients")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_listen_addresses(self, "tcp_address", "http_address")
        if not self.broadcast_address:
            self._set("broadcast_address", _told_to_clients(self.http_address))


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise ConfigError unless a value is a whole number, ``least`` or more."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more")


def check_seconds(name: str, value: object) -> None:
    """Raise ConfigError unless a value is a time that can be waited for."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r}: must be a number of seconds, 0 or more")


def check_switch(name: str, value: object) -> None:
    """Raise ConfigError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be True or False")


def is_path(address: str) -> bool:
    """Whether an address to listen on is a Unix socket."""
    return address.startswith(("unix:", "/"))


def listen_host(text: str) -> str:
    """The host of ``host:port``, whatever the port is."""
    return text.rpartition(":")[0].strip("[]") or "0.0.0.0"


def _told_to_clients(address: str) -> str:
    """Where clients of this machine reach a server that listens on an address."""
    host = "0.0.0.0" if is_path(address) else listen_host(address)
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _check_listen_addresses(options: Config, *names: str, paths: bool = False) -> None:
    for name in names:
        value = getattr(options, name)
        _, colon, port = value.rpartition(":")
        if not value or (paths and name != "https_address" and value.removeprefix("unix:") and is_path(value)):
            continue
        if not (colon and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ConfigError(f"{name}={value!r}: must be host:port with a port of 0 to 65535, or empty")


def _check_percentiles(options: NsqdOptions) -> None:
    name = "e2e_processing_latency_percentiles"
    value = getattr(options, name)
    if not isinstance(value, (tuple, list)) or not all(type(each) is float and 0 < each <= 1 for each in value):
        raise ConfigError(f"{name}={value!r}: must be a tuple of floats, each above 0 and up to 1")
    force_setattr(options, name, tuple(sorted(value, reverse=True)))


def _check_servers(options: NsqdOptions) -> None:
    """Addresses of other servers: read them once here, so that a wrong one is known before anything starts."""
    for name in ("lookupd_tcp_addresses", "auth_http_addresses"):
        value = getattr(options, name)
        if not isinstance(value, (tuple, list)) or not all(isinstance(each, str) and each for each in value):
            raise ConfigError(f"{name}={value!r}: must be a tuple of host:port")
        force_setattr(options, name, tuple(value))
    for name in ("lookupd_tcp_addresses", "statsd_address"):
        parse_addresses(getattr(options, name), 1, name)  # which port is the default is another's matter
    _check_listen_addresses(options, "statsd_address")  # as those it has no port by default


# --- options of the redesigned cluster: its own, and the defaults of its nodes ---------------------------------------


CLUSTER_VERSION = "0.3.7-HA.1.13.0"
"""What the cluster reports as its version; clients know the dialect by the ``-HA.`` in it."""

NODE_DEFAULTS: Mapping[str, Any] = {
    "version": CLUSTER_VERSION,
    "output_buffer_timeout": 0.05,
    "min_output_buffer_timeout": 0.001,
    "max_output_buffer_timeout": 1.0,
    "max_req_timeout": 3 * 24 * 3600.0,
}


TIMINGS: Mapping[str, Mapping[str, float]] = {
    "fast": {},
    "real": {
        "takeover_delay": 22.0,
        "writable_delay": 117.0,
        "publish_patience": 12.0,
        "readiness": 115.0,
        "migrate_delay": 300.0,
    },
}
"""What ``timings`` makes of other options that are not given: as measured on three real nodes, but for the last one."""


class ClusterOptions(Config, frozen=True):
    """How the cluster as a whole behaves."""

    timings: str = option("fast", "how long the cluster takes to react: fast, or real, as long as three real nodes")
    move_step: float = option(0.012, "time of each of the three stages of a move of a leader", unit="s", minimum=0.0)
    takeover_delay: float = option(
        0.5, "time after the death of a node until others lead its partitions", unit="s", minimum=0.0
    )
    migrate_delay: float = option(
        2.0, "time after the death of a node until another one gets its replicas", unit="s", minimum=0.0
    )
    readiness: float = option(
        0.2, "longest time until a new partition has a leader, and until the cluster is stable", unit="s", minimum=0.0
    )
    writable_delay: float = option(
        0.0,
        "longest time from the death of a leader until its partition takes publishes; 0: as soon as another node leads",
        unit="s",
        minimum=0.0,
    )
    publish_patience: float = option(
        0.0, "how long a publish waits for a replica that does not answer", unit="s", minimum=0.0
    )
    kind: bool = option(
        False,
        "be ready at once, take publishes while one replica is in sync, and deliver messages past those with other"
        " tags",
    )
    allow_write_with_nochannels: bool = option(False, "let lookups for writing name partitions without a channel")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timings not in TIMINGS:
            raise ConfigError(f"timings={self.timings!r}: must be one of {', '.join(map(repr, TIMINGS))}")

    @property
    def ready_after(self) -> float:
        """``readiness``, or nothing where the cluster is kind."""
        return 0.0 if self.kind else self.readiness


def cluster_lookupd_options(options: Mapping[str, Any]) -> LookupdOptions:
    """Options of an nsqlookupd of the cluster. Raises ConfigError for one that does not exist."""
    return LookupdOptions.of({"version": CLUSTER_VERSION, "inactive_producer_timeout": 60.0, **options})
