"""What servers of each dialect answer to the same sequence of commands, in words that must be equal: ``transcripts``.

What differs from run to run is taken out: ids become the order of their first appearance, offsets are counted from the
first one, times, ports and memory are left out, heartbeats are not there. What is left of an answer is its type, its
text, whether it ended the connection, and of HTTP status, style and JSON.
"""

from __future__ import annotations

import json
import re
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from nsq_fast.broker import Broker, LookupdServer, NsqdServer
from nsq_fast.names import Address

from . import transcripts
from .http import Answer, ask, shape, without
from .servers import RealLookupd, RealNsqd, ServerProcess
from .transcripts import ERROR, MESSAGE, Connection, Place, Step, masked
from .waiting import until
from .wire import WireClient

ACCEPT = "application/vnd.nsq; version=1.0"
REGISTERED = "reg"
"""The channel that the topic without automatic channels has."""

READY = 900.0
"""Seconds that a real cluster may need until a new topic takes publishes."""
TOPICS = {
    "p{slot}": "partition_num=1&replicator=1",
    "d{slot}": "partition_num=2&replicator=1",
    "r{slot}": "partition_num=1&replicator=2",
    "o{slot}": "partition_num=1&replicator=1&orderedmulti=true",
    "e{slot}": "partition_num=1&replicator=1&extend=true",
    "n{slot}": "partition_num=1&replicator=1&disable_channel_auto_create=true",
    "oe{slot}": "partition_num=1&replicator=1&orderedmulti=true&extend=true",
}
"""How the topics of the sequences are created."""

_TRACED = struct.Struct(">2sQQQI")
_WHY_NO_JSON = re.compile("(?<=fail to parse json header:).*", re.DOTALL)
_BYTES = re.compile(r"\[(?:\d+ ){15}\d+\]")
_SHAPES = ("/nodes", "/topics", "/channels", "/listlookup", "/cluster/stats", "/coordinator/stats",
           "/lookup", "/info")  # fmt: skip
_COUNTED = {"in_flight_count", "deferred_count", "requeue_count", "timeout_count", "client_num", "paused", "skipped",
            "ready_count", "finish_count"}  # fmt: skip
_NAMED = {"epoch", "partitions", "OtherCoordErrs"}
_NUMBERED = {"id", "offset", "queue_offset", "queue_cnt_index", "timestamp"}


class Stage(transcripts.Stage):
    """A cluster with the topics of the sequences.

    Args:
        slot: tells the topics of one stage on a cluster from those of another.
        lookupds: HTTP addresses: of the nsqlookupd that leads, and of another one.
        nodes: the two nodes.
    """

    id_at: ClassVar[dict[str, int]] = {"message": 2, "traced": 1}

    def __init__(self, slot: str, lookupds: tuple[Address, Address], nodes: tuple[Place, Place]) -> None:
        self.slot = slot
        self._lookupds = lookupds
        self._nodes = nodes
        self._leaders: dict[str, int] = {}

    def connect(self, role: str) -> Connection:
        return _Connection(self.node(role).tcp, role.split(":")[1])

    def http(self, role: str) -> Address:
        """The HTTP address of a role: ``lookupd:leader``, ``lookupd:other``, or that of a node."""
        return self._lookupds[role.endswith("other")] if role.startswith("lookupd") else self.node(role).http

    def node(self, role: str) -> Place:
        """The node of a role: ``leader:topic:partition``, or ``other:topic:partition``: that which does not lead."""
        kind, topic, partition = role.replace("{slot}", self.slot).split(":")
        return self._nodes[self._leader(topic, partition) ^ (kind == "other")]

    def asks(self, path: str) -> Answer:
        return ask(self._lookupds[0], "POST", path)

    def creates(self, name: str, query: str) -> bool:
        return self.asks(f"/topic/create?topic={name}&{query}").status == 200

    def leads(self, name: str, count: int) -> bool:
        found = ask(self._lookupds[0], "GET", f"/lookup?topic={name}&access=r", Accept=ACCEPT).json
        return len(found["partitions"] or ()) == count

    def takes(self, topic: str) -> bool:
        client = WireClient(self.node(f"leader:{topic}:0").tcp)
        reply = client.command(f"PUB {topic.format(slot=self.slot)} 0\n".encode() + b"\0\0\0\1x")
        client.close()
        return reply == b"OK"

    def words(self, path: str, answer: Answer, run: str) -> list[Any]:
        """The type, the style and the body of an answer."""
        kind = answer.headers.get("content-type", "")
        style = "v1" if "x-nsq-content-type" in answer.headers else "old"
        return [kind, style, _body(path, answer.body, run)]

    def begin(self, run: str) -> None:
        """The channel that is not made by SUB is as if it were new."""
        for route in ("unpause", "unskip", "setorder", "empty"):
            path = f"/channel/{route}?topic=n{{slot}}&partition=0&channel={REGISTERED}&order=false"
            self._post("leader:n{slot}:0", path, run)

    def end(self, steps: list[Step], run: str) -> None:
        """Delete the topics and the channels of a sequence."""
        text = json.dumps(steps)
        if "new{run}" in text:
            self._post("lookupd:leader", "/topic/delete?topic=new{run}&partition=**", run)
        channels = {"none", *re.findall(r"ch\{run\}[a-z0-9]*", text)}
        for topic in filter(text.__contains__, TOPICS):
            for number in range(1 + topic.startswith("d")):
                for channel in channels:
                    query = f"?topic={topic}&partition={number}&channel={channel}"
                    self._post(f"leader:{topic}:{number}", "/channel/delete" + query, run)

    def label(self, number: int, id: Any) -> str:
        """Its partition, too."""
        return f"message {number} of partition {id >> 50}"

    def may_differ(self, pair: list[str]) -> bool:
        """The real cluster is stable, and a replica knows a new channel, a little later."""
        if any("the cluster is unstable" in each for each in pair):
            return True
        return all(any(text in each for each in pair) for text in ("CHANNEL_NOT_FOUND", "E_FAILED_ON_NOT_LEADER"))

    def ends_comparison(self, pair: list[str]) -> bool:
        """One is a message that has come back, and the other a new one: who goes first differs on purpose."""
        attempts = [json.loads(each)[1] for each in pair if each.startswith('["message"')]
        return len(attempts) == 2 and min(attempts) == 1 < max(attempts)

    def _post(self, role: str, path: str, run: str) -> None:
        ask(self.http(role), "POST", self.fill(path, run))

    def _leader(self, topic: str, partition: str) -> int:
        key = f"{topic}:{partition}"
        if key not in self._leaders:
            found = ask(self._lookupds[0], "GET", f"/lookup?topic={topic}&access=r", Accept=ACCEPT).json
            port = found["partitions"][partition]["tcp_port"]
            self._leaders[key] = [place.tcp.port for place in self._nodes].index(port)
        return self._leaders[key]


