"""What the embedded cluster and a real one say: where they differ on purpose, and where a channel begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.cluster import RealCluster
from support.differential import ACCEPT
from support.http import ask
from support.transcripts import ERROR
from support.waiting import until
from support.wire import Consumer, WireClient, detail, sized

from nsq_fast.broker import RedesignedCluster
from nsq_fast.names import Address

PATIENCE = 900.0
"""Seconds that a real cluster may take for one thing."""


class Site:
    """A cluster with one nsqlookupd: the embedded one, with options, or a real one in a folder of its own, with flags.

    Attributes:
        is_ours: whether it is the embedded one.
        lookupd: the HTTP address of its nsqlookupd.
    """

    def __init__(self, nodes: int, path: Path | None = None, **options: Any) -> None:
        self.is_ours = path is None
        self.cluster: Any
        if path is None:
            self.cluster = RedesignedCluster(nodes, 1, **{"readiness": 0.0, **options})
            self.cluster.start()
            self.lookupd = self.cluster.lookupds[0].http_address
        else:
            path.mkdir()
            self.cluster = RealCluster(path, nodes, 1, **options)
            self.lookupd = self.cluster.lookupd_addresses[0]

    @property
    def nodes(self) -> list[Any]:
        """Its nsqds, each with ``tcp_address`` and ``http_address``."""
        return list(self.cluster.nsqds)

    def create_topic(self, topic: str, partitions: int = 1, replicas: int = 1, **flags: bool) -> None:
        """Create a topic (flags: ``ordered``) with the channel ``ch``; return when it takes publishes."""
        self.cluster.create_topic(topic, partitions, replicas, channels=("ch",), **flags)

    def kill(self, node: Any) -> None:
        self.cluster.kill_node(node) if self.is_ours else node.kill()

    def end(self, node: Any) -> None:
        self.cluster.kill_node(node) if self.is_ours else node.stop()

    def start(self, node: Any) -> None:
        self.cluster.restart_node(node) if self.is_ours else node.start()

    def stop(self) -> None:
        self.cluster.stop()


def led(site: Site, topic: str, access: str = "r") -> dict[int, Any]:
    """Partition -> the nsqd that leads it, as lookup shows it to consumers, or to publishers ("w")."""
    answer = ask(site.lookupd, "GET", f"/lookup?topic={topic}&access={access}", Accept=ACCEPT)
    ports = {node.tcp_address.port: node for node in site.nodes}
    found = answer.json.get("partitions") or {} if answer.status == 200 else {}
    return {int(number): ports[node["tcp_port"]] for number, node in found.items()}


def in_sync(site: Site, topic: str) -> set[Any]:
    """The nsqds that have all of partition 0, as its leader says; none while nobody leads."""
    leader = led(site, topic).get(0)
    if leader is None:
        return set()
    answer = ask(leader.http_address, "GET", f"/coordinator/stats?topic={topic}&partition=0")
    rows = [row for topic_row in answer.json["topic_coord_stats"] or () for row in topic_row["isr_stats"] or ()]
    ids = {row["node_id"] for row in rows}
    return {node for node in site.nodes if any(f":{node.tcp_address.port}:" in id for id in ids)}


def figures(node: Any, topic: str) -> dict[str, Any]:
    """What an nsqd says of partition 0."""
    answer = ask(node.http_address, "GET", f"/stats?format=json&topic={topic}", Accept=ACCEPT)
    [row] = answer.json["topics"]
    return dict(row)


def publish(node: Any, topic: str, *bodies: bytes) -> None:
    client = WireClient(node.tcp_address)
    for body in bodies:
        assert client.command(f"PUB {topic} 0\n".encode() + sized(body)) == b"OK"
    client.close()


def eventually(probe: Callable[[], Any]) -> Any:
    """What ``probe`` returns, when it is true: a real cluster may need minutes."""
    return until(probe, PATIENCE, every=0.05)


# Where the embedded cluster differs from the real one on purpose: docs/broker.md


KINDS = ["embedded", "real"]
DAY = 24 * 3600 * 10**9


@pytest.fixture(scope="module", params=KINDS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster of one node with a topic, ``t``, for all tests that leave it as it was."""
    if request.param == "real":
        request.getfixturevalue("wants_real")
    made = Site(1, tmp_path_factory.mktemp("site") / "0" if request.param == "real" else None)
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
        running.append(Site(nodes, path, **(flags or {})) if is_real else Site(nodes, **options))
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
    if not site.is_ours:
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
    if site.is_ours:
        site.cluster.partition("t", 0).clean(time.time_ns() + 365 * DAY)
    else:
        assert ask(node.http_address, "POST", "/topic/greedyclean?topic=t&partition=0").status == 200
    assert (figures(node, "t")["backend_start"] > 0) is site.is_ours


# Where a channel begins when somebody says so: the embedded cluster and a real one say the same.


