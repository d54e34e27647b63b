"""HTTP clients of nsqd and nsqlookupd, and of a whole cluster: publishing by HTTP, statistics, administration.

Every route of both servers has a method, named as gnsq names it where gnsq has it; `call` reaches what else a
redesigned server offers. A `ClusterAdmin` asks nsqlookupds where a topic is, and calls the leader of each partition, or
each nsqd of the original. Names and bodies are checked before anything is sent. Both reply formats are understood: bare
JSON, and JSON wrapped in ``data``.

All methods block the calling greenlet until the reply is there, ``timeout`` seconds at most, and raise HttpError when
the server refuses (its reason is ``error.text``) or does not reply.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from nsq_fast._codec import mpub_body
from nsq_fast._lazy import get_logger
from nsq_fast.errors import BodyInvalid, ConfigError, HttpError, NsqError, RemoteProtocolError, TypeInvalid
from nsq_fast.names import (
    DEFAULT_LOOKUPD_HTTP_PORT,
    DEFAULT_NSQD_HTTP_PORT,
    check_channel,
    check_topic,
    is_unix_address,
    listed,
    parse_address,
)
from nsq_fast.protocol.dialect import UNREADABLE
from nsq_fast.protocol.topology import ACCEPT, Nsqd, Topology, merge, parse_lookup, unwrap

from . import lookup
from .gevent_loop import GeventLoop, run
from .http import DEFAULT_TIMEOUT, Endpoint, HttpClient, check_seconds, parse_endpoint
from .start_position import END as POSITION_END
from .start_position import is_for_want_of_messages, parse_start, tell_beyond

logger: logging.Logger = get_logger(__name__)

T = TypeVar("T")
ClientT = TypeVar("ClientT", bound="AdminClient")
_OPTION = re.compile(r"[a-z0-9_]{1,64}")
Call = Callable[["NsqdHTTPClient", dict[str, Any]], None]
"""Calls one nsqd; the mapping names topic, channel and partition, as query arguments."""


class AdminClient:
    """What the clients of both servers share.

    Args:
        host: name or IP address, IPv6 without or with brackets.
        port: HTTP(S) port.
        scheme: ``http`` or ``https``.
        timeout: limit in seconds for each request as a whole.
        authorization: value of an Authorization header.
        tls_options: for https: an ssl.SSLContext, or a mapping with cafile, certfile, keyfile, server_hostname,
            verify (default True).
        user_agent: the User-Agent header; None: nsq_fast and its version.
    """

    default_port = 0

    def __init__(
        self,
        host: str = "localhost",
        port: int | None = None,
        *,
        scheme: str = "http",
        timeout: float = DEFAULT_TIMEOUT,
        authorization: str | None = None,
        tls_options: Any = None,
        user_agent: str | None = None,
    ) -> None:
        if scheme not in ("http", "https"):
            raise ConfigError(f"scheme={scheme!r}: must be http or https")
        if isinstance(host, str) and is_unix_address(host):
            address = parse_address(host, 0)
        elif not isinstance(host, str) or "/" in host:
            raise ConfigError(f"host={host!r}: must be a host name or IP address; use from_url for a URL")
        else:
            address = parse_address((host.removeprefix("[").removesuffix("]"), port or self.default_port), 0)
        headers = {"Accept": ACCEPT}
        if authorization is not None:
            headers["Authorization"] = authorization
        if user_agent is not None:
            headers["User-Agent"] = user_agent
        self._endpoint = Endpoint(scheme, address)
        self._http = HttpClient(
            self._endpoint, timeout=check_seconds("timeout", timeout), headers=headers, tls_options=tls_options
        )

    @classmethod
    def from_url(cls: type[ClientT], url: str | tuple[str, int], **options: Any) -> ClientT:
        """Make a client for ``http://host:port``, ``https://host:port``, ``host:port`` or a (host, port) pair."""
        endpoint = parse_endpoint(url, cls.default_port)
        return cls(*endpoint.address, scheme=endpoint.scheme, **options)

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return self._endpoint.scheme

    @property
    def host(self) -> str:
        """Host name or IP address."""
        return self._endpoint.address.host

    @property
    def port(self) -> int:
        """Port number."""
        return self._endpoint.address.port

    @property
    def address(self) -> str:
        """The URL of the server."""
        return f"{self._endpoint}/"

    def call(self, method: str, path: str, body: bytes = b"", **query: Any) -> bytes:
        """Send any request; return the body of the reply, taken out of its wrapping if it has one.

        Query values are turned into text; None leaves one out, True and False become ``true`` and ``false``.
        """
        texts = {name: _query_text(value) for name, value in query.items()}
        return _text(self._http.request(method, path, texts, body).body)

    def call_json(self, method: str, path: str, **query: Any) -> Any:
        """As `call`, for routes that answer JSON; an empty reply is None. Raises RemoteProtocolError if it is not."""
        reply = self.call(method, path, **query)
        try:
            return msgspec.json.decode(reply) if reply else None
        except UNREADABLE as error:
            raise RemoteProtocolError(f"{self.address}: the reply to {path} is not JSON: {error}") from error

    def ping(self) -> bytes:
        """Return ``b"OK"`` if the server is well."""
        return self.call("GET", "/ping")

    def info(self) -> dict[str, Any]:
        """Return the version of the server, and what else it says of itself."""
        return self._object("/info")

    def close(self) -> None:
        """Close idle connections. The client opens new ones when it is used again."""
        self._http.close()

    def __enter__(self: ClientT) -> ClientT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    def _object(self, path: str, **query: Any) -> dict[str, Any]:
        value = self.call_json("GET", path, **query)
        if value is not None and not isinstance(value, dict):
            raise RemoteProtocolError(f"{self.address}: the reply to {path} is not a JSON object")
        return value or {}

    def _topic(self, action: str, topic: str, **query: Any) -> None:
        self.call("POST", f"/topic/{action}", topic=check_topic(topic), **query)

    def _channel(self, action: str, topic: str, channel: str, **query: Any) -> None:
        self.call("POST", f"/channel/{action}", topic=check_topic(topic), channel=check_channel(channel), **query)


