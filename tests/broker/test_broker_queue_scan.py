"""Which channels are scanned for timeouts: the policy alone, and the flags of a server that runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from nsq_fast.broker.nsqd import QueueScan
from nsq_fast.broker.store import Store


def scan_of(count: int, *, selection: int = 20, workers: int = 4, dirty: float = 0.25) -> QueueScan[int]:
    scan: QueueScan[int] = QueueScan(selection, workers, dirty, random.Random(1).sample)
    scan.refresh(range(count))
    return scan


@pytest.mark.parametrize(("count", "chosen"), [(0, 0), (1, 1), (19, 19), (20, 20), (500, 20)])
def test_so_many_channels_are_chosen_each_once(count: int, chosen: int) -> None:
    selected = [channel for channels in scan_of(count).select() for channel in channels]
    assert len(selected) == len(set(selected)) == chosen
    assert set(selected) <= set(range(count))


def test_every_channel_has_its_turn() -> None:
    scan = scan_of(200)
    seen = Counter(channel for _ in range(2000) for channels in scan.select() for channel in channels)
    assert len(seen) == 200
    assert max(seen.values()) < 2 * min(seen.values())


@pytest.mark.parametrize(("count", "workers"), [(0, 1), (1, 1), (7, 1), (8, 2), (16, 4), (17, 4), (10_000, 4)])
def test_there_is_a_worker_for_four_channels_up_to_the_most(count: int, workers: int) -> None:
    scan = scan_of(count)
    assert scan.workers == workers
    assert all(len(channels) <= workers for channels in scan.select())


@pytest.mark.parametrize(
    ("count", "dirty", "repeats"),
    [(0, 0, False), (100, 0, False), (100, 5, False), (100, 6, True), (4, 1, False), (4, 2, True)],
)
def test_a_scan_is_repeated_when_too_many_were_dirty(count: int, dirty: int, repeats: bool) -> None:
    assert scan_of(count).is_to_be_repeated(dirty) is repeats


def test_what_was_refreshed_counts() -> None:
    scan = scan_of(100)
    scan.refresh(["a"])  # type: ignore[list-item]
    assert [channel for channels in scan.select() for channel in channels] == ["a"]


def test_each_interval_scans_as_many_channels_as_the_flag_says(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = embedded(queue_scan_interval=0.01, queue_scan_selection_count=3)
    topic = server.nsqd.get_topic("t")
    scanned: list[Sequence[str]] = []
    select = QueueScan.select

    def noting(scan: QueueScan[Any]) -> Any:
        chosen = list(select(scan))
        scanned.append([channel.name for channels in chosen for channel in channels])
        return iter(chosen)

    monkeypatch.setattr(QueueScan, "select", noting)
    for n in range(12):
        topic.get_channel(f"c{n}")
    until(lambda: len({name for names in scanned for name in names}) == 12)
    assert {len(names) for names in scanned if names} <= {3}


def test_a_deferred_message_of_a_new_channel_does_not_wait_for_a_refresh(embedded: Any) -> None:
    server = embedded(queue_scan_interval=0.01, queue_scan_refresh_interval=3600.0)
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    topic.put(b"x", 20)
    until(lambda: channel.depth == 1)


@pytest.mark.parametrize("is_durable", [False, True])
def test_many_channels_are_written_down_only_where_there_is_a_place(
    embedded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    server = embedded(data_path=str(tmp_path) if is_durable else None)
    saved = []
    monkeypatch.setattr(Store, "save_metadata", lambda store, metadata: saved.append(metadata))
    topic = server.nsqd.get_topic("t")
    for n in range(10):
        topic.get_channel(f"c{n}")
    assert bool(saved) is is_durable
