"""The options of Consumer and Producer as type checkers see them: the fields of the classes in ``config``.

A misspelt option, or one of the wrong type, is an error of mypy and pyright before the program runs. Nothing here is
there at run time. Options that have a parameter of their own are left out, as typing demands. Written by
tests/support/keywords.py: do not edit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .client.dynamic import ConfigSource
from .client.publishes import Headers
from .protocol.publishing import Key

class ConnectionKeywords(TypedDict, total=False):
    """The options of ConnectionConfig."""

    client_id: str | None
    hostname: str | None
    user_agent: str | None
    heartbeat_interval: float
    output_buffer_size: int
    output_buffer_timeout: int
    sample_rate: int
    msg_timeout: float | None
    tls_v1: bool
    tls_options: Any
    snappy: bool
    deflate: bool
    deflate_level: int
    auth_secret: str | bytes | None
    auth_secret_file: str | None
    topology_region: str | None
    topology_zone: str | None
    desired_tag: str | None
    extend_support: bool
    ext_filter: Mapping[str, Any] | None
    connect_timeout: float
    write_timeout: float
    max_frame_size: int
    local_address: str | None

class LookupKeywords(TypedDict, total=False):
    """The options of LookupConfig but the parameters of Consumer."""

    lookupd_timeout: float
    lookupd_refresh_interval: float
    lookupd_max_producers: int
    discovery_filter: Any
    config_source: ConfigSource | None
    lookupd_authorization: str | None
    lookupd_tls_options: Mapping[str, Any] | Any

class ConsumerKeywords(ConnectionKeywords, LookupKeywords, total=False):
    """The options of a Consumer."""

    drop_expired: bool
    close_timeout: float | None
    requeue_unfinished: bool
    requeue_base_delay: float
    requeue_factor: float
    requeue_max_delay: float
    requeue_jitter: float
    backoff_scope: str
    backoff_strategy: Any
    max_reconnect_delay: float
    concurrency: int | None
    handler_threads: int
    batch_size: int
    max_age: float
    histograms: bool
    auto_touch: bool
    partitions: Any
    ordered: bool | None
    advanced: bool
    order_policy: str
    start_position_policy: str
    attempts_threshold: int
    skip_header: str | None
    suppress_retried: int
    decompress: bool
    max_decompressed_size: int

class SubscriptionKeywords(ConsumerKeywords, total=False):
    """What the handler of a worker may be declared with: options and parameters of a Consumer."""

    backoff_on_requeue: bool
    blocked_policy: Any
    give_up: Any
    lookupd_http_addresses: Any
    lookupd_poll_interval: float
    lookupd_poll_jitter: float
    low_ready_idle_timeout: float
    max_age_policy: Any
    max_backoff_duration: float
    max_in_flight: int | None
    max_tries: int
    nsqd_tcp_addresses: Any
    requeue_delay: int | None
    start_position: Any

class ProducerKeywords(ConnectionKeywords, LookupKeywords, total=False):
    """The options of a Producer."""

    lookupd_poll_interval: float
    lookupd_poll_jitter: float
    publish_timeout: float
    attempt_timeout: float | None
    max_publish_attempts: int
    partition_strategy: str
    key_strategy: Any
    body_compression: str | None
    body_compression_min_size: int
    retry_unknown_outcome: bool
    retry_base_delay: float
    retry_max_delay: float
    coalesce: bool
    linger: float
    linger_max_messages: int
    linger_max_bytes: int
    histograms: bool
    max_pending: int
    connections_per_nsqd: int | None
    max_backoff_duration: float
    max_msg_size: int
    max_body_size: int

class PublishKeywords(TypedDict, total=False):
    """The keywords of ``publish``."""

    key: Key | None
    partition: int | None
    trace_id: int | None
    headers: Headers | None
    tag: str | None

class MultipublishKeywords(TypedDict, total=False):
    """The keywords of ``multipublish``."""

    key: Key | None
    partition: int | None
    trace_id: int | Sequence[int] | None
    headers: Headers | Sequence[Headers] | None
    tag: str | None
