"""What moves in a consumer or a producer, and why nothing does: one reason of a closed list.

A client may be healthy, connected, and do nothing: nothing waits, or RDY is 0, or every handler hangs. All that is
known of that stands in several places, which this module reads, and changes nothing. No message costs anything for it.

    reason              what it says of a consumer                              and of a producer
    closing             it is closing                                           the same
    blocked_message     an ordered partition waits for one message that fails
    handlers_busy       handlers run, and hold what was received
    awaiting_answers    asynchronous messages were not answered                 a server owes its reply
    backoff             handlers failed, and it pauses                          a publish is tried again later
    max_in_flight_zero  RDY is 0: ``pause()``, max_in_flight=0, or not its turn
    paused_by_server    the channel, or the topic, is paused there
    server_not_pushing  messages wait there, and none comes although RDY asks
    filtered            a filter leaves out all that comes
    sampled_out         ``sample_rate`` leaves out all that comes
    no_leader           a partition has no leader                               the same
    lookup_failing      no nsqlookupd answers                                   the same
    lookup_empty        no nsqlookupd names an nsqd                             the same
    zone_filter         ``discovery_filter`` leaves out every nsqd              the same
    not_connected       there is no connection                                  the same
    idle                nothing waits, as far as is known                       nothing waits

What waits at an nsqd only the nsqd can say. It is asked over HTTP, where lookup has told where that is: by a call of
``progress`` that finds nothing coming, at most every ``ASK_EVERY`` seconds. The call does not wait for the answer,
which the next one shows. An nsqd that says twice that messages wait, and sends none, gets another connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from nsq_fast._codec import Message
from nsq_fast._record import Record
from nsq_fast.errors import NsqError, counted, seconds
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import UNREADABLE
from nsq_fast.protocol.topology import Target, is_complete, unwrap

from .routing import PartitionQueue
from .workers import Worker

if TYPE_CHECKING:
    from nsq_fast.protocol.topology import Topology

    from .consumer import AnyConsumer
    from .http import HttpClient
    from .lookup import LookupPoller
    from .loop import Task
    from .producer import ProducerCore
    from .publishes import Publish
    from .subscriptions import Subscriber, Subscriptions, TopicSubscriptions

Reason: TypeAlias = Literal[
    "closing",
    "blocked_message",
    "handlers_busy",
    "awaiting_answers",
    "backoff",
    "max_in_flight_zero",
    "paused_by_server",
    "server_not_pushing",
    "filtered",
    "sampled_out",
    "no_leader",
    "lookup_failing",
    "lookup_empty",
    "zone_filter",
    "not_connected",
    "idle",
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Where parts of a client have different ones, that of the whole is the one that comes first here."""

Finding: TypeAlias = tuple[Reason | None, str]
"""A reason and what there is to say of it, for people; None: it moves."""

MOVES: Finding = None, ""
MOVING = 1.0
"""Something that happened so many seconds ago, or less, shows that work is being done."""

FILTERED_FOR = 15.0
"""Seconds for which a delivery that was dropped as a whole says why handlers get nothing."""

ASK_EVERY = 15.0
"""Seconds between two questions to an nsqd about one topic, at least."""

RENEW_AFTER = 2
"""An nsqd that says so many times in a row that messages wait, and sends none, is subscribed to anew."""

MOST_FRAMES = 20
MOST_BYTES = 16 * 1024 * 1024
"""Of an answer. A server of the redesigned NSQ lists the clients of each partition."""


class HandlerProgress(Record, frozen=True):
    """The handler that has run longest, of those that run now.

    Attributes:
        age: seconds since it began.
        message: the id of its message; of a batch, of the first.
        stack: where it is now, as a traceback shows it; empty in its first second, and where that cannot be seen.
    """

    age: float
    message: bytes
    stack: str


