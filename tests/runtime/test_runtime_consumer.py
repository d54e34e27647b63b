"""What a consumer does with messages, judged by the commands that reach a scripted nsqd."""

from __future__ import annotations

from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import ScriptedNsqd, frame
from support.waiting import WAIT, holds, until

from nsq_fast import Consumer, RequeueMessage
from nsq_fast.client.greenlets import loop_turns
from nsq_fast.errors import AlreadyResponded, ConfigError, ConnectionLost, NameInvalid, NotRunning


def ignore(consumer, message):
    pass


def test_a_message_is_finished_when_its_handler_returns(nsqd, consume):
    seen = []
    consumer = consume(lambda consumer, message: seen.append((consumer, message.body)))
    conn = nsqd.connection()
    conn.push(1, 2, body=b"hello")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    assert seen == [(consumer, b"hello")] * 2
    assert conn.words()[:3] == [b"IDENTIFY", b"SUB", b"RDY"]
    assert conn.commands[1] == (b"SUB", b"topic", b"channel")


def test_a_fin_leaves_although_the_next_handler_blocks(nsqd, consume):
    release = Event()
    consume(lambda consumer, message: message.body == b"slow" and release.wait())
    conn = nsqd.connection()
    conn.push(1)
    conn.push(2, body=b"slow")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    release.set()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])


def test_by_default_one_handler_runs_at_a_time_in_order(nsqd, consume):
    events = []

    def handler(consumer, message):
        events.append(("begin", message.id))
        gevent.sleep(0)
        events.append(("end", message.id))

    consume(handler)
    conn = nsqd.connection()
    conn.push(*range(5))
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 5)
    ids = [b"%016x" % number for number in range(5)]
    assert events == [(what, each) for each in ids for what in ("begin", "end")]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_runs_so_many_handlers(nsqd, consume, concurrency):
    running, release = [], Event()

    def handler(consumer, message):
        running.append(message)
        release.wait()

    consume(handler, concurrency=concurrency)
    conn = nsqd.connection()
    conn.push(*range(6))
    until(lambda: len(running) == concurrency)
    holds(lambda: len(running) == concurrency)
    release.set()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 6)


def test_nsqds_take_turns_where_handlers_wait(nsqd, consume):
    seen, release = [], Event()
    other = ScriptedNsqd()
    try:
        consumer = consume(concurrency=1)
        consumer.nsqd_addresses.append(other.address)

        def handler(consumer, message):
            release.wait()
            gevent.sleep(0.006)  # sleep: longer than a time slice
            seen.append(message.responder.address)

        consumer.on_message.connect(lambda consumer, message: handler(consumer, message), weak=False)
        consumer.start(block=False)
        for server in (nsqd, other):
            server.connection().push(*range(4))
        until(lambda: consumer.stats().unstarted == 7)
        release.set()
        until(lambda: len(seen) == 8)
        assert set(seen[1:3]) == set(seen[3:5]) == {nsqd.address, other.address}
    finally:
        other.stop()


def test_slow_handlers_overlap_and_heartbeats_are_answered(nsqd, consume):
    running, release = [], Event()
    consume(lambda consumer, message: (running.append(message), release.wait()), concurrency=20, max_in_flight=20)
    conn = nsqd.connection()
    conn.push(*range(20))
    conn.send(b"\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_")
    conn.wait_for(lambda: b"NOP" in conn.words())
    assert not conn.answered(b"FIN"), "the heartbeat did not wait for a handler"
    until(lambda: len(running) == 20)
    release.set()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 20)


def test_handlers_that_never_block_leave_room_for_others(nsqd, consume):
    handled, beats = [], []
    consume(lambda consumer, message: handled.append(sum(range(2000))), max_in_flight=2500)
    conn = nsqd.connection()
    beat = gevent.spawn(lambda: [beats.append(gevent.sleep(0)) for _ in range(1000)])
    conn.push(*range(2000))
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 2000)
    assert len(beats) > 10
    beat.kill()


