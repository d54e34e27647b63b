"""What nsqlookupds answer to administrators: the embedded ones and the real ones say the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import RedesignedCluster as RealRedesignedCluster
from support.http import ask

from nsq_fast.broker import RedesignedCluster
from nsq_fast.names import Address

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
    (
        "/topic/create?topic=n&partition_num=1&replicator=3",
        "ErrType:9 ErrCode:1 : No node is available for topic",
        NOT_LEADER,
    ),
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
        cluster = RealRedesignedCluster(tmp_path, 2, 2)
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
