"""How a consumer follows partitions and learns how to subscribe, judged by what reaches scripted nsqds."""

from __future__ import annotations

import json
import logging
import socket
from time import monotonic

import pytest
from msgspec.structs import replace
from support.partitions import OK, VERSION, PartitionNsqd, answers, push_record, subscription, topology
from support.scripted_nsqd import ScriptedNsqd, frame
from support.waiting import WAIT, holds, until

from nsq_fast import Consumer
from nsq_fast.errors import (
    ChannelNotRegistered,
    ConfigError,
    ExtendSubForbidden,
    ExtendSubRequired,
    LocalProtocolError,
    OrderedSubRequired,
)
from nsq_fast.names import Address
from nsq_fast.client.subscriptions import LOST_SPREAD
from nsq_fast.protocol.topology import Nsqd

pytestmark = pytest.mark.usefixtures("scripted_lookup")
CONSUME = {"topic": "t", "channel": "c", "lookupd_http_addresses": "lookup:4161"}


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


def test_one_connection_for_each_partition(nsqds, consume):
    first, second = nsqds(), nsqds()
    seen = []
    consumer = consume(lambda _, message: seen.append((message.partition, message.body)))
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: first, 1: second, 2: first}))
    for nsqd, partition in ((first, 0), (second, 1), (first, 2)):
        connection = nsqd.subscriber(partition)
        assert subscription(connection) == (b"SUB", b"t", b"c", b"%d" % partition)
        push_record(connection, 1, body=b"%d" % partition)
        connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [1])
    assert sorted(seen) == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert consumer.total_ready_count <= 10
    assert {(each.address, each.partition) for each in consumer.stats().connections} == {
        (first.address, 0), (second.address, 1), (first.address, 2),
    }  # fmt: skip


def test_rdy_is_spread_over_partitions(nsqds, consume):
    nsqd = nsqds()
    consumer = consume(ignore, max_in_flight=9)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd, 1: nsqd, 2: nsqd}))
    for partition in range(3):
        nsqd.subscriber(partition).wait_rdy(3)


def test_chosen_partitions_only(nsqds, consume):
    first, second, old = nsqds(), nsqds(), nsqds(ScriptedNsqd)
    consumer = consume(ignore, partitions=[0, 2])
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: first, 1: second, 2: first}, old))
    first.subscriber(0)
    first.subscriber(2)
    assert not second.connections
    assert not old.connections


def test_partitions_that_the_topic_never_has_are_an_error(nsqds, consume):
    consumer = consume(ignore, partitions=[3])
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqds()}))
    with pytest.raises(ConfigError, match="partitions 0 to 0"):
        consumer.join(WAIT)


def test_old_nsqds_beside_partitions(nsqds, consume):
    leader, old = nsqds(), nsqds(ScriptedNsqd)
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: leader}, old, ordered=True))
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
    consumer._subscriptions.lookup.tell(topology({0: nsqd}))
    with pytest.raises(ConfigError, match=f"{name}=.*no extended headers"):
        consumer.join(20)
    assert not any(map(subscription, nsqd.connections))
    extended = consume(ignore, **{name: value})
    extended._subscriptions.lookup.tell(topology({0: nsqd}, extend_support=True))
    nsqd.subscriber(0)
    assert extended.is_running


def test_a_filter_is_an_error_on_an_original_nsqd(nsqds, consume):
    address = str(nsqds(ScriptedNsqd).address)
    consumer = consume(ignore, nsqd_tcp_addresses=address, lookupd_http_addresses=(), desired_tag="x")
    with pytest.raises(ConfigError, match="desired_tag='x'"):
        consumer.join(20)


def test_partitions_that_there_are_not_are_named_at_once(nsqds, consume, caplog):
    nsqd = nsqds()
    consumer = consume(ignore, partitions=[0, 7])
    lookup = consumer._subscriptions.lookup
    errors = []
    consumer.on_error.connect(lambda _, error: errors.append(str(error)), weak=False)
    found = topology({0: nsqd, 1: nsqd, 2: nsqd})
    for _ in range(3):
        lookup.tell(found)
    assert errors == ["partitions: topic t has partitions 0 to 2; nothing comes of 7 until it has more"]
    assert sum("nothing comes of 7" in each.getMessage() for each in caplog.records) == 1
    nsqd.subscriber(0)
    lookup.tell(topology(dict.fromkeys(range(8), nsqd)))
    nsqd.subscriber(7)


