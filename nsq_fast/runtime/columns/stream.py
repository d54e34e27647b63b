"""The bytes of a column subscription, in and out, by one greenlet.

There is no reader and no writer greenlet: who sends while the peer takes nothing has to read meanwhile, or both wait
for each other. So ``send`` calls back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from gevent import Timeout

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectionClosed, ConnectionLost, HeartbeatMissed, NsqError
from nsq_fast.names import Address
from nsq_fast.runtime.net.receiver import GATHERING_READ_SIZE
from nsq_fast.runtime.net.transport import Transport

# nsqd is as patient with a silent client. nsqio/nsq: nsqd/protocol_v2.go, IOLoop
SILENT_INTERVALS = 2
# A peer that takes nothing may be waiting for us to take something: so often (s) what it sent is looked for.
WRITE_TURN = 0.02
# Bytes that are wanted together are waited for so long (s), then what there is will do: a heartbeat may be among it, or
# the server has no more.
GATHER_WAIT = 0.005
# A read that is not to wait: a Timeout of 0 would end before the system is asked.
NO_WAIT = 0.001


class ColumnStream:
    """A transport that is used by one greenlet, from ``begin`` to the first error, which closes it.

    Args:
        on_blocked: called again and again while the peer takes no bytes; it reads, and may call ``send``.
        on_refused: called when a write has failed: what the peer has said of the reason, or None. It reads.

    Attributes:
        last_received_at: ``time.monotonic()`` of the last bytes.
    """

    def __init__(
        self,
        address: Address,
        config: ConnectionConfig,
        on_blocked: Callable[[], object],
        on_refused: Callable[[], NsqError | None],
    ) -> None:
        self.address = address
        self.last_received_at = 0.0
        self._config = config
        self._on_blocked = on_blocked
        self._on_refused = on_refused
        self._transport: Transport | None = None
        self._unsent: deque[memoryview] = deque()
        self._is_sending = False

    @property
    def is_open(self) -> bool:
        """Whether it may be used."""
        return self._transport is not None

    def begin(self, transport: Transport) -> None:
        """Use this transport, which ``close`` closes."""
        self._transport = transport

    def close(self) -> None:
        """Close the socket. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def fail(self, reason: object) -> ConnectionLost:
        """Close, and return the error to raise."""
        self.close()
        return reason if isinstance(reason, ConnectionLost) else ConnectionLost(f"{self.address}: {reason}")

    def read(self, timeout: float, size: int = 1) -> bytes | None:
        """What the peer sent; None when that is nothing for so long. Raises ConnectionLost, also at the end.

        Args:
            size: bytes that are worth a read; fewer are read when they have not come within ``GATHER_WAIT``.
        """
        transport = self._opened()
        data: bytes | None = None
        if size > 1 and timeout > GATHER_WAIT and not transport.layers:  # compressed, they would be fewer
            transport.wake_at(min(size, GATHERING_READ_SIZE))
            data = self._recv(transport, GATHER_WAIT)
            timeout -= GATHER_WAIT
        if data is None:
            transport.wake_at(1)
            data = self._recv(transport, timeout)
        if data is None:
            self._check_silence()
            return None
        if not data:
            raise self.fail("closed by the server")
        self.last_received_at = monotonic()
        return data

    def _recv(self, transport: Transport, timeout: float) -> bytes | None:
        data: bytes | None = None
        limit = Timeout(timeout)
        limit.start()
        try:
            data = transport.recv()
        except Timeout as expired:
            if expired is not limit:
                raise
        except (NsqError, OSError) as error:
            raise self.fail(error) from error
        finally:
            limit.close()
        return data

    def _check_silence(self) -> None:
        if monotonic() - self.last_received_at > SILENT_INTERVALS * self._config.heartbeat_interval:
            self.close()
            raise HeartbeatMissed(f"{self.address}: nothing received for two heartbeat intervals")

    def send(self, data: bytes) -> None:
        """Send, or leave it to the call that is sending already: it reads meanwhile, and may find a heartbeat."""
        transport = self._opened()
        if not data:  # of no ids, say: a socket would take no byte of it for ever
            return
        self._unsent.append(memoryview(transport.encode(data)))
        if self._is_sending:
            return
        self._is_sending = True
        try:
            self._send_all(transport)
        finally:
            self._is_sending = False

    def _send_all(self, transport: Transport) -> None:
        last_at = monotonic()
        while self._unsent:
            try:
                sent = transport.try_send(self._unsent[0])
            except OSError as error:
                # A server that closes after a fatal error has sent the reason before.
                raise self._on_refused() or self.fail(error) from error
            if sent:
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
                last_at = monotonic()
            elif monotonic() - last_at > self._config.write_timeout:
                raise self.fail(f"the peer took no byte for {self._config.write_timeout} s")
            else:
                self._wait_writable(transport)

    def _wait_writable(self, transport: Transport) -> None:
        try:
            transport.wait_writable(WRITE_TURN)
        except TimeoutError:
            self._on_blocked()

    def end(self) -> None:
        """Say that nothing follows, and read up to the peer's end. Raises OSError.

        Closing with unread input makes the kernel reset the connection, and the server may lose our last command.
        """
        transport = self._opened()
        transport.end_writing()
        while transport.recv():
            pass

    def _opened(self) -> Transport:
        if self._transport is None:
            raise ConnectionClosed(f"{self.address}: the subscription is not open")
        return self._transport
