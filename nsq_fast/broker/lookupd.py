"""nsqlookupd: what it knows, its TCP protocol, its HTTP routes; and how an nsqd registers there."""

from __future__ import annotations

import dataclasses
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from gevent import Greenlet, sleep, socket, spawn
from gevent.event import Event
from gevent.queue import Empty, Queue

from nsq_fast._lazy import get_logger
from nsq_fast.broker.client import Endpoint, HttpClient
from nsq_fast.broker.go import Int64, decode_json
from nsq_fast.broker.http import Request, Router, style_text, style_v1
from nsq_fast.broker.net import FaultySocket, read_exactly
from nsq_fast.errors import (
    BadBody,
    BadChannel,
    BadTopic,
    HttpError,
    Invalid,
    RemoteProtocolError,
    ServerError,
    printable,
)
from nsq_fast.log_events import BROKER_LOOKUPD_FAILED, BROKER_LOOKUPD_REGISTERED, BROKER_NSQD_JOINED, BROKER_NSQD_LEFT
from nsq_fast.names import Address, is_ephemeral, is_valid_name, parse_address

logger: logging.Logger = get_logger("nsq_fast.broker.lookupd")


# --- the registrations of an nsqlookupd: which nsqds there are, and which topics and channels each of them has -------
# nsqio/nsq: nsqlookupd/registration_db.go. Topics and channels stay known after their last nsqd has gone
# (RemoveProducer) until they are deleted; an nsqd that has been silent, or that was tombstoned for a topic, is left out
# of the answers for a while. ``now`` is in seconds since the epoch.


class Identity(msgspec.Struct):
    """What an nsqd says of itself in IDENTIFY, and the address of its connection."""

    remote_address: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: Int64 = 0
    http_port: Int64 = 0
    version: str = ""
    topology_zone: str = ""
    topology_region: str = ""


class Peer(Identity, eq=False):
    """An nsqd that has sent IDENTIFY."""

    last_update: float = 0.0

    @property
    def id(self) -> str:
        return self.remote_address

    def public(self) -> dict[str, object]:
        """As it stands in answers."""
        return {name: getattr(self, name) for name in Identity.__struct_fields__}


@dataclasses.dataclass(eq=False)
class Producer:
    """A peer as a producer of one topic or channel."""

    peer: Peer
    tombstoned_at: float | None = None


Producers = dict[str, Producer]


