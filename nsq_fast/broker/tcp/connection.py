"""One client of an nsqd over TCP: a greenlet that reads commands, and one that delivers.

The reader parses all that a read has brought in one go, and sends the replies
together. The pump waits until the client may have messages and there are some
(or a heartbeat is due), and sends as many as it can with one write. Whoever
finds the connection not being written to writes; what is added meanwhile goes
out with the next write, so frames never mix.

Messages are not held back for ``output_buffer_timeout``: a write takes what there is.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from gevent import get_hub, sleep, socket, spawn
from gevent.event import Event

from nsq_fast.broker.net.faults import reset_on_close
from nsq_fast.broker.nsqd.in_flight import InFlight

from .identify import Profile, Upgrades
from .upgrade import CompressedStream, DeflateCodec, SnappyCodec, upgrade_tls

if TYPE_CHECKING:
    from nsq_fast.broker.nsqd.channel import Subscribable

    from .server import NsqdTcp

logger = logging.getLogger("nsq_fast.broker.tcp.connection")

STATE_INIT = 0
STATE_SUBSCRIBED = 3
STATE_CLOSING = 4

READ_SIZE = 128 * 1024
WRITE_SIZE = 64 * 1024
_YIELD_AFTER = 64 * 1024
_FIRST_BATCH = 16
_MAX_BATCH = 512
_MAX_PENDING = 4096
_LINGER = 0.25
_GRACE = 0.01
"""Lets the second heartbeat out before the client that answered none is dropped."""

RESPONSE = b"\x00\x00\x00\x00"
ERROR = b"\x00\x00\x00\x01"
OK = b"\x00\x00\x00\x06\x00\x00\x00\x00OK"
HEARTBEAT = b"\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_"
CLOSE_WAIT = b"\x00\x00\x00\x0e\x00\x00\x00\x00CLOSE_WAIT"


class FatalError(Exception):
    """The client is told, and its connection is closed."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Dropped(Exception):
    """The connection is closed without a word."""


class Upgraded(Exception):
    """The stream was changed; what was read before belongs to the old one."""


def frame(kind: bytes, data: bytes) -> bytes:
    """One frame."""
    return b"%b%b%b" % ((len(data) + 4).to_bytes(4, "big"), kind, data)


