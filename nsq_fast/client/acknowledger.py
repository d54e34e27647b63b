"""What follows a handler: FIN, REQ after a failure, giving up after too many attempts.

One object per consumer, used by its workers. The usual case, a handler that
just returns, is the hot loop's in ``_dispatch.pyx``; everything else is here.

    judge()         True: the handler is called     False: nobody is, and it is requeued (``blocked_policy="stop"``)
                    a policy: that is called in place of the handler, by give_up()
    a handler or policy that returns: FIN           one that raises: failed(), REQ
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from time import time_ns
from typing import TYPE_CHECKING, Any, ClassVar

from nsq_fast._codec import Message
from nsq_fast._dispatch import TimeSlice
from nsq_fast.client.signals import emit, is_heard, receivers
from nsq_fast.errors import ConnectionLost, HandlerDeferred, NsqError, RequeueMessage
from nsq_fast.log_events import (
    HANDLER_DEFERRED,
    HANDLER_FAILED,
    INTERNAL_ERROR,
    MESSAGE_FAILS_AGAIN,
    MESSAGE_UNREADABLE,
    RESPONSE_LOST,
)
from nsq_fast.protocol.delays import RequeueDelay

from .give_up import GIVE_UP, AgePolicy, Discard, GiveUpPolicy, message_name, tell_outdated
from .handlers import BatchHandler, Handler, HandlerTiming, refuse_deferred

if TYPE_CHECKING:
    from nsq_fast._dispatch import InboundQueue

    from .consumer import AnyConsumer
    from .ordered import Ordered

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
            return self.handler if self.handler is not None else _no_handler
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

    def failed(self, message: Message, error: BaseException, is_ordered: bool = False) -> None:
        """A handler raised: requeue the message unless it is answered. Never raises because of ``error``."""
        backoff = self._note(error, message)
        if not is_ordered:  # an ordered partition has told of it before the handler was called: see ``Ordered``
            self._warn_of_attempts(message)
        self.requeue(message, _requested_delay_ms(error), backoff)

    def _warn_of_attempts(self, message: Message) -> None:
        """Warn of a message that fails again and again, where ``max_tries`` lets it do so for long."""
        over = message.attempts - self._attempts_threshold
        if over > 0 and over & (over - 1) == 0:  # the first, second, fourth...: one bad message fills no log
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

    def _note(self, error: BaseException, message: Message) -> bool:
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
            self._log.error(
                "handler failed on message %s: %r", message_name(message), error, exc_info=error, extra=HANDLER_FAILED
            )
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
        self.failed(message, error, is_ordered=inbound.lock is not None)

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


def _no_handler(consumer: object, message: Message) -> object:
    raise NsqError("no message_handler: every receiver of on_message is gone")


def _requested_delay_ms(error: BaseException) -> int | None:
    if not isinstance(error, RequeueMessage) or error.delay is None:
        return None
    # A delay beyond all reason must not keep the message from being requeued; nsqd clamps what it gets.
    return round(1000 * min(error.delay, MAX_DELAY))
