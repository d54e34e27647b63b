"""The deadlines of messages: expiry, a warning before it, TOUCH where that is wanted, and the speed of handlers.

One greenlet per consumer looks at all connections and workers, a few times in each message timeout and when a deadline
is over; nothing is done per message. What touching can gain ends at the server's max_msg_timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError
from nsq_fast.log_events import HANDLER_SLOW
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import Supervisor

from .failures import message_name
from .load import Workload

if TYPE_CHECKING:
    from .load import Pool

# Shares of the message timeout that have passed. A TOUCH at half leaves the other half for it to arrive; the warning
# comes while there is time to look; after STUCK_AT a message counts as one that nsqd will send to somebody else.
WARN_AT = 0.8
STUCK_AT = 0.85
TOUCH_AT = 0.5
# How often all workers are looked at: often enough to be near each of the shares above, seldom enough to cost nothing.
LOOKS_PER_TIMEOUT = 10
LONGEST_PAUSE = 5.0
SHORTEST_PAUSE = 0.01


if TYPE_CHECKING:

    class Expiring(Protocol):
        """A subscription whose messages expire."""

        connection: Connection

        @property
        def next_deadline(self) -> float:
            """Before this moment ``expire`` finds nothing."""

        def expire(self, now: float) -> None:
            """Deal with the messages whose deadline is over."""


class Deadlines:
    """Watches the messages of one consumer.

    Args:
        subscribers: gives the subscriptions.
        workload: the workers, and the messages of lost connections.
        on_expired: called with messages of lost connections that expire.
        on_work: called when something was handled since the last look, or is stuck.
        auto_touch: TOUCH messages that are being handled, and asynchronous ones, in time.
    """

    def __init__(
        self,
        subscribers: Callable[[], Iterable[Expiring]],
        workload: Workload,
        on_expired: Callable[[list[Message]], None],
        on_work: Callable[[], None],
        auto_touch: bool,
        supervisor: Supervisor,
        log: logging.Logger,
    ) -> None:
        self._supervisor = supervisor
        self._subscribers = subscribers
        self._workload = workload
        self._on_expired = on_expired
        self._on_work = on_work
        self._auto_touch = auto_touch
        self._log = log
        self._warned: set[Message] = set()
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
        self._workload.msg_timeout = min(self._workload.msg_timeout, msg_timeout)
        self._wake.set()

    def _run(self) -> None:
        while not self._is_stopped:
            self.look(monotonic())
            self._wake.wait(self._pause(monotonic()))
            self._wake.clear()

    def _pause(self, now: float) -> float:
        deadlines = [each.next_deadline for each in self._subscribers()]
        nearest = min([*deadlines, self._workload.orphans.next_deadline])
        return max(SHORTEST_PAUSE, min(LONGEST_PAUSE, self._workload.msg_timeout / LOOKS_PER_TIMEOUT, nearest - now))

    def look(self, now: float) -> None:
        """Expire what is over, touch or warn where it is time to, and measure the speed of the handlers."""
        for each in self._subscribers():
            each.expire(now)
            if self._auto_touch:
                self._look_at_asynchronous(each.connection, now)
        expired = self._workload.orphans.expire(now)
        if expired:
            self._on_expired(expired)
        news = [self._look_at(pool, now) for pool in self._workload.pools]
        if any(news):
            self._on_work()
        self._warned = {message for message in self._warned if not message.has_responded()}

    def _look_at_asynchronous(self, connection: Connection, now: float) -> None:
        """Touch what no worker handles any more, and somebody will respond to."""
        for message in connection.session.ledger.pending():
            if message.is_async():
                self._check(message, connection, now)

    def _look_at(self, pool: Pool, now: float) -> bool:
        """Look at the workers of one pool; say whether there is any news of how busy they are."""
        load = pool.load
        load.stuck = [message for worker in pool.workers for message in self._stuck(worker.current, now)]
        return load.measure() or bool(load.stuck)

    def _stuck(self, current: Message | list[Message] | None, now: float) -> Iterator[Message]:
        """Look at what one worker handles now; give one message if nsqd is about to take some of it back."""
        stuck = None
        for message in [current] if isinstance(current, Message) else current or ():
            connection = message.responder
            if (
                isinstance(connection, Connection)
                and not message.has_responded()
                and self._check(message, connection, now)
            ):
                stuck = message
        if stuck is not None:
            yield stuck

    def _check(self, message: Message, connection: Connection, now: float) -> bool:
        """Touch or warn; say whether nsqd is about to take the message back."""
        if message.has_expired():
            return True
        info = connection.info
        deadline = connection.session.ledger.deadline(message)
        spent = 1 - (deadline - now) / info.msg_timeout
        # No TOUCH moves the deadline further than that: nsqio/nsq: nsqd/channel.go, TouchMessage.
        is_last_chance = deadline >= message.received_at + info.max_msg_timeout
        if self._auto_touch and spent >= TOUCH_AT and not is_last_chance and connection.is_open:
            return not self._touch(message)
        if spent >= WARN_AT and message not in self._warned:
            self._warned.add(message)
            self._log.warning(
                "message %s is still being handled %.3g s after it arrived; nsqd takes it back in %.3g s",
                message_name(message), now - message.received_at, max(0.0, deadline - now), extra=HANDLER_SLOW,
            )  # fmt: skip
        return spent >= STUCK_AT

    def _touch(self, message: Message) -> bool:
        try:
            message.touch()
        except NsqError:
            return False  # answered or lost meanwhile
        return True
