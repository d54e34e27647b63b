"""What the faces of the redesigned cluster answer at their edges, as the real servers do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.http import ask

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.go import decode_json_header


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(1, 1, readiness=0.0) as cluster:
        cluster.create_topic("t", channels=["c", "d"])
        yield cluster


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (b'{"k":01}', {"k": 0}),
        (b'{"k":"\n\xff\\q\\u0041\\ud800"}', {"k": "\n\ufffd\\qA\\ud800"}),
        (b" [ -inf , {} ] ", [0, {}]),
        (b'{"a":true,"b":NaN}', {"a": True, "b": 0}),
    ],
)
def test_headers_are_read_as_the_server_reads_them(header: bytes, value: Any) -> None:
    assert decode_json_header(header) == value


@pytest.mark.parametrize("header", [b"", b"{", b"{}x", b'{"a" 1}', b"tru", b"-x", b'["a', b"[1 2]", b"[" * 100_000])
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="cannot parse JSON"):
        decode_json_header(header)


def test_a_tombstone_hides_a_node_from_those_who_publish(cluster: RedesignedCluster) -> None:
    lookupd, node = cluster.lookupds[0].http_address, cluster.nsqds[0].http_address

    def partitions(access: str) -> list[str]:
        return list(ask(lookupd, "GET", f"/lookup?topic=t&access={access}").json["data"]["partitions"])

    assert ask(lookupd, "POST", f"/topic/tombstone?topic=t&node={node}").status == 200
    assert (partitions("w"), partitions("r")) == ([], ["0"])
    [row] = ask(lookupd, "GET", "/nodes").json["data"]["producers"]
    assert row["tombstones"] == [True]
    assert ask(lookupd, "POST", f"/topic/tombstone?topic=t&node={node}&restore=true").status == 200
    assert partitions("w") == ["0"]


@pytest.mark.parametrize("path", ["/pub_ext?topic=r&ext=x", "/pubtrace?topic=r&trace_id=x"])
def test_who_does_not_lead_says_so_first(path: str) -> None:
    with RedesignedCluster(2, 1, readiness=0.0) as cluster:
        cluster.create_topic("r", 1, 2)
        other = next(node for node in cluster.nsqds if node is not cluster.leader_of("r", 0))
        answer = ask(other.http_address, "POST", f"{path}&partition=0", b"x", Accept="application/vnd.nsq; version=1.0")
    assert (answer.status, answer.json) == (400, {"message": "E_FAILED_ON_NOT_LEADER"})


def test_a_topic_cannot_have_as_many_partitions_as_ids_have(cluster: RedesignedCluster) -> None:
    answer = ask(cluster.lookupds[0].http_address, "POST", "/topic/partition/expand?topic=none&partition_num=255")
    assert (answer.status, answer.json) == (500, {"message": "max partition allowed exceed"})
