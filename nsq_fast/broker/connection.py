"""One client of an nsqd over TCP: its frames, its output buffer, its figures, and the greenlets that serve it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gevent import get_hub, sleep, socket, spawn
from gevent.event import Event

from nsq_fast._lazy import get_logger
from nsq_fast.broker.identify import (
    CompressedStream,
    DeflateCodec,
    Profile,
    SnappyCodec,
    Upgrades,
    upgrade_tls,
)
from nsq_fast.broker.message import FatalError
from nsq_fast.broker.net import linger, reset_on_close, shown_peer
from nsq_fast.broker.queue import BaseChannel, InFlight
from nsq_fast.errors import ServerError, printable
from nsq_fast.log_events import BROKER_CLIENT_DISCONNECTED, BROKER_CLIENT_REFUSED

if TYPE_CHECKING:
    from nsq_fast.broker.nsqd import Nsqd
    from nsq_fast.broker.options import NsqdOptions
    from nsq_fast.broker.servers import NsqdServer
    from nsq_fast.broker.topic import Topic

logger: logging.Logger = get_logger("nsq_fast.broker.connection")


# --- the frames that an nsqd sends -----------------------------------------------------------------------------------
# nsqio/nsq: internal/protocol/protocol.go, SendFramedResponse.
# A frame is ``int32 size | int32 type | data``; the size counts the type and the data.


RESPONSE = b"\x00\x00\x00\x00"
ERROR = b"\x00\x00\x00\x01"


def frame(kind: bytes, data: bytes) -> bytes:
    return b"%b%b%b" % ((len(data) + 4).to_bytes(4, "big"), kind, data)


def error_frame(code: str, detail: str) -> bytes:
    return frame(ERROR, f"{code} {detail}".encode("utf-8", "surrogateescape"))


OK = frame(RESPONSE, b"OK")
HEARTBEAT = frame(RESPONSE, b"_heartbeat_")
CLOSE_WAIT = frame(RESPONSE, b"CLOSE_WAIT")


class Dropped(Exception):
    """The connection is closed without a reply."""


class Upgraded(Exception):
    """The stream was changed; what was read before belongs to the old one."""


class FlushTicker:
    """Says when messages that a client's output buffer holds go out, although it is not full.

    A ticker as Go's ``time.Ticker`` is one: a tick that nobody takes waits, and those after it are dropped (nsqio/nsq:
    nsqd/protocol_v2.go, messagePump, outputBufferTicker). So the first message after a pause goes out at once, and
    those that follow it go out together with the next tick.

    Args:
        period: seconds from tick to tick; 0: there are none.
        now: when it begins.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._next = now + period

    def take(self, now: float) -> bool:
        """Take the tick that waits; False if there is none."""
        if not self._period or now < self._next:
            return False
        self._next += self._period * (1 + (now - self._next) // self._period)
        return True

    def wait(self, now: float) -> float | None:
        """Seconds to the next tick; None if there is none."""
        return max(0.0, self._next - now) if self._period else None


_MOST_REPLIES = 1024 * 1024
"""Bytes of replies that a client has not read, from which on it is not listened to."""


class Output:
    """The output of one connection: frames are gathered and written together.

    Two greenlets send: the reader of commands and the pump. One of them writes at a time; frames that the other adds
    during a write go out with the next write, so frames never mix. Messages may wait in the buffer; a reply takes them
    along.

    Args:
        on_idle: called after a write if ``is_awaited`` is set.

    Attributes:
        buffered: bytes of the messages among them.
        replies: bytes of the rest.
        is_urgent: whether they are not to wait for more.
        size: bytes of messages that may wait for more; 1: none waits.
        ticker: when messages are written although there are fewer.
        timeout: seconds that a write may take; None: any time.
        is_awaited: whether a greenlet waits for the end of the write.
    """

    def __init__(self, stream: Any, on_idle: Callable[[], None]) -> None:
        self.stream = stream
        self.frames: list[bytes] = []
        self.buffered: int = 0
        self.replies: int = 0
        self.is_urgent: bool = False
        self.size = 1
        self.ticker: FlushTicker = FlushTicker(0.0, 0.0)
        self.timeout: float | None = None
        self.is_writing: bool = False
        self.is_awaited = False
        self._on_idle = on_idle

    def add(self, frame: bytes) -> None:
        """Have a frame go out that does not wait: a reply, or a heartbeat."""
        self.frames.append(frame)
        self.replies += len(frame)
        self.is_urgent = True

    def is_due(self) -> bool:
        """Whether messages that could wait are to be written: there are enough, or it is time. A tick is taken."""
        return self.buffered >= self.size or self.ticker.take(time.monotonic())

    def patience(self) -> float | None:
        """Seconds that messages may wait for more; None: for ever."""
        return self.ticker.wait(time.monotonic())

    def flush(self) -> None:
        """Write the frames; without effect during a write, which takes them too. Raises OSError."""
        if self.is_writing:
            return
        self.is_writing = True
        frames = self.frames
        try:
            while frames:
                data = b"".join(frames)
                frames.clear()
                self.buffered = self.replies = 0
                self.is_urgent = False
                self.stream.sendall(data, self.timeout)
        finally:
            self.is_writing = False
            if self.is_awaited:
                self._on_idle()

    def flush_in_hub(self) -> bool:
        """As ``flush``, without waiting; whether all was written. Raises OSError."""
        frames = self.frames
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        frames.clear()
        self.buffered = self.replies = 0
        sent = self.stream.send_some(data)
        self.is_urgent = sent < len(data)
        if self.is_urgent:
            frames.append(data[sent:])
        return not self.is_urgent

    def wait_for_room(self) -> None:
        """Block while a client that sends commands does not read the replies."""
        while self.replies > _MOST_REPLIES and self.is_writing:
            sleep(0.01)

    def send_last(self, frame: bytes) -> None:
        """Send a frame that the client is to read before it sees the connection end. Never raises OSError."""
        self.add(frame)
        try:
            self.flush()
        except OSError:
            return
        linger(self.stream)


STATE_INIT = 0
STATE_SUBSCRIBED = 3
STATE_CLOSING = 4

READ_SIZE = 128 * 1024
WRITE_SIZE = 64 * 1024
_FIRST_BATCH = 16
_MAX_BATCH = 512
_GRACE = 0.01
"""Lets the second heartbeat out before the client that answered none is dropped."""


class Connection:
    """One client of an nsqd over TCP: a greenlet that reads commands, and one that delivers, the pump.

    nsqio/nsq: nsqd/protocol_v2.go, IOLoop and messagePump. What needs no waiting is done in the hub (``_take``,
    ``_turn``): to switch to a greenlet and back takes half of the CPU of a PUB. The greenlets do the rest.

    The reader parses all that a read has brought in one go, and sends the replies together. The pump waits until the
    client may have messages and there are some (or a heartbeat is due), and takes as many as it can at once. They wait
    in the output buffer until it is full, the client may have no more, or the time for it has passed. Whoever finds the
    connection not being written to writes.

    Attributes:
        rdy: how many messages it said it would have in flight.
        max_in_flight: how many it may have.
        known: the line of the last PUB, its topic, and the options at that time: under them this line needs no look.
        needed: bytes that the command which is being read needs in all; 0: not known.
        silent_intervals: so many heartbeat intervals without a command end the connection.
        delays_messages: whether messages wait in the output buffer, as the client asked for.
        is_full: whether it had as many messages in flight as it may have, when it was last looked.
        capitalizes: whether what AUTH is refused with begins with a capital.
        auth: what it may do, with ``auth_secret`` and ``auth_expires_at`` (monotonic); None before AUTH.
    """

    silent_intervals = 2
    delays_messages = True
    capitalizes = False

    def __init__(self, server: NsqdServer, id: int, stream: Any, address: Any) -> None:
        self.server = server
        self.nsqd: Nsqd = server.nsqd
        self.id = id
        self.host: str = str(address[0]) if address else ""
        self.remote_address: str = shown_peer(address)
        self.profile: Profile = server.dialect.negotiation.default_profile(self.host, self.nsqd.options)
        self.state: int = STATE_INIT
        self.channel: BaseChannel[Any] | None = None
        self.rdy: int = 0
        self.max_in_flight: int = 0
        self.is_full: bool = True
        self.in_flight: InFlight[Any] = InFlight(self, self.profile.msg_timeout)
        self.pub_counts: dict[str, int] = {}
        self.upgrades: Upgrades = Upgrades()
        self.needed = 0
        self.known: tuple[bytes, Topic, NsqdOptions] | None = None
        self.auth: Any = None
        self.auth_secret = ""
        self.auth_expires_at: float = 0.0
        self.finish_count = 0
        self.requeue_count = 0
        self.message_count: int = 0
        self.connected_at: float = time.time()
        self.common_name: str = ""
        self.tls_socket: Any = None
        self._pump_is_due = Event()
        self._is_woken = False
        self._is_patient = False
        self._run_callback = get_hub().loop.run_callback
        self._faults = server.faults.tcp
        self._stream = stream
        self.output: Output = Output(stream, self._pump_is_due.set)
        self._batch = _FIRST_BATCH
        self._is_plain = True
        self._is_closed = False
        self._heartbeat_is_due = False
        self._timer: Any = None
        self._silence: Any = None
        self._heard_at = time.monotonic()

    # --- reading -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Read and execute commands until the connection ends."""
        self.apply_profile()
        pump = spawn(self._pump)
        pump.name = f"nsqd-pump-{self.remote_address}"
        try:
            self._read_loop()
        except (FatalError, ServerError) as error:
            logger.debug("%s: %s", self.remote_address, printable(str(error)), extra=BROKER_CLIENT_REFUSED)
            sleep(0)  # the pump first: what the commands before it have made ready arrives, as from nsqd
            _leave_channel(self)
            self.output.send_last(error_frame(error.code, error.detail))
        except (Dropped, OSError) as error:
            logger.debug("%s: connection ended: %s", self.remote_address, error, extra=BROKER_CLIENT_DISCONNECTED)
        finally:
            self._end()
            pump.kill()  # a write that a fault delays would hold the end of the server

    def _read_loop(self) -> None:
        buffer = b""
        while True:
            if buffer or not self._is_plain:
                sleep(0)  # a read that finds bytes does not give way to others by itself
                data = self._read(len(buffer))
            else:
                data = self._stream.recv_untaken(READ_SIZE, self._take)
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

    def _take(self, data: bytes) -> bytes | None:
        """Execute, in the hub, the commands that need no waiting; the bytes that are left, None if there are none."""
        self._heard_at = time.monotonic()
        if self._faults.active or self.output.is_writing:
            return data
        used = self.server.dialect.commands.execute_known(self, data, may_wait=False)
        if self.output.is_urgent:
            self._flush_in_hub()
        return data[used:] if used < len(data) else None

    def published(self, topic: str, count: int, refused: FatalError | None) -> None:
        """So many PUBs that it has brought in the hub are stored, or refused."""
        if refused is not None:
            self._stream.interrupt(refused)
            return
        self.count_published(topic, count)
        self.send(OK * count)
        self._turn()

    def count_published(self, topic: str, count: int) -> None:
        """So many messages that it has brought are stored."""
        self.pub_counts[topic] = self.pub_counts.get(topic, 0) + count

    def _recv(self) -> bytes:
        if self.tls_socket is not None:
            # A write inside TLS goes by this timeout, too, and has to end some time.
            self._stream.settimeout(self.silence_limit if self.profile.heartbeat_interval else None)
        data: bytes = self._stream.recv(READ_SIZE)
        self._heard_at = time.monotonic()
        return data

    # --- writing -----------------------------------------------------------------------------------------------------

    def send(self, frames: bytes) -> None:
        self.output.add(frames)

    def send_error(self, code: str, text: bytes) -> None:
        self.output.add(frame(ERROR, b"%b %b" % (code.encode(), text)))

    def refuse(self, command: str, id: bytes, reason: object) -> None:
        """Tell the client that a command about a message has failed."""
        self.send_error(f"E_{command}_FAILED", b"%b %b failed %b" % (command.encode(), id, str(reason).encode()))

    def require_leader(self) -> None:
        """Raise ServerError where another server has what the client has subscribed to."""

    # --- delivery ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do for the pump."""
        if not self._is_woken:
            self._is_woken = True
            self._run_callback(self._turn)

    def _turn(self) -> None:
        """Do in the hub what the pump has to do, as far as that needs no waiting."""
        self._is_woken = False
        output = self.output
        if self._is_closed or not self._is_plain or self._faults.active or output.is_writing:
            self._pump_is_due.set()
            return
        delivered = self._deliver()
        if not output.frames or not (output.is_urgent or output.is_due()):
            if delivered:
                self.wake()
            elif output.frames and not self._is_patient:
                self._pump_is_due.set()
        elif self._flush_in_hub() and delivered:
            self.wake()

    def _flush_in_hub(self) -> bool:
        """Write without waiting; the pump goes on where that is not all."""
        try:
            is_all = self.output.flush_in_hub()
        except OSError as error:
            self._write_failed(error)
            return False
        if not is_all:
            self._pump_is_due.set()
        return is_all

    def _write_failed(self, error: OSError) -> None:
        logger.debug("%s: write failed: %s", self.remote_address, error, extra=BROKER_CLIENT_DISCONNECTED)
        self.close()

    def _pump(self) -> None:
        """Do what needs waiting: for a write, for more messages that may go out with those in the buffer."""
        output, is_due = self.output, self._pump_is_due
        try:
            while not self._is_closed:
                output.is_awaited = output.is_writing
                if output.is_awaited:
                    _wait(is_due)
                    continue
                delivered = self._deliver()
                if output.frames and (output.is_urgent or output.is_due()):
                    output.flush()
                    sleep(0)
                elif delivered:
                    sleep(0)
                else:
                    self._is_patient = bool(output.frames)
                    _wait(is_due, output.patience() if output.frames else None)
                    self._is_patient = False
        except OSError as error:
            self._write_failed(error)

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
        self.is_full = count <= 0
        if channel.is_paused or count <= 0 or self._faults.hold_messages:
            if self.output.buffered:
                self.output.is_urgent = True
            if self._faults.hold_messages:
                self._faults.on_release(self.wake)
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

    def subscribe(self, channel: BaseChannel[Any]) -> None:
        self.channel = channel
        self.state = STATE_SUBSCRIBED

    def set_rdy(self, count: int) -> None:
        self.rdy = self.max_in_flight = count
        self.wake()

    # --- heartbeat, upgrade ------------------------------------------------------------------------------------------

    def apply_profile(self) -> None:
        """Start the timers again, with the intervals of the profile, and take its output buffer."""
        if self.delays_messages:
            self.output.size = self.profile.output_buffer_size
            self.output.ticker = FlushTicker(self.profile.output_buffer_timeout, time.monotonic())
        self._stop_timers()
        interval = self.profile.heartbeat_interval
        self.output.timeout = interval or None
        if interval:
            # Timers of the loop, for as long as the connection lasts: a wait with a timeout would make one per batch.
            self._timer = get_hub().loop.timer(interval, interval)
            self._timer.start(self._on_heartbeat)
            self._await_word()

    @property
    def silence_limit(self) -> float:
        """Seconds of silence that end the connection, where there are heartbeats."""
        return self.silent_intervals * self.profile.heartbeat_interval + _GRACE

    def _await_word(self) -> None:
        """End the connection when nothing has come for too long."""
        left = self._heard_at + self.silence_limit - time.monotonic()
        if left <= 0:
            logger.debug("%s: silent for too long", self.remote_address, extra=BROKER_CLIENT_DISCONNECTED)
            self.close()
            return
        if self._silence is not None:
            self._silence.close()
        self._silence = get_hub().loop.timer(left)
        self._silence.start(self._await_word)

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._silence):
            if timer is not None:
                timer.close()
        self._timer = self._silence = None

    def _on_heartbeat(self) -> None:
        self._heartbeat_is_due = True
        self.wake()

    def upgrade(self, upgrades: Upgrades, leftover: bytes) -> None:
        """Put the layers on, each confirmed with an OK inside it. Raises FatalError; Upgraded when it is done."""
        output = self.output
        output.flush()
        self.upgrades = upgrades
        self._is_plain = False
        try:
            if upgrades.tls:
                output.is_writing = True  # no heartbeat may come between
                try:
                    self._stream = upgrade_tls(self._stream, self.server.context, self.server.faults.tcp)
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
        self._is_closed = True
        self._pump_is_due.set()
        with suppress(OSError):  # the peer has ended it, which the reader sees
            self._stream.shutdown(socket.SHUT_RDWR)

    def reset_on_close(self) -> None:
        """Let the peer see a reset, not an end of stream, when the connection is closed."""
        reset_on_close(self._stream)

    def _end(self) -> None:
        self._is_closed = True
        self._stop_timers()
        _leave_channel(self)
        self._pump_is_due.set()
        self._stream.close()

    def stats(self) -> dict[str, Any]:
        """Figures under the original's JSON names (nsqio/nsq: nsqd/client_v2.go, ClientV2Stats)."""
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
        cipher = self.tls_socket.cipher() if self.tls_socket is not None else None
        protocol = (self.tls_socket.selected_alpn_protocol() or "") if cipher else ""
        return {
            **stats,
            "tls_cipher_suite": cipher[0] if cipher else "",
            "tls_version": cipher[1].replace("v", "", 1) if cipher else "",
            "tls_negotiated_protocol": protocol,
            "tls_negotiated_protocol_is_mutual": bool(protocol),
        }


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
