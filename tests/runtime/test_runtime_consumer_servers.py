"""The consumer against whole nsqds, embedded and real: nothing lost, nothing held beyond the limit, always back."""

from __future__ import annotations

from collections import Counter
from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.waiting import until

from nsq_fast import Consumer, Producer, RequeueMessage
from nsq_fast.client.give_up import PublishTo

TOUCHED = 3.0  # the msg_timeout of messages that auto_touch keeps; half of it is what a busy machine may be late
TOUCHES = 3  # so many of them take longer than one timeout


def post(server, path, body=b""):
    answer = ask(server.http_address, "POST", path, body)
    assert answer.status == 200, answer.body


def publish(server, topic, bodies):
    post(server, f"/mpub?topic={topic}", b"\n".join(bodies))


def with_quick_timeouts(server):
    """nsqd looks at timeouts and deferred messages of a new channel only after 5 s, of one it starts with at once."""
    post(server, "/topic/create?topic=t")
    post(server, "/channel/create?topic=t&channel=c")
    server.stop()
    server.start()
    return server


def channel_stats(server, topic, channel):
    stats = ask(server.http_address, "GET", f"/stats?format=json&topic={topic}").json
    (found,) = [each for each in stats["topics"][0]["channels"] if each["channel_name"] == channel]
    return found


def bodies(prefix, count):
    return [b"%s-%d" % (prefix, number) for number in range(count)]


@pytest.mark.parametrize("options", [{}, {"concurrency": 5}, {"batch": True}, {"snappy": True}, {"deflate": True}])
def test_every_message_is_handled_once_and_finished(make_nsqd, options):
    nsqd = make_nsqd()
    publish(nsqd, "t", bodies(b"m", 3000))
    seen = Counter()
    handlers = {"message_handler": lambda c, m: seen.update([m.body])}
    if options.pop("batch", False):
        handlers = {"batch_handler": lambda c, messages: seen.update(m.body for m in messages)}
    with Consumer("t", "c", str(nsqd.tcp_address), max_in_flight=100, **handlers, **options):
        until(lambda: len(seen) == 3000)
    assert set(seen.values()) == {1}
    stats = channel_stats(nsqd, "t", "c")
    assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"], stats["timeout_count"]) == (0, 0, 0, 0)


def test_max_in_flight_above_max_rdy_count(make_nsqd):
    nsqd = make_nsqd("-max-rdy-count=50")
    publish(nsqd, "t", bodies(b"m", 500))
    seen, errors = set(), []
    consumer = Consumer(
        "t", "c", str(nsqd.tcp_address), max_in_flight=5000, message_handler=lambda c, m: seen.add(m.body)
    )
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    with consumer:
        until(lambda: len(seen) == 500)
    assert not errors


def test_never_more_held_than_max_in_flight_while_nsqds_come_and_go(make_nsqd):
    nsqds = [make_nsqd() for _ in range(3)]
    for number, nsqd in enumerate(nsqds):
        publish(nsqd, "t", bodies(b"%d" % number, 300))
    held, most, seen = 0, 0, set()

    def handler(consumer, message):
        nonlocal held, most
        held += 1
        most = max(most, consumer.total_in_flight)
        gevent.sleep(0.002)  # sleep: a handler that waits
        held -= 1
        seen.add(message.body)

    addresses = [str(nsqd.tcp_address) for nsqd in nsqds]
    nsqds[2].kill()
    with Consumer(
        "t", "c", addresses, max_in_flight=12, concurrency=12, message_handler=handler, max_reconnect_delay=0.1
    ):
        until(lambda: len(seen) > 50)
        nsqds[2].start()
        until(lambda: any(body.startswith(b"2") for body in seen) or len(seen) == 600)
        nsqds[0].restart()
        until(lambda: {body for body in seen if body.startswith(b"1")} == set(bodies(b"1", 300)))
    assert most <= 12


