"""Why a consumer does nothing, brought about by hand on servers of both kinds: `progress()` names that reason.

All reasons are brought about in tests/sim/test_sim_progress.py; here are those that a person can cause at a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, NamedTuple

import pytest
from support.fleet import Fleet
from support.servers import RealLookupd, RealNsqd
from support.waiting import WAIT, until

from nsq_fast import Message, NsqdHTTPClient
from nsq_fast.client.admin import ClusterAdmin
from nsq_fast.client.progress import ConsumerProgress
from nsq_fast.threads import Consumer, Producer

NOBODY = "127.0.0.1:1"
_numbers = itertools.count()


class Site(NamedTuple):
    """Servers that have a topic of a test's own, with the channel ch."""

    topic: str
    lookupds: list[str]

    def publish(self) -> None:
        with Producer(lookupd_http_addresses=self.lookupds) as producer:
            producer.publish(self.topic, b"work", timeout=WAIT)

    @contextmanager
    def consume(self, handler: Callable[[Any, Message], Any], **options: Any) -> Iterator[Consumer]:
        """A consumer that runs."""
        given = {"topic": self.topic, "lookupd_http_addresses": self.lookupds, "lookupd_poll_interval": 1.0, **options}
        consumer = Consumer(channel="ch", message_handler=handler, max_in_flight=2, **given)
        consumer.start(block=False)
        try:
            yield consumer
        finally:
            consumer.close(drain=False, timeout=1.0)


@pytest.fixture
def original(real_lookupd: Callable[..., RealLookupd], real_nsqd: Callable[..., RealNsqd]) -> Site:
    lookupd = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    with NsqdHTTPClient.from_url(str(nsqd.http_address)) as client:
        client.create_topic("t")
        client.create_channel("t", "ch")
    return Site("t", [str(lookupd.http_address)])


@pytest.fixture(params=["original", "embedded_fleet", pytest.param("real_fleet", marks=pytest.mark.timeout(1800))])
def site(request: pytest.FixtureRequest) -> Site:
    servers: Site | Fleet = request.getfixturevalue(request.param)
    if isinstance(servers, Site):
        return servers
    topic = f"progress_{next(_numbers)}"
    servers.create_topic(topic, 1, 1)
    return Site(topic, servers.lookupds)


def named(consumer: Consumer, reason: str | None) -> ConsumerProgress:
    """Its progress, once it names this reason."""
    found: list[ConsumerProgress] = []

    def is_named() -> bool:
        found[:] = [consumer.progress()]
        return found[0].reason == reason

    until(is_named, 2 * WAIT, 0.05, about=lambda: f"{found} and not {reason}")
    return found[0]


def finish(consumer: Any, message: Message) -> None:
    """The handler of who has none of interest."""


def test_idle_until_something_is_published_and_closing_at_the_end(site: Site) -> None:
    seen = Event()
    with site.consume(lambda _consumer, _message: seen.set()) as consumer:
        named(consumer, "idle")
        site.publish()
        assert seen.wait(WAIT)
        named(consumer, "idle")
    assert consumer.progress().reason == "closing"


def test_handlers_busy_with_the_stack_of_the_one_that_hangs(site: Site) -> None:
    ended = Event()

    def hang(consumer: Any, message: Message) -> None:
        ended.wait(WAIT)

    with site.consume(hang) as consumer:
        site.publish()
        progress = named(consumer, "handlers_busy")
        assert progress.handler is not None
        assert "in hang" in progress.handler.stack
        ended.set()
        named(consumer, "idle")


def test_awaiting_answers_until_they_are_given(site: Site) -> None:
    held: list[Message] = []

    def hold(consumer: Any, message: Message) -> None:
        message.enable_async()
        held.append(message)

    with site.consume(hold) as consumer:
        site.publish()
        named(consumer, "awaiting_answers")
        held.pop().finish()
        named(consumer, "idle")


def test_backoff_after_failures(site: Site) -> None:
    def fail(consumer: Any, message: Message) -> None:
        raise ValueError("a handler fails")

    with site.consume(fail, max_tries=0) as consumer:
        site.publish()
        assert "level" in named(consumer, "backoff").detail


def test_max_in_flight_zero_while_it_is_paused(site: Site) -> None:
    with site.consume(finish) as consumer:
        named(consumer, "idle")
        consumer.pause()
        site.publish()
        assert "pause()" in named(consumer, "max_in_flight_zero").detail
        consumer.resume()
        named(consumer, "idle")


def test_paused_by_server_until_somebody_unpauses_it(site: Site) -> None:
    admin = ClusterAdmin(site.lookupds)
    admin.pause(site.topic, "ch")
    site.publish()
    with site.consume(finish) as consumer:
        progress = named(consumer, "paused_by_server")
        assert progress.topics[0].connections[0].depth == 1
        admin.unpause(site.topic, "ch")
        until(lambda: consumer.stats().totals.finished == 1, 2 * WAIT)
        named(consumer, "idle")


def test_lookup_empty_for_a_topic_that_nobody_has(site: Site) -> None:
    with site.consume(finish, topic=f"{site.topic}_misspelt") as consumer:
        named(consumer, "lookup_empty")


def test_lookup_failing_where_nobody_listens(site: Site) -> None:
    with site.consume(finish, lookupd_http_addresses=NOBODY) as consumer:
        assert NOBODY in named(consumer, "lookup_failing").detail


def test_zone_filter_that_leaves_out_every_nsqd(site: Site) -> None:
    with site.consume(finish, discovery_filter={"hostname": "no-such-host"}) as consumer:
        named(consumer, "zone_filter")


def test_not_connected_while_the_nsqd_is_away(
    real_lookupd: Callable[..., RealLookupd], real_nsqd: Callable[..., RealNsqd]
) -> None:
    nsqd = real_nsqd()
    with site_of(nsqd) as consumer:
        named(consumer, "idle")
        nsqd.kill()
        assert nsqd.address in named(consumer, "not_connected").detail
        nsqd.start()
        named(consumer, "idle")


def site_of(nsqd: RealNsqd) -> Any:
    """A consumer of an nsqd that it knows by its address."""
    options = {"nsqd_tcp_addresses": nsqd.address, "max_reconnect_delay": 0.5}
    return Site("t", []).consume(finish, lookupd_http_addresses=(), **options)
