"""Messages whose handlers run long: a warning before nsqd takes them back, and TOUCH where that is wanted.

One greenlet per consumer looks at what the workers handle right now, a few
times in each message timeout; nothing is done per message. What touching can
gain ends at the server's max_msg_timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic

from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError
from nsq_fast.protocol.identify import ServerInfo
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import Supervisor

from .failures import message_name

WARN_AT = 0.8
TOUCH_AT = 0.5
LOOKS_PER_TIMEOUT = 10
LONGEST_PAUSE = 5.0


class Deadlines:
    """Watches messages that are being handled.

    Args:
        handled: gives the messages whose handlers run now.
        auto_touch: TOUCH them in time.
    """

    def __init__(
        self,
        handled: Callable[[], Iterable[Message]],
        auto_touch: bool,
        supervisor: Supervisor,
        log: logging.Logger,
    ) -> None:
        self._supervisor = supervisor
        self._handled = handled
        self._auto_touch = auto_touch
        self._log = log
        self._touched: dict[bytes, float] = {}
        self._warned: set[bytes] = set()
        self._longest = 0.0
        self._pause = LONGEST_PAUSE
        self._wake = Event()
        self._is_stopped = False

    def start(self, name: str) -> None:
        """Begin to watch."""
        self._supervisor.loop(name, self._run).start()

    def stop(self) -> None:
        """Watch no more."""
        self._is_stopped = True
        self._wake.set()

    def expect(self, msg_timeout: float) -> None:
        """Look often enough for messages that must be answered within ``msg_timeout`` seconds."""
        self._pause = min(self._pause, msg_timeout / LOOKS_PER_TIMEOUT)
        self._longest = max(self._longest, msg_timeout)
        self._wake.set()

    def touched(self, message: Message) -> None:
        """Note that a message was touched."""
        self._touched[message.id] = monotonic()

    def _run(self) -> None:
        while not self._is_stopped:
            self.look(monotonic())
            self._wake.wait(self._pause)
            self._wake.clear()

    def look(self, now: float) -> None:
        """Touch or warn where it is time to."""
        seen = set()
        for message in list(self._handled()):
            connection = message.responder
            if isinstance(connection, Connection) and not message.has_responded():
                seen.add(message.id)
                self._check(message, connection, now)
        self._warned &= seen
        for message_id in self._touched.keys() - seen:
            # Handled asynchronously, maybe: what a touch gains is over by then.
            if now - self._touched[message_id] > self._longest:
                del self._touched[message_id]

    def deadline(self, message: Message, info: ServerInfo) -> float:
        """When the server takes a message back (monotonic), by what was touched until now."""
        since = self._touched.get(message.id, message.received_at)
        return min(since + info.msg_timeout, message.received_at + info.max_msg_timeout)

    def _check(self, message: Message, connection: Connection, now: float) -> None:
        info = connection.info
        since = self._touched.get(message.id, message.received_at)
        deadline = self.deadline(message, info)
        is_last_chance = deadline >= message.received_at + info.max_msg_timeout
        if self._auto_touch and now - since >= TOUCH_AT * info.msg_timeout and not is_last_chance:
            self._touch(message, now)
        elif now - since >= WARN_AT * (deadline - since) and message.id not in self._warned:
            self._warned.add(message.id)
            self._log.warning(
                "message %s is still being handled %.3g s after it arrived; nsqd takes it back in %.3g s",
                message_name(message), now - message.received_at, deadline - now,
            )  # fmt: skip

    def _touch(self, message: Message, now: float) -> None:
        try:
            message.touch()
        except NsqError:
            return  # answered or lost meanwhile
        self._touched[message.id] = now
