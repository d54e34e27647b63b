"""The producer and servers with partitions: where publishes go, what they say, what comes back."""

from __future__ import annotations

import json
import logging
from collections import Counter
from contextlib import suppress
from typing import Any

import gevent
import pytest
from msgspec.structs import replace
from support.partitions import topology
from support.peers import Peer
from support.publishing import (
    REDESIGNED,
    Command,
    Leaders,
    LookupProducers,
    Nsqds,
    Producers,
    agree,
    receipt,
    stay_mute,
)
from support.waiting import WAIT, until

from nsq_fast import Receipt, TraceLog, errors
from nsq_fast.protocol.partitioner import hashcode_partition, murmur3_partition


def placed(leaders: Leaders) -> dict[bytes, int | None]:
    """Body -> the partition that it came for; every one came to the leader of that partition."""
    found: dict[bytes, int | None] = {}
    for number, nsqd in leaders.items():
        for command in nsqd.commands:
            assert command.partition == number
            found.update(dict.fromkeys(command.bodies, command.partition))
    return found


# Where publishes go


def test_publishes_take_turns_over_the_partitions(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(topology(leaders))
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 3)
    for number in range(30):
        assert sender.publish("t", b"%d" % number) == b"OK"
    counts = Counter(placed(leaders).values())
    assert all(10 <= counts[number] <= 11 for number in leaders)
    assert sender.multipublish("t", [b"a", b"b"]) == b"OK"
    assert len({placed(leaders)[body] for body in (b"a", b"b")}) == 1


def test_the_least_loaded_leader_is_chosen(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(topology(leaders), partition_strategy="least_loaded")
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 3)
    leaders[0].answer = leaders[1].answer = stay_mute
    slow = [sender.publish_nowait("t", b"slow", partition=number, timeout=1) for number in (0, 1)]
    for number in range(10):
        assert sender.publish("t", b"%d" % number) == b"OK"
    assert set(leaders[2].bodies) >= {b"%d" % number for number in range(10)}
    gevent.joinall(slow, timeout=WAIT)


@pytest.mark.parametrize(("strategy", "hashed"), [("murmur3", murmur3_partition), ("hashcode", hashcode_partition)])
@pytest.mark.parametrize("options", [{}, {"coalesce": True}, {"linger": 0.005}])
def test_a_key_names_the_partition(
    lookup_producer: LookupProducers, leaders: Leaders, strategy: str, hashed: Any, options: dict[str, Any]
) -> None:
    sender, _ = lookup_producer(topology(leaders), key_strategy=strategy, **options)
    keys = [f"order-{number}" for number in range(40)]
    results = [sender.publish_nowait("t", key.encode(), key=key) for key in keys[:20]]
    gevent.joinall(results, timeout=WAIT)
    for key in keys[20:]:
        assert sender.publish("t", key.encode(), key=key) == b"OK"
    assert placed(leaders) == {key.encode(): hashed(key, 3) for key in keys}


