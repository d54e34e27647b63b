"""The heap of messages by time: against a plain dict, and what it keeps."""

from __future__ import annotations

import gc
import weakref

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nsq_fast.broker.queue import SPARE, DueHeap


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


def test_messages_of_one_time_come_out_as_they_were_put_in() -> None:
    heap: DueHeap[Item] = DueHeap()
    first, second, third = (Item(n) for n in range(3))
    heap.put([second, first], 1.0)
    heap.put([third], 1.0)
    assert heap.pop_due(1.0) == [second, first, third]


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
