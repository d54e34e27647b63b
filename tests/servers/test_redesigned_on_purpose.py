"""Where the embedded cluster differs from the real one on purpose: docs/broker.md. Each test runs on both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer
from support.sites import OurSite, RealSite, Site, eventually, figures, in_sync, led, publish
from support.transcripts import ERROR
from support.waiting import until
from support.wire import WireClient

KINDS = ["embedded", "real"]
DAY = 24 * 3600 * 10**9


@pytest.fixture(scope="module", params=KINDS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster of one node with a topic, ``t``, for all tests that leave it as it was."""
    if request.param == "real":
        request.getfixturevalue("wants_real")
    made: Site = OurSite(1) if request.param == "embedded" else RealSite(tmp_path_factory.mktemp("site") / "0", 1)
    try:
        made.create_topic("t")
        yield made
    finally:
        made.stop()


@pytest.fixture(params=KINDS)
def is_real(request: pytest.FixtureRequest) -> bool:
    if request.param == "real":
        request.getfixturevalue("wants_real")
    return bool(request.param == "real")


@pytest.fixture
def open_site(is_real: bool, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Start a cluster of so many nodes, with options if it is the embedded one, or with flags if it is real."""
    running: list[Site] = []

    def start(nodes: int, *, flags: dict[str, tuple[str, ...]] | None = None, **options: object) -> Site:
        path = tmp_path / f"cluster{len(running)}"
        running.append(RealSite(path, nodes, **(flags or {})) if is_real else OurSite(nodes, **options))
        return running[-1]

    yield start
    for each in running:
        each.stop()


pytestmark = pytest.mark.timeout(1800)


def test_a_message_that_comes_back_is_next_here(site: Site) -> None:
    """A real one may not have read ahead yet: it is asked until it has."""

    def second_delivery() -> bytes:
        publish(site.nodes[0], "t", b"1", b"2", b"3")
        with closing(Consumer(site.nodes[0], "SUB t ch 0", rdy=1)) as consumer:
            consumer.requeue(consumer.receive())
            got = []
            for _ in range(3):
                frame = consumer.receive()
                got.append(frame.body)
                consumer.finish(frame)
            until(lambda: unfinished(site.nodes[0]) == 0)
        assert sorted(got) == [b"1", b"2", b"3"]
        return got[0]

    if site.is_ours:
        assert [second_delivery() for _ in range(3)] == [b"1"] * 3
    else:
        eventually(lambda: second_delivery() == b"2")


def unfinished(node: Any) -> int:
    [channel] = figures(node, "t")["channels"]
    return int(channel["depth"] + channel["in_flight_count"])


def test_quotes_in_a_message_are_escaped_here(site: Site) -> None:
    answer = ask(site.lookupd, "POST", "/topic/create?topic=u&partition_num=1&replicator=1&retention=x")
    quoted = rb"\"x\"" if site.is_ours else b'"x"'
    assert answer.body == b'{"message":"strconv.Atoi: parsing %b: invalid syntax"}' % quoted


def test_the_epoch_is_shown_here(site: Site) -> None:
    [row] = ask(site.nodes[0].http_address, "GET", "/coordinator/stats?topic=t&partition=0").json["topic_coord_stats"]
    assert ("epoch" in row) is site.is_ours


def test_a_topic_has_leaders_when_readiness_says_here(open_site: Callable[..., Site]) -> None:
    site, at_once = open_site(1, readiness=0.0), []
    eventually(lambda: ask(site.lookupd, "POST", create("first")).status == 200)
    for name in ("a", "b", "c"):
        eventually(lambda name=name: ask(site.lookupd, "POST", create(name)).status == 200)
        at_once.append(set(led(site, name)) == {0})
    assert all(at_once) is site.is_ours
    eventually(lambda: all(set(led(site, name)) == {0} for name in ("a", "b", "c")))


def create(topic: str) -> str:
    return f"/topic/create?topic={topic}&partition_num=1&replicator=1"


def test_a_leader_is_replaced_after_takeover_delay_here(open_site: Callable[..., Site]) -> None:
    site = open_site(2, takeover_delay=0.1, migrate_delay=3600.0)
    site.create_topic("t", 1, 2)
    first = led(site, "t")[0]
    began = time.monotonic()
    site.kill(first)
    eventually(lambda: led(site, "t").get(0) not in (None, first))
    assert time.monotonic() - began > (0.1 if site.is_ours else 5.0)


def test_the_state_of_a_cluster_is_in_its_process_here(open_site: Callable[..., Site], tmp_path: Path) -> None:
    """And what is left of it after its end in the folders of its nodes."""
    site = open_site(1, data_path=str(tmp_path))
    site.create_topic("t")
    if isinstance(site, RealSite):
        assert b"/Topics/t/0" in ask(site.cluster.etcd_address, "GET", "/v2/keys/NSQMetaData?recursive=true").body
        return
    publish(site.nodes[0], "t", b"1")
    site.stop()
    for options, topics in (({"data_path": str(tmp_path)}, ["t"]), ({}, [])):
        again = open_site(1, **options)
        assert ask(again.lookupd, "GET", "/topics").json["data"]["topics"] == topics


def test_messages_are_there_after_the_end_of_a_node_without_a_data_path_here(open_site: Callable[..., Site]) -> None:
    site = open_site(1)
    site.create_topic("t")
    [node] = site.nodes
    publish(node, "t", b"1")
    site.end(node)
    site.start(node)
    eventually(lambda: led(site, "t") == {0: node})
    eventually(lambda: takes_consumers(node))
    with closing(Consumer(node, "SUB t ch 0")) as consumer:
        assert consumer.receive().body == b"1"


def takes_consumers(node: Any) -> bool:
    """A real one may be named by lookup before it knows that it leads."""
    client = WireClient(node.tcp_address)
    reply = client.command(b"SUB t ch 0\n")
    client.close()
    return reply == b"OK"


def test_what_a_killed_node_had_not_flushed_is_kept_here(open_site: Callable[..., Site]) -> None:
    """A real one may have flushed in time: several are killed until one has not."""
    site = open_site(1, takeover_delay=0.02)
    [node] = site.nodes

    def loses(topic: str) -> bool:
        site.create_topic(topic)
        publish(node, topic, b"1", b"2")
        site.kill(node)
        site.start(node)
        eventually(lambda: led(site, topic) == {0: node})
        return bool(figures(node, topic)["message_count"] == 0)

    if site.is_ours:
        assert not any(loses(f"t{number}") for number in range(3))
        with closing(Consumer(node, "SUB t0 ch 0")) as consumer:
            assert [consumer.receive().body, consumer.receive().body] == [b"1", b"2"]
    else:
        assert any(loses(f"t{number}") for number in range(5))


def test_an_ordered_fin_is_taken_while_too_few_replicas_are_in_sync_here(open_site: Callable[..., Site]) -> None:
    site = open_site(2, takeover_delay=0.02, migrate_delay=3600.0)
    site.create_topic("t", 1, 2, ordered=True)
    leader = led(site, "t")[0]
    publish(leader, "t", b"1")
    with closing(Consumer(leader, "SUB_ORDERED t ch 0", heartbeat_interval=60_000, msg_timeout=600_000)) as consumer:
        frame = consumer.receive()
        eventually(lambda: len(in_sync(site, "t")) == 2)
        site.kill(next(node for node in site.nodes if node is not leader))
        eventually(lambda: in_sync(site, "t") == {leader})
        consumer.finish(frame)
        if site.is_ours:
            until(lambda: unfinished(leader) == 0)
        else:
            # Messages come again before it: the channel was reset when the follower left.
            refusal = next(frame for frame in iter(consumer.frame, None) if frame.type == ERROR)
            assert refusal.data.startswith(b"E_FAILED_ON_NOT_WRITABLE")


def test_another_node_gets_the_replicas_of_one_that_is_away_after_migrate_delay_here(
    open_site: Callable[..., Site],
) -> None:
    site = open_site(3, takeover_delay=0.02, migrate_delay=0.1)
    site.create_topic("t", 1, 2)
    eventually(lambda: len(in_sync(site, "t")) == 2)
    leader = led(site, "t")[0]
    [away] = in_sync(site, "t") - {leader}
    began = time.monotonic()
    site.kill(away)
    eventually(lambda: len(in_sync(site, "t") - {away}) == 2)
    assert time.monotonic() - began > (0.1 if site.is_ours else 10.0)


def test_messages_go_one_by_one_here(open_site: Callable[..., Site]) -> None:
    """All channels are done with them: in a real cluster they go with the file, and this one is still written."""
    site = open_site(1, flags={"nsqd_flags": ("-retention-size-per-day=16",)})
    site.create_topic("t")
    [node] = site.nodes
    publish(node, "t", b"1", b"2", b"3")
    with closing(Consumer(node, "SUB t ch 0")) as consumer:
        for _ in range(3):
            consumer.finish(consumer.receive())
    eventually(lambda: figures(node, "t")["channels"][0]["depth"] == 0)
    if isinstance(site, OurSite):
        site.cluster.partition("t", 0).clean(time.time_ns() + 365 * DAY)
    else:
        assert ask(node.http_address, "POST", "/topic/greedyclean?topic=t&partition=0").status == 200
    assert (figures(node, "t")["backend_start"] > 0) is site.is_ours
