"""One connection that is subscribed to a target: messages in, answers out, and its end.

What arrives is looked at (order, headers, bodies) and goes to the workers; what nsqd takes back is dropped at its
deadline. Once the connection is about to end (``ask_for_the_end``), whatever no handler has begun with, or still
arrives, goes back to nsqd at once.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._dispatch import InboundQueue
from nsq_fast._record import MutableRecord, Record
from nsq_fast.client.signals import emit
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    BodyInvalid,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    MessageTooLarge,
    NsqError,
    ServerError,
    counted,
    said_at,
)
from nsq_fast.log_events import (
    HEARTBEAT_LATE,
    OPTION_IDLE,
    RESPONSE_FAILED,
    RESPONSE_LOST,
    SERVER_ERROR,
    SUBSCRIPTION_LOST,
)
from nsq_fast.names import Address
from nsq_fast.protocol.publishing import CODEC_HEADER, GZIP, IDEMPOTENCE_HEADER, LZ4, SIZE_HEADER, SNAPPY, SeenKeys
from nsq_fast.protocol.rdy import Share
from nsq_fast.protocol.topology import Mode, Target

from .connection import Connection
from .give_up import message_name

if TYPE_CHECKING:
    from nsq_fast.client.trace import Outcome
    from nsq_fast.protocol.rdy import Backoff

    from .consumer import AnyConsumer
    from .loop import Changes
    from .subscriptions import Subscriber

STRAGGLER_TIME = 0.01
"""Seconds after CLOSE_WAIT within which comes what nsqd was sending just then, beside its reader of commands
(nsqio/nsq: nsqd/protocol_v2.go, messagePump). Not given back it would stay there until its timeout, of a minute."""

LEADER_HEARTBEAT = 14.0
"""Longest interval, in seconds, of the heartbeats of a partition's leader. One that is late says that the leader hangs:
that is to be known before the cluster names another, 18 s after it heard of the old one at the earliest.
youzan/nsq: consistence/nsqd_node_etcd.go, ETCD_TTL and refresh."""

_OF_HEADERS = ("skip_header", "suppress_retried")
_PLAIN = r"[A-Za-z0-9_.:-]+"
_KEY_MARK = IDEMPOTENCE_HEADER.encode()
_CODEC_MARK = CODEC_HEADER.encode()


class Counters(MutableRecord):
    """What has happened since the start, to messages and to connections.

    Attributes:
        received: deliveries, repeated ones included.
        finished, requeued: FINs and REQs handed to the system, to be sent.
        answers_failed: FIN, REQ or TOUCH that nsqd refused: it had taken the message back after its timeout.
        answers_lost: FINs and REQs that could not be sent because the connection was gone; nsqd delivers these
            messages again.
        skipped: messages finished because they have the header ``skip_header``; ``finished`` counts them, too.
        suppressed: the same of copies that ``suppress_retried`` has found.
        expired: messages that were not answered before their time was over; nsqd delivers these again.
        touched: TOUCHes that were queued, those of ``auto_touch`` among them.
        subscriptions: connections that were subscribed: one for each target, and one more for each time it was renewed.
    """

    received: int = 0
    finished: int = 0
    requeued: int = 0
    answers_failed: int = 0
    answers_lost: int = 0
    expired: int = 0
    skipped: int = 0
    suppressed: int = 0
    touched: int = 0
    subscriptions: int = 0

    def copy(self) -> Counters:
        """The counts of now."""
        return msgspec.structs.replace(self)

    def add(self, other: Counters) -> None:
        """Sum up."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ConnectionStats(Record, frozen=True):
    """One nsqd of a topic, or one partition that it leads. Counts go over all connections that were made to it.

    ``backoff_level`` and ``backoff_left`` (s) are its own with ``backoff_scope="connection"``, and else the consumer's.
    """

    address: Address
    is_connected: bool
    rdy: int
    in_flight: int
    unstarted: int
    counters: Counters
    partition: int | None = None
    topic: str = ""
    backoff_level: int = 0
    backoff_left: float = 0.0


