"""The queues of topics and channels, in memory and on disk, beside models of them and beside nsqd's."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.http import ask, channel_figures
from support.waiting import until
from support.wire import Consumer, WireClient

from nsq_fast.broker import NsqdServer
from nsq_fast.broker.message import SnowflakeIds
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.queue import SPARE, DueHeap, InFlight

# The queues of a topic and its channels, in memory and on disk, beside a model of nsqd's: ours and nsqd's.
#
# nsqio/nsq: nsqd/topic.go and nsqd/channel.go (put, messagePump, Empty, flush), nsqd/protocol_v2.go (messagePump).


ROOM = 3

HOUR = 3_600_000

CHANNELS = ("a", "b", "e#ephemeral")


@dataclass
class Queues:
    """A queue in memory, and one on disk.

    Attributes:
        is_ordered: the two lists are in the order in which messages come. If not, only their lengths are known, and
            which messages are in one of them.
        dropped: messages of which it is not known whether they, or others, were dropped by an ephemeral channel.
    """

    is_ephemeral: bool = False
    memory: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)
    is_ordered: bool = True
    dropped: set[int] = field(default_factory=set)

    def put(self, number: int) -> None:
        if len(self.memory) < ROOM:
            self.memory.append(number)
        elif not self.is_ephemeral:
            self.disk.append(number)
        else:
            self.dropped.add(number)

    def empty(self) -> None:
        self.memory.clear()
        self.disk.clear()
        self.dropped.clear()
        self.is_ordered = True

    def flush(self) -> None:
        """What a stop does: nothing is in memory afterwards."""
        self.is_ordered = self.is_ordered and not (self.memory and self.disk)
        self.disk += self.memory
        self.memory.clear()


@dataclass
class Channel(Queues):
    """A channel, with what it has in flight and deferred."""

    in_flight: dict[int, bytes] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)
    is_paused: bool = False

    def figures(self) -> dict[str, int]:
        return {
            "depth": len(self.memory) + len(self.disk),
            "backend_depth": len(self.disk),
            "in_flight_count": len(self.in_flight),
            "deferred_count": len(self.deferred),
            "ready_count": 0,  # of a consumer that is ready nobody knows what it gets while the channel is emptied
        }

    def put_all(self, numbers: list[int], *, are_ordered: bool) -> None:
        if self.is_ordered:
            self.dropped.clear()
        for number in numbers:
            self.put(number)
        if not are_ordered and len(numbers) > 1:
            self.is_ordered = False

    def next(self) -> set[int]:
        """Which messages may come next."""
        if self.is_ordered:
            return {*self.memory[:1], *self.disk[:1]}
        return {*self.memory, *self.disk, *self.dropped}

    def take(self, number: int, disk_left: int) -> None:
        """Take out what was delivered; ``disk_left`` is known from the server."""
        if not self.is_ordered:
            if number in self.dropped:  # then another one was
                self.dropped ^= {number, self.memory[-1]}
                self.memory[-1] = number
            everything = [each for each in (*self.memory, *self.disk) if each != number]
            self.disk = everything[:disk_left]
            self.memory = everything[disk_left:]
        else:
            (self.memory if number in self.memory else self.disk).remove(number)
        self.is_ordered = self.is_ordered or not (self.memory or self.disk)
        if self.is_ordered:
            self.dropped.clear()


class Walk:
    """A server, a model of its topic, and random steps on both."""

    def __init__(self, server: Any, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        self.is_ours = isinstance(server, NsqdServer)
        self.held = Queues()
        self.held_deferred: set[int] = set()
        self.channels: dict[str, Channel] = {}
        self.clients: dict[str, WireClient] = {}
        self.is_paused = False
        self.number = 0
        self.publisher = WireClient(server.tcp_address)
        self.log: list[str] = []

    # --- the server --------------------------------------------------------------------------------------------------

    def post(self, path: str, channel: str = "", body: bytes = b"") -> None:
        of_channel = f"&channel={channel.replace('#', '%23')}" if channel else ""
        assert ask(self.server.http_address, "POST", f"{path}?topic=t{of_channel}", body).status == 200

    def figures(self) -> dict[str, dict[str, int]]:
        [topic] = ask(self.server.http_address, "GET", "/stats?format=json&topic=t").json["topics"]
        found = {"": {name: topic[name] for name in ("depth", "backend_depth")}}
        for channel in topic["channels"] or ():
            names = ("depth", "backend_depth", "in_flight_count", "deferred_count")
            ready = sum(client["ready_count"] for client in channel["clients"] or ())
            found[channel["channel_name"]] = {**{name: channel[name] for name in names}, "ready_count": ready}
        return found

    def expected(self) -> dict[str, dict[str, int]]:
        topic = {"depth": len(self.held.memory) + len(self.held.disk), "backend_depth": len(self.held.disk)}
        return {"": topic, **{name: channel.figures() for name, channel in self.channels.items()}}

    def check(self) -> None:
        until(
            lambda: self.figures() == self.expected(),
            about=lambda: f"{self.log}\n{self.figures()}\n{self.expected()}",
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.number += 1
            self.publisher.publish("t", b"%d" % self.number)
            self._published([self.number], are_ordered=True)
            self.check()

    def publish_many(self) -> None:
        numbers = [self.number + n for n in range(1, self.rng.randint(2, 8))]
        self.number = numbers[-1]
        self.post("/mpub", body=b"\n".join(b"%d" % number for number in numbers))
        # More than the topic has room for takes two ways through it.
        self._published(numbers, are_ordered=len(numbers) <= ROOM)

    def _published(self, numbers: list[int], *, are_ordered: bool) -> None:
        if self.is_paused or not self.channels:
            for number in numbers:
                self.held.put(number)
        for channel in () if self.is_paused else self.channels.values():
            channel.put_all(numbers, are_ordered=are_ordered)

    def defer(self) -> None:
        if (self.is_paused or not self.channels) and len(self.held.memory) == ROOM:
            return  # nsqd forgets that it is deferred
        self.number += 1
        data = b"%d" % self.number
        assert self.publisher.command(b"DPUB t %d\n\0\0\0%c%b" % (HOUR, len(data), data)) == b"OK"
        if self.is_paused or not self.channels:
            self.held.put(self.number)
            self.held_deferred.add(self.number)
        for channel in () if self.is_paused else self.channels.values():
            channel.deferred.add(self.number)

    def create(self) -> None:
        name = self.rng.choice(CHANNELS)
        self.post("/channel/create", name)
        self.channels.setdefault(name, Channel(is_ephemeral="#" in name))
        self._release()

    def _release(self) -> None:
        if self.is_paused or not self.channels:
            return
        numbers = [*self.held.memory, *self.held.disk]
        for channel in self.channels.values():
            channel.deferred |= self.held_deferred
            channel.put_all(
                [number for number in numbers if number not in self.held_deferred],
                are_ordered=self.held.is_ordered and not (self.held.disk and self.held.memory),
            )
        self.held = Queues()
        self.held_deferred = set()

    def delete(self) -> None:
        if self.channels and self.rng.random() < 0.3:
            name = self.rng.choice(list(self.channels))
            self.post("/channel/delete", name)
            del self.channels[name]
            self.clients.pop(name, None)

    def pause_topic(self) -> None:
        self.is_paused = self.rng.random() < 0.5
        self.post("/topic/pause" if self.is_paused else "/topic/unpause")
        self._release()

    def pause_channel(self) -> None:
        for name, channel in self.channels.items():
            channel.is_paused = self.rng.random() < 0.3
            self.post("/channel/pause" if channel.is_paused else "/channel/unpause", name)

    def empty(self) -> None:
        if self.rng.random() < 0.3:
            self.post("/topic/empty")
            self.held = Queues()
            self.held_deferred = set()
        elif self.channels and self.rng.random() < 0.3:
            name = self.rng.choice(list(self.channels))
            self.post("/channel/empty", name)
            channel = self.channels[name]
            channel.empty()
            channel.deferred.clear()
            channel.in_flight.clear()

    def consume(self) -> None:
        for name, channel in self.channels.items():
            for _ in range(self.rng.randrange(3)):
                if (channel.memory or channel.disk) and not channel.is_paused:
                    self._consume_one(name, channel)

    def _consume_one(self, name: str, channel: Channel) -> None:
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = WireClient(self.server.tcp_address)
            client.subscribe("t", name, 0)
        client.send(b"RDY %d\n" % (len(channel.in_flight) + 1))
        frame = client.frame()
        number = int(frame.body)
        assert number in channel.next(), self.log
        client.send(b"RDY 0\n")
        channel.take(number, self.figures()[name]["backend_depth"])
        channel.in_flight[number] = frame.id
        self.check()
        if self.rng.random() < 0.8:
            self._respond(client, channel, self.rng.choice(list(channel.in_flight)))
        self.check()

    def _respond(self, client: WireClient, channel: Channel, number: int) -> None:
        id = channel.in_flight.pop(number)
        how = self.rng.choice(["FIN", "FIN", "REQ", "DEFER"])
        self.log.append(f"{how} {number}")
        if how == "FIN":
            client.send(b"FIN %b\n" % id)
        elif how == "REQ":
            client.send(b"REQ %b 0\n" % id)
            channel.put(number)
        else:
            client.send(b"REQ %b %d\n" % (id, HOUR))
            channel.deferred.add(number)

    def restart(self) -> None:
        if self.held_deferred:
            return  # nsqd forgets that they are deferred
        self.clients.clear()
        self.server.stop()
        self.server.start()
        self.publisher = WireClient(self.server.tcp_address)
        self.channels = {name: channel for name, channel in self.channels.items() if not channel.is_ephemeral}
        self.held.flush()
        for channel in self.channels.values():
            back = [*channel.in_flight, *(() if self.is_ours else channel.deferred)]
            channel.is_ordered = not channel.disk and not channel.memory and len(back) < 2
            channel.disk += [*channel.memory, *back]
            channel.memory.clear()
            channel.in_flight.clear()
            if not self.is_ours:
                channel.deferred.clear()

    def run(self, steps: int) -> None:
        self.post("/topic/create")
        choices = [self.publish, self.publish_many, self.defer] + [self.consume] * 4
        choices += [self.create, self.create, self.delete, self.pause_topic, self.pause_topic, self.pause_channel]
        choices += [self.empty, self.restart]
        for _ in range(steps):
            step = self.rng.choice(choices)
            self.log.append(step.__name__)
            step()
            self.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_leave_the_queues_that_nsqd_has(start_nsqd: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    server = start_nsqd(mem_queue_size=ROOM, data_path=str(folder))
    Walk(server, random.Random(seed)).run(60)


# More messages than memory is meant for: the log of a topic, channels that read from it, and the scan of channels.


def test_ids_increase_also_when_more_are_taken_than_a_millisecond_has_and_behind_those_of_an_earlier_life() -> None:
    ids = SnowflakeIds(1023)
    taken = [id for count in (1, 20000, 1, 5000) for id in ids.take(count)]
    assert sorted(set(taken)) == taken
    assert {len(id) for id in taken} == {16}
    later = SnowflakeIds(0)  # of another node
    later.skip(taken[-1])
    assert later.take(1)[0] > taken[-1]


def test_an_id_that_a_disk_has_changed_is_not_followed() -> None:
    for last in (b"", b"f" * 16, b"g" * 16, b"\xff" * 16):
        ids = SnowflakeIds(1)
        ids.skip(last)
        assert ids.take(1)[0][:1] == SnowflakeIds(1).take(1)[0][:1]


def test_what_waits_on_disk_comes_in_order_however_large_it_is_and_goes_when_everybody_has_read_it(
    embedded: Any,
) -> None:
    server = embedded(mem_queue_size=0, max_bytes_per_file=4096, sync_timeout=0.05)
    topic = server.nsqd.get_topic("t")
    topic.get_channel("c")
    large = [b"%0700000d" % n for n in range(3)]
    for body in large:
        topic.put(body)
    for first in range(0, 3000, 100):
        publish(server, "t", first, 100)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c", rdy=7)
    assert consume(client, 3003) == large + [b"%d" % n for n in range(3000)]
    until(lambda: topic.log.first > 2900)
    publish(server, "t", 3000, 1)
    assert consume(client, 1) == [b"3000"]


def consume(client: WireClient, count: int) -> list[bytes]:
    return [client.message().body for _ in range(count)]


def publish(server: NsqdServer, topic: str, first: int, count: int) -> None:
    server.nsqd.get_topic(topic).put_many([b"%d" % n for n in range(first, first + count)])


def test_what_a_channel_leaves_out_of_the_log_is_bounded(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages pass those on disk as long as there is room in memory, which is known of each."""
    monkeypatch.setattr("nsq_fast.broker.channel._MOST_LEFT_OUT", 20)
    monkeypatch.setattr("nsq_fast.broker.channel.random.getrandbits", lambda bits: 1)  # from memory
    server = embedded(mem_queue_size=1)
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    client = bare_client()
    taken: list[int] = []
    for n in range(100):
        publish(server, "t", 2 * n, 2)
        assert len(channel.backend.unread()) <= 21
        taken += [int(frame[34:]) for frame in channel.deliver(client, 1)]
    assert taken[:20] == list(range(0, 40, 2))
    assert channel.depth == 100
    taken += [int(frame[34:]) for frame in channel.deliver(client, 1000)]
    assert sorted(taken) == list(range(200))
    assert channel.depth == 0


