"""Conversations recorded from a real redesigned cluster, had again with the embedded one: ids and offsets included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.http import ask, shape
from support.replay import DATA, Replay, conversations

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.redesigned.log import Draft

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
LOOKUPS = [recorded for line in (DATA / "redesigned.jsonl").open() if "http" in (recorded := json.loads(line))]

HELLO = [Draft(b"hello")] * 2
# What the partitions held when a channel of the record was made: so many records, with so many bytes in their bodies.
EARLIER = {("t1", 0): (8, 32), ("t1", 1): (2, 4), ("ord1", 0): (6, 24), ("ext1", 0): (7, 144)}
LATER = {
    ("t1", 0): [*HELLO, Draft(b"traced", 77), Draft(b"t1", 78)],
    ("t1", 1): [Draft(b"q1"), Draft(b"q2")],
    ("ord1", 0): [Draft(b"r1"), Draft(b"r2"), Draft(b"m0", 1000), Draft(b"m1", 1001)],
    ("ext1", 0): [
        Draft(b"EB", 77, b'{"##trace_id":"77","k":"v"}'),
        Draft(b"plain on ext"),
        Draft(b"EB", 77, b'{"##trace_id":"77","k":"v"}'),
        Draft(b"EC", 0, b'{"k":"v"}'),
        Draft(b"x1", 0, b'{"k":"v"}'),
    ],
}
CHANNELS = {"tape1": ("t1", 0), "tape2": ("t1", 1), "tape3": ("ord1", 0), "tape6": ("ext1", 0)}
# Conversations that were had when only some of the later records were there.
BEFORE = {"pub_trace": 2, "pub_ext_with_trace": 2, "pub_ext_plain": 3}
PLACES = {"ord1": ("ord1", 0), "ext1": ("ext1", 0), "SUB_ADVANCED": ("t1", 1)}


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    """A cluster with the topics of the recorded one."""
    with RedesignedCluster(lookupds=1) as cluster:
        cluster.create_topic("t1", 3, 1)
        cluster.create_topic("ord1", 3, 2, ordered=True)
        cluster.create_topic("ext1", 1, 1, ext=True)
        yield cluster


def fill(cluster: RedesignedCluster, later: int | None) -> None:
    """Publish what the recorded cluster held; the channels begin where they did."""
    for place, (count, size) in EARLIER.items():
        partition = cluster.partition(*place)
        partition.log.append(
            [Draft(bytes(size // count))] * (count - 1) + [Draft(bytes(size - size // count * (count - 1)))]
        )
        for channel in (name for name, at in CHANNELS.items() if at == place):
            partition.channel(channel)
        partition.log.append(LATER[place][:later])


def server_of(cluster: RedesignedCluster, conversation: dict[str, Any]) -> Any:
    """The node that the conversation was had with."""
    commands = b"".join(bytes.fromhex(*data) for step, *data in conversation["steps"] if step == "send")
    place = next((place for word, place in PLACES.items() if word.encode() in commands), ("t1", 0))
    leader = cluster.leader_of(*place)
    if conversation["name"] != "sub_ordered_wrong_node":
        return leader.tcp_address
    replicas = cluster.partition(*place).replicas
    return next(cluster.node(node) for node in replicas if node != leader.id).tcp_address


@pytest.mark.parametrize(
    "conversation", conversations("redesigned.jsonl"), ids=lambda conversation: conversation["name"]
)
def test_conversation(cluster: RedesignedCluster, conversation: dict[str, Any]) -> None:
    fill(cluster, BEFORE.get(conversation["name"]))
    replay = Replay(server_of(cluster, conversation), same_ids=True)
    replay.play(conversation)
    replay.sock.close()


@pytest.mark.parametrize("recorded", LOOKUPS, ids=lambda recorded: recorded["name"])
def test_lookup(cluster: RedesignedCluster, recorded: dict[str, Any]) -> None:
    topic = recorded["name"].removeprefix("lookup_")
    for name in recorded["http"]["channels"]:
        cluster.partition(topic, 0).channel(name)
    path = f"/lookup?topic={topic}&access=r&metainfo=true"
    answer = ask(cluster.lookupds[0].http_address, "GET", path, **ACCEPT).json
    assert shape(answer) == shape(recorded["http"])
    for key in ("channels", "meta"):
        assert answer[key] == recorded["http"][key]
    assert {node["version"] for node in answer["producers"]} == {recorded["http"]["producers"][0]["version"]}
