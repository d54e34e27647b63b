"""Lookup replies of both server families, merged into one immutable picture of a topic.

Every nsqlookupd is asked; each reply becomes a `LookupAnswer`, and `merge`
makes one `Topology` of them whose value does not depend on the order in which
they came. On the original NSQ a topic is a set of producers, and nothing
else. On the redesigned one it has partitions too, each with the nsqd that
leads it, and meta data; old nsqds may stand beside the partitions.

A reply is decoded and checked in one step. What a server may not send raises
RemoteProtocolError; a single peer whose address cannot be used is left out,
but an answer that names no other is a bad one: the topic is not unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from re import Pattern
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from nsq_fast.config import MAX_PARTITION
from nsq_fast.errors import ConfigError, RemoteProtocolError, counted, printable
from nsq_fast.names import Address, check_topic, is_valid_name

from .dialect import UNREADABLE, dialect_of

T = TypeVar("T")

# youzan/nsq: internal/http_api/api_response.go, NegotiateVersion
ACCEPT = "application/vnd.nsq; version=1.0"
"""The Accept header, to the letter, that makes negotiating servers send bare JSON and true status codes."""

# youzan/nsq: nsqlookupd/http.go, GetValidPartitionNum: 255 at most
MAX_PARTITIONS = MAX_PARTITION + 1
"""Far above what a cluster allows; a number beyond it is no answer but nonsense."""

MAX_PRODUCERS = 1000
"""Each producer of an answer becomes a connection: beyond some number an answer is an attack or a mistake."""

MAX_ERROR_TEXT = 200
MAX_ERROR_SIZE = 64 * 1024
"""Bytes: a larger body of an error is not decoded for its text."""

_EMPTY: Mapping[int, Any] = MappingProxyType({})
# nsqio/nsq: nsqlookupd/http.go, doLookup; youzan/nsq: consistence/leadership.go, ErrKeyNotFound; nsqlookupd/http.go,
# doLookup
_NO_CHANNEL = "Topic has no channel"
_OF_THE_ORIGINAL = "TOPIC_NOT_FOUND"
_UNKNOWN_TOPIC = (_OF_THE_ORIGINAL, "Key not found", _NO_CHANNEL)
_PARTITION_DIGITS = 4
_PORT_DIGITS = 5
_HOST = re.compile(r"[0-9A-Za-z._:%-]{1,255}")
_ADDRESS = attrgetter("tcp")

_REMEMBERED = 16384
_REMEMBERED_SIZE = 512
"""Descriptions of nsqds that are decoded once, as long as they stay the same, and how long each is in bytes at most:
a poll of thousands of topics names the same nsqds again and again."""


class Nsqd(NamedTuple):
    """One nsqd as nsqlookupd knows it. ``tcp`` (broadcast address and port) identifies it."""

    tcp: Address
    http: Address | None = None
    version: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    distributed_id: str = ""
    topology_zone: str = ""
    topology_region: str = ""

    @property
    def is_redesigned(self) -> bool:
        """Whether it speaks the redesigned dialect."""
        return dialect_of(self.version).has_partitions


class Meta(msgspec.Struct, frozen=True):
    """What a redesigned lookupd says of a topic as a whole."""

    partition_num: int = 0
    replica: int = 0
    extend_support: bool = False
    ordered: bool = False
    multi_part: bool = False
    disable_channel_auto_create: bool = False


class LookupAnswer(NamedTuple):
    """The reply of one lookupd for one topic. An unknown topic gives the empty answer, and why in ``problem``.

    Attributes:
        is_redesigned: whether only a lookupd of the redesigned NSQ answers so.
    """

    channels: tuple[str, ...] = ()
    producers: tuple[Nsqd, ...] = ()
    partitions: Mapping[int, Nsqd] = _EMPTY
    meta: Meta | None = None
    problem: str = ""
    is_redesigned: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._make, (self._replace(partitions=dict(self.partitions))[:],)  # a mappingproxy has no pickle


class Topology(msgspec.Struct, frozen=True):
    """Where a topic lives: all lookupds' answers taken together. Immutable, compared by value.

    Attributes:
        problem: what the lookupds say when they name no nsqd, for people to read; empty when they say nothing.
        excluded: nsqds that lookup names and a discovery filter leaves out; ``excluded_partitions``: what they lead.
    """

    producers: tuple[Nsqd, ...] = ()
    partitions: Mapping[int, Nsqd] = _EMPTY
    meta: Meta | None = None
    channels: tuple[str, ...] = ()
    problem: str = ""
    excluded: tuple[Nsqd, ...] = ()
    excluded_partitions: tuple[int, ...] = ()

    @property
    def nsqds(self) -> tuple[Nsqd, ...]:
        """Every nsqd once, by address: the leaders and the producers."""
        return distinct([*self.partitions.values(), *self.producers])

    @property
    def unpartitioned(self) -> tuple[Nsqd, ...]:
        """The nsqds to talk to without a partition: all of the original's; beside partitions, the old ones only."""
        leaders = {nsqd.tcp for nsqd in self.partitions.values()}
        return tuple(
            nsqd for nsqd in self.producers if nsqd.tcp not in leaders and not (leaders and nsqd.is_redesigned)
        )

    @property
    def is_complete(self) -> bool:
        """Whether every partition that is not excluded has a leader. True for a topic without partitions."""
        known = len(self.partitions) + len(self.excluded_partitions)
        return self.meta is None or known >= self.meta.partition_num

    @property
    def is_empty(self) -> bool:
        """Whether no nsqd is known for the topic."""
        return not self.producers and not self.partitions

    @property
    def is_unknown(self) -> bool:
        """Whether the lookupds say that there is no such topic; not when it only cannot be written now."""
        return self.is_empty and bool(self.problem) and not self.excluded and _NO_CHANNEL not in self.problem


