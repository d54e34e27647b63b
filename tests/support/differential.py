"""The same sequence of commands on two redesigned clusters, and what they answered, in words that must be equal.

What differs from run to run is taken out: ids become the order of their first appearance, offsets are counted from the
first one, times and ports are left out, heartbeats are not there. What is left of an answer is its type, its text,
whether it ended the connection, and of HTTP status, style and JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import time
from functools import partial
from typing import Any, NamedTuple

from gevent import socket
from gevent.select import select

from nsq_fast.names import Address

from .http import Answer, ask, shape
from .sequences import ACCEPT, REGISTERED, Step
from .waiting import WAIT, until
from .wire import WireClient

QUIET = 0.03
"""Seconds of silence after which no more answers are expected, where none are known to come."""
PATIENCE = 2.0
"""Seconds to wait for an answer that the other cluster has given."""
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

_ERROR, _MESSAGE = 1, 2
_ID_AT = {"message": 2, "traced": 1}
_ENDS = (["closed"], ["reset"])
_TRACED = struct.Struct(">2sQQQI")
_BYTES = re.compile(r"\[(?:\d+ ){15}\d+\]")
_SHAPES = ("/nodes", "/topics", "/channels", "/listlookup", "/cluster/stats", "/coordinator/stats", "/serverstats",
           "/message/stats", "/message/historystats", "/lookup", "/info")  # fmt: skip
_COUNTED = {"in_flight_count", "deferred_count", "requeue_count", "timeout_count", "client_num", "paused", "skipped",
            "ready_count", "finish_count"}  # fmt: skip
_NAMED = {"epoch", "partitions", "OtherCoordErrs"}
_NUMBERED = {"id", "offset", "queue_offset", "queue_cnt_index", "timestamp"}


class Place(NamedTuple):
    """Where a node listens."""

    tcp: Address
    http: Address


class Stage:
    """A cluster with the topics of the sequences.

    Args:
        slot: tells the topics of one stage on a cluster from those of another.
        lookupds: HTTP addresses: of the nsqlookupd that leads, and of another one.
        nodes: the two nodes.
    """

    def __init__(self, slot: str, lookupds: tuple[Address, Address], nodes: tuple[Place, Place]) -> None:
        self.slot = slot
        self._lookupds = lookupds
        self._nodes = nodes
        self._leaders: dict[str, int] = {}

    def http(self, role: str) -> Address:
        """The HTTP address of a role: ``lookupd:leader``, ``lookupd:other``, or that of a node."""
        return self._lookupds[role.endswith("other")] if role.startswith("lookupd") else self.node(role).http

    def node(self, role: str) -> Place:
        """The node of a role: ``leader:topic:partition``, or ``other:topic:partition``: that which does not lead."""
        kind, topic, partition = role.replace("{slot}", self.slot).split(":")
        return self._nodes[self._leader(topic, partition) ^ (kind == "other")]

    def asks(self, path: str) -> Answer:
        """POST to the nsqlookupd that leads."""
        return ask(self._lookupds[0], "POST", path)

    def creates(self, name: str, query: str) -> bool:
        """Create a topic; False while the cluster refuses that."""
        return self.asks(f"/topic/create?topic={name}&{query}").status == 200

    def leads(self, name: str, count: int) -> bool:
        """Whether that many partitions of a topic have leaders."""
        found = ask(self._lookupds[0], "GET", f"/lookup?topic={name}&access=r", Accept=ACCEPT).json
        return len(found["partitions"] or ()) == count

    def takes(self, topic: str) -> bool:
        """Whether a topic takes publishes."""
        client = WireClient(self.node(f"leader:{topic}:0").tcp)
        reply = client.command(f"PUB {topic.format(slot=self.slot)} 0\n".encode() + b"\0\0\0\1x")
        client.close()
        return reply == b"OK"

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


@dataclasses.dataclass
class Transcript:
    """What came over each connection, and as answers to HTTP requests: those of ``http``.

    Attributes:
        answers: by connection.
        pace: how many there were on each connection after each step.
    """

    answers: dict[str, list[Any]]
    pace: list[dict[str, int]] = dataclasses.field(default_factory=list)


def perform(
    steps: list[Step],
    stage: Stage,
    run: str,
    *,
    pace: list[dict[str, int]] | None = None,
    quiet: float = QUIET,
    patience: float = PATIENCE,
) -> Transcript:
    """Do a sequence, and return what came. ``pace`` is that of the other cluster: so many answers are waited for."""
    return _Performance(stage, run, quiet, pace or [], patience).perform(steps)


def judge(steps: list[Step], ours: Stage, theirs: Stage, run: str) -> list[str]:
    """The differences between two clusters that are there again when both have more time."""
    found: list[str] = []
    for quiet in (QUIET, 5 * QUIET):
        first = perform(steps, ours, run, quiet=quiet)
        second = perform(steps, theirs, run, pace=first.pace, quiet=quiet)
        found = differences(first, second)
        if not found:
            return []
    return [*found, f"ours: {json.dumps(first.answers)}", f"theirs: {json.dumps(second.answers)}"]


def differences(first: Transcript, second: Transcript) -> list[str]:
    """The first difference on each connection, and all between the answers to HTTP requests.

    A reset may have taken the frames before it along.
    """
    found = []
    for name in sorted({*first.answers, *second.answers}):
        ours, theirs = _sorted(first.answers.get(name, [])), _sorted(second.answers.get(name, []))
        if ["reset"] in (*ours[-1:], *theirs[-1:]):
            ours, theirs = _without_end(ours), _without_end(theirs)
            shortest = min(len(ours), len(theirs))
            ours, theirs = ours[:shortest], theirs[:shortest]
        for number in range(max(len(ours), len(theirs))):
            pair = [_shown(each, number) for each in (ours, theirs)]
            if pair[0] == pair[1] or _is_of_its_time(pair):
                continue
            if not _has_come_back(pair):
                found.append(f"{name}, answer {number}: {pair[0]}, {pair[1]}")
            if name != "http":
                break
    return found


def _is_of_its_time(pair: list[str]) -> bool:
    """Whether two answers may differ: the real cluster is stable, and a replica knows a new channel, a little later."""
    if any("the cluster is unstable" in each for each in pair):
        return True
    return all(any(text in each for each in pair) for text in ("CHANNEL_NOT_FOUND", "E_FAILED_ON_NOT_LEADER"))


def _has_come_back(pair: list[str]) -> bool:
    """Whether one is a message that has come back, and the other a new one: who goes first differs on purpose."""
    attempts = [json.loads(each)[1] for each in pair if each.startswith('["message"')]
    return len(attempts) == 2 and min(attempts) == 1 < max(attempts)


def _sorted(answers: list[Any]) -> list[Any]:
    """Messages behind the other answers: they may pass each other on the way to the client."""
    ends = [answer for answer in answers if answer in _ENDS]
    return sorted(_without_end(answers), key=lambda answer: answer[0] == "message") + ends


def _without_end(answers: list[Any]) -> list[Any]:
    return [answer for answer in answers if answer not in _ENDS]


def _shown(answers: list[Any], number: int) -> str:
    return json.dumps(answers[number], sort_keys=True) if number < len(answers) else "nothing"


class _Performance:
    def __init__(self, stage: Stage, run: str, quiet: float, pace: list[dict[str, int]], patience: float) -> None:
        self._patience = patience
        self._stage = stage
        self._run = run
        self._quiet = quiet
        self._pace = pace
        self._is_paced = True
        self._connections: dict[str, _Connection] = {}
        self._http_answers: list[Any] = []

    def perform(self, steps: list[Step]) -> Transcript:
        """Do the steps."""
        self._begin()
        pace = []
        try:
            for number, (kind, *arguments) in enumerate(steps):
                getattr(self, f"_{kind}")(*arguments)
                paced = self._pace[number] if number < len(self._pace) else {}
                self._collect(paced, self._quiet)
                pace.append({name: len(each.answers) for name, each in self._connections.items()})
            self._collect({}, 4 * self._quiet)
        finally:
            for connection in self._connections.values():
                connection.close()
        self._end(steps)
        answers = {name: connection.answers for name, connection in self._connections.items()}
        of_topic: dict[str, list[list[Any]]] = {}
        for connection in self._connections.values():
            of_topic.setdefault(connection.topic, []).extend(connection.answers)
        _labelled(of_topic)
        return Transcript({**answers, "http": self._http_answers}, pace)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _connect(self, name: str, role: str) -> None:
        self._connections[name] = _Connection(self._stage.node(role).tcp, role.split(":")[1])

    def _send(self, name: str, data: str) -> None:
        self._connections[name].send(self._fill(data))

    def _http(self, role: str, method: str, path: str, body: str, headers: dict[str, str]) -> None:
        filled = self._fill(path).replace(" ", "%20").replace('"', "%22")
        try:
            answer = ask(self._stage.http(role), method, filled, body.encode("latin-1"), **headers)
        except (OSError, ValueError, IndexError):
            self._http_answers.append([method, path, "no answer"])
            return
        kind = answer.headers.get("content-type", "")
        style = "v1" if "x-nsq-content-type" in answer.headers else "old"
        self._http_answers.append([method, path, answer.status, kind, style, self._body(path, answer.body)])

    def _body(self, path: str, body: bytes) -> Any:
        if path.startswith(("/debug", "/message/stats")):
            return "..."
        text = body.decode("utf-8", "replace").replace(self._run, "{run}")
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
            return _meta(value) or _without_names(shape(value))
        return _counts(value) if path.startswith("/stats") else _masked(value)

    def _fill(self, text: str) -> str:
        return text.replace("{slot}", self._stage.slot).replace("{run}", self._run)

    def _collect(self, paced: dict[str, int], quiet: float) -> None:
        """Read what comes, until so many answers are there and it has been quiet for a while."""
        deadline = time.monotonic() + self._patience
        while open_ones := {each.socket: each for each in self._connections.values() if not each.has_ended}:
            waits = self._is_paced and any(
                len(each.answers) < paced.get(name, 0) and not each.has_ended
                for name, each in self._connections.items()
            )
            ready, _, _ = select(list(open_ones), [], [], max(deadline - time.monotonic(), quiet) if waits else quiet)
            for sock in ready:
                open_ones[sock].read()
            if not ready:
                self._is_paced = self._is_paced and not waits
                return

    # --- before and after --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The channel that is not made by SUB is as if it were new."""
        for route in ("unpause", "unskip", "setorder", "empty"):
            self._post(
                "leader:n{slot}:0", f"/channel/{route}?topic=n{{slot}}&partition=0&channel={REGISTERED}&order=false"
            )

    def _end(self, steps: list[Step]) -> None:
        """Nothing of the sequence stays."""
        text = json.dumps(steps)
        if "new{run}" in text:
            self._post("lookupd:leader", "/topic/delete?topic=new{run}&partition=**")
        channels = {"none", *re.findall(r"ch\{run\}[a-z0-9]*", text)}
        for topic in filter(text.__contains__, TOPICS):
            for number in range(1 + topic.startswith("d")):
                for channel in channels:
                    query = f"?topic={topic}&partition={number}&channel={channel}"
                    self._post(f"leader:{topic}:{number}", "/channel/delete" + query)

    def _post(self, role: str, path: str) -> None:
        ask(self._stage.http(role), "POST", self._fill(path))


