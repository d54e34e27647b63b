"""The producer and servers with partitions: where publishes go, in which order, what is refused, what comes back."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress

import gevent
import pytest
from msgspec.structs import replace
from support.partitions import lookup_of, topology
from support.publishing import REDESIGNED, EndOfPeer, agree, connected, numbers, receipt, refuse, stay_mute
from support.servers import free_address
from support.waiting import PROMPT, WAIT, promptly, until
from support.wire import frame

from nsq_fast import LookupdHTTPClient, Producer, Receipt, errors
from nsq_fast.protocol import publishing
from nsq_fast.protocol.publishing import hashcode_partition, murmur3_partition
from nsq_fast.protocol.topology import Nsqd

GATHERING = [{}, {"coalesce": True}, {"linger": 0.003}]


def placed(leaders):
    """Where each message went."""
    found = {}
    for number, nsqd in leaders.items():
        for command in nsqd.commands:
            assert command.partition == number
            found.update(dict.fromkeys(command.bodies, number))
    return found


# Where publishes go


@pytest.mark.parametrize("options", GATHERING)
def test_publishes_take_turns_over_the_partitions(lookup_producer, leaders, options):
    sender, _ = lookup_producer(topology(leaders), **options)
    sender.publish("t", b"first")
    connected(sender, 3)
    for number in range(30):
        assert sender.publish("t", b"%d" % number) == b"OK"
    counts = Counter(placed(leaders).values())
    assert all(10 <= counts[number] <= 11 for number in leaders)
    assert sender.multipublish("t", [b"a", b"b"]) == b"OK"
    assert len({placed(leaders)[body] for body in (b"a", b"b")}) == 1


def test_the_least_loaded_leader_is_chosen(lookup_producer, leaders):
    sender, _ = lookup_producer(topology(leaders), partition_strategy="least_loaded")
    sender.publish("t", b"first")
    connected(sender, 3)
    leaders[0].answer = leaders[1].answer = stay_mute
    slow = [sender.publish_nowait("t", b"slow", partition=number, timeout=1) for number in (0, 1)]
    for number in range(10):
        assert sender.publish("t", b"%d" % number) == b"OK"
    assert set(leaders[2].bodies) >= {b"%d" % number for number in range(10)}
    gevent.joinall(slow, timeout=WAIT)


@pytest.mark.parametrize(
    ("strategy", "hashed", "options"),
    [*(("murmur3", murmur3_partition, options) for options in GATHERING), ("hashcode", hashcode_partition, {})],
)
def test_a_key_names_the_partition(lookup_producer, leaders, strategy, hashed, options):
    sender, _ = lookup_producer(topology(leaders), key_strategy=strategy, **options)
    keys = [f"order-{number}" for number in range(40)]
    results = [sender.publish_nowait("t", key.encode(), key=key) for key in keys[:20]]
    gevent.joinall(results, timeout=WAIT)
    for key in keys[20:]:
        assert sender.publish("t", key.encode(), key=key) == b"OK"
    assert placed(leaders) == {key.encode(): hashed(key, 3) for key in keys}
    if strategy == "murmur3":
        for key in keys:
            assert sender.publish("t", b"bytes " + key.encode(), key=key.encode()) == b"OK"
            assert placed(leaders)[b"bytes " + key.encode()] == hashed(key, 3)
    else:
        with pytest.raises(errors.TypeInvalid, match="must be str or int, not bytes"):
            sender.publish("t", b"x", key=b"a")
        assert sender.stats()["held"] == sender.stats()["pending"] == 0


def test_keys_go_where_a_function_of_the_user_says(lookup_producer, leaders):
    def by_shop(key, partition_num):
        assert partition_num == 3
        return key["shop"] % partition_num if isinstance(key, dict) else len(key) % partition_num

    sender, _ = lookup_producer(topology(leaders), key_strategy=by_shop)
    for _ in range(2):  # before lookup has answered, and then
        sender.publish("t", b"shop 4", key={"shop": 4})
        sender.publish("t", b"name", key="four")
        sender.multipublish("t", [b"batch"], key={"shop": 5})
    assert leaders[1].bodies == [b"shop 4", b"name"] * 2
    assert leaders[2].bodies == [b"batch"] * 2


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda key, count: count, "is 3: must be a whole number, 0 to 2"),
        (lambda key, count: "1", "is '1': must be a whole number"),
        (lambda key, count: True, "is True: must be"),
        (lambda key, count: -1, "is -1: must be"),
        (lambda key, count: 1 // 0, "failed: ZeroDivisionError"),
    ],
)
def test_what_such_a_function_does_wrong_is_told(lookup_producer, leaders, function, text):
    sender, _ = lookup_producer(topology(leaders), key_strategy=function)
    for _ in range(2):
        with pytest.raises(errors.ConfigError, match=text):
            sender.publish("t", b"x", key="k")
        assert sender.publish("t", b"free") == b"OK"
    until(lambda: sender.stats()["held"] == 0)


@pytest.mark.parametrize(
    ("partitions", "option", "connections"), [(3, None, 3), (3, 1, 1), (3, 2, 2), (20, None, 8)], ids=str
)
def test_each_partition_that_is_published_to_has_a_connection_of_its_own_as_far_as_is_allowed(
    lookup_producer, publish_nsqd, partitions, option, connections
):
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology(dict.fromkeys(range(20), nsqd)), connections_per_nsqd=option)
    for number in range(10 * partitions):
        sender.publish("t", b"%d" % number, partition=number % partitions)
    connected(sender, connections)
    assert len(nsqd.peers) == connections
    assert nsqd.bodies_of(1) == [b"%d" % number for number in range(1, 10 * partitions, partitions)]


def test_a_partition_that_is_frozen_keeps_no_other_waiting(lookup_producer, publish_nsqd):
    """A server works the commands of one connection off one after the other: behind a frozen one all would wait."""

    def freeze_one(peer, command):
        if command.partition == 1:
            frozen.add(peer)
        if peer not in frozen:
            peer.ok()

    frozen = set()
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology(dict.fromkeys(range(3), nsqd)), publish_timeout=30.0, attempt_timeout=0.3)
    for number in range(3):
        sender.publish("t", b"%d" % number, partition=number)
    connected(sender, 3)
    nsqd.answer = freeze_one
    waits = sender.publish_nowait("t", b"frozen", partition=1)
    until(lambda: bool(frozen))
    for number in range(200):
        if number == 100:
            until(lambda: sender.stats()["stalled"])
            with pytest.raises(errors.NoLeader, match=f"its leader {nsqd.address} does not reply"):
                sender.publish("t", b"more", partition=1, block=False)
        sender.publish("t", b"%d" % number, partition=2 * (number % 2), timeout=0.3)
    assert not waits.ready()
    nsqd.answer = agree
    for peer in frozen:
        with suppress(OSError):  # it may have been given up meanwhile
            peer.ok()
    assert waits.get(timeout=WAIT) == b"OK"


@pytest.mark.parametrize(
    ("ending", "error"),
    [(frame(1, b"E_BAD_MESSAGE bad"), "E_BAD_MESSAGE"), (b"\xff" * 8, "may have been stored")],
    ids=["fatal error", "garbage"],
)
def test_what_follows_a_reply_that_came_with_the_end_of_the_connection_is_sent_on_the_next(
    lookup_producer, publish_nsqd, ending, error
):
    """Of what is read at once the first reply has the next command sent, and what is behind it ends the connection."""

    def answer(peer, command):
        if command.bodies == [b"bad"]:
            peer.sock.sendall(frame(0, b"OK") + ending)
            peer.sock.shutdown(1)
            peer.read_all()
            raise EndOfPeer
        if command.bodies != [b"first"]:
            peer.ok()

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    options = {"connections_per_nsqd": 1, "retry_unknown_outcome": False}
    sender, _ = lookup_producer(topology(dict.fromkeys(range(2), nsqd)), **options)
    sender.publish("t", b"before", partition=0)
    first = sender.publish_nowait("t", b"first", partition=0)
    nsqd.wait_commands(2)
    second = sender.publish_nowait("t", b"second", partition=0)  # waits for the reply to the first
    bad = sender.publish_nowait("t", b"bad", partition=1)
    assert first.get(timeout=WAIT) == second.get(timeout=WAIT) == b"OK"
    with pytest.raises(errors.PublishFailed, match=error):
        bad.get(timeout=WAIT)
    assert nsqd.bodies == [b"before", b"first", b"bad", b"second"]


def test_original_nsqds_behind_lookup_are_published_to_as_ever(lookup_producer, publish_nsqd, leaders, new_producer):
    """And a redesigned one without lookup takes partitions by number."""
    old = publish_nsqd()
    beside, _ = lookup_producer(topology(leaders, old))
    for number in range(12):
        beside.publish("t", b"%d" % number)
    assert not old.commands, "partitions take all publishes"
    sender, _ = lookup_producer(topology({}, old))
    assert sender.publish("t", b"x") == b"OK"
    assert sender.publish("t", b"later", defer=5) == b"OK"
    assert sender.multipublish("t", [b"y", b"z"]) == b"OK"
    assert [command[:3] for command in old.commands] == [("PUB", "t", ()), ("DPUB", "t", ("5",)), ("MPUB", "t", ())]
    nsqd = publish_nsqd(version=REDESIGNED)
    sender = new_producer(nsqd)
    assert sender.publish("t", b"x", partition=1) == b"OK"
    assert sender.publish("t", b"y") == b"OK"
    assert [(command.params, command.body) for command in nsqd.commands] == [(("1",), b"x"), ((), b"y")]
    with pytest.raises(errors.ConfigError, match="unknown without lookupd_http_addresses"):
        sender.publish("t", b"x", key="a")


def test_without_lookup_keys_are_refused_from_the_moment_a_redesigned_nsqd_is_there(publish_nsqd, new_producer, caplog):
    original, redesigned = publish_nsqd(), publish_nsqd(version=REDESIGNED)
    redesigned.is_refusing = True
    sender = new_producer(original, redesigned, max_backoff_duration=0.05)
    for body in numbers(5):
        assert sender.publish("t", body, key="k") == b"OK"
    redesigned.is_refusing = False
    connected(sender, 2)
    for key in ("k", b"k"):
        with pytest.raises(errors.ConfigError, match="unknown without lookupd_http_addresses"):
            sender.publish("t", b"x", key=key)
    redesigned.stop()
    connected(sender, 1)
    for _ in range(2):
        assert sender.publish("t", b"last", key="k") == b"OK"
    assert original.bodies == [*numbers(5), b"last", b"last"]
    assert caplog.text.count("where keys give no order") == 1
    assert not redesigned.commands


@pytest.mark.parametrize("strategy", ["murmur3", "hashcode", lambda key, count: 1 // 0])
def test_where_a_key_keeps_no_order_it_is_checked_all_the_same(publishing, strategy):
    """But a function of the user's is not asked: there is no partition to name."""
    nsqd, sender = publishing(key_strategy=strategy)
    for body in numbers(3):  # before it is known what the nsqd is, and then
        assert sender.publish("t", body, key="k") == b"OK"
        if not callable(strategy):
            with pytest.raises(errors.TypeInvalid, match="must be str or"):
                sender.publish("t", b"x", key=b"a" if strategy == "hashcode" else 7)
        if strategy == "murmur3":
            with pytest.raises(errors.ConfigError, match="lone surrogates"):
                sender.publish("t", b"x", key="\ud800")
    assert nsqd.bodies == numbers(3)
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