def test_a_configured_nsqd_is_subscribed_to_without_lookup(nsqds, consume):
    nsqd = nsqds()
    consume(ignore, nsqd_tcp_addresses=str(nsqd.address), partitions=[0, 1], ordered=True, lookupd_http_addresses=())
    assert subscription(nsqd.subscriber(0)) == (b"SUB_ORDERED", b"t", b"c", b"0")
    nsqd.subscriber(1)


def test_a_configured_nsqd_that_leads_partitions_is_not_subscribed_to_twice(nsqds, consume):
    nsqd = nsqds()
    consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address), lookupd_http_addresses="lookup:4161")
    lookup = consumer._subscriptions.lookup
    plain = nsqd.subscriber(None)
    lookup.tell(topology({0: nsqd, 1: nsqd}))
    nsqd.subscriber(0)
    nsqd.subscriber(1)
    plain.wait_for(lambda: (b"CLS",) in plain.commands and not plain.is_open)
    until(lambda: len(consumer.stats().connections) == 2)


# Leaders that move


def test_a_lost_leader_is_looked_up_at_once_and_followed(nsqds, consume):
    before, after = nsqds(), nsqds()
    seen = []
    consumer = consume(lambda _, message: seen.append(message.body))
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: before, 1: before}))
    connection = before.subscriber(0)
    lookup.answer = topology({0: after, 1: before})
    asked = lookup.refreshed
    connection.close()
    push_record(after.subscriber(0), 3, body=b"from the new leader")
    until(lambda: seen == [b"from the new leader"])
    assert lookup.refreshed > asked
    assert before.live(1), "the other partition stays where it is"
    until(lambda: len(consumer.stats().connections) == 2)


def test_lookup_is_asked_until_it_knows_the_new_leader(nsqds, consume, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.subscriptions.SEEK_INTERVAL", 0.02)
    before, after = nsqds(), nsqds()
    consumer = consume(ignore, max_reconnect_delay=60)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: before}))
    connection = before.subscriber(0)
    lookup.answer = topology({}, partition_num=1)  # a time without a leader
    before.is_refusing = True
    connection.close()
    until(lambda: lookup.refreshed > 5)
    lookup.answer = topology({0: after})
    after.subscriber(0)  # long before the minute of max_reconnect_delay is over
    until(lambda: consumer.stats().connections[0].is_connected)
    asked = lookup.refreshed
    holds(lambda: lookup.refreshed <= asked + 1, 0.2)  # nothing is missing; what was under way may have asked once more


def test_a_leader_that_is_not_ready_is_asked_at_a_pace_of_its_own(nsqds, consume, monkeypatch):
    """However often leaders change: the pauses of lost connections would be a minute long by the tenth attempt."""
    monkeypatch.setattr("nsq_fast.client.subscriptions.LONGEST_LEADER_DELAY", 0.02)
    nsqd = nsqds()
    not_leader = frame(1, b"E_FAILED_ON_NOT_LEADER ")
    consumer = consume(ignore, max_reconnect_delay=600)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd}))
    for _ in range(50):
        connection = nsqd.subscriber(0)
        refused = len(nsqd.connections)
        nsqd.replies[b"SUB"] = not_leader
        connection.close()
        until(lambda refused=refused: len(nsqd.connections) >= refused + 10)
        nsqd.replies[b"SUB"] = OK
    nsqd.subscriber(0)


def test_so_is_one_whose_nsqd_is_down(nsqds, consume, monkeypatch, caplog):
    monkeypatch.setattr("nsq_fast.client.subscriptions.LONGEST_LEADER_DELAY", 0.02)
    nsqd = nsqds()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens: connections are refused
        consumer = consume(ignore, max_reconnect_delay=600)
        lookup = consumer._subscriptions.lookup
        address = Address("127.0.0.1", held.getsockname()[1])
        refusing = Nsqd(address, address, VERSION)
        found = topology({0: nsqd})
        with caplog.at_level(logging.INFO, "nsq_fast.consumer.t.c"):
            lookup.tell(replace(found, producers=(refusing,), partitions={0: refusing}))
            until(lambda: sum("refused" in each.getMessage() for each in caplog.records) >= 12)
    warnings = [each for each in caplog.records if "refused" in each.getMessage() and each.levelname == "WARNING"]
    assert len(warnings) == 1, "the same again is no news"