class ConnectionProgress(Record, frozen=True):
    """One nsqd of a topic, or one partition that it leads.

    Attributes:
        reason: why nothing is done; None while messages come or are finished.
        detail: more of that, for people.
        since_delivery, since_finish: seconds since messages came, and since a FIN left; None: never.
        rdy: last sent; in_flight: received and not answered, of which ``unstarted`` wait for a handler.
        depth: messages that wait in the channel, as the nsqd said last; None: it was not asked since messages came.
        renewed: how many times the connection was made anew because the nsqd sent nothing of what waited.
    """

    address: Address
    partition: int | None
    is_connected: bool
    reason: Reason | None
    detail: str
    since_delivery: float | None
    since_finish: float | None
    rdy: int
    in_flight: int
    unstarted: int
    depth: int | None
    renewed: int


class TopicProgress(Record, frozen=True):
    """One topic.

    Attributes:
        reason, detail: why nothing is done, or why a part of the topic is not reached although the rest moves.
    """

    topic: str
    reason: Reason | None
    detail: str
    connections: tuple[ConnectionProgress, ...]


class ConsumerProgress(Record, frozen=True):
    """What moves in a consumer.

    Attributes:
        reason: why nothing is done, one of ``REASONS``; None while messages come or are finished.
        detail: more of that, for people.
        handler: the one that has run longest; None while none runs.
    """

    reason: Reason | None
    detail: str
    topics: tuple[TopicProgress, ...]
    handler: HandlerProgress | None


class PublishProgress(Record, frozen=True):
    """The publishes to one topic that have not ended.

    Attributes:
        pending: how many there are, a ``multipublish`` counted once for each partition.
        oldest: seconds since the call of the oldest.
        reason: why that one waits; None while it is younger than a second.
        detail: more of that, for people.
    """

    topic: str
    pending: int
    oldest: float
    reason: Reason | None
    detail: str


class ProducerProgress(Record, frozen=True):
    """What moves in a producer.

    Attributes:
        pending: publishes that have not ended.
        oldest: seconds since the call of the oldest; None without any.
        reason: why publishes wait, one of ``REASONS``, ``idle`` without any; None while each is younger than a second.
        detail: more of that, for people.
    """

    pending: int
    oldest: float | None
    reason: Reason | None
    detail: str
    topics: tuple[PublishProgress, ...]


def _whole(findings: Iterable[Finding]) -> Finding:
    """What is said of the whole: nothing while a part moves, else what comes first in ``REASONS``."""
    known = [(REASONS.index(reason), reason, detail) for reason, detail in findings if reason is not None]
    if not known:
        return MOVES
    _, reason, detail = min(known, key=lambda each: each[0])
    return reason, detail


def _missing(topology: Topology, chosen: Iterable[int] | None) -> str:
    """The partitions without a leader, for people."""
    assert topology.meta is not None
    known = {*topology.partitions, *topology.excluded_partitions}
    wanted = range(topology.meta.partition_num) if chosen is None else chosen
    return ", ".join(str(number) for number in wanted if number not in known)


def _lack(
    lookup: LookupPoller, topic: str, chosen: Sequence[int] | None, *, is_reached: bool
) -> tuple[Reason, str] | None:
    """Why lookup names nobody for a topic, or for a part of it; ``is_reached``: there is a connection all the same."""
    topology, failure = lookup.topology(topic), lookup.failure()
    if not is_reached and failure and not lookup.answering():
        return "lookup_failing", failure
    if topology is None:
        return None if is_reached else ("not_connected", "no nsqlookupd has answered yet")
    if topology.meta is not None and not is_complete(topology, chosen):
        return "no_leader", f"partitions without a leader: {_missing(topology, chosen)}"
    if not topology.is_empty or is_reached:
        return None
    if topology.excluded:
        return "zone_filter", topology.problem
    return "lookup_empty", topology.problem or "no nsqlookupd names an nsqd"


class _Channel(msgspec.Struct):
    channel_name: str = ""
    depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    message_count: int = 0
    paused: bool = False


class _Topic(msgspec.Struct):
    topic_name: str = ""
    topic_partition: str = ""
    paused: bool = False
    channels: list[_Channel] | None = None


class _Stats(msgspec.Struct):
    # nsqio/nsq: nsqd/http.go, doStats; youzan/nsq: nsqdserver/http.go, doStats
    topics: list[_Topic] | None = None