def test_an_asynchronous_message_is_answered_later_from_another_greenlet(nsqd, consume):
    kept = []

    def handler(consumer, message):
        message.enable_async()
        kept.append(message)

    consume(handler)
    conn = nsqd.connection()
    conn.push(1, 2, 3)
    conn.wait_for(lambda: len(kept) == 3)
    holds(lambda: b"FIN" not in conn.words())
    gevent.spawn(kept[1].finish)
    gevent.spawn(kept[2].requeue, 70)
    gevent.spawn(kept[0].touch)
    conn.wait_for(lambda: {b"FIN", b"REQ", b"TOUCH"} <= set(conn.words()))
    assert (conn.answered(b"FIN"), conn.answered(b"TOUCH")) == ([2], [1])
    assert (b"REQ", b"%016x" % 3, b"70") in conn.commands


def test_a_message_answered_by_its_handler_is_not_answered_again(nsqd, consume):
    errors = []

    def handler(consumer, message):
        message.finish()
        try:
            message.finish()
        except AlreadyResponded as error:
            errors.append(error)

    consumer = consume(handler)
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    holds(lambda: conn.answered(b"FIN") == [1, 2], 0.01)
    assert len(errors) == 2
    assert consumer.stats().totals.finished == 2


def test_an_answer_after_the_connection_is_lost_says_so(nsqd, consume):
    kept = []
    consume(lambda consumer, message: (message.enable_async(), kept.append(message)))
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: kept)
    conn.close()
    nsqd.connection(1)
    with pytest.raises(ConnectionLost, match=str(nsqd.address)):
        kept[0].finish()
    assert not kept[0].has_responded()


def test_a_batch_handler_gets_lists_and_may_answer_each(nsqd, consume):
    batches = []

    def handle(consumer, messages):
        batches.append(len(messages))
        messages[0].requeue(5)
        messages[1].enable_async()

    consume(batch_handler=handle, batch_size=4)
    conn = nsqd.connection()
    conn.push(*range(4))
    conn.wait_for(lambda: conn.answered(b"FIN") == [2, 3])
    assert batches == [4]
    assert conn.answered(b"REQ") == [0]


def test_a_batch_is_no_larger_than_batch_size(nsqd, consume):
    batches = []
    consume(batch_handler=lambda consumer, messages: batches.append(len(messages)), batch_size=3)
    conn = nsqd.connection()
    conn.push(*range(8))
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 8)
    assert max(batches) <= 3


def test_a_batch_handler_that_raises_requeues_what_it_did_not_answer(nsqd, consume):
    def handle(consumer, messages):
        messages[0].finish()
        raise ValueError("no")

    consume(batch_handler=handle, requeue_delay=9)
    conn = nsqd.connection()
    conn.push(*range(3))
    conn.wait_for(lambda: len(conn.answered(b"REQ")) == 2)
    assert conn.answered(b"FIN") == [0]


def test_iterating_finishes_a_message_when_the_next_is_asked_for(nsqd, consume):
    consumer = consume()
    seen, release = [], Event()

    def loop():
        for message in consumer:
            seen.append(message.body)
            if len(seen) == 2:
                release.wait()
            if len(seen) == 3:
                message.requeue(1)

    greenlet = gevent.spawn(loop)
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: conn.answered(b"FIN"))
    until(lambda: len(seen) == 2)  # others may have their turn between the FIN and the second
    assert conn.answered(b"FIN") == [1]
    release.set()
    conn.push(3, 4)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2, 4])
    assert conn.answered(b"REQ") == [3]
    consumer.close()
    greenlet.join(WAIT)
    assert greenlet.ready(), "the loop ends when the consumer is closed"


def test_leaving_the_loop_early_gives_the_message_back(nsqd, consume):
    with consume() as consumer:
        conn = nsqd.connection()
        conn.push(1, 2)
        for message in consumer:
            assert message.id == b"%016x" % 1
            break
        conn.wait_for(lambda: conn.answered(b"REQ") == [1])
    assert conn.answered(b"REQ") == [1, 2]
    assert b"FIN" not in conn.words()


def test_a_consumer_with_a_handler_cannot_be_iterated(consume):
    with pytest.raises(RuntimeError, match="handler"):
        next(iter(consume(ignore)))