class LookupDB:
    """The registrations of one nsqlookupd.

    Args:
        inactive_producer_timeout: seconds after its last PING that an nsqd is left out.
        tombstone_lifetime: seconds that a tombstone hides an nsqd for a topic.
    """

    def __init__(self, inactive_producer_timeout: float = 300.0, tombstone_lifetime: float = 45.0) -> None:
        self._inactive_producer_timeout = inactive_producer_timeout
        self._tombstone_lifetime = tombstone_lifetime
        self.peers: dict[str, Peer] = {}
        self._topics: dict[str, Producers] = {}
        self._channels: dict[str, dict[str, Producers]] = {}

    def remove_peer(self, peer: Peer) -> None:
        """Forget an nsqd whose connection ended. Its topics and channels stay known."""
        self.peers.pop(peer.id, None)
        for producers in (*self._topics.values(), *(each for all in self._channels.values() for each in all.values())):
            producers.pop(peer.id, None)

    def register(self, peer: Peer, topic: str, channel: str) -> None:
        """REGISTER: the nsqd has this topic, and this channel if one is named."""
        self.add(topic, channel)
        if channel:
            self._channels[topic][channel].setdefault(peer.id, Producer(peer))
        self._topics[topic].setdefault(peer.id, Producer(peer))

    def unregister(self, peer: Peer, topic: str, channel: str) -> None:
        """UNREGISTER: the nsqd no longer has this channel, or this topic with all its channels."""
        channels = self._channels.get(topic, {})
        if not channel:
            for producers in channels.values():
                producers.pop(peer.id, None)
        found, name = (channels, channel) if channel else (self._topics, topic)
        if name in found:
            found[name].pop(peer.id, None)
            if not found[name] and is_ephemeral(name):
                del found[name]

    def add(self, topic: str, channel: str = "") -> None:
        """Make a topic, and a channel if one is named, known without any nsqd."""
        if channel:
            self._channels.setdefault(topic, {}).setdefault(channel, {})
        self._topics.setdefault(topic, {})

    def remove_topic(self, topic: str) -> None:
        """Forget a topic and its channels; the nsqds that have it keep it."""
        self._channels.pop(topic, None)
        self._topics.pop(topic, None)

    def remove_channel(self, topic: str, channel: str) -> bool:
        """Forget a channel; False if it was not known."""
        return self._channels.get(topic, {}).pop(channel, None) is not None

    def tombstone(self, topic: str, node: str) -> None:
        """Hide the nsqd at ``node`` (broadcast address and HTTP port) from lookups of this topic for a while."""
        for producer in self._topics.get(topic, {}).values():
            if f"{producer.peer.broadcast_address}:{producer.peer.http_port}" == node:
                producer.tombstoned_at = time.time()

    def topics(self) -> list[str]:
        return sorted(self._topics)

    def has_topic(self, topic: str) -> bool:
        return topic in self._topics

    def channels(self, topic: str) -> list[str]:
        return sorted(self._channels.get(topic, ()))

    def producers(self, topic: str, now: float) -> list[Peer]:
        """The nsqds that have the topic, without the silent and the tombstoned."""
        return [
            producer.peer
            for producer in self._topics.get(topic, {}).values()
            if self._is_active(producer.peer, now) and not self._is_tombstoned(producer, now)
        ]

    def nodes(self, now: float) -> list[tuple[Peer, dict[str, bool]]]:
        """Every nsqd that is not silent, with its topics and whether it is tombstoned for each."""
        return [
            (
                peer,
                {
                    topic: self._is_tombstoned(producers[peer.id], now)
                    for topic, producers in sorted(self._topics.items())
                    if peer.id in producers
                },
            )
            for peer in self.peers.values()
            if self._is_active(peer, now)
        ]

    def _is_active(self, peer: Peer, now: float) -> bool:
        return now - peer.last_update <= self._inactive_producer_timeout

    def _is_tombstoned(self, producer: Producer, now: float) -> bool:
        return producer.tombstoned_at is not None and now - producer.tombstoned_at < self._tombstone_lifetime

    def registrations(self) -> Iterator[tuple[str, list[Producer]]]:
        """Everything that is known, by names of category, topic and channel, for /debug."""
        yield "client::", [Producer(peer) for peer in self.peers.values()]
        for topic, producers in self._topics.items():
            yield f"topic:{topic}:", list(producers.values())
        for topic, channels in self._channels.items():
            for channel, producers in channels.items():
                yield f"channel:{topic}:{channel}", list(producers.values())


# --- nsqlookupd's TCP protocol: how nsqds register topics and channels -----------------------------------------------
# nsqio/nsq: nsqlookupd/lookup_protocol_v1.go.
# After the magic ``  V1`` come text lines, IDENTIFY followed by a length and a JSON body. Replies have a length but
# no frame type. Every error ends the connection, and a connection that ends takes its nsqd's registrations along.


MAGIC_V1 = b"  V1"
MAX_LINE = 64 * 1024
MAX_BODY = 1024 * 1024

_SIZE = struct.Struct(">i")


