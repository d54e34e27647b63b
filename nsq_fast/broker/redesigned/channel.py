"""A channel of one partition: where it is in the log, what is in flight, and the clients that share it.

youzan/nsq: nsqd/channel.go.

The channel reads the log as clients ask. ``confirmed`` is where it would go on
after a change of leader: everything before it is done. An *ordered* channel has
one message in flight at most, over all its clients. On an ext topic messages
with a tag go to clients with that tag while there are any, and clients may have
a filter: what it keeps out is done for the whole channel.

What a channel is done with is known to every replica in sync, so that it belongs to
the partition here, not to a node; ``interrupt`` is what a change of leader does to it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

from nsq_fast.broker.errors import Exiting, NotOwner
from nsq_fast.broker.nsqd.channel import SAMPLE_OF
from nsq_fast.broker.nsqd.in_flight import InFlight, wake
from nsq_fast.names import is_ephemeral

from .delivery import Confirmed, Delivery, DeliveryQueue, SortedDeliveryQueue
from .filters import Matches
from .log import PartitionLog
from .tracing import Actor, DeliveryTrace

MAX_ATTEMPTS = 4000
_MAX_REQUEUES = 2000
_MANY_REQUEUES = 100
_REQUEUE_PAUSE = 0.1


class Consumer(Protocol):
    """A client that has subscribed.

    ``tag`` is empty without one; ``gets_ext`` and ``gets_detail`` say which layout its frames have.
    """

    id: int
    remote_address: str
    in_flight: InFlight[Delivery]
    tag: str
    matches: Matches | None
    gets_ext: bool
    gets_detail: bool

    def wake(self) -> None:
        """There may be something to do."""

    def limit_rdy(self, limit: int) -> None:
        """From now on it has no more messages in flight than this."""

    def close(self) -> None:
        """Disconnect."""

    def stats(self) -> dict[str, Any]:
        """Figures under the server's JSON names."""