END_OF_FILE, NOT_FOUND = "commit log end of file", "search commit log data not found"
WITHOUT_RECORD = {
    "timestamp:0": END_OF_FILE,
    "timestamp:99999999999": END_OF_FILE,
    "timestamp:-5": "Invalid timestamp -5",
    "timestamp:9223372037": "Invalid timestamp 9223372037",
    "virtual_queue:0": END_OF_FILE,
    "virtual_queue:-1": END_OF_FILE,
    "virtual_queue:99999999": END_OF_FILE,
    "virtual_queue:-999999": END_OF_FILE,
    "virtual_queue:-1000000": NOT_FOUND,
    "msgcount:0": END_OF_FILE,
    "msgcount:99999999": END_OF_FILE,
    "msgcount:-1000000": NOT_FOUND,
    "special:-1": None,
    "special:0": "not supported offset type",
}
"""What is answered in an empty partition; None: OK."""

WITH_RECORDS = {
    "timestamp:0": b"a",
    "timestamp:99999999999": b"end",
    "timestamp:9223372036": b"end",
    "virtual_queue:0": b"a",
    "virtual_queue:-1": b"a",
    "virtual_queue:-999999": b"a",
    "virtual_queue:1": b"b",
    "virtual_queue:99999999": b"end",
    "msgcount:-1": b"a",
    "msgcount:0": b"a",
    "msgcount:1": b"a",
    "msgcount:2": b"b",
    "msgcount:3": b"c",
    "msgcount:4": b"end",
    "msgcount:99999999": b"end",
    "special:-1": b"end",
}
"""The first message that comes when the partition has a, b and c; "end" is published behind the subscription."""

REFUSED_ALWAYS = ("timestamp:-5", "timestamp:9223372037", "virtual_queue:-1000000", "msgcount:-1000000", "special:0")
SEARCHES = {
    "count&search_pos=1": (404, END_OF_FILE),
    "count&search_pos=99": (404, END_OF_FILE),
    "count&search_pos=-1000000": (404, NOT_FOUND),
    "virtual_offset&search_pos=0": (404, END_OF_FILE),
    "virtual_offset&search_pos=99999999": (404, END_OF_FILE),
}
EMPTY, FILLED = "empty", "filled"


@pytest.fixture(scope="module")
def stocked(site: Site) -> Site:
    """With a topic that nothing is published to, and another one."""
    site.create_topic(EMPTY)
    site.create_topic(FILLED)
    return site


def subscribe(node: Any, topic: str, channel: str, position: str) -> str | None:
    """The text of the error that ends the connection; None: OK.

    The channel has to be a new one: a position is only looked at when no other client is there, and one that has left
    may be counted for a while.
    """
    with closing(WireClient(node.tcp_address)) as client:
        answer = client.command(f"SUB_ADVANCED {topic} {channel} 0 {position}\n".encode())
    return None if answer == b"OK" else answer.decode().removeprefix("E_INVALID ")


def set_offset(node: Any, topic: str, channel: str, position: str) -> tuple[int, str | None]:
    """The status, and the message of an error."""
    path = f"/channel/setoffset?topic={topic}&partition=0&channel={channel}"
    answer = ask(node.http_address, "POST", path, position.encode())
    return answer.status, None if answer.status == 200 else answer.json["message"]


def test_an_empty_partition_has_no_position_but_its_end(stocked: Site) -> None:
    node = stocked.nodes[0]
    answers = {position: subscribe(node, EMPTY, f"c{at}", position) for at, position in enumerate(WITHOUT_RECORD)}
    assert answers == WITHOUT_RECORD
    over_http = {position: set_offset(node, EMPTY, "c0", position) for position in WITHOUT_RECORD}
    assert over_http == {position: (500 if text else 200, text) for position, text in WITHOUT_RECORD.items()}


def test_no_message_of_an_empty_partition_is_found(stocked: Site) -> None:
    path = f"/message/get?topic={EMPTY}&partition=0&search_mode="
    answers = {query: ask(stocked.nodes[0].http_address, "GET", path + query) for query in SEARCHES}
    assert {query: (answer.status, answer.json["message"]) for query, answer in answers.items()} == SEARCHES


def test_a_position_beyond_the_records_is_their_end(stocked: Site) -> None:
    node = stocked.nodes[0]
    publish(node, FILLED, b"a", b"b", b"c")
    refused = {position: subscribe(node, FILLED, f"r{at}", position) for at, position in enumerate(REFUSED_ALWAYS)}
    assert refused == {position: WITHOUT_RECORD[position] for position in REFUSED_ALWAYS}
    consumers = {}
    for number, position in enumerate(WITH_RECORDS):
        consumers[position] = Consumer(node, f"SUB_ADVANCED {FILLED} c{number} 0 {position}")
    publish(node, FILLED, b"end")
    assert {position: detail(consumer.receive())[2] for position, consumer in consumers.items()} == WITH_RECORDS
    for consumer in consumers.values():
        consumer.close()


