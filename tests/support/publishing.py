"""An nsqd for producers: it parses publishes and lets a test decide what each gets.

def answer(peer: Peer, command: Command) -> None:
    peer.ok() if command.body != b"bad" else peer.frame(1, b"E_BAD_MESSAGE x")

nsqd = PublishNsqd(answer)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from nsq_fast import Producer
from support.partitions import ScriptedLookup
from support.peers import Peer
from support.scripted_nsqd import EndOfPeer, ScriptedConnection, ScriptedNsqd
from support.waiting import until
from support.wire import split


class Command(NamedTuple):
    name: str
    topic: str
    params: tuple[str, ...]
    body: bytes

    @property
    def bodies(self) -> list[bytes]:
        """The messages in it, without trace ids and headers."""
        return [body for _, body in self.messages]

    @property
    def messages(self) -> list[tuple[bytes, bytes]]:
        """What goes before the body of each message (8 bytes of trace id, or a header), and the body."""
        parts = split(self.body) if self.name.startswith("MPUB") else [self.body]
        if self.name.endswith("_TRACE"):
            return [(part[:8], part[8:]) for part in parts]
        if self.name.endswith("_EXT"):
            ends = [2 + int.from_bytes(part[:2], "big") for part in parts]
            return [(part[2:end], part[end:]) for part, end in zip(parts, ends, strict=True)]
        return [(b"", part) for part in parts]

    @property
    def partition(self) -> int | None:
        return int(self.params[0]) if self.params else None


Answer = Callable[[Peer, Command], Any]


def agree(peer: Peer, command: Command) -> None:
    peer.ok()


REDESIGNED = "0.3.7-HA.1.13.0"


def receipt(internal_id: int, trace_id: int, offset: int, size: int) -> bytes:
    """The reply to a traced publish."""
    return b"OK" + struct.pack(">QQQI", internal_id, trace_id, offset, size)


def stay_mute(peer: Peer, command: Command) -> None:
    """Take it, and never answer."""


def numbers(count: int) -> list[bytes]:
    """So many bodies."""
    return [b"%d" % number for number in range(count)]


def connected(sender: Producer, count: int) -> None:
    """Wait until it is connected so often."""
    until(lambda: len(sender.stats()["connected"]) == count)


Nsqds = Callable[..., "PublishNsqd"]
Producers = Callable[..., Producer]
Leaders = dict[int, "PublishNsqd"]
LookupProducers = Callable[..., tuple[Producer, ScriptedLookup]]


class PublishNsqd(ScriptedNsqd):
    """The server.

    Attributes:
        commands: every publish received, in order.
        answer: what is done with a publish; may be changed.
    """

    def __init__(self, answer: Answer = agree, **info: Any) -> None:
        self.answer = answer
        self.commands: list[Command] = []
        super().__init__(info)

    @property
    def peers(self) -> list[ScriptedConnection]:
        """Every connection made so far."""
        return [each for each in self.connections if each.identify]

    def published(self, connection: ScriptedConnection, command: tuple[bytes, ...], body: bytes) -> None:
        name, topic, *params = (word.decode() for word in command)
        self.commands.append(Command(name, topic, tuple(params), body))
        self.answer(connection, self.commands[-1])

    def bodies_of(self, partition: int | None) -> list[bytes]:
        """Every message received for a partition, in order."""
        return [body for command in self.commands if command.partition == partition for body in command.bodies]

    @property
    def bodies(self) -> list[bytes]:
        """Every message received, in order."""
        return [body for command in self.commands for body in command.bodies]

    def wait_commands(self, count: int) -> None:
        """Wait until ``count`` publishes were received."""
        self.wait_for(lambda: len(self.commands) >= count)


def refuse(peer: Peer, error: bytes) -> None:
    """A fatal error: the server reads no further."""
    peer.frame(1, error)
    peer.sock.shutdown(1)
    peer.read_all()
    raise EndOfPeer
