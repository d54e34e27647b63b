"""Random walks over topics and channels, with restarts in between; and over the heap that channels keep messages in."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.queue import SPARE, DueHeap, InFlight

FAR = 1e12


class Client:
    """A consumer without a connection."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.in_flight = InFlight(self, 60.0)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


class Walk:
    """An nsqd, and for each channel what it owes: ``unfinished``, and what a kill may make come again.

    ``held`` is what no channel has got yet, ``finished`` what was finished since the last stop.
    """

    def __init__(self, rng: random.Random, path: Path | None) -> None:
        self.rng = rng
        self.options = NsqdOptions(
            data_path=None if path is None else str(path),
            mem_queue_size=rng.choice([0, 3, 10]),
            preserve_order=rng.choice([False, False, True]),
            max_bytes_per_file=4096,
            sync_timeout=60.0,
        )
        self.unfinished: dict[str, set[int]] = {}
        self.held: set[int] = set()
        self.finished: dict[str, set[int]] = {}
        self.may_repeat: dict[str, set[int]] = {}
        self.next = 0
        self.clients: dict[str, Client] = {}
        self.nsqd = Nsqd(self.options)
        self.nsqd.start()
        self.topic = self.nsqd.get_topic("t")

    def publish(self) -> None:
        count = self.rng.randrange(1, 8)
        numbers = range(self.next, self.next + count)
        self.next += count
        if self.rng.random() < 0.2:
            for n in numbers:
                self.topic.put(b"%d" % n, 1)
        else:
            self.topic.put_many([b"%d" % n for n in numbers])
        if self.unfinished and not self.topic.is_paused:
            for owed in self.unfinished.values():
                owed.update(numbers)
        else:
            self.held.update(numbers)

    def create(self) -> None:
        name = self.rng.choice("abc")
        self.topic.get_channel(name)
        self.unfinished.setdefault(name, set())
        self.may_repeat.setdefault(name, set())
        self._release()

    def _release(self) -> None:
        if self.unfinished and not self.topic.is_paused:
            for owed in self.unfinished.values():
                owed.update(self.held)
            self.held.clear()

    def pause(self) -> None:
        if self.rng.random() < 0.5:
            self.topic.set_paused(True)
        else:
            self.topic.set_paused(False)
        self._release()

    def consume(self) -> None:
        for name, channel in self.topic.channels.items():
            client = self.clients.get(name)
            if client is None:
                client = self.clients[name] = Client(self.next)
                channel.add_client(client)
            channel.scan(0.0, FAR)
            for frame in channel.deliver(client, self.rng.randrange(1, 6)):
                self.answer(name, client, frame[18:34], int(frame[34:]))

    def answer(self, name: str, client: Client, id: bytes, number: int) -> None:
        owed, again = self.unfinished[name], self.may_repeat[name]
        assert number in owed or number in again, f"{number} was not to be delivered to {name}"
        choice = self.rng.random()
        channel = self.topic.channels[name]
        if choice < 0.6:
            channel.finish(client, [id])
            owed.discard(number)
            again.discard(number)
            if self.options.data_path is not None:
                self.finished.setdefault(name, set()).add(number)
        elif choice < 0.8:
            channel.requeue(client, id, self.rng.choice([0.0, 100.0]))

    def time_out(self) -> None:
        for channel in self.topic.channels.values():
            channel.scan(FAR, FAR)

    def empty(self) -> None:
        if self.topic.channels and self.rng.random() < 0.3:
            name = self.rng.choice(list(self.topic.channels))
            self.topic.channels[name].empty()
            self.unfinished[name].clear()
            self.may_repeat[name].clear()
            self.finished.get(name, set()).clear()

    def restart(self) -> None:
        if self.options.data_path is None:
            return
        killed = self.rng.random() < 0.5
        if killed:
            self.nsqd.kill()
            for name, numbers in self.finished.items():
                self.may_repeat[name] |= numbers
        else:
            self.nsqd.close()
            self.finished.clear()
        self.clients.clear()
        self.nsqd = Nsqd(self.options)
        self.nsqd.start()
        self.topic = self.nsqd.topics["t"]

    def drain(self) -> None:
        self.topic.set_paused(False)
        self._release()
        for name, channel in self.topic.channels.items():
            client = Client(-1)
            channel.scan(FAR, FAR)
            channel.add_client(client)
            while frames := channel.deliver(client, 100) or channel.scan(FAR, FAR):
                for frame in frames if isinstance(frames, list) else ():
                    number = int(frame[34:])
                    assert number in self.unfinished[name] or number in self.may_repeat[name]
                    self.unfinished[name].discard(number)
                    channel.finish(client, [frame[18:34]])
            assert self.unfinished[name] == set()
            assert (channel.depth, channel.in_flight_count, len(channel.deferred)) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_durable", [False, True])