# What nsqlookupds answer to administrators: the embedded ones and the real ones say the same.


CREATE = "/topic/create?topic={topic}&partition_num=1&replicator=1"
NOT_LEADER, NOT_CLUSTER_LEADER = "E_FAILED_ON_NOT_LEADER", "Not nsqlookup leader"
NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"

# Each path is asked of the other nsqlookupd first, and of the one that leads. The message is empty where it is
# done; the last text is that of the other one, None where it is the same.
ANSWERS = [
    (CREATE + "&retention=x", 'strconv.Atoi: parsing "x": invalid syntax', None),
    (CREATE + "&syncdisk=x", "INVALID_ARG_TOPIC_SYNC_DISK", None),
    (CREATE + "&syncdisk=5000", "", NOT_LEADER),
    (CREATE + "&syncdisk=-5&retention=-3", "", NOT_LEADER),
    ("/topic/create?topic=n&partition_num=1&replicator=3", NO_NODE, NOT_LEADER),
    ("/topic/create?topic=n&partition_num=255&replicator=1&multipart=true", "max partition allowed exceed", NOT_LEADER),
    ("/topic/create?topic=a&partition_num=1&replicator=1", "", NOT_LEADER),
    ("/topic/create?topic=a&partition_num=1&replicator=1&retention=5", "already exist", NOT_LEADER),
    ("/topic/create?topic=a&partition_num=1&replicator=1&orderedmulti=true", "already exist", NOT_LEADER),
    ("/topic/meta/update", "MISSING_ARG_TOPIC", None),
    ("/topic/meta/update?topic=none", "topic is not created", NOT_CLUSTER_LEADER),
    ("/topic/meta/update?topic=.!", "invalid topic name", NOT_CLUSTER_LEADER),
    ("/topic/meta/update?topic=a&retention=61", "max retention days allowed exceed", NOT_CLUSTER_LEADER),
    ("/topic/meta/update?topic=a&retention=x", 'strconv.Atoi: parsing "x": invalid syntax', None),
    ("/topic/meta/update?topic=a&syncdisk=4001", "max sync every allowed exceed", NOT_CLUSTER_LEADER),
    ("/topic/meta/update?topic=a&syncdisk=x", "INVALID_ARG_TOPIC_SYNC_DISK", None),
    ("/topic/meta/update?topic=a&replicator=6", "INVALID_ARG_TOPIC_REPLICATOR", None),
    ("/topic/meta/update?topic=a&replicator=0", "INVALID_ARG_TOPIC_REPLICATOR", None),
    ("/topic/meta/update?topic=a&retention=-1", "", NOT_CLUSTER_LEADER),
    ("/topic/meta/update?topic=a&retention=7&syncdisk=3", "", NOT_CLUSTER_LEADER),
]
ANSWERS += [
    ("/cluster/node/remove?remove_node=x", "", NOT_CLUSTER_LEADER),
    ("/topic/partition/expand?topic=a", "MISSING_ARG_TOPIC_PARTITION_NUM", None),
    ("/topic/partition/expand?topic=a&partition_num=0", "INVALID_ARG_TOPIC_PARTITION_NUM", None),
    ("/topic/partition/move?topic=a", "MISSING_ARG_TOPIC_PARTITION", None),
    ("/topic/partition/move?topic=a&partition=x", "INVALID_ARG_TOPIC_PARTITION_NUM", None),
    ("/topic/partition/move?topic=a&partition=255", "INVALID_ARG_TOPIC_PARTITION_NUM", None),
]


@pytest.fixture(params=["embedded", "real"])
def lookupds(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Address, Address]]:
    """The nsqlookupd that leads, and another one, of a cluster of two nodes with the topic ``a``."""
    if request.param == "real":
        request.getfixturevalue("wants_real")
        cluster = RealCluster(tmp_path, 2, 2)
        try:
            cluster.create_topic("a")
            leader = cluster.leader()
            assert leader is not None
            yield leader, next(address for address in cluster.lookupd_addresses if address != leader)
        finally:
            cluster.stop()
        return
    with RedesignedCluster(2, 2, readiness=0.0) as embedded:
        embedded.create_topic("a", channels=["ch"])
        yield embedded.lookupds[0].http_address, embedded.lookupds[1].http_address


def post(lookupd: Address, path: str) -> tuple[int, str]:
    answer = ask(lookupd, "POST", path)
    # Quotes in a message stand there as they are on the real server, so that it is no JSON.
    text = answer.body.decode().removeprefix('{"message":"').removesuffix('"}').replace('\\"', '"')
    return answer.status, text


def test_answers_to_administrators(lookupds: tuple[Address, Address]) -> None:
    leader, other = lookupds
    for number, (path, message, elsewhere) in enumerate(ANSWERS):
        path = path.format(topic=f"t{number}")
        refused = message if elsewhere is None else elsewhere
        assert post(other, path) == (400, refused), path
        assert post(leader, path) == (400 if message else 200, message), path
