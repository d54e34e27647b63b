"""How a consumer follows partitions and learns how to subscribe, judged by what reaches scripted nsqds."""

from __future__ import annotations

import pytest
from support.partitions import OK, PartitionNsqd, answers, push_record, subscription, topology
from support.scripted_nsqd import ScriptedNsqd, frame
from support.waiting import WAIT, until

from nsq_fast import Consumer
from nsq_fast.errors import (
    ChannelNotRegistered,
    ConfigError,
    ExtendSubForbidden,
    ExtendSubRequired,
    LocalProtocolError,
    OrderedSubRequired,
)

pytestmark = pytest.mark.usefixtures("scripted_lookup")
CONSUME = {"topic": "t", "channel": "c", "lookupd_http_addresses": "lookup:4161"}
NOT_LEADER = frame(1, b"E_FAILED_ON_NOT_LEADER ")


def ignore(consumer, message):
    pass


@pytest.fixture
def nsqds():
    """A factory of scripted nsqds, redesigned ones by default."""
    made = []

    def make(kind=PartitionNsqd, **options):
        made.append(kind(**options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def told(consumer, *answer, **meta):
    """The scripted lookup of a consumer, which has said that."""
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology(*answer, **meta))
    return lookup


def finishes(connection, sequence):
    """It pushes a message, which is finished."""
    push_record(connection, sequence)
    connection.wait_for(lambda: answers(connection, b"FIN")[-1:] == [sequence])


def test_one_connection_for_each_partition(nsqds, consume):
    first, second = nsqds(), nsqds()
    seen = []
    consumer = consume(lambda _, message: seen.append((message.partition, message.body)), max_in_flight=9)
    told(consumer, {0: first, 1: second, 2: first})
    for nsqd, partition in ((first, 0), (second, 1), (first, 2)):
        connection = nsqd.subscriber(partition)
        assert subscription(connection) == (b"SUB", b"t", b"c", b"%d" % partition)
        connection.wait_rdy(3)
        push_record(connection, 1, body=b"%d" % partition)
        connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [1])
    assert sorted(seen) == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert {(each.address, each.partition) for each in consumer.stats().connections} == {
        (first.address, 0), (second.address, 1), (first.address, 2),
    }  # fmt: skip


def test_chosen_partitions_only(nsqds, consume, caplog):
    first, second, old = nsqds(), nsqds(), nsqds(ScriptedNsqd)
    consumer = consume(ignore, partitions=[0, 2, 7])
    errors = []
    consumer.on_error.connect(lambda _, error: errors.append(str(error)), weak=False)
    for _ in range(3):
        lookup = told(consumer, {0: first, 1: second, 2: first}, old)
    first.subscriber(0)
    first.subscriber(2)
    assert not second.connections
    assert not old.connections
    assert errors == ["partitions: topic t has partitions 0 to 2; nothing comes of 7 until it has more"]
    assert sum("nothing comes of 7" in each.getMessage() for each in caplog.records) == 1
    lookup.tell(topology(dict.fromkeys(range(8), first)))
    first.subscriber(7)
    never = consume(ignore, partitions=[3])
    told(never, {0: second})
    with pytest.raises(ConfigError, match="partitions 0 to 0"):
        never.join(WAIT)


def test_old_nsqds_beside_partitions(nsqds, consume):
    leader, old = nsqds(), nsqds(ScriptedNsqd)
    told(consume(ignore), {0: leader}, old, ordered=True)
    connection = old.connection()
    assert subscription(connection) == (b"SUB", b"t", b"c")
    connection.push(1)
    connection.wait_for(lambda: connection.answered(b"FIN") == [1])
    assert subscription(leader.subscriber(0))[0] == b"SUB_ORDERED"


@pytest.mark.parametrize(
    ("name", "value"),
    [("desired_tag", "x"), ("ext_filter", {"type": 1, "filter_ext_key": "k", "filter_data": "v"})],
)
def test_a_filter_that_the_topic_cannot_have_is_an_error(nsqds, consume, name, value):
    nsqd = nsqds()
    consumer = consume(ignore, **{name: value})
    told(consumer, {0: nsqd})
    with pytest.raises(ConfigError, match=f"{name}=.*no extended headers"):
        consumer.join(WAIT)
    assert not any(map(subscription, nsqd.connections))
    extended = consume(ignore, **{name: value})
    told(extended, {0: nsqd}, extend_support=True)
    nsqd.subscriber(0)
    assert extended.is_running
    original = str(nsqds(ScriptedNsqd).address)
    consumer = consume(ignore, nsqd_tcp_addresses=original, lookupd_http_addresses=(), **{name: value})
    with pytest.raises(ConfigError, match=f"{name}="):
        consumer.join(WAIT)


