"""nsqlookupd: what it knows, its TCP protocol, and its HTTP routes."""

from __future__ import annotations

import dataclasses
import logging
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from nsq_fast.broker.go import Int64, decode_json
from nsq_fast.broker.http import Request, Router, required, style_text, topic_and_channel
from nsq_fast.broker.net import Faults
from nsq_fast.errors import BadBody, BadChannel, BadTopic, Invalid, ServerError
from nsq_fast.log_events import BROKER_NSQD_JOINED, BROKER_NSQD_LEFT
from nsq_fast.names import Address, is_ephemeral, is_valid_name
from nsq_fast.printable import printable

logger = logging.getLogger("nsq_fast.broker.lookupd")


# --- the registrations of an nsqlookupd ------------------------------------------------------------------------------
# Which nsqds there are, and which topics and channels each of them has.
# nsqio/nsq: nsqlookupd/registration_db.go.
# Plain state without sockets or clock: ``now`` is an argument, in seconds since the epoch. Topics and channels stay
# known after their last nsqd has gone (RemoveProducer) until they are deleted; an nsqd that has been silent, or that
# was tombstoned for a topic, is left out of the answers for a while.


@dataclasses.dataclass(eq=False)
class Peer:
    """An nsqd that has sent IDENTIFY. ``id`` and ``remote_address`` are the address of its connection."""

    id: str
    remote_address: str
    hostname: str
    broadcast_address: str
    tcp_port: int
    http_port: int
    version: str
    topology_zone: str = ""
    topology_region: str = ""
    last_update: float = 0.0

    def public(self) -> dict[str, object]:
        """The peer as it stands in answers."""
        return {
            "remote_address": self.remote_address,
            "hostname": self.hostname,
            "broadcast_address": self.broadcast_address,
            "tcp_port": self.tcp_port,
            "http_port": self.http_port,
            "version": self.version,
            "topology_zone": self.topology_zone,
            "topology_region": self.topology_region,
        }


@dataclasses.dataclass(eq=False)
class Producer:
    """A peer as a producer of one topic or channel."""

    peer: Peer
    tombstoned_at: float | None = None

    def is_tombstoned(self, now: float, lifetime: float) -> bool:
        """Whether the producer was tombstoned less than ``lifetime`` seconds ago."""
        return self.tombstoned_at is not None and now - self.tombstoned_at < lifetime


Producers = dict[str, Producer]