def test_what_has_a_key_and_came_before_the_connection_leaves_first(publish_nsqd, new_producer):
    nsqd = publish_nsqd()
    sender = new_producer(nsqd)
    early = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    connected(sender, 1)
    later = [sender.publish_nowait("t", b"later", key="k"), sender.publish_nowait("t", b"later")]
    gevent.joinall([*early, *later], timeout=WAIT)
    assert nsqd.bodies == [*numbers(5), b"later", b"later"]


def test_moves_of_leaders_are_counted(lookup_producer, leaders, publish_nsqd, consume):
    before, after = topology(leaders), topology({**leaders, 2: publish_nsqd(version=REDESIGNED)})
    sender, lookup = lookup_producer(before)
    sender.publish("t", b"x")
    consumer = consume(lambda c, m: None, found=before, topic="t")
    dying = topology({number: nsqd for number, nsqd in leaders.items() if number != 2})  # nobody leads it for a while
    counts = []
    for answer in (before, after, after, before, dying, before, dying, after):
        lookup.tell(answer, "t")
        lookup_of(consumer).tell(answer)
        assert sender.stats()["leader_moves"] == consumer.stats().leader_moves
        counts.append(consumer.stats().leader_moves)
    assert counts == [0, 1, 1, 2, 2, 2, 2, 3]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"headers": {"a": "x" * (65_507 - len('{"a":""}'))}}, "at most 65506"),
        ({"headers": {"a": "x" * (65_506 - len('{"a":""}'))}, "tag": "t"}, "tag and trace id included"),
        ({"headers": {"a": float("nan")}}, "send it as text"),
        ({"headers": {"a": [{"b": float("-inf")}]}}, "send it as text"),
        ({"headers": {"a": b"bytes"}}, "decode it to str"),
        ({"tag": "x" * 101}, "1 to 100"),
        ({"headers": {"##trace_id": 5}}, "decimal digits"),
        ({"headers": {"##trace_id": "9" * 5000}}, "decimal digits"),  # more than Python makes a number of
    ],
)
def test_wrong_headers_are_refused(leading, arguments, text):
    _, sender, _ = leading(meta={"extend_support": True})
    with pytest.raises((TypeError, ValueError), match=text):
        sender.publish("t", b"x", **arguments)