def test_a_configured_nsqd_is_subscribed_to_without_lookup_and_not_twice(nsqds, consume):
    nsqd, leader = nsqds(), nsqds()
    consume(ignore, nsqd_tcp_addresses=str(nsqd.address), partitions=[0, 1], ordered=True, lookupd_http_addresses=())
    assert subscription(nsqd.subscriber(0)) == (b"SUB_ORDERED", b"t", b"c", b"0")
    nsqd.subscriber(1)
    consumer = consume(ignore, nsqd_tcp_addresses=str(leader.address))
    plain = leader.subscriber(None)
    told(consumer, {0: leader, 1: leader})
    leader.subscriber(0)
    leader.subscriber(1)
    plain.wait_for(lambda: (b"CLS",) in plain.commands and not plain.is_open)
    until(lambda: len(consumer.stats().connections) == 2)


# Leaders that move


def test_a_lost_leader_is_looked_up_at_once_and_followed(nsqds, consume):
    before, after = nsqds(), nsqds()
    consumer = consume(ignore)
    lookup = told(consumer, {0: before, 1: before})
    connection = before.subscriber(0)
    lookup.answer = topology({0: after, 1: before})
    asked = lookup.refreshed
    connection.close()
    finishes(after.subscriber(0), 3)
    assert lookup.refreshed > asked
    assert before.live(1), "the other partition stays where it is"
    until(lambda: len(consumer.stats().connections) == 2)


def test_a_leader_that_is_not_ready_is_asked_at_a_pace_of_its_own(nsqds, consume, monkeypatch):
    """However often leaders change: the pauses of lost connections would be a minute long by the tenth attempt."""
    monkeypatch.setattr("nsq_fast.client.subscriptions.LONGEST_LEADER_DELAY", 0.02)
    nsqd = nsqds()
    told(consume(ignore, max_reconnect_delay=600), {0: nsqd})
    for _ in range(50):
        connection = nsqd.subscriber(0)
        refused = len(nsqd.connections)
        nsqd.replies[b"SUB"] = NOT_LEADER
        connection.close()
        until(lambda refused=refused: len(nsqd.connections) >= refused + 10)
        nsqd.replies[b"SUB"] = OK
    nsqd.subscriber(0)


def test_a_leader_whose_heartbeat_is_late_is_left_when_lookup_knows_another(nsqds, consume, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.connection.SILENT_INTERVALS", 1000)  # the connection itself does not end
    silent, after = nsqds(), nsqds()
    lookup = told(consume(ignore, heartbeat_interval=1.0), {0: silent})
    silent.subscriber(0)
    asked = lookup.refreshed
    lookup.answer = topology({0: after})
    after.subscriber(0)
    assert lookup.refreshed > asked


@pytest.mark.parametrize(("wanted", "asked"), [(30.0, 14_000), (1.0, 1_000)])
def test_a_leader_is_asked_for_heartbeats_that_show_in_time_when_it_hangs(nsqds, consume, wanted, asked):
    leader, old = nsqds(), nsqds(ScriptedNsqd)
    told(consume(ignore, heartbeat_interval=wanted), {0: leader}, old)
    assert leader.subscriber(0).identify["heartbeat_interval"] == asked
    until(lambda: old.connections)
    old.connections[0].wait_for(lambda: old.connections[0].identify)
    assert old.connections[0].identify["heartbeat_interval"] == wanted * 1000


def test_a_partition_is_followed_from_a_live_connection_when_the_new_one_stands(nsqds, consume):
    before, after = nsqds(), nsqds(replies={b"SUB": NOT_LEADER})
    consumer = consume(ignore)
    lookup = told(consumer, {0: before})
    old = before.subscriber(0)
    lookup.tell(topology({0: after}))
    after.wait_for(lambda: len(after.connections) > 1)
    finishes(old, 1)
    after.replies[b"SUB"] = OK
    after.subscriber(0)
    old.wait_for(lambda: (b"CLS",) in old.commands and not old.is_open)
    until(lambda: [each.address for each in consumer.stats().connections] == [after.address])
    assert consumer.stats().totals.finished == 1


# How to subscribe


@pytest.mark.parametrize(
    ("options", "meta", "command"),
    [
        ({}, {"ordered": True}, b"SUB_ORDERED"),
        ({}, {}, b"SUB"),
        ({"ordered": True}, {}, b"SUB_ORDERED"),
        ({"ordered": False}, {"ordered": True}, b"SUB"),
        ({"advanced": True}, {}, b"SUB_ADVANCED"),
        ({"advanced": True}, {"ordered": True}, b"SUB_ORDERED"),
    ],
)
def test_the_kind_of_subscription_is_learnt_or_told(nsqds, consume, options, meta, command):
    nsqd = nsqds()
    told(consume(ignore, **options), {0: nsqd}, **meta)
    assert subscription(nsqd.subscriber(0))[0] == command


def test_extended_headers_are_learnt_and_stay(nsqds, consume):
    nsqd, seen = nsqds(), []
    consumer = consume(lambda _, message: seen.append(message.headers))
    lookup = told(consumer, {0: nsqd})
    first = nsqd.subscriber(0)
    assert "extend_support" not in first.identify
    lookup.tell(topology({0: nsqd}, extend_support=True))
    first.wait_for(lambda: (b"CLS",) in first.commands and not first.is_open)
    connection = nsqd.subscriber(0)
    assert connection.identify["extend_support"] is True
    push_record(connection, 1, ext=b'{"k":"v"}')
    push_record(connection, 2, ext=b"")
    until(lambda: seen == [{"k": "v"}, {}])
    lookup.tell(topology({0: nsqd}))
    assert len(nsqd.connections) == 2, "a lookupd may be behind"
    assert len(consumer.stats().connections) == 1


def test_a_refused_mode_is_repaired_by_what_lookup_says(nsqds, consume):
    nsqd = nsqds(replies={b"SUB": frame(1, b"E_SUB_ORDER_IS_MUST ")})
    errors = []
    consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address))
    consumer.on_error.connect(lambda sender, error: errors.append(error), weak=False)
    nsqd.wait_for(lambda: consumer._subscriptions.lookup.refreshed)
    assert len(nsqd.connections) == 1, "a refusal is not repeated"
    told(consumer, {0: nsqd}, ordered=True)
    assert subscription(nsqd.subscriber(0))[0] == b"SUB_ORDERED"
    assert isinstance(errors[0], OrderedSubRequired)
    assert consumer.is_running


