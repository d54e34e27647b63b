"""What goes out on a connection: frames are gathered and written together.

Two greenlets send: the reader of commands and the pump. One of them writes at a
time; frames that the other adds during a write go out with the next write, so
frames never mix. Messages may wait in the buffer; a reply takes them along.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gevent import sleep, socket

from .flush_ticker import FlushTicker

_MAX_PENDING = 4096
_LINGER = 0.25
_DRAIN_SIZE = 128 * 1024


class Output:
    """The output of one connection.

    Args:
        stream: what is written to; replaced when a layer is put on.
        on_idle: called after a write if ``is_awaited`` is set.

    Attributes:
        frames: what the next write takes.
        buffered: bytes of the messages among them.
        is_urgent: whether they are not to wait for more.
        size: bytes of messages that may wait for more; 1: none waits.
        ticker: when messages are written although there are fewer.
        timeout: seconds that a write may take; None: any time.
        is_writing: whether a write is going on. Set it to keep others from writing.
        is_awaited: whether a greenlet waits for the end of the write.
    """

    def __init__(self, stream: Any, on_idle: Callable[[], None]) -> None:
        self.stream = stream
        self.frames: list[bytes] = []
        self.buffered = 0
        self.is_urgent = False
        self.size = 1
        self.ticker = FlushTicker(0.0, 0.0)
        self.timeout: float | None = None
        self.is_writing = False
        self.is_awaited = False
        self._on_idle = on_idle

    def add(self, frame: bytes) -> None:
        """Have a frame go out that does not wait: a reply, or a heartbeat."""
        self.frames.append(frame)
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
                self.buffered = 0
                self.is_urgent = False
                self.stream.settimeout(self.timeout)
                self.stream.sendall(data)
        finally:
            self.is_writing = False
            if self.is_awaited:
                self._on_idle()

    def wait_for_room(self) -> None:
        """Block while a client that sends commands does not read the replies."""
        while len(self.frames) > _MAX_PENDING and self.is_writing:
            sleep(0.01)

    def send_last(self, frame: bytes) -> None:
        """Send a frame that the client is to read before it sees the connection end. Never raises OSError."""
        self.add(frame)
        try:
            self.flush()
            # Closing with unread input would be a reset, and could cost the client this frame.
            self.stream.shutdown(socket.SHUT_WR)
            self.stream.settimeout(_LINGER)
            while self.stream.recv(_DRAIN_SIZE):
                pass
        except OSError:
            pass