def test_headers_are_refused_when_lookup_was_asked_once_more(leading):
    nsqd, sender, lookup = leading()
    sender.publish("t", b"first")
    for call in (
        lambda: sender.publish("t", b"x", headers={"a": 1}),
        lambda: sender.publish("t", b"x", headers={"a": 1}, key="k"),
        lambda: sender.publish_nowait("t", b"x", tag="x").get(timeout=WAIT),
        lambda: sender.multipublish("t", [b"x"], tag="x"),
        lambda: sender.publish("t", b"x", tag="x", block=False),
    ):
        asked = lookup.refreshed
        with pytest.raises(errors.ConfigError, match="carries no extended headers"):
            call()
        assert lookup.refreshed > asked
    assert sender.publish("t", b"good") == b"OK"
    assert nsqd.bodies == [b"first", b"good"]
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


def test_headers_wait_for_lookup_no_longer_than_their_publish_and_keep_the_order(leading, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.routing.LONGEST_DOUBT", 600.0)  # it is its answer that ends the doubt
    nsqd, sender, lookup = leading()
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


def test_what_a_server_lacks_is_said(lookup_producer, publish_nsqd, new_producer, leaders):
    old = publish_nsqd()
    behind_lookup, _ = lookup_producer(topology({}, old))
    for attempt in range(2):  # before lookup has answered, and after
        with pytest.raises(errors.ConfigError, match=r"partition=1: topic 't' has no partitions"):
            behind_lookup.multipublish("t", [b"x"], partition=1)
        assert attempt or behind_lookup.publish("t", b"good") == b"OK"
    configured = new_producer(old)
    for arguments, text in (
        ({"partition": 0}, "original servers have no partitions"),
        ({"trace_id": 5}, "leave trace_id out"),
        ({"headers": {}}, "leave headers and tag out"),
    ):
        with pytest.raises(errors.ConfigError, match=text):
            configured.publish("t", b"x", **arguments)
    assert configured.publish("t", b"good") == b"OK"
    assert old.bodies == [b"good"] * 2
    sender, _ = lookup_producer(replace(topology(leaders), meta=None))
    for _ in range(2):  # before it is known what servers there are, and then
        with pytest.raises(errors.ConfigError, match="leave defer out"):
            sender.publish("t", b"x", defer=100)
    with pytest.raises(errors.ConfigError, match="does not say how many partitions"):
        sender.publish("t", b"x", key="a")
    assert not any(leader.commands for leader in leaders.values())
    assert sender.publish("t", b"x", partition=1) == b"OK"
    assert sender.publish("t", b"y") == b"OK"


# Traces


def answer_with_receipts(peer, command):
    """As a server does: ids and offsets of one partition, 30 bytes of overhead."""
    if not command.name.endswith("_TRACE") and b"##trace_id" not in command.messages[0][0]:
        peer.ok()
        return
    size = sum(30 + len(body) for body in command.bodies)
    header = command.messages[0][0]
    trace_id = int(json.loads(header)["##trace_id"]) if command.name == "PUB_EXT" else int.from_bytes(header, "big")
    peer.frame(0, receipt(1000, 0 if command.name == "MPUB_TRACE" else trace_id, 5000, size))


@pytest.fixture
def tracing(publish_nsqd):
    return {number: publish_nsqd(answer_with_receipts, version=REDESIGNED) for number in range(2)}


def test_traced_publishes_return_receipts(lookup_producer, tracing):
    sender, _ = lookup_producer(topology(tracing), max_body_size=100, max_msg_size=60)
    expected = Receipt(1000, 77, 5000, 34, 1, tracing[1].address)
    assert sender.publish("t", b"body", trace_id=77, partition=1) == expected
    assert sender.publish("t", b"body", trace_id=77, partition=1, raise_error=False).get(timeout=WAIT) == expected
    assert sender.publish_nowait("t", b"body", trace_id=(1 << 64) - 1).get(timeout=WAIT).trace_id == (1 << 64) - 1
    assert sender.publish("t", b"body") == b"OK"
    assert [command.name for command in tracing[1].commands[:2]] == ["PUB_TRACE", "PUB_TRACE"]
    address = tracing[0].address
    assert sender.multipublish("t", [b"a", b"bb"], trace_id=[5, 6], partition=0) == [
        Receipt(1000, 5, 5000, 31, 0, address),
        Receipt(1001, 6, 5031, 32, 0, address),
    ]
    assert [receipt.trace_id for receipt in sender.multipublish("t", [b"a", b"b"], trace_id=9)] == [9, 9]
    with pytest.raises(errors.ConfigError, match="trace_id has 1 item for 2 messages"):
        sender.multipublish("t", [b"a", b"b"], trace_id=[5])
    receipts = sender.multipublish("t", [b"x" * 40] * 5, trace_id=list(range(1, 6)), key="a")
    assert [each.trace_id for each in receipts] == [1, 2, 3, 4, 5], "a batch that is cut has all its receipts"
    for options, place in (({"coalesce": True}, {"partition": 0}), ({"linger": 0.01}, {})):
        for nsqd in tracing.values():
            nsqd.commands.clear()
        gathering, _ = lookup_producer(topology(tracing), **options)
        results = [gathering.publish_nowait("t", b"%d" % number, trace_id=number + 1, **place) for number in range(8)]
        assert [result.get(timeout=WAIT).trace_id for result in results] == list(range(1, 9))
        assert any(command.name == "MPUB_TRACE" for nsqd in tracing.values() for command in nsqd.commands)


def test_tracing_is_switched_while_it_runs(lookup_producer, tracing, new_trace):
    trace, records = new_trace()
    sender, _ = lookup_producer(topology(tracing), trace=trace, max_msg_size=20)
    assert sender.publish("t", b"x", partition=0) == b"OK"
    trace.enable("t")
    first = sender.publish("t", b"x", partition=0)
    both = sender.multipublish("t", [b"x", b"y"], partition=1)
    assert isinstance(first, Receipt)
    assert len({first.trace_id, *(each.trace_id for each in both)}) == 3
    assert sender.publish("t", b"x" * 20) == b"OK", "a body without room for a trace id goes untraced"
    with pytest.raises(errors.BodyInvalid, match="trace id or header"):
        sender.publish("t", b"x" * 13, trace_id=5)
    trace.disable()
    assert sender.publish("t", b"x", partition=0) == b"OK"
    assert sender.publish("t", b"x", partition=0, trace_id=5).trace_id == 5
    assert [
        (each.internal_id, each.trace_id, each.offset, each.size, each.partition, each.nsqd) for each in records
    ] == [(*each[:5], str(each.nsqd)) for each in (first, *both)]


def test_servers_that_cannot_trace_take_it_untraced(lookup_producer, publish_nsqd, new_producer, new_trace):
    trace, records = new_trace()
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


# Headers and tags


def test_headers_and_tags_are_sent_as_json(leading):
    nsqd, sender, _ = leading(answer_with_receipts, meta={"extend_support": True})
    assert sender.publish("t", b"x", headers={"a": 1, "b": ["ü"]}) == b"OK"
    assert sender.publish("t", b"x", tag="red") == b"OK"
    assert sender.publish("t", b"x", tag="red", trace_id=9).trace_id == 9
    assert sender.publish("t", b"x", trace_id=8).trace_id == 8
    assert sender.multipublish("t", [b"x", b"y"], headers=[{"n": 1}, {"n": 2}], tag="blue") == b"OK"
    received = {"##trace_id": "7", "##client_dispatch_tag": "green", "k": "v"}
    assert sender.publish("t", b"x", headers=received).trace_id == 7
    assert [(each.name, [json.loads(header) for header, _ in each.messages]) for each in nsqd.commands] == [
        ("PUB_EXT", [{"a": 1, "b": ["ü"]}]),
        ("PUB_EXT", [{"##client_dispatch_tag": "red"}]),
        ("PUB_EXT", [{"##client_dispatch_tag": "red", "##trace_id": "9"}]),
        ("PUB_EXT", [{"##trace_id": "8"}]),
        ("MPUB_EXT", [{"n": 1, "##client_dispatch_tag": "blue"}, {"n": 2, "##client_dispatch_tag": "blue"}]),
        ("PUB_EXT", [received]),
    ]


def test_kinds_that_differ_do_not_share_a_command_and_keep_their_order(leading):
    nsqd, sender, _ = leading(answer_with_receipts, meta={"extend_support": True}, linger=0.02)
    saying = [{}, {}, {"headers": {}}, {"headers": {"a": 1}}, {"tag": "t", "trace_id": 5}, {}]
    results = [sender.publish_nowait("t", b"%d" % number, partition=0, **each) for number, each in enumerate(saying)]
    gevent.joinall(results, timeout=WAIT)
    assert [command.name for command in nsqd.commands] == ["MPUB", "MPUB_EXT", "PUB_EXT", "PUB"]
    assert nsqd.bodies == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert results[4].get().trace_id == 5


def test_an_error_to_a_batch_with_headers_ends_the_connection(lookup_producer, publish_nsqd):
    def answer(peer, command):
        peer.frame(1, b"E_EXT_NOT_SUPPORT no") if command.name == "MPUB_EXT" else peer.ok()

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    sender, _ = lookup_producer(replace(topology({0: nsqd}), meta=None))
    with pytest.raises(errors.PublishFailed, match="E_EXT_NOT_SUPPORT"):
        sender.multipublish("t", [b"x"], headers={"a": 1})
    assert sender.publish("t", b"y") == b"OK"
    assert len(nsqd.peers) == 2


def test_what_was_behind_a_batch_with_headers_that_is_refused_has_used_up_no_attempt(lookup_producer, publish_nsqd):
    refusals = [NOT_WRITABLE] * 3

    def answer(peer, command):
        peer.frame(1, refusals.pop()) if command.name == "MPUB_EXT" and refusals else peer.ok()

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    options = {"connections_per_nsqd": 1, "max_publish_attempts": 1, "publish_timeout": 60.0}
    sender, _ = lookup_producer(replace(topology({0: nsqd, 1: nsqd}), meta=None), **options)
    batch = sender.multipublish("t", [b"x"], headers={"a": 1}, partition=0, raise_error=False)
    behind = sender.publish_nowait("t", b"y", partition=1)
    assert [each.get(timeout=WAIT) for each in (batch, behind)] == [b"OK", b"OK"]


# Publishes bound to a partition stay in order, whatever its leaders do; others go where they can


NOT_LEADER = b"E_FAILED_ON_NOT_LEADER "
NOT_WRITABLE = b"E_FAILED_ON_NOT_WRITABLE "
PATIENT = {"max_publish_attempts": 100, "publish_timeout": 60.0}


class Log:
    """A partition as servers keep it: what was stored, in order. ``answer`` fails by a script of errors first.

    An error is bytes; None stores the messages but ends the connection before the reply.
    """

    def __init__(self, *script):
        self.stored = []
        self._script = list(script)

    def answer(self, peer, command):
        error = self._script.pop(0) if self._script else b""
        if not error:
            self.stored += command.bodies
        if error is None:
            peer.reset()
            raise EndOfPeer
        if error.startswith(b"E_TOPIC"):
            refuse(peer, error)
        peer.frame(1, error) if error else peer.ok()


@pytest.mark.parametrize(
    ("options", "encode"), [({}, "pub"), ({"coalesce": True}, "mpub"), ({"linger": 0.003}, "mpub")]
)
def test_want_of_memory_fails_those_that_were_to_be_sent_and_no_later_ones(leading, monkeypatch, options, encode):
    nsqd, sender, _ = leading(**options)
    assert sender.publish("t", b"before", partition=0) == b"OK"
    right, failures = getattr(publishing._codec, encode), [MemoryError()]
    monkeypatch.setattr(publishing._codec, encode, lambda *args: right(*args) if not failures else fail(failures))
    results = [sender.publish_nowait("t", body, partition=0) for body in numbers(5)]
    gevent.joinall(results, timeout=WAIT)
    for body, result in zip(numbers(5), results, strict=True):
        assert (body in nsqd.bodies) == result.successful()
        assert result.successful() or (not result.exception.possibly_stored and "MemoryError" in str(result.exception))
    failures.clear()  # it was not asked where all left in one command, or each in one
    assert sender.publish("t", b"after", partition=0, timeout=WAIT) == b"OK"
    assert sender.stats()["pending"] == sender.stats()["held"] == 0


def fail(failures):
    raise failures.pop()


@pytest.mark.parametrize("options", GATHERING)
@pytest.mark.parametrize(
    "script",
    [
        [NOT_WRITABLE, NOT_LEADER, NOT_WRITABLE],
        [b"", NOT_WRITABLE, b"", b"E_PUB_FAILED busy", b"", b"E_MPUB_FAILED busy", b"E_PUB_TOO_MUCH_WAITING no"],
        [b"", None, NOT_LEADER, None],
        [b"E_TOPIC_NOT_EXIST ", NOT_LEADER],
    ],
)
def test_what_is_tried_again_is_not_overtaken(leading, options, script):
    log = Log(*script)
    _, sender, _ = leading(log.answer, max_publish_attempts=9, **options)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(30)]
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert list(dict.fromkeys(log.stored)) == numbers(30)