class Subscription:
    """The owner of one Connection. Used once.

    Args:
        subscriber: keeps the target subscribed, through one of these after another.
        mode: how to subscribe.

    Attributes:
        connection, inbound, share: of this subscription.
        mode: how it is subscribed.
        counters, backoff, changes: those of the subscriber; ``changes`` is told of what others may wait for.
        is_live: whether messages may arrive.
        is_ending: whether messages are given back that no handler has begun with.
        is_ordered: whether messages come one by one and in order.
        is_awaiting_close: whether CLS was sent and CLOSE_WAIT has not come.
        overdue_since: when something was received last, at the time when a heartbeat was late; None before.
        dropped_at: when the last messages came, if options left all of them out; else 0.0.
    """

    backoff: Backoff
    changes: Changes
    counters: Counters
    target: Target

    def __init__(self, consumer: AnyConsumer, subscriber: Subscriber, mode: Mode) -> None:
        config = consumer.connection_config.replace(extend_support=mode.extend_support)
        self.target = target = subscriber.target
        if target.partition is not None:
            config = config.replace(heartbeat_interval=min(config.heartbeat_interval, LEADER_HEARTBEAT))
        self.mode = mode
        self.counters, self.backoff, self.changes = subscriber.counters, subscriber.backoff, subscriber.changes
        self.connection: Connection = consumer.new_connection(target.address, config, self)
        self.inbound: InboundQueue = InboundQueue(self.connection, self.expire)
        self.inbound.slice.max_age = consumer.acknowledger.max_age
        self._ledger = self.connection.session.ledger
        self.share: Share = Share()
        self.is_live: bool = False
        self.is_ending: bool = False
        self.is_ordered: bool = False
        self.is_awaiting_close: bool = False
        self._silent_at = 0.0  # when nothing more can come
        self.overdue_since: float | None = None
        self.dropped_at: float = 0.0
        self._subscriber = subscriber
        self._consumer = consumer
        self._pool = subscriber.pool
        self._trace = consumer.trace
        self._selection = Selection(self, consumer)
        self._select: Callable[[list[Message]], list[Message]] | None = None

    @property
    def begun(self) -> int:
        """Messages that handlers have got and not answered."""
        return self.connection.in_flight - len(self.inbound.waiting)

    @property
    def capacity(self) -> int:
        """Messages that the workers of this target alone can begin with in time."""
        return self._consumer.pools.capacity_of(None if self._subscriber.is_pool_shared else self._pool)

    # Begin

    async def subscribe(self) -> None:
        """SUB as the server's dialect has it. An old nsqd beside partitions is subscribed to plainly, unless options
        ask for what it cannot do. Raises as ``Connection.subscribe``, and ConfigError for an ignored filter."""
        consumer, config = self._consumer, self._consumer.config
        is_redesigned = self.connection.session.dialect.has_partitions
        if not (is_redesigned and self.mode.extend_support):
            _refuse_filters(consumer.connection_config, self.target)
        self.is_ordered = self.mode.ordered and (is_redesigned or bool(config.ordered))
        await self.connection.subscribe(
            self.target.topic,
            consumer.channel,
            partition=self.target.partition,
            ordered=self.is_ordered,
            advanced=config.advanced and is_redesigned,
        )

    def begin(self) -> None:
        """Take messages: RDY may be sent from now on."""
        consumer = self._consumer
        # The server has one message of an ordered partition in flight, whatever RDY says: youzan/nsq:
        # nsqd/channel.go, messagePump (waits for the confirmation of the last one).
        self.share = Share(max_rdy_count=1 if self.is_ordered else self.connection.info.max_rdy_count)
        if self.is_ordered:
            self.inbound.lock = consumer.ordered.lock_of(self.target)
            self.connection.hold = consumer.ordered.hold
            self.connection.answer_promptly()
        if not self.mode.extend_support:
            _tell_headerless(consumer, self.target.topic)
        self._select = self._selection.begin()
        self.is_live = True

    # Messages, in a callback of the loop

    def on_messages(self, conn: Connection, messages: list[Message]) -> None:
        if self._trace.is_active and self._is_traced():
            self._trace_received(messages)
        self.counters.received += len(messages)
        ledger, now = self._ledger, conn.last_received_at
        if now >= ledger.next_deadline:
            self.expire(now)
        # More than RDY allowed at any time that matters: nsqd has taken some back, although our clock has not said so.
        if ledger.count > self.share.rdy and ledger.count > self.share.highest(now):
            self._expired(ledger.expire_excess(self.share.highest(now), now))
        if self.is_ending:
            self.inbound.waiting.extend(messages)
            self.give_back_unstarted()
            return
        if self._select is not None:
            messages = self._select(messages)
        self._pool.deliver(self.inbound, messages)

    def on_message_skipped(self, conn: Connection, message: TruncatedMessage, error: MessageTooLarge) -> None:
        """No handler sees a message without its body: it is requeued, until a give-up policy gets it."""
        acknowledger = self._consumer.acknowledger
        if self.is_ending or acknowledger.is_beyond(self.inbound, message):
            self.on_messages(conn, [message])
            return
        if self._is_traced():
            self._trace_received((message,))
        self.counters.received += 1
        if self._selection.is_in_order(message):
            acknowledger.unreadable(message, error)

    @property
    def next_deadline(self) -> float:
        """When ``expire`` has something to do, at the earliest; monotonic."""
        return self._ledger.next_deadline

    def expire(self, now: float) -> None:
        """Forget the messages that nsqd has taken back by ``now``."""
        self._expired(self._ledger.expire(now))
        if self.is_ending:
            self.give_back_abandoned()

    def _expired(self, messages: list[Message]) -> None:
        if messages:
            unstarted = self.inbound.drop_expired() if self._consumer.config.drop_expired else 0
            self.counters.expired += len(messages)
            self._consumer.deadlines.report(messages, unstarted)
            self._freed()

    # Answers

    def requeue_delay_ms(self, conn: Connection, message: Message) -> int:
        if self.is_ordered:
            return self._consumer.ordered.requeue_delay_ms(message)
        return self._consumer.acknowledger.requeue_delay(message.attempts)

    def on_finish(self, conn: Connection, message: Message) -> None:
        emit(self._consumer, "on_finish", message_id=message.id)

    def on_touch(self, conn: Connection, message: Message) -> None:
        self.counters.touched += 1

    def on_requeue(self, conn: Connection, message: Message, delay_ms: int, backoff: bool) -> None:
        consumer = self._consumer
        emit(consumer, "on_requeue", message_id=message.id, timeout=delay_ms)
        if backoff and not self.is_ordered:  # an ordered partition waits for its own messages only
            consumer.flow.result(False, self.backoff)
        if self._is_traced():
            self._trace_answers((message,), "REQ")
        self._freed()

    def on_answers(self, conn: Connection, finished: Sequence[Message], requeued: int, is_sent: bool) -> None:
        if not is_sent:
            self._lost_answers(finished, requeued)
            return
        counters, consumer = self.counters, self._consumer
        counters.finished += len(finished)
        if requeued:
            counters.requeued += requeued
        if finished:
            now = self._subscriber.finished_at = monotonic()
            lock, last = self.inbound.lock, finished[-1]
            if lock is not None:
                lock.finished, lock.finished_at = (last.id, last.timestamp), now
            if self.backoff.is_on:
                consumer.flow.result(True, self.backoff)
            if self._trace.is_active and self._is_traced():
                self._trace_answers(finished, "FIN")
        self._freed()

    def _lost_answers(self, finished: Sequence[Message], requeued: int) -> None:
        self.counters.answers_lost += len(finished) + requeued
        self._consumer.logger.info(
            "%s: connection lost before the FIN of %s%s and the REQ of %d",
            self.target, counted(len(finished), "message"),
            f" (first {message_name(finished[0])})" if finished else "", requeued, extra=RESPONSE_LOST,
        )  # fmt: skip
        self._consumer.flow.changed()
        self._freed()

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self.counters.answers_failed += 1
        if self._subscriber.recurring.is_worth_a_line(error.code):
            self._consumer.logger.warning("%s: answered too late: %s", self.target, error, extra=RESPONSE_FAILED)
        emit(self._consumer, "on_error", error=error)

    def _freed(self) -> None:
        if self._consumer.flow.sharing.is_waiting:
            self._consumer.flow.changed()
        if self.is_ending:
            self.changes.set()

    # What is only told

    def on_error(self, conn: Connection, error: ServerError) -> None:
        # A leader without its replicas ends a connection a second so.
        if self._subscriber.recurring.is_worth_a_line(error.code):
            self._consumer.logger.error("%s: %s", self.target, error, extra=SERVER_ERROR)
        emit(self._consumer, "on_error", error=error)

    def on_reply(self, conn: Connection, token: Any, data: bytes) -> None:
        emit(self._consumer, "on_response", response=data)

    def on_failed(self, conn: Connection, token: Any, error: NsqError) -> None:
        emit(self._consumer, "on_error", error=error)

    def on_heartbeat(self, conn: Connection) -> None:
        emit(self._consumer, "on_response", response=b"_heartbeat_")

    def on_heartbeat_overdue(self, conn: Connection) -> None:
        """The nsqd is silent. It may hang, and another lead its partition by now."""
        self.overdue_since = conn.last_received_at
        self._consumer.logger.warning(
            "%s: its heartbeat is late; asking lookup who serves the topic", self.target, extra=HEARTBEAT_LATE
        )
        self._subscriber.doubt()

    # The trace log. Only redesigned servers have ids that mean something, so only their messages are recorded

    def _is_traced(self) -> bool:
        log = self._trace
        return log.is_active and log.is_on(self.target.topic) and self.connection.session.dialect.has_partitions

    def _trace_received(self, messages: Iterable[Message]) -> None:
        conn = self.connection
        for message in messages:
            self._trace.received(
                self.target.topic, self._consumer.channel, message, nsqd=conn.address, local=conn.local_address
            )

    def _trace_answers(self, messages: Iterable[Message], outcome: Outcome) -> None:
        """Record answers that were sent just now; those that came too late are timeouts, whatever they said."""
        now, conn = monotonic(), self.connection
        for message in messages:
            # nsqd takes no response for a message that it has sent to somebody else, and may not even say so.
            is_late = message.has_expired() or now > self._ledger.deadline(message)
            self._trace.consumed(
                self.target.topic,
                self._consumer.channel,
                message,
                "TIMEOUT" if is_late else outcome,
                nsqd=conn.address,
                local=conn.local_address,
                handling_time=now - message.received_at,
            )

    # End

    def ask_for_the_end(self) -> None:
        """CLS, and REQ 0 for what no handler has begun with and for what still arrives."""
        self.is_ending = True
        with suppress(NsqError):  # it may be ending just now
            self.connection.start_close()
            self.is_awaiting_close = True
            self.give_back_unstarted()
            self._consumer.ordered.release(self.connection)

    async def wait_for_end(self, deadline: float | None) -> bool:
        """Wait until no message can come any more, and until every message is answered or expired.

        False if that is not so by ``deadline`` (monotonic).
        """
        is_last = await self.changes.wait_while(lambda: self.is_live and self.is_awaiting_close, deadline)
        if is_last and self.is_live and monotonic() < self._silent_at:
            await self._consumer.loop.sleep(STRAGGLER_TIME)  # whole: libuv warns of a rest below a millisecond
        self.give_back_abandoned()
        return (
            await self.changes.wait_while(lambda: self.is_live and self.connection.in_flight > 0, deadline) and is_last
        )

    def give_back_unstarted(self) -> None:
        """REQ 0 for what no handler has begun with."""
        self._consumer.acknowledger.give_back(self.inbound.take_unstarted())

    def give_back_abandoned(self) -> None:
        """REQ 0 for asynchronous messages that the program has dropped without an answer."""
        if self.is_live:
            self._consumer.acknowledger.give_back(self._ledger.abandoned())

    def give_back_unfinished(self) -> int:
        """REQ 0 for what handlers have begun with and not answered; return how many there were."""
        count = 0
        for message in self._ledger.pending() if self.is_live else ():
            with suppress(NsqError):  # a handler on a native thread has answered just now
                message.requeue(0, False)
                count += 1
        return count

    def abandon(self) -> None:
        """The loop ends: give back what is held, as far as that can be sent at once, and drop the connection."""
        self.ask_for_the_end()
        self.give_back_unfinished()
        self.connection.drop(ConnectionClosed(f"{self.target}: the event loop has ended"))

    def let_go(self) -> None:
        """The loop is closed. Give back what is held with the last bytes: nsqd would deliver it again after its timeout
        only, whatever becomes of the connection (nsqio/nsq: nsqd/channel.go, RemoveClient)."""
        unstarted = self.inbound.take_unstarted()
        self.connection.let_go([*unstarted, *(each for each in self._ledger.pending() if each not in unstarted)])
        self.is_live = False

    def on_close_wait(self, conn: Connection) -> None:
        self.is_awaiting_close = False
        self._silent_at = monotonic() + STRAGGLER_TIME
        self.changes.set()

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        was_live, self.is_live = self.is_live, False
        unstarted = self.inbound.take_unstarted()
        for message in unstarted:
            # Nobody will respond; nsqd delivers it again after its timeout: nsqio/nsq: nsqd/channel.go,
            # processInFlightQueue.
            message.mark_responded()
        self.changes.set()
        if not was_live:
            return
        consumer = self._consumer
        consumer.pools.adopt(self._ledger)
        consumer.flow.remove(self)
        if self.is_ending:
            return
        if self.backoff is not consumer.flow.backoff:
            consumer.flow.result(False, self.backoff)
        if self._subscriber.recurring.is_worth_a_line(type(error)):
            consumer.logger.warning(
                "%s: %s; %d unstarted messages dropped",
                self.target, said_at(self.target.address, error), len(unstarted), extra=SUBSCRIPTION_LOST,
            )  # fmt: skip
        emit(consumer, "on_error", error=error)
        self._subscriber.doubt()


