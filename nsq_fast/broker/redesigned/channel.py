"""A channel of one partition: where it is in the log, what is in flight, and the clients that share it.

The channel reads the log as clients ask. ``confirmed`` is where it would go on
after a change of leader: everything before it is done. An *ordered* channel has
one message in flight at most, over all its clients. On an ext topic messages
with a tag go to clients with that tag while there are any, and clients may have
a filter: what it keeps out is done for the whole channel.

A channel belongs to the partition, not to a node; ``interrupt`` is what a change
of leader does to it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from nsq_fast.broker.errors import Exiting, NotOwner
from nsq_fast.broker.nsqd.channel import SAMPLE_OF
from nsq_fast.broker.nsqd.in_flight import InFlight
from nsq_fast.names import is_ephemeral

from .filters import Matches, tag_of
from .log import PartitionLog, Record

MAX_ATTEMPTS = 4000
_MAX_REQUEUES = 2000
_MANY_REQUEUES = 100
_REQUEUE_PAUSE = 0.1
_ROUTE_BATCH = 256


class Delivery:
    """A record on its way through one channel. Times are monotonic."""

    __slots__ = ("attempts", "deadline", "delivered_at", "id", "record")

    def __init__(self, record: Record) -> None:
        self.id = record.id
        self.record = record
        self.attempts = 0
        self.deadline = 0.0
        self.delivered_at = 0.0


class Consumer(Protocol):
    """A client that has subscribed.

    ``tag`` is empty without one; ``gets_ext`` and ``gets_detail`` say which layout its frames have.
    """

    id: int
    in_flight: InFlight[Delivery]
    tag: str
    matches: Matches | None
    gets_ext: bool
    gets_detail: bool

    def wake(self) -> None:
        """There may be something to do."""

    def close(self) -> None:
        """Disconnect."""

    def stats(self) -> dict[str, Any]:
        """Figures under the server's JSON names."""


