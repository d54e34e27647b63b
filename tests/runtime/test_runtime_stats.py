"""Snapshots that another thread takes: they change nothing, and count nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.partitions import topology
from support.publishing import REDESIGNED, Leaders, LookupProducers, Nsqds, Producers, refuse, stay_mute
from support.waiting import until

from nsq_fast import Consumer
from nsq_fast.errors import PublishFailed, PublishTimeout
from nsq_fast.protocol.in_flight import InFlight
from nsq_fast.runtime import Subscriber


def elsewhere(call: Callable[[], Any]) -> Any:
    """What ``call()`` returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    until(lambda: not thread.is_alive())
    return results[0]


def test_a_snapshot_in_another_thread_leaves_the_ledgers_of_lost_connections_alone(
    servers: Any, consume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, held = servers(), []
    consumer = consume(lambda c, m: (m.enable_async(), held.append(m)), server)
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(held) == 10)
    conn.close()
    server.wait_for(lambda: consumer.stats().orphaned == 10)
    readers: list[str] = []
    pending = InFlight.pending

    def watched(ledger: InFlight) -> Any:
        readers.append(threading.current_thread().name)
        return pending(ledger)

    monkeypatch.setattr(InFlight, "pending", watched)
    assert elsewhere(consumer.stats).orphaned == 10
    assert set(readers) <= {threading.current_thread().name}


def test_a_subscriber_that_ends_during_a_snapshot_is_not_counted_twice(
    nsqd: Any, consume: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consume(lambda c, m: None)
    conn = nsqd.connection()
    conn.push(*range(10))
    until(lambda: consumer.stats().totals.finished == 10)
    snapshot = Subscriber.stats

    def ending(subscriber: Subscriber) -> Any:
        taken = snapshot(subscriber)
        consumer._subscriptions.of_topic(consumer.topic).forget(subscriber)  # what its greenlet does meanwhile
        return taken

    monkeypatch.setattr(Subscriber, "stats", ending)
    assert consumer.stats().totals.finished == 10
    assert consumer.stats().totals.finished == 10


def outcomes(producer: Any) -> tuple[int, int, int]:
    stats = producer.stats()
    return stats["stored"], stats["refused"], stats["unknown"]


def test_publishes_are_counted_by_outcome(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = new_producer(nsqd, publish_timeout=0.2)
    sender.publish("t", b"x")
    sender.publish_nowait("t", b"y").get()
    sender.multipublish("t", [b"a", b"b"])
    assert outcomes(sender) == (3, 0, 0)
    nsqd.answer = lambda peer, command: refuse(peer, b"E_BAD_MESSAGE bad")
    with pytest.raises(PublishFailed):
        sender.publish("t", b"x")
    assert outcomes(sender) == (3, 1, 0)
    nsqd.answer = stay_mute
    with pytest.raises(PublishTimeout) as caught:
        sender.publish("t", b"x")
    assert caught.value.possibly_stored
    assert outcomes(sender) == (3, 1, 1)


def test_moves_of_leaders_are_counted(
    lookup_producer: LookupProducers, leaders: Leaders, publish_nsqd: Nsqds, consume: Callable[..., Consumer]
) -> None:
    before, after = topology(leaders), topology({**leaders, 2: publish_nsqd(version=REDESIGNED)})
    sender, lookup = lookup_producer(before)
    sender.publish("t", b"x")
    consumer = consume(lambda c, m: None, found=before, topic="t")
    for answer, moves in ((before, 0), (after, 1), (after, 1), (before, 2)):
        lookup.listener("t", answer)
        consumer._subscriptions.on_topology("t", answer)
        assert sender.stats()["leader_moves"] == moves
        assert consumer.stats().leader_moves == moves