class Selection:
    """Which of the messages of one connection a handler gets: those in order, with bodies that can be read."""

    def __init__(self, subscription: Subscription, consumer: AnyConsumer) -> None:
        self._subscription = subscription
        self._consumer = consumer
        self._in_order: Callable[[list[Message]], list[Message]] | None = None
        self._size_limit: int | None = None  # of decompressed bodies; None: compressed ones are left as they are
        self._skip_header: str | None = None
        self._skip_mark = b""
        self._seen_keys: SeenKeys | None = None

    def begin(self) -> Callable[[list[Message]], list[Message]] | None:
        """What chooses, now that it is known how the subscription is made; None: each message is handled as it came."""
        subscription, config = self._subscription, self._consumer.config
        if subscription.is_ordered:
            self._in_order = self._consumer.ordered.check_of(subscription.target)
        if not subscription.mode.extend_support:
            return self._in_order
        self._size_limit = config.max_decompressed_size if config.decompress else None
        self._skip_header = header = config.skip_header
        # What a name looks like in JSON is known for plain ones only; with others all headers are read.
        self._skip_mark = header.encode() if header and re.fullmatch(_PLAIN, header) else b""
        self._seen_keys = self._consumer.seen_keys
        has_extended = any(each is not None for each in (self._size_limit, header, self._seen_keys))
        return self._readable_in_order if has_extended else self._in_order

    def is_in_order(self, message: Message) -> bool:
        """Whether a message may be handled, as to its place in the order."""
        return self._in_order is None or bool(self._in_order([message]))

    def _readable_in_order(self, messages: list[Message]) -> list[Message]:
        if self._in_order is not None:
            messages = self._in_order(messages)
        if messages and (self._skip_header is not None or self._seen_keys is not None):
            messages = [each for each in messages if not self._is_dropped(each)]
            self._subscription.dropped_at = 0.0 if messages else self._subscription.connection.last_received_at
        return [each for each in map(self._readable, messages) if each is not None]

    def _is_dropped(self, message: Message) -> bool:
        """Finish a message that has the header, or is a copy of one that came before; say whether it is finished."""
        # Few are: names are looked for before all headers are read.
        ext, counters = message.ext, self._subscription.counters
        if ext is None:
            return False
        if self._skip_header is not None and self._skip_mark in ext and self._skip_header in _headers(message):
            counters.skipped += 1
        elif self._seen_keys is not None and _KEY_MARK in ext and self._is_copy(message, self._seen_keys):
            counters.suppressed += 1
        else:
            return False
        with suppress(ConnectionLost):  # nsqd delivers it again, and it is finished then
            message.finish()
        return True

    @staticmethod
    def _is_copy(message: Message, seen: SeenKeys) -> bool:
        key = _headers(message).get(IDEMPOTENCE_HEADER)
        return isinstance(key, str) and seen.is_copy(message.topic or "", key, message.id)

    def _readable(self, message: Message) -> Message | None:
        if self._size_limit is None or not is_compressed(message):
            return message
        acknowledger = self._consumer.acknowledger
        try:
            readable = decompressed(message, self._size_limit)
        except NsqError as error:
            # Who has chosen no policy has not agreed to lose what another version of this program may read.
            is_for_policy = acknowledger.has_policy and acknowledger.is_beyond(self._subscription.inbound, message)
            if is_for_policy or acknowledger.is_outdated(message):
                return message  # for the policy, as it came
            acknowledger.unreadable(message, error)
            return None
        if readable is not message:
            # Only one of the two may be responded to, the one in flight: both have the id that nsqd knows.
            message.mark_responded()
            self._subscription.connection.session.ledger.follow(readable)
        return readable


