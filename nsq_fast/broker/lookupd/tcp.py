"""nsqlookupd's TCP protocol: how nsqds register topics and channels.

nsqio/nsq: nsqlookupd/lookup_protocol_v1.go.

After the magic ``  V1`` come text lines, IDENTIFY followed by a length and a
JSON body. Replies have a length but no frame type. Every error ends the
connection, and a connection that ends takes its nsqd's registrations along.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from nsq_fast.broker import go_json
from nsq_fast.broker.go_json import Int64
from nsq_fast.broker.net.faults import Faults
from nsq_fast.errors import BadBody, BadChannel, BadTopic, Invalid, ServerError
from nsq_fast.log_events import BROKER_NSQD_JOINED, BROKER_NSQD_LEFT
from nsq_fast.names import Address, is_valid_name
from nsq_fast.printable import printable

from .registration_db import LookupDB, Peer

logger = logging.getLogger("nsq_fast.broker.lookupd.tcp")

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
            info = go_json.decode_lenient(self._read_body(), _Identify)
        except msgspec.MsgspecError:
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