def parse_lookup(body: bytes, max_producers: int = MAX_PRODUCERS) -> LookupAnswer:
    """Decode the body of a /lookup reply, in either format of either family.

    Raises RemoteProtocolError if it is not what a lookupd sends, or names more than ``max_producers`` nsqds.
    """
    if not isinstance(body, (bytes, bytearray)):
        raise TypeError(f"body must be bytes, not {type(body).__name__}")
    payload = unwrap(body)
    if not payload:
        return LookupAnswer()
    wire = _decode_json(_WireLookup, payload)
    if wire.producers is msgspec.UNSET and wire.partitions is msgspec.UNSET:
        raise RemoteProtocolError("not a reply of nsqlookupd: neither producers nor partitions")
    _check_count(wire.producers or (), max_producers)
    if len(wire.partitions or ()) > max_producers + MAX_PARTITIONS:  # old nsqds stand among them, as pseudo partitions
        raise RemoteProtocolError(f"not a reply of nsqlookupd: {len(wire.partitions or ())} partitions")
    answer = LookupAnswer(
        channels=tuple(wire.channels or ()),
        producers=_usable(wire.producers),
        partitions=MappingProxyType(dict(_leaders(wire.partitions or None))),
        meta=_checked(wire.meta),
        is_redesigned=wire.partitions is not msgspec.UNSET,  # of a topic that it does not know as well
    )
    if (wire.producers or wire.partitions) and not answer.producers and not answer.partitions:
        raise RemoteProtocolError("names nsqds, but none with an address that can be used")
    return answer


def parse_nodes(body: bytes, max_producers: int = MAX_PRODUCERS) -> tuple[Nsqd, ...]:
    """Decode the body of a /nodes reply: every nsqd once. Raises RemoteProtocolError, as ``parse_lookup``."""
    producers = _decode(_WireLookup, body).producers
    _check_count(producers or (), max_producers)
    return distinct(_usable(producers))


def parse_topics(body: bytes) -> tuple[str, ...]:
    """Decode the body of a /topics reply. Raises RemoteProtocolError."""
    topics = _decode(_WireTopics, body).topics
    if topics is msgspec.UNSET:
        raise RemoteProtocolError("not a reply of nsqlookupd: no topics")
    return tuple(topics or ())


def parse_listlookup(body: bytes) -> tuple[Address, ...]:
    """Decode the body of a /listlookup reply into HTTP addresses: none where there is no coordinator.

    Raises RemoteProtocolError.
    """
    # youzan/nsq: nsqlookupd/http.go, doListLookup
    nodes = _decode(_WireLookupList, body).lookupdnodes or ()
    found = (_address(node.NodeIP, int(node.HttpPort)) for node in nodes if _is_number(node.HttpPort, _PORT_DIGITS))
    return tuple(sorted({address for address in found if address is not None}))


def error_text(body: bytes) -> str:
    """What the body of an HTTP error says, in either format; its beginning where it is not JSON."""
    try:
        error = msgspec.json.decode(body[:MAX_ERROR_SIZE], type=_WireError)
        text = error.message or error.status_txt
    except UNREADABLE:
        text = ""
    return (text or body[: 4 * MAX_ERROR_TEXT].decode("utf-8", "replace").strip())[:MAX_ERROR_TEXT]


