"""A model of nsqlookupd, of both dialects: what it says is true, but may be a moment old, unless it is not well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .network import End, Host, Network
from .nsqd import VERSIONS, Books, Log, ModelNsqd, Moods

MOODS = ("hangs", "slow", "error", "no json", "other json", "ignorant", "ghost")
"""How one that is not well answers: not at all, late, with status 500, with what nobody can read, that it knows no
topic, or with an nsqd that is not there (of the original: the redesigned NSQ would have it lead)."""


class _Conn:
    def __init__(self, lookupd: ModelLookupd, end: End) -> None:
        self._lookupd, self.end = lookupd, end
        self._in = b""
        end.on_event = self.came

    def came(self) -> None:
        if self._lookupd.is_frozen:
            return
        while self.end.is_readable and self in self._lookupd.conns:
            try:
                data = self.end.recv(65536)
            except OSError:
                data = b""
            if not data:
                self.drop("ended")
                return
            self._in += data
            while b"\r\n\r\n" in self._in and self in self._lookupd.conns:
                head, _, self._in = self._in.partition(b"\r\n\r\n")
                self._answer(head.decode())

    def _answer(self, head: str) -> None:
        method, target, _ = head.split("\r\n")[0].split(" ")
        books = self._lookupd.books
        if method != "GET":
            books.breaks(f"{method} to a lookupd")
        path, _, query = target.partition("?")
        status, reply = self._lookupd.answer(path, dict(part.split("=") for part in query.split("&") if part))
        mood = self._lookupd.mood
        body = msgspec.json.encode(reply)
        if mood == "error":
            status, body = 500, b'{"message":"INTERNAL_ERROR"}'
        elif mood in ("no json", "other json"):
            body = b"<html>It works!</html>" if mood == "no json" else b'{"producers":[{"tcp_port":"x"}],"topics":[1]}'
        is_last = books.loop.chance.happens(0.2)
        text = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = text.encode() + (b"Connection: close\r\n" if is_last else b"") + b"\r\n" + body
        if mood == "slow":
            books.loop.call_later(books.loop.chance.long_tailed(0.01, 1.5), self._send, data, is_last)
        else:
            self._send(data, is_last)

    def _send(self, data: bytes, is_last: bool) -> None:
        if self not in self._lookupd.conns:
            return
        self.end.send(data)
        if is_last:
            self.drop("closed after an answer")

    def drop(self, why: str, *, is_abrupt: bool = False) -> None:
        if self in self._lookupd.conns:
            self._lookupd.conns.remove(self)
            self.end.on_event = None
            self.end.close(is_abrupt=is_abrupt)


class ModelLookupd:
    """One nsqlookupd, which sees each nsqd come and go, and each leader move, a moment later.

    Attributes:
        channels_only: topics that it does not know at all.
        is_ignorant: it has just begun, and knows nothing yet.
        mood: one of ``MOODS``; empty when it is well.
        asked, most_at_once: questions so far, and most connections at once.
    """

    def __init__(self, network: Network, books: Books, ip: str, nsqds: Sequence[ModelNsqd]) -> None:
        self.network, self.books = network, books
        self.address = (ip, 4161)
        self.nsqds = nsqds
        self.cluster: list[Log] = []  # of which it leads none
        self.moods = Moods()
        self.conns: list[_Conn] = []
        self.is_frozen = self.is_ignorant = False
        self.is_running = True
        self.mood = ""
        self.asked = self.most_at_once = 0
        self._seen: list[Any] = self._state()
        self.start()

    def __repr__(self) -> str:
        return f"lookupd {self.address[0]}"

    @property
    def host(self) -> Host:
        return self.network.host(self.address[0])

    def start(self) -> None:
        self.network.listen(self.address, self._accept)

    def _accept(self, end: End) -> None:
        self.conns.append(_Conn(self, end))
        # One that stands still does not notice that a client has gone.
        self.most_at_once = max(self.most_at_once, sum(not conn.end.has_ended for conn in self.conns))

    def kill(self) -> None:
        self.network.deafen(self.address)
        for conn in tuple(self.conns):
            conn.drop("killed", is_abrupt=True)

    def vanish(self) -> None:
        self.host.is_down = True
        for conn in tuple(self.conns):
            conn.end.vanish()
        self.kill()

    def come_back(self) -> None:
        self.host.is_down = False
        self.is_ignorant = True
        self.books.loop.call_later(1.0, setattr, self, "is_ignorant", False)
        self.start()
        self.host.mend()

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        for conn in tuple(self.conns):
            conn.came()

    def change_mood(self, mood: str) -> None:
        self.books.note(f"{self} is {mood or 'well'}")
        self.mood = mood
        self.is_ignorant = mood == "ignorant"
        if mood == "hangs":
            self.freeze()
        elif self.is_frozen:
            self.thaw()

    # What it says

    def _state(self) -> list[Any]:
        """The nsqds that run; who leads which partition; which topics are where."""
        nsqds = [nsqd for nsqd in self.nsqds if nsqd.is_running]
        leaders = [
            (log, log.leader) for log in (self.nsqds[0].cluster if self.nsqds else ())
            if log.leader is not None and log.leader.is_running
        ]  # fmt: skip
        topics = [(nsqd, tuple(nsqd.logs)) for nsqd in nsqds]
        return [nsqds, leaders, topics]

    def notice(self) -> None:
        """See what is so now; called a moment after it has changed."""
        self._seen = self._state()

    @staticmethod
    def _peer(nsqd: ModelNsqd) -> dict[str, Any]:
        return {
            "remote_address": "", "hostname": str(nsqd), "broadcast_address": nsqd.address[0], "tcp_port": 4150,
            "http_port": 4151, "version": VERSIONS["redesigned" if nsqd.is_redesigned else "original"],
        }  # fmt: skip

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        self.asked += 1
        nsqds, leaders, topics = ([], [], []) if self.is_ignorant else self._seen
        is_redesigned = bool(self.nsqds) and self.nsqds[0].is_redesigned
        if path == "/nodes":
            return 200, {"producers": [self._peer(nsqd) for nsqd in nsqds]}
        if path == "/listlookup":
            return (
                (200, {"lookupdnodes": [], "lookupdleader": {}}) if is_redesigned else (404, {"message": "NOT_FOUND"})
            )
        if path == "/topics":
            names = {log.topic for log, _ in leaders} | {name for _, found in topics for name in found}
            return 200, {"topics": sorted(names)}
        if path != "/lookup":
            self.books.breaks(f"a lookupd is asked for {path}")
        topic = query["topic"]
        if is_redesigned:
            found = {str(log.partition): self._peer(leader) for log, leader in leaders if log.topic == topic}
            logs = [log for log in self.nsqds[0].cluster if log.topic == topic]
            if not found:
                return 404, {"message": "TOPIC_NOT_FOUND"}
            meta = {
                "partition_num": len(logs), "replica": 2, "extend_support": logs[0].is_ext,
                "ordered": logs[0].is_ordered,
            }  # fmt: skip
            return 200, {"channels": [], "meta": meta, "producers": list(found.values()), "partitions": found}
        producers = [self._peer(nsqd) for nsqd, found in topics if topic in found]
        if self.mood == "ghost":
            producers.append({**self._peer(self.nsqds[0]), "broadcast_address": "10.9.9.9"})
        if not producers:
            return 404, {"message": "TOPIC_NOT_FOUND"}
        return 200, {"channels": [], "producers": producers}