def test_what_may_go_anywhere_and_is_refused_for_now_holds_up_nothing_that_has_a_partition(leading):
    refusals = []
    _, sender, _ = leading(
        lambda peer, command: peer.frame(1, refusals.pop()) if refusals else peer.ok(),
        retry_base_delay=2 * WAIT, retry_max_delay=2 * WAIT, publish_timeout=4 * WAIT,
    )  # fmt: skip
    assert sender.publish("t", b"first", partition=0) == b"OK"
    refusals.append(b"E_PUB_FAILED busy")
    refused = sender.publish_nowait("t", b"anywhere")
    for body in numbers(2):  # the second at any rate after the refusal
        assert sender.publish("t", body, partition=0, timeout=PROMPT) == b"OK"
    assert (refusals, refused.ready()) == ([], False)


def test_what_waited_for_a_reply_does_not_linger_besides_and_close_sends_the_rest(leading):
    nsqd, sender, _ = leading(stay_mute, linger=10 * WAIT, linger_max_messages=3)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    nsqd.wait_commands(1)
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall(results, timeout=WAIT)
    last = sender.publish_nowait("t", b"last", key="k")
    sender.close()
    assert last.get(block=False) == b"OK"
    assert [command.bodies for command in nsqd.commands] == [numbers(3), numbers(5)[3:], [b"last"]]