class LookupdConnection:
    """One connection to an nsqlookupd.

    Args:
        identity: called for the JSON object that answers IDENTIFY (ports are known only after binding).
    """

    def __init__(
        self, db: LookupDB, identity: Callable[[], dict[str, Any]], sock: FaultySocket, address: tuple[str, int]
    ) -> None:
        self._db = db
        self._identity = identity
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._address = Address(*address[:2])
        self._peer: Peer | None = None

    def serve(self) -> None:
        """Execute commands until it ends."""
        try:
            if self._reader.read(4) != MAGIC_V1:
                self._send(b"E_BAD_PROTOCOL")
                return
            while (line := self._reader.readline(MAX_LINE)).endswith(b"\n"):
                self._send(self._execute(line))
        except ServerError as error:
            logger.info("nsqd at %s: %s", self._address, printable(str(error)), extra=BROKER_NSQD_LEFT)
            self._send(f"{error.code} {error.detail}".encode("utf-8", "surrogateescape"))
        finally:
            self._reader.close()
            if self._peer is not None:
                self._db.remove_peer(self._peer)
                logger.info("nsqd at %s left", self._address, extra=BROKER_NSQD_LEFT)

    def _send(self, reply: bytes) -> None:
        self._sock.sendall(_SIZE.pack(len(reply)) + reply)

    def _execute(self, line: bytes) -> bytes:
        name, *params = line.strip().decode("utf-8", "surrogateescape").split(" ")
        if name == "IDENTIFY":
            return self._identify()
        if name == "PING":
            if self._peer is not None:
                self._peer.last_update = time.time()
        elif name in ("REGISTER", "UNREGISTER"):
            if self._peer is None:
                raise Invalid("client must IDENTIFY")
            tell = self._db.register if name == "REGISTER" else self._db.unregister
            tell(self._peer, *_topic_and_channel(name, params))
        else:
            raise Invalid(f"invalid command {name}")
        return b"OK"

    def _identify(self) -> bytes:
        if self._peer is not None:
            raise Invalid("cannot IDENTIFY again")
        try:
            info = decode_json(self._read_body(), Identity)
        except ValueError:
            raise BadBody("IDENTIFY failed to decode JSON body") from None
        if not (info.broadcast_address and info.tcp_port and info.http_port and info.version):
            raise BadBody("IDENTIFY missing fields")
        fields = {**msgspec.structs.asdict(info), "remote_address": str(self._address)}
        self._peer = peer = Peer(**fields, last_update=time.time())
        self._db.peers[peer.id] = peer
        place, version = f"{printable(peer.broadcast_address)}:{peer.tcp_port}", printable(peer.version)
        logger.info("nsqd %s (%s) joined", place, version, extra=BROKER_NSQD_JOINED)
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


def _topic_and_channel(command: str, params: list[str]) -> tuple[str, str]:
    if not params:
        raise Invalid(f"{command} insufficient number of params")
    topic, channel = params[0], params[1] if len(params) > 1 else ""
    if not is_valid_name(topic):
        raise BadTopic(f"{command} topic name '{topic}' is not valid")
    if channel and not is_valid_name(channel):
        raise BadChannel(f"{command} channel name '{channel}' is not valid")
    return topic, channel


# --- the HTTP routes of nsqlookupd -----------------------------------------------------------------------------------
# nsqio/nsq: nsqlookupd/http.go


# What Go's UnixNano gives for the zero time; clients of /debug see it for "never".
_NEVER_NS = -6795364578871345152


class LookupdRoutes:
    """The routes of an nsqlookupd."""

    def __init__(self, db: LookupDB, version: str) -> None:
        self._db = db
        self._version = version

    def router(self) -> Router:
        db = self._db
        rows = (
            ("GET", "/info", lambda request: {"version": self._version}),
            ("GET", "/lookup", self._lookup),
            ("GET", "/topics", lambda request: {"topics": db.topics()}),
            ("GET", "/channels", lambda request: {"channels": db.channels(request.required("topic"))}),
            ("GET", "/nodes", self._nodes),
            ("GET", "/debug", self._debug),
            ("POST", "/topic/create", lambda request: db.add(request.valid("topic"))),
            ("POST", "/topic/delete", lambda request: db.remove_topic(request.required("topic"))),
            ("POST", "/topic/tombstone", self._tombstone),
            ("POST", "/channel/create", lambda request: db.add(request.valid("topic"), request.valid("channel"))),
            ("POST", "/channel/delete", self._delete_channel),
        )
        return Router((style_text, [("GET", "/ping", lambda request: "OK")]), (style_v1, rows))

    def _lookup(self, request: Request) -> dict[str, Any]:
        topic = request.required("topic")
        if not self._db.has_topic(topic):
            raise request.refuse(404, "TOPIC_NOT_FOUND")
        producers = [peer.public() for peer in self._db.producers(topic, time.time())]
        return {"channels": self._db.channels(topic), "producers": producers}

    def _nodes(self, request: Request) -> dict[str, Any]:
        nodes = self._db.nodes(time.time())
        rows = [{**peer.public(), "tombstones": [*topics.values()], "topics": [*topics]} for peer, topics in nodes]
        return {"producers": rows}

    def _debug(self, request: Request) -> dict[str, Any]:
        return {name: [*map(_debug_producer, each)] for name, each in self._db.registrations() if each}

    def _tombstone(self, request: Request) -> None:
        self._db.tombstone(request.required("topic"), request.required("node"))

    def _delete_channel(self, request: Request) -> None:
        if not self._db.remove_channel(request.valid("topic"), request.valid("channel")):
            raise request.refuse(404, "CHANNEL_NOT_FOUND")