def test_a_restarted_nsqd_is_found_again_and_loses_nothing(make_nsqd):
    nsqd = make_nsqd()
    seen = set()
    with Consumer(
        "t",
        "c",
        str(nsqd.tcp_address),
        max_in_flight=50,
        message_handler=lambda c, m: seen.add(m.body),
        max_reconnect_delay=0.2,
    ) as consumer:
        publish(nsqd, "t", bodies(b"before", 100))
        until(lambda: len(seen) == 100)
        nsqd.kill()
        until(lambda: not consumer.stats().connections[0].is_connected)
        nsqd.start()
        publish(nsqd, "t", bodies(b"after", 100))
        until(lambda: len(seen) == 200)
        assert consumer.stats().connections[0].rdy == 50


def test_nsqds_are_found_through_lookupd_also_one_that_comes_later(make_nsqd, make_lookupd):
    lookupd = make_lookupd()
    flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
    first = make_nsqd(flag)
    publish(first, "t", [b"first"])
    seen = set()
    with Consumer(
        "t",
        "c",
        lookupd_http_addresses=str(lookupd.http_address),
        lookupd_poll_interval=0.2,
        max_in_flight=10,
        message_handler=lambda c, m: seen.add(m.body),
    ):
        until(lambda: seen == {b"first"})
        second = make_nsqd(flag)
        publish(second, "t", [b"second"])
        until(lambda: seen == {b"first", b"second"})


def test_slow_handlers_run_side_by_side(make_nsqd):
    nsqd = make_nsqd()
    publish(nsqd, "t", bodies(b"m", 100))
    running, release, seen = [], Event(), set()

    def handler(consumer, message):
        running.append(message.body)
        release.wait()
        seen.add(message.body)

    with Consumer("t", "c", str(nsqd.tcp_address), max_in_flight=100, concurrency=100, message_handler=handler):
        until(lambda: len(running) == 100)
        release.set()
        until(lambda: len(seen) == 100)


def test_handlers_slower_than_heartbeats_keep_the_connection(make_nsqd):
    nsqd = make_nsqd()
    publish(nsqd, "t", [b"slow", b"next"])
    seen = []

    def handler(consumer, message):
        gevent.sleep(3.0 if message.body == b"slow" else 0)  # sleep: longer than two heartbeats
        seen.append(message.body)

    with Consumer(
        "t", "c", str(nsqd.tcp_address), max_in_flight=2, heartbeat_interval=1.0, message_handler=handler
    ) as consumer:
        until(lambda: len(seen) == 2)
        assert consumer.stats().totals.received == 2


def test_an_answer_that_comes_too_late_is_counted_and_told(make_nsqd):
    nsqd = with_quick_timeouts(make_nsqd())
    publish(nsqd, "t", [b"slow"])
    attempts, errors = [], []

    def handler(consumer, message):
        attempts.append(message.attempts)
        gevent.sleep(1.6 if message.attempts == 1 else 0)  # sleep: longer than the timeout of the message

    consumer = Consumer(
        "t", "c", str(nsqd.tcp_address), msg_timeout=1.0, concurrency=2, max_in_flight=2, message_handler=handler
    )
    consumer.on_error.connect(lambda c, error: errors.append(error.code), weak=False)
    with consumer:
        until(lambda: errors)
        assert errors == ["E_FIN_FAILED"]
        assert attempts == [1, 2]
        assert consumer.stats().totals.answers_failed == 1


def test_messages_that_are_never_answered_do_not_stop_a_consumer(make_nsqd):
    nsqds = [with_quick_timeouts(make_nsqd()) for _ in range(2)]
    for number, nsqd in enumerate(nsqds):
        publish(nsqd, "t", bodies(b"%d" % number, 4))
    seen, expired = Counter(), []

    def handler(consumer, message):
        message.enable_async()
        seen[message.body] += 1
        if message.attempts > 1:
            message.finish()

    addresses = [str(nsqd.tcp_address) for nsqd in nsqds]
    consumer = Consumer("t", "c", addresses, max_in_flight=4, msg_timeout=1.0, message_handler=handler)
    consumer.on_expired.connect(lambda c, message: expired.append(message.body), weak=False)
    with consumer:
        until(lambda: sorted(seen.values()) == [2] * 8, about=lambda: seen)
        until(lambda: consumer.stats().totals.finished == 8)
        assert sorted(expired) == sorted(seen)
        assert consumer.stats().in_flight == 0