class PartitionChannel:
    """One channel of a partition. It begins at the end of the log.

    Attributes:
        clients: by their ids.
        confirmed: which records are done.
        deferred: heap of (when it is ready, tie, message) of those that wait for their time.
        is_ordered, is_paused, is_skipped: its modes; a skipped channel is done with all that comes.
        trace: logs what becomes of traced messages.
    """

    def __init__(
        self,
        name: str,
        log: PartitionLog,
        is_ordered: bool,
        on_unused: Callable[[], None],
        trace: DeliveryTrace,
        *,
        is_kind: bool = False,
    ) -> None:
        self.name = name
        self.is_ordered = is_ordered
        self.is_ephemeral = is_ephemeral(name)
        self.is_paused = False
        self.is_skipped = False
        self.clients: dict[int, Consumer] = {}
        self.confirmed = Confirmed(log.end)
        self.requeue_count = 0
        self.timeout_count = 0
        self.trace = trace
        self._log = log
        self._on_unused = on_unused
        self._queue = (SortedDeliveryQueue if is_kind else DeliveryQueue)(log, self.confirmed)
        self.deferred: list[tuple[float, int, Delivery]] = []
        self._waiting: dict[Consumer, None] = {}
        self._ties = itertools.count()

    @property
    def depth(self) -> int:
        """Messages that are not done."""
        return self._log.end - self.confirmed.position - len(self.confirmed.ahead)

    @property
    def in_flight_count(self) -> int:
        """Messages delivered, and neither finished nor requeued."""
        return sum(len(client.in_flight) for client in self.clients.values())

    # --- messages out ------------------------------------------------------------------------------------------------

    def deliver(self, client: Consumer, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on."""
        if self.is_skipped or not self.has_ready(client):
            return []
        if self.is_ordered:
            count = 1
        elif len(self.clients) > 1:
            count = min(count, self._queue.untagged_count // len(self.clients) + 1)
        taken = self._queue.take(client.tag, count, is_ordered=self.is_ordered)
        if self._queue.has_tags:
            self.notify()  # the next message may be for others
        if sample_rate:
            taken = _keep(self.confirmed, taken, lambda _: random.randrange(SAMPLE_OF) <= sample_rate)
        if client.matches is not None:
            matches = client.matches
            taken = _keep(self.confirmed, taken, lambda delivery: matches(delivery.record))
        return _start(taken, client, self.trace if self.trace.follows(self._log) else None)

    def has_ready(self, client: Consumer) -> bool:
        """Whether there may be messages for a client right now."""
        if self.is_skipped or (self.is_ordered and self.in_flight_count):
            return False
        return self._queue.has_ready(client.tag, is_ordered=self.is_ordered)

    def wait(self, client: Consumer) -> None:
        """Put a client that is ready, and found nothing, in line."""
        self._waiting[client] = None

    def notify(self) -> None:
        """Wake those in line as far as there are messages for them."""
        if self.is_skipped:
            self.set_position(self._log.end)
        waiting = self._waiting
        if not waiting or self.is_paused:
            return
        count = 1 if self.is_ordered else self._queue.untagged_count
        if self._queue.has_tags:
            count = len(waiting)  # who gets the next message depends on its tag
        for client in list(itertools.islice(waiting, count)):
            del waiting[client]
            client.wake()

    # --- FIN, REQ, TOUCH ---------------------------------------------------------------------------------------------

    def finish(self, client: Consumer, ids: list[bytes], *, is_internal: bool = False) -> list[bytes]:
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
            actor = Actor("" if is_internal else client.remote_address, client.id)
            self.trace.finished(done, actor, is_internal=is_internal)
        if self.is_ordered:
            self.notify()
        return missing

    def requeue(self, client: Consumer, id: bytes, delay: float) -> None:
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
            raise not_owner(self, id)
        self.requeue_count += 1
        if delay > 0:
            delivery.priority = time.monotonic() + delay
            heapq.heappush(self.deferred, (delivery.priority, next(self._ties), delivery))
            self.trace.deferred(delivery, Actor(client.remote_address, client.id))
            return
        self.trace.requeued([delivery], client.remote_address)
        self._queue.put_back([delivery])
        self.notify()

    def touch(self, client: Consumer, id: bytes, longest: float) -> None:
        """Start a message's timeout again; NotOwner if the client has not got it."""
        if not client.in_flight.touch(id, time.monotonic(), longest):
            raise not_owner(self, id)

    # --- clients -----------------------------------------------------------------------------------------------------

    def add_client(self, client: Consumer, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel has ``limit`` clients."""
        if limit and len(self.clients) >= limit:
            raise Exiting(f"consumers for {self.name} exceeds limit of {limit}")
        self.clients[client.id] = client
        if client.tag:
            self._queue.add_tag(client.tag)

    def remove_client(self, client: Consumer) -> None:
        """Forget a client. What it has in flight is ready again at once, as if it had not been delivered.

        youzan/nsq: nsqd/channel.go, RequeueClientMessages.
        """
        if self.clients.pop(client.id, None) is None:
            return
        self._waiting.pop(client, None)
        returned = sorted(client.in_flight, key=lambda delivery: delivery.record.sequence)
        client.in_flight.clear()
        for delivery in returned:
            delivery.attempts -= 1
        if client.tag and not any(other.tag == client.tag for other in self.clients.values()):
            self._queue.drop_tag(client.tag)
        if self.trace.follows(self._log):
            self.trace.requeued(returned, client.remote_address)
        self._queue.put_first(returned)
        self.notify()
        if not self.clients and self.is_ephemeral:
            self._on_unused()

    def disconnect(self, which: Callable[[Consumer], bool] = lambda client: True) -> None:
        """End the connections of clients, without a word."""
        for client in list(self.clients.values()):
            if which(client):
                client.close()

    def interrupt(self, log: PartitionLog | None = None) -> None:
        """The leader has changed: clients are disconnected, and messages that are not done are delivered again.

        Args:
            log: that of the new leader, where there is one.
        """
        self.disconnect()
        _forget_deliveries(self)
        if log is not None:
            self._log = log
            self.confirmed.limit(log.end)
            self._queue.follow(log)
        self._queue.rewind()

    # --- administration ----------------------------------------------------------------------------------------------

    def set_ordered(self, is_ordered: bool) -> None:
        """Change the mode; clients are disconnected when the channel becomes unordered."""
        if self.is_ordered and not is_ordered:
            self.disconnect()
        self.is_ordered = is_ordered

    def set_paused(self, is_paused: bool) -> None:
        """Stop delivery, or go on with it."""
        self.is_paused = is_paused
        if not is_paused:
            wake(self.clients.values())

    def set_skipped(self, is_skipped: bool) -> None:
        """Be done with all there is and all that comes, or deliver what comes from now on."""
        self.is_skipped = is_skipped
        if is_skipped:
            self.empty()

    def empty(self) -> None:
        """Be done with all there is."""
        self.set_position(self._log.end)

    def set_position(self, sequence: int) -> None:
        """Go on at a record, forward or back; what is in flight is forgotten."""
        _forget_deliveries(self)
        position = max(self._log.first, min(sequence, self._log.end))
        self.confirmed.reset(position)
        self._queue.go_to(position)
        wake(self.clients.values())

    def scan(self, now: float) -> None:
        """Give back what has timed out and what is due."""
        back: list[Delivery] = []
        for client in self.clients.values():
            expired = client.in_flight.pop_due(now)
            if expired:
                self.trace.timed_out(expired, client.remote_address)
                client.wake()
            back += expired
        self.timeout_count += len(back)
        while self.deferred and self.deferred[0][0] <= now:
            back.append(heapq.heappop(self.deferred)[2])
            self.trace.due(back[-1])
        if back:
            self._queue.put_back(back)
            self.notify()


def finish_anywhere(channel: PartitionChannel, internal_id: int) -> bool:
    """Finish a message, whichever client has it in flight; False if no client has."""
    half = internal_id.to_bytes(8, "big", signed=True)
    for client in list(channel.clients.values()):
        if not channel.finish(client, [half + bytes(8)], is_internal=True):
            client.wake()
            return True
    return False


def limit_clients(channel: PartitionChannel, prefix: str, limit: int) -> None:
    """From now on clients that are there, and whose address begins so, have no more messages in flight than this."""
    for client in channel.clients.values():
        if client.remote_address.startswith(prefix):
            client.limit_rdy(limit)


def finish_deferred(channel: PartitionChannel) -> None:
    """Be done with the messages that wait for the end of a delay."""
    channel.confirmed.confirm([delivery for _, _, delivery in channel.deferred])
    channel.deferred.clear()


def not_owner(channel: PartitionChannel, id: bytes) -> NotOwner:
    """Why a client cannot finish, requeue or touch a message that it has not got in flight."""
    if any(id in client.in_flight for client in channel.clients.values()):
        return NotOwner("client does not own message")
    return NotOwner("Message ID not in flight")


def _pop_by_internal_id(client: Consumer, id: bytes) -> Delivery | None:
    for delivery in client.in_flight:
        if delivery.id[:8] == id[:8]:
            return client.in_flight.pop(delivery.id)
    return None


def _keep(confirmed: Confirmed, taken: list[Delivery], wanted: Callable[[Delivery], bool]) -> list[Delivery]:
    """Those of the deliveries that are wanted; the others are done."""
    kept = [delivery for delivery in taken if wanted(delivery)]
    if len(kept) < len(taken):
        unwanted = set(map(id, taken)).difference(map(id, kept))
        confirmed.confirm(delivery for delivery in taken if id(delivery) in unwanted)
    return kept


def _forget_deliveries(channel: PartitionChannel) -> None:
    for client in channel.clients.values():
        client.in_flight.clear()
    channel.deferred.clear()


def _is_requeued_too_much(delivery: Delivery) -> bool:
    if delivery.attempts >= _MAX_REQUEUES:
        return True
    return delivery.attempts > _MANY_REQUEUES and time.monotonic() - delivery.delivered_at < _REQUEUE_PAUSE


def _start(deliveries: list[Delivery], client: Consumer, trace: DeliveryTrace | None) -> list[bytes]:
    """Put messages in flight; their frames. ``trace`` is None where none of them is traced."""
    if trace is not None:
        trace.taken(deliveries)
    now = time.monotonic()
    in_flight, ext, detail = client.in_flight, client.gets_ext, client.gets_detail
    in_flight.put(deliveries, now + in_flight.timeout)
    frames: list[bytes] = []
    for delivery in deliveries:
        delivery.delivered_at = now
        if delivery.attempts < MAX_ATTEMPTS:
            delivery.attempts += 1
        frames.append(delivery.record.frame(delivery.attempts, ext, detail))
    if trace is not None:
        trace.started(deliveries, Actor(client.remote_address, client.id))
    return frames
