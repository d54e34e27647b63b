"""A cluster with a data path: what survives its end, a SIGKILL, a damaged file and a full disk."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.http import ask
from support.waiting import until
from support.wire import Consumer, WireClient, headed, publish, sized

from nsq_fast.broker import ClusterProcess, RedesignedCluster
from nsq_fast.broker.journal import OPEN_FILES
from nsq_fast.broker.message import DataPathError


def start(path: Path, **options: Any) -> RedesignedCluster:
    return RedesignedCluster(**{"data_path": path, "readiness": 0.0, "takeover_delay": 0.02, "lookupds": 1, **options})


def bodies(cluster: RedesignedCluster, topic: str = "t", number: int = 0) -> list[bytes]:
    log = cluster.partition(topic, number).log
    return [record.body for record in log.read(log.first, log.end)]


def take(consumer: Consumer, count: int) -> list[bytes]:
    frames = [consumer.receive() for _ in range(count)]
    for frame in frames:
        consumer.finish(frame)
    return [frame.body for frame in frames]


def open_logs(folder: Path) -> int:
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(link.startswith(str(folder)) and link.endswith(".log") for link in links)


def test_topics_messages_and_channels_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there are more replicas than files may be open."""
    monkeypatch.setattr(OPEN_FILES, "most", 3)
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch", "paused"])
        cluster.create_topic("o", 2, 1, ordered=True, ext=True, channels=["ch"])
        publish(cluster, "t", b"0", b"1", b"2", b"3")
        consumer = Consumer(cluster.leader_of("t", 0), "SUB t ch 0")
        frames = [consumer.receive() for _ in range(4)]
        consumer.finish(frames[0])
        consumer.finish(frames[2])
        channel = cluster.partition("t", 0).channel("ch")
        until(lambda: channel.depth == 2)
        cluster.partition("t", 0).channel("paused").set_paused(True)
        consumer.close()
        epoch, before = cluster.partition("t", 0).epoch, cluster.leader_of("t", 0)
        number = cluster.nsqds.index(before)
        for partition in (0, 1):
            publish(cluster, "o", b"5", partition=partition)
        assert open_logs(tmp_path) == 3
    assert open_logs(tmp_path) == 0
    with start(tmp_path) as cluster:
        assert cluster.partition("t", 0).epoch > epoch
        assert cluster.leader_of("t", 0) is cluster.nsqds[number]
        assert set(cluster.state.topics) == {"t", "o"}
        meta = cluster.partition("o", 1).meta
        assert (meta.ordered, meta.ext, meta.partition_num, meta.replica) == (True, True, 2, 1)
        channels = cluster.partition("t", 0).channels
        assert {name: channel.is_paused for name, channel in channels.items()} == {"ch": False, "paused": True}
        publish(cluster, "t", b"4")
        consumer = Consumer(cluster.leader_of("t", 0), "SUB t ch 0")
        assert take(consumer, 3) == [b"1", b"3", b"4"]
        assert [bodies(cluster, "o", partition) for partition in (0, 1)] == [[b"5"]] * 2
        assert open_logs(tmp_path) == 3


def test_ids_offsets_and_headers_are_as_before(tmp_path: Path) -> None:
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 1, 1, multi_part=True, channels=["ch"])
        publish(cluster, "t", b"without")
        lookupd = cluster.lookupds[0].http_address
        assert ask(lookupd, "POST", "/topic/meta/update?topic=t&upgradeext=true").status == 200
        client = WireClient(cluster.leader_of("t", 0).tcp_address)
        assert client.command(b"PUB_EXT t 0\n" + sized(headed({"##trace_id": "7"}, b"with"))).startswith(b"OK")
        assert client.command(b"PUB t 0\n" + sized(b"plain")) == b"OK"
        client.close()
        log = cluster.partition("t", 0).log
        before = [(each.id, each.offset, each.size, each.ext, each.body) for each in log.read(0, 9)]
    with start(tmp_path) as cluster:
        log = cluster.partition("t", 0).log
        assert [(each.id, each.offset, each.size, each.ext, each.body) for each in log.read(0, 9)] == before
        assert log.has_traced
        assert cluster.partition("t", 0).meta.ext


