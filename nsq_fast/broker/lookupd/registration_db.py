"""The registrations of an nsqlookupd: which nsqds there are, and which topics and channels each of them has.

nsqio/nsq: nsqlookupd/registration_db.go.

Plain state without sockets or clock: ``now`` is an argument, in seconds since
the epoch. Topics and channels stay known after their last nsqd has gone (RemoveProducer)
until they are deleted; an nsqd that has been silent, or that was
tombstoned for a topic, is left out of the answers for a while.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nsq_fast.names import is_ephemeral


@dataclasses.dataclass(eq=False)
class Peer:
    """An nsqd that has sent IDENTIFY. ``id`` and ``remote_address`` are the address of its connection."""

    id: str
    remote_address: str
    hostname: str
    broadcast_address: str
    tcp_port: int
    http_port: int
    version: str
    topology_zone: str = ""
    topology_region: str = ""
    last_update: float = 0.0

    def public(self) -> dict[str, object]:
        """The peer as it stands in answers."""
        return {
            "remote_address": self.remote_address,
            "hostname": self.hostname,
            "broadcast_address": self.broadcast_address,
            "tcp_port": self.tcp_port,
            "http_port": self.http_port,
            "version": self.version,
            "topology_zone": self.topology_zone,
            "topology_region": self.topology_region,
        }


@dataclasses.dataclass(eq=False)
class Producer:
    """A peer as a producer of one topic or channel."""

    peer: Peer
    tombstoned_at: float | None = None

    def is_tombstoned(self, now: float, lifetime: float) -> bool:
        """Whether the producer was tombstoned less than ``lifetime`` seconds ago."""
        return self.tombstoned_at is not None and now - self.tombstoned_at < lifetime


Producers = dict[str, Producer]


class LookupDB:
    """The registrations of one nsqlookupd.

    Args:
        inactive_producer_timeout: seconds after its last PING that an nsqd is left out.
        tombstone_lifetime: seconds that a tombstone hides an nsqd for a topic.
    """

    def __init__(self, inactive_producer_timeout: float = 300.0, tombstone_lifetime: float = 45.0) -> None:
        self.inactive_producer_timeout = inactive_producer_timeout
        self.tombstone_lifetime = tombstone_lifetime
        self.peers: dict[str, Peer] = {}
        self._topics: dict[str, Producers] = {}
        self._channels: dict[str, dict[str, Producers]] = {}

    def add_peer(self, peer: Peer) -> None:
        """Take in an nsqd that has sent IDENTIFY."""
        self.peers[peer.id] = peer

    def remove_peer(self, peer: Peer) -> None:
        """Forget an nsqd whose connection ended. Its topics and channels stay known."""
        self.peers.pop(peer.id, None)
        for producers in self._all_producers():
            producers.pop(peer.id, None)

    def register(self, peer: Peer, topic: str, channel: str = "") -> None:
        """REGISTER: the nsqd has this topic, and this channel if one is named."""
        if channel:
            channels = self._channels.setdefault(topic, {})
            channels.setdefault(channel, {}).setdefault(peer.id, Producer(peer))
        self._topics.setdefault(topic, {}).setdefault(peer.id, Producer(peer))

    def unregister(self, peer: Peer, topic: str, channel: str = "") -> None:
        """UNREGISTER: the nsqd no longer has this channel, or this topic with all its channels."""
        channels = self._channels.get(topic, {})
        if not channel:
            for producers in channels.values():
                producers.pop(peer.id, None)
            _remove(self._topics, topic, peer)
            return
        _remove(channels, channel, peer)

    def add_topic(self, topic: str) -> None:
        """Make a topic known without any nsqd."""
        self._topics.setdefault(topic, {})

    def add_channel(self, topic: str, channel: str) -> None:
        """Make a channel known, and its topic, without any nsqd."""
        self._channels.setdefault(topic, {}).setdefault(channel, {})
        self.add_topic(topic)

    def remove_topic(self, topic: str) -> None:
        """Forget a topic and its channels; the nsqds that have it keep it."""
        self._channels.pop(topic, None)
        self._topics.pop(topic, None)

    def remove_channel(self, topic: str, channel: str) -> bool:
        """Forget a channel; False if it was not known."""
        return self._channels.get(topic, {}).pop(channel, None) is not None

    def tombstone(self, topic: str, node: str, now: float) -> None:
        """Hide the nsqd at ``node`` (broadcast address and HTTP port) from lookups of this topic for a while."""
        for producer in self._topics.get(topic, {}).values():
            if f"{producer.peer.broadcast_address}:{producer.peer.http_port}" == node:
                producer.tombstoned_at = now

    def topics(self) -> list[str]:
        """All known topics."""
        return sorted(self._topics)

    def has_topic(self, topic: str) -> bool:
        """Whether the topic is known."""
        return topic in self._topics

    def channels(self, topic: str) -> list[str]:
        """All known channels of a topic; none for an unknown topic."""
        return sorted(self._channels.get(topic, ()))

    def producers(self, topic: str, now: float) -> list[Peer]:
        """The nsqds that have the topic, without the silent and the tombstoned."""
        return [
            producer.peer
            for producer in self._topics.get(topic, {}).values()
            if self.is_active(producer.peer, now) and not producer.is_tombstoned(now, self.tombstone_lifetime)
        ]

    def nodes(self, now: float) -> list[tuple[Peer, dict[str, bool]]]:
        """Every nsqd that is not silent, with its topics and whether it is tombstoned for each."""
        return [(peer, self._topics_of(peer, now)) for peer in self.peers.values() if self.is_active(peer, now)]

    def is_active(self, peer: Peer, now: float) -> bool:
        """Whether the nsqd has been heard of lately."""
        return now - peer.last_update <= self.inactive_producer_timeout

    def registrations(self) -> Iterator[tuple[str, str, str, list[Producer]]]:
        """Everything that is known, as (category, topic, channel, producers), for /debug."""
        yield "client", "", "", [Producer(peer) for peer in self.peers.values()]
        for topic, producers in self._topics.items():
            yield "topic", topic, "", list(producers.values())
        for topic, channels in self._channels.items():
            for channel, producers in channels.items():
                yield "channel", topic, channel, list(producers.values())

    def _topics_of(self, peer: Peer, now: float) -> dict[str, bool]:
        return {
            topic: producers[peer.id].is_tombstoned(now, self.tombstone_lifetime)
            for topic, producers in sorted(self._topics.items())
            if peer.id in producers
        }

    def _all_producers(self) -> Iterator[Producers]:
        yield from self._topics.values()
        for channels in self._channels.values():
            yield from channels.values()


def _remove(registrations: dict[str, Producers], name: str, peer: Peer) -> None:
    producers = registrations.get(name)
    if producers is None:
        return
    producers.pop(peer.id, None)
    if not producers and is_ephemeral(name):
        del registrations[name]
