"""A channel of one partition: where it is in the log, what is in flight, tags, filters, traces.

youzan/nsq: nsqd/channel.go.
"""

from __future__ import annotations

import functools
import importlib
import logging
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.broker.client import TAG_KEY
from nsq_fast.broker.go import decode_json_header, translate_glob
from nsq_fast.broker.message import NotOwner
from nsq_fast.broker.queue import SAMPLE_OF, BaseChannel
from nsq_fast.broker.redesigned.log import PartitionLog, Record
from nsq_fast.log_events import BROKER_MESSAGE_TRACED

if TYPE_CHECKING:
    from nsq_fast.broker.redesigned.commands import NodeConnection

logger: logging.Logger = get_logger("nsq_fast.broker.redesigned.channel")


class Delivery(msgspec.Struct, eq=False, gc=False):
    """A record in one channel; the rest is as of ``message.Message``."""

    id: bytes
    record: Record
    attempts: int = 0
    priority: float = 0.0
    is_placed: bool = False
    delivered_at: float = 0.0


class Confirmed:
    """Which records of the log are done (youzan/nsq: nsqd/channel.go, ConfirmBackendQueue).

    Attributes:
        position: sequence of the first record that is not done.
        ahead: sequences of those behind it that are.
    """

    def __init__(self, position: int) -> None:
        self.position: int = position
        self.ahead: set[int] = set()

    def confirm(self, deliveries: Iterable[Delivery]) -> None:
        """The records of these are done."""
        ahead, position = self.ahead, self.position
        for delivery in deliveries:
            sequence = delivery.record.sequence
            if sequence > position:
                ahead.add(sequence)
            elif sequence == position:  # one before it was delivered twice, around a change of leader, and is done
                position += 1
                while position in ahead:
                    ahead.remove(position)
                    position += 1
        self.position = position

    def lacks(self, sequence: int) -> bool:
        """Whether a record is not done."""
        return sequence >= self.position and sequence not in self.ahead

    def limit(self, end: int) -> None:
        """Nothing from ``end`` on is done: the log ends there."""
        self.position = min(self.position, end)
        self.ahead = {sequence for sequence in self.ahead if sequence < end}

    def reset(self, position: int) -> None:
        self.ahead.clear()
        self.position = position