def test_signals_reach_their_receivers_and_a_failing_one_loses_nothing(nsqd, consume):
    heard = []

    def listen(name):
        def receiver(consumer, **values):
            heard.append((name, sorted(values)))
            raise ValueError("a bad receiver")

        getattr(consumer, name).connect(receiver, weak=False)

    def handler(consumer, message):
        if message.body == b"bad":
            raise KeyError("bad")

    consumer = consume(handler, requeue_delay=5)
    for name in ("on_finish", "on_requeue", "on_exception", "on_response", "on_error", "on_close", "on_giving_up"):
        listen(name)
    conn = nsqd.connection()
    conn.push(1)
    conn.push(2, body=b"bad")
    conn.push(3, attempts=9)
    conn.send(b"\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_")
    conn.send(b"\x00\x00\x00\x17\x00\x00\x00\x01E_FIN_FAILED no luck")
    # what a receiver of on_giving_up could not take care of is not given up
    conn.wait_for(lambda: conn.answered(b"FIN") == [1] and conn.answered(b"REQ") == [2, 3])
    conn.wait_for(lambda: ("on_error", ["error"]) in heard and b"NOP" in conn.words())
    consumer.close(drain=False)
    assert set(map(tuple, ((name, *values) for name, values in heard))) == {
        ("on_finish", "message_id"),
        ("on_requeue", "message_id", "timeout"),
        ("on_exception", "error", "message"),
        ("on_giving_up", "message"),
        ("on_response", "response"),
        ("on_error", "error"),
        ("on_close",),
    }
    assert consumer.stats().totals.answers_failed == 1


def test_receivers_of_on_message_are_handlers(nsqd, consume):
    seen = []
    consumer = Consumer("topic", "channel", str(nsqd.address), max_in_flight=5, requeue_delay=0)

    @consumer.on_message.connect
    def handler(consumer, message):
        seen.append(message.body)
        if len(seen) == 2:
            raise RequeueMessage(backoff=False)

    consumer.start(block=False)
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1] and conn.answered(b"REQ") == [2])
    consumer.close(drain=False)


def test_auth_is_told():
    info = frame(0, b'{"max_rdy_count": 2500, "version": "1.3.0", "auth_required": true}')
    auth = frame(0, b'{"identity": "me", "identity_url": "", "permission_count": 1}')
    server = ScriptedNsqd(replies={b"IDENTIFY": info, b"AUTH": auth})
    told = []
    consumer = Consumer("t", "c", str(server.address), message_handler=ignore, auth_secret="secret")
    consumer.on_auth.connect(lambda c, conn, response: told.append((conn.address, response["identity"])), weak=False)
    with consumer:
        server.connection()
    assert told == [(server.address, "me")]
    server.stop()


def test_start_needs_someone_to_call(nsqd):
    with pytest.raises(RuntimeError, match="no receivers connected to on_message"):
        Consumer("topic", "channel", str(nsqd.address)).start()


def test_no_start_after_close(nsqd, consume):
    consumer = consume(ignore)
    consumer.close(drain=False)
    with pytest.raises(NotRunning):
        consumer.start()
    assert not consumer.is_running


def test_two_topics_in_one_process_do_not_mix(nsqd):
    seen = {"a": [], "b": []}
    with Consumer("a", "c", str(nsqd.address), message_handler=lambda c, m: seen["a"].append(m.body)):
        first = nsqd.connection(0)
        with Consumer("b", "c", str(nsqd.address), message_handler=lambda c, m: seen["b"].append(m.body)):
            second = nsqd.connection(1)
            first.push(1, body=b"for a")
            second.push(1, body=b"for b")
            first.wait_for(lambda: first.answered(b"FIN"))
            second.wait_for(lambda: second.answered(b"FIN"))
    assert seen == {"a": [b"for a"], "b": [b"for b"]}


def test_an_empty_body_is_a_message(nsqd, consume):
    bodies = []
    consume(lambda consumer, message: bodies.append(message.body))
    conn = nsqd.connection()
    conn.push(1, body=b"")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert bodies == [b""]


