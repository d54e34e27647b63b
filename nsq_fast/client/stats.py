"""Snapshots of what a consumer has done and is doing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nsq_fast._record import MutableRecord, Record
from nsq_fast.client.histogram import HistogramStats
from nsq_fast.names import Address


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


class ConsumerStats(Record, frozen=True):
    """A consumer.

    Attributes:
        connections: one for each nsqd known now, or for each partition.
        totals: over all nsqds there have been.
        topics: the same for each topic that is consumed now.
        given_up: messages handed to the give-up policy and finished.
        max_in_flight: most messages held at once; with the option left out as many as there are connections.
        in_flight: messages received, not answered and not expired; ``unstarted`` of them wait for a handler.
        orphaned: messages of lost connections that the program still holds; they count towards max_in_flight.
        backoff_level: 0 when there is no backoff.
        backoff_left: seconds of the present pause.
        order_violations: messages of ordered partitions that lay before one delivered earlier.
        repeated: messages of ordered partitions that were delivered again.
        leader_moves: times that lookup named another leader of a partition.
        lookup_errors: questions to an nsqlookupd that got no good answer.
        config: what the config source said last, and why it cannot be read or was refused; None without one.
        blocked: deliveries of ordered messages with more than ``attempts_threshold`` attempts.
        handler_time: what handlers took, of samples; None without ``histograms``.
        message_age: from the timestamp of a message to the start of its handler, of samples; None without.
    """

    connections: tuple[ConnectionStats, ...]
    totals: Counters
    given_up: int
    max_in_flight: int
    in_flight: int
    unstarted: int
    backoff_level: int
    backoff_left: float
    is_running: bool
    is_paused: bool
    is_starved: bool
    order_violations: int = 0
    repeated: int = 0
    blocked: int = 0
    orphaned: int = 0
    leader_moves: int = 0
    lookup_errors: int = 0
    topics: Mapping[str, Counters] = msgspec.field(default_factory=dict)
    config: dict[str, Any] | None = None
    handler_time: HistogramStats | None = None
    message_age: HistogramStats | None = None