@pytest.mark.parametrize("options", GATHERING)
@pytest.mark.parametrize("is_over", [True, False], ids=["the connection ends", "it stays open"])
def test_one_that_fails_for_good_leaves_a_gap_and_the_rest_in_order(leading, options, is_over):
    def answer(peer, command):
        if b"3" not in command.bodies:
            stored.extend(command.bodies)
            peer.ok()
        elif is_over:
            refuse(peer, b"E_BAD_MESSAGE no")
        else:
            peer.frame(1, b"E_%s_FAILED invalid message write size 9" % command.name.encode())

    stored = []
    _, sender, _ = leading(answer, **options)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(8)]
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [number != 3 for number in range(8)]
    assert stored == [body for body in numbers(8) if body != b"3"]
    assert not results[3].exception.possibly_stored
    assert sender.stats()["held"] == 0


def test_a_missing_partition_is_never_replaced_by_another(lookup_producer, leaders):
    present = {number: leaders[number] for number in (0, 1)}
    sender, lookup = lookup_producer(topology(present, partition_num=3))
    waiting = [sender.publish_nowait("t", body, partition=2) for body in numbers(4)]
    for number in range(6):
        assert sender.publish("t", b"free-%d" % number) == b"OK"
    with pytest.raises(errors.NoLeader, match=r"partition 2 of topic 't': lookup names no leader.* or no channel yet"):
        sender.publish("t", b"x", partition=2, timeout=0.05)
    with pytest.raises(errors.NoLeader):
        sender.publish("t", b"x", partition=2, block=False)
    until(lambda: lookup.refreshed >= 2)
    assert sender.stats()["leaders"]["t"][2] is None
    lookup.tell(topology(leaders))
    gevent.joinall(waiting, timeout=WAIT)
    assert leaders[2].bodies == numbers(4)
    assert leaders[0].bodies_of(2) == leaders[1].bodies_of(2) == []
    assert sender.stats()["held"] == 0


