"""The read side of a socket with its layers: one greenlet waits for bytes, and another may wait in its place.

What is done for each read is in its base, which is compiled (``_plain_socket.pyx``).
"""

from __future__ import annotations

from _socket import SO_RCVLOWAT, SOL_SOCKET
from _socket import socket as CSocket  # which monkey.patch_all leaves as it is
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gevent import get_hub
from greenlet import greenlet

from nsq_fast._plain_socket import READ_SIZE, SHORT_READ, Interrupted, PlainSocket
from nsq_fast.runtime.loop_turns import LAST, loop_turns

from .busy_poll import BusyPoll
from .spin_reader import ReplyReader, SpinReader

if TYPE_CHECKING:
    from .layers import Layer

# Who waits for more than one such read gathers them in the kernel: a third of the CPU for 200 KiB at once.
GATHERING_READ_SIZE = 256 * 1024
REPLY_SIZE = 2048
MESSAGE_SIZE = 4096
READ = 1


class Receiver(PlainSocket):
    """Reads one socket, which nothing else may read.

    Attributes:
        spin_reader: reads at once; while its ``is_turn_due``, ``recv_at_once`` brings nothing before ``recv_in_turn``.
    The others are those of PlainSocket.
    """

    _relieved: greenlet | None
    _is_watching: bool
    _is_lent: bool
    _is_drained: bool
    _read_size: int
    _short_read: int
    _readable: Any

    def __init__(self, sock: CSocket) -> None:
        self._hub = get_hub()
        self._turns = loop_turns()
        self._socket = sock
        self._socket.settimeout(0.0)
        super().__init__(sock, self._hub, self._hub.loop.io(sock.fileno(), READ))
        self._wake_at = 1
        self.spin_reader = ReplyReader(self._socket)
        self._busy_poll: BusyPoll | None = None
        self._message_reader = SpinReader(self._socket)
        self._turn: Any = None

    def _recv_decoded(self) -> bytes:
        while True:
            data = self._read_layer(len(self.layers) - 1)
            if data or self.layers[0].is_ended:
                if self.is_due(len(data)):
                    self._turns.give_way()
                return data
            raw = self.recv_raw()
            if not raw:
                return b""
            self.layers[0].feed(raw)

    def _read_layer(self, level: int) -> bytes:
        layer: Layer = self.layers[level]
        while True:
            data = layer.read()
            if data or level == 0:
                return data
            below = self._read_layer(level - 1)
            if not below:
                return b""
            layer.feed(below)

    def wake_at(self, size: int) -> None:
        """From now on a ``recv`` that waits wakes up for so many bytes, or the end of the stream; 1: for any.

        For whoever limits the time that it waits: what has come by then is there for the next ``recv`` after
        ``wake_at(1)``. A wish only, where the system does not know of it, and where the kernel has no room for more.
        """
        if size == self._wake_at:
            return
        self._wake_at = size
        self._is_drained = size > 1  # not every system says of what is there already that it is enough now
        self._read_size, self._short_read = (
            (READ_SIZE, SHORT_READ) if size == 1 else (GATHERING_READ_SIZE, GATHERING_READ_SIZE)
        )
        with suppress(OSError):
            self._socket.setsockopt(SOL_SOCKET, SO_RCVLOWAT, size)

    def lend_watch(self) -> int | None:
        """The caller watches the socket from now on, and calls ``wake_receiver``. None: there are layers."""
        if self.layers:
            return None
        self._readable.stop()
        self._is_watching = self._is_lent = True
        return self._socket.fileno()

    def take_watch_back(self) -> None:
        """Nobody else watches any more."""
        self._is_lent = False
        self._is_watching = self.receiver is not None
        if self._is_watching:
            self._readable.start(self.wake_receiver)

    def recv_soon(self) -> bytes | None:
        """What arrives in a moment, received without a turn of the hub; None if it is the hub that has to wait."""
        if self._busy_poll is None:
            self._busy_poll = BusyPoll(self._hub.loop)
        if self.layers or not self._busy_poll.may_begin():
            return None
        data = self._message_reader.recv(MESSAGE_SIZE)
        if data is not None:
            return self._taken(data, MESSAGE_SIZE)
        if not self._busy_poll.wait():
            return None
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            self._busy_poll.rest()
            return None
        return self._taken(data, SHORT_READ)

    def _taken(self, data: bytes, short: int) -> bytes:
        """Note what was read: fewer bytes than ``short`` are all there was."""
        self._is_drained = len(data) < short or self.is_due(len(data))
        return data

    def recv_at_once(self) -> bytes | None:
        """What comes soon, without a turn of the hub; None if it is the hub that has to wait, or others wait for it."""
        if self.layers or self._turns.is_awaited:
            return None
        data = self.spin_reader.recv(REPLY_SIZE)
        return None if data is None else self._taken(data, REPLY_SIZE)

    def recv_in_turn(self) -> bytes | None:
        """``recv_for_reader`` for one turn of the hub. None: nothing came, or it was woken, and a turn is still due.

        While an answer is on its way the hub may as well look at timers and at other sockets, without falling asleep.
        """
        if self._turn is None:
            self._turn = self._hub.loop.timer(0.0, priority=LAST)
        self._turn.start(self._had_turn)
        try:
            data = self.recv_for_reader()
        finally:
            self._turn.stop()
        if data is not None:
            self.spin_reader.is_turn_due = False
        return data

    def _had_turn(self) -> None:
        self.spin_reader.is_turn_due = False
        self._interrupt()

    def interrupt(self) -> None:
        """Make a ``recv_for_reader`` that is waiting in another greenlet return None."""
        if self._relieved is not None:
            self._hub.loop.run_callback(self._interrupt)

    def _interrupt(self) -> None:
        if self._relieved is not None and self.receiver is not None:
            self.receiver.throw(Interrupted)

    def cancel_recv(self, error: BaseException) -> None:
        """Make a waiting ``recv`` raise ``error``, and a waiting ``recv_for_reader`` return None."""
        if self.receiver is not None:
            self._hub.loop.run_callback(self._cancel_recv, error)

    def _cancel_recv(self, error: BaseException) -> None:
        reader, self._relieved = self._relieved, None
        if reader is None:
            reader = self.receiver
        elif self.receiver is not None:
            self.receiver.throw(Interrupted)
        if reader is not None:
            reader.throw(error)
