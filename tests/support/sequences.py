"""Random command sequences for the redesigned dialect: the same seed is the same sequence, on every machine."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from .random_steps import BINARY, BODIES, NAMES, Conversations, Draws, sized
from .transcripts import Step

TOPICS = ("p{slot}", "d{slot}", "r{slot}", "o{slot}", "e{slot}", "n{slot}", "oe{slot}")
"""Plain; two partitions; two replicas; ordered; with headers; without automatic channels; ordered with headers."""
REGISTERED = "reg"
"""The channel that the topic without automatic channels has."""
EXT_TOPICS = ("e{slot}", "oe{slot}")
_ORDERED = ("o{slot}", "oe{slot}")
ACCEPT = "application/vnd.nsq; version=1.0"


def tcp_sequence(seed: int) -> list[Step]:
    """Connections that publish, consume, and do what they should not."""
    return _Conversations(random.Random(f"tcp {seed}")).steps()


def http_sequence(seed: int) -> list[Step]:
    """Requests to the nodes, beside a consumer, and to the nsqlookupds."""
    return _Requests(random.Random(f"http {seed}")).steps()


class _Conversations(Conversations):
    @property
    def lines(self) -> tuple[str, ...]:  # type: ignore[override]
        return _LINES

    def steps(self) -> list[Step]:
        """Several connections, their steps in a random order."""
        # Only one on the topic whose channel all would share: who of them gets a message is nobody's to say.
        topics = [self._random.choice(TOPICS) for _ in range(self._random.randint(1, 4))]
        topics = [topic for at, topic in enumerate(topics) if topic != "n{slot}" or topic not in topics[:at]]
        scripts = [self._script(f"c{number}", topic) for number, topic in enumerate(topics)]
        return self.interleaved(scripts)

    def _script(self, name: str, topic: str) -> list[Step]:
        steps: list[Step] = [["connect", name, f"{self.one((9, 'leader'), (1, 'other'))}:{topic}:0"]]
        if self._random.random() < 0.75 or topic in EXT_TOPICS:
            steps.append(["send", name, self.identify(topic)])
        return [*steps, *(["send", name, _harmless(topic, data)] for data in self.commands(name, topic))]

    def _partition(self, usual: str = " 0") -> str:
        if self._random.random() < 0.85:
            return usual
        return self._random.choice(["", " 1", " -1", " 7", " ", " 0 x", f" {self.number()}"])

    def identify(self, topic: str) -> str:
        extend = (topic in EXT_TOPICS) is (self._random.random() < 0.9)
        fields: dict[str, Any] = {"client_id": "c", "heartbeat_interval": 30000}
        if extend:
            fields["extend_support"] = True
        for _ in range(self._random.randint(0, 3)):
            key, value = self._random.choice(self._fields())
            fields[key] = value
        body = json.dumps(fields)
        if self._random.random() < 0.05:
            body = self._random.choice(["", "{", "[]", "null", "1", '{"msg_timeout":"x"}', '{"hostname":1}', "{}x"])
        return "IDENTIFY\n" + self.sized(body, 0.03)

    def _fields(self) -> list[tuple[str, Any]]:
        draw = self._random
        return [
            ("feature_negotiation", True),
            ("feature_negotiation", True),
            ("heartbeat_interval", draw.choice([-1, -2, 0, 999, 1000, 60000, 60001, "x", 1 << 63])),
            ("output_buffer_size", draw.choice([-2, -1, 0, 1, 63, 64, 65536, 65537, 1 << 40])),
            ("output_buffer_timeout", draw.choice([-2, -1, 0, 1, 5, 25, 250, 1000, 1001, 30001])),
            ("msg_timeout", draw.choice([-1, 0, 1, 999, 1000, 60000, 900000, 900001])),
            ("sample_rate", draw.choice([-1, 0, 99, 100])),
            ("desired_tag", draw.choice(["red", "", "x" * 100, "x" * 101, "ü", 5])),
            ("ext_filter", draw.choice([None, {}, _FILTER, {"type": 9}, 3])),
            ("extend_support", draw.choice([True, False, None, "x"])),
            ("short_id", "s"), ("long_id", "l"), ("user_agent", "judge/1"), ("deflate_level", 3),
        ]  # fmt: skip

    def publish(self, topic: str) -> str:
        if self._random.random() < 0.05:
            topic = self._random.choice([*NAMES, "none"])
        name = self.one((6, "PUB"), (4, "MPUB"), (3, "PUB_TRACE"), (2, "MPUB_TRACE"), (4, "PUB_EXT"), (3, "MPUB_EXT"))
        line = f"{name} {topic}{self._partition()}\n" if self._random.random() < 0.98 else f"{name}\n"
        make = {"TRACE": self._traced, "EXT": self._headed}.get(name.partition("_")[2], self.plain)
        if name.startswith("PUB"):
            return line + self.sized(make())
        return line + self.sized(self.several(make))

    def _traced(self) -> str:
        if self._random.random() < 0.06:
            return self._random.choice(["", "x", "x" * 7, "x" * 8])
        trace = self._random.choice([0, 1, 10, 1 << 62, (1 << 63) + 1, (1 << 64) - 1])
        return struct.pack(">Q", trace).decode("latin-1") + self.plain()

    def _headed(self) -> str:
        header = self._random.choice(_HEADERS)
        body = self.plain() if self._random.random() < 0.95 else ""
        size = len(header) if self._random.random() < 0.95 else self._random.choice([0, 1, 65535, len(header) + 1])
        if self._random.random() < 0.03:
            return self._random.choice(["", "x", "\0\0", "\0\1"])
        return struct.pack(">H", size).decode("latin-1") + header + body

    def subscribe(self, topic: str) -> str:
        """SUB in one of its forms, the right one mostly."""
        usual = "SUB_ORDERED" if topic in _ORDERED else self.one((5, "SUB"), (3, "SUB_ADVANCED"), (2, "SUB_ORDERED"))
        name = usual if self._random.random() < 0.93 else self._random.choice(["SUB", "SUB_ADVANCED", "SUB_ORDER"])
        channel = self.one((8, f"ch{{run}}{self._name}"), (1, self._random.choice(NAMES[:3] + NAMES[4:])))
        if topic == "n{slot}":
            channel = self.one((8, REGISTERED), (2, "ch{run}"))
        if self._random.random() < 0.04:
            topic = self._random.choice([*NAMES, "none"])
        partition = self._partition()
        if name == "SUB_ADVANCED" and self._random.random() < 0.25:
            partition = f" 0 {self._random.choice(_STARTS)}"
        line = f"{name} {topic} {channel}{partition}\n"
        return line if self._random.random() < 0.97 else self._random.choice([f"{name}\n", f"{name} {topic}\n"])

    def answer(self, topic: str) -> str:
        id = self.one(
            (9, "{id:-1}"), (3, "{id:0}"), (1, "x" * 16), (1, "\0" * 16), (1, "\xff" * 16), (1, "\0" * 7 + "\5" * 9)
        )
        if self._random.random() < 0.02:
            id = self._random.choice(["", "x", "x" * 15, "x" * 17])
        delay = self.one((6, "0"), (3, "100"), (1, self.number()))
        return str(self.one((5, f"FIN {id}\n"), (4, f"REQ {id} {delay}\n"), (2, f"TOUCH {id}\n"), (1, f"REQ {id}\n")))


_FILTER = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
_HEADERS = (
    "{}", '{"k":"v"}', '{"##trace_id":"77"}', '{"##trace_id":"x"}', '{"##trace_id":7}', '{"##trace_id":""}', "",
    '{"##trace_id":"18446744073709551616"}', '{"##client_dispatch_tag":"red"}', '{"zan_test":true}', "123", "null",
    '"s"', "[1]", "{", "x", '{"k":1}', '{"k":null}', '{"a":{"b":1}}', '{"k":"v"} ', '{"k":"v"}x', "{'k':1}",
    '{"##trace_id":null}', '{"##trace_id":"-1"}', '{"##trace_id":"+1"}', '{"k":"\\ud800"}', '{"k":01}', "\xff",
)  # fmt: skip
_STARTS = (
    "special:-1", "special:0", "msgcount:0", "msgcount:1", "msgcount:-1", "msgcount:x", "virtual_queue:0",
    "virtual_queue:-1", "virtual_queue:1", "virtual_queue:99999999", "timestamp:0", "timestamp:99999999999", "x:1",
    "special", "a:b:c", "", "msgcount:99999999", "timestamp:-5", "special:x", ":", "msgcount:",
)  # fmt: skip
_LINES = (
    "\n", "\r\n", " \n", "NOP\r\n", "nop\n", "NOP x\n", "XYZ\n", "SUB_ORDER {topic} c\n", "DPUB {topic} 100\n", "PUB\n",
    "INTERNAL_CREATE_TOPIC\n", "INTERNAL_CREATE_TOPIC a {number}\n", "INTERNAL_CREATE_TOPIC a 0 {number}\n",
    "INTERNAL_CREATE_TOPIC a! 0\n", "AUTH\n\0\0\0\1x", "AUTH x\n", "AUTH\n\0\0\0\0", "CLS x\n", "RDY {number}\n",
    "RDY 1 2\n", "RDY 1 2\n", "  V2", "X" * 5000 + "\n", "PUB {topic} 0\r\n\0\0\0\1x", "PUB  {topic}\n\0\0\0\1x",
)  # fmt: skip


def _harmless(topic: str, command: str) -> str:
    """The command; nothing is delivered of the channel that all sequences share, so that they leave nothing there."""
    return "RDY 0\n" if topic == "n{slot}" and command.startswith("RDY ") else command


class _Requests(Draws):
    def steps(self) -> list[Step]:
        """A consumer on a channel, and requests that are about it, or about other things."""
        draw = self._random
        topic = draw.choice(TOPICS)
        steps: list[Step] = []
        if draw.random() < 0.6:
            extend = topic in EXT_TOPICS
            channel = REGISTERED if topic == "n{slot}" else "ch{run}"
            name = "SUB_ORDERED" if topic in _ORDERED else draw.choice(["SUB", "SUB_ADVANCED"])
            identify = json.dumps({"extend_support": extend, "heartbeat_interval": 30000, "client_id": "c"})
            steps += [
                ["connect", "c", f"leader:{topic}:0"],
                ["send", "c", "IDENTIFY\n" + sized(identify)],
                ["send", "c", f"{name} {topic} {channel} 0\n"],
                ["send", "c", _harmless(topic, f"RDY {draw.choice([0, 1, 5])}\n")],
            ]
        for _ in range(draw.randint(4, 10)):
            kinds = [self._to_node] * 5 + [self._to_lookupd] * 3
            if steps and steps[0][0] == "connect":
                kinds += [self._beside] * 2
            steps.append(draw.choice(kinds)(topic))
        return steps

    def _beside(self, topic: str) -> Step:
        commands = ["FIN {id:-1}\n", "REQ {id:-1} 0\n", "TOUCH {id:-1}\n", "NOP\n", "RDY 5\n"]
        return ["send", "c", _harmless(topic, self._random.choice(commands))]

    def _headers(self) -> dict[str, str]:
        return self._random.choice([{"Accept": ACCEPT}, {}])

    def _to_node(self, topic: str) -> Step:
        draw = self._random
        role = f"{draw.choice(['leader', 'leader', 'leader', 'other'])}:{topic}:0"
        channel = REGISTERED if topic == "n{slot}" else draw.choice(["ch{run}"] * 6 + ["none", "bad!"])
        method, path, arguments, body = draw.choice(_NODE_ROUTES)
        place = {"topic": topic, "partition": draw.choice(["0"] * 8 + ["1", "-1"]), "channel": channel}
        chosen = {name: place[name] for name in arguments.split() if name in place}
        for name in arguments.split():
            if name not in place:
                chosen[name] = draw.choice(_VALUES[name])
        if isinstance(body, tuple):
            body = draw.choice(body)
        method = self.method(method)
        body = "" if method == "HEAD" else body
        return ["http", role, method, path + self.query(**chosen), body, self._headers()]

    def _to_lookupd(self, topic: str) -> Step:
        draw = self._random
        role = draw.choice(["lookupd:leader"] * 3 + ["lookupd:other"])
        method, path, arguments, _ = draw.choice(_LOOKUPD_ROUTES)
        chosen = {name: draw.choice(_VALUES[name]) for name in arguments.split() if name != "topic"}
        if "topic" in arguments.split():
            # What is done to a topic that other sequences have, too, would be done to these.
            others = [topic] if path in _HARMLESS else [] if path == "/topic/create" else ["none"]
            chosen["topic"] = draw.choice(["new{run}"] * 2 + others)
        method = self.method(method)
        return ["http", role, method, path + self.query(**chosen), "", self._headers()]


_HARMLESS = ("/lookup", "/channels", "/channel/create", "/channel/delete", "/topic/tombstone")
_VALUES: dict[str, Any] = {
    "trace_id": ("1", "0", "77", "x", "-1", "18446744073709551615", "18446744073709551616"),
    "ext": ("{}", '{"k":"v"}', '{"##trace_id":"5"}', '{"##trace_id":5}', "123", "null", "{", '{"k":1}'),
    "binary": ("true", "", "false"), "needext": ("true", "false"),
    "search_mode": ("id", "count", "virtual_offset", "x"),
    "search_pos": ("0", "1", "-1", "x", "999999999", "1125899906842625"), "msgid": ("1", "0", "-1", "x", "999999"),
    "order": ("true", "false", "x"), "ratekilobytes": ("1000", "x", "-1"), "ready": ("1", "0", "x", "-1"),
    "client_prefix": ("1", ""), "leaderOnly": ("true", "1", "x"),
    "needClients": ("true", "false"), "format": ("json", "text", "x"), "slow": ("true", ""), "type": ("none", "x"),
    "offset": ("1", "x"), "enable": ("true", "false", "x"), "rate": ("0", "x"),
    "access": ("r", "w", "x"), "metainfo": ("true", "x"), "lookup_partition": ("0", "1", "x"),
    "metaInfo": ("true", "x"),
    "partition_num": ("1", "2", "0", "255", "256", "x"), "replicator": ("1", "2", "3", "0", "6", "x"),
    "orderedmulti": ("true", "false", "x"), "multipart": ("true", "false"), "extend": ("true", "false"),
    "syncdisk": ("0", "4000", "4001", "x"), "retention": ("1", "61", "x"),
    "disable_channel_auto_create": ("true", "false", "x"), "upgradeext": ("false", "x"),
    "partition": ("0", "**", "1", "x"),
    "move_leader": ("true", "false"), "move_from": ("x", ""), "move_to": ("y", ""), "node": ("none:1", "127.0.0.1:1"),
    "remove_node": ("none",), "channel": ("ch{run}", "bad!", "reg"), "consistent": ("true",), "restore": ("true",),
}  # fmt: skip
_CHANNEL = "topic partition channel"
_OFFSETS = ("special:-1", "msgcount:0", "msgcount:9999999", "virtual_queue:-1", "virtual_queue:0", "x", "", "a:b:c",
            "timestamp:0", "timestamp:x", "special:5")  # fmt: skip
_NODE_ROUTES: tuple[tuple[str, str, str, Any], ...] = (
    *[("POST", "/pub", "topic partition", BODIES)] * 3,
    *[("POST", "/mpub", "topic partition", BODIES[:1] + BODIES[3:])] * 2,
    *[("POST", "/mpub", "topic partition binary", BINARY)] * 2,
    *[("POST", "/pubtrace", "topic partition trace_id", BODIES)] * 2,
    *[("POST", "/pub_ext", "topic partition ext", BODIES)] * 3,
    *[("POST", f"/channel/{name}", _CHANNEL, "") for name in (
        "pause", "unpause", "skip", "unskip", "create", "delete", "empty", "skipZanTest", "unskipZanTest")],
    *[("POST", "/channel/setoffset", _CHANNEL, _OFFSETS)] * 2,
    ("POST", "/channel/setorder", _CHANNEL + " order", ""),
    *[("GET", "/message/get", "topic partition search_mode search_pos needext", "")] * 2,
    ("POST", "/message/finish", _CHANNEL + " msgid", ""),
    ("POST", "/message/trace/enable", _CHANNEL + " slow", ""),
    ("POST", "/message/trace/disable", _CHANNEL + " slow", ""),
    *[("GET", "/stats", "topic partition channel leaderOnly needClients format", "")] * 3,
    ("GET", "/coordinator/stats", "topic partition", ""),
    ("GET", "/info", "", ""), ("GET", "/ping", "", ""), ("GET", "/nothing", "", ""), ("GET", "/PING", "", ""),
    ("GET", "/config/nsqlookupd_tcp_addresses", "", ""),
    ("GET", "/config/x", "", ""),
    ("PUT", "/config/nsqlookupd_tcp_addresses", "", ("x", "{", "")),
    ("POST", "/topic/create", "topic", ""), ("POST", "/topic/delete", "topic", ""),
)  # fmt: skip
_LOOKUPD_ROUTES: tuple[tuple[str, str, str, Any], ...] = (
    *[("GET", "/lookup", "topic access metainfo", "")] * 2,
    ("GET", "/lookup", "topic access metainfo partition consistent", ""),
    ("GET", "/topics", "metaInfo", ""), ("GET", "/channels", "topic partition", ""), ("GET", "/nodes", "", ""),
    ("GET", "/listlookup", "", ""), ("GET", "/info", "", ""), ("GET", "/ping", "", ""),
    ("GET", "/cluster/stats", "", ""), ("GET", "/nothing", "", ""),
    *[("POST", "/topic/create", "topic partition_num replicator orderedmulti extend", "")] * 2,
    ("PUT", "/topic/create", "topic partition_num replicator multipart disable_channel_auto_create", ""),
    ("POST", "/topic/create", "topic partition_num replicator syncdisk retention", ""),
    *[("POST", "/topic/delete", "topic partition", "")] * 2,
    ("POST", "/topic/partition/expand", "topic partition_num", ""),
    ("POST", "/topic/partition/move", "topic partition move_leader move_from move_to", ""),
    ("POST", "/topic/meta/update", "topic syncdisk retention upgradeext", ""),
    ("POST", "/topic/meta/update", "topic replicator", ""),
    ("POST", "/channel/create", "topic channel", ""), ("POST", "/channel/delete", "topic channel", ""),
    *[("POST", "/topic/tombstone", "topic node restore", "")] * 2,
    ("POST", "/cluster/node/remove", "remove_node", ""),
)  # fmt: skip
