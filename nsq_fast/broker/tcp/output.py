"""What goes out on a connection: frames are gathered and written together.

Two greenlets send: the reader of commands and the pump. One of them writes at a
time; frames that the other adds during a write go out with the next write, so
frames never mix. Nothing waits for ``output_buffer_timeout``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gevent import sleep, socket

_MAX_PENDING = 4096
_LINGER = 0.25
_DRAIN_SIZE = 128 * 1024


class Output:
    """The output of one connection.

    Args:
        stream: what is written to; replaced when a layer is put on.
        on_idle: called after a write if ``is_awaited`` is set.

    Attributes:
        frames: what the next write takes. Add to it to send.
        timeout: seconds that a write may take; None: any time.
        is_writing: whether a write is going on. Set it to keep others from writing.
        is_awaited: whether a greenlet waits for the end of the write.
    """

    def __init__(self, stream: Any, on_idle: Callable[[], None]) -> None:
        self.stream = stream
        self.frames: list[bytes] = []
        self.timeout: float | None = None
        self.is_writing = False
        self.is_awaited = False
        self._on_idle = on_idle

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
        self.frames.append(frame)
        try:
            self.flush()
            # Closing with unread input would be a reset, and could cost the client this frame.
            self.stream.shutdown(socket.SHUT_WR)
            self.stream.settimeout(_LINGER)
            while self.stream.recv(_DRAIN_SIZE):
                pass
        except OSError:
            pass
