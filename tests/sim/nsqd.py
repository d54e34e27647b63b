"""A model of nsqd, of both dialects, that keeps the books: who stored what, who got it, who answered.

It is small on purpose, and strict where the real ones are lenient: what a client may not do is a broken rule at once.
Facts are those of nsqio/nsq (nsqd/protocol_v2.go, channel.go) and youzan/nsq (nsqdserver/protocol_v2.go,
nsqd/channel.go).
"""

from __future__ import annotations

import itertools
import json
import ssl
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import trustme

from nsq_fast.client.layers import DeflateLayer, SnappyLayer, TlsLayer

from .clock import SimError, SimLoop
from .network import End, Host, Network

VERSIONS = {"original": "1.3.0", "redesigned": "0.3.7-HA.1.13.0"}
OF_MESSAGES = (b"FIN", b"REQ", b"TOUCH")
REPLY, ERROR, MESSAGE = 0, 1, 2
Record = tuple[bytes, int, bytes | None]
"""What is published: a body, its trace id, its header."""


class Message:
    """One record of a partition."""

    __slots__ = ("attempts", "body", "ext", "id", "log", "offset", "size", "timestamp", "trace_id")

    def __init__(self, log: Log, number: int, body: bytes, trace_id: int, ext: bytes | None, timestamp: int) -> None:
        self.log, self.body, self.trace_id, self.ext, self.timestamp = log, body, trace_id, ext, timestamp
        if log.is_redesigned:
            self.id = struct.pack(">QQ", (log.partition << 50) + number, trace_id)
        else:
            self.id = b"%016x" % number
        self.offset = log.size
        self.size = 30 + len(body) + (3 + len(ext) if ext else 0)
        self.attempts = 0

    def __repr__(self) -> str:
        return f"{self.log.topic}.{self.log.partition} {self.body[:24]!r}"


class Flight:
    """A message that a connection has, and must answer until ``timer`` rings."""

    __slots__ = ("at", "conn", "message", "timer")

    def __init__(self, message: Message, conn: Conn, at: float, timer: Any) -> None:
        self.message, self.conn, self.at, self.timer = message, conn, at, timer


class Channel:
    """One channel of one partition."""

    def __init__(self, log: Log, name: str) -> None:
        self.log = log
        self.name = name
        self.is_ordered = False
        self.queue: deque[Message] = deque()
        self.flights: dict[bytes, Flight] = {}
        self.deferred: dict[bytes, Any] = {}
        self.clients: list[Conn] = []
        self.timeouts = 0

    @property
    def depth(self) -> int:
        return len(self.queue) + len(self.flights) + len(self.deferred)

    def push(self) -> None:
        """Give what waits to clients that are ready, one each in turn."""
        while self.queue and not (self.is_ordered and self.flights):
            ready = [conn for conn in self.clients if conn.is_ready]
            if not ready:
                return
            conn = min(ready, key=lambda each: (each.in_flight, each.number))
            conn.deliver(self.queue.popleft())

    def back(self, message: Message) -> None:
        if self.is_ordered or self.log.is_redesigned:
            self.queue.appendleft(message)
        else:
            self.queue.append(message)

    def land(self, flight: Flight) -> None:
        del self.flights[flight.message.id]
        flight.timer.cancel()
        flight.conn.in_flight -= 1


class Log:
    """A topic of an original nsqd, or a partition of the redesigned NSQ: then its leader may change.

    Attributes:
        leader: the nsqd that serves it; None: none does.
        messages: all that was stored, in this order.
    """

    def __init__(self, books: Books, topic: str, partition: int, is_redesigned: bool) -> None:
        self.books = books
        self.topic, self.partition, self.is_redesigned = topic, partition, is_redesigned
        self.is_ext = self.is_ordered = False
        self.leader: ModelNsqd | None = None
        self.is_writable = True
        self.size = 0
        self.messages: list[Message] = []
        self.backlog: list[Message] = []  # what came before there was a channel
        self.channels: dict[str, Channel] = {}
        self._numbers = itertools.count(1)

    def channel(self, name: str) -> Channel:
        channel = self.channels.get(name)
        if channel is None:
            assert not self.channels, "a message counts its attempts for one channel"
            channel = self.channels[name] = Channel(self, name)
            if not self.is_redesigned:
                channel.queue.extend(self.backlog)
                self.backlog.clear()
        return channel

    def store(self, body: bytes, trace_id: int = 0, ext: bytes | None = None) -> Message:
        message = Message(self, next(self._numbers), body, trace_id, ext, int(self.books.loop.wall() * 1e9))
        self.size += message.size
        self.messages.append(message)
        self.books.stored.setdefault(body, []).append(message)
        if not self.channels:
            self.backlog.append(message)
        for channel in self.channels.values():
            channel.queue.append(message)
            channel.push()
        return message