def open_stage(slot: str, lookupds: tuple[Address, Address], nodes: tuple[Place, Place]) -> Stage:
    """Create the topics of a stage, and return it when all of them take publishes.

    Args:
        lookupds: HTTP addresses: of the nsqlookupd that leads, and of another one.
    """
    stage = Stage(slot, lookupds, nodes)
    names = {topic: topic.format(slot=slot) for topic in TOPICS}
    for topic, query in TOPICS.items():
        until(partial(stage.creates, names[topic], query), READY, every=0.1)
    for name in names.values():
        until(partial(stage.leads, name, 1 + name.startswith("d")), READY, every=0.1)
    for topic in TOPICS:
        until(partial(stage.takes, topic), READY, every=0.1)
    stage.asks(f"/channel/create?topic=n{slot}&channel={REGISTERED}")
    return stage


def _body(path: str, body: bytes, run: str) -> Any:
    if path.startswith(("/debug", "/message/stats")):
        return "..."
    text = body.decode("utf-8", "replace").replace(run, "{run}")
    if text.startswith('{"message":"'):
        # Quotes in a message stand there as they are on the real server, so that it is no JSON.
        return {"message": text[12:-2].replace("\\", "").replace('"', "")}
    try:
        value = json.loads(text)
    except ValueError:
        return "text" if path.startswith("/stats") else text
    if path.startswith("/config"):
        return type(value).__name__ if isinstance(value, (bool, int, str, list)) else value
    if path.startswith(_SHAPES):
        # Without what has names of topics or errors for keys, and without the epoch that only we show.
        return _meta(value) or without(shape(value), _NAMED.__contains__)
    return _counts(value) if path.startswith("/stats") else masked(value, _NUMBERED)