def test_handlers_too_slow_for_max_in_flight_begin_in_time_all_the_same(make_nsqd):
    nsqd = with_quick_timeouts(make_nsqd())
    publish(nsqd, "t", bodies(b"m", 10))
    ages, most, done = [], 0, set()

    def handler(consumer, message):
        nonlocal most
        ages.append(monotonic() - message.received_at)
        most = max(most, consumer.total_in_flight)
        gevent.sleep(0.4)  # sleep: ten in a row take longer than the timeout of a message
        done.add(message.body)

    options = {"max_in_flight": 10, "msg_timeout": 1.0, "max_tries": 0}
    with Consumer("t", "c", str(nsqd.tcp_address), message_handler=handler, **options) as consumer:
        until(lambda: len(done) == 10)
        totals = consumer.stats().totals
    assert max(ages) < 1.5, "26 calls, 23 of them too late, were seen before"
    assert most <= 10
    # Those of the first second, in which the handler is not known to be slow; more if the machine is slow by turns.
    assert totals.answers_failed <= 6


def test_by_default_messages_of_all_nsqds_come_at_once(make_nsqd):
    nsqds = [make_nsqd() for _ in range(3)]
    for number, nsqd in enumerate(nsqds):
        publish(nsqd, "t", [b"%d" % number])
    seen = []
    addresses = [str(nsqd.tcp_address) for nsqd in nsqds]
    with Consumer("t", "c", addresses, message_handler=lambda c, m: seen.append(m.body)) as consumer:
        until(lambda: len(seen) == 3)
        until(lambda: [each.rdy for each in consumer.stats().connections] == [1, 1, 1])


def test_auto_touch_keeps_a_message(make_nsqd):
    nsqd = with_quick_timeouts(make_nsqd())
    publish(nsqd, "t", [b"slow"])
    attempts = []

    def handler(consumer, message):
        until(lambda: consumer.stats().totals.touched == TOUCHES)
        attempts.append(message.attempts)

    with Consumer("t", "c", str(nsqd.tcp_address), msg_timeout=TOUCHED, auto_touch=True, message_handler=handler):
        until(lambda: attempts)
    assert attempts == [1]
    assert channel_stats(nsqd, "t", "c")["timeout_count"] == 0


def test_auto_touch_keeps_an_asynchronous_message_until_it_is_responded_to(make_nsqd):
    nsqd = with_quick_timeouts(make_nsqd())
    publish(nsqd, "t", [b"slow", b"quick"])
    held, attempts = [], []

    def handler(consumer, message):
        attempts.append(message.attempts)
        message.enable_async()
        held.append(message)

    options = {"msg_timeout": TOUCHED, "auto_touch": True, "max_in_flight": 2}
    with Consumer("t", "c", str(nsqd.tcp_address), message_handler=handler, **options) as consumer:
        until(lambda: len(held) == 2)
        held[1].finish()
        until(lambda: consumer.stats().totals.touched >= TOUCHES)
        held[0].finish()
        until(lambda: consumer.stats().totals.finished == 2)
    assert attempts == [1, 1]
    assert channel_stats(nsqd, "t", "c")["timeout_count"] == 0


def test_failing_messages_come_back_and_are_given_up(make_nsqd):
    nsqd = with_quick_timeouts(make_nsqd())
    publish(nsqd, "t", [b"bad", b"good"])
    attempts, given_up = [], []

    def handler(consumer, message):
        if message.body == b"bad":
            attempts.append(message.attempts)
            raise RequeueMessage(0.01)

    options = {"max_tries": 3, "max_backoff_duration": 0, "give_up": lambda c, m: given_up.append(m.body)}
    with Consumer("t", "c", str(nsqd.tcp_address), message_handler=handler, max_in_flight=2, **options):
        until(lambda: given_up)
    assert (attempts, given_up) == ([1, 2, 3], [b"bad"])
    assert channel_stats(nsqd, "t", "c")["depth"] == 0