def _debug_producer(producer: Producer) -> dict[str, Any]:
    peer, at = producer.peer, producer.tombstoned_at
    shown = {"id": peer.id, **peer.public(), "last_update": int(peer.last_update * 1e9)}
    del shown["remote_address"]
    return {**shown, "tombstoned": at is not None, "tombstoned_at": _NEVER_NS if at is None else int(at * 1e9)}


# --- nsqd's side of that protocol: registers the topics and channels of an nsqd --------------------------------------
# nsqio/nsq: nsqd/lookup.go, lookupLoop; nsqd/lookup_peer.go.
# Every nsqlookupd has a ``_Registration`` with two greenlets. One connects, says who we are and what we have, and reads
# the replies until the connection ends; then it tries again, for as long as it takes. The other sends changes as they
# come, and PING when there are none. A change while there is no connection is not queued: the next connection registers
# everything again.


DEFAULT_LOOKUPD_TCP_PORT = 4160
CONNECT_TIMEOUT = 1.0
HTTP_TIMEOUT = 2.0
FIRST_RETRY_DELAY = 0.05
MAX_RETRY_DELAY = 5.0

Registrations = Callable[[], Iterable[tuple[str, str]]]


class _LookupdInfo(msgspec.Struct):
    http_port: int = 0
    broadcast_address: str = ""


class Registrar:
    """Keeps an nsqd registered at its nsqlookupds.

    Args:
        addresses: TCP addresses of the nsqlookupds.
        identity: called on each connect for the JSON object of IDENTIFY.
        registrations: called on each connect for everything there is, as (topic, channel); the channel is
            empty for a topic without any.
        ping_interval: seconds between PINGs. A nsqlookupd that is silent for two of them is left and tried again.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Callable[[], dict[str, Any]],
        registrations: Registrations,
        *,
        ping_interval: float = 15.0,
    ) -> None:
        self.identity = identity
        self.registrations = registrations
        self.ping_interval = ping_interval
        self._peers: dict[str, _Registration] = {}
        self._addresses = list(addresses)

    def start(self) -> None:
        """Begin to connect and register, in the background."""
        for address in self._addresses:
            if address not in self._peers:
                self._peers[address] = _Registration(address, self)

    def stop(self) -> None:
        """Leave every nsqlookupd; each forgets this nsqd when it sees the connection end."""
        for peer in self._peers.values():
            peer.stop()
        self._peers.clear()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Register at these nsqlookupds from now on, and no longer at others."""
        self._addresses = list(addresses)
        for address in set(self._peers) - set(addresses):
            self._peers.pop(address).stop()
        self.start()

    def register(self, topic: str, channel: str = "") -> None:
        self._send(f"REGISTER {topic} {channel}".rstrip())

    def unregister(self, topic: str, channel: str = "") -> None:
        self._send(f"UNREGISTER {topic} {channel}".rstrip())

    def _send(self, command: str) -> None:
        for peer in self._peers.values():
            peer.send(command)

    def wait_registered(self, timeout: float | None = None) -> bool:
        """Block until every nsqlookupd has confirmed all commands; False if ``timeout`` seconds passed first."""
        return all(peer.settled.wait(timeout) for peer in list(self._peers.values()))

    def channels_of(self, topic: str) -> set[str]:
        """The lasting channels that the nsqlookupds know for a topic.

        A new topic is created with them, so that no message misses a channel that exists elsewhere.
        nsqlookupds that do not answer are passed over. Blocks while it asks.
        """
        return set().union(*(_ask_channels(peer.http_address, topic) for peer in self._peers.values()))