class LookupDB:
    """The registrations of one nsqlookupd.

    Args:
        inactive_producer_timeout: seconds after its last PING that an nsqd is left out.
        tombstone_lifetime: seconds that a tombstone hides an nsqd for a topic.
    """

    def __init__(self, inactive_producer_timeout: float = 300.0, tombstone_lifetime: float = 45.0) -> None:
        self.inactive_producer_timeout = inactive_producer_timeout
        self.tombstone_lifetime = tombstone_lifetime
        self.peers: dict[str, Peer] = {}
        self._topics: dict[str, Producers] = {}
        self._channels: dict[str, dict[str, Producers]] = {}

    def add_peer(self, peer: Peer) -> None:
        """Take in an nsqd that has sent IDENTIFY."""
        self.peers[peer.id] = peer

    def remove_peer(self, peer: Peer) -> None:
        """Forget an nsqd whose connection ended. Its topics and channels stay known."""
        self.peers.pop(peer.id, None)
        for producers in self._all_producers():
            producers.pop(peer.id, None)

    def register(self, peer: Peer, topic: str, channel: str = "") -> None:
        """REGISTER: the nsqd has this topic, and this channel if one is named."""
        if channel:
            channels = self._channels.setdefault(topic, {})
            channels.setdefault(channel, {}).setdefault(peer.id, Producer(peer))
        self._topics.setdefault(topic, {}).setdefault(peer.id, Producer(peer))

    def unregister(self, peer: Peer, topic: str, channel: str = "") -> None:
        """UNREGISTER: the nsqd no longer has this channel, or this topic with all its channels."""
        channels = self._channels.get(topic, {})
        if not channel:
            for producers in channels.values():
                producers.pop(peer.id, None)
            _remove(self._topics, topic, peer)
            return
        _remove(channels, channel, peer)

    def add_topic(self, topic: str) -> None:
        """Make a topic known without any nsqd."""
        self._topics.setdefault(topic, {})

    def add_channel(self, topic: str, channel: str) -> None:
        """Make a channel known, and its topic, without any nsqd."""
        self._channels.setdefault(topic, {}).setdefault(channel, {})
        self.add_topic(topic)

    def remove_topic(self, topic: str) -> None:
        """Forget a topic and its channels; the nsqds that have it keep it."""
        self._channels.pop(topic, None)
        self._topics.pop(topic, None)

    def remove_channel(self, topic: str, channel: str) -> bool:
        """Forget a channel; False if it was not known."""
        return self._channels.get(topic, {}).pop(channel, None) is not None

    def tombstone(self, topic: str, node: str, now: float) -> None:
        """Hide the nsqd at ``node`` (broadcast address and HTTP port) from lookups of this topic for a while."""
        for producer in self._topics.get(topic, {}).values():
            if f"{producer.peer.broadcast_address}:{producer.peer.http_port}" == node:
                producer.tombstoned_at = now

    def topics(self) -> list[str]:
        return sorted(self._topics)

    def has_topic(self, topic: str) -> bool:
        return topic in self._topics

    def channels(self, topic: str) -> list[str]:
        """All known channels of a topic; none for an unknown topic."""
        return sorted(self._channels.get(topic, ()))

    def producers(self, topic: str, now: float) -> list[Peer]:
        """The nsqds that have the topic, without the silent and the tombstoned."""
        return [
            producer.peer
            for producer in self._topics.get(topic, {}).values()
            if self.is_active(producer.peer, now) and not producer.is_tombstoned(now, self.tombstone_lifetime)
        ]

    def nodes(self, now: float) -> list[tuple[Peer, dict[str, bool]]]:
        """Every nsqd that is not silent, with its topics and whether it is tombstoned for each."""
        return [(peer, self._topics_of(peer, now)) for peer in self.peers.values() if self.is_active(peer, now)]

    def is_active(self, peer: Peer, now: float) -> bool:
        """Whether the nsqd has been heard of lately."""
        return now - peer.last_update <= self.inactive_producer_timeout

    def registrations(self) -> Iterator[tuple[str, str, str, list[Producer]]]:
        """Everything that is known, as (category, topic, channel, producers), for /debug."""
        yield "client", "", "", [Producer(peer) for peer in self.peers.values()]
        for topic, producers in self._topics.items():
            yield "topic", topic, "", list(producers.values())
        for topic, channels in self._channels.items():
            for channel, producers in channels.items():
                yield "channel", topic, channel, list(producers.values())

    def _topics_of(self, peer: Peer, now: float) -> dict[str, bool]:
        return {
            topic: producers[peer.id].is_tombstoned(now, self.tombstone_lifetime)
            for topic, producers in sorted(self._topics.items())
            if peer.id in producers
        }

    def _all_producers(self) -> Iterator[Producers]:
        yield from self._topics.values()
        for channels in self._channels.values():
            yield from channels.values()


def _remove(registrations: dict[str, Producers], name: str, peer: Peer) -> None:
    producers = registrations.get(name)
    if producers is None:
        return
    producers.pop(peer.id, None)
    if not producers and is_ephemeral(name):
        del registrations[name]


# --- nsqlookupd's TCP protocol: how nsqds register topics and channels -----------------------------------------------
# nsqio/nsq: nsqlookupd/lookup_protocol_v1.go.
# After the magic ``  V1`` come text lines, IDENTIFY followed by a length and a JSON body. Replies have a length but
# no frame type. Every error ends the connection, and a connection that ends takes its nsqd's registrations along.


MAGIC_V1 = b"  V1"
MAX_LINE = 64 * 1024
MAX_BODY = 1024 * 1024

_SIZE = struct.Struct(">i")


class _Identify(msgspec.Struct):
    version: str | None = None
    tcp_port: Int64 | None = None
    http_port: Int64 | None = None
    hostname: str | None = None
    broadcast_address: str | None = None
    topology_zone: str | None = None
    topology_region: str | None = None
    remote_address: str | None = None


def frame(data: bytes) -> bytes:
    """A reply as it goes over the wire."""
    return _SIZE.pack(len(data)) + data


