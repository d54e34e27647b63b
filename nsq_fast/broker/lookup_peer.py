"""nsqd's side of nsqlookupd's TCP protocol: registers the topics and channels of this nsqd.

nsqio/nsq: nsqd/lookup.go, lookupLoop; nsqd/lookup_peer.go.

Every nsqlookupd has a ``_Peer`` with two greenlets. One connects, says who we
are and what we have, and reads the replies until the connection ends; then it
tries again, for as long as it takes. The other sends changes as they come, and
PING when there are none. A change while there is no connection is not queued:
the next connection registers everything again.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from gevent import Greenlet, sleep, socket, spawn
from gevent.event import Event
from gevent.queue import Empty, Queue

from nsq_fast.broker.client import Endpoint, HttpClient
from nsq_fast.broker.lookupd import MAGIC_V1, MAX_BODY
from nsq_fast.errors import HttpError, RemoteProtocolError
from nsq_fast.log_events import BROKER_LOOKUPD_FAILED, BROKER_LOOKUPD_REGISTERED
from nsq_fast.names import Address, is_ephemeral, parse_address
from nsq_fast.printable import printable

logger = logging.getLogger("nsq_fast.broker.lookup_peer")

DEFAULT_LOOKUPD_TCP_PORT = 4160
CONNECT_TIMEOUT = 1.0
HTTP_TIMEOUT = 2.0
FIRST_RETRY_DELAY = 0.05
MAX_RETRY_DELAY = 5.0

_SIZE = struct.Struct(">i")

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
        self._peers: dict[str, _Peer] = {}
        self._addresses = list(addresses)

    def start(self) -> None:
        """Begin to connect and register, in the background."""
        for address in self._addresses:
            if address not in self._peers:
                self._peers[address] = _Peer(address, self)

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


class _Peer:
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
    (size,) = _SIZE.unpack(_read_exactly(sock, _SIZE.size))
    if not 0 <= size <= MAX_BODY:
        raise RemoteProtocolError(f"a reply of {size} bytes")
    return _read_exactly(sock, size)


def _read_exactly(sock: Any, size: int) -> bytes:
    chunks = []
    while size:
        chunk = sock.recv(size)
        if not chunk:
            raise ConnectionResetError("nsqlookupd closed the connection")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


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