def test_other_refusals_keep_the_pauses_of_reconnecting(nsqds, consume, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.subscriptions.LONGEST_LEADER_DELAY", 0.0)
    nsqd = nsqds(replies={b"SUB": frame(1, b"E_INVALID no")})
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    began = monotonic()
    lookup.tell(topology({0: nsqd}))
    until(lambda: len(nsqd.connections) == 3)
    assert monotonic() - began >= 0.05 + 0.1


def test_a_leader_whose_heartbeat_is_late_is_left_when_lookup_knows_another(nsqds, consume, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.connection.SILENT_INTERVALS", 1000)  # the connection itself does not end
    silent, after = nsqds(), nsqds()
    consumer = consume(ignore, heartbeat_interval=1.0)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: silent}))
    silent.subscriber(0)
    asked = lookup.refreshed
    lookup.answer = topology({0: after})
    after.subscriber(0)
    assert lookup.refreshed > asked


@pytest.mark.parametrize(("wanted", "asked"), [(30.0, 14_000), (1.0, 1_000)])
def test_a_leader_is_asked_for_heartbeats_that_show_in_time_when_it_hangs(nsqds, consume, wanted, asked):
    leader, old = nsqds(), nsqds(ScriptedNsqd)
    consumer = consume(ignore, heartbeat_interval=wanted)
    consumer._subscriptions.lookup.tell(topology({0: leader}, old))
    assert leader.subscriber(0).identify["heartbeat_interval"] == asked
    until(lambda: old.connections)
    old.connections[0].wait_for(lambda: old.connections[0].identify)
    assert old.connections[0].identify["heartbeat_interval"] == wanted * 1000


def test_a_leader_that_refuses_is_left_for_the_new_one(nsqds, consume):
    before = nsqds(replies={b"SUB": frame(1, b"E_FAILED_ON_NOT_LEADER ")})
    after = nsqds()
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: before}))
    before.wait_for(lambda: lookup.refreshed)
    lookup.tell(topology({0: after}))
    after.subscriber(0)


def test_a_partition_is_followed_from_a_live_connection_when_the_new_one_stands(nsqds, consume):
    before, after = nsqds(), nsqds(replies={b"SUB": frame(1, b"E_FAILED_ON_NOT_LEADER ")})
    seen = []
    consumer = consume(lambda _, message: seen.append(message.body))
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: before}))
    old = before.subscriber(0)
    lookup.tell(topology({0: after}))
    after.wait_for(lambda: len(after.connections) > 1)
    push_record(old, 1, body=b"still here")
    old.wait_for(lambda: answers(old, b"FIN") == [1])
    after.replies[b"SUB"] = OK
    after.subscriber(0)
    old.wait_for(lambda: (b"CLS",) in old.commands and not old.is_open)
    until(lambda: [each.address for each in consumer.stats().connections] == [after.address])
    assert consumer.stats().totals.finished == 1


def test_a_partition_that_comes_back_is_kept(nsqds, consume):
    nsqd = nsqds()
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd, 1: nsqd}))
    connection = nsqd.subscriber(1)
    lookup.tell(topology({0: nsqd}, partition_num=2))
    lookup.tell(topology({0: nsqd, 1: nsqd}))
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert len(nsqd.connections) == 2


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
    consumer = consume(ignore, **options)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd}, **meta))
    assert subscription(nsqd.subscriber(0))[0] == command


def test_detail_is_there_with_advanced(nsqds, consume):
    nsqd = nsqds()
    seen = []
    consumer = consume(lambda _, message: seen.append((message.offset, message.raw_size)), advanced=True)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd}))
    push_record(nsqd.subscriber(0), 3)
    until(lambda: seen == [(120, 40)])


def test_extended_headers_are_learnt_and_stay(nsqds, consume):
    nsqd = nsqds()
    seen = []
    consumer = consume(lambda _, message: seen.append(message.headers))
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd}, extend_support=True))
    connection = nsqd.subscriber(0)
    assert connection.identify["extend_support"] is True
    push_record(connection, 1, ext=b'{"k":"v"}')
    push_record(connection, 2, ext=b"")
    until(lambda: seen == [{"k": "v"}, {}])
    lookup.tell(topology({0: nsqd}))
    assert len(nsqd.connections) == 1, "a lookupd may be behind"


def test_a_topic_that_gets_extended_headers_is_subscribed_to_anew(nsqds, consume):
    nsqd = nsqds()
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd}))
    first = nsqd.subscriber(0)
    assert "extend_support" not in first.identify
    lookup.tell(topology({0: nsqd}, extend_support=True))
    first.wait_for(lambda: (b"CLS",) in first.commands and not first.is_open)
    second = nsqd.subscriber(0)
    assert second.identify["extend_support"] is True
    assert len(consumer.stats().connections) == 1


