"""One client of an nsqd over TCP: a greenlet that reads commands, and one that delivers.

nsqio/nsq: nsqd/protocol_v2.go, IOLoop and messagePump.

The reader parses all that a read has brought in one go, and sends the replies
together. The pump waits until the client may have messages and there are some
(or a heartbeat is due), and takes as many as it can at once. They wait in the
output buffer until it is full, the client may have no more, or the time for it
has passed. Whoever finds the connection not being written to writes; what is
added meanwhile goes out with the next write, so frames never mix.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from gevent import get_hub, sleep, socket, spawn
from gevent.event import Event
from gevent.ssl import SSLContext

from nsq_fast.broker.net.faults import Faults, reset_on_close
from nsq_fast.broker.nsqd.channel import Subscribable
from nsq_fast.broker.nsqd.host import Host
from nsq_fast.broker.nsqd.in_flight import InFlight
from nsq_fast.log_events import BROKER_CLIENT_DISCONNECTED, BROKER_CLIENT_REFUSED
from nsq_fast.printable import printable

from .client_stats import client_stats
from .flush_ticker import FlushTicker
from .frames import ERROR, HEARTBEAT, OK, Dropped, FatalError, Upgraded, frame
from .identify import Negotiation, Profile, Upgrades
from .output import Output
from .upgrade import CompressedStream, DeflateCodec, SnappyCodec, upgrade_tls

logger = logging.getLogger("nsq_fast.broker.tcp.connection")

STATE_INIT = 0
STATE_SUBSCRIBED = 3
STATE_CLOSING = 4

READ_SIZE = 128 * 1024
WRITE_SIZE = 64 * 1024
_YIELD_AFTER = 64 * 1024
_FIRST_BATCH = 16
_MAX_BATCH = 512
_GRACE = 0.01
"""Lets the second heartbeat out before the client that answered none is dropped."""


class CommandsOf(Protocol):
    """The commands of a dialect."""

    def execute(self, conn: Any, data: bytes) -> int:
        """Execute the whole commands ``data`` begins with; returns the bytes they took. Raises FatalError, Dropped."""
        ...


class DialectOf(Protocol):
    """What a connection needs of its dialect."""

    @property
    def commands(self) -> CommandsOf:
        """What clients may send."""
        ...

    @property
    def negotiation(self) -> Negotiation:
        """What IDENTIFY settles."""
        ...


class ServerOf(Protocol):
    """What a connection needs of the server that has accepted it."""

    @property
    def nsqd(self) -> Host:
        """The state behind it."""
        ...

    @property
    def dialect(self) -> DialectOf:
        """How it speaks."""
        ...

    @property
    def context(self) -> SSLContext | None:
        """TLS; None where there is no certificate."""
        ...

    @property
    def faults(self) -> Faults:
        """The fault switches of its streams."""
        ...


class Connection:
    """One client.

    Attributes:
        id: unique in the process.
        profile: what IDENTIFY has settled.
        state: STATE_INIT, STATE_SUBSCRIBED or STATE_CLOSING.
        channel: what it has subscribed to.
        rdy: how many messages it said it would have in flight.
        max_in_flight: how many it may have.
        in_flight: those it has.
        pub_counts: published so far, by topic.
        needed: bytes that the command which is being read needs in all; 0: not known.
        silent_intervals: so many heartbeat intervals without a command end the connection.
        delays_messages: whether messages wait in the output buffer, as the client asked for.
        auth: what it may do, with ``auth_secret`` and ``auth_expires_at`` (monotonic); None before AUTH.
        tls_socket: the socket inside TLS; None without.
        output: what goes out.
    """

    silent_intervals = 2
    delays_messages = True

    def __init__(self, server: ServerOf, id: int, stream: Any, address: Any) -> None:
        self.server = server
        self.nsqd = server.nsqd
        self.id = id
        self.host = str(address[0])
        self.remote_address = f"[{address[0]}]:{address[1]}" if ":" in self.host else f"{address[0]}:{address[1]}"
        self.profile: Profile = server.dialect.negotiation.default_profile(self.host, self.nsqd.options)
        self.state = STATE_INIT
        self.channel: Subscribable | None = None
        self.rdy = self.max_in_flight = 0
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
        self.tls_socket: Any = None
        self._wake = Event()
        self._stream = stream
        self.output = Output(stream, self._wake.set)
        self._batch = _FIRST_BATCH
        self._is_closed = False
        self._heartbeat_is_due = False
        self._timer: Any = None

    # --- reading -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Read and execute commands until the connection ends."""
        self.apply_profile()
        pump = spawn(self._pump)
        pump.name = f"nsqd-pump-{self.remote_address}"
        try:
            self._read_loop()
        except FatalError as error:
            logger.debug(
                "%s: %s %s", self.remote_address, error.code, printable(error.text), extra=BROKER_CLIENT_REFUSED
            )
            sleep(0)  # the pump first: what the commands before it have made ready arrives, as from nsqd
            _leave_channel(self)
            self.output.send_last(error.frame())
        except (Dropped, OSError) as error:
            logger.debug("%s: connection ended: %s", self.remote_address, error, extra=BROKER_CLIENT_DISCONNECTED)
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
            if self.output.is_urgent:
                self.output.flush()
                self.output.wait_for_room()
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

    # --- writing -----------------------------------------------------------------------------------------------------

    def send(self, frames: bytes) -> None:
        """Add to what goes out with the next write."""
        self.output.add(frames)

    def send_error(self, code: str, text: bytes) -> None:
        """Tell the client of an error that is not fatal."""
        self.output.add(frame(ERROR, b"%b %b" % (code.encode(), text)))

    # --- delivery ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do for the pump."""
        self._wake.set()

    def _pump(self) -> None:
        output = self.output
        try:
            while not self._is_closed:
                output.is_awaited = output.is_writing
                if output.is_awaited:
                    _wait(self._wake)
                    continue
                delivered = self._deliver()
                if output.frames and (output.is_urgent or output.is_due()):
                    output.flush()
                    sleep(0)
                elif delivered:
                    sleep(0)
                else:
                    _wait(self._wake, output.patience() if output.frames else None)
        except OSError as error:
            logger.debug("%s: write failed: %s", self.remote_address, error, extra=BROKER_CLIENT_DISCONNECTED)
            self.close()

    def _deliver(self) -> bool:
        """Take what the client may have and there is; whether there was anything.

        No message waits in the output buffer when the client may have no more (nsqio/nsq: nsqd/protocol_v2.go,
        messagePump; nsqd/client_v2.go, IsReadyForMessages).
        """
        if self._heartbeat_is_due:
            self._heartbeat_is_due = False
            self.output.add(HEARTBEAT)
        channel = self.channel
        if channel is None:
            return False
        count = self.max_in_flight - len(self.in_flight)
        if channel.is_paused or count <= 0:
            if self.output.buffered:
                self.output.is_urgent = True
            channel.notify()
            return False
        frames = channel.deliver(self, min(count, self._batch), self.profile.sample_rate)
        if frames:
            output, taken, size = self.output, len(frames), sum(map(len, frames))
            output.frames += frames
            output.buffered += size
            if taken >= count:
                output.is_urgent = True
            self.message_count += taken
            self._batch = max(1, min(_MAX_BATCH, WRITE_SIZE * taken // size))
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
        self.rdy = self.max_in_flight = count
        self._wake.set()

    # --- heartbeat, upgrade ------------------------------------------------------------------------------------------

    def apply_profile(self) -> None:
        """Start the timers again, with the intervals of the profile, and take its output buffer."""
        if self.delays_messages:
            self.output.size = self.profile.output_buffer_size
            self.output.ticker = FlushTicker(self.profile.output_buffer_timeout, time.monotonic())
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        interval = self.profile.heartbeat_interval
        self.output.timeout = interval or None
        if interval:
            # One timer of the loop per connection: a wait with a timeout would make one per batch.
            self._timer = get_hub().loop.timer(interval, interval)
            self._timer.start(self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        self._heartbeat_is_due = True
        self._wake.set()

    def upgrade(self, upgrades: Upgrades, leftover: bytes) -> None:
        """Put the layers on, each confirmed with an OK inside it. Raises FatalError; Upgraded when it is done."""
        output = self.output
        output.flush()
        self.upgrades = upgrades
        try:
            if upgrades.tls:
                output.is_writing = True  # no heartbeat may come between
                try:
                    self._stream = upgrade_tls(self._stream, self.server.context, self.server.faults)
                finally:
                    output.is_writing = False
                self.tls_socket = self._stream.sock
                self.common_name = _common_name(self.tls_socket.getpeercert())
                leftover = b""
                self._confirm_layer()
            if upgrades.snappy or upgrades.deflate:
                codec = SnappyCodec() if upgrades.snappy else DeflateCodec(upgrades.deflate_level)
                self._stream = CompressedStream(self._stream, codec, leftover)
                self._confirm_layer()
        except OSError as error:
            raise FatalError("E_IDENTIFY_FAILED", f"IDENTIFY failed {error}") from error
        raise Upgraded

    def _confirm_layer(self) -> None:
        self.output.stream = self._stream
        self.send(OK)
        self.output.flush()

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
        _leave_channel(self)
        self._wake.set()
        self._stream.close()

    def stats(self) -> dict[str, Any]:
        """Figures under the original's JSON names."""
        return client_stats(self)


def _leave_channel(conn: Connection) -> None:
    """It gets no more messages, and gives those back that it has."""
    channel, conn.channel = conn.channel, None
    if channel is not None:
        channel.remove_client(conn)


def _wait(event: Event, timeout: float | None = None) -> None:
    event.wait(timeout)
    event.clear()


def _common_name(certificate: Any) -> str:
    for names in (certificate or {}).get("subject", ()):
        for name, value in names:
            if name == "commonName":
                return str(value)
    return ""