def is_unknown_topic(status: int | None, text: str) -> bool:
    """Whether an HTTP error of /lookup only says that the topic is not there (yet): a valid, empty answer.

    Without the Accept header, and from old servers, such errors come as status 500 with the text inside.
    """
    # youzan/nsq: internal/http_api/api_response.go, NegotiateVersion
    return status in (404, 500) and text.startswith(_UNKNOWN_TOPIC)


def unknown_topic(text: str) -> LookupAnswer:
    """The answer that such an error is, as it is shown."""
    return LookupAnswer(problem=text, is_redesigned=not text.startswith(_OF_THE_ORIGINAL))


def unwrap(body: bytes) -> bytes:
    """Return the JSON that matters: ``data`` of a wrapped reply, the body itself otherwise; empty for nothing.

    Raises RemoteProtocolError if the body is not JSON.
    """
    if not body.lstrip().startswith(b"{"):
        return body.strip()
    envelope = _decode_json(_Envelope, body)
    if envelope.status_code is msgspec.UNSET or envelope.data is msgspec.UNSET:
        return body
    data = bytes(envelope.data)
    return b"" if data == b"null" else data


def merge(answers: Iterable[LookupAnswer], older: Sequence[LookupAnswer] = ()) -> Topology:
    """Make one topology of the answers of several lookupds; their order does not matter.

    ``older`` are answers to earlier questions, of lookupds that have not answered yet: they only add what no new
    answer speaks of.

    Producers and channels are united. Where answers contradict each other (the leader of a partition, meta)
    the majority holds; a tie is decided the same way each time, not rightly: whoever meets the wrong leader
    asks again, and lookupds of one cluster do not disagree for long.
    """
    answers = list(answers)
    if older:
        return _added(merge(answers), merge(older))
    metas = [answer.meta for answer in answers if answer.meta is not None]
    votes: dict[int, list[Nsqd]] = {}
    for answer in answers:
        for partition, leader in answer.partitions.items():
            votes.setdefault(partition, []).append(leader)
    is_named = bool(votes) or any(answer.producers for answer in answers)
    return Topology(
        producers=distinct(nsqd for answer in answers for nsqd in answer.producers),
        partitions=MappingProxyType({number: _most_named(votes[number]) for number in sorted(votes)}),
        meta=_most_named(metas) if metas else None,
        channels=tuple(sorted({channel for answer in answers for channel in answer.channels})),
        problem="" if is_named else "; ".join(sorted({answer.problem for answer in answers if answer.problem})),
    )


def _added(now: Topology, before: Topology) -> Topology:
    known = {nsqd.tcp for nsqd in now.producers}
    partitions = {**before.partitions, **now.partitions}
    producers = [*now.producers, *(nsqd for nsqd in before.producers if nsqd.tcp not in known)]
    return Topology(
        producers=tuple(sorted(producers, key=_ADDRESS)),
        partitions=MappingProxyType({number: partitions[number] for number in sorted(partitions)}),
        meta=now.meta or before.meta,
        channels=tuple(sorted({*now.channels, *before.channels})),
        problem="" if producers or partitions else now.problem,
    )


class _WirePeer(msgspec.Struct):
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    hostname: str = ""
    distributed_id: str = ""
    topology_zone: str = ""
    topology_region: str = ""


