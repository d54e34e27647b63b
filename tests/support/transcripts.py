"""The same sequence of commands on two servers, and what they answered, in words that must be equal.

A sequence is a list of steps, which are lists of JSON values, so that it can be kept in a file:

- ``["connect", name, role]``: open a connection to the server that has a role, see the ``Stage`` of the dialect;
- ``["send", name, data]``: bytes as latin-1 text, in which ``{id:N}`` stands for the id of a message that came over
  this connection, ``{id:-1}`` for that of the last one;
- ``["http", role, method, path, body, headers]``;
- ``["close", name]``.

``{slot}`` stands for what tells the topics of one run of sequences from another, ``{run}`` for what tells one run of a
sequence from all others.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from gevent import socket
from gevent.select import select

from nsq_fast.names import Address

from .http import Answer, ask
from .waiting import WAIT

Step = list[Any]

QUIET = 0.03
"""Seconds of silence after which no more answers are expected, where none are known to come."""
PATIENCE = 2.0
"""Seconds to wait for an answer that the other server has given."""
ERROR, MESSAGE = 1, 2
ENDS = (["closed"], ["reset"])


class Place(NamedTuple):
    """Where a node listens."""

    tcp: Address
    http: Address


@dataclasses.dataclass
class Transcript:
    """What came over each connection, and as answers to HTTP requests: those of ``http``.

    Attributes:
        answers: by connection.
        pace: how many there were on each connection after each step.
    """

    answers: dict[str, list[Any]]
    pace: list[dict[str, int]] = dataclasses.field(default_factory=list)


class Connection:
    """One connection of a sequence, and what has come over it in words. A dialect says what the words are.

    Attributes:
        topic: the one that it is about.
        messages: the ids of those that came.
    """

    no_id = b"\0" * 16
    """What stands for the id of a message when none has come."""

    def __init__(self, address: Address, topic: str, magic: bytes = b"  V2") -> None:
        self.topic = topic
        self.answers: list[Any] = []
        self.messages: list[bytes] = []
        self.socket = socket.create_connection(address, timeout=WAIT)
        self.socket.sendall(magic)
        self._data = b""

    def words(self, kind: int, body: bytes) -> list[Any]:
        """A frame that has come; ids of messages are noted."""
        raise NotImplementedError

    def sends(self, data: bytes) -> None:
        """These bytes are sent now."""

    @property
    def has_ended(self) -> bool:
        return self.answers[-1:] in ([end] for end in ENDS)

    def send(self, text: str) -> None:
        if self.has_ended:
            return
        data = text.encode("latin-1")
        for number in (0, -1):
            data = data.replace(b"{id:%d}" % number, self.messages[number] if self.messages else self.no_id)
        self.sends(data)
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
        self._data = self.take_frames(self._data)
        if not data:
            self.answers.append(["closed"])

    def close(self) -> None:
        self.socket.close()

    def take_frames(self, data: bytes) -> bytes:
        """Note the whole frames that ``data`` begins with; what is left of it."""
        while len(data) >= 8:
            size, kind = struct.unpack_from(">ii", data)
            if len(data) < 4 + size:
                break
            body, data = data[8 : 4 + size], data[4 + size :]
            if body != b"_heartbeat_":
                self.answers.append(self.words(kind, body))
        return data


class Stage:
    """Servers that sequences are performed on. Each dialect has one.

    Attributes:
        slot: tells the topics of one stage on a server from those of another.
        id_at: where the id of a message is in an answer, by the answer's kind.
    """

    slot = ""
    id_at: ClassVar[dict[str, int]] = {"message": 2}

    def connect(self, role: str) -> Connection:
        """Open a connection to the server that has a role."""
        raise NotImplementedError

    def http(self, role: str) -> Address:
        """The HTTP address of a role."""
        raise NotImplementedError

    def words(self, path: str, answer: Answer, run: str) -> list[Any]:
        """An answer to a request."""
        raise NotImplementedError

    def settle(self, role: str, path: str, answer: Answer) -> None:
        """After a request: return when the server has done what it goes on doing behind its answer."""

    def begin(self, run: str) -> None:
        """Before a sequence: all is as if it were new."""

    def end(self, steps: list[Step], run: str) -> None:
        """After a sequence: nothing of it stays."""

    def finish(self, connections: Iterable[Connection]) -> None:
        """When all answers have come: ids become the order in which a topic has given them."""
        of_topic: dict[str, list[list[Any]]] = defaultdict(list)
        for connection in connections:
            of_topic[connection.topic] += [answer for answer in connection.answers if answer[0] in self.id_at]
        for answers in of_topic.values():
            ids = sorted({answer[self.id_at[answer[0]]] for answer in answers})
            for answer in answers:
                at = self.id_at[answer[0]]
                answer[at] = self.label(ids.index(answer[at]), answer[at])

    def label(self, number: int, id: Any) -> str:
        """What stands for the id of a message."""
        return f"message {number}"

    def may_differ(self, pair: list[str]) -> bool:
        """Whether two answers, as JSON, may differ."""
        return False

    def ends_comparison(self, pair: list[str]) -> bool:
        """Whether two answers may differ, and so may all behind them on the connection."""
        return False

    def fill(self, text: str, run: str) -> str:
        """A text of a sequence with the names of a run."""
        return text.replace("{slot}", self.slot).replace("{run}", run)


def perform(
    steps: list[Step],
    stage: Stage,
    run: str,
    *,
    pace: list[dict[str, int]] | None = None,
    quiet: float = QUIET,
    patience: float = PATIENCE,
) -> Transcript:
    """Do a sequence, and return what came. ``pace`` is that of the other server: so many answers are waited for."""
    return _Performance(stage, run, quiet, pace or [], patience).perform(steps)


def judge(steps: list[Step], ours: Stage, theirs: Stage, run: str) -> list[str]:
    """The differences between two servers that are there again when both have more time."""
    found: list[str] = []
    for quiet in (QUIET, 5 * QUIET):
        first = perform(steps, ours, run, quiet=quiet)
        second = perform(steps, theirs, run, pace=first.pace, quiet=quiet)
        found = differences(ours, first, second)
        if not found:
            return []
    return [*found, f"ours: {json.dumps(first.answers)}", f"theirs: {json.dumps(second.answers)}"]


def differences(stage: Stage, first: Transcript, second: Transcript) -> list[str]:
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
            if pair[0] == pair[1] or stage.may_differ(pair):
                continue
            if not stage.ends_comparison(pair):
                found.append(f"{name}, answer {number}: {pair[0]}, {pair[1]}")
            if name != "http":
                break
    return found


def _sorted(answers: list[Any]) -> list[Any]:
    """Messages behind the other answers: they may pass each other on the way to the client."""
    ends = [answer for answer in answers if answer in ENDS]
    return sorted(_without_end(answers), key=lambda answer: answer[0] == "message") + ends


def _without_end(answers: list[Any]) -> list[Any]:
    return [answer for answer in answers if answer not in ENDS]


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
        self._connections: dict[str, Connection] = {}
        self._http_answers: list[Any] = []

    def perform(self, steps: list[Step]) -> Transcript:
        """Do the steps."""
        self._stage.begin(self._run)
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
        self._stage.end(steps, self._run)
        answers = {name: connection.answers for name, connection in self._connections.items()}
        self._stage.finish(self._connections.values())
        return Transcript({**answers, "http": self._http_answers}, pace)

    def _connect(self, name: str, role: str) -> None:
        self._connections[name] = self._stage.connect(role)

    def _send(self, name: str, data: str) -> None:
        self._connections[name].send(self._stage.fill(data, self._run))

    def _close(self, name: str) -> None:
        connection = self._connections[name]
        if not connection.has_ended:
            connection.answers.append(["closed"])
        connection.close()

    def _http(self, role: str, method: str, path: str, body: str, headers: dict[str, str]) -> None:
        filled = self._stage.fill(path, self._run).replace(" ", "%20").replace('"', "%22")
        try:
            answer = ask(self._stage.http(role), method, filled, body.encode("latin-1"), **headers)
        except (OSError, ValueError, IndexError):
            self._http_answers.append([method, path, "no answer"])
            return
        self._http_answers.append([method, path, answer.status, *self._stage.words(path, answer, self._run)])
        self._stage.settle(role, filled, answer)

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


def masked(value: Any, names: Iterable[str]) -> Any:
    """A JSON value without the numbers that stand under these names."""
    if isinstance(value, dict):
        return {key: "number" if key in names else masked(item, names) for key, item in value.items()}
    return [masked(item, names) for item in value] if isinstance(value, list) else value