def _headers(message: Message) -> Mapping[str, Any]:
    try:
        return message.headers
    except NsqError:  # no JSON: the handler sees it, and can tell
        return {}


def _refuse_filters(config: ConnectionConfig, target: Target) -> None:
    """Raise ConfigError where a filter is set: only of messages with extended headers do servers filter any."""
    for name in ("desired_tag", "ext_filter"):
        value = getattr(config, name)
        if value:
            raise ConfigError(
                f"{name}={value!r}: topic {target.topic} has no extended headers on {target.address}, and every message"
                f" would come; create it with extend, or leave {name} out"
            )


def _tell_headerless(consumer: AnyConsumer, topic: str) -> None:
    """Say once of a topic without extended headers which options have no effect on it."""
    idle = [name for name in _OF_HEADERS if getattr(consumer.config, name)]
    if idle and topic not in consumer.headerless:
        consumer.headerless.add(topic)
        consumer.logger.warning(
            "%s: has no effect on topic %s: its messages have no extended headers; the redesigned NSQ gives them to"
            " topics that are created with extend",
            ", ".join(idle), topic, extra=OPTION_IDLE,
        )  # fmt: skip


# Message bodies that a publisher compressed: youzan's Go client does, on topics with extended headers.
#
# The header ``nsq.client.compress`` names the codec, ``nsq.msg.size`` the size of the body before. Both come from the
# network: the size is checked against a limit before anything is decompressed, and no codec gives more than that.