def test_what_is_deleted_stays_so(tmp_path: Path) -> None:
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 1, 2, channels=["gone", "ch", "none#ephemeral"])
        publish(cluster, "t", b"old")
        cluster.partition("t", 0).delete_channel("gone")
        cluster.create_topic("u", channels=["ch"])
        publish(cluster, "u", b"old")
        assert ask(cluster.lookupds[0].http_address, "POST", "/topic/delete?topic=u&partition=**").status == 200
        cluster.forget_log("t", 0, before=31)
        publish(cluster, "t", b"new")
    with start(tmp_path) as cluster:
        assert list(cluster.partition("t", 0).channels) == ["ch"]
        assert list(cluster.state.topics) == ["t"]
        assert (cluster.partition("t", 0).log.first, bodies(cluster)) == (1, [b"new"])
        cluster.create_topic("u", channels=["ch"])
        assert bodies(cluster, "u") == []


def test_a_topic_whose_nodes_are_not_there_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 3, 1, channels=["ch"])
        publish(cluster, "t", b"kept", partition=2)
    with start(tmp_path, nodes=2) as cluster:
        assert cluster.state.topics == {}
        cluster.create_topic("u", channels=["ch"])
    with start(tmp_path) as cluster:
        assert set(cluster.state.topics) == {"t", "u"}
        assert bodies(cluster, "t", 2) == [b"kept"]
    assert "topic t is left out: partition" in caplog.text


def test_a_data_path_is_of_one_cluster(tmp_path: Path) -> None:
    with start(tmp_path), pytest.raises(DataPathError, match="in use"):
        start(tmp_path).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        start(tmp_path / "file").start()


def test_a_sigkill_loses_nothing_that_was_confirmed(tmp_path: Path) -> None:
    dice, confirmed = random.Random(1), []
    for turn in range(3):
        with ClusterProcess(2, 1, data_path=tmp_path, readiness=0.0) as process:
            if not turn:
                process.create_topic("t", 1, 2, channels=["ch"])
            clients = [WireClient(node.tcp) for node in process.nsqds]
            for number in range(dice.randrange(1, 60)):
                body = b"%d-%d" % (turn, number)
                replies = [client.command(b"PUB t 0\n" + sized(body)) for client in clients]
                confirmed += [body] * replies.count(b"OK")
            for client in clients:
                client.send(b"PUB t 0\n" + sized(b"x" * dice.randrange(1, 4000)))  # on its way at the end
            process.kill()
            for client in clients:
                client.close()
    with start(tmp_path, nodes=2) as cluster:
        stored = bodies(cluster)
        assert [body for body in stored if body in set(confirmed)] == confirmed
        assert cluster.partition("t", 0).channel("ch").depth == len(stored)
        assert len(cluster.partition("t", 0).in_sync) == 2


# --- damage ----------------------------------------------------------------------------------------------------------


def log_of(path: Path, cluster: RedesignedCluster, *, is_leader: bool) -> Path:
    partition = cluster.partition("t", 0)
    ids = cluster.state.node_ids
    node = next(node for node in partition.replicas if (node == partition.leader) is is_leader)
    return path / f"nsqd{ids.index(node)}" / "t.t" / "0.log"


@pytest.mark.parametrize("at", [10, 60, -1])
@pytest.mark.parametrize("is_leader", [True, False])
def test_a_damaged_replica_gets_what_it_lost_from_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_leader: bool, at: int
) -> None:
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        publish(cluster, "t", b"0", b"1", b"2")
        path = log_of(tmp_path, cluster, is_leader=is_leader)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(data)
    with start(tmp_path) as cluster:
        assert bodies(cluster) == [b"0", b"1", b"2"]
        assert len(cluster.partition("t", 0).in_sync) == 2
    assert caplog.text.count("is damaged at byte") == 1
    with start(tmp_path) as cluster:
        assert bodies(cluster) == [b"0", b"1", b"2"]
    assert caplog.text.count("is damaged at byte") == 1