class NsqdHTTPClient(AdminClient):
    """HTTP client of one nsqd (default port 4151).

    ``partition`` is for redesigned servers; None is their default partition, and right for original ones.
    """

    default_port = DEFAULT_NSQD_HTTP_PORT

    def publish(self, topic: str, data: bytes, defer: int | None = None, *, partition: int | None = None) -> bytes:
        """Publish one message, ``defer`` milliseconds from now if given; return ``b"OK"``."""
        if defer is not None and (isinstance(defer, bool) or not isinstance(defer, int) or defer < 0):
            raise ConfigError(f"defer={defer!r}: must be a whole number of milliseconds, at least 0")
        body = _body("data", data)
        return self.call("POST", "/pub", body, topic=check_topic(topic), defer=defer, partition=partition)

    def multipublish(
        self, topic: str, messages: Iterable[bytes], binary: bool = False, *, partition: int | None = None
    ) -> bytes:
        """Publish several messages at once; return ``b"OK"``.

        Without ``binary`` they are sent one a line, so none may hold a newline.
        """
        check_topic(topic)
        if isinstance(messages, (str, bytes, bytearray)) or not isinstance(messages, Iterable):
            raise TypeInvalid(f"messages must be an iterable of bytes, not {type(messages).__name__}")
        bodies = [_body("a message", message) for message in messages]
        if not bodies:
            raise BodyInvalid("no messages to publish")
        if not binary and any(b"\n" in body for body in bodies):
            raise BodyInvalid("a message holds a newline: use binary=True")
        data = mpub_body(bodies) if binary else b"\n".join(bodies)
        return self.call("POST", "/mpub", data, topic=topic, binary=binary or None, partition=partition)

    def create_topic(self, topic: str) -> None:
        """Create a topic. Redesigned servers create topics through nsqlookupd only."""
        self._topic("create", topic)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its channels and messages."""
        self._topic("delete", topic)

    def empty_topic(self, topic: str) -> None:
        """Throw away the messages that wait in a topic; its channels keep theirs."""
        self._topic("empty", topic)

    def pause_topic(self, topic: str) -> None:
        """Stop the flow of messages from a topic to its channels."""
        self._topic("pause", topic)

    def unpause_topic(self, topic: str) -> None:
        """Let the messages of a topic flow again."""
        self._topic("unpause", topic)

    def create_channel(self, topic: str, channel: str, *, partition: int | None = None) -> None:
        """Create a channel of an existing topic."""
        self._channel("create", topic, channel, partition=partition)

    def delete_channel(self, topic: str, channel: str, *, partition: int | None = None) -> None:
        """Delete a channel with its messages."""
        self._channel("delete", topic, channel, partition=partition)

    def empty_channel(self, topic: str, channel: str, *, partition: int | None = None) -> None:
        """Throw away the messages of a channel."""
        self._channel("empty", topic, channel, partition=partition)

    def pause_channel(self, topic: str, channel: str, *, partition: int | None = None) -> None:
        """Stop the flow of messages from a channel to its consumers."""
        self._channel("pause", topic, channel, partition=partition)

    def unpause_channel(self, topic: str, channel: str, *, partition: int | None = None) -> None:
        """Let the messages of a channel flow again."""
        self._channel("unpause", topic, channel, partition=partition)

    def stats(
        self,
        topic: str | None = None,
        channel: str | None = None,
        text: bool = False,
        *,
        include_clients: bool | None = None,
        include_mem: bool | None = None,
    ) -> Any:
        """Return statistics: a dict, or with ``text`` the bytes of the report for people."""
        query: dict[str, Any] = {
            "topic": topic if topic is None else check_topic(topic),
            "channel": channel if channel is None else check_channel(channel),
            "include_clients": include_clients,
            "include_mem": include_mem,
        }
        return self.call("GET", "/stats", **query) if text else self._object("/stats", format="json", **query)

    def get_config(self, option: str) -> Any:
        """Return the value of an option of the running nsqd, such as ``nsqlookupd_tcp_addresses``."""
        return _config_value(self.call("GET", _config_path(option)))

    def set_config(self, option: str, value: Any) -> Any:
        """Change an option of the running nsqd (``nsqlookupd_tcp_addresses``, ``log_level``); return its new value.

        A string is sent as it is, anything else as JSON.
        """
        body = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        return _config_value(self.call("PUT", _config_path(option), body))


class LookupdHTTPClient(AdminClient):
    """HTTP client of one nsqlookupd (default port 4161)."""

    default_port = DEFAULT_LOOKUPD_HTTP_PORT

    def lookup(
        self, topic: str, *, access: str | None = None, metainfo: bool | None = None, partition: int | None = None
    ) -> dict[str, Any]:
        """Return the channels and producers of a topic, and on redesigned servers partitions and meta.

        Raises HttpError with status 404 for a topic that is not registered.
        """
        return self._object("/lookup", topic=check_topic(topic), access=access, metainfo=metainfo, partition=partition)

    def topics(self) -> dict[str, Any]:
        """Return the names of all topics, under ``topics``."""
        return self._object("/topics")

    def channels(self, topic: str) -> dict[str, Any]:
        """Return the names of the channels of a topic, under ``channels``."""
        return self._object("/channels", topic=check_topic(topic))

    def nodes(self) -> dict[str, Any]:
        """Return every nsqd with its topics, under ``producers``."""
        return self._object("/nodes")

    def list_lookupds(self) -> dict[str, Any]:
        """Return the lookupds of a redesigned cluster; the original answers 404."""
        return self._object("/listlookup")

    def create_topic(self, topic: str, **options: Any) -> None:
        """Register a topic. Redesigned: create it, with options ``partition_num``, ``replicator``, ``orderedmulti``,
        ``extend`` and so on; only the leading nsqlookupd can."""
        self._topic("create", topic, **options)

    def delete_topic(self, topic: str, **options: Any) -> None:
        """Forget a topic and its channels. Redesigned: delete it, with ``partition="**"``."""
        self._topic("delete", topic, **options)

    def create_channel(self, topic: str, channel: str) -> None:
        """Register a channel."""
        self._channel("create", topic, channel)

    def delete_channel(self, topic: str, channel: str) -> None:
        """Forget a channel."""
        self._channel("delete", topic, channel)

    def tombstone_topic(self, topic: str, node: str | tuple[str, int]) -> None:
        """Hide a producer of a topic for a while; ``node`` is broadcast address and HTTP port of the nsqd."""
        self._topic("tombstone", topic, node=str(parse_address(node, DEFAULT_NSQD_HTTP_PORT)))


class LookupPoller(lookup.LookupPoller):
    """What all nsqlookupds together say, for greenlets: the calls of ``lookup.LookupPoller`` that wait block."""

    def start(self, *_: object) -> None:
        """Begin to poll, at once, on the hub of this thread."""
        super().start(GeventLoop.here())

    def wait_topology(self, topic: str, timeout: float | None = None) -> Topology:  # type: ignore[override]
        """See ``lookup.LookupPoller``."""
        return run(super().wait_topology(topic, timeout))

    def nodes(self, timeout: float | None = None) -> tuple[Nsqd, ...]:  # type: ignore[override]
        """See ``lookup.LookupPoller``."""
        self.start()
        return run(super().nodes(timeout))

    def topics(self, *arguments: Any) -> lookup.TopicListing:  # type: ignore[override]
        """See ``lookup.LookupPoller``."""
        return run(super().topics(*arguments))


class PartitionResult(NamedTuple):
    """What became of a call to one partition, or to one nsqd of the original.

    Attributes:
        partition: its number; None on an nsqd of the original.
        nsqd: who was called.
        error: why it failed; empty when it is done.
    """

    partition: int | None
    nsqd: Nsqd
    error: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the server has done it."""
        return not self.error