class _WireLookup(msgspec.Struct):
    channels: list[str] | None = None
    producers: list[msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET
    partitions: dict[str, msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET
    meta: Meta | None = None


class _WireTopics(msgspec.Struct):
    topics: list[str] | msgspec.UnsetType | None = msgspec.UNSET


class _WireLookupNode(msgspec.Struct):
    NodeIP: str = ""
    HttpPort: str = ""


class _WireLookupList(msgspec.Struct):
    lookupdnodes: list[_WireLookupNode] | None = None


class _WireError(msgspec.Struct):
    message: str = ""
    status_txt: str = ""


class _Envelope(msgspec.Struct):
    # youzan/nsq: internal/http_api/api_response.go, Respond
    status_code: int | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _decode(kind: type[T], body: bytes) -> T:
    return _decode_json(kind, unwrap(body) or b"{}")


def _decode_json(kind: type[T], body: bytes) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"not a reply of nsqlookupd: {error}") from error


def _usable(peers: list[msgspec.Raw] | msgspec.UnsetType | None) -> tuple[Nsqd, ...]:
    """In an order that does not depend on the server's, which is another at each question."""
    # nsqio/nsq: nsqlookupd/registration_db.go, FindProducers: the order of a Go map
    nsqds = [nsqd for nsqd in map(_nsqd, peers or ()) if nsqd is not None]
    nsqds.sort(key=_ADDRESS)
    return tuple(nsqds)


def _check_count(named: Sized, limit: int) -> None:
    """Refuse an answer before anything is made of what it names. The option that allows more is LookupConfig's."""
    if len(named) > limit:
        raise RemoteProtocolError(f"names {len(named)} nsqds, more than lookupd_max_producers={limit} allows")


def _leaders(partitions: Mapping[str, msgspec.Raw] | None) -> Iterator[tuple[int, Nsqd]]:
    """Pseudo partitions of old nsqds have negative numbers: no partitions, and in ``producers`` as well."""
    for text, peer in (partitions or {}).items():
        nsqd = _nsqd(peer)
        if not _is_number(text, _PARTITION_DIGITS):
            # youzan/nsq: nsqlookupd/lookup_protocol_v1.go, OLD_VERSION_PID: the partition of an nsqd that has none
            if not (text.startswith("-") and _is_number(text[1:], _PARTITION_DIGITS)):
                raise RemoteProtocolError(f"not a reply of nsqlookupd: partition {text[:20]!r}")
        elif nsqd is not None:
            yield int(text), nsqd


def _is_number(text: str, most_digits: int) -> bool:
    return len(text) <= most_digits and text.isascii() and text.isdigit()


def _nsqd(peer: msgspec.Raw) -> Nsqd | None:
    """The nsqd that some JSON describes; None for one whose address cannot be used. Raises RemoteProtocolError."""
    text = bytes(peer)
    return _remembered(text) if len(text) <= _REMEMBERED_SIZE else _described(text)


@lru_cache(_REMEMBERED)
def _remembered(text: bytes) -> Nsqd | None:
    nsqd = _described(text)
    return nsqd and _same(nsqd)


@lru_cache(_REMEMBERED)
def _same(nsqd: Nsqd) -> Nsqd:
    """One object for equal nsqds. Lookupds describe an nsqd with different texts: each names its own connection."""
    # nsqio/nsq: nsqlookupd/registration_db.go, PeerInfo: remote_address
    return nsqd


def _described(text: bytes) -> Nsqd | None:
    peer = _decode_json(_WirePeer, text)
    tcp = _address(peer.broadcast_address, peer.tcp_port)
    if tcp is None:
        return None
    return Nsqd(
        tcp=tcp,
        http=_address(peer.broadcast_address, peer.http_port),
        version=peer.version,
        hostname=peer.hostname,
        broadcast_address=peer.broadcast_address,
        distributed_id=peer.distributed_id,
        topology_zone=peer.topology_zone,
        topology_region=peer.topology_region,
    )


def _address(host: str, port: int) -> Address | None:
    # IPv6 comes in brackets from servers that were configured so; a socket wants it without.
    host = host.removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(host) or not 0 < port < 65536:
        return None
    return Address(host, port)


def _checked(meta: Meta | None) -> Meta | None:
    """No meta for a topic that a cluster does not know: it says ``partition_num`` 0."""
    # youzan/nsq: nsqlookupd/http.go, doLookup: "maybe topic on old nsqd"
    if meta is None or meta.partition_num == 0:
        return None
    if not 0 < meta.partition_num <= MAX_PARTITIONS:
        raise RemoteProtocolError(f"not a reply of nsqlookupd: partition_num {meta.partition_num}")
    return meta


def distinct(nsqds: Iterable[Nsqd]) -> tuple[Nsqd, ...]:
    """Each nsqd once, sorted by address. Where details differ, those named most often hold."""
    by_address: dict[Address, list[Nsqd]] = {}
    for nsqd in nsqds:
        by_address.setdefault(nsqd.tcp, []).append(nsqd)
    return tuple(_most_named(same) for _, same in sorted(by_address.items()))


def _most_named(values: list[T]) -> T:
    """The value that occurs most often; in a tie one that does not depend on the order of ``values``."""
    first = values[0]
    if all(value == first for value in values):
        return first  # as nearly always
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], repr(value)))