def test_random_walk(tmp_path: Path, seed: int, is_durable: bool) -> None:
    walk = Walk(random.Random(seed), tmp_path if is_durable else None)
    steps = [walk.publish] * 5 + [walk.consume] * 5 + [walk.create, walk.pause, walk.time_out, walk.empty, walk.restart]
    for _ in range(150):
        walk.rng.choice(steps)()
    walk.drain()
    walk.nsqd.close()


class Item:
    def __init__(self, number: int) -> None:
        self.id = b"%d" % number
        self.priority = 0.0
        self.is_placed = False
        self.delivered_at = 0.0


TIMES = st.integers(0, 20).map(float)


class Model(RuleBasedStateMachine):
    """A heap beside a dict of times."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: DueHeap[Item] = DueHeap()
        self.times: dict[bytes, float] = {}
        self.items: dict[bytes, Item] = {}
        self.next = 0

    @rule(count=st.integers(0, 5), time=TIMES)
    def put(self, count: int, time: float) -> None:
        items = [Item(self.next + n) for n in range(count)]
        self.next += count
        self.items |= {item.id: item for item in items}
        self.heap.put(items, time)
        self.times |= {item.id: time for item in items}

    @rule(data=st.data(), time=TIMES)
    def move(self, data: st.DataObject, time: float) -> None:
        if self.times:
            id = data.draw(st.sampled_from(list(self.times)))
            self.heap.move(self.items[id], time)
            self.times[id] = time

    @rule(data=st.data(), time=TIMES)
    def take_out_and_put_in_again(self, data: st.DataObject, time: float) -> None:
        if self.times:
            id = data.draw(st.sampled_from(list(self.times)))
            assert self.heap.pop(id) is self.items[id]
            assert self.heap.pop(id) is None
            del self.times[id]
            if time % 2:
                self.heap.put([self.items[id]], time)
                self.times[id] = time

    @rule(now=TIMES)
    def pop_due(self, now: float) -> None:
        due = self.heap.pop_due(now)
        found = [self.times.pop(item.id) for item in due]
        assert found == sorted(found)
        assert all(time <= now for time in found)
        assert all(time > now for time in self.times.values())

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.times:
            id = data.draw(st.sampled_from(list(self.times)))
            del self.heap.messages[id], self.times[id]

    @rule()
    def clear(self) -> None:
        self.heap.clear()
        self.times.clear()

    @invariant()
    def agrees(self) -> None:
        assert {item.id for item in self.heap} == set(self.times)
        assert len(self.heap) == len(self.times)
        assert all(id in self.heap for id in self.times)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_was_taken_out_is_not_kept() -> None:
    heap: DueHeap[Item] = DueHeap()
    kept = Item(-1)
    heap.put([kept], 1e9)
    known = []
    for n in range(5 * SPARE):
        item = Item(n)
        heap.put([item], float(n))
        assert heap.pop_due(-1.0) == []
        known.append(weakref.ref(item))
        heap.pop(item.id)
        assert heap.places <= SPARE + 4
    del item
    gc.collect()
    assert not any(each() for each in known)
    assert heap.pop_due(1e9) == [kept]


def test_a_message_that_is_touched_again_and_again_leaves_no_trail() -> None:
    heap: DueHeap[Item] = DueHeap()
    item = Item(1)
    heap.put([item], 0.0)
    assert heap.pop_due(-1.0) == []
    for n in range(5 * SPARE):
        heap.move(item, float(n))
        assert heap.places <= SPARE + 2
    assert heap.pop_due(5 * SPARE - 2) == []
    assert heap.pop_due(5 * SPARE - 1) == [item]