def test_a_refused_mode_is_repaired_by_what_lookup_says(nsqds, consume):
    def sub(connection, command):
        connection.send(frame(1, b"E_SUB_ORDER_IS_MUST "))

    nsqd = nsqds(replies={b"SUB": sub})
    errors = []
    consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address), lookupd_http_addresses="lookup:4161")
    lookup = consumer._subscriptions.lookup
    consumer.on_error.connect(lambda sender, error: errors.append(error), weak=False)
    nsqd.wait_for(lambda: lookup.refreshed)
    assert len(nsqd.connections) == 1, "a refusal is not repeated"
    lookup.tell(topology({0: nsqd}, ordered=True))
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
        lookup = consumer._subscriptions.lookup
        lookup.tell(topology({0: nsqd, 1: nsqd}))
    else:
        consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address), lookupd_http_addresses=())
    with pytest.raises(error, match=option):
        consumer.join(WAIT)
    assert len(nsqd.connections) <= 2, "one for each subscription"
    assert not consumer.is_running


def test_start_raises_what_ended_it(nsqds):
    nsqd = nsqds(replies={b"SUB": frame(1, b"E_SUB_ORDER_IS_MUST ")})
    consumer = Consumer("t", "c", str(nsqd.address), message_handler=print)
    with pytest.raises(OrderedSubRequired, match="set ordered=True"):
        consumer.start()


def test_iterating_raises_what_ended_it(nsqds):
    nsqd = nsqds(replies={b"SUB": frame(1, b"E_SUB_ORDER_IS_MUST ")})
    with pytest.raises(OrderedSubRequired):
        list(Consumer("t", "c", str(nsqd.address)))


def test_one_refusal_among_others_is_told_and_ends_nothing(nsqds, consume):
    good, bad = nsqds(), nsqds(replies={b"SUB": frame(1, b"E_SUB_EXTEND_NEED ")})
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    errors = []
    consumer.on_error.connect(lambda sender, error: errors.append(error), weak=False)
    lookup.tell(topology({0: good, 1: bad}))
    connection = good.subscriber(0)
    until(lambda: errors)
    assert isinstance(errors[0], ExtendSubRequired)
    lookup.tell(topology({0: good, 1: bad}))
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert len(bad.connections) == 1
    assert consumer.is_running


def test_an_original_nsqd_cannot_be_ordered(nsqds, consume):
    nsqd = nsqds(ScriptedNsqd)
    consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address), ordered=True, lookupd_http_addresses=())
    with pytest.raises(LocalProtocolError, match="leave ordered"):
        consumer.join(WAIT)


# Start positions


class Leader:
    """The HTTP face of an nsqd: records what is asked, answers ``status``; /stats with those of ``channel``."""

    channel = None

    def __init__(self, status="200 OK", body=b""):
        from gevent.pywsgi import WSGIServer

        self.status, self.body, self.asked = status, body, []
        self.status_of = lambda path: self.status
        self._server = WSGIServer(("127.0.0.1", 0), self._answer, log=None)
        self._server.start()
        self.port = self._server.address[1]
        self.stop = self._server.stop

    def _answer(self, environ, start_response):
        body = environ["wsgi.input"].read()
        if environ["PATH_INFO"] == "/stats":
            start_response("200 OK", [])
            return [json.dumps({"topics": [{"channels": [self.channel] if self.channel else None}]}).encode()]
        self.asked.append((environ["PATH_INFO"], environ["QUERY_STRING"], body))
        start_response(self.status_of(environ["PATH_INFO"]), [("Content-Length", str(len(self.body)))])
        return [self.body]