def test_a_leader_that_is_not_reachable_is_named(lookup_producer):
    address = free_address()
    known = topology({}, partition_num=1)
    sender, lookup = lookup_producer(replace(known, partitions={0: Nsqd(address, address, REDESIGNED)}))
    with pytest.raises(errors.NoLeader, match=f"its leader {address} is not connected") as caught:
        sender.publish("t", b"x", key="k", timeout=1.0)
    assert isinstance(caught.value.__cause__, errors.ConnectFailed)
    assert lookup.refreshed
    with pytest.raises(errors.NoNsqd):
        sender.publish("t", b"x", timeout=0.1)


@pytest.mark.parametrize(
    ("refusal", "arguments"),
    [
        (NOT_LEADER, {"key": "k"}),
        (NOT_LEADER, {}),
        (b"E_PUB_FAILED exiting", {"key": "k"}),
        (b"E_PUB_FAILED pub to wait channel timeout", {}),
    ],
)
def test_time_ends_a_publish_that_meets_a_moving_leader_and_no_count(leading, arguments, refusal):
    nsqd, sender, lookup = leading(
        lambda peer, command: peer.frame(1, refusal),
        publish_timeout=60.0,
        retry_max_delay=0.01,
        max_publish_attempts=1,
        retry_unknown_outcome=False,
    )
    result = sender.publish_nowait("t", b"x", **arguments)
    nsqd.wait_commands(50)
    assert not result.ready()
    assert lookup.refreshed
    nsqd.answer = agree
    assert result.get(timeout=WAIT) == b"OK"