class DeliveryQueue:
    """The deliveries that come next, in order: those given back, and those still to be read from the log.

    While there are clients with tags, the first of them is for clients with its tag, or for those without a tag
    where no client has it, and no other goes out before it: it blocks even clients that are idle
    (youzan/nsq: nsqd/channel.go, messagePump). Where it ``is_kind`` a message passes
    those for clients with another tag, but not on an ordered channel.
    """

    def __init__(self, log: PartitionLog, confirmed: Confirmed, *, is_kind: bool) -> None:
        self._log = log
        self._confirmed = confirmed
        self._is_kind = is_kind
        self._cursor = log.end
        # Before this sequence some records were done already when the cursor was set back.
        self._reread_until = log.end
        self._waiting: deque[Delivery] = deque()
        self._tags: set[str] = set()

    @property
    def has_tags(self) -> bool:
        return bool(self._tags)

    def __len__(self) -> int:
        """How many there are, counting what is not read yet."""
        return self._log.end - self._cursor + len(self._waiting)

    def has_ready(self, tag: str, *, is_ordered: bool) -> bool:
        if not self._tags:
            return bool(self._waiting) or self._cursor < self._log.end
        if self._is_kind and not is_ordered:
            return self._cursor < self._log.end or any(self._tag_of(each) == tag for each in self._waiting)
        head = self._head()
        return head is not None and self._tag_of(head) == tag

    def take(self, tag: str, count: int, *, is_ordered: bool) -> list[Delivery]:
        """Up to ``count`` deliveries for a client with this tag."""
        if self._tags:
            return self._take_tagged(tag, count, can_pass=self._is_kind and not is_ordered)
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        if len(taken) < count:
            taken += [Delivery(record.id, record) for record in self._read(count - len(taken))]
        return taken

    def _take_tagged(self, tag: str, count: int, *, can_pass: bool) -> list[Delivery]:
        taken: list[Delivery] = []
        passed: list[Delivery] = []
        while len(taken) < count and (head := self._head()) is not None:
            is_wanted = self._tag_of(head) == tag
            if not is_wanted and not can_pass:
                break
            (taken if is_wanted else passed).append(self._waiting.popleft())
        self.put_first(passed)
        return taken

    def _head(self) -> Delivery | None:
        if not self._waiting:
            self._waiting.extend(Delivery(record.id, record) for record in self._read(1))
        return self._waiting[0] if self._waiting else None

    def _read(self, count: int) -> list[Record]:
        while records := self._log.read(self._cursor, count):
            first, self._cursor = records[0].sequence, records[-1].sequence + 1
            if first >= self._reread_until:
                return records
            ahead = self._confirmed.ahead
            if left := [record for record in records if record.sequence not in ahead]:
                return left
        return []

    def _tag_of(self, delivery: Delivery) -> str:
        tag = tag_of(delivery.record)
        return tag if tag in self._tags else ""

    def put_back(self, deliveries: Iterable[Delivery]) -> None:
        """Deliver these again, behind what waits."""
        self._waiting.extend(deliveries)

    def put_first(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver these again, in their order, before what waits."""
        self._waiting.extendleft(reversed(deliveries))

    def follow_tags(self, tags: Iterable[str]) -> None:
        """The clients have these tags now."""
        self._tags = {tag for tag in tags if tag}

    def rewind(self) -> None:
        """Deliver again what is not done."""
        self._waiting.clear()
        self._reread_until = self._cursor
        self._cursor = self._confirmed.position

    def go_to(self, position: int) -> None:
        self._waiting.clear()
        self._cursor = self._reread_until = position

    def follow(self, log: PartitionLog) -> None:
        """Read another log, which is that of the new leader; ``rewind`` or ``go_to`` comes next."""
        self._log = log
        self._cursor = min(self._cursor, log.end)


# --- what decides whether a client gets a message of an ext topic ----------------------------------------------------
# Tags, and the four types of ext filters.
# Keys of filters are paths: a dot means nesting. Only values that are strings can match, and messages without a JSON
# header never do (so an inverse filter lets them through). Regular expressions and globs are matched by RE2, which
# reads what Go's regexp reads and takes time in proportion to the text, whatever the pattern: Python's ``re`` needs
# 10.8 s for ``(a+)+$`` and 27 a's, in which no server of the process answers.


EXACT, REGEXP, GLOB, LIST = 1, 2, 3, 4

# RE2 knows one escape that Go refuses, \C, a byte. A quotation may hold it.
_ESCAPES = re.compile(r"\\Q.*?(?:\\E|\Z)|\\.", re.DOTALL)
_SURROGATES = re.compile("[\ud800-\udfff]")

Matches = Callable[[Record], bool]


class FilterItem(msgspec.Struct, omit_defaults=True):
    filter_ext_key: str = ""
    filter_data: str = ""


class FilterRequest(msgspec.Struct, omit_defaults=True):
    """``ext_filter`` of IDENTIFY."""

    type: int = 0
    inverse: bool = False
    filter_ext_key: str = ""
    filter_data: str = ""
    filter_data_list: list[FilterItem] | None = None


def make_filter(request: FilterRequest | None) -> Matches | None:
    """The filter as a predicate; None when there is none, or one that is invalid: as the server, we ignore it."""
    if request is None or not request.filter_ext_key:
        return None
    match = _list_matcher(request) if request.type == LIST else _single_matcher(request)
    if match is None:
        return None
    inverse = request.inverse
    return lambda record: _matches(match, record) is not inverse


def missing_package(request: FilterRequest | None) -> str:
    """What to tell a client whose filter needs a package that is not installed; empty where all is well."""
    if request is None or request.type not in (REGEXP, GLOB):
        return ""
    try:
        _re2()
    except ImportError:
        return "a filter with a pattern needs google-re2 in the embedded server: pip install 'nsq-fast[filters]'"
    return ""


def tag_of(record: Record) -> str:
    if TAG_KEY.encode() not in record.ext:
        return ""
    value = decode_header(record.header).get(TAG_KEY)
    return value if isinstance(value, str) else ""


@functools.lru_cache(maxsize=1024)
def decode_header(header: bytes) -> dict[str, Any]:
    """An ext header as a mapping; an empty one for JSON that is no object."""
    decoded = decode_json_header(header) if header else {}
    return decoded if isinstance(decoded, dict) else {}


def _matches(match: Callable[[dict[str, Any]], bool], record: Record) -> bool:
    return bool(record.header) and match(decode_header(record.header))


def _single_matcher(request: FilterRequest) -> Callable[[dict[str, Any]], bool] | None:
    key, data = request.filter_ext_key, request.filter_data
    if not data:
        return None
    if request.type == EXACT:
        return lambda header: _value(header, key) == data
    try:
        find = {REGEXP: _regexp, GLOB: _glob}[request.type](data)
    except (KeyError, ValueError, _re2().error):
        return None
    return lambda header: find(_SURROGATES.sub("\ufffd", _value(header, key) or "")) is not None


def _regexp(pattern: str) -> Any:
    """What finds a regular expression of Go in a text; an error of RE2, or ValueError, where Go refuses it."""
    if r"\C" in _ESCAPES.findall(pattern):
        raise ValueError(f"regexp {pattern!r}: Go has no \\C")
    return _compiled(pattern).search


def _glob(pattern: str) -> Any:
    return _compiled(translate_glob(pattern)).fullmatch


def _compiled(pattern: str) -> Any:
    options = _re2().Options()
    options.log_errors = False  # on stderr; a pattern that is refused is no news of the server's
    return _re2().compile(_SURROGATES.sub("\ufffd", pattern), options)


def _re2() -> Any:
    return importlib.import_module("re2")


def _list_matcher(request: FilterRequest) -> Callable[[dict[str, Any]], bool] | None:
    items = request.filter_data_list or []
    if not items or not all(item.filter_ext_key and item.filter_data for item in items):
        return None
    combine = {"all": all, "any": any}.get(request.filter_ext_key)
    if combine is None:
        return lambda header: False
    return lambda header: combine(_value(header, item.filter_ext_key) == item.filter_data for item in items)


def _value(header: dict[str, Any], path: str) -> str | None:
    value: Any = header
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


# --- what a node writes to its log of the messages that are traced ---------------------------------------------------
# A message is traced when it has a trace id, when its topic is traced at the node that stores it, or when its channel
# is traced at the node that delivers it. The lines are those of the real server (youzan/nsq: nsqd/tracer.go,
# LogMsgTracer); ``nsq-fast trace-report`` reads both.


SLOW = 1.0
"""Seconds until FIN from which on it is logged as slow."""
_NANOSECONDS = 1_000_000_000


class Trace:
    """What one node logs of the messages of a partition that it leads.

    Attributes:
        is_on: whether it traces the messages that are published.
        channels: names of those whose deliveries it traces.
        slow_channels: names of those where it logs a FIN that took long.
    """

    def __init__(self, topic: str, number: int) -> None:
        self._topic = topic
        self._number = number
        self.is_on = False
        self.channels: set[str] = set()
        self.slow_channels: set[str] = set()

    def published(self, records: Iterable[Record], client: str | None = None) -> None:
        """Messages have been stored; or the command of a client, given by its address, has stored them."""
        for record in records:
            if self.is_on or record.trace_id:
                place = f"topic {self._topic}-{self._number} trace id {record.trace_id}: message {record.internal_id}"
                now, count = time.time_ns(), record.sequence + 1
                if client is None:
                    what = f"( 0) put PUB at offset: {record.offset}, current count: {count} at time {now}, delayed: 0"
                else:
                    what = f" put success from client {client} at offset: {record.offset}, at time {now}"
                _write(place + what)

    def follows(self, log: PartitionLog) -> bool:
        """Whether anything of the deliveries of a log may have to be logged."""
        return log.has_traced or bool(self.channels or self.slow_channels)

    def traced(self, channel: str, deliveries: Iterable[Delivery]) -> list[Delivery]:
        is_on = channel in self.channels
        return [delivery for delivery in deliveries if is_on or delivery.record.trace_id]

    def log(
        self, channel: str, state: str, delivery: Delivery, client: Any = None, cost: float | None = 0.0, id: int = 0
    ) -> None:
        """Log a state of a delivery, in the server's word.

        Args:
            client: who has brought it about, or its address; by default the server.
            cost: in seconds; None: since the message was published.
            id: of the client while the message is in flight to it.
        """
        now, record = time.time_ns(), delivery.record
        nanoseconds = now - record.timestamp if cost is None else round(cost * _NANOSECONDS)
        due = now + round((delivery.priority - time.monotonic()) * _NANOSECONDS) if delivery.priority else 0
        address = "0" if client is None else getattr(client, "remote_address", client)
        _write(
            f"topic {self._topic} channel {channel} trace id {record.trace_id}: message {record.internal_id}"
            f" (ts: {record.timestamp}, offset: {record.offset}, pri:{due})"
            f" consume state {state} from client {address}({id}) at time: {now} cost: {nanoseconds},"
            f" attempt: {delivery.attempts}"
        )


def _write(line: str) -> None:
    logger.info("[TRACE] %s", line, extra=BROKER_MESSAGE_TRACED)


MAX_ATTEMPTS = 4000
_MAX_REQUEUES = 2000
_MANY_REQUEUES = 100
_REQUEUE_PAUSE = 0.1


class PartitionChannel(BaseChannel[Delivery]):
    """One channel of a partition, which reads the log as clients ask, from the end on.

    youzan/nsq: nsqd/channel.go. ``confirmed`` is where it would go on after a change of leader: everything before it is
    done. An *ordered* channel has one message in flight at most, over all its clients. On an ext topic messages with a
    tag go to clients with that tag while there are any, and clients may have a filter: what it keeps out is done for
    the whole channel. What a channel is done with is known to every replica in sync, so that it belongs to the
    partition here, not to a node; ``interrupt`` is what a change of leader does to it.

    Attributes:
        confirmed: which records are done.
        is_ordered, is_skipped: its modes; a skipped channel is done with all that comes.
        trace: logs what becomes of traced messages.
    """

    _NOT_IN_FLIGHT = "Message ID not in flight"

    def __init__(
        self,
        name: str,
        log: PartitionLog,
        is_ordered: bool,
        on_unused: Callable[[], None],
        trace: Trace,
        *,
        is_kind: bool = False,
    ) -> None:
        super().__init__(name, on_unused)
        self.is_ordered: bool = is_ordered
        self.is_skipped: bool = False
        self.confirmed: Confirmed = Confirmed(log.end)
        self.trace = trace
        self._log = log
        self._queue = DeliveryQueue(log, self.confirmed, is_kind=is_kind)

    @property
    def depth(self) -> int:
        return self._log.end - self.confirmed.position - len(self.confirmed.ahead)

    # --- messages out ------------------------------------------------------------------------------------------------

    def deliver(self, client: NodeConnection, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on."""
        if self.is_skipped or not self.has_ready(client):
            return []
        if self.is_ordered:
            count = 1
        elif len(self.clients) > 1:
            count = min(count, len(self._queue) // len(self.clients) + 1)
        taken = self._queue.take(client.tag, count, is_ordered=self.is_ordered)
        if self._queue.has_tags:
            self.notify()  # the next message may be for others
        if sample_rate:
            taken = self._keep(taken, lambda _: random.randrange(SAMPLE_OF) <= sample_rate)
        if client.matches is not None:
            taken = self._keep(taken, client.matches)
        return self._start(taken, client)

    def _start(self, deliveries: list[Delivery], client: NodeConnection) -> list[bytes]:
        """Put messages in flight; their frames."""
        traced = self.trace.traced(self.name, deliveries) if self.trace.follows(self._log) else ()
        for delivery in traced:
            self.trace.log(self.name, "READ_REQ" if delivery.delivered_at else "READ_QUEUE", delivery, cost=None)
        now = time.monotonic()
        in_flight, ext, detail = client.in_flight, client.gets_ext, client.gets_detail
        in_flight.put(deliveries, now + in_flight.timeout)
        frames: list[bytes] = []
        for delivery in deliveries:
            delivery.delivered_at = now
            if delivery.attempts < MAX_ATTEMPTS:
                delivery.attempts += 1
            frames.append(delivery.record.frame(delivery.attempts, ext, detail))
        for delivery in traced:
            self.trace.log(self.name, "START", delivery, client, None, client.id)
        return frames

    def _keep(self, taken: list[Delivery], is_wanted: Matches) -> list[Delivery]:
        """Those of the deliveries that are wanted; the others are done."""
        kept: list[Delivery] = []
        unwanted: list[Delivery] = []
        for delivery in taken:
            (kept if is_wanted(delivery.record) else unwanted).append(delivery)
        self.confirmed.confirm(unwanted)
        return kept

    def has_ready(self, client: NodeConnection) -> bool:
        if self.is_skipped or (self.is_ordered and self.in_flight_count):
            return False
        return self._queue.has_ready(client.tag, is_ordered=self.is_ordered)

    def notify(self) -> None:
        """Wake those in line as far as there are messages for them."""
        if self.is_skipped:
            self.set_position(self._log.end)
        super().notify()

    def _count_for_waiting(self) -> int:
        if self._queue.has_tags:
            return len(self._waiting)  # who gets the next message depends on its tag
        return 1 if self.is_ordered else len(self._queue)

    def put_back(self, messages: Sequence[Delivery]) -> None:
        self._queue.put_back(messages)

    def _timed_out(self, messages: Sequence[Delivery], client: NodeConnection) -> None:
        """That is logged of all messages, traced or not."""
        for delivery in messages if logger.isEnabledFor(logging.INFO) else ():
            self._trace("REQ", [delivery])
            self.trace.log(self.name, "TIMEOUT", delivery, client, time.monotonic() - delivery.delivered_at)

    def _trace(self, state: str, deliveries: Iterable[Delivery], client: Any = None) -> None:
        for delivery in self.trace.traced(self.name, deliveries):
            self.trace.log(self.name, state, delivery, client)

    def _pop_deferred(self, now: float, wall_now: float) -> list[Delivery]:
        due = self.deferred.pop_due(now)
        for delivery in self.trace.traced(self.name, due):
            self._trace("REQ", [delivery])
            self.trace.log(self.name, "DELAY_TIMEOUT", delivery, "", time.monotonic() - delivery.delivered_at)
        return due

    # --- FIN, REQ ----------------------------------------------------------------------------------------------------

    def finish(self, client: NodeConnection, ids: list[bytes], *, is_internal: bool = False) -> list[bytes]:
        """Done with messages; the ids of those that the client has not got in flight. A trace id is not looked at.

        Args:
            is_internal: whether something else than a command of the client does it.
        """
        in_flight = client.in_flight
        done: list[Delivery] = []
        missing = []
        for id in ids:
            delivery = in_flight.pop(id) or _pop_by_internal_id(client, id)
            if delivery is None:
                missing.append(id)
            else:
                done.append(delivery)
        self.confirmed.confirm(done)
        if self.trace.follows(self._log):
            self._trace_finished(done, client, is_internal)
        if self.is_ordered:
            self.notify()
        return missing

    def _trace_finished(self, done: list[Delivery], client: NodeConnection, is_internal: bool) -> None:
        now, traced = time.monotonic(), set(self.trace.traced(self.name, done))
        is_slow_told = self.name in self.trace.slow_channels
        for delivery in done:
            cost, actor = now - delivery.delivered_at, "" if is_internal else client
            if delivery in traced:
                self.trace.log(self.name, "FIN_INTERNAL" if is_internal else "FIN", delivery, actor, cost, client.id)
            if cost >= SLOW and not is_internal and (delivery in traced or is_slow_told):
                self.trace.log(self.name, "SLOW_ACK", delivery, actor, cost, client.id)

    def finish_anywhere(self, internal_id: int) -> bool:
        """Finish a message, whichever client has it in flight; False if no client has."""
        half = internal_id.to_bytes(8, "big", signed=True)
        for client in list(self.clients.values()):
            if not self.finish(client, [half + bytes(8)], is_internal=True):
                client.wake()
                return True
        return False

    def requeue(self, client: NodeConnection, id: bytes, delay: float) -> None:
        """Give a message back, ready after ``delay`` seconds; NotOwner when that is refused.

        An ordered channel ignores what asks for a delay: the message stays in flight until it times out.
        """
        if self.is_ordered and delay > 0:
            return
        held = client.in_flight.messages.get(id)
        if held is not None and not delay and _is_requeued_too_much(held):
            raise NotOwner("Message too much requeue")
        delivery = client.in_flight.pop(id) or _pop_by_internal_id(client, id)
        if delivery is None:
            raise self.not_owner(id)
        self.requeue_count += 1
        if delay > 0:
            self.deferred.put((delivery,), time.monotonic() + delay)
            for each in self.trace.traced(self.name, (delivery,)):
                self.trace.log(self.name, "REQ_DEFER", each, client, id=client.id)
            return
        self._trace("REQ", [delivery], client)
        self._queue.put_back([delivery])
        self.notify()

    # --- clients -----------------------------------------------------------------------------------------------------

    def add_client(self, client: NodeConnection, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel has ``limit`` clients."""
        super().add_client(client, limit)
        self._follow_tags()

    def _follow_tags(self) -> None:
        self._queue.follow_tags(client.tag for client in self.clients.values())

    def _left(self, client: NodeConnection) -> None:
        """What it has in flight is ready again at once, as if it had not been delivered.

        youzan/nsq: nsqd/channel.go, RequeueClientMessages.
        """
        returned = sorted(client.in_flight, key=lambda delivery: delivery.record.sequence)
        client.in_flight.clear()
        for delivery in returned:
            delivery.attempts -= 1
        self._follow_tags()
        if self.trace.follows(self._log):
            self._trace("REQ", returned, client)
        self._queue.put_first(returned)

    def interrupt(self, log: PartitionLog | None = None) -> None:
        """The leader has changed: clients are disconnected, and messages that are not done are delivered again.

        Args:
            log: that of the new leader, where there is one.
        """
        self.disconnect()
        self._forget_deliveries()
        if log is not None:
            self._log = log
            self.confirmed.limit(log.end)
            self._queue.follow(log)
        self._queue.rewind()

    def _forget_deliveries(self) -> None:
        self.forget_in_flight()
        self.deferred.clear()

    # --- administration ----------------------------------------------------------------------------------------------

    def set_ordered(self, is_ordered: bool) -> None:
        """Change the mode; clients are disconnected when the channel becomes unordered."""
        if self.is_ordered and not is_ordered:
            self.disconnect()
        self.is_ordered = is_ordered

    def set_skipped(self, is_skipped: bool) -> None:
        """Drop what is there and what comes, or deliver what comes from now on."""
        self.is_skipped = is_skipped
        if is_skipped:
            self.empty()

    def empty(self) -> None:
        self.set_position(self._log.end)

    def set_position(self, sequence: int) -> None:
        """Go on at a record, forward or back; what is in flight is forgotten."""
        self._forget_deliveries()
        position = max(self._log.first, min(sequence, self._log.end))
        self.confirmed.reset(position)
        self._queue.go_to(position)
        self.wake()


def _pop_by_internal_id(client: NodeConnection, id: bytes) -> Delivery | None:
    for delivery in client.in_flight:
        if delivery.id[:8] == id[:8]:
            return client.in_flight.pop(delivery.id)
    return None


def _is_requeued_too_much(delivery: Delivery) -> bool:
    if delivery.attempts >= _MAX_REQUEUES:
        return True
    return delivery.attempts > _MANY_REQUEUES and time.monotonic() - delivery.delivered_at < _REQUEUE_PAUSE