class _Connection:
    def __init__(self, address: Address, topic: str) -> None:
        self.topic = topic
        self.answers: list[Any] = []
        self.socket = socket.create_connection(address, timeout=WAIT)
        self.socket.sendall(b"  V2")
        self._data = b""
        self._messages: list[bytes] = []
        self._has_detail = self._has_ext = False
        self._first_offset: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the server has closed it."""
        return self.answers[-1:] in ([end] for end in _ENDS)

    def send(self, text: str) -> None:
        """Send a command with the ids that it names; nothing happens when the connection has ended."""
        if self.has_ended:
            return
        data = text.encode("latin-1")
        for number in (0, -1):
            known = self._messages[number] if self._messages else b"\0" * 7 + b"\1" + b"\0" * 8
            data = data.replace(b"{id:%d}" % number, known)
        if data.startswith(b"SUB"):
            self._has_detail = not data.startswith(b"SUB ")
            self._has_ext = data.split(b" ", 2)[1:2] != [] and data.split(b" ", 2)[1].startswith((b"e", b"oe"))
        try:
            self.socket.sendall(data)
        except OSError:
            self.answers.append(["reset"])

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            self.answers.append(["reset"])
            return
        self._data += data
        self._take_frames()
        if not data:
            self.answers.append(["closed"])

    def close(self) -> None:
        """End it."""
        self.socket.close()

    def _take_frames(self) -> None:
        while len(self._data) >= 8:
            size, kind = struct.unpack_from(">ii", self._data)
            if len(self._data) < 4 + size:
                return
            body, self._data = self._data[8 : 4 + size], self._data[4 + size :]
            if body != b"_heartbeat_":
                self.answers.append(self._words(kind, body))

    def _words(self, kind: int, body: bytes) -> list[Any]:
        if kind == _MESSAGE:
            return self._message(body)
        if kind == _ERROR:
            return ["error", _BYTES.sub("[id]", body.decode("utf-8", "replace"))]
        if len(body) == _TRACED.size and body[:2] == b"OK":
            _, id, trace, _, size = _TRACED.unpack(body)
            return ["traced", id, trace, size]
        text = body.decode("utf-8", "replace")
        return ["response", json.loads(text) if text.startswith("{") else text]

    def _message(self, frame: bytes) -> list[Any]:
        _, attempts, id, trace = struct.unpack_from(">QHQQ", frame)
        self._messages.append(frame[10:26])
        rest, shown = frame[26:], []
        if self._has_ext:
            end = 3 + int.from_bytes(rest[1:3], "big") if rest[0] else 1
            shown, rest = [rest[:end].decode("latin-1")], rest[end:]
        if self._has_detail:
            offset, size = struct.unpack_from(">QI", rest)
            self._first_offset = offset if self._first_offset is None else self._first_offset
            shown, rest = [*shown, offset - self._first_offset, size], rest[12:]
        return ["message", attempts, id, trace, *shown, rest.decode("latin-1")]


def _labelled(topics: dict[str, list[list[Any]]]) -> None:
    """Put numbers in the place of ids, in the order in which a topic has given them."""
    for answers in topics.values():
        identified = [answer for answer in answers if answer[0] in _ID_AT]
        ids = sorted({answer[_ID_AT[answer[0]]] for answer in identified})
        for answer in identified:
            id = answer[_ID_AT[answer[0]]]
            answer[_ID_AT[answer[0]]] = f"message {ids.index(id)} of partition {id >> 50}"


def _masked(value: Any) -> Any:
    """A JSON value without what is a number in the history of a topic."""
    if isinstance(value, dict):
        return {key: "number" if key in _NUMBERED else _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list) else value


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
    """Whether it is a channel of another sequence."""
    return isinstance(row, dict) and "{" not in row.get("channel_name", "{") and row["channel_name"] != REGISTERED


def _without_names(value: Any) -> Any:
    """A shape without what has names of topics or errors for keys, and without the epoch that only we show."""
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items() if key not in _NAMED}
    return [_without_names(item) for item in value] if isinstance(value, list) else value


def _meta(value: Any) -> Any:
    """A lookup: which partitions, and the meta data."""
    found = value.get("data", value) if isinstance(value, dict) else None
    if not isinstance(found, dict) or "partitions" not in found:
        return None
    return {**shape(value), "partitions": sorted(found["partitions"] or ()), "meta": found.get("meta")}