class ChannelWord(NamedTuple):
    """What an nsqd said of the channel.

    Attributes:
        at: when, ``time.monotonic``.
        held: of the redesigned NSQ, messages that others have in flight, or that are deferred.
        has_grown: whether messages were published since the word before, and none came here.
        unpushed: how many times in a row messages waited that RDY had asked for.
    """

    at: float
    depth: int
    held: int
    message_count: int
    is_paused: bool
    has_grown: bool
    unpushed: int


class ConsumerObserver:
    """Says what moves in one consumer. Any thread may call ``look``; servers are asked in that of the consumer only."""

    def __init__(self, consumer: AnyConsumer, subscriptions: Subscriptions) -> None:
        self._consumer = consumer
        self._subscriptions = subscriptions
        self._words: dict[Target, ChannelWord] = {}
        self._asked_at: dict[tuple[Address, str], float] = {}
        self._asking: Task | None = None

    def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._asking.cancel()
            self._asking = None

    def look(self) -> ConsumerProgress:
        """How it is now."""
        consumer, now = self._consumer, monotonic()
        running = list(_running(consumer))
        topics = tuple(self._topic(topic, running, now) for topic in self._subscriptions.each_topic())
        reason, detail = self._reason(topics)
        if consumer.is_running and consumer.loop.get_ident() == consumer.ident:
            self._ask(now)
        oldest = min(running, key=lambda each: each[0].began, default=None)
        handler = None
        if oldest is not None:
            worker, message = oldest
            age = max(0.0, now - worker.began)
            handler = HandlerProgress(age, message.id, _stack(worker.frames()) if age >= MOVING else "")
            if reason == "handlers_busy":
                detail += f"; the oldest for {seconds(handler.age)}"
        return ConsumerProgress(reason, detail, topics, handler)

    def _reason(self, topics: tuple[TopicProgress, ...]) -> Finding:
        consumer, lookup = self._consumer, self._subscriptions.lookup
        if consumer._is_closing:
            return "closing", "close() was called, or it has failed"
        if not consumer.is_running:
            return "not_connected", "it is not started"
        if not topics:  # of a pattern
            failure = "" if lookup is None or lookup.answering() else lookup.failure()
            return ("lookup_failing", failure) if failure else ("lookup_empty", "no topic that is listed matches")
        connections = [each for topic in topics for each in topic.connections]
        if any(each.reason is None for each in connections):
            return MOVES
        parts: list[TopicProgress | ConnectionProgress] = [*topics, *connections]
        return _whole((each.reason, each.detail) for each in parts)

    def _topic(self, topic: TopicSubscriptions, running: list[tuple[Worker, Message]], now: float) -> TopicProgress:
        subscribers, lookup = list(topic), self._subscriptions.lookup
        connections = tuple(self._connection(each, running, now) for each in subscribers)
        is_reached = any(each.is_connected for each in connections)
        chosen = self._consumer.config.partitions
        found = None if lookup is None else _lack(lookup, topic.topic, chosen, is_reached=is_reached)
        reason, detail = found or MOVES
        if found is None and not connections:
            reason, detail = "not_connected", "no nsqd is known"
        elif found is None and all(each.reason is not None for each in connections):
            reason, detail = _whole((each.reason, each.detail) for each in connections)
        elif found is None:
            blocked = [(each.reason, each.detail) for each in connections if each.reason == "blocked_message"]
            reason, detail = _whole(blocked)
        return TopicProgress(topic.topic, reason, detail, connections)

    def _connection(
        self, subscriber: Subscriber, running: list[tuple[Worker, Message]], now: float
    ) -> ConnectionProgress:
        stats, subscription = subscriber.stats(), subscriber.subscription
        delivered_at = last_delivery(subscriber)
        word = self._words.get(subscriber.target)
        finished_at = subscriber.finished_at
        reason: Reason | None
        if self._consumer._is_closing or subscription.is_ending:
            reason, detail = "closing", "no message is asked for any more"
        elif not stats.is_connected:
            why = subscriber.refusal or subscriber.last_failure or subscription.connection.closed_error
            reason, detail = "not_connected", str(why)
            if subscriber.next_attempt_at > now:
                detail += f"; the next attempt is in {seconds(subscriber.next_attempt_at - now)}"
        elif subscription.dropped_at and now - subscription.dropped_at < FILTERED_FOR:
            reason, detail = "filtered", "all that came last has the header skip_header, or is a copy"
        elif now - max(delivered_at, finished_at) < MOVING:
            reason, detail = MOVES
        else:
            reason, detail = self._why_still(subscriber, running, now)
        return ConnectionProgress(
            address=stats.address,
            partition=stats.partition,
            is_connected=stats.is_connected,
            reason=reason,
            detail=detail,
            since_delivery=now - delivered_at if delivered_at else None,
            since_finish=now - finished_at if finished_at else None,
            rdy=stats.rdy,
            in_flight=stats.in_flight,
            unstarted=stats.unstarted,
            depth=word.depth if word is not None and word.at > delivered_at else None,
            renewed=subscriber.renewed,
        )

    def _why_still(self, subscriber: Subscriber, running: list[tuple[Worker, Message]], now: float) -> Finding:
        """Why nothing is done on a connection that is there."""
        consumer, subscription = self._consumer, subscriber.subscription
        connection, in_flight = subscription.connection, subscription.connection.in_flight
        ordered, waiting = consumer.ordered, len(subscription.inbound.waiting)
        workers = subscriber.pool.workers
        own = [
            message
            for worker, message in running
            if message.responder is connection or (worker in workers and not subscriber.is_pool_shared)
        ]
        if ordered.holds(connection) or (subscription.is_ordered and any(map(ordered.is_blocked, own))):
            return "blocked_message", "the partition waits for a message that failed"
        if own or (running and waiting):
            return (
                "handlers_busy",
                f"running: {counted(len(running), 'handler')}; waiting for one: {counted(waiting, 'message')}",
            )
        if waiting:
            return "handlers_busy", f"nobody takes {counted(waiting, 'message')}"
        if in_flight:
            return "awaiting_answers", f"{in_flight} asynchronous messages are not answered"
        flow, backoff, rdy = consumer.flow, subscriber.backoff, subscription.share.rdy
        if flow.is_paused:
            return "max_in_flight_zero", "pause() was called"
        if flow.max_in_flight == 0:
            return "max_in_flight_zero", "max_in_flight is 0"
        if backoff.is_paused(now):
            return "backoff", f"level {backoff.level}, for {seconds(backoff.until - now)} more"
        if backoff.is_on and rdy == 0:
            return "backoff", f"level {backoff.level}: another connection has the one message that is tried"
        if rdy > 0:
            return self._why_silent(subscriber)
        if running:
            return "handlers_busy", f"max_in_flight={flow.max_in_flight} is held by {counted(len(running), 'handler')}"
        if consumer.total_in_flight or consumer.pools.orphaned:
            return "awaiting_answers", f"messages that are not answered hold all of max_in_flight={flow.max_in_flight}"
        return "max_in_flight_zero", f"RDY is 0: max_in_flight={flow.max_in_flight} is shared, and it is another's turn"

    # What the nsqds say

    def _why_silent(self, subscriber: Subscriber) -> Finding:
        """Why nothing comes although RDY asks for messages."""
        word, options = self._words.get(subscriber.target), self._consumer.connection_config
        if word is None or word.at <= last_delivery(subscriber):
            return "idle", "RDY asks for messages, and the server sends none"
        if word.is_paused:
            return "paused_by_server", f"the channel holds {counted(word.depth, 'message')}"
        if (options.desired_tag or options.ext_filter) and (word.depth or word.has_grown):
            return "filtered", "the server sends what desired_tag or ext_filter asks for, and there was none"
        if word.unpushed:
            return "server_not_pushing", f"the channel holds {counted(word.depth, 'message')}, and none comes"
        if options.sample_rate and word.has_grown:
            return "sampled_out", f"messages were published, and sample_rate={options.sample_rate} left them out"
        if word.held:
            elsewhere = f"in flight to others, or deferred: {counted(word.held, 'message')}"
            if subscriber.subscription.is_ordered:
                return "blocked_message", f"{elsewhere}; the partition sends no other before they are answered"
            return "idle", elsewhere
        return "idle", "the server says that nothing waits"

    def _ask(self, now: float) -> None:
        """Ask the nsqds from which nothing comes, unless that is being done, or was a moment ago."""
        if self._asking is not None and not self._asking.ready():
            return
        self._asked_at = {key: at for key, at in self._asked_at.items() if now - at < ASK_EVERY}
        present = {each.target for each in self._consumer.subscribers}
        self._words = {target: word for target, word in self._words.items() if target in present}
        due: dict[Address, dict[str, list[Subscriber]]] = {}
        for topic in self._subscriptions.each_topic():
            for each in topic:
                nsqd = topic.nsqd_of(each.target)
                if nsqd is None or nsqd.http is None or (nsqd.http, topic.topic) in self._asked_at:
                    continue
                if self._is_silent(each, now):
                    due.setdefault(nsqd.http, {}).setdefault(topic.topic, []).append(each)
        if due:
            self._asking = self._consumer.supervisor.job("nsq_fast progress", self._ask_all, due)

    @staticmethod
    def _is_silent(subscriber: Subscriber, now: float) -> bool:
        asks = subscriber.is_connected and subscriber.subscription.share.rdy > 0
        return asks and not subscriber.connection.in_flight and now - last_delivery(subscriber) >= MOVING

    async def _ask_all(self, due: dict[Address, dict[str, list[Subscriber]]]) -> None:
        from .http import Endpoint, HttpClient  # where nsqds are configured, none is asked

        timeout = self._consumer.lookup_config.lookupd_timeout
        for http, topics in due.items():
            with closing(HttpClient(Endpoint("http", http), timeout=timeout, max_reply_size=MOST_BYTES)) as client:
                for topic, subscribers in topics.items():
                    self._asked_at[http, topic] = monotonic()
                    with suppress(NsqError, *UNREADABLE):  # what it would have said is not known, and asked for later
                        self._take(await self._stats_of(client, topic), subscribers)

    async def _stats_of(self, client: HttpClient, topic: str) -> list[_Topic]:
        consumer = self._consumer
        query = {"format": "json", "topic": topic, "channel": consumer.channel, "include_clients": "false"}
        reply = await client.ask(consumer.loop, "GET", "/stats", {**query, "needClients": "false"})
        return msgspec.json.decode(unwrap(reply.body), type=_Stats).topics or []

    def _take(self, topics: list[_Topic], subscribers: list[Subscriber]) -> None:
        now = monotonic()
        for each in subscribers:
            target = each.target
            number = "" if target.partition is None else str(target.partition)
            for topic in topics:
                if topic.topic_name == target.topic and number in ("", topic.topic_partition):
                    for channel in topic.channels or ():
                        if channel.channel_name == self._consumer.channel:
                            self._heed(each, self._word(each, topic, channel, now))

    def _heed(self, subscriber: Subscriber, word: ChannelWord) -> None:
        self._words[subscriber.target] = word
        if word.unpushed >= RENEW_AFTER:
            del self._words[subscriber.target]  # of the new connection nothing is known
            subscriber.renew(
                f"the channel holds {counted(word.depth, 'message')}, and RDY {subscriber.connection.rdy} brings none"
            )

    def _word(self, subscriber: Subscriber, topic: _Topic, channel: _Channel, now: float) -> ChannelWord:
        before, options = self._words.get(subscriber.target), self._consumer.connection_config
        if before is not None and last_delivery(subscriber) >= before.at:
            before = None
        is_paused = channel.paused or topic.paused
        has_grown = before is not None and channel.message_count > before.message_count
        has_filter = bool(options.desired_tag or options.ext_filter)
        has_asked = self._is_silent(subscriber, now) and subscriber.subscription.share.turn_at + MOVING <= now
        depth, held = channel.depth, 0
        if topic.topic_partition:
            # All behind the last message before which none is missing an answer, whoever has it: youzan/nsq:
            # nsqd/channel.go, Depth. While others hold any, nobody can say how much is to be had.
            held = channel.in_flight_count + channel.deferred_count
            depth = max(0, depth - held)
        unpushed = 0
        if depth and not held and has_asked and not is_paused and not has_filter:
            unpushed = 1 if before is None else before.unpushed + 1
        return ChannelWord(now, depth, held, channel.message_count, is_paused, has_grown, unpushed)