def test_a_deferred_message_of_a_new_channel_does_not_wait_for_a_refresh(embedded: Any) -> None:
    server = embedded(queue_scan_interval=0.01, queue_scan_refresh_interval=3600.0)
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    topic.put(b"x", 20)
    until(lambda: channel.depth == 1)


EPHEMERAL = "c#ephemeral"


def test_without_a_memory_queue_a_message_is_taken_at_once_or_dropped(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=0)
    client, publisher = Consumer(server, f"SUB t {EPHEMERAL}", 0), WireClient(server.tcp_address)
    publisher.publish("t", b"dropped")
    until(lambda: channel_figures(server, channel=EPHEMERAL)["message_count"] == 1)
    assert channel_figures(server, channel=EPHEMERAL)["depth"] == 0
    client.send(b"RDY 1\n")

    def published() -> bool:
        # A client of the original that is not quite back at its wait misses a message: that one is dropped.
        publisher.publish("t", b"1")
        return bool(channel_figures(server, channel=EPHEMERAL)["in_flight_count"] == 1)

    until(published)
    assert client.frame().body == b"1"


# Random walks over topics and channels, with restarts in between; and over the heap that channels keep messages in.


FAR = 1e12


def bare_client(id: int = 1) -> Any:
    """A consumer without a connection."""
    client = SimpleNamespace(id=id, wake=lambda: None, close=lambda: None)
    client.in_flight = InFlight(client, 60.0)
    return client


class StateWalk:
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
        self.clients: dict[str, Any] = {}
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
                client = self.clients[name] = bare_client(self.next)
                channel.add_client(client)
            channel.scan(0.0, FAR)
            for frame in channel.deliver(client, self.rng.randrange(1, 6)):
                self.answer(name, client, frame[18:34], int(frame[34:]))

    def answer(self, name: str, client: Any, id: bytes, number: int) -> None:
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
            client = bare_client(-1)
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
    walk = StateWalk(random.Random(seed), tmp_path if is_durable else None)
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


def test_what_was_taken_out_or_touched_leaves_no_trail() -> None:
    heap: DueHeap[Item] = DueHeap()
    touched = Item(-1)
    heap.put([touched], 1e9)
    known = []
    for n in range(5 * SPARE):
        item = Item(n)
        heap.put([item], float(n))
        heap.move(touched, 1e9 + n)
        assert heap.pop_due(-1.0) == []
        known.append(weakref.ref(item))
        heap.pop(item.id)
        assert heap.places <= SPARE + 4
    del item
    gc.collect()
    assert not any(each() for each in known)
    assert heap.pop_due(1e9 + n - 1) == []
    assert heap.pop_due(1e9 + n) == [touched]
