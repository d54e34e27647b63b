"""The producer against real nsqds and nsqlookupds: nothing that was answered OK is lost, whatever happens to them."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from support.http import ask
from support.servers import RealLookupd, RealNsqd
from support.waiting import promptly, until

from nsq_fast import Consumer, Message, Producer, errors

RealNsqds = Callable[..., RealNsqd]
RealLookupds = Callable[..., RealLookupd]

# Everything goes to disk, at once: then a killed nsqd has what it said OK to.
DURABLE = ("-mem-queue-size=0", "-sync-every=1")


def depth(server: RealNsqd, topic: str) -> int:
    """Messages stored in a topic without channels."""
    stats = json.loads(ask(server.http_address, "GET", f"/stats?format=json&topic={topic}").body)
    return sum(int(each["depth"]) for each in stats["topics"] or ())


def everything(topic: str, *servers: RealNsqd, enough: int) -> Counter[bytes]:
    """Consume a topic of all servers until ``enough`` different messages were seen."""
    seen: Counter[bytes] = Counter()

    def handle(_: Consumer, message: Message) -> None:
        seen[message.body] += 1

    with Consumer(topic, "c", [server.tcp_address for server in servers], message_handler=handle, max_in_flight=100):
        until(lambda: len(seen) >= enough)
    return seen


@pytest.mark.parametrize("options", [{}, {"linger": 0.002}, {"snappy": True}, {"deflate": True}])
def test_a_hundred_greenlets(real_nsqd: RealNsqds, options: dict[str, Any]) -> None:
    server = real_nsqd()

    def work(number: int) -> None:
        for index in range(50):
            assert producer.publish("t", b"%d-%d" % (number, index)) == b"OK"

    with Producer([server.tcp_address], **options) as producer:
        gevent.joinall([gevent.spawn(work, number) for number in range(100)], raise_error=True)
    assert depth(server, "t") == 5000
    assert max(everything("t", server, enough=5000).values()) == 1


def test_every_kind_of_publish(real_nsqd: RealNsqds) -> None:
    server = real_nsqd()
    with Producer(str(server.tcp_address)) as producer:
        assert producer.publish("t", b"single") == b"OK"
        assert producer.multipublish("t", (b"%d" % number for number in range(1000))) == b"OK"
        assert producer.publish("later", b"x", defer=20) == b"OK"
        assert producer.publish("t", b"x" * 1024 * 1024) == b"OK"
        big = [struct.pack(">I", number) + bytes(1_000_000) for number in range(12)]
        assert producer.multipublish("t", big) == b"OK"
    seen = everything("t", server, enough=1014)
    assert max(seen.values()) == 1
    assert set(big) < set(seen)


def test_what_the_server_refuses_fails_alone(real_nsqd: RealNsqds) -> None:
    server = real_nsqd("-max-msg-size=100", "-max-req-timeout=1s")
    for options in ({}, {"linger": 0.005}):
        with Producer([server.tcp_address], retry_unknown_outcome=True, **options) as producer:
            results = [producer.publish_nowait("t", b"x" * (101 if number == 50 else 10)) for number in range(100)]
            gevent.joinall(results, timeout=10)
            assert [number for number, result in enumerate(results) if not result.successful()] == [50]
            assert isinstance(results[50].exception, errors.PublishFailed)
            with pytest.raises(errors.PublishFailed, match="E_INVALID"):
                producer.publish("t", b"x", defer=100_000)
            assert producer.publish("t", b"x") == b"OK"
    assert depth(server, "t") == 200


def test_an_nsqd_killed_with_publishes_pending_and_restarted_loses_none(real_nsqd: RealNsqds) -> None:
    server = real_nsqd(*DURABLE)
    stored: set[bytes] = set()

    def work(number: int) -> None:
        for index in range(25):
            body = b"%d-%d" % (number, index)
            producer.publish("t", body)
            stored.add(body)

    with Producer([server.tcp_address], publish_timeout=20, max_publish_attempts=10) as producer:
        workers = [gevent.spawn(work, number) for number in range(20)]
        for share in (100, 300):
            until(lambda share=share: len(stored) > share)  # type: ignore[misc]
            server.restart()
        gevent.joinall(workers, raise_error=True)
    assert len(stored) == 500
    assert stored <= set(everything("t", server, enough=500))


def test_one_of_two_nsqds_is_killed(real_nsqd: RealNsqds) -> None:
    servers = [real_nsqd(*DURABLE), real_nsqd(*DURABLE)]
    stored: set[bytes] = set()

    def work(number: int) -> None:
        for index in range(25):
            body = b"%d-%d" % (number, index)
            producer.publish("t", body)
            stored.add(body)

    with Producer([server.tcp_address for server in servers], max_publish_attempts=10) as producer:
        until(lambda: len(producer.stats()["connected"]) == 2)
        workers = [gevent.spawn(work, number) for number in range(20)]
        until(lambda: len(stored) > 150)
        servers[0].kill()
        gevent.joinall(workers, raise_error=True)
        until(lambda: producer.stats()["connected"] == [str(servers[1].tcp_address)])
        servers[0].start()
        until(lambda: len(producer.stats()["connected"]) == 2)
    assert stored <= set(everything("t", *servers, enough=500))


def test_an_nsqd_that_comes_up_late(real_nsqd: RealNsqds) -> None:
    server = real_nsqd()
    server.kill()
    with Producer([server.tcp_address]) as producer:
        result = producer.publish_nowait("t", b"x")
        until(lambda: producer.stats()["disconnected"])
        server.start()
        assert result.get(timeout=10) == b"OK"


# Discovery


def registered(lookupd: RealLookupd, count: int) -> None:
    def nodes() -> int:
        return len(json.loads(ask(lookupd.http_address, "GET", "/nodes").body)["producers"])

    until(lambda: nodes() == count)


def test_an_unknown_topic_goes_to_any_nsqd_and_a_known_one_to_those_that_have_it(
    real_nsqd: RealNsqds, real_lookupd: RealLookupds
) -> None:
    lookupd = real_lookupd()
    servers = [real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2)]
    registered(lookupd, 2)
    ask(servers[1].http_address, "POST", "/topic/create?topic=known")
    until(lambda: ask(lookupd.http_address, "GET", "/lookup?topic=known").status == 200)
    with Producer(lookupd_http_addresses=str(lookupd.http_address)) as producer:
        for _ in range(4):
            assert producer.publish("known", b"x") == b"OK"
        assert producer.publish("unknown", b"x") == b"OK"
        until(lambda: len(producer.stats()["connected"]) == 2)
    assert [depth(server, "known") for server in servers] == [0, 4]
    assert sum(depth(server, "unknown") for server in servers) == 1


def test_lookup_knows_nothing(real_nsqd: RealNsqds, real_lookupd: RealLookupds) -> None:
    lookupd = real_lookupd()
    with Producer(lookupd_http_addresses=[str(lookupd.http_address)], lookupd_poll_interval=0.05) as producer:
        with pytest.raises(errors.NoNsqd, match="'t'"):
            producer.publish("t", b"x", timeout=0.2)
        result = producer.publish_nowait("t", b"x")
        server = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
        assert result.get(timeout=10) == b"OK"
    assert depth(server, "t") == 1


def test_lookup_goes_down_and_what_was_known_stays(
    real_nsqd: RealNsqds, real_lookupd: RealLookupds, caplog: pytest.LogCaptureFixture
) -> None:
    lookupd = real_lookupd()
    server = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    registered(lookupd, 1)
    with Producer(lookupd_http_addresses=[str(lookupd.http_address)], lookupd_poll_interval=0.02) as producer:
        assert producer.publish("t", b"x") == b"OK"
        lookupd.kill()
        until(lambda: "fails" in caplog.text)  # a poll
        assert producer.publish("t", b"x") == b"OK"
        server.restart()
        assert producer.publish("t", b"x") == b"OK"


def test_a_lookupd_that_is_not_there() -> None:
    with (
        promptly(),
        Producer(lookupd_http_addresses="127.0.0.1:1") as producer,
        pytest.raises(errors.NoNsqd),
    ):
        producer.publish("t", b"x", timeout=0.1)


def failure_of(producer: Producer, text: str) -> errors.NoNsqd:
    """What a publish fails with, as soon as it says ``text``."""

    def failure() -> errors.NoNsqd | None:
        with pytest.raises(errors.NoNsqd) as caught:
            producer.publish("t", b"x", timeout=0.05)
        return caught.value if text in str(caught.value) else None

    return until(failure)


def test_the_error_says_that_lookup_failed() -> None:
    with Producer(lookupd_http_addresses="127.0.0.1:1") as producer:
        error = failure_of(producer, "lookup failed: http://127.0.0.1:1")
        assert "refused" in str(error)
        assert isinstance(error.__cause__, errors.LookupFailed)


def test_the_error_says_that_lookup_does_not_know_the_topic(real_lookupd: RealLookupds) -> None:
    with Producer(lookupd_http_addresses=[str(real_lookupd().http_address)]) as producer:
        error = failure_of(producer, "lookup does not know the topic")
        assert isinstance(error.__cause__, errors.LookupFailed)


def test_the_error_says_that_the_nsqd_of_the_topic_cannot_be_reached(
    real_nsqd: RealNsqds, real_lookupd: RealLookupds
) -> None:
    lookupd = real_lookupd()
    server = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    ask(server.http_address, "POST", "/topic/create?topic=t")
    until(lambda: ask(lookupd.http_address, "GET", "/lookup?topic=t").status == 200)
    server.freeze()  # nsqlookupd goes on naming it
    with Producer(lookupd_http_addresses=[str(lookupd.http_address)], connect_timeout=0.05) as producer:
        error = failure_of(producer, f"{server.tcp_address}: ")
        assert isinstance(error.__cause__, errors.ConnectFailed)