# Which of the nsqds that lookup names are used: the option ``discovery_filter``. Pure.
#
# A filter is a function of one ``Nsqd``, or a mapping of its fields to patterns.
# What it leaves out is kept in the topology, so that nobody takes the partitions
# that those nsqds lead for partitions without a leader.

Keep = Callable[[Nsqd], object]

MOST_NAMED = 10
"""Nsqds that are named in a problem."""


def keep_of(option: Any) -> Keep | None:
    """The function that ``discovery_filter`` stands for; None: all nsqds are used.

    In a mapping, which LookupConfig has checked, every field must match one of its patterns, as in a shell.
    """
    if option is None or callable(option):
        return option  # type: ignore[no-any-return]
    rules = {field: [text] if isinstance(text, str) else list(text) for field, text in option.items()}

    def keep(nsqd: Nsqd) -> bool:
        return all(any(fnmatchcase(getattr(nsqd, field), text) for text in texts) for field, texts in rules.items())

    return keep


def only(topology: Topology, keep: Keep) -> Topology:
    """The topology without the nsqds that ``keep`` is false for. Raises what ``keep`` raises."""
    kept = {nsqd for nsqd in topology.nsqds if keep(nsqd)}
    excluded = tuple(nsqd for nsqd in topology.nsqds if nsqd not in kept)
    if not excluded:
        return topology
    addresses = {nsqd.tcp for nsqd in kept}
    partitions = {number: leader for number, leader in topology.partitions.items() if leader.tcp in addresses}
    return msgspec.structs.replace(
        topology,
        producers=tuple(nsqd for nsqd in topology.producers if nsqd.tcp in addresses),
        partitions=MappingProxyType(partitions),
        problem=topology.problem if kept else _none_left(excluded),
        excluded=excluded,
        excluded_partitions=tuple(number for number in topology.partitions if number not in partitions),
    )


def left_out(partitions: Sequence[int]) -> str:
    """What to say of partitions that nobody will take."""
    return f"discovery_filter leaves out the leaders of partitions {', '.join(map(str, sorted(partitions)))}"


def _none_left(excluded: tuple[Nsqd, ...]) -> str:
    named = ", ".join(_described_criteria(nsqd) for nsqd in excluded[:MOST_NAMED])
    more = f" and {len(excluded) - MOST_NAMED} others" if len(excluded) > MOST_NAMED else ""
    return f"discovery_filter leaves none of the {counted(len(excluded), 'nsqd')} that lookup names: {named}{more}"


def _described_criteria(nsqd: Nsqd) -> str:
    """Its address, and what a mapping may have looked at."""
    fields = {
        "hostname": nsqd.hostname,
        "region": nsqd.topology_region,
        "zone": nsqd.topology_zone,
        "id": nsqd.distributed_id,
    }
    shown = ", ".join(f"{name} {printable(text)}" for name, text in fields.items() if text)
    return f"{nsqd.tcp} ({shown})" if shown else str(nsqd.tcp)


# Whom a consumer subscribes to, and how: its topics, nsqds and partitions. Pure.
#
# A redesigned topic takes one subscription for each partition, to its leader;
# an nsqd without partitions (all of the original's, old ones in a mixed fleet)
# takes one for itself. What kind of subscription a topic needs is learnt from
# lookup's meta data unless an option says it.


class Target(msgspec.Struct, frozen=True):
    """One subscription: an nsqd, a partition that it leads (None for an nsqd without partitions), and the topic."""

    address: Address
    partition: int | None = None
    topic: str = ""

    def __str__(self) -> str:
        place = str(self.address) if self.partition is None else f"{self.address} partition {self.partition}"
        return f"{self.topic} at {place}" if self.topic else place


class Mode(msgspec.Struct, frozen=True):
    """How to subscribe to a topic on redesigned servers."""

    ordered: bool = False
    extend_support: bool = False

    def learn(self, meta: Meta | None, ordered: bool | None) -> Mode:
        """What lookup adds. ``ordered`` is the option: None leaves it to lookup.

        Extended headers stay on once they are, until a server refuses them: no topic loses them unless it is made anew,
        while a lookupd may be behind.
        """
        if meta is None:
            return self
        return Mode(
            ordered=meta.ordered if ordered is None else ordered,
            extend_support=self.extend_support or meta.extend_support,
        )