def test_a_partition_is_named_by_its_number(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(topology(leaders))
    for number in (2, 0, 2, 1):
        assert sender.publish("t", b"%d" % number, partition=number) == b"OK"
    assert sender.multipublish("t", [b"x", b"y"], partition=1) == b"OK"
    assert sender.multipublish("t", [b"k"], key="hello") == b"OK"
    assert placed(leaders) == {b"0": 0, b"1": 1, b"2": 2, b"x": 1, b"y": 1, b"k": murmur3_partition("hello", 3)}


@pytest.mark.parametrize(("option", "connections"), [(None, 3), (1, 1), (2, 2)])
def test_each_partition_that_is_published_to_has_a_connection_of_its_own_as_far_as_is_allowed(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, option: int | None, connections: int
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology(dict.fromkeys(range(4), nsqd)), connections_per_nsqd=option)
    for number in range(9):
        sender.publish("t", b"%d" % number, partition=number % 3)
    until(lambda: len(nsqd.peers) == connections)
    assert nsqd.bodies_of(1) == [b"1", b"4", b"7"]
    for number in range(30):
        sender.publish("t", b"x", partition=number % 3)
    assert len(sender.stats()["connected"]) == len(nsqd.peers) == connections


def test_no_more_than_eight_connections_to_one_nsqd(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology(dict.fromkeys(range(20), nsqd)))
    for number in range(200):
        sender.publish("t", b"%d" % number, partition=number % 20)
    until(lambda: len(sender.stats()["connected"]) == 8)
    assert len(nsqd.peers) == 8


def test_a_partition_that_is_frozen_keeps_no_other_waiting(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    """A server works the commands of one connection off one after the other: behind a frozen one all would wait."""

    def freeze_one(peer: Peer, command: Command) -> None:
        if command.partition == 1:
            frozen.add(peer)
        if peer not in frozen:
            peer.ok()

    frozen: set[Peer] = set()
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology(dict.fromkeys(range(3), nsqd)), publish_timeout=30.0, attempt_timeout=0.3)
    for number in range(3):
        sender.publish("t", b"%d" % number, partition=number)
    until(lambda: len(sender.stats()["connected"]) == 3)
    nsqd.answer = freeze_one
    waits = sender.publish_nowait("t", b"frozen", partition=1)
    until(lambda: bool(frozen))
    for number in range(100):
        sender.publish("t", b"%d" % number, partition=2 * (number % 2), timeout=0.3)
    until(lambda: sender.stats()["stalled"])
    for number in range(100):
        sender.publish("t", b"%d" % number, partition=2 * (number % 2), timeout=0.3)
    assert not waits.ready()
    nsqd.answer = agree
    for peer in frozen:
        with suppress(OSError):  # it may have been given up meanwhile
            peer.ok()
    assert waits.get(timeout=WAIT) == b"OK"


def test_old_nsqds_beside_partitions_take_no_publishes(
    lookup_producer: LookupProducers, leaders: Leaders, publish_nsqd: Nsqds
) -> None:
    old = publish_nsqd()
    sender, _ = lookup_producer(topology(leaders, old))
    for number in range(12):
        sender.publish("t", b"%d" % number)
    assert not old.commands


def test_original_nsqds_behind_lookup_are_published_to_as_ever(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    old = publish_nsqd()
    sender, _ = lookup_producer(topology({}, old))
    assert sender.publish("t", b"x") == b"OK"
    assert sender.publish("t", b"later", defer=5) == b"OK"
    assert sender.multipublish("t", [b"y", b"z"]) == b"OK"
    assert [command[:3] for command in old.commands] == [("PUB", "t", ()), ("DPUB", "t", ("5",)), ("MPUB", "t", ())]


def test_linger_gathers_for_each_partition(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(topology(leaders), linger=0.02)
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 3)
    for nsqd in leaders.values():
        nsqd.commands.clear()
    results = [sender.publish_nowait("t", b"%d" % number, partition=number % 3) for number in range(30)]
    results += [sender.publish_nowait("t", b"any-%d" % number) for number in range(10)]
    gevent.joinall(results, timeout=WAIT)
    assert sorted(command.name for nsqd in leaders.values() for command in nsqd.commands) == ["MPUB"] * 4
    assert [body for body in leaders[1].bodies if not body.startswith(b"any")] == [b"%d" % n for n in range(1, 30, 3)]


def test_keys_of_bytes_and_of_text_take_the_same_short_way(
    lookup_producer: LookupProducers, leaders: Leaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual publish skips what is checked already; ``_new`` is the way of all others."""
    sender, _ = lookup_producer(topology(leaders))
    sender.publish("t", b"first")
    monkeypatch.setattr(sender, "_new", lambda *_: pytest.fail("the long way"))
    for number in range(9):
        sender.publish("t", b"text-%d" % number, key=str(number))
        sender.publish("t", b"bytes-%d" % number, key=b"%d" % number)
    found = placed(leaders)
    for number in range(9):
        expected = murmur3_partition(str(number), 3)
        assert found[b"text-%d" % number] == found[b"bytes-%d" % number] == expected


def test_a_key_that_the_strategy_cannot_take_is_refused_once_the_topic_is_known(
    lookup_producer: LookupProducers, leaders: Leaders
) -> None:
    sender, _ = lookup_producer(topology(leaders), key_strategy="hashcode")
    sender.publish("t", b"first", key="a")
    with pytest.raises(TypeError, match="must be str or int, not bytes"):
        sender.publish("t", b"x", key=b"a")
    assert sender.publish("t", b"good", key="a") == b"OK"
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


def test_without_lookup_a_redesigned_nsqd_takes_partitions_by_number(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender = new_producer(nsqd)
    assert sender.publish("t", b"x", partition=1) == b"OK"
    assert sender.publish("t", b"y") == b"OK"
    assert [(command.params, command.body) for command in nsqd.commands] == [(("1",), b"x"), ((), b"y")]
    with pytest.raises(errors.ConfigError, match="unknown without lookupd_http_addresses"):
        sender.publish("t", b"x", key="a")


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"key": 5}, TypeError, "str or bytes"),
        ({"key": "a", "partition": 1}, errors.ConfigError, "the key names the partition"),
        ({"key": "\udc80"}, errors.ConfigError, "lone surrogates"),
        ({"partition": -1}, errors.ConfigError, "0 to 1023"),
        ({"partition": True}, errors.ConfigError, "0 to 1023"),
        ({"partition": "1"}, errors.ConfigError, "0 to 1023"),
        ({"partition": 3}, errors.ConfigError, "has 3 partitions"),
        ({"trace_id": -1}, errors.ConfigError, "trace_id"),
        ({"trace_id": 1 << 64}, errors.ConfigError, "trace_id"),
        ({"trace_id": "5"}, errors.ConfigError, "trace_id"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    lookup_producer: LookupProducers, leaders: Leaders, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    sender, _ = lookup_producer(topology(leaders))
    sender.publish("t", b"first")
    with pytest.raises(error, match=text):
        sender.publish("t", b"x", **arguments)
    with pytest.raises(error, match=text):
        sender.publish_nowait("t", b"x", **arguments)
    with pytest.raises(error, match=text):
        sender.multipublish("t", [b"x"], **arguments)
    assert sender.publish("t", b"good") == b"OK"
    assert {body for nsqd in leaders.values() for body in nsqd.bodies} == {b"first", b"good"}
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"headers": 5}, "mapping"),
        ({"headers": {5: 5}}, "str keys"),
        ({"headers": {"a": object()}}, "cannot be JSON"),
        ({"headers": {"a": "x" * 70_000}}, "at most 65506"),
        ({"headers": {"a": "x" * (65_507 - len('{"a":""}'))}}, "at most 65506"),
        ({"headers": {"a": "x" * (65_506 - len('{"a":""}'))}, "tag": "t"}, "tag and trace id included"),
        ({"headers": {"a": float("nan")}}, "send it as text"),
        ({"headers": {"a": [{"b": float("-inf")}]}}, "send it as text"),
        ({"headers": {"a": b"bytes"}}, "decode it to str"),
        ({"tag": ""}, "1 to 100"),
        ({"tag": "x" * 101}, "1 to 100"),
        ({"headers": {"##trace_id": 5}}, "decimal digits"),
        ({"headers": {"a": 1}, "trace_id": 1 << 64}, "trace_id"),
    ],
)
def test_wrong_headers_are_refused(
    lookup_producer: LookupProducers, leaders: Leaders, arguments: dict[str, Any], text: str
) -> None:
    sender, _ = lookup_producer(topology(leaders, extend_support=True))
    with pytest.raises((TypeError, ValueError), match=text):
        sender.publish("t", b"x", **arguments)


@pytest.mark.parametrize("extras", [{"headers": {"a": 1}}, {"tag": "x"}, {"headers": {"a": 1}, "key": "k"}])
def test_headers_are_refused_when_lookup_was_asked_once_more(
    lookup_producer: LookupProducers, leaders: Leaders, extras: dict[str, Any]
) -> None:
    sender, lookup = lookup_producer(topology(leaders))
    sender.publish("t", b"first")
    for call in (
        lambda: sender.publish("t", b"x", **extras),
        lambda: sender.publish_nowait("t", b"x", **extras).get(timeout=WAIT),
        lambda: sender.multipublish("t", [b"x"], **extras),
        lambda: sender.publish("t", b"x", block=False, **extras),
    ):
        asked = lookup.refreshed
        with pytest.raises(errors.ConfigError, match="carries no extended headers"):
            call()
        assert lookup.refreshed > asked
    assert sender.publish("t", b"good") == b"OK"
    assert {body for nsqd in leaders.values() for body in nsqd.bodies} == {b"first", b"good"}
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


def test_headers_wait_for_lookup_no_longer_than_their_publish_and_keep_the_order(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(topology({0: nsqd}))
    sender.publish("t", b"first")
    lookup.answer = None  # it says nothing from now on
    with pytest.raises(errors.ConfigError, match="carries no extended headers"):
        sender.publish("t", b"x", headers={}, timeout=0.05)
    bound = [
        sender.publish_nowait("t", b"0", key="k", headers={"a": 1}),
        sender.publish_nowait("t", b"1", key="k"),
        sender.publish_nowait("t", b"2", key="k", tag="red"),
    ]
    assert sender.publish("t", b"free") == b"OK"  # it waits for nobody
    with pytest.raises(errors.NoLeader, match="carries headers by now"):
        sender.publish("t", b"x", key="k", timeout=0.05)
    assert not any(result.ready() for result in bound)
    lookup.tell(topology({0: nsqd}, extend_support=True))
    gevent.joinall(bound, timeout=WAIT, raise_error=True)
    assert [body for body in nsqd.bodies if len(body) == 1] == [b"0", b"1", b"2"]
    assert sender.stats()["held"] == 0


def test_what_came_after_headers_leaves_when_these_are_refused(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(topology({0: nsqd}))
    sender.publish("t", b"first")
    lookup.answer = None
    refused = sender.publish_nowait("t", b"0", key="k", headers={})
    after = sender.publish_nowait("t", b"1", key="k")
    lookup.tell(topology({0: nsqd}))
    assert after.get(timeout=WAIT) == b"OK"
    with pytest.raises(errors.ConfigError, match="carries no extended headers"):
        refused.get(timeout=WAIT)
    assert nsqd.bodies == [b"first", b"1"]


def test_an_original_nsqd_takes_no_partition(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    sender, _ = lookup_producer(topology({}, publish_nsqd()))
    for attempt in range(2):  # before lookup has answered, and after
        with pytest.raises(errors.ConfigError, match=r"partition=1: topic 't' has no partitions"):
            sender.multipublish("t", [b"x"], partition=1)
        assert attempt or sender.publish("t", b"y") == b"OK"
    assert sender.stats()["held"] == 0


def test_a_configured_original_nsqd_says_what_it_cannot(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = new_producer(nsqd)
    with pytest.raises(errors.ConfigError, match="original servers have no partitions"):
        sender.publish("t", b"x", partition=0)
    for arguments, text in (({"trace_id": 5}, "leave trace_id out"), ({"headers": {}}, "leave headers and tag out")):
        with pytest.raises(errors.ConfigError, match=text):
            sender.publish("t", b"x", **arguments)
    assert sender.publish("t", b"good") == b"OK"
    assert nsqd.bodies == [b"good"]


def test_a_redesigned_server_cannot_delay(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(topology(leaders))
    for _ in range(2):  # before it is known what servers there are, and then
        with pytest.raises(errors.ConfigError, match="leave defer out"):
            sender.publish("t", b"x", defer=100)
    assert not any(leader.commands for leader in leaders.values())


def test_a_key_needs_the_number_of_partitions(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(replace(topology(leaders), meta=None))
    with pytest.raises(errors.ConfigError, match="does not say how many partitions"):
        sender.publish("t", b"x", key="a")
    assert sender.publish("t", b"x", partition=1) == b"OK"
    assert sender.publish("t", b"y") == b"OK"


# Traces


def answer_with_receipts(peer: Peer, command: Command) -> None:
    """As a server does: ids and offsets of one partition, 30 bytes of overhead."""
    if not command.name.endswith("_TRACE") and b"##trace_id" not in command.messages[0][0]:
        peer.ok()
        return
    size = sum(30 + len(body) for body in command.bodies)
    trace_id = 0 if command.name == "MPUB_TRACE" else command.messages[0][0]
    if isinstance(trace_id, bytes):
        trace_id = (
            int(json.loads(trace_id)["##trace_id"]) if command.name == "PUB_EXT" else int.from_bytes(trace_id, "big")
        )
    peer.frame(0, receipt(1000, trace_id, 5000, size))


@pytest.fixture
def tracing(publish_nsqd: Nsqds) -> Leaders:
    return {number: publish_nsqd(answer_with_receipts, version=REDESIGNED) for number in range(2)}


def test_a_traced_publish_returns_a_receipt(lookup_producer: LookupProducers, tracing: Leaders) -> None:
    sender, _ = lookup_producer(topology(tracing))
    expected = Receipt(1000, 77, 5000, 34, 1, tracing[1].address)
    assert sender.publish("t", b"body", trace_id=77, partition=1) == expected
    assert sender.publish("t", b"body", trace_id=77, partition=1, raise_error=False).get(timeout=WAIT) == expected
    assert sender.publish_nowait("t", b"body", trace_id=(1 << 64) - 1).get(timeout=WAIT).trace_id == (1 << 64) - 1
    assert sender.publish("t", b"body") == b"OK"
    assert [command.name for command in tracing[1].commands[:2]] == ["PUB_TRACE", "PUB_TRACE"]


def test_a_traced_batch_returns_a_receipt_for_each(lookup_producer: LookupProducers, tracing: Leaders) -> None:
    sender, _ = lookup_producer(topology(tracing))
    address = tracing[0].address
    assert sender.multipublish("t", [b"a", b"bb"], trace_id=[5, 6], partition=0) == [
        Receipt(1000, 5, 5000, 31, 0, address),
        Receipt(1001, 6, 5031, 32, 0, address),
    ]
    assert [receipt.trace_id for receipt in sender.multipublish("t", [b"a", b"b"], trace_id=9)] == [9, 9]
    with pytest.raises(errors.ConfigError, match="trace_id has 1 items for 2 messages"):
        sender.multipublish("t", [b"a", b"b"], trace_id=[5])


def test_a_batch_that_is_cut_has_all_its_receipts(lookup_producer: LookupProducers, tracing: Leaders) -> None:
    sender, _ = lookup_producer(topology(tracing), max_body_size=100, max_msg_size=60)
    receipts = sender.multipublish("t", [b"x" * 40] * 5, trace_id=list(range(1, 6)), key="a")
    assert [each.trace_id for each in receipts] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [{"coalesce": True}, {"linger": 0.01}])
@pytest.mark.parametrize("place", [{"partition": 0}, {}])
def test_traced_publishes_gather_and_have_receipts_of_their_own(
    lookup_producer: LookupProducers, tracing: Leaders, options: dict[str, Any], place: dict[str, Any]
) -> None:
    sender, _ = lookup_producer(topology(tracing), **options)
    results = [sender.publish_nowait("t", b"%d" % number, trace_id=number + 1, **place) for number in range(8)]
    receipts = [result.get(timeout=WAIT) for result in results]
    assert [each.trace_id for each in receipts] == list(range(1, 9))
    assert any(command.name == "MPUB_TRACE" for nsqd in tracing.values() for command in nsqd.commands)


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.msg)


@pytest.fixture
def traced() -> tuple[TraceLog, list[Any]]:
    """A trace log of its own, and the records that were written to it."""
    handler = Records()
    log = logging.Logger("of this test", logging.INFO)
    log.addHandler(handler)
    return TraceLog(log), handler.records


def test_tracing_is_switched_while_it_runs(
    lookup_producer: LookupProducers, tracing: Leaders, traced: tuple[TraceLog, list[Any]]
) -> None:
    trace, records = traced
    sender, _ = lookup_producer(topology(tracing), trace=trace)
    assert sender.publish("t", b"x", partition=0) == b"OK"
    trace.enable("t")
    first = sender.publish("t", b"x", partition=0)
    both = sender.multipublish("t", [b"x", b"y"], partition=1)
    assert isinstance(first, Receipt)
    assert len({first.trace_id, *(each.trace_id for each in both)}) == 3
    trace.disable()
    assert sender.publish("t", b"x", partition=0) == b"OK"
    assert sender.publish("t", b"x", partition=0, trace_id=5).trace_id == 5
    assert [
        (each.internal_id, each.trace_id, each.offset, each.size, each.partition, each.nsqd) for each in records
    ] == [(*each[:5], str(each.nsqd)) for each in (first, *both)]


def test_servers_that_cannot_trace_take_it_untraced(
    lookup_producer: LookupProducers,
    publish_nsqd: Nsqds,
    new_producer: Producers,
    traced: tuple[TraceLog, list[Any]],
) -> None:
    trace, records = traced
    trace.enable()
    nsqd = publish_nsqd()
    behind_lookup, _ = lookup_producer(topology({}, nsqd), trace=trace)
    for sender in (behind_lookup, new_producer(nsqd, trace=trace), new_producer(nsqd, trace=trace, linger=0.005)):
        assert sender.publish("t", b"x") == b"OK"
        assert sender.multipublish("t", [b"x", b"y"]) == b"OK"
        results = [sender.publish_nowait("t", b"z") for _ in range(3)]
        assert [result.get(timeout=WAIT) for result in results] == [b"OK"] * 3
    assert not records
    assert {command.name for command in nsqd.commands} == {"PUB", "MPUB"}


def test_a_body_without_room_for_a_trace_id_goes_untraced(
    lookup_producer: LookupProducers, tracing: Leaders, traced: tuple[TraceLog, list[Any]]
) -> None:
    trace, _ = traced
    trace.enable()
    sender, _ = lookup_producer(topology(tracing), trace=trace, max_msg_size=20)
    assert sender.publish("t", b"x" * 20) == b"OK"
    assert isinstance(sender.publish("t", b"x" * 12), Receipt)
    with pytest.raises(errors.BodyInvalid, match="trace id or header"):
        sender.publish("t", b"x" * 13, trace_id=5)


# Headers and tags


def test_headers_and_tags_are_sent_as_json(lookup_producer: LookupProducers, tracing: Leaders) -> None:
    sender, _ = lookup_producer(topology(tracing, extend_support=True))
    assert sender.publish("t", b"x", headers={"a": 1, "b": ["ü"]}, partition=0) == b"OK"
    assert sender.publish("t", b"x", tag="red", partition=0) == b"OK"
    assert sender.publish("t", b"x", tag="red", trace_id=9, partition=0).trace_id == 9
    assert sender.publish("t", b"x", trace_id=8, partition=0).trace_id == 8
    assert sender.multipublish("t", [b"x", b"y"], headers=[{"n": 1}, {"n": 2}], tag="blue", partition=0) == b"OK"
    received = {"##trace_id": "7", "##client_dispatch_tag": "green", "k": "v"}
    assert sender.publish("t", b"x", headers=received, partition=0).trace_id == 7
    assert [(each.name, [json.loads(header) for header, _ in each.messages]) for each in tracing[0].commands] == [
        ("PUB_EXT", [{"a": 1, "b": ["ü"]}]),
        ("PUB_EXT", [{"##client_dispatch_tag": "red"}]),
        ("PUB_EXT", [{"##client_dispatch_tag": "red", "##trace_id": "9"}]),
        ("PUB_EXT", [{"##trace_id": "8"}]),
        ("MPUB_EXT", [{"n": 1, "##client_dispatch_tag": "blue"}, {"n": 2, "##client_dispatch_tag": "blue"}]),
        ("PUB_EXT", [received]),
    ]


def test_kinds_that_differ_do_not_share_a_command_and_keep_their_order(
    lookup_producer: LookupProducers, tracing: Leaders
) -> None:
    sender, _ = lookup_producer(topology(tracing, extend_support=True), linger=0.02)
    saying: list[dict[str, Any]] = [{}, {}, {"headers": {}}, {"headers": {"a": 1}}, {"tag": "t", "trace_id": 5}, {}]
    results = [sender.publish_nowait("t", b"%d" % number, partition=1, **each) for number, each in enumerate(saying)]
    gevent.joinall(results, timeout=WAIT)
    assert [command.name for command in tracing[1].commands] == ["MPUB", "MPUB_EXT", "PUB_EXT", "PUB"]
    assert tracing[1].bodies == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert results[4].get().trace_id == 5


def test_an_error_to_a_batch_with_headers_ends_the_connection(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.frame(1, b"E_EXT_NOT_SUPPORT no") if command.name == "MPUB_EXT" else peer.ok()

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    sender, _ = lookup_producer(replace(topology({0: nsqd}), meta=None))
    with pytest.raises(errors.PublishFailed, match="E_EXT_NOT_SUPPORT"):
        sender.multipublish("t", [b"x"], headers={"a": 1})
    assert sender.publish("t", b"y") == b"OK"
    assert len(nsqd.peers) == 2