def test_close_gives_unstarted_messages_to_others_at_once(make_nsqd):
    nsqd = make_nsqd()
    publish(nsqd, "t", bodies(b"m", 50))
    first, second, closing = [], [], Event()
    busy = Consumer(
        "t",
        "c",
        str(nsqd.tcp_address),
        max_in_flight=50,
        message_handler=lambda c, m: (first.append(m.body), closing.wait()),
    )
    busy.start(block=False)
    until(lambda: first)
    gevent.spawn(closing.set)  # while close() waits for the handler
    busy.close()
    with Consumer(
        "t", "c", str(nsqd.tcp_address), max_in_flight=50, message_handler=lambda c, m: second.append(m.body)
    ):
        until(lambda: len(first) + len(second) == 50)
    assert not set(first) & set(second), "what was finished was not delivered again"


def test_backoff_probes_and_recovers(make_nsqd):
    nsqd = make_nsqd()
    publish(nsqd, "t", bodies(b"m", 200))
    failing, seen = True, set()

    def handler(consumer, message):
        if failing:
            raise RequeueMessage(0.0)
        seen.add(message.body)

    with Consumer(
        "t",
        "c",
        str(nsqd.tcp_address),
        max_in_flight=10,
        max_tries=0,
        max_backoff_duration=0.2,
        message_handler=handler,
    ) as consumer:
        until(lambda: consumer.stats().backoff_level)
        until(lambda: consumer.total_ready_count == 0)
        failing = False
        until(lambda: len(seen) == 200)
        assert consumer.stats().backoff_level == 0


def test_no_nsqd_starves_when_there_are_more_than_max_in_flight(make_nsqd):
    nsqds = [make_nsqd() for _ in range(3)]
    for number, nsqd in enumerate(nsqds):
        publish(nsqd, "t", bodies(b"%d" % number, 5))
    seen = set()
    addresses = [str(nsqd.tcp_address) for nsqd in nsqds]
    with Consumer(
        "t", "c", addresses, max_in_flight=1, low_ready_idle_timeout=0.1, message_handler=lambda c, m: seen.add(m.body)
    ) as consumer:
        until(lambda: len(seen) == 15, about=lambda: (sorted(seen), consumer.stats()))


def test_a_dead_letter_topic_is_written_through_the_same_servers(make_nsqd):
    nsqd = make_nsqd()
    publish(nsqd, "t", [b"poison"])
    dead = []
    address = str(nsqd.tcp_address)

    def fail(consumer, message):
        raise RequeueMessage(0.0)

    with (
        Consumer(
            "t", "c", address, message_handler=fail, max_tries=1, max_backoff_duration=0, give_up=PublishTo("dead")
        ),
        Consumer("dead", "c", address, message_handler=lambda c, m: dead.append(m.body)),
    ):
        until(lambda: dead == [b"poison"])
        until(lambda: channel_stats(nsqd, "t", "c")["in_flight_count"] == 0)
    assert channel_stats(nsqd, "t", "c")["depth"] == 0


def test_a_consumer_that_is_older_than_its_topic_finds_it_soon(make_nsqd, make_lookupd, caplog):
    """With default options: lookup is polled once a minute when the topic is known, not while it is not."""
    lookupd = make_lookupd()
    nsqd = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    seen = []
    consumer = Consumer(
        "young",
        "channel",
        lookupd_http_addresses=str(lookupd.http_address),
        message_handler=lambda _, message: seen.append(message.body),
    )
    consumer.start(block=False)
    until(lambda: "no nsqlookupd knows topic young yet" in caplog.text)
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.publish("young", b"first")
    until(lambda: seen == [b"first"])
    assert caplog.text.count("topic young is known now") == 1
    consumer.close()