class Connection:
    """One client.

    Attributes:
        id: unique in the process.
        profile: what IDENTIFY has settled.
        state: STATE_INIT, STATE_SUBSCRIBED or STATE_CLOSING.
        channel: what it has subscribed to.
        rdy: how many messages it may have in flight.
        in_flight: those it has.
        pub_counts: published so far, by topic.
        needed: bytes that the command which is being read needs in all; 0: not known.
        silent_intervals: so many heartbeat intervals without a command end the connection.
        auth: what it may do, with ``auth_secret`` and ``auth_expires_at`` (monotonic); None before AUTH.
    """

    silent_intervals = 2

    def __init__(self, server: NsqdTcp, id: int, stream: Any, address: Any) -> None:
        self.server = server
        self.nsqd = server.nsqd
        self.id = id
        self.host = str(address[0])
        self.remote_address = f"[{address[0]}]:{address[1]}" if ":" in self.host else f"{address[0]}:{address[1]}"
        self.profile: Profile = server.dialect.negotiation.default_profile(self.host, self.nsqd.options)
        self.state = STATE_INIT
        self.channel: Subscribable | None = None
        self.rdy = 0
        self.in_flight: InFlight[Any] = InFlight(self, self.profile.msg_timeout)
        self.pub_counts: dict[str, int] = {}
        self.upgrades = Upgrades()
        self.needed = 0
        self.auth: Any = None
        self.auth_secret = ""
        self.auth_expires_at = 0.0
        self.finish_count = 0
        self.requeue_count = 0
        self.message_count = 0
        self.connected_at = time.time()
        self.common_name = ""
        self._tls_socket: Any = None
        self._stream = stream
        self._out: list[bytes] = []
        self._batch = _FIRST_BATCH
        self._is_writing = False
        self._pump_is_held = False
        self._is_closed = False
        self._heartbeat_is_due = False
        self._wake = Event()
        self._timer: Any = None

    @property
    def is_tls_missing(self) -> bool:
        """Whether this client must use TLS, and has not got so far."""
        return self.nsqd.options.tls_required != "false" and not self.upgrades.tls

    # --- reading -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Read and obey commands until the connection ends."""
        self.start_heartbeat()
        pump = spawn(self._pump)
        pump.name = f"nsqd-pump-{self.remote_address}"
        try:
            self._read_loop()
        except FatalError as error:
            self._say_last(error)
        except (Dropped, OSError) as error:
            logger.debug("%s: connection ended: %s", self.remote_address, error)
        finally:
            self._end()
            pump.join()

    def _read_loop(self) -> None:
        buffer = b""
        unyielded = 0
        while True:
            data = self._read(len(buffer))
            if not data:
                return
            buffer = buffer + data if buffer else data
            try:
                used = self.server.dialect.commands.execute(self, buffer)
            except Upgraded:
                used = len(buffer)
            buffer = buffer[used:] if used < len(buffer) else b""
            if self._out:
                self.flush()
                self._wait_for_room()
            unyielded += len(data)
            if unyielded > _YIELD_AFTER:
                # A read that finds bytes does not give way to others by itself.
                sleep(0)
                unyielded = 0

    def _read(self, have: int) -> bytes:
        """The next bytes; when a command waits for its body, all of it."""
        data = self._recv()
        need = self.needed - have - len(data)
        if need <= 0 or not data:
            return data
        chunks = [data]
        while need > 0 and data:
            data = self._recv()
            chunks.append(data)
            need -= len(data)
        return b"".join(chunks)

    def _recv(self) -> bytes:
        interval = self.profile.heartbeat_interval
        self._stream.settimeout(self.silent_intervals * interval + _GRACE if interval else None)
        data: bytes = self._stream.recv(READ_SIZE)
        return data

    def _wait_for_room(self) -> None:
        """A client that sends and does not read is not listened to."""
        while len(self._out) > _MAX_PENDING and self._is_writing:
            sleep(0.01)

    # --- writing -----------------------------------------------------------------------------------------------------

    def send(self, frames: bytes) -> None:
        """Add to what goes out with the next write."""
        self._out.append(frames)

    def send_error(self, code: str, text: bytes) -> None:
        """Tell the client of an error that is not fatal."""
        self._out.append(frame(ERROR, b"%b %b" % (code.encode(), text)))

    def flush(self) -> None:
        """Write what there is to write, unless somebody is writing already: he writes this, too."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while self._out:
                data = b"".join(self._out)
                self._out.clear()
                self._stream.settimeout(self.profile.heartbeat_interval or None)
                self._stream.sendall(data)
        finally:
            self._is_writing = False
            if self._pump_is_held:
                self._wake.set()

    def _say_last(self, error: FatalError) -> None:
        logger.debug("%s: %s %s", self.remote_address, error.code, error.text)
        text = error.text.encode("utf-8", "surrogateescape")
        self.send(frame(ERROR, b"%b %b" % (error.code.encode(), text)))
        try:
            self.flush()
            # Closing with unread input would be a reset, and could cost the client the error frame.
            self._stream.shutdown(socket.SHUT_WR)
            self._stream.settimeout(_LINGER)
            while self._stream.recv(READ_SIZE):
                pass
        except OSError:
            pass

    # --- delivery ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do for the pump."""
        self._wake.set()

    def _pump(self) -> None:
        try:
            while not self._is_closed:
                self._pump_is_held = self._is_writing
                if self._pump_is_held or (not self._deliver() and not self._out):
                    self._wake.wait()
                    self._wake.clear()
                    continue
                self.flush()
                sleep(0)
        except OSError as error:
            logger.debug("%s: write failed: %s", self.remote_address, error)
            self.close()

    def _deliver(self) -> bool:
        """Take what the client may have and there is; whether there was anything."""
        if self._heartbeat_is_due:
            self._heartbeat_is_due = False
            self._out.append(HEARTBEAT)
        channel = self.channel
        if channel is None:
            return False
        count = self.rdy - len(self.in_flight)
        if channel.is_paused or count <= 0:
            channel.notify()
            return False
        frames = channel.deliver(self, min(count, self._batch), self.profile.sample_rate)
        if frames:
            self._out += frames
            self.message_count += len(frames)
            self._batch = max(1, min(_MAX_BATCH, WRITE_SIZE * len(frames) // sum(map(len, frames))))
            return True
        if channel.has_ready(self):
            return True
        channel.wait(self)
        return False

    def subscribe(self, channel: Subscribable) -> None:
        """Begin to get messages of a channel that this client has been added to."""
        self.channel = channel
        self.state = STATE_SUBSCRIBED

    def set_rdy(self, count: int) -> None:
        """How many messages may be in flight from now on."""
        self.rdy = count
        self._wake.set()

    # --- heartbeat, upgrade ------------------------------------------------------------------------------------------

    def start_heartbeat(self) -> None:
        """Begin the interval of the profile anew."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        interval = self.profile.heartbeat_interval
        if interval:
            # One timer of the loop per connection: a wait with a timeout would make one per batch.
            self._timer = get_hub().loop.timer(interval, interval)
            self._timer.start(self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        self._heartbeat_is_due = True
        self._wake.set()

    def upgrade(self, upgrades: Upgrades, leftover: bytes) -> None:
        """Put the layers on, each confirmed with an OK inside it. Raises FatalError."""
        self.flush()
        self.upgrades = upgrades
        try:
            if upgrades.tls:
                self._upgrade_tls()
                self._tls_socket = self._stream.sock
                self.common_name = _common_name(self._tls_socket.getpeercert())
                leftover = b""
                self._confirm()
            if upgrades.snappy or upgrades.deflate:
                codec = SnappyCodec() if upgrades.snappy else DeflateCodec(upgrades.deflate_level)
                self._stream = CompressedStream(self._stream, codec, leftover)
                self._confirm()
        except OSError as error:
            raise FatalError("E_IDENTIFY_FAILED", f"IDENTIFY failed {error}") from error
        raise Upgraded

    def _upgrade_tls(self) -> None:
        self._is_writing = True  # no heartbeat may come between
        try:
            self._stream = upgrade_tls(self._stream, self.server.context, self.server.faults)
        finally:
            self._is_writing = False

    def _confirm(self) -> None:
        self.send(OK)
        self.flush()

    # --- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection; the reader notices and cleans up."""
        self._is_closed = True
        self._wake.set()
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._stream.close()

    def reset_on_close(self) -> None:
        """Let the peer see a reset, not an end of stream, when the connection is closed."""
        reset_on_close(self._stream)

    def _end(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        if self.channel is not None:
            self.channel.remove_client(self)
        self._wake.set()
        self._stream.close()

    def stats(self) -> dict[str, Any]:
        """Figures under the original's JSON names."""
        profile = self.profile
        stats: dict[str, Any] = {
            "client_id": profile.client_id,
            "hostname": profile.hostname,
            "version": "V2",
            "remote_address": self.remote_address,
            "state": self.state,
            "ready_count": self.rdy,
            "in_flight_count": len(self.in_flight),
            "message_count": self.message_count,
            "finish_count": self.finish_count,
            "requeue_count": self.requeue_count,
            "connect_ts": int(self.connected_at),
            "sample_rate": profile.sample_rate,
            "deflate": self.upgrades.deflate,
            "snappy": self.upgrades.snappy,
            "user_agent": profile.user_agent,
            "topology_zone": profile.topology_zone,
            "topology_region": profile.topology_region,
            "tls": self.upgrades.tls,
        }
        if self.auth is not None:
            stats |= {
                "authed": bool(self.auth.authorizations),
                "auth_identity": self.auth.identity,
                "auth_identity_url": self.auth.identity_url,
            }
        if self.pub_counts:
            stats["pub_counts"] = [{"topic": topic, "count": count} for topic, count in self.pub_counts.items()]
        return {**stats, **self._tls_stats()}

    def _tls_stats(self) -> dict[str, Any]:
        cipher = self._tls_socket.cipher() if self._tls_socket is not None else None
        protocol = (self._tls_socket.selected_alpn_protocol() or "") if cipher else ""
        return {
            "tls_cipher_suite": cipher[0] if cipher else "",
            "tls_version": cipher[1].replace("v", "", 1) if cipher else "",
            "tls_negotiated_protocol": protocol,
            "tls_negotiated_protocol_is_mutual": bool(protocol),
        }


def _common_name(certificate: Any) -> str:
    for names in (certificate or {}).get("subject", ()):
        for name, value in names:
            if name == "commonName":
                return str(value)
    return ""