def targets(topology: Topology, chosen: Collection[int] | None = None, topic: str = "") -> dict[Target, Nsqd]:
    """The subscriptions that ``topic`` takes: all, or only those of the ``chosen`` partitions."""
    found = {
        Target(leader.tcp, number, topic): leader
        for number, leader in topology.partitions.items()
        if chosen is None or number in chosen
    }
    if chosen is None:
        found.update((Target(nsqd.tcp, None, topic), nsqd) for nsqd in topology.unpartitioned)
    return found


def configured(
    addresses: Iterable[Address], chosen: Collection[int] | None, found: Collection[Target], topic: str = ""
) -> Iterator[Target]:
    """The targets that options name, without those of which lookup knows better: ``found``."""
    # A configured nsqd that leads partitions would be subscribed to twice: plainly, and for each partition.
    leaders = {target.address for target in found if target.partition is not None}
    led = {target.partition for target in found}
    for address in addresses:
        for partition in chosen or (None,):
            if address not in leaders if partition is None else partition not in led:
                yield Target(address, partition, topic)


def is_replaced(target: Target, live: Iterable[Target]) -> bool:
    """Whether one of the ``live`` subscriptions of the topic does what that of ``target`` does."""
    return any(
        each.address == target.address if target.partition is None else each.partition == target.partition
        for each in live
        if each.partition is not None
    )


def is_complete(topology: Topology, chosen: Collection[int] | None = None) -> bool:
    """Whether every partition, or every one chosen, has a leader."""
    if chosen is None:
        return topology.is_complete
    known = {*topology.partitions, *topology.excluded_partitions}
    return all(number in known for number in chosen if _exists(topology.meta, number))


def impossible(topology: Topology, chosen: Collection[int] | None) -> str | None:
    """What is wrong with ``chosen`` if the topic can never have any of these partitions; None if nothing is."""
    if chosen is None or topology.is_empty or any(number in topology.partitions for number in chosen):
        return None
    if topology.meta is None:
        return None if topology.partitions else "the topic has no partitions: leave partitions out"
    if any(_exists(topology.meta, number) for number in chosen):
        return None
    return f"partitions={list(chosen)}: the topic has partitions 0 to {topology.meta.partition_num - 1}"


def missing(topology: Topology, chosen: Collection[int] | None) -> list[int]:
    """The ``chosen`` partitions that the topic does not have. They may be added to it later."""
    return [] if topology.meta is None else [number for number in chosen or () if not _exists(topology.meta, number)]


def _exists(meta: Meta | None, number: int) -> bool:
    return meta is None or number < meta.partition_num


TopicArgument: TypeAlias = str | Iterable[str] | re.Pattern[str]


class TopicChoice:
    """The topics that the argument ``topic`` of a consumer names.

    Args:
        topic: the name of a topic, several names, or a compiled regular expression that the whole name of a topic has
            to match. A string is always a name.

    Attributes:
        names: those that were named, each once; empty for a pattern.
        pattern: None where topics are named.

    Raises NameInvalid for a name that no topic can have, ConfigError for what chooses nothing.
    """

    def __init__(self, topic: TopicArgument) -> None:
        self.pattern: Pattern[str] | None = topic if isinstance(topic, re.Pattern) else None
        self.names: tuple[str, ...] = () if isinstance(topic, re.Pattern) else _names(topic)
        if self.pattern is not None and not isinstance(self.pattern.pattern, str):
            raise ConfigError(f"topic={topic!r}: the names of topics are str: compile the pattern from a str, too")

    def __str__(self) -> str:
        return ",".join(self.names) if self.pattern is None else self.pattern.pattern

    @property
    def label(self) -> str:
        """A short name for the choice, in the names of loggers."""
        return str(self) if len(self.names) < 2 else f"{self.names[0]}+{len(self.names) - 1}"

    def has_among_others(self, topic: str) -> bool:
        """Whether a topic is one of several, or may be."""
        return bool(self.matching([topic])) or (len(self.names) > 1 and topic in self.names)

    def matching(self, listed: Iterable[str]) -> list[str]:
        """The topics of a list that the pattern chooses, in order. Names that no topic can have are left out."""
        if self.pattern is None:
            return []
        return sorted({name for name in listed if is_valid_name(name) and self.pattern.fullmatch(name)})


def _names(topic: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(topic, (str, bytes)) or not isinstance(topic, Iterable):
        return (check_topic(topic),)
    ordered = sorted(topic, key=str) if isinstance(topic, (set, frozenset)) else topic
    names = tuple(dict.fromkeys(check_topic(name) for name in ordered))
    if not names:
        raise ConfigError(f"topic={topic!r}: names no topic: give one name at least, or a pattern")
    return names
