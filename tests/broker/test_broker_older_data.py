"""Data folders that earlier versions have written start: nothing in them is lost, or comes again for nothing.

``older_data.json`` has the files of version 0.2 as they were, ``journal_data.json`` those in the format of today: of an
nsqd after its end, of one after SIGKILL, and of a cluster of two nodes after its end. The files of a topic are small,
so each has several; what is deferred is so until 2074.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redesigned import Consumer
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdOptions, NsqdServer, RedesignedCluster

FOLDERS = {
    f"{format}-{folder}": files
    for format in ("older", "journal")
    for folder, files in json.loads((Path(__file__).parents[1] / "data" / f"{format}_data.json").read_text()).items()
}
OPTIONS = {"max_bytes_per_file": 4096, "mem_queue_size": 10, "queue_scan_interval": 0.01}


def write(folder: str, path: Path) -> Path:
    for name, content in FOLDERS[folder].items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(zlib.decompress(base64.b64decode(content)))
    return path


@pytest.fixture(params=[folder for folder in FOLDERS if "cluster" not in folder])
def restarted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NsqdServer]:
    with NsqdServer(NsqdOptions(data_path=str(write(request.param, tmp_path)), **OPTIONS)) as server:
        yield server


def consume(server: NsqdServer, topic: str, channel: str, count: int) -> list[tuple[bytes, int]]:
    client = WireClient(server.tcp_address)
    client.subscribe(topic, channel, 50)
    frames = [client.message() for _ in range(count)]
    client.close()
    return sorted((frame.body[:3], frame.attempts) for frame in frames)


def test_what_was_not_finished_is_there(restarted: NsqdServer) -> None:
    channels = {name: sorted(topic.channels) for name, topic in restarted.nsqd.topics.items() if name != "late"}
    assert channels == {"orders": ["a", "b"], "held": []}
    a, b = (restarted.nsqd.topics["orders"].channels[name] for name in "ab")
    assert (a.is_paused, b.is_paused) == (False, True)
    assert (len(a.deferred), len(b.deferred)) == (2, 1)  # 007 by REQ, 500 by DPUB
    tried = {9, 200}  # they were in flight
    expected = [(b"%03d" % n, 2 if n in tried else 1) for n in [9, *range(200, 250)]]
    assert consume(restarted, "orders", "a", 51) == expected
    assert (a.depth, b.depth) == (0, 250)
    b.set_paused(False)
    assert consume(restarted, "orders", "b", 250) == [(b"%03d" % n, 1) for n in range(250)]


def test_what_a_topic_held_back_is_there(restarted: NsqdServer) -> None:
    assert restarted.nsqd.topics["held"].depth == 5
    assert consume(restarted, "held", "new", 5) == [(b"%03d" % n, 1) for n in range(5)]


def test_a_message_is_there_although_the_files_around_it_are_gone(tmp_path: Path) -> None:
    with NsqdServer(NsqdOptions(data_path=str(write("journal-stopped", tmp_path)), **OPTIONS)) as server:
        channel = server.nsqd.topics["late"].channels["k"]
        assert [(message.body[:3], message.attempts) for message in channel.deferred] == [(b"007", 1)]
        assert (channel.depth, server.nsqd.topics["late"].log.first) == (0, 99)


def test_what_comes_then_is_behind_it_and_survives(restarted: NsqdServer) -> None:
    client = WireClient(restarted.tcp_address)
    client.publish("orders", b"600")
    client.close()
    restarted.restart()
    assert consume(restarted, "orders", "a", 52)[-1] == (b"600", 1)
    until(lambda: restarted.nsqd.topics["orders"].channels["a"].in_flight_count == 0)
    restarted.stop()
    restarted.start()
    a = restarted.nsqd.topics["orders"].channels["a"]
    assert (a.depth, len(a.deferred)) == (0, 2)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if "cluster" in folder])
def test_a_cluster_goes_on_where_it_was(tmp_path: Path, folder: str) -> None:
    path = write(folder, tmp_path)
    for expected in ([*range(20, 40)], []):
        with RedesignedCluster(2, 1, data_path=path, readiness=0.0, takeover_delay=0.02) as cluster:
            for number in range(2):
                partition = cluster.partition("orders", number)
                assert (partition.meta.ordered, partition.meta.ext, len(partition.replicas)) == (True, True, 2)
                assert len(partition.in_sync) == 2
                consumer = Consumer(
                    cluster.leader_of("orders", number), f"SUB_ORDERED orders ch {number}", extend_support=True
                )
                for n in expected:
                    frame = consumer.receive()
                    assert frame.body[13:] == b"%d" % n  # behind the ext field and the detail header
                    consumer.finish(frame)
                consumer.close()
                until(lambda channel=partition.channels["ch"]: channel.depth == 0)