def test_damaged_metadata_are_found_on_another_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 1, 1, channels=["ch"])
        publish(cluster, "t", b"0", b"1")
        channels = log_of(tmp_path, cluster, is_leader=True).with_name("0.channels")
    (tmp_path / "nsqd0" / "cluster.json").write_bytes(b"{}")
    shutil.rmtree(tmp_path / "nsqd1")
    channels.write_bytes(b"\0")
    with start(tmp_path) as cluster:
        consumer = Consumer(cluster.leader_of("t", 0), "SUB t ch 0")
        assert take(consumer, 2) == [b"0", b"1"]
        consumer.close()
    assert caplog.text.count("its checksum is wrong") == 2


def test_a_full_disk_refuses_publishes_until_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(tmp_path) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        publish(cluster, "t", b"0")
        leader = cluster.leader_of("t", 0)
        client, write = WireClient(leader.tcp_address), os.pwrite
        is_full = [True, True]

        def pwrite(fd: int, data: Any, at: int) -> int:
            if is_full.pop():
                write(fd, data[:3], at)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data, at)

        monkeypatch.setattr(os, "pwrite", pwrite)
        assert client.command(b"PUB t 0\n" + sized(b"refused")) == b"E_FAILED_ON_NOT_WRITABLE "
        assert ask(leader.http_address, "GET", "/ping").status == 500
        is_full[:] = [True, False]  # now the follower's is full
        assert client.command(b"PUB t 0\n" + sized(b"refused")) == b"E_FAILED_ON_NOT_WRITABLE "
        monkeypatch.undo()
        until(lambda: client.command(b"PUB t 0\n" + sized(b"1")) == b"OK")  # when the follower is in sync again
        assert ask(leader.http_address, "GET", "/ping").status == 200
        client.close()
        assert bodies(cluster) == [b"0", b"1"]
    with start(tmp_path) as cluster:
        assert bodies(cluster) == [b"0", b"1"]
        assert len(cluster.partition("t", 0).in_sync) == 2