class _Connection(Connection):
    no_id = b"\0" * 7 + b"\1" + b"\0" * 8
    _has_detail = _has_ext = False
    _first_offset: int | None = None

    def sends(self, data: bytes) -> None:
        """What messages look like depends on the SUB."""
        if data.startswith(b"SUB"):
            self._has_detail = not data.startswith(b"SUB ")
            self._has_ext = data.split(b" ", 2)[1:2] != [] and data.split(b" ", 2)[1].startswith((b"e", b"oe"))

    def words(self, kind: int, body: bytes) -> list[Any]:
        """A frame, in which the id of a message is a number."""
        if kind == MESSAGE:
            return self._message(body)
        if kind == ERROR:
            text = _BYTES.sub("[id]", body.decode("utf-8", "replace"))
            return ["error", _WHY_NO_JSON.sub("", text)]  # said in other words on purpose
        if len(body) == _TRACED.size and body[:2] == b"OK":
            _, id, trace, _, size = _TRACED.unpack(body)
            return ["traced", id, trace, size]
        text = body.decode("utf-8", "replace")
        return ["response", json.loads(text) if text.startswith("{") else text]

    def _message(self, frame: bytes) -> list[Any]:
        _, attempts, id, trace = struct.unpack_from(">QHQQ", frame)
        self.messages.append(frame[10:26])
        rest, shown = frame[26:], []
        if self._has_ext:
            end = 3 + int.from_bytes(rest[1:3], "big") if rest[0] else 1
            shown, rest = [rest[:end].decode("latin-1")], rest[end:]
        if self._has_detail:
            offset, size = struct.unpack_from(">QI", rest)
            self._first_offset = offset if self._first_offset is None else self._first_offset
            shown, rest = [*shown, offset - self._first_offset, size], rest[12:]
        return ["message", attempts, id, trace, *shown, rest.decode("latin-1")]


def _counts(value: Any) -> Any:
    """The shape of a row of figures, with those that do not depend on what was before."""
    if isinstance(value, dict):
        return {
            key: item if key in _COUNTED and "channels" not in value else _counts(item)
            for key, item in value.items()
            if key != "client_pub_stats"  # of everybody who has published lately
        }
    if isinstance(value, list):
        return [_counts(item) for item in value if not _is_of_another(item)]
    return type(value).__name__


def _is_of_another(row: Any) -> bool:
    return isinstance(row, dict) and "{" not in row.get("channel_name", "{") and row["channel_name"] != REGISTERED


def _meta(value: Any) -> Any:
    """A lookup: which partitions, and the meta data."""
    found = value.get("data", value) if isinstance(value, dict) else None
    if not isinstance(found, dict) or "partitions" not in found:
        return None
    return {**shape(value), "partitions": sorted(found["partitions"] or ()), "meta": found.get("meta")}


# An nsqd and an nsqlookupd of the original dialect


OUTPUT_BUFFER_TIMEOUT = 0.005
"""Seconds that the nsqds of the stages may keep messages back: less than the silence that ends a step."""

_OF_THE_RUN = {"tcp_port", "http_port", "remote_address", "start_time", "id", "last_update", "hostname", "connect_ts"}
_NOT_OURS = {"memory", "global_msg_count"}
"""Figures of Go, and counts of messages by zone, which are missing in ours on purpose."""
_TEXT = re.compile(
    r"(?m)^ *(?:memory:|heap|gc_|next_gc|total_gc).*\n?"
    r"|built w/.*|127\.0\.0\.1:\d+|(?:start_time|uptime|connected:|up) .*|\d+[hms.µn]\S*"
)


_ZONE = re.compile(r', "topology_(?:region|zone)": "[^"]*"')