@pytest.fixture
def leader():
    made = []

    def make(**options):
        made.append(Leader(**options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def led(nsqd, http, *partitions):
    found = topology(dict.fromkeys(partitions, nsqd))
    return replace(found, partitions={number: nsqd.as_leader(http.port) for number in partitions})


def test_a_start_position_is_set_once_before_subscribing(nsqds, consume, leader):
    http, nsqd = leader(), nsqds()
    consumer = consume(ignore, start_position={0: "offset:80", 1: "count:7"}, advanced=True)
    lookup = consumer._subscriptions.lookup
    lookup.tell(led(nsqd, http, 0, 1, 2))
    for partition in range(3):
        nsqd.subscriber(partition)
    places = {(query.split("partition=")[1][0], body) for path, query, body in http.asked if "setoffset" in path}
    assert places == {("0", b"virtual_queue:80"), ("1", b"msgcount:7")}
    assert subscription(nsqd.subscriber(0)) == (b"SUB_ADVANCED", b"t", b"c", b"0"), "no position on the wire"
    count = len(http.asked)
    nsqd.subscriber(0).close()
    until(lambda: len(nsqd.connections) == 4)
    nsqd.subscriber(0)
    assert len(http.asked) == count, "not again"


NEVER_CONFIRMED = {"channel_name": "c", "client_num": 0, "in_flight_count": 0, "depth": 7, "message_count": 7}


@pytest.mark.parametrize(
    ("channel", "position", "asked"),
    [
        (None, "offset:80", ["/channel/create", "/channel/setoffset"]),
        (None, "end", ["/channel/create"]),  # where its creation puts it
        (NEVER_CONFIRMED, "end", ["/channel/setoffset"]),
        (NEVER_CONFIRMED | {"client_num": 1}, "end", []),
        (NEVER_CONFIRMED | {"in_flight_count": 1}, "end", []),
        (NEVER_CONFIRMED | {"depth": 6}, "end", []),
    ],
)
def test_a_start_position_is_set_where_nobody_has_begun(nsqds, consume, leader, channel, position, asked):
    http, nsqd = leader(), nsqds()
    http.channel = channel
    consumer = consume(ignore, start_position=position)
    lookup = consumer._subscriptions.lookup
    lookup.tell(led(nsqd, http, 0))
    nsqd.subscriber(0)
    assert [path for path, _, _ in http.asked] == asked


def test_it_is_set_at_each_start_where_that_is_asked_for(nsqds, consume, leader):
    http, nsqd = leader(), nsqds()
    http.channel = NEVER_CONFIRMED | {"depth": 1, "client_num": 3}
    consumer = consume(ignore, start_position="end", start_position_policy="each_start")
    lookup = consumer._subscriptions.lookup
    lookup.tell(led(nsqd, http, 0))
    nsqd.subscriber(0)
    assert [path for path, _, _ in http.asked] == ["/channel/setoffset"]


def test_a_channel_that_was_created_gets_its_position_although_the_first_try_failed(nsqds, consume, leader):
    """It stands at the end then, and looks as if somebody had begun."""
    http, nsqd = leader(), nsqds()
    failures = ["500 Internal Server Error"]

    def fail_once(path):
        if path == "/channel/setoffset" and failures:
            http.channel = NEVER_CONFIRMED | {"depth": 0}
            return failures.pop()
        return "200 OK"

    http.status_of = fail_once
    consumer = consume(ignore, start_position="offset:0")
    lookup = consumer._subscriptions.lookup
    lookup.tell(led(nsqd, http, 0))
    nsqd.subscriber(0)
    assert [path for path, _, _ in http.asked] == ["/channel/create", *["/channel/setoffset"] * 2]


def test_a_start_position_that_is_refused_is_an_error(nsqds, consume, leader):
    http, nsqd = leader(status="400 Bad Request", body=b'{"message":"INVALID_OFFSET"}'), nsqds()
    consumer = consume(ignore, start_position="timestamp:1")
    lookup = consumer._subscriptions.lookup
    lookup.tell(led(nsqd, http, 0))
    with pytest.raises(ConfigError, match="start_position='timestamp:1': refused"):
        consumer.join(WAIT)
    assert not nsqd.connections


def test_a_start_position_is_tried_again_while_there_is_no_leader(nsqds, consume, leader):
    http, nsqd = leader(status="400 Bad Request", body=b'{"message":"E_FAILED_ON_NOT_LEADER"}'), nsqds()
    consumer = consume(ignore, start_position="end")
    lookup = consumer._subscriptions.lookup
    lookup.tell(led(nsqd, http, 0))
    until(lambda: lookup.refreshed)
    http.status = "200 OK"
    nsqd.subscriber(0)


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
    ],
)
def test_a_wrong_option_is_named(options, named):
    with pytest.raises(ConfigError, match=named):
        Consumer("t", "c", "localhost:1", **options)


def test_lookup_is_asked_at_once_about_a_lost_leader_and_some_time_soon_about_a_lost_old_nsqd(nsqds, consume):
    leader, old = nsqds(), nsqds(ScriptedNsqd)
    consumer = consume(ignore)
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: leader}, old))
    leader.subscriber(0)
    old.connection()
    until(lambda: len([each for each in consumer.stats().connections if each.is_connected]) == 2)
    assert lookup.pauses == []
    old.stop()
    until(lambda: lookup.pauses)
    assert 0.0 < lookup.pauses[0] <= LOST_SPREAD  # with thousands of others, which lost it in the same moment
    lookup.pauses.clear()
    leader.stop()
    until(lambda: 0.0 in lookup.pauses)
