"""What is known of one topic, and the queues in which its publishes wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast._bound_queues import BoundQueues
from nsq_fast.errors import BodyInvalid, ConfigError, NoNsqd, NsqError
from nsq_fast.log_events import COMPRESSION_OFF, PUBLISHES_WAIT
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import EXT_RECORD_BYTES
from nsq_fast.protocol.partitioner import Key, hash_behind
from nsq_fast.protocol.topology import Meta, Topology

from .destination import AnyPartition, HeldQueue, NsqdQueue, PartitionQueue, Queue, UndecidedQueue
from .link import Link
from .publish import Publish

if TYPE_CHECKING:
    from .destination import Sender

logger = logging.getLogger(__name__)

# Lookup says for so long (s) that there is no such topic: then there is none.
ABSENT_AFTER = 1.0


class TopicRoute(BoundQueues):
    """Where the publishes of a topic can go.

    Args:
        links: the open links, where there is no lookup and every nsqd takes every topic.
        compressed_from: smallest body that is compressed once the topic proves to be extended.

    Attributes:
        topic: its name.
        addresses: the nsqds that lookup named; None before its first answer, and without lookup.
        topology: what ``addresses`` were taken from; None when they were not taken from lookup's answer alone.
        is_used: set by every publish, cleared at every poll.
        is_plain: it has no partitions as far as anybody knows.
        is_partitioned: it has; that lasts.
        partition_num: how many partitions the topic has, available or not; 0: lookup does not say.
        is_ext: whether messages may have headers; None: lookup does not say.
        is_lack_told: it has been logged that there is no nsqd for it.
        max_msg_size: largest body that its servers take, as far as is known.
        plain_size: largest body that leaves as it is, without a look at compression.
        absent_since: since when lookup says that there is no such topic, ``time.monotonic``; None: it does not.
        any: the queue of those that may go to any nsqd, or to any partition.
        partitions: partition -> its queue, for those that are led or that publishes are bound to.
        undecided: the queue of those that are bound to a partition, until it is known what partitions there are.
        held: the queue of those that are bound to a partition, while another cluster has some that come before them;
            ``let_go`` ends that.
    """

    # Below a compiled class CPython finds attributes in slots three times as fast as in a dict.
    __slots__ = (
        "_any_partition",
        "_compressed_from",
        "_largest",
        "_links",
        "_sender",
        "absent_since",
        "addresses",
        "any",
        "has_lookup",
        "is_ext",
        "is_lack_told",
        "is_partitioned",
        "is_plain",
        "is_used",
        "max_msg_size",
        "plain_size",
        "topic",
        "topology",
        "undecided",
    )

    partitions: dict[int, PartitionQueue]
    held: HeldQueue | None

    def __init__(
        self,
        sender: Sender,
        topic: str,
        links: list[Link],
        partition_of_key: Callable[[Key, int], int],
        *,
        has_lookup: bool,
        by_load: bool,
        max_msg_size: int,
        compressed_from: int,
    ) -> None:
        super().__init__(partition_of_key, hash_behind(partition_of_key))
        self.topic = topic
        self.max_msg_size = self.plain_size = self._largest = max_msg_size
        self._compressed_from = compressed_from
        self.addresses: frozenset[Address] | None = None
        self.topology: Topology | None = None
        self.is_used = True
        self.has_lookup = has_lookup
        self.is_plain = not has_lookup
        self.is_partitioned = False
        self.is_ext: bool | None = None
        self.is_lack_told = False
        self.absent_since: float | None = None
        self.any: Queue = NsqdQueue(sender, topic, links)
        self.undecided = UndecidedQueue(sender, topic, [])
        self._sender = sender
        self._links = links
        self._any_partition = AnyPartition(sender, topic, self.partitions, by_load=by_load)

    # Where one publish goes: ``bound`` says it of the usual ones

    def destination(self, key: Key | None, partition: int | None) -> Queue:
        """The queue of a publish: bound to one partition by either, or to none.

        Raises ConfigError where there is no such partition.
        """
        if key is None and partition is None:
            return self.any
        if self.held is not None and not (self.is_plain and self.has_lookup):
            return self.held
        return self._bound(key, partition)

    def _bound(self, key: Key | None, partition: int | None) -> Queue:
        """The queue of a publish that is bound to a partition, whatever is held back."""
        if partition is None and self.partition_num:
            assert key is not None
            partition = self.partition_of_key(key, self.partition_num)
        if partition is not None and partition < self.partition_num and partition in self.partitions:
            return self.partitions[partition]  # the usual case
        if not self.has_lookup:
            if partition is None:
                raise ConfigError(
                    f"key={key!r}: the number of partitions is unknown without lookupd_http_addresses;"
                    " name the partition, or leave it out"
                )
            return self.partition(partition)
        binding = f"key={key!r}" if key is not None else f"partition={partition}"
        if self.is_plain:
            raise ConfigError(f"{binding}: topic {self.topic!r} has no partitions; leave it out")
        if not self.is_partitioned:
            return self.undecided
        if partition is None:
            raise ConfigError(f"{binding}: lookup does not say how many partitions {self.topic!r} has")
        if self.partition_num and partition >= self.partition_num:
            raise ConfigError(f"partition={partition}: topic {self.topic!r} has {self.partition_num} partitions")
        return self.partition(partition)

    def partition(self, number: int) -> PartitionQueue:
        """The queue of a partition."""
        queue = self.partitions.get(number)
        if queue is None:
            links = [] if self.has_lookup else self._links
            queue = self.partitions[number] = PartitionQueue(
                self._sender, self.topic, links, number, self._any_partition.pump, has_lookup=self.has_lookup
            )
        return queue

    # A topic that moves

    def let_go(self, finish: Callable[[Publish, NsqError], object]) -> None:
        """What was held back goes where it is bound to; where that is nowhere, it ends by ``finish``."""
        held, self.held = self.held, None
        if held is not None:
            held.hand_over(lambda publish: self.destination_or_end(publish, finish))

    def destination_or_end(self, publish: Publish, finish: Callable[[Publish, NsqError], object]) -> Queue | None:
        """The queue of a publish that has waited in another. Without such a partition it ends by ``finish``: None."""
        try:
            return self._bound(publish.key, publish.pin)
        except ConfigError as error:
            finish(publish, error)
            return None

    # What is learnt of the topic

    def learn(self, meta: Meta) -> None:
        """Take over how many partitions it has, and what messages it carries."""
        if self.is_ext is None and not meta.extend_support and self._compressed_from <= self.max_msg_size:
            logger.warning(
                "[%s] carries no extended headers: bodies are not compressed", self.topic, extra=COMPRESSION_OFF
            )
        self.partition_num = meta.partition_num
        self.is_ext = meta.extend_support
        self.max_msg_size = self.plain_size = self._largest
        if self.is_ext:
            self.max_msg_size -= EXT_RECORD_BYTES
            self.plain_size = min(self.max_msg_size, self._compressed_from - 1)

    def set_partitions(self, topology: Topology) -> list[PartitionQueue]:
        """It has partitions. Take their leaders over; return the partitions that have got another one."""
        if not self.is_partitioned:
            self.is_partitioned, self.is_plain = True, False
            self.any.hand_over(lambda publish: self._any_partition)
            self.any = self._any_partition
        # An answer that names no partition at all says nothing of the leaders: that of a lookupd that has just started
        # looks the same.
        return self._set_leaders(topology) if topology.partitions else []

    def _set_leaders(self, topology: Topology) -> list[PartitionQueue]:
        moved = []
        for number, nsqd in topology.partitions.items():
            queue = self.partition(number)
            if queue.leader != nsqd.tcp:
                queue.leader = nsqd.tcp
                moved.append(queue)
        for number, queue in self.partitions.items():
            if number not in topology.partitions:
                queue.leader = None
        return moved

    def set_links(self, links: list[Link]) -> bool:
        """The links that are open to its nsqds; whether a partition has lost those to its leader."""
        is_lost = False
        for queue in self.partitions.values():
            found = [link for link in links if link.address == queue.leader]
            is_lost |= bool(queue.links) and not found
            queue.links = found
        self.any.links = links
        self._any_partition.open = [queue for queue in self.partitions.values() if queue.links]
        return is_lost

    def tell_lack(self, problem: str) -> None:
        """Log once that publishes wait because nobody takes them; ``problem`` says why."""
        if not self.is_lack_told:
            self.is_lack_told = True
            logger.warning("publishes to topic %s wait for an nsqd: %s", self.topic, problem, extra=PUBLISHES_WAIT)

    def end_if_absent(self, problem: str, finish: Callable[[Publish, NsqError], object]) -> None:
        """Fail what waits for a topic that does not exist, and that nobody will create by publishing to it.

        Lookup has to say so for a while, by calls of this: another client may just be creating the topic.
        """
        now = monotonic()
        if self.absent_since is None:
            self.absent_since = now
        if now - self.absent_since < ABSENT_AFTER:
            return
        text = (
            f"topic {self.topic!r} does not exist (lookup says: {problem}), and servers of the redesigned NSQ"
            " create no topics by themselves: create it, or mend the name"
        )
        self._fail_waiting(finish, lambda publish: NoNsqd(text))

    def refuse_misfits(self, finish: Callable[[Publish, NsqError], object]) -> None:
        """Fail what came before it was known what the topic carries, as later ones are refused."""
        self._fail_waiting(finish, self._misfit)

    def _misfit(self, publish: Publish) -> NsqError | None:
        if not self.is_ext and publish.form.kind == "PUB_EXT":
            return no_headers(self.topic)
        size = publish.form.record_size(publish.body)
        if size > self.max_msg_size:
            return BodyInvalid(f"body of {size} bytes, its header included, is above {self.limit_text}")
        return None

    @property
    def limit_text(self) -> str:
        """The largest message that its servers take, as errors name it."""
        text = f"max_msg_size={self._largest}"
        if self.max_msg_size < self._largest:
            text += f", less the {self._largest - self.max_msg_size} byte that an extended topic's records need"
        return text

    def _fail_waiting(
        self, finish: Callable[[Publish, NsqError], object], error_of: Callable[[Publish], NsqError | None]
    ) -> None:
        for queue in list(self.queues()):
            for publish in list(queue.waiting):
                error = None if publish.done else error_of(publish)
                if error is not None:
                    finish(publish, error)
            queue.remove_ended()

    # Its queues

    def queues(self) -> Iterator[Queue]:
        """All queues in which publishes may wait."""
        yield self.any
        yield self.undecided
        if self.held is not None:
            yield self.held
        yield from list(self.partitions.values())  # stats() of another thread reads it meanwhile

    def pump(self) -> None:
        """Send what can be sent now."""
        for queue in list(self.queues()):
            if queue.waiting and queue.held_bytes is None:
                queue.pump()

    @property
    def is_busy(self) -> bool:
        """Whether publishes wait or are on the wire."""
        return any(queue.waiting or queue.in_flight for queue in self.queues())


def no_headers(topic: str) -> ConfigError:
    """The error for headers or a tag on a topic that is not extended."""
    return ConfigError(
        f"headers, tag: topic {topic!r} carries no extended headers; leave them out, or create it with extend"
    )
