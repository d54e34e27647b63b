"""The queues of a topic and its channels, in memory and on disk, beside a model of nsqd's: ours and nsqd's.

nsqio/nsq: nsqd/topic.go and nsqd/channel.go (put, messagePump, Empty, flush), nsqd/protocol_v2.go (messagePump).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.http import ask
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdServer

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
        """Take messages; without ``are_ordered`` in any order."""
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