class Books:
    """What the servers know in all, for the rules to be checked against.

    Attributes:
        stored: body -> the records of it.
        lost: bodies of which a server has lost a record, by being killed.
        finished, refused: how often each body was.
        on_change: called when a server comes or goes, or leads what it did not.
        abandoned: messages in flight on connections that ended.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.stored: dict[bytes, list[Message]] = {}
        self.lost: set[bytes] = set()
        self.finished: Counter[bytes] = Counter()
        self.abandoned = 0
        self.refused: Counter[bytes] = Counter()  # for what they are, not for a while
        self.commands: Counter[str] = Counter()
        self.on_change: Callable[[], object] = lambda: None
        self.trace: list[str] = []

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time() - 1_000_000:10.4f} {text}")

    def breaks(self, text: str) -> None:
        """A client did what it may not do: the first such thing ends the simulation."""
        self.note(f"BROKEN {text}")
        if self.loop.broken is None:
            self.loop.broken = text

    def require(self, is_so: object, text: str) -> None:
        """A rule that is checked in callbacks: the client may catch what they raise."""
        if not is_so:
            self.breaks(text)
            raise SimError(text)


class Moods:
    """How a server misbehaves: probabilities, of a publish or a reply.

    Attributes:
        refuses: that it answers E_PUB_FAILED and has not stored.
        lies: that it answers with an error and has stored.
        forgets: that it stores, and the connection is reset before the reply.
        late: that a reply is late, by up to ``lateness`` seconds.
    """

    refuses = lies = forgets = late = 0.0
    lateness = 1.0


class ServerTls:
    """What layers take for a context, for the side of the server."""

    def __init__(self) -> None:
        authority = trustme.CA()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("10.1.0.1").configure_cert(self._context)

    def wrap_bio(self, incoming: Any, outgoing: Any, server_hostname: str) -> Any:
        return self._context.wrap_bio(incoming, outgoing, server_side=True)


server_tls = cache(ServerTls)  # of all: to make a certificate takes longer than a scenario


class Conn:
    """A connection, as the server sees it."""

    _numbers = itertools.count()

    def __init__(self, nsqd: ModelNsqd, end: End) -> None:
        self.nsqd, self.end = nsqd, end
        self.books, self.loop = nsqd.books, nsqd.books.loop
        self.number = len(nsqd.network.streams)
        self.rdy = self.in_flight = 0
        self.channel: Channel | None = None
        self.is_closing = self.is_gone = False
        self.heartbeat = 30.0
        self.msg_timeout = nsqd.msg_timeout
        self.deliveries: Counter[bytes] = Counter()  # of each id
        self.answers: Counter[bytes] = Counter()
        self.delivered_at: list[float] = []
        self.last_command_at = self.loop.time()
        self._has_magic = False
        self._has_detail = self._has_ext = False
        self._layers: list[Any] = []
        self._shaking: TlsLayer | None = None
        self._compression: Any = None
        self._in = b""
        self._out = bytearray()
        self._replies_free_at = 0.0
        self._is_corked = self._has_ended = self._is_over = False
        self._timers: list[Any] = []
        end.on_event, end.on_room = self._came, self._flush
        self._beat_later()

    @property
    def is_redesigned(self) -> bool:
        return self.nsqd.is_redesigned

    # Bytes

    def _came(self) -> None:
        if self.nsqd.is_frozen:
            return
        end = self.end
        while end.is_readable and not self.is_gone and not self._is_over:
            try:
                data = end.recv(65536)
            except OSError:
                self.drop("reset")
                return
            if not data:
                self._has_ended = True
                self._go_if_done()
                return
            self._is_corked = True  # replies to what came together leave together, as through nsqd's buffer
            self._decode(data)
            self._is_corked = False
            self._flush()

    def _go_if_done(self) -> None:
        """The client has ended the stream: once the replies are out, so does the server."""
        if self._has_ended and not self._out and self._replies_free_at <= self.loop.time():
            self.drop("ended by the client")

    def _decode(self, data: bytes) -> None:
        if self._shaking is not None:
            tls = self._shaking
            tls.feed(data)
            is_done = tls.try_handshake()
            self._send_raw(tls.take_outgoing())
            if not is_done:
                return
            self._shaking = None
            self._layers.append(tls)
            self.send(REPLY, b"OK")
            self._compress()
        elif self._layers:
            self._layers[0].feed(data)
        else:
            self._in += data
            self._parse()
            return
        while piece := self._read_layer(len(self._layers) - 1):
            self._in += piece
        self._parse()

    def _read_layer(self, level: int) -> bytes:
        while True:
            data: bytes = self._layers[level].read()
            if data or level == 0:
                return data
            below = self._read_layer(level - 1)
            if not below:
                return b""
            self._layers[level].feed(below)

    def _send_raw(self, data: bytes) -> None:
        if data and not self.is_gone:
            self._out += data
            if not self._is_corked:
                self._flush()

    def _flush(self) -> None:
        while self._out and not self.is_gone and not self.nsqd.is_frozen:
            try:
                sent = self.end.send(self._out)
            except BlockingIOError:
                return
            except OSError:
                self.drop("reset")
                return
            del self._out[:sent]
        self._go_if_done()

    def send(self, kind: int, data: bytes) -> None:
        frame = struct.pack(">ii", 4 + len(data), kind) + data
        for layer in reversed(self._layers):
            frame = layer.encode(frame)
        self._send_raw(frame)

    def _reply(self, data: bytes, kind: int = REPLY) -> None:
        """In order, but some come late: then all behind them do, as from a server that waits for its disk."""
        moods, chance = self.nsqd.moods, self.loop.chance
        if moods.late and chance.happens(moods.late):
            self._replies_free_at = max(self._replies_free_at, self.loop.time()) + chance.random() * moods.lateness
        if self._replies_free_at <= self.loop.time():
            self.send(kind, data)
        else:
            self._replies_free_at += 1e-6
            self._timers.append(self.loop.call_at(self._replies_free_at, self.send, kind, data))

    def fail(self, code: str, detail: str = "", *, is_fatal: bool = True) -> None:
        self.books.note(f"{self.nsqd}: {code}")
        self._reply(f"{code} {detail}".encode(), ERROR)
        if is_fatal:
            self.loop.call_at(max(self.loop.time(), self._replies_free_at + 1e-6), self.drop, code)
            self.is_closing = True
            self._in = b""
            self._is_over = True
            self.end.on_event = None

    # Life and death

    def _beat_later(self) -> None:
        self._timers = [timer for timer in self._timers[-20:] if not timer.cancelled()]
        if self.heartbeat > 0 and not self.is_gone:
            self._timers.append(self.loop.call_later(self.heartbeat, self._beat))

    def _beat(self) -> None:
        if self.is_gone:
            return
        if not self.nsqd.is_frozen:
            silence = self.loop.time() - self.last_command_at
            if silence > (3 if self.is_redesigned else 2) * self.heartbeat + 0.01:
                self.books.note(f"{self.nsqd}: client {self.number} is mute")
                self.nsqd.mute_clients += 1
                self.drop("mute")
                return
            self.send(REPLY, b"_heartbeat_")
        self._beat_later()

    def drop(self, why: str, *, is_abrupt: bool = False) -> None:
        """The server lets go of the connection."""
        if self.is_gone:
            return
        self.books.note(f"{self.nsqd}: connection {self.number} dropped: {why}")
        self.is_gone = True
        self.nsqd.conns.remove(self)
        for timer in self._timers:
            timer.cancel()
        self.end.on_event = self.end.on_room = None
        self.end.close(is_abrupt=is_abrupt)
        channel = self.channel
        if channel is not None:
            channel.clients.remove(self)
            mine = [flight for flight in channel.flights.values() if flight.conn is self]
            self.books.abandoned += len(mine)
            if self.is_redesigned:  # the original waits for their timeouts
                for flight in sorted(mine, key=lambda each: each.message.offset, reverse=True):
                    channel.land(flight)
                    flight.message.attempts -= 1
                    channel.back(flight.message)
                channel.push()

    # Commands

    def _parse(self) -> None:
        if not self._has_magic:
            if len(self._in) < 4:
                return
            if self._in[:4] != b"  V2":
                self.books.breaks(f"no magic, but {self._in[:20]!r}")
            self._in = self._in[4:]
            self._has_magic = True
        while not self.is_gone and not self._is_over and (command := self._next()) is not None:
            self.last_command_at = self.loop.time()
            self._execute(*command)

    def _next(self) -> tuple[list[str], bytes] | None:
        """The words of the next command with its body, or the id that it names; None: it is not whole."""
        data = self._in
        name = data[:6].partition(b" ")[0]
        if name in OF_MESSAGES:  # a binary id may hold what ends a word or a line elsewhere
            start = len(name) + 1
            end = data.find(b"\n", start + 16)
            if end < 0:
                return None
            self._in = data[end + 1 :]
            return [name.decode(), *data[start + 16 : end].decode().split()], data[start : start + 16]
        end = data.find(b"\n")
        if end < 0:
            return None
        words, size = data[:end].decode().split(" "), end + 1
        if words[0] in WITH_BODY:
            size += 4 + int.from_bytes(data[size : size + 4], "big") if len(data) >= size + 4 else len(data)
        if len(data) < size:
            return None
        self._in = data[size:]
        return words, data[end + 1 : size]

    def _execute(self, words: list[str], body: bytes) -> None:
        name = words[0]
        self.books.commands[name] += 1
        if self.is_closing and name == "CLS":
            self.books.breaks("CLS twice")
        if name in RECORDS:
            self._publish(words, body)
        elif name in SUBSCRIBES:
            self._subscribe(words)
        elif (action := getattr(self, f"_on_{name.lower()}", None)) is not None:
            action(words, body)
        else:
            self.books.breaks(f"unknown command {words}")

    def _on_nop(self, words: list[str], body: bytes) -> None: ...

    def _on_identify(self, words: list[str], body: bytes) -> None:
        wish = json.loads(body[4:])
        nsqd = self.nsqd
        self.heartbeat = wish.get("heartbeat_interval", 30000) / 1000
        self.msg_timeout = (wish.get("msg_timeout") or nsqd.msg_timeout * 1000) / 1000
        self._has_ext = bool(wish.get("extend_support"))
        for timer in self._timers:
            timer.cancel()
        self._beat_later()
        granted = {name: bool(wish.get(name)) for name in ("tls_v1", "snappy", "deflate")}
        reply = {
            "max_rdy_count": nsqd.max_rdy, "version": VERSIONS["redesigned" if self.is_redesigned else "original"],
            "msg_timeout": round(self.msg_timeout * 1000), "max_msg_timeout": 900_000, "sample_rate": 0,
            "auth_required": False, "deflate_level": 6, "max_deflate_level": 6, **granted,
        }  # fmt: skip
        self.send(REPLY, json.dumps(reply).encode())
        if granted["snappy"] or granted["deflate"]:
            self._compression = SnappyLayer() if granted["snappy"] else DeflateLayer(6)
        if granted["tls_v1"]:
            self._shaking = TlsLayer(server_tls(), "")  # type: ignore[arg-type]
            self._decode_early()
        else:
            self._compress()

    def _compress(self) -> None:
        if self._compression is not None:
            self._layers.append(self._compression)
            self.send(REPLY, b"OK")
            self._decode_early()

    def _decode_early(self) -> None:
        """What came behind the last command in the clear belongs to the new layer."""
        early, self._in = self._in, b""
        if early:
            self._decode(early)

    # Publishing

    def _log_for(self, words: list[str], at: int) -> Log | None:
        """The partition that a command names, if it is served here; else the refusal is sent."""
        topic = words[1]
        is_publish = "PUB" in words[0]
        if not self.is_redesigned:
            return self.nsqd.log(topic)
        logs = [log for log in self.nsqd.cluster if log.topic == topic]
        partition = int(words[at]) if len(words) == at + 1 else -1
        if partition < 0:
            log = next((log for log in logs if log.leader is self.nsqd), None)
            if log is not None and log.is_ordered and is_publish:
                self.fail("E_BAD_PARTITION", "topic partition is not valid for multi partition: -1")
                return None
        else:
            log = next((log for log in logs if log.partition == partition), None)
        if log is None:
            self.fail("E_TOPIC_NOT_EXIST")
            return None
        if log.leader is not self.nsqd:
            self.fail("E_FAILED_ON_NOT_LEADER", is_fatal=not is_publish)
            return None
        return log

    def _publish(self, words: list[str], body: bytes) -> None:
        moods, chance = self.nsqd.moods, self.loop.chance
        log = self._log_for(words, 2)
        if log is None:
            return
        has_many = words[0].startswith("M")
        records = [*map(RECORDS[words[0]], _parts(body[4:]) if has_many else (body[4:],))]
        if any(not data for data, _, _ in records):
            self.fail("E_BAD_MESSAGE", "invalid message body size 0")
            return
        if any(len(data) > self.nsqd.max_msg_size for data, _, _ in records):
            self.books.refused.update(data for data, _, _ in records if len(data) > self.nsqd.max_msg_size)
            self.fail("E_BAD_MESSAGE", "message too big")
            return
        many = "MPUB" if has_many else "PUB"
        if not log.is_writable or chance.happens(moods.refuses):
            code = f"E_{many}_FAILED" if log.is_writable else "E_FAILED_ON_NOT_WRITABLE"
            self.fail(code, is_fatal=not self.is_redesigned)
            return
        stored = [log.store(*record) for record in records]
        self.books.note(f"{self.nsqd}: stores {words} {[message.body[:24] for message in stored]}")
        if chance.happens(moods.forgets):
            self.drop("before the reply", is_abrupt=True)
            return
        if chance.happens(moods.lies):
            code = "E_FAILED_ON_NOT_WRITABLE" if self.is_redesigned else f"E_{many}_FAILED"
            self.fail(code, is_fatal=not self.is_redesigned)
            return
        first, size = stored[0], sum(message.size for message in stored)
        if words[0] in ("PUB_TRACE", "MPUB_TRACE") or (words[0] == "PUB_EXT" and first.trace_id):
            trace_id = 0 if words[0] == "MPUB_TRACE" else first.trace_id
            self._reply(b"OK" + first.id[:8] + struct.pack(">QQI", trace_id, first.offset, size))
        else:
            self._reply(b"OK")

    # Consuming

    @property
    def is_ready(self) -> bool:
        return self.in_flight < self.rdy and not self.is_closing and not self.nsqd.is_frozen

    def _subscribe(self, words: list[str]) -> None:
        has_detail, is_ordered = words[0] != "SUB", words[0] == "SUB_ORDERED"
        if self.channel is not None:
            self.books.breaks("SUB twice")
            return
        if not self.is_redesigned and has_detail:
            self.books.breaks(f"{words} to an original nsqd")
            return
        log = self._log_for(words, 3)
        if log is None:
            return
        if log.is_ordered and not is_ordered:
            self.fail("E_SUB_ORDER_IS_MUST")
            return
        self._has_detail = has_detail
        channel = log.channel(words[2])
        channel.is_ordered |= is_ordered
        self.channel = channel
        channel.clients.append(self)
        self.books.note(f"{self.nsqd}: connection {self.number} {' '.join(words)}")
        self.send(REPLY, b"OK")

    def _on_rdy(self, words: list[str], body: bytes) -> None:
        count = int(words[1])
        if self.channel is None:
            self.books.breaks("RDY before SUB")
        elif count > self.nsqd.max_rdy:
            self.books.breaks(f"RDY {count} is above max_rdy_count")
        elif not self.is_closing:
            self.rdy = count
            self.books.note(f"{self.nsqd}: connection {self.number} RDY {count}")
            self.channel.push()

    def deliver(self, message: Message) -> None:
        assert self.channel is not None
        if message.id in self.channel.flights:
            self.books.breaks(f"the model delivers {message} twice")
        message.attempts += 1
        self.in_flight += 1
        timer = self.loop.call_later(self.msg_timeout, self._timed_out, message)
        self.channel.flights[message.id] = Flight(message, self, self.loop.time(), timer)
        self.deliveries[message.id] += 1
        self.delivered_at.append(self.loop.time())
        data = struct.pack(">qH", message.timestamp, message.attempts) + message.id
        if message.log.is_ext and self._has_ext:
            data += b"\0" if message.ext is None else b"\4" + struct.pack(">H", len(message.ext)) + message.ext
        if self._has_detail:
            data += struct.pack(">QI", message.offset, message.size)
        self.send(MESSAGE, data + message.body)

    def _timed_out(self, message: Message) -> None:
        channel = self.channel
        assert channel is not None
        flight = channel.flights.get(message.id)
        if flight is None or flight.conn is not self:
            return
        self.books.note(f"{self.nsqd}: {message} timed out")
        channel.timeouts += 1
        channel.land(flight)
        channel.back(message)
        channel.push()

    def _flight(self, words: list[str], message_id: bytes) -> Flight | None:
        """What is answered; None: it is not in flight here, of which the client is told."""
        name, channel = words[0], self.channel
        if channel is None:
            self.books.breaks(f"{name} before SUB")
            return None
        flight = channel.flights.get(message_id)
        if len(words) != (2 if name == "REQ" else 1):
            self.books.breaks(f"{words} of a message")
        if name != "TOUCH":
            self.answers[message_id] += 1
        if self.answers[message_id] > self.deliveries[message_id]:
            what = "was answered already" if self.deliveries[message_id] else "was never sent here"
            self.books.breaks(f"{name} of a message that {what}")
        if flight is not None and flight.conn is self:
            return flight
        text = f"{name} {list(message_id)}" if self.is_redesigned else f"{name} {message_id.decode()}"
        self.send(ERROR, f"E_{name}_FAILED {text} failed ID not in flight".replace(",", "").encode())
        return None

    def _on_fin(self, words: list[str], body: bytes) -> None:
        flight = self._flight(words, body)
        if flight is None or self.channel is None:
            return
        if self.is_redesigned and self.channel.log.leader is not self.nsqd:
            self.fail("E_FAILED_ON_NOT_LEADER")
            return
        self.channel.land(flight)
        self.books.finished[flight.message.body] += 1
        self.channel.push()

    def _on_req(self, words: list[str], body: bytes) -> None:
        flight = self._flight(words, body)
        channel = self.channel
        if flight is None or channel is None:
            return
        delay = int(words[1]) / 1000
        if delay and channel.is_ordered:
            return  # ignored: it stays in flight until its time is over
        channel.land(flight)
        if delay:
            message = flight.message
            channel.deferred[body] = self.loop.call_later(delay, self._due, channel, message)
        else:
            channel.back(flight.message)
        channel.push()

    @staticmethod
    def _due(channel: Channel, message: Message) -> None:
        if channel.deferred.pop(message.id, None) is not None:
            channel.back(message)
            channel.push()

    def _on_touch(self, words: list[str], body: bytes) -> None:
        flight = self._flight(words, body)
        if flight is not None:
            flight.timer.cancel()
            end = min(self.loop.time() + self.msg_timeout, flight.at + 900)
            flight.timer = self.loop.call_at(end, self._timed_out, flight.message)

    def _on_cls(self, words: list[str], body: bytes) -> None:
        if self.channel is None:
            self.books.breaks("CLS before SUB")
            return
        self.is_closing = True
        self.rdy = 0
        self.send(REPLY, b"CLOSE_WAIT")


def _parts(data: bytes) -> Iterator[bytes]:
    count = int.from_bytes(data[:4], "big")
    at = 4
    for _ in range(count):
        size = int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 4 + size]
        at += 4 + size
    assert at == len(data), "the lengths of an MPUB do not add up"


def _plain(data: bytes) -> Record:
    return data, 0, None


def _traced(data: bytes) -> Record:
    return data[8:], int.from_bytes(data[:8], "big"), None


def _extended(data: bytes) -> Record:
    size = int.from_bytes(data[:2], "big")
    header = data[2 : 2 + size]
    trace_id = int(json.loads(header).get("##trace_id", 0)) if header else 0
    return data[2 + size :], trace_id, header or None


SUBSCRIBES = ("SUB", "SUB_ADVANCED", "SUB_ORDERED")
RECORDS = {
    "PUB": _plain, "DPUB": _plain, "MPUB": _plain, "PUB_TRACE": _traced, "MPUB_TRACE": _traced, "PUB_EXT": _extended,
    "MPUB_EXT": _extended,
}  # fmt: skip
"""How each publish says a message."""

WITH_BODY = ("IDENTIFY", *RECORDS)


class ModelNsqd:
    """One nsqd.

    Attributes:
        cluster: all partitions there are, of the redesigned NSQ; shared by its nsqds.
        moods: how it misbehaves.
        mute_clients: how many connections it closed because nothing came from them.
    """

    msg_timeout = 60.0
    max_rdy = 2500
    max_msg_size = 1024 * 1024

    def __init__(self, network: Network, books: Books, ip: str, dialect: str, cluster: list[Log] | None = None) -> None:
        self.network, self.books = network, books
        self.address = (ip, 4150)
        self.is_redesigned = dialect == "redesigned"
        self.cluster = [] if cluster is None else cluster
        self.moods = Moods()
        self.is_frozen = False
        self.is_running = False
        self.conns: list[Conn] = []
        self.logs: dict[str, Log] = {}
        self.mute_clients = 0
        self.start()

    def __repr__(self) -> str:
        return self.address[0]

    @property
    def host(self) -> Host:
        return self.network.host(self.address[0])

    def log(self, topic: str, partition: int = 0) -> Log:
        """A topic of an original nsqd, made when it is first named; or a partition, led by this one."""
        if not self.is_redesigned:
            if topic not in self.logs:
                self.logs[topic] = Log(self.books, topic, 0, False)
                self.logs[topic].leader = self
                self.books.on_change()
            return self.logs[topic]
        for log in self.cluster:
            if (log.topic, log.partition) == (topic, partition):
                return log
        log = Log(self.books, topic, partition, True)
        log.leader = self
        self.cluster.append(log)
        self.books.on_change()
        return log

    def start(self) -> None:
        self.is_running = True
        self.books.on_change()
        self.network.listen(self.address, self._accept)

    def _accept(self, end: End) -> None:
        self.conns.append(Conn(self, end))

    def kill(self) -> None:
        """The process ends: its streams end, and what an original nsqd had in memory is lost."""
        self.books.note(f"{self}: killed")
        self.is_running = False
        self.books.on_change()
        self.network.deafen(self.address)
        for conn in tuple(self.conns):
            conn.drop("killed", is_abrupt=self.books.loop.chance.happens(0.5))
        for log in self.logs.values():
            for message in log.messages:
                self.books.lost.add(message.body)
            for channel in log.channels.values():
                for flight in tuple(channel.flights.values()):
                    channel.land(flight)
                for timer in channel.deferred.values():
                    timer.cancel()
        self.logs.clear()

    def vanish(self) -> None:
        """The machine is gone, without a word; when it is back, it does not know its streams."""
        self.books.note(f"{self}: vanishes")
        self.host.is_down = True
        for conn in tuple(self.conns):
            conn.end.vanish()
        self.kill()

    def come_back(self) -> None:
        """After ``kill`` or ``vanish``."""
        self.books.note(f"{self}: is back")
        self.host.is_down = False
        self.start()
        self.host.mend()

    def freeze(self) -> None:
        """The process stands still: its system takes connections and bytes, and nobody answers."""
        self.books.note(f"{self}: frozen")
        self.is_frozen = True

    def thaw(self) -> None:
        self.books.note(f"{self}: thawed")
        self.is_frozen = False
        for conn in tuple(self.conns):
            conn._came()
            if not conn.is_gone:
                conn._flush()
                if conn.channel is not None:
                    conn.channel.push()


def move_leader(log: Log, to: ModelNsqd | None) -> None:
    """Another nsqd leads a partition from now on; consumers of the old leader are cut off without a word."""
    old, log.leader = log.leader, to
    log.books.on_change()
    log.books.note(f"{log.topic}.{log.partition} moves from {old} to {to}")
    for channel in log.channels.values():
        for conn in tuple(channel.clients):
            conn.drop("no longer the leader")
        for flight in sorted(channel.flights.values(), key=lambda each: each.message.offset, reverse=True):
            channel.land(flight)
            channel.back(flight.message)