class PartitionChannel:
    """One channel of a partition. It begins at the end of the log.

    Attributes:
        clients: by their ids.
        confirmed: sequence of the first record that is not done.
        is_ordered, is_paused, is_skipped: its modes; a skipped channel is done with all that comes.
    """

    def __init__(self, name: str, log: PartitionLog, is_ordered: bool, on_unused: Callable[[], None]) -> None:
        self.name = name
        self.is_ordered = is_ordered
        self.is_ephemeral = is_ephemeral(name)
        self.is_paused = False
        self.is_skipped = False
        self.clients: dict[int, Consumer] = {}
        self.confirmed = log.end
        self.requeue_count = 0
        self.timeout_count = 0
        self._log = log
        self._on_unused = on_unused
        self._cursor = log.end
        # Before this sequence some records were done already when the cursor was set back.
        self._reread_until = log.end
        self._done: set[int] = set()
        self._ready: deque[Delivery] = deque()
        self._tagged: dict[str, deque[Delivery]] = {}
        self._deferred: list[tuple[float, int, Delivery]] = []
        self._waiting: dict[Consumer, None] = {}
        self._ties = itertools.count()

    @property
    def depth(self) -> int:
        """Messages that are not done."""
        return self._log.end - self.confirmed - len(self._done)

    @property
    def depth_size(self) -> int:
        """Bytes from the first message that is not done to the end of the log."""
        return self._log.end_offset - self._log.offset_of(self.confirmed)

    @property
    def in_flight_count(self) -> int:
        """Messages delivered and not answered."""
        return sum(len(client.in_flight) for client in self.clients.values())

    @property
    def deferred_count(self) -> int:
        """Messages that wait for their time."""
        return len(self._deferred)

    # --- messages out ------------------------------------------------------------------------------------------------

    def deliver(self, client: Consumer, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on."""
        if self.is_skipped or not self.has_ready(client):
            return []
        if self.is_ordered:
            count = 1
        elif len(self.clients) > 1:
            count = min(count, (self._log.end - self._cursor + len(self._ready)) // len(self.clients) + 1)
        taken = self._take(client, count)
        if sample_rate:
            taken = self._keep(taken, lambda _: random.randrange(SAMPLE_OF) <= sample_rate)
        if client.matches is not None:
            matches = client.matches
            taken = self._keep(taken, lambda delivery: matches(delivery.record))
        return _start(taken, client)

    def has_ready(self, client: Consumer) -> bool:
        """Whether there may be messages for a client right now."""
        if self.is_skipped or (self.is_ordered and self.in_flight_count):
            return False
        if self._queue(client):
            return True
        if self.is_ordered and self._tagged and (self._ready or any(self._tagged.values())):
            return False  # what comes next is for somebody else
        return self._cursor < self._log.end

    def _queue(self, client: Consumer) -> deque[Delivery]:
        return self._tagged[client.tag] if client.tag else self._ready

    def _take(self, client: Consumer, count: int) -> list[Delivery]:
        queue = self._queue(client)
        if self._tagged:
            self._route(queue, count)
        taken = [queue.popleft() for _ in range(min(count, len(queue)))]
        if len(taken) < count and not self._tagged:
            taken += map(Delivery, self._read(count - len(taken)))
        return taken

    def _read(self, count: int) -> list[Record]:
        records = self._log.read(self._cursor, count)
        if not records:
            return records
        first, self._cursor = records[0].sequence, records[-1].sequence + 1
        if first < self._reread_until:
            return [record for record in records if record.sequence not in self._done]
        return records

    def _route(self, queue: deque[Delivery], count: int) -> None:
        """Read on until ``queue`` has enough; what is not for it goes where it belongs."""
        step = 1 if self.is_ordered else _ROUTE_BATCH
        while len(queue) < count and self._cursor < self._log.end:
            for record in self._read(step):
                self._tagged.get(tag_of(record), self._ready).append(Delivery(record))
            if self.is_ordered:
                return

    def _keep(self, taken: list[Delivery], wanted: Callable[[Delivery], bool]) -> list[Delivery]:
        kept = [delivery for delivery in taken if wanted(delivery)]
        if len(kept) < len(taken):
            unwanted = set(map(id, taken)).difference(map(id, kept))
            self._confirm(delivery.record.sequence for delivery in taken if id(delivery) in unwanted)
        return kept

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
        if self.is_ordered and not self._tagged:
            count = 1
        else:
            count = len(waiting) if self._tagged else self._log.end - self._cursor + len(self._ready)
        for client in list(itertools.islice(waiting, count)):
            del waiting[client]
            client.wake()

    # --- answers -----------------------------------------------------------------------------------------------------

    def finish(self, client: Consumer, ids: list[bytes]) -> list[bytes]:
        """Done with messages; the ids of those that the client has not got in flight. A trace id is not looked at."""
        in_flight = client.in_flight
        done, missing = [], []
        for id in ids:
            delivery = in_flight.pop(id) or self._pop_by_internal_id(client, id)
            if delivery is None:
                missing.append(id)
            else:
                done.append(delivery.record.sequence)
        self._confirm(done)
        if self.is_ordered:
            self.notify()
        return missing

    def finish_anywhere(self, internal_id: int) -> bool:
        """Done with a message, whoever has it in flight; False if nobody has."""
        half = internal_id.to_bytes(8, "big", signed=True)
        for client in list(self.clients.values()):
            if not self.finish(client, [half + bytes(8)]):
                client.wake()
                return True
        return False

    def _pop_by_internal_id(self, client: Consumer, id: bytes) -> Delivery | None:
        for delivery in client.in_flight.all():
            if delivery.id[:8] == id[:8]:
                return client.in_flight.pop(delivery.id)
        return None

    def _confirm(self, sequences: Iterable[int]) -> None:
        done, confirmed = self._done, self.confirmed
        for sequence in sequences:
            if sequence != confirmed:
                done.add(sequence)
                continue
            confirmed += 1
            while confirmed in done:
                done.remove(confirmed)
                confirmed += 1
        self.confirmed = confirmed

    def requeue(self, client: Consumer, id: bytes, delay: float) -> None:
        """Give a message back, ready after ``delay`` seconds; NotOwner when that is refused.

        An ordered channel ignores what asks for a delay: the message stays in flight until it times out.
        """
        if self.is_ordered and delay > 0:
            return
        held = client.in_flight.messages.get(id)
        if held is not None and not delay and _is_requeued_too_much(held):
            raise NotOwner("Message too much requeue")
        delivery = client.in_flight.pop(id) or self._pop_by_internal_id(client, id)
        if delivery is None:
            raise self.not_owner(id)
        self.requeue_count += 1
        if delay > 0:
            heapq.heappush(self._deferred, (time.monotonic() + delay, next(self._ties), delivery))
            return
        self._give_back([delivery])

    def touch(self, client: Consumer, id: bytes, longest: float) -> None:
        """Start a message's timeout again; NotOwner if the client has not got it."""
        if not client.in_flight.touch(id, time.monotonic(), longest):
            raise self.not_owner(id)

    def not_owner(self, id: bytes) -> NotOwner:
        """Why a message cannot be answered by somebody who has not got it."""
        if any(id in client.in_flight for client in self.clients.values()):
            return NotOwner("client does not own message")
        return NotOwner("Message ID not in flight")

    def _give_back(self, deliveries: list[Delivery], *, first: bool = False) -> None:
        for delivery in reversed(deliveries) if first else deliveries:
            queue = self._tagged.get(tag_of(delivery.record), self._ready) if self._tagged else self._ready
            if first:
                queue.appendleft(delivery)
            else:
                queue.append(delivery)
        if deliveries:
            self.notify()

    # --- clients -----------------------------------------------------------------------------------------------------

    def add_client(self, client: Consumer, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel has ``limit`` clients."""
        if limit and len(self.clients) >= limit:
            raise Exiting(f"consumers for {self.name} exceeds limit of {limit}")
        self.clients[client.id] = client
        if client.tag:
            self._tagged.setdefault(client.tag, deque())

    def remove_client(self, client: Consumer) -> None:
        """Forget a client. What it has in flight is ready again at once, as if it had not been delivered."""
        if self.clients.pop(client.id, None) is None:
            return
        self._waiting.pop(client, None)
        returned = sorted(client.in_flight.all(), key=lambda delivery: delivery.record.sequence)
        client.in_flight.clear()
        for delivery in returned:
            delivery.attempts -= 1
        self._drop_tag(client.tag)
        self._give_back(returned, first=True)
        self.notify()
        if not self.clients and self.is_ephemeral:
            self._on_unused()

    def _drop_tag(self, tag: str) -> None:
        if tag and not any(client.tag == tag for client in self.clients.values()):
            self._ready.extendleft(reversed(self._tagged.pop(tag)))

    def disconnect(self, which: Callable[[Consumer], bool] = lambda client: True) -> None:
        """End the connections of clients, without a word."""
        for client in list(self.clients.values()):
            if which(client):
                client.close()

    def interrupt(self) -> None:
        """The leader is another one: clients are disconnected, and what is not done is delivered anew."""
        self.disconnect()
        self._forget_deliveries()
        self._reread_until = self._cursor
        self._cursor = self.confirmed

    def _forget_deliveries(self) -> None:
        for client in self.clients.values():
            client.in_flight.clear()
        self._ready.clear()
        self._deferred.clear()
        for queue in self._tagged.values():
            queue.clear()

    # --- administration ----------------------------------------------------------------------------------------------

    def set_ordered(self, is_ordered: bool) -> None:
        """Change the mode; clients are disconnected when the channel becomes unordered."""
        if self.is_ordered and not is_ordered:
            self.disconnect()
        self.is_ordered = is_ordered

    def pause(self) -> None:
        """Stop delivery."""
        self.is_paused = True

    def unpause(self) -> None:
        """Go on with delivery."""
        self.is_paused = False
        self._wake_all()

    def skip(self) -> None:
        """Be done with all there is, and all that comes."""
        self.is_skipped = True
        self.set_position(self._log.end)

    def unskip(self) -> None:
        """Deliver what comes from now on."""
        self.is_skipped = False

    def empty(self) -> None:
        """Be done with all there is."""
        self.set_position(self._log.end)

    def set_position(self, sequence: int) -> None:
        """Go on at a record, forward or back; what is in flight is forgotten."""
        self._forget_deliveries()
        self._done.clear()
        self.confirmed = self._cursor = self._reread_until = max(self._log.first, min(sequence, self._log.end))
        self._wake_all()

    def _wake_all(self) -> None:
        for client in list(self.clients.values()):
            client.wake()

    def scan(self, now: float) -> None:
        """Give back what has timed out and what is due."""
        back: list[Delivery] = []
        for client in self.clients.values():
            expired = client.in_flight.pop_expired(now) if client.in_flight else []
            if expired:
                client.wake()
            back += expired
        self.timeout_count += len(back)
        while self._deferred and self._deferred[0][0] <= now:
            back.append(heapq.heappop(self._deferred)[2])
        self._give_back(back)


def _is_requeued_too_much(delivery: Delivery) -> bool:
    if delivery.attempts >= _MAX_REQUEUES:
        return True
    return delivery.attempts > _MANY_REQUEUES and time.monotonic() - delivery.delivered_at < _REQUEUE_PAUSE


def _start(deliveries: list[Delivery], client: Consumer) -> list[bytes]:
    """Put messages in flight; their frames."""
    now = time.monotonic()
    in_flight, ext, detail = client.in_flight, client.gets_ext, client.gets_detail
    deadline, by_id = now + in_flight.timeout, in_flight.messages
    frames: list[bytes] = []
    for delivery in deliveries:
        delivery.delivered_at = now
        delivery.deadline = deadline
        if delivery.attempts < MAX_ATTEMPTS:
            delivery.attempts += 1
        by_id[delivery.id] = delivery
        frames.append(delivery.record.frame(delivery.attempts, ext, detail))
    return frames