def last_delivery(subscriber: Subscriber) -> float:
    """When messages came last, over all its connections, ``time.monotonic``; 0.0: never."""
    return max(subscriber.delivered_at, subscriber.connection.last_message_at)


def _running(consumer: AnyConsumer) -> Iterator[tuple[Worker, Message]]:
    """The workers that are in a handler, and its message, or the first of its batch."""
    for worker in list(consumer.pools.workers()):
        if messages := worker.in_hand():
            yield worker, messages[0]


def _stack(frames: list[FrameType]) -> str:
    """The part of a stack that is the program's, as text: what the client calls."""
    import traceback

    start = next((number for number, frame in enumerate(frames) if _is_ours(frame)), 0)
    while start < len(frames) and _is_ours(frames[start]):
        start += 1
    shown = ((frame, frame.f_lineno) for frame in frames[start:][-MOST_FRAMES:])
    return "".join(traceback.StackSummary.extract(shown).format())


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("nsq_fast.")


# Producers


def producer_progress(producer: ProducerCore) -> ProducerProgress:
    """How a producer is now."""
    sender, now = producer._sender, monotonic()
    pending: Iterable[Publish] = () if sender is None else sender.pending.publishes.copy()
    publishes = [publish for publish in pending if not publish.done]
    by_topic: dict[str, list[Publish]] = {}
    for publish in publishes:
        by_topic.setdefault(publish.topic, []).append(publish)
    topics = tuple(_of_publishes(producer, topic, found, now) for topic, found in by_topic.items())
    oldest = max((each.oldest for each in topics), default=None)
    reason, detail = _whole((each.reason, each.detail) for each in topics)
    if producer._is_closed:
        reason, detail = "closing", f"close() was called; not ended: {counted(len(publishes), 'publish', 'publishes')}"
    elif not producer.is_running:
        reason, detail = "not_connected", "it is not started"
    elif not topics:
        reason, detail = "idle", "no publish waits"
    return ProducerProgress(len(publishes), oldest, reason, detail, topics)