class OriginalStage(transcripts.Stage):
    """An nsqd and the nsqlookupd at which it registers."""

    def __init__(self, nsqd: Place, lookupd: Place) -> None:
        self._places = {"nsqd": nsqd, "lookupd": lookupd}

    def connect(self, role: str) -> Connection:
        server, _, topic = role.partition(":")
        make = _NsqdConnection if server == "nsqd" else _LookupdConnection
        return make(self._places[server].tcp, topic)

    def http(self, role: str) -> Address:
        """The HTTP address of one of the two."""
        return self._places[role].http

    def fill(self, text: str, run: str) -> str:
        """A text with the names of the run, and where its nsqd is."""
        return super().fill(text, run).replace("{nsqd}", f"127.0.0.1:{self._places['nsqd'].http.port}")

    def words(self, path: str, answer: Answer, run: str) -> list[Any]:
        """The headers and the body of an answer."""
        names = ("content-type", "x-nsq-content-type", "allow", "location")
        headers = {name: answer.headers[name].replace(run, "{run}") for name in names if name in answer.headers}
        text = answer.body.decode("utf-8", "replace").replace(run, "{run}")
        try:
            value = json.loads(text)
        except ValueError:
            return [headers, _TEXT.sub("...", text) if path.startswith("/stats") else text]
        if path.startswith("/config") and answer.status == 200:
            return [headers, type(value).__name__]
        return [headers, _without_order(masked(without(value, _NOT_OURS.__contains__), _OF_THE_RUN))]

    def settle(self, role: str, path: str, answer: Answer) -> None:
        """An ephemeral topic whose last channel is deleted goes by itself, and takes requests until it has gone."""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
        if role == "nsqd" and path.startswith("/channel/delete?") and answer.status == 200:
            topic = query["topic"][0]
            until(lambda: not topic.endswith("#ephemeral") or self._has_gone_or_is_used(topic))

    def end(self, steps: list[Step], run: str) -> None:
        """No topic stays."""
        self._delete(
            "nsqd", lambda: [each["topic_name"] for each in self._get("nsqd", "/stats?format=json")["topics"] or ()]
        )
        if '"nsqd' in json.dumps(steps):
            self._await_registrations(run)
        self._delete("lookupd", lambda: self._get("lookupd", "/topics")["topics"])

    def _await_registrations(self, run: str) -> None:
        """The nsqd tells of its topics one after the other: one that is new and gone again is the last."""
        ask(self.http("nsqd"), "POST", f"/topic/create?topic=last{run}")
        until(lambda: self._get("lookupd", f"/lookup?topic=last{run}").get("producers"))
        ask(self.http("nsqd"), "POST", f"/topic/delete?topic=last{run}")
        until(lambda: not self._get("lookupd", f"/lookup?topic=last{run}")["producers"])

    def may_differ(self, pair: list[str]) -> bool:
        """nsqd 1.3.0 as it was released knows of no zones; nsqd since then does, and ours."""
        ours, theirs = pair
        return '"topology_' not in theirs and _ZONE.sub("", ours) == theirs

    def ends_comparison(self, pair: list[str]) -> bool:
        """How many messages leave the real one before a fatal error that stands in the same read is chance."""
        ours, theirs = pair
        return (ours.startswith('["message"') and theirs == '["closed"]') or (
            ours == '["closed"]' and theirs.startswith('["message"') and '"message 0"' not in theirs
        )

    def _has_gone_or_is_used(self, topic: str) -> bool:
        found = self._get("nsqd", "/stats?format=json")["topics"] or ()
        return all(each["channels"] for each in found if each["topic_name"] == topic)

    def _get(self, role: str, path: str) -> Any:
        return ask(self.http(role), "GET", path).json

    def _delete(self, role: str, names: Any) -> None:
        def are_gone() -> bool:
            found = names()
            for name in found:
                ask(self.http(role), "POST", f"/topic/delete?topic={name.replace('#', '%23')}")
            return not found

        until(are_gone)


class _NsqdConnection(Connection):
    no_id = b"0" * 16

    def words(self, kind: int, body: bytes) -> list[Any]:
        """A frame."""
        if kind == MESSAGE:
            _, attempts, id = struct.unpack_from(">qH16s", body)
            self.messages.append(id)
            return ["message", attempts, id.decode("latin-1"), body[26:].decode("latin-1")]
        text = body.decode("latin-1")
        for number, id in enumerate(dict.fromkeys(self.messages)):
            text = text.replace(id.decode("latin-1"), f"[id {number}]")
        if kind == ERROR:
            return ["error", text]
        return ["response", json.loads(text) if text.startswith("{") else text]


class _LookupdConnection(Connection):
    def __init__(self, address: Address, topic: str) -> None:
        super().__init__(address, topic, b"  V1")

    def take_frames(self, data: bytes) -> bytes:
        """These have no type."""
        while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
            body, data = data[4 : 4 + size], data[4 + size :]
            text = body.decode("latin-1")
            answer = masked(json.loads(text), _OF_THE_RUN) if text.startswith("{") else text
            self.answers.append(["error" if text.startswith("E_") else "response", answer])
        return data


def _without_order(value: Any) -> Any:
    """A JSON value whose lists are sorted: what Go keeps in maps comes in any order."""
    if isinstance(value, dict):
        return {key: _without_order(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((_without_order(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


@contextmanager
def embedded_stage() -> Iterator[OriginalStage]:
    """The embedded servers."""
    with Broker(output_buffer_timeout=OUTPUT_BUFFER_TIMEOUT) as broker:
        assert broker.lookupd is not None
        yield OriginalStage(_place(broker.nsqd), _place(broker.lookupd))


def real_stage(start_nsqd: Callable[..., RealNsqd], start_lookupd: Callable[..., RealLookupd]) -> OriginalStage:
    """Real servers, which whoever gives the functions ends."""
    lookupd = start_lookupd()
    flags = f"-lookupd-tcp-address={lookupd.tcp_address}", f"-output-buffer-timeout={OUTPUT_BUFFER_TIMEOUT * 1000:g}ms"
    stage = OriginalStage(_place(start_nsqd(*flags)), _place(lookupd))
    until(lambda: ask(lookupd.http_address, "GET", "/nodes").json["producers"])
    return stage


def _place(server: NsqdServer | LookupdServer | ServerProcess) -> Place:
    return Place(server.tcp_address, server.http_address)