@pytest.mark.parametrize(
    ("code", "error", "option"),
    [
        (b"E_SUB_ORDER_IS_MUST ", OrderedSubRequired, "ordered=True"),
        (b"E_SUB_EXTEND_NEED ", ExtendSubRequired, "extend_support=True"),
        (b"E_SUB_EXTEND_FORBIDDON ", ExtendSubForbidden, "extend_support=False"),
        (b"E_SUB_CHANNEL_NOT_REGISTERED ", ChannelNotRegistered, "channel/create"),
    ],
)
@pytest.mark.parametrize("has_lookup", [True, False])
def test_a_mode_that_is_wrong_everywhere_ends_the_consumer(nsqds, consume, code, error, option, has_lookup):
    nsqd = nsqds(replies={b"SUB": frame(1, code)})
    if has_lookup:
        consumer = consume(ignore, ordered=False)
        told(consumer, {0: nsqd, 1: nsqd})
    else:
        consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address), lookupd_http_addresses=())
    with pytest.raises(error, match=option):
        consumer.join(WAIT)
    assert len(nsqd.connections) <= 2, "one for each subscription"
    assert not consumer.is_running
    with pytest.raises(error, match=option):
        Consumer("t", "c", str(nsqd.address), message_handler=ignore).start()
    with pytest.raises(error, match=option):
        list(Consumer("t", "c", str(nsqd.address)))


def test_one_refusal_among_others_is_told_and_ends_nothing(nsqds, consume):
    good, bad = nsqds(), nsqds(replies={b"SUB": frame(1, b"E_SUB_EXTEND_NEED ")})
    consumer, errors = consume(ignore), []
    consumer.on_error.connect(lambda sender, error: errors.append(error), weak=False)
    told(consumer, {0: good, 1: bad})
    connection = good.subscriber(0)
    until(lambda: errors)
    assert isinstance(errors[0], ExtendSubRequired)
    told(consumer, {0: good, 1: bad})
    finishes(connection, 1)
    assert len(bad.connections) == 1
    assert consumer.is_running


def test_an_original_nsqd_cannot_be_ordered(nsqds, consume):
    address = str(nsqds(ScriptedNsqd).address)
    consumer = consume(ignore, nsqd_tcp_addresses=address, ordered=True, lookupd_http_addresses=())
    with pytest.raises(LocalProtocolError, match="leave ordered"):
        consumer.join(WAIT)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"start_position": "end"}, "start_position"),
        ({"partitions": []}, "partitions"),
        ({"partitions": "0,x"}, "partitions"),
        ({"partitions": [1024]}, "partitions"),
        ({"ordered": "perhaps"}, "ordered"),
        ({"order_policy": "ignore"}, "order_policy"),
        ({"start_position_policy": "always"}, "start_position_policy"),
        ({"blocked_policy": "skip"}, "blocked_policy"),
        ({"trace": "yes"}, "trace"),
        ({"suppress_retried": -1}, "suppress_retried=-1"),
    ],
)
def test_a_wrong_option_is_named(options, named):
    with pytest.raises(ConfigError, match=named):
        Consumer("t", "c", "localhost:1", **options)