class LookupdProtocol:
    """Serves the TCP connections of an nsqlookupd.

    Args:
        identity: called for the JSON object that answers IDENTIFY (ports are known only after binding).
    """

    def __init__(self, db: LookupDB, identity: Callable[[], dict[str, Any]], faults: Faults) -> None:
        self._db = db
        self._identity = identity
        self._faults = faults

    def handle(self, sock: Any, address: Any) -> None:
        """Serve one connection until it ends."""
        guarded = self._faults.guard(sock)
        reader = sock.makefile("rb")
        try:
            if reader.read(4) == MAGIC_V1:
                _Connection(self._db, self._identity, guarded, reader, Address(*address[:2])).serve()
            else:
                guarded.sendall(frame(b"E_BAD_PROTOCOL"))
        finally:
            reader.close()


class _Connection:
    def __init__(
        self, db: LookupDB, identity: Callable[[], dict[str, Any]], sock: Any, reader: Any, address: Address
    ) -> None:
        self._db = db
        self._identity = identity
        self._sock = sock
        self._reader = reader
        self._address = address
        self._peer: Peer | None = None
        self._commands: dict[str, Callable[[list[str]], bytes]] = {
            "PING": self._ping,
            "IDENTIFY": self._identify,
            "REGISTER": self._register,
            "UNREGISTER": self._unregister,
        }

    def serve(self) -> None:
        try:
            while (line := self._reader.readline(MAX_LINE)).endswith(b"\n"):
                self._sock.sendall(frame(self._execute(line)))
        except ServerError as error:
            logger.info("nsqd at %s: %s", self._address, printable(str(error)), extra=BROKER_NSQD_LEFT)
            self._sock.sendall(frame(f"{error.code} {error.detail}".encode("utf-8", "surrogateescape")))
        finally:
            if self._peer is not None:
                self._db.remove_peer(self._peer)
                logger.info("nsqd at %s left", self._address, extra=BROKER_NSQD_LEFT)

    def _execute(self, line: bytes) -> bytes:
        name, *params = line.strip().decode("utf-8", "surrogateescape").split(" ")
        command = self._commands.get(name)
        if command is None:
            raise Invalid(f"invalid command {name}")
        return command(params)

    def _ping(self, params: list[str]) -> bytes:
        if self._peer is not None:
            self._peer.last_update = time.time()
        return b"OK"

    def _identify(self, params: list[str]) -> bytes:
        if self._peer is not None:
            raise Invalid("cannot IDENTIFY again")
        try:
            info = decode_json(self._read_body(), _Identify)
        except ValueError:
            raise BadBody("IDENTIFY failed to decode JSON body") from None
        if not (info.broadcast_address and info.tcp_port and info.http_port and info.version):
            raise BadBody("IDENTIFY missing fields")
        remote = str(self._address)
        self._peer = Peer(
            id=remote,
            remote_address=remote,
            hostname=info.hostname or "",
            broadcast_address=info.broadcast_address,
            tcp_port=info.tcp_port,
            http_port=info.http_port,
            version=info.version,
            topology_zone=info.topology_zone or "",
            topology_region=info.topology_region or "",
            last_update=time.time(),
        )
        self._db.add_peer(self._peer)
        logger.info(
            "nsqd %s:%s (%s) joined",
            printable(info.broadcast_address),
            info.tcp_port,
            printable(info.version),
            extra=BROKER_NSQD_JOINED,
        )
        return msgspec.json.encode(self._identity())

    def _read_body(self) -> bytes:
        head = self._reader.read(_SIZE.size)
        if len(head) < _SIZE.size:
            raise BadBody("IDENTIFY failed to read body size")
        (size,) = _SIZE.unpack(head)
        body: bytes = self._reader.read(size) if 0 <= size <= MAX_BODY else b""
        if len(body) != size:
            raise BadBody("IDENTIFY failed to read body")
        return body

    def _register(self, params: list[str]) -> bytes:
        self._db.register(self._identified(), *_topic_and_channel("REGISTER", params))
        return b"OK"

    def _unregister(self, params: list[str]) -> bytes:
        self._db.unregister(self._identified(), *_topic_and_channel("UNREGISTER", params))
        return b"OK"

    def _identified(self) -> Peer:
        if self._peer is None:
            raise Invalid("client must IDENTIFY")
        return self._peer