class NodeLoad(NamedTuple):
    """How much a node of the cluster has to do, as the leading nsqlookupd reckons it."""

    address: str
    leader_load: float
    node_load: float


class ClusterStats(NamedTuple):
    """What the leading nsqlookupd says of its cluster. While it is not stable, moves are refused."""

    is_stable: bool
    nodes: tuple[NodeLoad, ...]


class _WireNode(msgspec.Struct):
    broadcast_address: str = ""
    http_port: int = 0
    leader_load_factor: float = 0.0
    node_load_factor: float = 0.0


class _WireStats(msgspec.Struct):
    # youzan/nsq: nsqlookupd/http.go, doClusterStats
    stable: bool = False
    node_stat_list: list[_WireNode] | None = None


Place: TypeAlias = tuple[int | None, Nsqd]
"""An nsqd of a topic, and the partition that it leads there; None on an nsqd of the original."""


def placed(topology: Topology) -> Iterator[Place]:
    """Each partition with its leader, then the nsqds that hold the topic without partitions."""
    yield from sorted(topology.partitions.items())
    for nsqd in topology.unpartitioned:
        yield None, nsqd


class ClusterAdmin:
    """Administration of topics.

    Args:
        lookupd_http_addresses: the nsqlookupds, as URLs or ``host:port``; one of them must answer. All are asked where
            a topic is: those of the original NSQ do not know of each other.
        timeout: limit in seconds for each request.
        http_options: other options of ``LookupdHTTPClient`` and ``NsqdHTTPClient``: authorization, tls_options.
    """

    def __init__(
        self, lookupd_http_addresses: str | Iterable[str], *, timeout: float = DEFAULT_TIMEOUT, **http_options: Any
    ) -> None:
        self._lookupds: list[Any] = listed(lookupd_http_addresses, "lookupd_http_addresses")
        if not self._lookupds:
            raise ConfigError("lookupd_http_addresses: name at least one nsqlookupd")
        self._options = {"timeout": timeout, **http_options}

    # --- channels, on every partition --------------------------------------------------------------------------------

    def set_offset(
        self, topic: str, channel: str, position: Any, *, partition: int | None = None
    ) -> list[PartitionResult]:
        """Let a channel go on at ``position``, forward or back, for all its consumers.

        Args:
            position: as the option ``start_position``: ``'end'``, a datetime, ``'offset:...'``, ``'count:...'``,
                ``'timestamp:...'``, or a mapping by partition, which leaves the others alone. One beyond the end of the
                log is the end, of which a warning tells.
        """
        positions = parse_start(position, "position")
        if positions is None:
            raise ConfigError("position=None: name one")
        if partition is not None and positions.of(partition) is None:
            raise ConfigError(f"position={position!r}: says nothing of partition={partition}")

        def call(client: NsqdHTTPClient, place: dict[str, Any]) -> None:
            chosen = str(positions.of(place["partition"]))
            refusal: HttpError | None = None
            try:
                client.call("POST", "/channel/setoffset", chosen.encode(), **place)
            except HttpError as error:
                refusal = error
            if chosen != POSITION_END:
                # Whether or not there is more to say of it, and whatever the server says.
                with suppress(NsqError, LookupError, TypeError, ValueError, AttributeError):
                    (row,) = client.call_json("GET", "/stats", format="json", **place)["topics"]
                    if refusal is not None and is_for_want_of_messages(refusal, row):
                        refusal = None
                    if refusal is None:
                        tell_beyond(logger, f"{topic}-{place['partition']}", channel, chosen, row)
            if refusal is not None:
                raise refusal

        return self._on_partitions(topic, channel, positions.by_partition if partition is None else (partition,), call)

    def pause(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Stop delivery."""
        return self._post("pause", topic, channel, partition)

    def unpause(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Go on with delivery."""
        return self._post("unpause", topic, channel, partition)

    def skip(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Deliver nothing to it: what waits and what still comes is dropped, and the channel loses those messages."""
        return self._post("skip", topic, channel, partition)

    def unskip(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Deliver what comes from now on."""
        return self._post("unskip", topic, channel, partition)

    def set_order(
        self, topic: str, channel: str, ordered: bool, *, partition: int | None = None
    ) -> list[PartitionResult]:
        """Deliver in order, one message at a time, or not; its consumers are disconnected when it ends."""
        return self._post("setorder", topic, channel, partition, order=ordered)

    def limit_rate(
        self, topic: str, channel: str, kilobytes: int, *, partition: int | None = None
    ) -> list[PartitionResult]:
        """Let each partition deliver so many kilobytes a second."""
        if isinstance(kilobytes, bool) or not isinstance(kilobytes, int) or kilobytes < 1:
            raise ConfigError(f"kilobytes={kilobytes!r}: must be a whole number, at least 1")
        return self._post("ratelimit", topic, channel, partition, ratekilobytes=kilobytes)

    # --- topics and nodes, by the leading nsqlookupd -----------------------------------------------------------------

    def expand(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions: keys go to other ones from then on. Raises HttpError."""
        self._post_lookupd("/topic/partition/expand", topic=check_topic(topic), partition_num=partitions)

    def move_leader(self, topic: str, partition: int, to: str, *, origin: str | None = None) -> None:
        """Let the node ``to`` lead a partition. Raises HttpError, also while the cluster is not stable.

        Args:
            to: the node's ``distributed_id``, as lookup shows it.
            origin: the node that must lead it now; by default whichever does.
        """
        origin = origin or self.leader_id(topic, partition)
        query = {"topic": topic, "partition": partition, "move_from": origin, "move_to": to, "move_leader": True}
        self._post_lookupd("/topic/partition/move", **query)

    def move_replica(self, topic: str, partition: int, origin: str, to: str) -> None:
        """Let the node ``to`` have what the node ``origin`` has of a partition. Raises HttpError."""
        query = {"topic": check_topic(topic), "partition": partition, "move_from": origin, "move_to": to}
        self._post_lookupd("/topic/partition/move", **query, move_leader=False)

    def leader_id(self, topic: str, partition: int) -> str:
        """The ``distributed_id`` of the node that leads a partition. Raises NsqError when none does."""
        leaders = self._topology(topic).partitions
        if partition not in leaders:
            raise NsqError(f"{topic}: partition {partition} has no leader; there are leaders of {list(leaders)}")
        return leaders[partition].distributed_id

    def stats(self) -> ClusterStats:
        """What the leading nsqlookupd says of the cluster. Raises HttpError."""
        with self._leading_lookupd() as lookupd:
            answer = lookupd.call_json("GET", "/cluster/stats") or {}
            try:
                found = msgspec.convert(answer, _WireStats)
            except UNREADABLE as error:
                raise RemoteProtocolError(f"{lookupd.address}: not the state of a cluster: {error}") from error
        rows = found.node_stat_list or ()
        loads = (
            NodeLoad(f"{row.broadcast_address}:{row.http_port}", row.leader_load_factor, row.node_load_factor)
            for row in rows
        )
        return ClusterStats(found.stable, tuple(loads))

    # --- how ---------------------------------------------------------------------------------------------------------

    def _post(
        self, action: str, topic: str, channel: str | None, partition: int | None, **query: Any
    ) -> list[PartitionResult]:
        """``/channel/<action>``, or ``/topic/<action>`` without a channel."""
        call = posting(action, channel, **query)
        return self._on_partitions(topic, channel, () if partition is None else (partition,), call)

    def _on_partitions(
        self, topic: str, channel: str | None, chosen: Collection[int], call: Call
    ) -> list[PartitionResult]:
        """Call each partition in turn, or those ``chosen``; a failure does not keep the others from being called."""
        if channel is not None:
            check_channel(channel)
        places = [place for place in placed(self._topology(topic)) if not chosen or place[0] in chosen]
        absent = sorted({*chosen}.difference(number for number, _ in places))
        if absent or not places:
            which = f" that leads partition {', '.join(map(str, absent))}" if absent else ""
            raise NsqError(f"{topic}: lookup names no nsqd{which}")
        return [self._on_partition(topic, channel, number, nsqd, call) for number, nsqd in places]

    def _on_partition(
        self, topic: str, channel: str | None, number: int | None, nsqd: Nsqd, call: Call
    ) -> PartitionResult:
        if nsqd.http is None:
            return PartitionResult(number, nsqd, "lookup does not name its HTTP port")
        with NsqdHTTPClient(*nsqd.http, **self._options) as client:
            try:
                call(client, {"topic": topic, "channel": channel, "partition": number})
            except HttpError as error:
                return PartitionResult(number, nsqd, str(error))
        return PartitionResult(number, nsqd)

    def _topology(self, topic: str) -> Topology:
        """What those nsqlookupds say together that know the topic. Raises what the last one raises where none does."""
        query: dict[str, Any] = {"topic": check_topic(topic), "access": "r", "metainfo": True}
        answers = list(self._ask_each(lambda lookupd: parse_lookup(lookupd.call("GET", "/lookup", **query))))
        found = [answer for answer in answers if not isinstance(answer, NsqError)]
        if not found and isinstance(answers[-1], NsqError):
            raise answers[-1]
        return merge(found)

    def _ask(self, ask: Callable[[LookupdHTTPClient], T]) -> T:
        """The answer of the first nsqlookupd that has one. Raises what the last one raises."""
        failure = NsqError("no nsqlookupd is named")
        for answer in self._ask_each(ask):
            if not isinstance(answer, NsqError):
                return answer
            failure = answer
        raise failure

    def _ask_each(self, ask: Callable[[LookupdHTTPClient], T]) -> Iterator[T | NsqError]:
        """What the nsqlookupds answer, one after the other, or why one does not."""
        for address in self._lookupds:
            with LookupdHTTPClient.from_url(address, **self._options) as client:
                try:
                    yield ask(client)
                except (HttpError, RemoteProtocolError) as error:
                    yield error

    def _leading_lookupd(self) -> LookupdHTTPClient:
        leader = self._ask(LookupdHTTPClient.list_lookupds).get("lookupdleader") or {}
        try:
            host, port = leader.get("NodeIP"), int(leader.get("HttpPort") or 0)
        except (AttributeError, TypeError, ValueError):
            raise RemoteProtocolError(f"nsqlookupd names no leader that can be asked: {leader!r:.200}") from None
        if not host or not port:
            raise NsqError("no nsqlookupd leads: this is not a redesigned cluster, or it elects a leader just now")
        return LookupdHTTPClient(host, port, **self._options)

    def _post_lookupd(self, path: str, **query: Any) -> None:
        with self._leading_lookupd() as lookupd:
            lookupd.call("POST", path, **query)


def posting(action: str, channel: str | None, **query: Any) -> Call:
    """POSTs ``/channel/<action>`` to an nsqd, or ``/topic/<action>`` without a channel."""

    def call(client: NsqdHTTPClient, place: dict[str, Any]) -> None:
        client.call("POST", order_path(action, channel), **place, **query)

    return call


def order_path(action: str, channel: str | None) -> str:
    return f"/channel/{action}" if channel else f"/topic/{action}"


def _query_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _text(body: bytes) -> bytes:
    """Old servers wrap everything, even the OK of a publish; what is no JSON object is the reply itself."""
    if not body.lstrip().startswith(b"{"):
        return body
    try:
        data = unwrap(body)
        return msgspec.json.decode(data, type=str).encode() if data.startswith(b'"') else data
    except (RemoteProtocolError, UnicodeDecodeError):
        return body


def _body(name: str, data: bytes) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeInvalid(f"{name} must be bytes, not {type(data).__name__}")
    if not len(data):
        raise BodyInvalid(f"{name} must not be empty")
    return bytes(data)


def _config_path(option: str) -> str:
    if not isinstance(option, str) or not _OPTION.fullmatch(option):
        raise ConfigError(f"invalid name of a config option: {option!r}")
    return f"/config/{option}"


def _config_value(reply: bytes) -> Any:
    try:
        return msgspec.json.decode(reply)
    except UNREADABLE:
        return reply.decode("utf-8", "replace")
