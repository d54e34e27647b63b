"""What follows a handler: FIN, REQ after a failure, giving up after too many attempts; order; what takes too long.

One object per consumer, used by its workers. The usual case, a handler that
just returns, is the hot loop's in ``_dispatch.pyx``; everything else is here.

    judge()         True: the handler is called     False: nobody is, and it is requeued (``blocked_policy="stop"``)
                    a policy: that is called in place of the handler, by give_up()
    a handler or policy that returns: FIN           one that raises: failed(), REQ
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from nsq_fast._codec import Message
from nsq_fast._dispatch import TimeSlice
from nsq_fast.client.signals import emit, is_heard, receivers
from nsq_fast.errors import (
    ConnectionLost,
    HandlerDeferred,
    NsqError,
    OrderViolated,
    PartitionBlocked,
    RequeueMessage,
    counted,
    seconds,
)
from nsq_fast.log_events import (
    HANDLER_DEFERRED,
    HANDLER_FAILED,
    HANDLER_SLOW,
    INTERNAL_ERROR,
    MESSAGE_FAILS_AGAIN,
    MESSAGE_UNREADABLE,
    MESSAGES_EXPIRED,
    ORDER_VIOLATED,
    PARTITION_BLOCKED,
    RESPONSE_LOST,
    RESPONSE_REPEATED,
)
from nsq_fast.protocol.rdy import RequeueDelay
from nsq_fast.protocol.topology import Target

from .connection import Connection
from .give_up import (
    GIVE_UP,
    AgePolicy,
    Discard,
    GiveUpPolicy,
    Recurring,
    is_worth_a_line,
    message_name,
    tell_outdated,
)
from .loop import Repeated
from .workers import BatchHandler, Handler, HandlerTiming, refuse_deferred

if TYPE_CHECKING:
    from nsq_fast._dispatch import InboundQueue

    from .consumer import AnyConsumer
    from .loop import Timer
    from .subscription import Subscription
    from .workers import WorkerPool

MAX_DELAY = 30 * 24 * 3600.0  # seconds; beyond what any server accepts
NO_LIMIT = 1 << 16  # attempts are 16 bits wide


class Acknowledger:
    """The handlers of a consumer and what becomes of their messages.

    Attributes:
        handler: what is called with each message, as it was given.
        batch_handler: what workers call with lists; None when messages are handled one by one.
        max_tries: attempts from which on a message is given up.
        timing: what handlers take; None while nobody asked for it.
        max_age: nanoseconds since its timestamp after which a message gets no handler; 0: none.
        has_policy: whether the program has chosen what becomes of messages with too many attempts.
    """

    def __init__(
        self,
        consumer: AnyConsumer,
        handler: Handler | None,
        batch_handler: BatchHandler | None,
        give_up: GiveUpPolicy | None,
        max_age_policy: AgePolicy,
        requeue_delay: RequeueDelay,
    ) -> None:
        self.consumer = consumer
        self.ordered: Ordered  # set when both are there
        self._signals = vars(consumer)  # each that somebody asked for is in there
        self.handler: Any = handler
        self.batch_handler: Any = batch_handler
        self.batch_size: int = consumer.config.batch_size
        self.max_tries: int = consumer.config.max_tries or NO_LIMIT
        self._attempts_threshold = consumer.config.attempts_threshold
        self.requeue_delay = requeue_delay
        self.timing: HandlerTiming | None = HandlerTiming() if consumer.config.histograms else None
        self.has_policy: bool = give_up is not None
        self._give_up: GiveUpPolicy = give_up if give_up is not None else Discard()
        self.max_age: int = round(consumer.config.max_age * 1e9)
        self._max_age_policy = max_age_policy
        self._log = consumer.logger
        self._has_deferred = False

    def slice_of(self, inbound: InboundQueue) -> TimeSlice:
        """What takes the messages of a connection whose handlers have returned, and tells those who listen."""
        time_slice = inbound.slice
        is_told = "on_finish" in self._signals and is_heard(self.consumer, "on_finish")
        time_slice.tell = self.tell_finished if is_told else None
        return time_slice

    check_result: ClassVar[Any] = staticmethod(refuse_deferred)  # of ``_dispatch.pyx``

    @staticmethod
    async def awaited(awaitable: Any) -> Any:
        """A coroutine of what a handler has returned instead of one."""
        return await awaitable if hasattr(awaitable, "__await__") else awaitable

    def tell_finished(self, message: Message) -> None:
        """Tell those who listen that a message was finished."""
        if "on_finish" in self._signals:
            emit(self.consumer, "on_finish", message_id=message.id)

    @property
    def has_handler(self) -> bool:
        """Whether there is anything to call with a message."""
        return self.handler is not None or self.batch_handler is not None or is_heard(self.consumer, "on_message")

    def present_handler(self) -> Handler:
        """What to call with each message: the handler itself, or with it those who listen to ``on_message``."""
        if "on_message" not in self._signals or not is_heard(self.consumer, "on_message"):
            return self.handler if self.handler is not None else no_handler
        # Asked for once a slice, not for each message: what blinker does to find them takes longer than all else.
        called = receivers(self.consumer.on_message, self.consumer)
        if self.handler is None and len(called) == 1:
            (receiver,) = called
            return lambda consumer, message: receiver(consumer, message=message)
        handler = self.handler

        def handle(consumer: Any, message: Message) -> None:
            if handler is not None:
                refuse_deferred(handler(consumer, message))
            for receiver in called:
                refuse_deferred(receiver(consumer, message=message))

        return handle

    def single_handler(self) -> Handler:
        """What to call with one message, also where the handler is one for batches."""
        batch_handler = self.batch_handler
        if batch_handler is None:
            # As ``present_handler``, at once in the usual case: an ordered partition asks for each message.
            return self.handler if self.handler and "on_message" not in self._signals else self.present_handler()
        return lambda consumer, message: batch_handler(consumer, [message])

    # Failures

    def failed(self, message: Message, error: BaseException, is_ordered: bool = False, who: str = "handler") -> None:
        """A handler raised: requeue the message unless it is answered. Never raises because of ``error``."""
        backoff = self._note(error, message, who)
        if not is_ordered:  # an ordered partition has told of it before the handler was called: see ``Ordered``
            self._warn_of_attempts(message)
        self.requeue(message, _requested_delay_ms(error), backoff)

    def _warn_of_attempts(self, message: Message) -> None:
        """Warn of a message that fails again and again, where ``max_tries`` lets it do so for long."""
        if is_worth_a_line(message.attempts - self._attempts_threshold):
            end = f"max_tries={self.max_tries} ends that" if self.max_tries < NO_LIMIT else "max_tries=0 sets no end"
            self._log.warning(
                "message %s has failed in attempt %d; %s",
                message_name(message),
                message.attempts,
                end,
                extra=MESSAGE_FAILS_AGAIN,
            )

    def batch_failed(self, messages: list[Message], error: BaseException) -> None:
        """A batch handler raised: requeue what it did not answer."""
        backoff = self._note(error, messages[0])
        delay_ms = _requested_delay_ms(error)
        for message in messages:
            self._warn_of_attempts(message)
            self.requeue(message, delay_ms, backoff)

    def unreadable(self, message: Message, error: NsqError) -> None:
        """A body that cannot be decompressed, or was too large to be received: no handler sees it; requeue it."""
        self._log.error("message %s cannot be read: %s", message_name(message), error, extra=MESSAGE_UNREADABLE)
        emit(self.consumer, "on_exception", message=message, error=error)
        self.requeue(message, None, False)

    def requeue(self, message: Message, delay_ms: int | None, backoff: bool) -> None:
        """REQ a message unless it is answered; when its connection is gone, nsqd delivers it again by itself."""
        if message.has_responded():
            return
        try:
            message.requeue(delay_ms, backoff)
        except ConnectionLost:
            self._log.info(
                "message %s could not be requeued: its connection is lost", message_name(message), extra=RESPONSE_LOST
            )
            self.consumer.flow.changed()

    def log_fault(self, handled: Message | list[Message] | None) -> None:
        """Log an exception that no handler raised, and requeue what was being handled."""
        self._log.exception("nsq_fast itself failed while handling %r", handled, extra=INTERNAL_ERROR)
        for message in [handled] if isinstance(handled, Message) else handled or ():
            if not message.is_async():
                self.requeue(message, None, True)

    def _note(self, error: BaseException, message: Message, who: str = "handler") -> bool:
        """Log and signal what a handler raised; say whether it counts as a failure for backoff."""
        if isinstance(error, RequeueMessage):
            return self.consumer.config.backoff_on_requeue if error.backoff is None else error.backoff
        if isinstance(error, HandlerDeferred):
            level = logging.DEBUG if self._has_deferred else logging.ERROR
            self._has_deferred = True  # once is loud enough: it is the same with every message
            self._log.log(level, "message %s is requeued: %s", message_name(message), error, extra=HANDLER_DEFERRED)
            emit(self.consumer, "on_exception", message=message, error=error)
            return True
        if self.consumer.is_failure(error):
            text = "%s failed on message %s: %r"
            self._log.error(text, who, message_name(message), error, exc_info=error, extra=HANDLER_FAILED)
            emit(self.consumer, "on_exception", message=message, error=error)
            return True
        self.consumer.escaped(error, message)
        return False

    # Giving up

    def is_outdated(self, message: Message) -> bool:
        """Whether it is older than ``max_age``."""
        return self.max_age > 0 and message.timestamp < time_ns() - self.max_age

    def _outdated(self, consumer: Any, message: Message) -> object:
        """What becomes of a message that is older than ``max_age``: a policy."""
        tell_outdated(self.consumer, message)
        policy = self._give_up if self._max_age_policy == GIVE_UP else self._max_age_policy
        return self._call(policy, message) if callable(policy) else None

    def is_beyond(self, inbound: InboundQueue, message: Message) -> bool:
        """Whether a policy, and not the handler, gets this message."""
        if self.is_outdated(message):
            return True
        return message.attempts > self.max_tries if inbound.lock is None else self.ordered.gives_up(message)

    def is_given_up(self, inbound: InboundQueue, message: Message) -> bool:
        """Give a message up if it is too old or has too many attempts; say whether no handler shall see it."""
        verdict = self.judge(inbound, message)
        if callable(verdict):
            self.give_up(inbound, message, verdict)
            return True
        return not verdict

    def judge(self, inbound: InboundQueue, message: Message) -> GiveUpPolicy | bool:
        """Whether the handler of a message shall be called, or which policy in its place."""
        if self.is_outdated(message):
            return self._outdated
        if inbound.lock is not None:
            return self.ordered.judge(message)
        return message.attempts <= self.max_tries or self._give_up

    def give_up(self, inbound: InboundQueue, message: Message, policy: GiveUpPolicy | None = None) -> None:
        """Hand a message to the policy, then finish it; keep it if that fails."""
        policy = policy or self.policy_of(message)
        try:
            refuse_deferred(self.call_policy(message, policy))
        except BaseException as error:
            self.policy_failed(inbound, message, error)
        else:
            self.given_up(inbound, message, policy)

    def policy_of(self, message: Message) -> GiveUpPolicy:
        """What gets a message that the hot loop calls no handler for. As in ``judge`` its age is the first reason."""
        is_outdated = self.is_outdated(message) or message.attempts <= self.max_tries
        return self._outdated if is_outdated else self._give_up

    def call_policy(self, message: Message, policy: GiveUpPolicy) -> object:
        """Hand a message to a policy, and tell of it; what that returns."""
        return policy(self.consumer, message) if policy == self._outdated else self._call(policy, message)

    def _call(self, policy: GiveUpPolicy, message: Message) -> object:
        if is_heard(self.consumer, "on_giving_up"):
            for receiver in receivers(self.consumer.on_giving_up, self.consumer):
                receiver(self.consumer, message=message)
        return policy(self.consumer, message)

    def policy_failed(self, inbound: InboundQueue, message: Message, error: BaseException) -> None:
        """The policy raised: keep the message."""
        self.failed(message, error, inbound.lock is not None, "give-up policy")

    def given_up(self, inbound: InboundQueue, message: Message, policy: GiveUpPolicy) -> None:
        """The policy is done with a message: finish it."""
        if policy == self._outdated:
            self.consumer.outdated += 1
        else:
            self.consumer.given_up += 1
        if message.mark_returned():
            inbound.connection.put_finished(message)
            self.tell_finished(message)

    def give_back(self, messages: Iterable[Message]) -> None:
        """REQ 0 for messages that nobody began to handle."""
        with suppress(NsqError):  # the connection may be gone, and with it the need
            for message in messages:
                message.requeue(0, False)


def no_handler(consumer: object, message: Message) -> object:
    """A handler where there is none any more."""
    raise NsqError("no message_handler: every receiver of on_message is gone")


def _requested_delay_ms(error: BaseException) -> int | None:
    if not isinstance(error, RequeueMessage) or error.delay is None:
        return None
    # A delay beyond all reason must not keep the message from being requeued; nsqd clamps what it gets.
    return round(1000 * min(error.delay, MAX_DELAY))


# Ordered partitions: one handler at a time, order verified, blocked messages never skipped by themselves.
#
# A redesigned server has one message of an ordered channel-partition in flight
# and sends the next when that one is finished. It ignores the delay of a REQ, so
# a failed message is held here and given back with REQ 0 when its delay is over,
# or shortly before the server would take it back by itself.


PAUSE: Final = "pause"
RETRY: Final = "retry"
STOP: Final = "stop"
BLOCKED_POLICIES = (PAUSE, RETRY, STOP)
BlockedPolicy: TypeAlias = str | GiveUpPolicy

# A message is held for so much of its timeout at most: a REQ that comes too late is an error.
LONGEST_HOLD = 0.8


class PartitionLock:
    """The right to handle messages of one ordered partition: one worker has it, over all its connections.

    Attributes:
        finished: id and timestamp of the message whose FIN was sent last; ``finished_at``: when, monotonic.
    """

    __slots__ = ("_holder", "_waiting", "finished", "finished_at")

    def __init__(self) -> None:
        self.finished: tuple[bytes, int] | None = None
        self.finished_at: float = 0.0
        self._holder: WorkerPool | None = None
        self._waiting: list[WorkerPool] = []

    def take(self, pool: WorkerPool) -> bool:
        """Take it for a worker of ``pool`` if it is free; if not, ``pool`` is woken when it is."""
        if self._holder is None:
            self._holder = pool
            return True
        if pool not in self._waiting:
            self._waiting.append(pool)
        return False

    def give_back(self, pool: WorkerPool) -> None:
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
        before = self._before.pop(partition, None)
        if before is not None and (seen[1] or seen == before):
            # It may be the old log: only the very first message of another shows that it was made anew.
            self._last[partition] = before
        last = self._last.get(partition)
        if seen == last:
            self.repeated += 1
        elif last is not None and (seen[0] < last[0] or seen[1] < last[1]):
            self.violations += 1
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
        self._recurring = Recurring()
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
            if not self._is_done(self.lock_of(target), message):
                return True
            if self._recurring.is_worth_a_line(("repeated", _key(target))):
                text = "%s: message %s comes again after its FIN, and is finished again"
                self._log.info(text, target, message_name(message), extra=RESPONSE_REPEATED)
            with suppress(ConnectionLost):  # it comes once more
                message.finish()
            return False
        error = OrderViolated(target.partition, last, seen)
        if self._recurring.is_worth_a_line(("violated", _key(target))):  # what is held back comes again and again
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

    def _is_done(self, lock: PartitionLock, message: Message) -> bool:
        """Whether it is the message that was finished last: no handler sees it once more, it is finished again.

        A leader that cannot tell its replicas of a FIN takes the FIN back, and sends the message again, and again: each
        second for two minutes, where it refuses the FIN at once; 44 times in 7 s, where it first waits for a replica
        (youzan/nsq: consistence/nsqd_coordinator_cluster_write.go, FinishMessageToCluster). Later than that it may be
        an administrator who wants the message to be handled again.
        """
        is_same = lock.finished == (message.id, message.timestamp)
        return is_same and monotonic() < lock.finished_at + message.responder.info.msg_timeout

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
        if is_worth_a_line(message.attempts - self.threshold):
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
        f" (internal id {message.internal_id}, offset {message.offset}) is delivered, attempt {message.attempts}"
    )


# The deadlines of messages: expiry, a warning before it, TOUCH where that is wanted, and the speed of handlers.
#
# One timer per consumer looks at all connections and workers, a few times in each message timeout and when a deadline
# is over; nothing is done per message. What touching can gain ends at the server's max_msg_timeout.


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


class Deadlines(Repeated):
    """Watches the messages of one consumer.

    Args:
        subscriptions: gives the present ones.
    """

    def __init__(self, consumer: AnyConsumer, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        super().__init__(f"{consumer.name} deadlines", self.look)
        self._consumer = consumer
        self._subscriptions = subscriptions
        self._pools = consumer.pools
        self._auto_touch = consumer.config.auto_touch
        self._log: logging.Logger = consumer.logger
        self._warned: set[Message] = set()
        self._expired = 0
        self._unstarted = 0
        self._quiet_until = -inf

    def expect(self, msg_timeout: float) -> None:
        """Look often enough for messages that must be answered within ``msg_timeout`` seconds."""
        self._pools.msg_timeout = min(self._pools.msg_timeout, msg_timeout)
        self.ask()

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
            "%s not answered before the msg_timeout was over, and delivered again by nsqd;"
            " no handler had begun with %d of them%s",
            counted(self._expired, "message"), self._unstarted, LEFT if self._consumer.is_left else "",
            extra=MESSAGES_EXPIRED,
        )  # fmt: skip
        self._expired = self._unstarted = 0

    # Messages that are being handled

    def _touch_asynchronous(self, connection: Connection, now: float) -> None:
        """Touch what no worker handles any more, and somebody will respond to."""
        for message in connection.session.ledger.pending():
            if message.is_async():
                self._check(message, connection, now)

    def _has_news(self, pool: WorkerPool, now: float) -> bool:
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