def _topic_and_channel(command: str, params: list[str]) -> tuple[str, str]:
    if not params:
        raise Invalid(f"{command} insufficient number of params")
    topic, channel = params[0], params[1] if len(params) > 1 else ""
    if not is_valid_name(topic):
        raise BadTopic(f"{command} topic name '{topic}' is not valid")
    if channel and not is_valid_name(channel):
        raise BadChannel(f"{command} channel name '{channel}' is not valid")
    return topic, channel


# --- the HTTP routes of nsqlookupd, over a ``LookupDB`` --------------------------------------------------------------
# nsqio/nsq: nsqlookupd/http.go


# What Go's UnixNano gives for the zero time; clients of /debug see it for "never".
_NEVER_NS = -6795364578871345152


class LookupdRoutes:
    """Builds the WSGI application of an nsqlookupd."""

    def __init__(self, db: LookupDB, version: str) -> None:
        self._db = db
        self._version = version

    def router(self) -> Router:
        router = Router()
        router.add("GET", "/ping", self._ping, style_text)
        router.add("GET", "/info", self._info)
        router.add("GET", "/lookup", self._lookup)
        router.add("GET", "/topics", self._topics)
        router.add("GET", "/channels", self._channels)
        router.add("GET", "/nodes", self._nodes)
        router.add("GET", "/debug", self._debug)
        router.add("POST", "/topic/create", self._create_topic)
        router.add("POST", "/topic/delete", self._delete_topic)
        router.add("POST", "/topic/tombstone", self._tombstone)
        router.add("POST", "/channel/create", self._create_channel)
        router.add("POST", "/channel/delete", self._delete_channel)
        return router

    def _ping(self, request: Request) -> str:
        return "OK"

    def _info(self, request: Request) -> dict[str, Any]:
        return {"version": self._version}

    def _lookup(self, request: Request) -> dict[str, Any]:
        topic = required(request, "topic")
        if not self._db.has_topic(topic):
            raise request.refuse(404, "TOPIC_NOT_FOUND")
        producers = [peer.public() for peer in self._db.producers(topic, time.time())]
        return {"channels": self._db.channels(topic), "producers": producers}

    def _topics(self, request: Request) -> dict[str, Any]:
        return {"topics": self._db.topics()}

    def _channels(self, request: Request) -> dict[str, Any]:
        return {"channels": self._db.channels(required(request, "topic"))}

    def _nodes(self, request: Request) -> dict[str, Any]:
        return {"producers": [_node(peer, topics) for peer, topics in self._db.nodes(time.time())]}

    def _debug(self, request: Request) -> dict[str, Any]:
        return {
            f"{category}:{topic}:{channel}": [_debug_producer(producer) for producer in producers]
            for category, topic, channel, producers in self._db.registrations()
            if producers
        }

    def _create_topic(self, request: Request) -> None:
        topic = required(request, "topic")
        if not is_valid_name(topic):
            raise request.refuse(400, "INVALID_ARG_TOPIC")
        self._db.add_topic(topic)

    def _delete_topic(self, request: Request) -> None:
        self._db.remove_topic(required(request, "topic"))

    def _tombstone(self, request: Request) -> None:
        self._db.tombstone(required(request, "topic"), required(request, "node"), time.time())

    def _create_channel(self, request: Request) -> None:
        self._db.add_channel(*topic_and_channel(request))

    def _delete_channel(self, request: Request) -> None:
        if not self._db.remove_channel(*topic_and_channel(request)):
            raise request.refuse(404, "CHANNEL_NOT_FOUND")


def _node(peer: Peer, topics: dict[str, bool]) -> dict[str, Any]:
    return {**peer.public(), "tombstones": list(topics.values()), "topics": list(topics)}


def _debug_producer(producer: Producer) -> dict[str, Any]:
    peer = producer.peer
    shown = {"id": peer.id, **peer.public(), "last_update": int(peer.last_update * 1e9)}
    del shown["remote_address"]
    tombstoned_at = producer.tombstoned_at
    shown["tombstoned"] = tombstoned_at is not None
    shown["tombstoned_at"] = _NEVER_NS if tombstoned_at is None else int(tombstoned_at * 1e9)
    return shown
