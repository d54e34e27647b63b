"""Ordered partitions: one handler at a time, order verified, blocked messages never skipped by themselves.

A redesigned server has one message of an ordered channel-partition in flight
and sends the next when that one is finished. It ignores the delay of a REQ, so
a failed message is held here and given back with REQ 0 when its delay is over,
or shortly before the server would take it back by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast._codec import Message
from nsq_fast.client.signals import emit
from nsq_fast.errors import NsqError, OrderViolated, PartitionBlocked
from nsq_fast.log_events import ORDER_VIOLATED, PARTITION_BLOCKED
from nsq_fast.protocol.targets import Target

from .give_up import GiveUpPolicy, message_name

if TYPE_CHECKING:
    from .connection import Connection
    from .consumer import AnyConsumer
    from .loop import Timer
    from .workers import Pool

BLOCKED_POLICIES = PAUSE, RETRY, STOP = "pause", "retry", "stop"
BlockedPolicy = str | GiveUpPolicy

# A message is held for so much of its timeout at most: a REQ that comes too late is an error.
LONGEST_HOLD = 0.8


class PartitionLock:
    """The right to handle messages of one ordered partition: one worker has it, over all its connections."""

    __slots__ = ("_holder", "_waiting")

    def __init__(self) -> None:
        self._holder: Pool | None = None
        self._waiting: list[Pool] = []

    def take(self, pool: Pool) -> bool:
        """Take it for a worker of ``pool`` if it is free; if not, ``pool`` is woken when it is."""
        if self._holder is None:
            self._holder = pool
            return True
        if pool not in self._waiting:
            self._waiting.append(pool)
        return False

    def give_back(self, pool: Pool) -> None:
        """Let another worker have it, if one of ``pool`` has it now."""
        if self._holder is not pool:
            return
        self._holder = None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for pool in waiting:
                pool.wake()


class OrderLedger:
    """How far each partition has come. It outlives connections: a new leader goes on where the old one was.

    A redesigned server numbers the messages of a partition (internal id) and stores them one behind the other
    (offset). Neither may go backwards from one delivery to the next. A position is the pair of both.

    Attributes:
        repeated: messages that were delivered again.
        violations: messages that lay before the last one.
    """

    __slots__ = ("_before", "_last", "repeated", "violations")

    def __init__(self) -> None:
        self.repeated: int = 0
        self.violations: int = 0
        self._last: dict[str, tuple[int, int]] = {}
        self._before: dict[str, tuple[int, int]] = {}

    def moves_on(self, partition: str, internal_id: int, offset: int) -> bool:
        """Move on to a message that lies behind the last one, as nearly all do; False leaves it to ``check``."""
        last = self._last.get(partition)
        if last is None or internal_id <= last[0] or offset <= last[1]:
            return False
        self._last[partition] = internal_id, offset
        return True

    def check(self, partition: str, seen: tuple[int, int]) -> tuple[int, int] | None:
        """Move on to the next message of a partition; if it goes backwards, stay, and return where the last one was."""
        last = self._last.get(partition)
        before = self._before.pop(partition, None)
        if before is not None and (seen[1] or seen == before):
            last = before  # it may be the old log: only the very first message of another shows that it was made anew
        if seen == last:
            self.repeated += 1
        elif last is not None and (seen[0] < last[0] or seen[1] < last[1]):
            self.violations += 1
            self._last[partition] = last
            return last
        self._last[partition] = seen
        return None

    def may_begin_anew(self, topic: str) -> None:
        """Somebody who should know it says that there is no such topic: the next message may be the first of another
        log, which has its own order."""
        for partition in [each for each in self._last if each.startswith(f"{topic} ")]:
            self._before[partition] = self._last.pop(partition)

    def rewind(self, partition: str, position: tuple[int, int]) -> None:
        """Go on from ``position``: a message that lay behind was delivered all the same.

        What follows it is then in order: a partition set back by an administrator is one violation, not thousands.
        """
        self._last[partition] = position


class Ordered:
    """What a consumer knows and does about its ordered partitions.

    Attributes:
        ledger: the order of each partition, for as long as the consumer lives.
        threshold: attempts from which on a message counts as blocked.
        blocked: deliveries of messages with more attempts than the threshold.
    """

    def __init__(self, consumer: AnyConsumer, blocked_policy: BlockedPolicy) -> None:
        self.ledger: OrderLedger = OrderLedger()
        self.blocked: int = 0
        self._consumer = consumer
        self.threshold: int = consumer.config.attempts_threshold
        self._order_policy = consumer.config.order_policy
        self._blocked_policy = blocked_policy
        self._locks: dict[str, PartitionLock] = {}
        self._held: dict[Message, Timer] = {}
        self._log: logging.Logger = consumer.logger

    def lock_of(self, target: Target) -> PartitionLock:
        """The one lock of a partition, whoever leads it."""
        return self._locks.setdefault(_key(target), PartitionLock())

    # Order, where messages are received

    def check_of(self, target: Target) -> Callable[[list[Message]], list[Message]]:
        """What verifies the order of messages of ``target``, and returns those that shall be handled."""
        key, moves_on = _key(target), self.ledger.moves_on

        def in_order(messages: list[Message]) -> list[Message]:
            return [
                message
                for message in messages
                if moves_on(key, message.internal_id, message.offset or 0) or self._may_follow(target, message)
            ]

        return in_order

    def _may_follow(self, target: Target, message: Message) -> bool:
        """Judge a message that is the first, comes again or goes backwards; whether it shall be handled."""
        seen = message.internal_id, message.offset or 0
        last = self.ledger.check(_key(target), seen)
        if last is None:
            return True
        error = OrderViolated(target.partition, last, seen)
        self._log.error("%s: %s: %s", target, error, self._order_policy, extra=ORDER_VIOLATED)
        emit(self._consumer, "on_order_violation", message=message, error=error)
        if self._order_policy == "deliver":
            self.ledger.rewind(_key(target), seen)
            return True
        if self._order_policy == "stop":
            self._stop(message, error)
        else:
            # The server reads on from what is confirmed only (youzan/nsq: nsqd/channel.go, messagePump).
            # Neither handled nor finished: finishing it might lose it. The partition stands still until the
            # server is right again, or somebody looks into it.
            self._consumer.acknowledger.requeue(message, None, False)
        return False

    def _stop(self, message: Message, error: NsqError) -> None:
        self._consumer.fail(error)
        self._consumer.acknowledger.requeue(message, 0, False)

    # Blocked messages, in a worker

    def judge(self, message: Message) -> GiveUpPolicy | bool:
        """As ``Acknowledger.judge``; tells of a message that is blocked."""
        if not self.is_blocked(message):
            return True
        self._tell_blocked(message)
        policy = self._blocked_policy
        if policy == STOP:
            self._stop(message, PartitionBlocked(_blocked_text(message)))
            return False
        return policy if callable(policy) else True

    def gives_up(self, message: Message) -> bool:
        """Whether a policy, and not the handler, gets this message."""
        return self.is_blocked(message) and callable(self._blocked_policy)

    def is_blocked(self, message: Message) -> bool:
        """Whether it has failed so often that it counts as blocked."""
        return message.attempts > self.threshold

    def _tell_blocked(self, message: Message) -> None:
        self.blocked += 1
        over = message.attempts - self.threshold
        if over & (over - 1) == 0:  # the first, second, fourth...: a message that fails all night fills no disk
            self._log.error("%s", _blocked_text(message), extra=PARTITION_BLOCKED)
        emit(self._consumer, "on_blocked", message=message)

    def requeue_delay_ms(self, message: Message) -> int:
        """How long a failed message is held when nobody says otherwise."""
        if self._blocked_policy == RETRY and self.is_blocked(message):
            return 0
        return self._consumer.acknowledger.requeue_delay(message.attempts)

    # Holding

    def hold(self, connection: Connection, message: Message, delay_ms: int) -> None:
        """REQ 0 after a delay, or before the message times out if that is sooner."""
        left = message.received_at + LONGEST_HOLD * connection.info.msg_timeout - monotonic()
        pause = max(0.0, min(delay_ms / 1000, left))
        self._held[message] = self._consumer.loop.call_later(pause, self._give_back, message)

    def holds(self, connection: Connection) -> bool:
        """Whether a message of this connection failed, and waits here for its next attempt. In any thread."""
        return any(message.responder is connection for message in list(self._held))

    def release(self, connection: Connection) -> None:
        """REQ 0 now for what is held of a connection."""
        for message in [each for each in self._held if each.responder is connection]:
            self._give_back(message)

    def forked(self) -> None:
        """In the child of a fork: what is held is the parent's."""
        for timer in self._held.values():
            timer.cancel()
        self._held.clear()

    def _give_back(self, message: Message) -> None:
        timer = self._held.pop(message, None)
        if timer is None:
            return
        timer.cancel()
        with suppress(NsqError):  # a lost connection has given it back already
            message.responder.requeue(message, 0, False)


def _key(target: Target) -> str:
    """Names a partition, whoever leads it; text, whose hash is computed once."""
    return f"{target.topic} {target.address if target.partition is None else target.partition}"


def _blocked_text(message: Message) -> str:
    return (
        f"topic {message.topic}: partition {message.partition} is blocked: message {message_name(message)}"
        f" (internal id {message.internal_id}, offset {message.offset}) is delivered for the {message.attempts}th time"
    )