def test_stats_tell_what_happened(nsqd, consume):
    consumer = consume(lambda consumer, message: message.body == b"keep" and message.enable_async())
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.push(3, body=b"keep")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    stats = consumer.stats()
    assert (stats.totals.received, stats.totals.finished, stats.in_flight) == (3, 2, 1)
    assert stats.connections[0].address == nsqd.address
    assert (stats.connections[0].rdy, stats.max_in_flight, stats.is_running) == (10, 10, True)
    assert (consumer.total_ready_count, consumer.total_in_flight) == (10, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"nsqd_tcp_addresses": []}, "at least one nsqd or lookupd"),
        ({"nsqd_tcp_addresses": "host:port"}, "port"),
        ({"max_in_flight": -1}, "max_in_flight"),
        ({"max_in_flight": "many"}, "max_in_flight"),
        ({"max_tries": -1}, "max_tries"),
        ({"concurrency": 0}, "concurrency"),
        ({"requeue_delay": -1}, "requeue_delay"),
        ({"requeue_delay": 0.5}, "requeue_delay"),
        ({"max_backoff_duration": -1}, "max_backoff_duration"),
        ({"message_handler": "handler"}, "message_handler"),
        ({"batch_handler": 1}, "batch_handler"),
        ({"give_up": "log"}, "give_up"),
        ({"message_handler": ignore, "batch_handler": ignore}, "batch_handler"),
        ({"max_inflight": 3}, "max_in_flight"),
        ({"heartbeat_interval": 0}, "heartbeat_interval"),
        ({"lookupd_poll_interval": 0}, "lookupd_poll_interval"),
    ],
)
def test_a_wrong_argument_is_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        Consumer("topic", "channel", **({"nsqd_tcp_addresses": "127.0.0.1:4150"} | arguments))


@pytest.mark.parametrize(("topic", "channel"), [("bad topic", "c"), ("t", ""), (b"t", "c"), ("t" * 65, "c")])
def test_a_wrong_name_is_refused(topic, channel):
    with pytest.raises(NameInvalid):
        Consumer(topic, channel, "127.0.0.1:4150")


@pytest.mark.parametrize("name", ["nsqd_tcp_addresses", "lookupd_http_addresses"])
def test_addresses_of_a_wrong_type_are_refused(name):
    with pytest.raises(TypeError, match="address"):
        Consumer("t", "c", **{name: None})


@pytest.mark.parametrize("options", [{"concurrency": 10}, {"concurrency": 10, "batch_size": 1, "batch": True}], ids=str)
@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_never_more_handlers_at_once_than_max_in_flight(nsqd, consume, max_in_flight, options):
    running, most, release = set(), [], Event()

    def handle(message):
        running.add(message)
        most.append(len(running))
        release.wait()
        running.remove(message)

    options = dict(options)
    if options.pop("batch", False):
        consume(None, batch_handler=lambda c, messages: handle(messages[0]), max_in_flight=max_in_flight, **options)
    else:
        consume(lambda c, m: handle(m), max_in_flight=max_in_flight, **options)
    conn = nsqd.connection()
    conn.push(*range(8))  # more than RDY allows, as nsqd sends in place of those whose time is over
    until(lambda: len(running) == max_in_flight)
    holds(lambda: max(most) == max_in_flight)
    release.set()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 8)
    assert max(most) == max_in_flight


def test_more_run_at_once_when_max_in_flight_grows(nsqd, consume):
    running, release = [], Event()
    consumer = consume(lambda c, m: running.append(m) or release.wait(), max_in_flight=1, concurrency=10)
    conn = nsqd.connection()
    conn.push(*range(8))
    until(lambda: len(running) == 1)
    consumer.max_in_flight = 5
    until(lambda: len(running) == 5)
    release.set()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 8)


def test_a_signal_is_heard_from_the_next_message_on_however_busy_the_worker_is(nsqd, consume):
    consumer = consume(lambda consumer, message: None)
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    finished, handled = [], []
    loop_turns().due_at = monotonic() + 1000  # the worker's time slice lasts for long
    consumer.on_finish.connect(lambda sender, message_id: finished.append(message_id), weak=False)
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    consumer.on_message.connect(lambda sender, message: handled.append(message.id), weak=False)
    conn.push(3)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2, 3])
    loop_turns().due_at = 0.0
    assert len(finished) == 2
    assert handled == finished[1:]