def is_compressed(message: Message) -> bool:
    """Whether its headers may say so; cheap, and now and then wrong for a header that holds the name as a value."""
    return message.ext is not None and _CODEC_MARK in message.ext


def decompressed(message: Message, limit: int) -> Message:
    """Return the message with its body decompressed; the message itself when its headers name no codec.

    Raises BodyInvalid if the body is not what its headers say, is larger than ``limit`` bytes, or needs a codec that
    is not known; RemoteProtocolError if the headers are not JSON.
    """
    headers = message.headers
    if CODEC_HEADER not in headers:
        return message
    codec = str(headers[CODEC_HEADER])
    if codec not in _CODECS:
        raise BodyInvalid(f"{CODEC_HEADER}={codec[:20]!r}: only 1 (gzip), 2 (snappy) and 3 (lz4) are known")
    size = _size(headers.get(SIZE_HEADER), limit)
    try:
        body = _CODECS[codec](message.body, size)
    except NsqError:
        raise
    except Exception as error:  # each library has exceptions of its own
        raise BodyInvalid(f"the body does not decompress ({CODEC_HEADER}={codec}): {error}") from error
    if len(body) != size:
        raise BodyInvalid(f"the body has {len(body)} bytes, its header {SIZE_HEADER} says {size}")
    return _with_body(message, body)


