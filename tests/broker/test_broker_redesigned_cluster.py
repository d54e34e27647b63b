"""The embedded cluster: nodes that die, leave and come back, replicas, and the time that a real one takes."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from gevent import sleep, socket, spawn
from support.http import ask, refusal
from support.waiting import WAIT, holds, until
from support.wire import Consumer, WireClient, detail, headed, publish, sized

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.message import ClusterError
from nsq_fast.broker.options import TIMINGS
from nsq_fast.errors import ConfigError

# Leaders that move and nodes that die: what clients see, in which order, and that nothing is lost.


ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}

NOT_LEADER, NOT_WRITABLE = b"E_FAILED_ON_NOT_LEADER ", b"E_FAILED_ON_NOT_WRITABLE "


def partitions(cluster: RedesignedCluster, topic: str, access: str = "w") -> dict[str, Any]:
    """What lookup shows of each partition."""
    path = f"/lookup?topic={topic}&access={access}"
    return ask(cluster.lookupds[-1].http_address, "GET", path, **ACCEPT).json.get("partitions") or {}


def shown(cluster: RedesignedCluster, topic: str, access: str = "w") -> dict[str, int]:
    """The TCP port that lookup shows for each partition."""
    return {number: node["tcp_port"] for number, node in partitions(cluster, topic, access).items()}


def replica_of(cluster: RedesignedCluster, topic: str = "t", number: int = 0) -> Any:
    partition = cluster.partition(topic, number)
    return cluster.node(next(node for node in partition.replicas if node != partition.leader))


def replies_until(client: WireClient, last: bytes) -> list[bytes]:
    """Publish until the reply is ``last``; the replies, each kind once."""
    replies = []
    while not replies or replies[-1] != last:
        replies.append(client.command(b"PUB ord 0\n" + sized(b"x")))
        sleep(0.001)  # sleep: publishes again and again
    return [reply for reply, _ in itertools.groupby(replies)]


def test_what_producers_see_of_a_move(cluster: RedesignedCluster) -> None:
    old, new = (WireClient(node.tcp_address) for node in (cluster.leader_of("ord", 0), replica_of(cluster, "ord", 0)))
    assert old.command(b"PUB ord 0\n" + sized(b"x")) == b"OK"
    assert new.command(b"PUB ord 0\n" + sized(b"x")) == NOT_LEADER
    to_old, to_new = spawn(replies_until, old, NOT_LEADER), spawn(replies_until, new, b"OK")
    cluster.move_leader("ord", 0)
    # The connections live on: a publish that is refused ends nothing.
    assert to_old.get()[-2:] == [NOT_WRITABLE, NOT_LEADER]
    assert to_new.get()[-2:] == [NOT_WRITABLE, b"OK"]
    assert shown(cluster, "ord")["0"] == cluster.leader_of("ord", 0).tcp_address.port


def test_what_consumers_see_of_a_move(cluster: RedesignedCluster) -> None:
    publish(cluster, "ext", b"a", b"b")
    consumer = Consumer(cluster.leader_of("ext", 0), "SUB ext ch 0", extend_support=True)
    consumer.finish(consumer.receive())
    second = consumer.receive()
    other = next(node for node in cluster.nsqds if node is not cluster.leader_of("ext", 0))
    cluster.move_leader("ext", 0, other)  # which had nothing of it
    assert consumer.reader.read() == b""  # the end, without an error
    consumer.close()
    again = Consumer(other, "SUB ext ch 0", extend_support=True).receive()
    assert (again.id, again.attempts, again.body) == (second.id, 1, second.body)


def test_lookups_during_a_move(cluster: RedesignedCluster) -> None:
    old = cluster.leader_of("ord", 0)
    move = spawn(cluster.move_leader, "ord", 0)
    until(lambda: cluster.leader_of("ord", 0) is not old)
    # For writing it is left out; whoever reads is sent to the new leader already.
    assert set(shown(cluster, "ord")) == {"1", "2"}
    assert shown(cluster, "ord", "r")["0"] == cluster.leader_of("ord", 0).tcp_address.port
    move.get()
    assert shown(cluster, "ord")["0"] != old.tcp_address.port


@pytest.mark.parametrize("step", [0, 0.005, 0.015, 0.025])
@pytest.mark.parametrize("dies", ["old", "new"])
def test_a_death_during_a_move(cluster: RedesignedCluster, step: float, dies: str) -> None:
    old, new = cluster.leader_of("ord", 0), replica_of(cluster, "ord", 0)
    move = spawn(_move_or_fail, cluster)
    sleep(step)  # sleep: the death comes at each stage of the move
    cluster.kill_node(old if dies == "old" else new)
    move.get()
    port = (new if dies == "old" else old).tcp_address.port
    until(lambda: shown(cluster, "ord").get("0") == port and len(shown(cluster, "ord")) == 3)
    client = WireClient(cluster.leader_of("ord", 0).tcp_address)
    # Refused until the dead one is known to be dead: it is in sync, and does not confirm.
    until(lambda: client.command(b"PUB ord 0\n" + sized(b"x")) == b"OK")


def _move_or_fail(cluster: RedesignedCluster) -> None:
    with suppress(ClusterError):
        cluster.move_leader("ord", 0)


def test_an_ephemeral_channel_goes_with_its_last_client(cluster: RedesignedCluster) -> None:
    channels = cluster.partition("plain", 0).channels
    for _ in range(2):
        consumer = Consumer(cluster.leader_of("plain", 0), "SUB plain e#ephemeral 0")
        assert "e#ephemeral" in channels
        consumer.close()
        until(lambda: "e#ephemeral" not in channels)
    consumer = Consumer(cluster.leader_of("plain", 0), "SUB plain e#ephemeral 0")
    query = "topic=plain&channel=e%23ephemeral"
    assert ask(cluster.leader_of("plain", 0).http_address, "POST", f"/channel/delete?{query}").status == 200
    assert consumer.reader.read() == b""


def test_a_killed_node_resets_its_connections(cluster: RedesignedCluster) -> None:
    node = cluster.leader_of("ord", 0)
    producer, consumer = WireClient(node.tcp_address), Consumer(node, "SUB_ORDERED ord ch 0")
    cluster.kill_node(node)
    for client in (producer, consumer):
        with pytest.raises(ConnectionResetError):
            client.reader.read()
        client.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(node.tcp_address)


@pytest.mark.parametrize("cluster", [3.0], indirect=True)
def test_a_replica_takes_over(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b")
    dead, heir = cluster.leader_of("ord", 0), replica_of(cluster, "ord", 0)
    cluster.kill_node(dead)
    assert "0" not in shown(cluster, "ord")
    assert "0" not in shown(cluster, "ord", "r")
    until(lambda: shown(cluster, "ord").get("0") == heir.tcp_address.port)
    consumer = Consumer(heir, "SUB_ORDERED ord ch 0")
    assert detail(consumer.receive()) == (0, 31, b"a")
    publish(cluster, "ord", b"c")
    cluster.restart_node(dead)
    # It is a replica now, on the ports it had.
    client = WireClient(dead.tcp_address)
    assert client.command(b"PUB ord 0\n" + sized(b"x")) == NOT_LEADER
    cluster.move_leader("ord", 0, dead)
    publish(cluster, "ord", b"d")


def test_lookupds_share_what_they_know(cluster: RedesignedCluster) -> None:
    first, second = cluster.lookupds
    listed = ask(second.http_address, "GET", "/listlookup", **ACCEPT).json
    assert [node["HttpPort"] for node in listed["lookupdnodes"]] == [
        str(item.http_address.port) for item in (first, second)
    ]
    assert listed["lookupdleader"] == listed["lookupdnodes"][0]
    assert set(listed["lookupdleader"]) == {"ID", "NodeIP", "TcpPort", "HttpPort", "RpcPort", "Epoch"}
    create = "/topic/create?topic=new&partition_num=1&replicator=1"
    assert ask(second.http_address, "POST", create).json == {"message": "E_FAILED_ON_NOT_LEADER"}
    first.stop()
    assert ask(second.http_address, "POST", create).status == 200
    first.start()
    assert "0" in ask(first.http_address, "GET", "/lookup?topic=new", **ACCEPT).json["partitions"]


# Replicas on nodes that die, are cut off, and come back: what clients see, and that nothing confirmed is lost.


NEVER = 3600.0


@pytest.fixture
def replicated() -> Iterator[RedesignedCluster]:
    """Three nodes; ``t`` has one partition with two replicas. A replica is not given to another node by itself."""
    with RedesignedCluster(takeover_delay=0.05, move_step=0.0, readiness=0.02, migrate_delay=NEVER) as replicated:
        replicated.create_topic("t", 1, 2, channels=["ch"])
        yield replicated


def put(client: WireClient, body: bytes = b"x") -> bytes:
    return client.command(b"PUB t 0\n" + sized(body))


def client_of(node: Any) -> WireClient:
    return WireClient(node.tcp_address)


def stored(replicated: RedesignedCluster) -> list[bytes]:
    log = replicated.partition("t", 0).log
    return [record.body for record in log.read(0, log.end)]


def test_a_leader_that_is_cut_off_confirms_nothing(replicated: RedesignedCluster) -> None:
    publish(replicated, "t", b"before")
    former = replicated.leader_of("t", 0)
    client = client_of(former)
    epoch = replicated.partition("t", 0).epoch
    replicated.isolate_node(former)
    assert put(client, b"refused") == NOT_WRITABLE
    until(lambda: replicated.leader_of("t", 0) is not former)
    assert replicated.partition("t", 0).epoch > epoch
    assert put(client, b"refused") == NOT_LEADER  # it was not told, but its lease has ended
    replicated.heal_node(former)
    until(lambda: len(replicated.partition("t", 0).in_sync) == 2)
    assert put(client, b"refused") == NOT_LEADER
    publish(replicated, "t", b"after")
    assert stored(replicated) == [b"before", b"after"]


def test_a_leader_that_is_cut_off_stops_to_lead_before_it_is_replaced() -> None:
    with RedesignedCluster(2, 1, readiness=0.0, takeover_delay=NEVER) as replicated:
        replicated.create_topic("t", 1, 1, channels=["ch"])
        leader = replicated.leader_of("t", 0)
        client = client_of(leader)
        replicated.isolate_node(leader)
        assert put(client, b"1") == b"OK"  # it is the only one in sync, and has a lease
        client.close()
    with RedesignedCluster(2, 1, readiness=0.0, takeover_delay=0.5) as replicated:
        replicated.create_topic("t", 1, 1, channels=["ch"])
        leader = replicated.leader_of("t", 0)
        client, consumer = client_of(leader), Consumer(leader, "SUB t ch 0", rdy=1)
        assert put(client, b"x") == b"OK"
        frame = consumer.receive()
        replicated.isolate_node(leader)
        until(lambda: put(client, b"x") == NOT_LEADER)
        until(lambda: replicated.partition("t", 0).leader is None)  # else the consumer would go to another
        consumer.finish(frame)
        assert consumer.frame().data == NOT_LEADER
        confirmed = len(stored(replicated))
        replicated.restart_node(leader)  # it is still cut off
        until(lambda: replicated.partition("t", 0).leader is None)
        again = client_of(leader)
        assert put(again, b"refused") == NOT_LEADER
        replicated.heal_node(leader)
        assert put(again, b"last") == b"OK"
        assert len(stored(replicated)) == confirmed + 1


def test_too_few_replicas_take_no_publishes_and_none_leads_before_it_has_caught_up(
    replicated: RedesignedCluster,
) -> None:
    leader, follower = replicated.leader_of("t", 0), replica_of(replicated)
    client = client_of(leader)
    assert put(client, b"1") == b"OK"
    replicated.kill_node(follower)
    until(lambda: len(replicated.partition("t", 0).in_sync) == 1)
    assert put(client, b"2") == NOT_WRITABLE
    replicated.kill_node(leader)
    replicated.restart_node(follower)
    until(lambda: replicated.partition("t", 0).leader is None)
    replicated.restart_node(leader)
    until(lambda: replicated.leader_of("t", 0) is leader and len(replicated.partition("t", 0).in_sync) == 2)
    assert put(client_of(leader), b"3") == b"OK"
    replicated.kill_node(leader)
    until(lambda: replicated.leader_of("t", 0) is follower)
    assert stored(replicated) == [b"1", b"3"]


def test_a_partition_without_live_replica_is_gone_until_its_node_is_back(replicated: RedesignedCluster) -> None:
    publish(replicated, "t", b"kept")
    nodes = [replicated.node(node) for node in replicated.partition("t", 0).replicas]
    for node in nodes:
        replicated.kill_node(node)
    until(lambda: not partitions(replicated, "t", "r"))
    for node in nodes:
        replicated.restart_node(node)
    until(lambda: partitions(replicated, "t", "r"))
    consumer = Consumer(replicated.leader_of("t", 0), "SUB t ch 0")
    assert consumer.receive().body == b"kept"


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_was_confirmed_is_lost_whatever_happens(seed: int) -> None:
    dice = random.Random(seed)
    options = {"takeover_delay": 0.01, "move_step": 0.0, "readiness": 0.005, "migrate_delay": dice.choice((0.0, 0.02))}
    with RedesignedCluster(nodes=4, lookupds=1, **options) as replicated:
        replicated.create_topic("t", 1, 3, channels=["ch"])
        confirmed: list[bytes] = []
        down: set[Any] = set()
        for turn in range(60):
            node = dice.choice(replicated.nsqds)
            if node in down:
                (replicated.restart_node if not node.is_running else replicated.heal_node)(node)
                down.discard(node)
            elif len(down) < 3:
                dice.choice((replicated.kill_node, replicated.isolate_node))(node)
                down.add(node)
            if dice.random() < 0.2:
                with contextlib.suppress(ClusterError):  # it may be unstable
                    replicated.move_leader("t", 0)
            for other in replicated.nsqds:
                if other.is_running:
                    client = client_of(other)
                    body = b"%d-%s" % (turn, other.id.encode())
                    # A node that does not have the partition answers with an error that ends the connection.
                    confirmed += [body] if put(client, body) == b"OK" else []
                    client.close()
            sleep(dice.choice((0.0, 0.005, 0.03)))  # sleep: trouble at any moment
        for node in down:
            (replicated.restart_node if not node.is_running else replicated.heal_node)(node)
        until(lambda: len(replicated.partition("t", 0).in_sync) >= 3)
        kept = stored(replicated)
        assert [body for body in kept if body in set(confirmed)] == confirmed
        assert confirmed


def test_what_is_finished_around_a_change_of_leader_is_counted_once(replicated: RedesignedCluster) -> None:
    """Records that the old leader has delivered come again; whoever finishes them, the depth is what is not done."""
    channel = replicated.partition("t", 0).channel("ch")
    for _ in range(5):
        first = replicated.leader_of("t", 0)
        publisher = WireClient(first.tcp_address)
        for number in range(20):
            assert publisher.command(b"PUB t 0\n" + sized(b"%d" % number)) == b"OK"
        publisher.close()
        old = Consumer(first, "SUB t ch 0", rdy=20)
        frames = [old.receive() for _ in range(20)]
        moving = spawn(replicated.move_leader, "t", 0)
        for frame in frames[::2]:  # some before it moves, some in between, some too late
            with contextlib.suppress(OSError):
                old.finish(frame)
            assert channel.depth >= 0
            sleep(0)
        moving.get(timeout=WAIT)
        second = replicated.leader_of("t", 0)
        assert second is not first
        new = Consumer(second, "SUB t ch 0", rdy=20)
        finishing = spawn(finish_all, new)
        until(lambda: channel.depth <= 0)
        assert channel.depth == 0
        finishing.kill()
        (shown,) = [
            each
            for topic in ask(second.http_address, "GET", "/stats?format=json&topic=t").json["data"]["topics"]
            for each in topic["channels"]
            if topic["is_leader"]
        ]
        assert shown["depth"] == 0
        old.close()
        new.close()


def finish_all(consumer: Consumer) -> None:
    while True:
        consumer.finish(consumer.receive())


# Nodes that come and leave, partitions that are moved, and what is refused to administrators.


OPTIONS = {"readiness": 0.0, "move_step": 0.0, "takeover_delay": 0.02}


@pytest.fixture
def two_nodes() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(2, 2, **OPTIONS) as two_nodes:
        yield two_nodes


def leaders(two_nodes: RedesignedCluster) -> dict[str, int]:
    return Counter(str(partition.leader) for partition in two_nodes.state.all_partitions())


def replicas(two_nodes: RedesignedCluster) -> dict[str, int]:
    return Counter(node for partition in two_nodes.state.all_partitions() for node in partition.replicas)


def bodies(two_nodes: RedesignedCluster) -> list[list[bytes]]:
    return [[record.body for record in each.log.read(0, 99)] for each in two_nodes.state.topics["t"]]


def test_a_node_that_is_removed_is_emptied_first(two_nodes: RedesignedCluster) -> None:
    two_nodes.add_node()
    two_nodes.create_topic("t", 3, 2, multi_part=True, channels=["ch"])
    for number in range(3):
        publish(two_nodes, "t", b"%d" % number, partition=number)
    before, removed = bodies(two_nodes), two_nodes.nsqds[0]
    assert refusal(two_nodes.lookupds[1], "/cluster/node/remove?remove_node=" + removed.id) == (
        400,
        "Not nsqlookup leader",
    )
    assert refusal(two_nodes.lookupds[0], "/cluster/node/remove?remove_node=" + removed.id) == (200, "")
    until(lambda: removed.id not in replicas(two_nodes))
    assert all(len(partition.in_sync) == 2 for partition in two_nodes.state.all_partitions())
    assert bodies(two_nodes) == before
    two_nodes.create_topic("new", 2, 2, multi_part=True)
    assert removed.id not in replicas(two_nodes)
    two_nodes.remove_node(removed)
    assert not removed.is_running
    removed.start()  # as a new one
    two_nodes.create_topic("newer", 3, 3, multi_part=True)
    assert replicas(two_nodes)[removed.id] > 0


def test_it_is_said_once_what_a_node_that_is_removed_waits_for(
    two_nodes: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    two_nodes.create_topic("t", 2, 2, multi_part=True, channels=["ch"])
    publish(two_nodes, "t", b"0")
    removed = two_nodes.nsqds[0]
    removal = spawn(two_nodes.remove_node, removed)
    until(lambda: "is to leave, and stays for now" in caplog.text)
    assert "no other node can take t-0, t-1" in caplog.text
    assert leaders(two_nodes) == {two_nodes.nsqds[1].id: 2}
    two_nodes.create_topic("u", 1, 1)
    assert removed.id not in two_nodes.partition("u", 0).replicas
    added = two_nodes.add_node()
    removal.get(timeout=WAIT)
    assert not removed.is_running
    assert replicas(two_nodes)[added.id] >= 2
    assert caplog.text.count("is to leave") == 1
    assert bodies(two_nodes)[0] == [b"0"]


MOVE = "/topic/partition/move?topic=t&partition=0"
REFUSED = [
    (MOVE + "&move_from=x&move_to=x", 400, "move to and from node can not be the same"),
    ("/topic/partition/move?topic=t&partition=-1", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("/topic/partition/move?topic=none&partition=0&move_from=x&move_to=y", 400, "Key not found"),
    (MOVE + "&move_from={leader}&move_to={other}", 400, "can not move leader without moveleader param"),
    (MOVE + "&move_from=x&move_to={other}", 400, "the move source node has no replica for the topic"),
    (MOVE + "&move_from={other}&move_to={leader}", 400, "the move destination has the topic data already"),
    (MOVE + "&move_from={other}&move_to=x", 400, "the move destination is not found in cluster"),
    (MOVE + "&move_from={other}&move_to={leader}&move_leader=true", 400, "move from not the topic leader"),
    ("/topic/partition/move?topic=apart&partition=0&move_from={apart}&move_to={other_apart}&move_leader=true", 400,
     "destination node is excluded for topic"),
    ("/topic/partition/expand?topic=none&partition_num=2", 500, "topic is not created"),
    ("/topic/partition/expand?topic=none&partition_num=255", 500, "max partition allowed exceed"),
]  # fmt: skip


def test_what_cannot_be_is_refused_in_the_words_of_the_real_server(two_nodes: RedesignedCluster) -> None:
    two_nodes.create_topic("t", 1, 2)
    two_nodes.create_topic("apart", 2, 1)
    leader, apart = two_nodes.leader_of("t", 0).id, two_nodes.leader_of("apart", 0).id
    other = next(node.id for node in two_nodes.nsqds if node.id != leader)
    other_apart = two_nodes.leader_of("apart", 1).id
    two_nodes.wait_stable()
    for path, status, message in REFUSED:
        path = path.format(leader=leader, other=other, apart=apart, other_apart=other_apart)
        assert refusal(two_nodes.lookupds[0], path) == (status, message), path


# A cluster with ``timings="real"`` takes its time as three real nodes do: here with a hundredth of it.


SCALED = {name: seconds / 100 for name, seconds in TIMINGS["real"].items()}


@pytest.fixture
def slow_cluster() -> Iterator[RedesignedCluster]:
    """Three nodes, and the topic ``t`` with one partition of three replicas, which takes publishes."""
    with RedesignedCluster(3, 1, timings="real", **SCALED) as slow_cluster:
        slow_cluster.create_topic("t", 1, 3, channels=["ch"])
        yield slow_cluster


def test_a_new_topic_is_writable_after_half_of_the_longest_time(slow_cluster: RedesignedCluster) -> None:
    path = "/topic/create?topic=new&partition_num=1&replicator=1"
    began = time.monotonic()
    assert ask(slow_cluster.lookupds[0].http_address, "POST", path).status == 200
    slow_cluster.partition("new", 0).channel("ch")
    client = WireClient(slow_cluster.node(slow_cluster.partition("new", 0).replicas[0]).tcp_address)
    refusal = client.command(b"PUB new 0\n" + sized(b"x"))
    assert refusal == b"E_FAILED_ON_NOT_LEADER " or time.monotonic() - began >= 0.55
    until(lambda: partitions(slow_cluster, "new"))
    assert time.monotonic() - began >= 0.55
    assert client.command(b"PUB new 0\n" + sized(b"x")) == b"OK"


def test_lookup_is_empty_then_for_readers_only_after_the_death_of_a_leader(slow_cluster: RedesignedCluster) -> None:
    publish(slow_cluster, "t", b"before")
    leader = slow_cluster.leader_of("t", 0)
    began = time.monotonic()
    slow_cluster.kill_node(leader)
    assert (partitions(slow_cluster, "t", "r"), partitions(slow_cluster, "t", "w")) == (
        {},
        {},
    ) or time.monotonic() - began >= 0.22
    until(lambda: partitions(slow_cluster, "t", "r"))
    assert time.monotonic() - began >= 0.22
    client = WireClient(slow_cluster.leader_of("t", 0).tcp_address)
    answer, is_shown = client.command(b"PUB t 0\n" + sized(b"x")), bool(partitions(slow_cluster, "t", "w"))
    assert (answer, is_shown) == (b"E_FAILED_ON_NOT_WRITABLE ", False) or time.monotonic() - began >= 0.96
    until(lambda: partitions(slow_cluster, "t", "w"))
    assert time.monotonic() - began >= 0.96
    assert client.command(b"PUB t 0\n" + sized(b"after")) == b"OK"
    client.close()
    assert slow_cluster.leader_of("t", 0) is not leader


def test_the_first_publish_after_the_death_of_a_follower_hangs_and_fails(slow_cluster: RedesignedCluster) -> None:
    leader = slow_cluster.leader_of("t", 0)
    slow_cluster.kill_node(next(node for node in slow_cluster.nsqds if node is not leader))
    clients = [WireClient(leader.tcp_address) for _ in range(2)]
    began = time.monotonic()
    answers = [spawn(client.command, b"PUB t 0\n" + sized(b"x")) for client in clients]
    assert [each.get(timeout=WAIT) for each in answers] == [b"E_FAILED_ON_NOT_LEADER "] * 2
    assert time.monotonic() - began >= 0.12
    assert clients[0].command(b"PUB t 0\n" + sized(b"x")) == b"OK"  # two of three are in sync
    assert [record.body for record in slow_cluster.partition("t", 0).log.read(0, 9)] == [b"x"]
    for client in clients:
        client.close()


def test_a_publish_goes_on_when_the_follower_is_back_in_time() -> None:
    with RedesignedCluster(
        2, 1, timings="real", **{**SCALED, "publish_patience": WAIT, "takeover_delay": WAIT}
    ) as slow_cluster:
        slow_cluster.create_topic("t", 1, 2, channels=["ch"])
        leader = slow_cluster.leader_of("t", 0)
        follower = next(node for node in slow_cluster.nsqds if node is not leader)
        slow_cluster.isolate_node(follower)
        client = WireClient(leader.tcp_address)
        answer = spawn(client.command, b"PUB t 0\n" + sized(b"x"))
        holds(lambda: not answer.ready())
        slow_cluster.heal_node(follower)
        assert answer.get(timeout=WAIT) == b"OK"


@pytest.mark.nsq_cluster(nodes=1, timings="real", readiness=0.0)
def test_a_single_time_is_changed_by_its_option(nsq_cluster: Any) -> None:
    assert (nsq_cluster.options.readiness, nsq_cluster.options.takeover_delay) == (0.0, 22.0)
    assert RedesignedCluster(1, 1).options.takeover_delay == 0.5
    with pytest.raises(ConfigError, match="timings='slow': must be one of 'fast', 'real'"):
        RedesignedCluster(1, 1, timings="slow")


# A cluster takes its time, and says so; with ``kind`` it does not.


CREATE = "/topic/create?topic=orders&partition_num=2&replicator=1&orderedmulti=true"


def is_stable(cluster: RedesignedCluster) -> bool:
    answer: bool = ask(cluster.lookupds[0].http_address, "GET", "/cluster/stats").json["stable"]
    return answer


def test_what_the_cluster_itself_creates_is_ready_and_a_node_that_goes_makes_it_unstable() -> None:
    with RedesignedCluster(nodes=3, lookupds=1, takeover_delay=0.0) as cluster:
        cluster.create_topic("orders", 3, 2, ordered=True, channels=["ch"])
        assert len(partitions(cluster, "orders", "w")) == 3
        # They are spread though there were no leaders yet.
        assert {partition.leader for partition in cluster.state.topics["orders"]} == {node.id for node in cluster.nsqds}
        cluster.wait_stable()
        assert is_stable(cluster)
        node = cluster.leader_of("orders", 0)
        cluster.kill_node(node)
        assert not is_stable(cluster)
        cluster.restart_node(node)
        until(lambda: is_stable(cluster))


def test_a_kind_cluster_is_ready_and_lets_messages_pass() -> None:
    with RedesignedCluster(nodes=1, lookupds=1, kind=True) as cluster:
        assert is_stable(cluster)
        assert ask(cluster.lookupds[0].http_address, "POST", CREATE + "&extend=true").status == 200
        assert len(partitions(cluster, "orders", "r")) == 2
        cluster.create_topic("ext", ext=True, channels=["ch"])
        node = cluster.leader_of("ext", 0)
        tagged = Consumer(node, "SUB ext ch 0", desired_tag="red", extend_support=True)
        client = WireClient(node.tcp_address)
        assert client.command(b"PUB ext 0\n" + sized(b"untagged")) == b"OK"
        assert client.command(b"PUB_EXT ext 0\n" + sized(headed({"##client_dispatch_tag": "red"}, b"x"))) == b"OK"
        assert tagged.receive().data.endswith(b"x")
