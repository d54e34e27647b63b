"""How much of the client a publish goes through: what is usual is compiled, and a reader follows a few files."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.contract import FACES, Face

import nsq_fast
from nsq_fast import Producer
from nsq_fast.broker import RedesignedCluster
from nsq_fast.client.trace import PublishRecord, TraceLog
from nsq_fast.errors import ConfigError

PACKAGE = str(Path(nsq_fast.__file__).parent)


@pytest.mark.parametrize(
    ("options", "most_calls", "most_files", "most_changes"),
    [({}, 14, 6, 10), ({"key": "k"}, 14, 6, 10), ({"key": "k", "trace_id": 7}, 25, 7, 16)],
    ids=["plain", "keyed", "keyed-and-traced"],
)
@pytest.mark.nsq_cluster(nodes=2, lookupds=1)
def test_a_warm_publish_walks_few_functions_in_few_files(
    nsq_cluster: RedesignedCluster, options: Any, most_calls: int, most_files: int, most_changes: int
) -> None:
    nsq_cluster.create_topic("t", partitions=2, channels=["ch"])
    with Producer(lookupd_http_addresses=[str(each.http_address) for each in nsq_cluster.lookupds]) as producer:
        for _ in range(20):
            producer.publish("t", b"body", **options)
        walks = [_walk(producer, options) for _ in range(20)]
    # The shortest is the publish alone: the hub has nothing else to do meanwhile.
    walk = min(walks, key=len)
    assert len(walk) <= most_calls
    assert len(set(walk)) <= most_files
    assert sum(one != other for one, other in pairwise(walk)) <= most_changes


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
@pytest.mark.nsq_cluster(nodes=2, lookupds=1)
def test_each_face_gives_the_receipt_of_what_is_traced(
    face: Face, nsq_cluster: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    nsq_cluster.create_topic("t", partitions=2, channels=["ch"])
    log = TraceLog()
    log.enable("another-topic")

    async def main() -> None:
        lookupds = [str(each.http_address) for each in nsq_cluster.lookupds]
        async with face.client("Producer", lookupd_http_addresses=lookupds, trace=log) as producer:
            assert await face(producer.publish("t", b"plain", key="k")) == b"OK"
            found = [
                await face(producer.publish("t", b"warm", key="k", trace_id=7)),
                await face(producer.publish("t", b"anywhere", trace_id=8)),
                await face.result(producer.publish_nowait("t", b"nowait", partition=1, trace_id=9)),
            ]
            assert [receipt.trace_id for receipt in found] == [7, 8, 9]
            assert found[2].partition == 1
            with pytest.raises(ConfigError, match="trace_id"):
                await face(producer.publish("t", b"x", key="k", trace_id=-1))
            log.enable("t")
            drawn = await face(producer.publish("t", b"switched on", key="k"))
            assert drawn.trace_id > 0
            assert drawn.partition == found[0].partition
            assert producer.stats()["held"] == 0
            records = [each.msg for each in caplog.records if isinstance(each.msg, PublishRecord)]
            assert [record.trace_id for record in records] == [drawn.trace_id], "of the others nobody asked for one"

    face.run(main())


def _walk(producer: Producer, options: Any) -> list[str]:
    """The files of ours in which a function is called, call by call."""
    calls = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        producer.publish("t", b"body", **options)
    finally:
        sys.setprofile(None)
    return calls