def _of_publishes(producer: ProducerCore, topic: str, publishes: list[Publish], now: float) -> PublishProgress:
    def age(publish: Publish) -> float:
        timeout = producer.config.publish_timeout if publish.timeout is None else publish.timeout
        return max(0.0, now - publish.deadline + timeout)

    first = max(publishes, key=age)
    oldest = age(first)
    reason, detail = MOVES if oldest < MOVING else _why_it_waits(producer, first)
    return PublishProgress(topic, len(publishes), oldest, reason, detail)


def _why_it_waits(producer: ProducerCore, publish: Publish) -> Finding:
    command, queue = publish.attempt, publish.destination
    if command is not None:
        return "awaiting_answers", f"no reply yet{f' from {command.conn.address}' if command.conn else ''}"
    nowhere = queue.why_nowhere(publish)
    if nowhere is not None:
        return _why_nowhere(producer, publish), str(nowhere)
    if publish.last_error is not None:
        return "backoff", f"it is tried again: {publish.failure}"
    if isinstance(queue, PartitionQueue) and queue.is_paused:
        return "backoff", f"an attempt to partition {queue.number} failed, and the next one comes later"
    return "awaiting_answers", "it waits for others of its topic, which were sent before"


def _why_nowhere(producer: ProducerCore, publish: Publish) -> Reason:
    sender, queue = producer._sender, publish.destination
    leader = queue.leader if isinstance(queue, PartitionQueue) else None
    if leader is not None:
        is_connected = any(link.address == leader for link in sender.pool.connected)
        return "awaiting_answers" if is_connected else "not_connected"
    lookup = sender.routing.lookup
    found = None if lookup is None else _lack(lookup, publish.topic, None, is_reached=False)
    if found is not None:
        return found[0]
    return "not_connected" if lookup is None or not isinstance(queue, PartitionQueue) else "no_leader"
