"""Which channels are scanned for timeouts, and what is written down of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from nsq_fast.broker.store import Store


def test_each_interval_scans_as_many_channels_as_the_flag_says(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = embedded(queue_scan_interval=0.01, queue_scan_selection_count=3)
    topic = server.nsqd.get_topic("t")
    scanned: list[list[str]] = []
    sample = random.sample

    def noting(channels: Sequence[Any], count: int) -> Any:
        chosen = sample(channels, count)
        scanned.append([channel.name for channel in chosen])
        return chosen

    monkeypatch.setattr(random, "sample", noting)
    for n in range(12):
        topic.get_channel(f"c{n}")
    until(lambda: len({name for names in scanned for name in names}) == 12)
    assert {len(names) for names in scanned if names} <= {3}


@pytest.mark.parametrize(("due", "is_repeated"), [(1, False), (2, True)])
def test_others_are_scanned_at_once_where_too_many_had_something_to_do(
    embedded: Any, monkeypatch: pytest.MonkeyPatch, due: int, is_repeated: bool
) -> None:
    server = embedded(queue_scan_interval=3600.0, queue_scan_selection_count=4, queue_scan_dirty_percent=0.25)
    topic = server.nsqd.get_topic("t")
    channels = [topic.get_channel(f"c{n}") for n in range(4)]
    results = iter([*[True] * due, *[False] * 20])
    monkeypatch.setattr(type(channels[0]), "scan", lambda *_: next(results))
    assert server.nsqd.scan_some(channels) is is_repeated


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
