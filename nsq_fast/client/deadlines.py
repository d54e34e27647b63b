"""The deadlines of messages: expiry, a warning before it, TOUCH where that is wanted, and the speed of handlers.

One timer per consumer looks at all connections and workers, a few times in each message timeout and when a deadline
is over; nothing is done per message. What touching can gain ends at the server's max_msg_timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast._codec import Message
from nsq_fast.client.signals import emit
from nsq_fast.errors import NsqError
from nsq_fast.log_events import HANDLER_SLOW, MESSAGES_EXPIRED
from nsq_fast.printable import seconds

from .connection import Connection
from .give_up import message_name
from .loop import Repeated

if TYPE_CHECKING:
    from .consumer import AnyConsumer
    from .loop import Loop, Supervisor
    from .subscription import Subscription
    from .workers import Pool

# Shares of the message timeout that have passed. A TOUCH at half leaves the other half for it to arrive; the warning
# comes while there is time to look; after STUCK_AT a message counts as one that nsqd will send to somebody else.
WARN_AT = 0.8
STUCK_AT = 0.85
TOUCH_AT = 0.5
# How often all workers are looked at: often enough to be near each of the shares above, seldom enough to cost nothing.
LOOKS_PER_TIMEOUT = 10
LONGEST_PAUSE = 5.0
SHORTEST_PAUSE = 0.01

LOG_PAUSE = 10.0
"""Seconds between two lines of the log about expired messages."""


LEFT = ", as nobody iterates: a consumer is closed by close(), or at the end of its with block, not by leaving a loop"


class Deadlines:
    """Watches the messages of one consumer.

    Args:
        subscriptions: gives the present ones.
    """

    def __init__(self, consumer: AnyConsumer, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        self._consumer = consumer
        self._subscriptions = subscriptions
        self._pools = consumer.pools
        self._auto_touch = consumer.config.auto_touch
        self._log: logging.Logger = consumer.logger
        self._warned: set[Message] = set()
        self._expired = 0
        self._unstarted = 0
        self._quiet_until = -inf
        self._looks = Repeated(f"{consumer.name} deadlines", self.look)

    def start(self, loop: Loop, supervisor: Supervisor) -> None:
        self._looks.start(loop, supervisor)

    def stop(self) -> None:
        self._looks.stop()

    def expect(self, msg_timeout: float) -> None:
        """Look often enough for messages that must be answered within ``msg_timeout`` seconds."""
        self._pools.msg_timeout = min(self._pools.msg_timeout, msg_timeout)
        self._looks.ask()

    def look(self, now: float) -> float:
        """Expire what is over, touch or warn where it is time to, and measure the speed of the handlers.

        Returns the seconds until there is something to see again.
        """
        for each in self._subscriptions():
            each.expire(now)
            if self._auto_touch:
                self._touch_asynchronous(each.connection, now)
        self._expire_orphans(now)
        news = [self._has_news(pool, now) for pool in self._pools]
        if any(news):
            self._consumer.flow.changed()
        self._warned = {message for message in self._warned if not message.has_responded()}
        deadlines = [each.next_deadline for each in self._subscriptions()]
        nearest = min([*deadlines, self._pools.next_deadline]) - monotonic()
        return max(SHORTEST_PAUSE, min(LONGEST_PAUSE, self._pools.msg_timeout / LOOKS_PER_TIMEOUT, nearest))

    # Messages that nsqd has taken back because nobody responded to them in time

    def report(self, messages: list[Message], unstarted: int) -> None:
        """``messages`` have expired, ``unstarted`` of them before a handler began with them."""
        self._count(len(messages), unstarted, monotonic())
        for message in messages:
            emit(self._consumer, "on_expired", message=message)

    def _expire_orphans(self, now: float) -> None:
        messages = self._pools.expire_orphans(now)
        if messages:  # they no longer count towards max_in_flight
            self._consumer.past.expired += len(messages)
            self.report(messages, 0)
            self._consumer.flow.changed()

    def _count(self, count: int, unstarted: int, now: float) -> None:
        self._expired += count
        self._unstarted += unstarted
        # A consumer that is too slow loses messages all day: one line for all of them fills no disk.
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_PAUSE
        self._log.warning(
            "%d messages were not answered before their msg_timeout was over, and nsqd delivers them again;"
            " no handler had begun with %d of them%s",
            self._expired, self._unstarted, LEFT if self._consumer.is_left else "", extra=MESSAGES_EXPIRED,
        )  # fmt: skip
        self._expired = self._unstarted = 0

    # Messages that are being handled

    def _touch_asynchronous(self, connection: Connection, now: float) -> None:
        """Touch what no worker handles any more, and somebody will respond to."""
        for message in connection.session.ledger.pending():
            if message.is_async():
                self._check(message, connection, now)

    def _has_news(self, pool: Pool, now: float) -> bool:
        """Look at the workers of one pool; say whether there is any news of how busy they are."""
        load = pool.load
        load.stuck, load.kept = [], []
        for worker in pool.workers:
            messages = worker.in_hand()
            stuck = self._stuck(messages, now)
            if stuck is not None:
                load.stuck.append(stuck)
            elif messages and now - worker.began >= STUCK_AT * self._pools.msg_timeout:
                load.kept.append(messages)
        return load.measure() or load.is_long

    def _stuck(self, messages: list[Message], now: float) -> Message | None:
        """Look at what one worker handles now; one message of it if nsqd is about to take some back."""
        stuck = None
        for message in messages:
            connection = message.responder
            if (
                isinstance(connection, Connection)
                and not message.has_responded()
                and self._check(message, connection, now)
            ):
                stuck = message
        return stuck

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
                "message %s is still being handled %s after it arrived; nsqd takes it back in %s",
                message_name(message), seconds(now - message.received_at), seconds(max(0.0, deadline - now)),
                extra=HANDLER_SLOW,
            )  # fmt: skip
        return spent >= STUCK_AT

    def _touch(self, message: Message) -> bool:
        try:
            message.touch()
        except NsqError:
            return False  # answered or lost meanwhile
        return True