@pytest.mark.parametrize("options", GATHERING)
def test_what_ends_servers_is_sent_to_two_of_them_and_harms_no_other(lookup_producer, publish_nsqd, options):
    def die_of_poison(peer, command):
        if b"poison" in command.bodies:
            peer.reset()
            raise EndOfPeer
        peer.ok()

    nsqds = [publish_nsqd(die_of_poison, version=REDESIGNED) for _ in range(4)]
    sender, _ = lookup_producer(topology(dict(enumerate(nsqds))), **PATIENT, **options)
    sender.publish("t", b"first")
    connected(sender, 4)
    results = [sender.publish_nowait("t", body) for body in (b"poison", *numbers(40))]
    gevent.joinall(results, timeout=WAIT)
    killed = [nsqd for nsqd in nsqds if b"poison" in nsqd.bodies]
    assert len(killed) == 2
    assert all(result.get(block=False) == b"OK" for result in results[1:])
    error = results[0].exception
    assert isinstance(error, errors.PublishFailed)
    assert error.possibly_stored
    said = ("ended the connection while working on it", "no other server", *(str(each.address) for each in killed))
    assert [text for text in said if text not in str(error)] == []


def test_what_was_behind_what_ended_servers_is_tried_on(leading, publish_nsqd):
    # The attempts of the one behind do not count: the server was working on another publish.
    first, sender, lookup = leading(stay_mute, max_publish_attempts=2, publish_timeout=60.0)
    nsqds = [first, *(publish_nsqd(stay_mute, version=REDESIGNED) for _ in range(3))]
    poison = sender.publish_nowait("t", b"poison")
    behind = sender.publish_nowait("t", b"behind")
    for number, nsqd in enumerate(nsqds[:3], start=1):
        nsqd.wait_commands(1 if number == 3 else 2)
        nsqd.peers[0].reset()
        lookup.tell(topology({0: nsqds[number]}))
    nsqds[3].answer = agree
    assert behind.get(timeout=WAIT) == b"OK"
    assert [b"poison" in nsqd.bodies for nsqd in nsqds] == [True, True, False, False]
    assert isinstance(poison.exception, errors.PublishFailed)


