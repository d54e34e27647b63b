"""Snapshots that another thread takes: they change nothing, and count nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.waiting import until

from nsq_fast import Consumer
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
        consumer._subscriptions.forget(subscriber)  # what its greenlet does meanwhile
        return taken

    monkeypatch.setattr(Subscriber, "stats", ending)
    assert consumer.stats().totals.finished == 10
    assert consumer.stats().totals.finished == 10