class _Registration:
    def __init__(self, address: str, registrar: Registrar) -> None:
        self._address = parse_address(address, DEFAULT_LOOKUPD_TCP_PORT)
        self._registrar = registrar
        self._commands: Queue[str] = Queue()
        self._unanswered = 0
        self._connected = False
        self.http_address: Address | None = None
        self.settled = Event()
        self._greenlet: Greenlet[..., Any] = spawn(self._run)

    def send(self, command: str) -> None:
        self.settled.clear()
        if self._connected:
            self._commands.put(command)

    def stop(self) -> None:
        self._greenlet.kill()

    def _run(self) -> None:
        delay = FIRST_RETRY_DELAY
        while True:
            try:
                self._connect_and_serve()
            except (OSError, RemoteProtocolError) as error:
                logger.info("nsqlookupd %s: %s", self._address, error, extra=BROKER_LOOKUPD_FAILED)
            delay = FIRST_RETRY_DELAY if self._connected else min(2 * delay, MAX_RETRY_DELAY)
            self._connected = False
            sleep(delay)

    def _connect_and_serve(self) -> None:
        sock = socket.create_connection(self._address, CONNECT_TIMEOUT)
        sock.settimeout(2 * self._registrar.ping_interval)
        writer = None
        try:
            self._introduce(sock)
            writer = spawn(self._write_loop, sock)
            self._read_loop(sock)
        finally:
            if writer is not None:
                writer.kill()
            sock.close()

    def _introduce(self, sock: Any) -> None:
        body = msgspec.json.encode(self._registrar.identity())
        sock.sendall(MAGIC_V1 + b"IDENTIFY\n" + _SIZE.pack(len(body)) + body)
        try:
            info = msgspec.json.decode(_read_reply(sock), type=_LookupdInfo)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the answer to IDENTIFY makes no sense: {error}") from None
        if info.broadcast_address and info.http_port:
            self.http_address = Address(info.broadcast_address, info.http_port)
        logger.info("nsqlookupd %s: registered there", self._address, extra=BROKER_LOOKUPD_REGISTERED)
        # Nothing may switch greenlets between these lines, or a change could be lost or sent twice.
        self._commands = Queue()
        self._unanswered = 0
        self._connected = True
        for topic, channel in self._registrar.registrations():
            self._commands.put(f"REGISTER {topic} {channel}".rstrip())
        if self._commands.empty():
            self.settled.set()

    def _write_loop(self, sock: Any) -> None:
        while True:
            try:
                commands = [self._commands.get(timeout=self._registrar.ping_interval)]
            except Empty:
                commands = ["PING"]
            while not self._commands.empty():
                commands.append(self._commands.get())
            self._unanswered += len(commands)
            try:
                sock.sendall("".join(f"{command}\n" for command in commands).encode())
            except OSError:
                return  # the reader sees it too, and decides what follows

    def _read_loop(self, sock: Any) -> None:
        while True:
            reply = _read_reply(sock)
            if reply.startswith(b"E_"):
                logger.warning("nsqlookupd %s: %s", self._address, printable(reply), extra=BROKER_LOOKUPD_FAILED)
            self._unanswered -= 1
            if not self._unanswered and self._commands.empty():
                self.settled.set()


def _read_reply(sock: Any) -> bytes:
    (size,) = _SIZE.unpack(read_exactly(sock, _SIZE.size))
    if not 0 <= size <= MAX_BODY:
        raise RemoteProtocolError(f"a reply of {size} bytes")
    return read_exactly(sock, size)


def _ask_channels(lookupd: Address | None, topic: str) -> set[str]:
    if lookupd is None:
        return set()
    client = HttpClient(Endpoint("http", lookupd), timeout=HTTP_TIMEOUT)
    try:
        reply = msgspec.json.decode(client.request("GET", "/channels", {"topic": topic}).body, type=_Channels)
    except (HttpError, msgspec.MsgspecError) as error:
        logger.warning(
            "nsqlookupd at %s did not tell the channels of %s: %s", lookupd, topic, error, extra=BROKER_LOOKUPD_FAILED
        )
        return set()
    finally:
        client.close()
    return {channel for channel in reply.channels if not is_ephemeral(channel)}


class _Channels(msgspec.Struct):
    channels: list[str] = []