def test_a_silent_leader_is_asked_about_until_another_leads_and_then_left_at_once(leading, publish_nsqd, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.routing.SILENCE", 1000.0)
    new = publish_nsqd(version=REDESIGNED)
    old, sender, lookup = leading(stay_mute, attempt_timeout=0.1, publish_timeout=60.0, retry_max_delay=0.05)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(3)]
    old.wait_commands(1)
    before = lookup.refreshed
    until(lambda: lookup.refreshed >= before + 10)  # lookup may take a while to see that the leader is gone
    assert sender.stats()["stalled"] == [str(old.address)]
    lookup.tell(topology({0: new}))
    gevent.joinall(results, timeout=WAIT, raise_error=True)
    assert new.bodies == numbers(3)
    asked = lookup.refreshed
    assert sender.publish("t", b"3", key="k") == b"OK"
    assert lookup.refreshed <= asked + 1  # no more than what was on its way


@pytest.mark.parametrize("trouble", ["silent", "moving"])
def test_publishes_without_key_go_round_a_leader_in_trouble(lookup_producer, leaders, trouble):
    sender, lookup = lookup_producer(
        topology(leaders), attempt_timeout=0.1, publish_timeout=60.0, retry_base_delay=5.0, retry_max_delay=5.0
    )
    assert sender.publish("t", b"first") == b"OK"
    connected(sender, 3)
    leaders[1].answer = stay_mute if trouble == "silent" else lambda peer, command: peer.frame(1, NOT_LEADER)
    before = lookup.refreshed
    callers = [gevent.spawn(sender.publish, "t", body) for body in numbers(12)]
    gevent.joinall(callers, timeout=WAIT, raise_error=True)
    owed = len(leaders[1].commands)
    for number in range(30):
        assert sender.publish("t", b"later-%d" % number, timeout=1 if trouble == "moving" else 60) == b"OK"
    assert len(leaders[1].commands) == owed, "then it was left alone"
    assert lookup.refreshed > before


# A topic that is deleted, and made anew with another number of partitions


@pytest.mark.parametrize("options", GATHERING)
def test_a_key_whose_partition_is_no_more_goes_where_it_belongs_now(cluster, options):
    """At once, and not when lookup is next asked by itself, or the publish has timed out."""

    def make(partitions):
        cluster.create_topic("t", partitions=partitions, replicas=1, multi_part=True, channels=["c"])

    def publish(key):
        return producer.publish("t", b"x", key=key, trace_id=7).partition

    keys = [f"k{number}" for number in range(20)]
    addresses = [str(each.http_address) for each in cluster.lookupds]
    make(4)
    with Producer((), addresses, lookupd_poll_interval=600.0, publish_timeout=WAIT, **options) as producer:
        assert [publish(key) for key in keys] == [murmur3_partition(key, 4) for key in keys]
        with LookupdHTTPClient.from_url(addresses[0]) as client:
            client.delete_topic("t", partition="**")
        make(2)
        with promptly():
            jobs = [gevent.spawn(publish, key) for key in keys]
            assert [job.get() for job in jobs] == [murmur3_partition(key, 2) for key in keys]
            with pytest.raises(errors.ConfigError, match="has 2 partitions"):
                producer.publish("t", b"x", partition=3)


def test_bodies_are_compressed_no_more_once_the_topic_was_made_anew_without_headers(cluster):
    """Lookup is asked as soon as a server refuses one, and not when its next poll is due."""
    body = b"orders " * 1000
    addresses = [str(each.http_address) for each in cluster.lookupds]
    cluster.create_topic("t", ext=True, channels=["c"])
    options = {"lookupd_poll_interval": 600.0, "publish_timeout": WAIT, "body_compression": "gzip"}
    with Producer((), addresses, **options) as producer:
        producer.publish("t", body)
        with LookupdHTTPClient.from_url(addresses[0]) as client:
            client.delete_topic("t", partition="**")
        cluster.create_topic("t", channels=["c"])

        def is_stored():
            with suppress(errors.PublishFailed):
                return producer.publish("t", body) == b"OK"

        until(is_stored)
        assert cluster.messages("t", "c") == [body]
