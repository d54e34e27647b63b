"""What an nsqd and an nsqlookupd of the original dialect answer to a sequence, in words that must be equal.

What differs from run to run is taken out: ids become the order in which a topic has given them; times, ports and
memory are left out, and so are heartbeats. Roles are ``nsqd:topic`` and ``lookupd:``, and in requests ``nsqd`` and
``lookupd``; ``{nsqd}`` stands for the nsqd in an argument of nsqlookupd.
"""

from __future__ import annotations

import json
import re
import struct
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nsq_fast.broker import Broker, LookupdServer, NsqdServer
from nsq_fast.names import Address

from . import transcripts
from .http import Answer, ask
from .servers import RealLookupd, RealNsqd, ServerProcess
from .transcripts import ERROR, MESSAGE, Connection, Place, Step, masked
from .waiting import until

OUTPUT_BUFFER_TIMEOUT = 0.005
"""Seconds that the nsqds of the stages may keep messages back: less than the silence that ends a step."""

_OF_THE_RUN = {"tcp_port", "http_port", "remote_address", "start_time", "id", "last_update", "hostname", "connect_ts"}
_TEXT = re.compile(
    r"(?m)^ *(?:memory:|heap|gc_|next_gc|total_gc).*\n?"
    r"|built w/.*|127\.0\.0\.1:\d+|(?:start_time|uptime|connected:|up) .*|\d+[hms.µn]\S*"
)


_ZONE = re.compile(r', "topology_(?:region|zone)": "[^"]*"')


class Stage(transcripts.Stage):
    """An nsqd and the nsqlookupd at which it registers."""

    def __init__(self, nsqd: Place, lookupd: Place) -> None:
        self._places = {"nsqd": nsqd, "lookupd": lookupd}

    def connect(self, role: str) -> Connection:
        """Open a connection to one of the two."""
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
        if isinstance(value, dict):
            value.pop("memory", None)
            _leave_out_zones(value)
        return [headers, _without_order(masked(value, _OF_THE_RUN))]

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

    def finish(self, connections: Iterable[Connection]) -> None:
        """Ids become the order in which a topic has given them."""
        answers: dict[str, list[list[Any]]] = {}
        for connection in connections:
            messages = [answer for answer in connection.answers if answer[0] == "message"]
            answers.setdefault(connection.topic, []).extend(messages)
        for messages in answers.values():
            ids = sorted({message[2] for message in messages})
            for message in messages:
                message[2] = f"message {ids.index(message[2])}"

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


def _leave_out_zones(value: dict[str, Any]) -> None:
    """Counts of messages by zone are missing in ours on purpose."""
    for topic in value.get("topics") or ():
        for channel in topic["channels"] if isinstance(topic, dict) else ():
            channel.pop("global_msg_count", None)


def _without_order(value: Any) -> Any:
    """A JSON value whose lists are sorted: what Go keeps in maps comes in any order."""
    if isinstance(value, dict):
        return {key: _without_order(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((_without_order(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


@contextmanager
def embedded_stage() -> Iterator[Stage]:
    """The embedded servers."""
    with Broker(output_buffer_timeout=OUTPUT_BUFFER_TIMEOUT) as broker:
        assert broker.lookupd is not None
        yield Stage(_place(broker.nsqd), _place(broker.lookupd))


def real_stage(start_nsqd: Callable[..., RealNsqd], start_lookupd: Callable[..., RealLookupd]) -> Stage:
    """Real servers, which whoever gives the functions ends."""
    lookupd = start_lookupd()
    flags = f"-lookupd-tcp-address={lookupd.tcp_address}", f"-output-buffer-timeout={OUTPUT_BUFFER_TIMEOUT * 1000:g}ms"
    stage = Stage(_place(start_nsqd(*flags)), _place(lookupd))
    until(lambda: ask(lookupd.http_address, "GET", "/nodes").json["producers"])
    return stage


def _place(server: NsqdServer | LookupdServer | ServerProcess) -> Place:
    return Place(server.tcp_address, server.http_address)