def _size(text: object, limit: int) -> int:
    digits = str(text)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise BodyInvalid(f"{SIZE_HEADER}={digits[:20]!r}: must be the size of the body before it was compressed")
    if int(digits) > limit:
        raise BodyInvalid(f"the body has {digits} bytes, max_decompressed_size={limit}")
    return int(digits)


def _gunzip(body: bytes, size: int) -> bytes:
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    data = reader.decompress(body, size + 1)
    if not reader.eof and len(data) <= size:
        raise BodyInvalid("the gzip body is cut short")
    return data


def _unsnappy(body: bytes, size: int) -> bytes:
    claimed = _varint(body)
    if claimed != size:  # what the library would take memory for
        raise BodyInvalid(f"the snappy body has {claimed} bytes, its header {SIZE_HEADER} says {size}")
    import snappy  # type: ignore[import-untyped]

    return bytes(snappy.uncompress(body))


def _varint(data: bytes) -> int:
    value = 0
    for position, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value
    raise BodyInvalid("the snappy body does not begin with its length")


def _unlz4(body: bytes, size: int) -> bytes:
    import lz4.block  # type: ignore[import-untyped]

    return bytes(lz4.block.decompress(body, uncompressed_size=size))


_CODECS: dict[str, Callable[[bytes, int], bytes]] = {GZIP: _gunzip, SNAPPY: _unsnappy, LZ4: _unlz4}


def _with_body(message: Message, body: bytes) -> Message:
    return Message(
        message.timestamp,
        message.attempts,
        message.id,
        body,
        ext=message.ext,
        ext_version=message.ext_version,
        offset=message.offset,
        raw_size=message.raw_size,
        responder=message.responder,
        received_at=message.received_at,
    )
