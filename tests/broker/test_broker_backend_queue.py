"""The backend queue of a channel: a place in a log, and gaps behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsq_fast.broker.channel import BackendQueue, Backlog, Gap, Gaps
from nsq_fast.broker.journal import Journal, Position
from nsq_fast.broker.message import Message, SnowflakeIds, encode_frames

IDS = SnowflakeIds(2)


def append(log: Journal, count: int) -> tuple[list[Message], Position]:
    """Log messages whose bodies are their numbers."""
    first = log.end.sequence
    ids = IDS.take(count)
    frames = encode_frames(ids, [b"%d" % n for n in range(first, first + count)], 0)
    start = log.append(frames)
    return [Message(id, frame, n) for n, (id, frame) in enumerate(zip(ids, frames, strict=True), first)], start


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Journal]:
    log = Journal(tmp_path / "log", 4096)
    yield log
    log.close()


def make_queue(log: Journal) -> BackendQueue:
    return BackendQueue(log, lambda messages: messages)


def bodies(messages: list[Message]) -> list[int]:
    return [int(message.body) for message in messages]


def test_gaps_that_meet_are_one() -> None:
    gaps = Gaps()
    gaps.add(Gap(3, Position(5, 50)))
    gaps.add(Gap(5, Position(6, 60)))
    gaps.add(Gap(8, Position(9, 90)))
    assert list(gaps) == [Gap(3, Position(6, 60)), Gap(8, Position(9, 90))]
    assert (len(gaps), gaps.records) == (2, 4)
    assert list(gaps.between(0, 12)) == [(0, 3), (6, 8), (9, 12)]
    assert gaps.pass_at(Position(2, 20)) == Position(2, 20)
    assert gaps.pass_at(Position(4, 40)) == Position(6, 60)
    assert (len(gaps), gaps.records) == (1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_has_what_lies_in_no_gap(log: Journal, seed: int) -> None:
    rng = random.Random(seed)
    queue = make_queue(log)
    waiting: list[int] = []
    taken: list[int] = []
    for _ in range(300):
        messages, start = append(log, rng.randint(1, 40))
        numbers = [message.sequence for message in messages]
        if rng.random() < 0.5 and (queue.cursor is not None or not waiting):
            queue.leave_out(start.sequence, log.end)
        else:
            queue.add_from(start)
            waiting += numbers
        assert len(queue) == len(waiting)
        assert bool(queue) is bool(waiting)
        count = rng.randrange(40)
        taken = bodies(queue.take(count))
        assert taken == waiting[:count]
        del waiting[:count]
        unread = [number for first, end in queue.unread() for number in range(first, end)]
        assert sorted([*unread, *(message.sequence for message in queue.in_memory())]) == waiting


def test_a_message_that_comes_back_goes_behind_those_that_were_there(log: Journal) -> None:
    queue = make_queue(log)
    queue.add_from(append(log, 10)[1])
    [first] = queue.take(1)
    queue.put_back([first])
    queue.add_from(append(log, 2)[1])
    assert bodies(queue.take(20)) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 10, 11]
    queue.put_back([first])
    assert (len(queue), bodies(queue.take(2)), len(queue)) == (1, [0], 0)


def test_a_long_gap_is_not_read(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(log)
    queue.add_from(append(log, 1)[1])
    for _ in range(100):
        start = append(log, 100)[1]
        queue.leave_out(start.sequence, log.end)
    append(log, 1)
    read: list[int] = []
    segment_read = type(log).read

    def count(log: Journal, position: Position, most: int) -> tuple[list[Message], Position]:
        messages, end = segment_read(log, position, most)
        read.append(len(messages))
        return messages, end

    monkeypatch.setattr(Journal, "read", count)
    assert bodies(queue.take(2)) == [0, 10_001]
    assert sum(read) < 300


def test_the_gaps_of_a_channel_are_bounded(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsq_fast.broker.channel._MANY_GAPS", 20)
    monkeypatch.setattr("nsq_fast.broker.channel.random.getrandbits", lambda bits: 1)  # from memory
    backlog = Backlog(log, 1, is_ephemeral=False, takers=lambda: 0)
    backlog.put_logged(*append(log, 2))
    taken: list[Message] = []
    for _ in range(100):
        taken += backlog.take(1)
        backlog.put_logged(*append(log, 2))
        assert len(backlog.backend.unread()) <= 21
    taken += backlog.take(1000)
    assert sorted(bodies(taken)) == list(range(202))
    assert len(backlog) == 0


def test_damage_that_is_found_later_costs_what_is_behind_it_in_its_file(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 1 << 20)
    queue = make_queue(log)
    for n in range(60):
        start = append(log, 1)[1]
        if 20 <= n < 30:
            queue.leave_out(start.sequence, log.end)
        elif not queue:
            queue.add_from(start)
    [path] = log.folder.glob("*.log")  # type: ignore[union-attr]
    data = bytearray(path.read_bytes())
    data[len(data) * 40 // 60] ^= 0xFF
    path.write_bytes(data)
    got = bodies(queue.take(1000))
    assert {*range(20), *range(30, 39)} <= set(got) <= {*range(20), *range(30, 41)}
    assert (len(queue), bool(queue)) == (0, False)
    append(log, 1)
    queue.add_from(log.seek(60))
    assert bodies(queue.take(1000)) == [60]
    log.close()