class BadDisks:
    """Folders in which nothing can be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: set[str] = set()
        self._do = {name: getattr(os, name) for name in ("pwrite", "ftruncate", "open")}
        monkeypatch.setattr(os, "pwrite", lambda fd, *rest: self._on_file("pwrite", fd, *rest))
        monkeypatch.setattr(os, "ftruncate", lambda fd, *rest: self._on_file("ftruncate", fd, *rest))
        monkeypatch.setattr(os, "open", self._open)

    def _on_file(self, name: str, fd: int, *rest: Any) -> Any:
        self._check(os.readlink(f"/proc/self/fd/{fd}"))
        return self._do[name](fd, *rest)

    def _open(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            self._check(os.fspath(path))
        opened: int = self._do["open"](path, flags, *rest, **named)
        return opened

    def _check(self, path: str) -> None:
        if any(path.startswith(folder) for folder in self.folders):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_a_replica_whose_disk_fails_leaves_those_in_sync_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = BadDisks(monkeypatch)
    with start(tmp_path, migrate_delay=3600.0) as cluster:
        cluster.create_topic("t", 1, 3, channels=["ch"])
        publish(cluster, "t", b"0")
        partition = cluster.partition("t", 0)
        failing = cluster.state.node_ids[0]
        if partition.leader == failing:
            cluster.move_leader("t", 0)
        leader = cluster.leader_of("t", 0)
        bad.folders.add(str(tmp_path / "nsqd0"))
        publish(cluster, "t", b"1")
        assert failing not in partition.in_sync
        publish(cluster, "t", b"2", b"3")
        cluster.create_topic("u", 1, 1, channels=["ch"])  # what is decided is written by the other nodes
        until(lambda: not any(partition.is_new for partition in cluster.state.all_partitions()))
        assert [b'"u"' in (tmp_path / f"nsqd{number}" / "cluster.json").read_bytes() for number in range(3)] == [
            False, True, True
        ]  # fmt: skip
        assert failing not in partition.in_sync
        assert ask(leader.http_address, "GET", "/ping").status == 200
        assert [caplog.text.count(text) for text in ("cannot write its replica of t-0", "is tried again every")] == [
            1,
            1,
        ]
        bad.folders.clear()
        until(lambda: failing in partition.in_sync)
        cluster.move_leader("t", 0, failing)
        assert bodies(cluster) == [b"0", b"1", b"2", b"3"]
    with start(tmp_path) as cluster:
        assert bodies(cluster) == [b"0", b"1", b"2", b"3"]
        assert len(cluster.partition("t", 0).in_sync) == 3
        assert "u" in cluster.state.topics


def test_another_node_gets_the_replica_of_one_whose_disk_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = BadDisks(monkeypatch)
    with start(tmp_path, migrate_delay=0.02) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        publish(cluster, "t", b"0")
        partition = cluster.partition("t", 0)
        failing = next(node for node in partition.replicas if node != partition.leader)
        bad.folders.add(str(tmp_path / f"nsqd{cluster.state.node_ids.index(failing)}"))
        client = WireClient(cluster.leader_of("t", 0).tcp_address)
        assert client.command(b"PUB t 0\n" + sized(b"too few")) == b"E_FAILED_ON_NOT_WRITABLE "
        until(lambda: client.command(b"PUB t 0\n" + sized(b"1")) == b"OK")
        client.close()
        assert failing not in partition.replicas
        assert len(partition.in_sync) == 2
        assert bodies(cluster) == [b"0", b"1"]


def test_data_of_another_topic_of_the_same_name_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(tmp_path, nodes=1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        publish(cluster, "t", b"old")
        path = log_of(tmp_path, cluster, is_leader=True)
    old = path.read_bytes()
    with start(tmp_path, nodes=1) as cluster:
        assert ask(cluster.lookupds[0].http_address, "POST", "/topic/delete?topic=t&partition=**").status == 200
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(old)  # as if this node had been away
        cluster.create_topic("t", channels=["ch"])
        assert bodies(cluster) == []
        publish(cluster, "t", b"new")
    assert "is of a topic that was deleted" in caplog.text
    with start(tmp_path, nodes=1) as cluster:
        assert bodies(cluster) == [b"new"]


def test_syncdisk_brings_messages_to_the_disk_itself_and_one_that_cannot_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    synced: list[int] = []

    def published(*bodies: bytes) -> list[int]:
        """How many files were synced by each."""
        counts = []
        for body in bodies:
            publish(cluster, "t", body)
            counts.append(len(synced))
            synced.clear()
        return counts

    with start(tmp_path, nodes=2) as cluster:
        path = "/topic/create?topic=t&partition_num=1&replicator=2&syncdisk=2"
        assert ask(cluster.lookupds[0].http_address, "POST", path).status == 200
        monkeypatch.setattr(os, "fsync", synced.append)
        assert published(b"1", b"2", b"3", b"4") == [0, 2, 0, 2]  # on both nodes
        monkeypatch.setattr(os, "fsync", fsync)
        assert published(b"5", b"6", b"7") == [0, 0, 0]
        assert caplog.text.count("failed to bring messages of t-0 to the disk itself") == 1
        monkeypatch.setattr(os, "fsync", synced.append)
        assert published(b"8") == [2]
        assert caplog.text.count("messages of t-0 reach the disk itself again") == 1
        monkeypatch.undo()
    with start(tmp_path, nodes=2) as cluster:
        assert cluster.partition("t", 0).meta.sync_every == 2
        assert bodies(cluster) == [b"%d" % number for number in range(1, 9)]
