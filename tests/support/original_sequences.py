"""Random command sequences for the original dialect: nsqd and nsqlookupd, TCP and HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

from .random_steps import BINARY, BODIES, NAMES, Conversations, Draws, sized
from .transcripts import Step

TOPICS = ("t{run}", "u{run}", "e{run}#ephemeral")
DELAYS = (
    "0", "0", "0", "-1", "60000", "3599999", "3600000", "3600001", "2147483648", "9223372036854775807",
    "9223372036854775808", "18446744073709551615", "18446744073709551616", "99999999999999999999999", "", "x", "+1",
    "1.0", "0x1", "1_0",
)  # fmt: skip
"""In milliseconds. None of them ends while a sequence is performed: when a scan finds it is nobody's to say."""


def tcp_sequence(seed: int) -> list[Step]:
    """Connections to an nsqd that publish, consume, and do what they should not."""
    return _Conversations(random.Random(f"original tcp {seed}")).steps()


def http_sequence(seed: int) -> list[Step]:
    """Requests to an nsqd and its nsqlookupd, beside a consumer."""
    return _Requests(random.Random(f"original http {seed}")).steps()


def lookupd_sequence(seed: int) -> list[Step]:
    """Connections to an nsqlookupd that register topics and channels, and requests for them."""
    return _Registrations(random.Random(f"original lookupd {seed}")).steps()


class _Conversations(Conversations):
    @property
    def lines(self) -> tuple[str, ...]:  # type: ignore[override]
        return _LINES

    def steps(self) -> list[Step]:
        """Several connections, their steps in a random order."""
        topics = [self._random.choice(TOPICS) for _ in range(self._random.randint(1, 4))]
        return self.interleaved([self._script(f"c{number}", topic) for number, topic in enumerate(topics)])

    def _script(self, name: str, topic: str) -> list[Step]:
        steps: list[Step] = [["connect", name, f"nsqd:{topic}"]]
        if self._random.random() < 0.6:
            steps.append(["send", name, self.identify(topic)])
        commands = self.commands(name, topic)
        if self._random.random() < 0.15:
            # What is sent in one go behind a fatal error is not looked at.
            commands = ["".join(commands)]
        return [*steps, *(["send", name, data] for data in commands)]

    def identify(self, topic: str) -> str:
        fields: dict[str, Any] = {"client_id": "c"}
        for _ in range(self._random.randint(0, 4)):
            key, value = self._random.choice(self._fields())
            fields[key] = value
        body = json.dumps(fields)
        if self._random.random() < 0.08:
            body = self._random.choice(_BODIES_OF_IDENTIFY)
        return "IDENTIFY\n" + self.sized(body, 0.03)

    def _fields(self) -> list[tuple[str, Any]]:
        draw = self._random
        return [
            ("feature_negotiation", True),
            ("feature_negotiation", draw.choice([True, True, False, None, "true", 1])),
            ("heartbeat_interval", draw.choice([-1, -2, 0, 999, 30000, 60000, 60001, "x", 1 << 63, 1.0, 2.5, None])),
            ("output_buffer_size", draw.choice([-2, -1, 0, 1, 63, 64, 65536, 65537, 1 << 40, "64"])),
            ("output_buffer_timeout", draw.choice([-2, -1, 0, 1, 24, 25, 30001, None])),
            ("msg_timeout", draw.choice([-1, 0, 1, 999, 60000, 900000, 900001, 1 << 63, -(1 << 63) - 1])),
            ("sample_rate", draw.choice([-1, 0, 100, 1 << 31, 1 << 32, 0.5])),
            ("tls_v1", draw.choice([True, False, "x"])),
            ("deflate_level", draw.choice([-1, 0, 1, 6, 9, 10, "x"])),
            ("deflate", draw.choice([False, None, 0])),
            ("snappy", draw.choice([False, None, ""])),
            ("topology_region", draw.choice(["r", "", None])),
            ("topology_zone", draw.choice(["z", ""])),
            ("client_id", draw.choice(["", "\ud800", "x" * 300, None, 3, {}])),
            ("hostname", draw.choice(["h", "", None, []])),
            ("user_agent", draw.choice(["judge/1", "", None, False])),
            ("short_id", "s"), ("long_id", "l"), ("Client_ID", "case"), ("unknown", {"a": [1]}),
        ]  # fmt: skip

    def publish(self, topic: str) -> str:
        if self._random.random() < 0.06:
            topic = self._random.choice(NAMES)
        name = self.one((6, "PUB"), (4, "MPUB"), (3, "DPUB"))
        line = f"{name} {topic}"
        if name == "DPUB":
            line += f" {self._random.choice(DELAYS)}"
        if self._random.random() < 0.06:
            line = self._random.choice([name, f"{line} x", f"{line} ", f" {line}", f"{name} {topic}", f"{line}\r"])
        return f"{line}\n{self._several() if name == 'MPUB' else self.sized(self.plain())}"

    def _several(self) -> str:
        """An MPUB whose size is never beyond its messages: how much is waited for then differs on purpose."""
        body = self.several(self.plain)
        wrong = self._random.choice([0, -1, 1 << 31, len(body) - 1, 5 * 1024 * 1024 + 1])
        return sized(body, wrong if self._random.random() < 0.06 else None)

    def subscribe(self, topic: str) -> str:
        ephemeral = self._random.choice(["", "", "#ephemeral"])
        channel = self.one((9, f"ch{self._name}{ephemeral}"), (1, self._random.choice(NAMES)))
        if self._random.random() < 0.04:
            topic = self._random.choice(NAMES)
        line = f"SUB {topic} {channel}"
        return self.one((30, line), (1, "SUB"), (1, f"SUB {topic}"), (1, f"{line} x")) + "\n"  # type: ignore[no-any-return]

    def answer(self, topic: str) -> str:
        id = self.one(
            (9, "{id:-1}"), (3, "{id:0}"), (1, "x" * 16), (1, "\0" * 16), (1, "\xff" * 16), (1, "0" * 8 + " " + "0" * 7)
        )
        if self._random.random() < 0.02:
            id = self._random.choice(["", "x", "x" * 15, "x" * 17, "x" * 8 + "\n" + "x" * 7])
        delay = self._random.choice(DELAYS)
        line = self.one((5, f"FIN {id}"), (4, f"REQ {id} {delay}"), (2, f"TOUCH {id}"), (1, f"REQ {id}"), (1, "TOUCH"))
        return f"{line}{self.one((30, ''), (1, ' x'), (1, chr(13)))}\n"


_BODIES_OF_IDENTIFY = (
    "", "{", "[]", "null", "1", "{}", '{"msg_timeout":"x"}', '{"hostname":1}', "{}x", "{} ", "\n{}", "{}{}", '"x"',
    '{"deflate":true,"snappy":true}', '{"feature_negotiation":true,"deflate":true,"snappy":true}', "\xff",
    '{"a":1,"a":2}', '{"client_id":"\\u0000"}', '{"client_id":"\xff"}', '{"heartbeat_interval":1e3}', "{'a':1}",
    '{"heartbeat_interval":01}', '{"sample_rate":1.0}', '{"a":NaN}', '{"feature_negotiation":TRUE}', '{"a":1,}',
)  # fmt: skip
_LINES = (
    "\n", "\r\n", " \n", "NOP\r\n", "nop\n", "NOP x\n", "XYZ\n", "SUB_ORDERED {topic} c\n", "PUB\n", "DPUB\n", "MPUB\n",
    "DPUB {topic}\n\0\0\0\1x", "AUTH\n\0\0\0\1x", "AUTH x\n", "AUTH\n\0\0\0\0", "AUTH\n\xff\xff\xff\xff", "CLS x\n",
    "RDY {number}\n", "RDY 1 2\n", "RDY\n", "  V2", "PUB {topic}\r\n\0\0\0\1x", "PUB  {topic}\n\0\0\0\1x", "\0\n",
    "PUB\t{topic}\n\0\0\0\1x", "XYZ \xff\n", "X" * 300 + "\n", "IDENTIFY x\n\0\0\0\2{}", "IDENTIFY\r\n\0\0\0\2{}",
    "PUB {topic}\n\0\0\0\0", "TOUCH\n", "FIN\n", "REQ\n", 'XYZ "a\\b"\n', "FINX\n", "GET /ping HTTP/1.1\r\n\r\n",
)  # fmt: skip


class _Requests(Draws):
    def steps(self) -> list[Step]:
        """A consumer on a channel, and requests that are about it, or about other things."""
        draw = self._random
        topic = draw.choice(TOPICS)
        steps: list[Step] = []
        if draw.random() < 0.6:
            steps += [
                ["connect", "c", f"nsqd:{topic}"],
                ["send", "c", f"SUB {topic} {draw.choice(_CHANNELS)}\n"],
                ["send", "c", f"RDY {draw.choice([0, 1, 5])}\n"],
            ]
        for _ in range(draw.randint(4, 12)):
            kinds = [self._to_nsqd] * 8 + [self._to_lookupd]
            if steps and steps[0][0] == "connect":
                kinds += [self._beside] * 2
            steps.append(draw.choice(kinds)(topic))
        return steps

    def _beside(self, topic: str) -> Step:
        commands = ["FIN {id:-1}\n", "REQ {id:-1} 0\n", "TOUCH {id:-1}\n", "NOP\n", "RDY 5\n", "CLS\n"]
        return ["send", "c", self._random.choice(commands)]

    def _to_nsqd(self, topic: str) -> Step:
        return self._request("nsqd", topic, self._random.choice(_NSQD_ROUTES))

    def _to_lookupd(self, topic: str) -> Step:
        return self._request("lookupd", topic, self._random.choice(_OF_NSQDS))

    def _request(self, role: str, topic: str, route: tuple[str, str, str, Any]) -> Step:
        draw = self._random
        method, path, names, body = route
        values = {**_VALUES, "topic": (topic,) * 12 + NAMES[1:5], "channel": _CHANNELS * 4 + NAMES[1:5]}
        query = self.query(**{name: draw.choice(values[name]) for name in names.split()})
        method = self.method(method)
        if isinstance(body, tuple):
            body = draw.choice(body)
        return ["http", role, method, path + query, "" if method == "HEAD" else body, {}]


class _Registrations(_Requests):
    def steps(self) -> list[Step]:
        """Some nsqds that are none, each on its connection, and requests between what they send."""
        draw = self._random
        scripts = [self._script(f"p{number}", number) for number in range(draw.randint(0, 3))]
        topic = draw.choice(TOPICS)
        requests = [self._request("lookupd", topic, draw.choice(_LOOKUPD_ROUTES)) for _ in range(draw.randint(3, 12))]
        return self.interleaved([*scripts, requests])

    def _script(self, name: str, number: int) -> list[Step]:
        draw = self._random
        commands = [self._identify(number)] if draw.random() < 0.9 else []
        commands += [self._command(number) for _ in range(draw.randint(1, 6))]
        if draw.random() < 0.1:
            commands = ["".join(commands)]
        steps: list[Step] = [["connect", name, "lookupd:"], *(["send", name, each] for each in commands)]
        return [*steps, ["close", name]] if draw.random() < 0.3 else steps

    def _identify(self, number: int) -> str:
        draw = self._random
        fields: dict[str, Any] = {"broadcast_address": "127.0.0.1", "tcp_port": 50 + number, "http_port": 60 + number}
        fields |= {"version": "1", "hostname": "h"}
        for _ in range(draw.choice([0, 0, 1, 2])):
            key = draw.choice([*fields, "topology_zone", "topology_region", "id", "remote_address", "Version"])
            fields[key] = draw.choice(["", 0, "x", 7, None, -1, 1 << 63, 1.5, [], "\ud800"])
        body = json.dumps(fields)
        if draw.random() < 0.06:
            body = draw.choice([each for each in _BODIES_OF_IDENTIFY if each])
        return "IDENTIFY\n" + sized(body)

    def _command(self, number: int) -> str:
        draw = self._random
        topic = draw.choice(TOPICS) if draw.random() < 0.9 else draw.choice(NAMES)
        channel = draw.choice(["", *_CHANNELS[:2], *_CHANNELS, draw.choice(NAMES)])
        name = self.one((6, "REGISTER"), (4, "UNREGISTER"), (2, "PING"), (1, "IDENTIFY"), (1, "other"))
        if name == "IDENTIFY":
            return self._identify(number)
        if name == "other":
            return draw.choice(_LOOKUPD_LINES).replace("{topic}", topic)
        return f"{name}\n" if name == "PING" or draw.random() < 0.03 else f"{name} {topic} {channel}\n"


_CHANNELS = ("ch", "ch", "ch", "other", "x#ephemeral")
_VALUES: dict[str, tuple[Any, ...]] = {
    "binary": ("true", "", "false", "1", "0", "x"),
    "defer": ("0", "3600000", "3600001", "-1", "x", "", "99999999999999999999", "+0", "0x1", "1_0", "-0"),
    "format": ("json", "json", "json", "text", "", "x"),
    "include_clients": ("true", "false", "0", "x"),
    "include_mem": ("true", "false", "x"),
    "rate": ("0", "x", "", "99999999999999999999"),
    "node": ("127.0.0.1:60", "127.0.0.1:61", "{nsqd}", "none:1", "x"),
}
_NSQD_ROUTES: tuple[tuple[str, str, str, Any], ...] = (
    *[("POST", "/pub", "topic", BODIES)] * 4,
    *[("POST", "/pub", "topic defer", BODIES)] * 2,
    *[("POST", "/mpub", "topic", BODIES)] * 2,
    *[("POST", "/mpub", "topic binary", BINARY)] * 3,
    *[("POST", f"/topic/{name}", "topic", "") for name in ("create", "delete", "empty", "pause", "unpause")],
    *[("POST", f"/channel/{name}", "topic channel", "") for name in ("create", "delete", "empty", "pause", "unpause")],
    *[("GET", "/stats", "format topic", "")] * 3,
    *[("GET", "/stats", "format topic channel include_clients include_mem", "")] * 3,
    ("GET", "/stats", "format", ""),
    ("GET", "/info", "", ""), ("GET", "/ping", "", ""), ("GET", "/nothing", "", ""), ("GET", "/PING", "", ""),
    ("GET", "//ping", "", ""), ("GET", "/pub", "topic", ""), ("GET", "/", "", ""), ("GET", "/ping/", "", ""),
    *[("GET", f"/config/{name}", "", "") for name in (
        "nsqlookupd_tcp_addresses", "x", "", "msg_timeout/x")],
    ("PUT", "/config/nsqlookupd_tcp_addresses", "", ("x", "{", "", '"a"', "[1]", "[x]")),
    ("PUT", "/config/verbose", "", ("true", "")), ("PUT", "/config/x", "", ("1",)),
    ("GET", "/debug", "", ""),
)  # fmt: skip
_OF_NSQDS: tuple[tuple[str, str, str, Any], ...] = (
    ("POST", "/topic/tombstone", "topic node", ""), ("POST", "/topic/create", "topic", ""),
    *[("POST", "/channel/create", "topic channel", "")] * 3,
)  # fmt: skip
"""Nothing that shows what an nsqd has registered, which is a little later there."""
_LOOKUPD_ROUTES: tuple[tuple[str, str, str, Any], ...] = (
    *[("GET", "/lookup", "topic", "")] * 4,
    *[("GET", "/topics", "", "")] * 2, *[("GET", "/channels", "topic", "")] * 3, *[("GET", "/nodes", "", "")] * 2,
    *[("GET", "/debug", "", "")] * 2, ("GET", "/info", "", ""), ("GET", "/ping", "", ""), ("GET", "/nothing", "", ""),
    ("GET", "/", "", ""), ("GET", "/Lookup", "topic", ""), ("GET", "/stats", "", ""), ("GET", "/debug/", "", ""),
    *[("POST", "/topic/create", "topic", "")] * 2, *[("POST", "/topic/delete", "topic", "")] * 2,
    *[("POST", "/channel/create", "topic channel", "")] * 2, *[("POST", "/channel/delete", "topic channel", "")] * 2,
    *[("POST", "/topic/tombstone", "topic node", "")] * 3,
)  # fmt: skip
_LOOKUPD_LINES = (
    "\n", "PING x\n", "ping\n", "XYZ\n", " PING \n", "REGISTER\n", "UNREGISTER\n", "REGISTER  {topic}\n",
    "REGISTER {topic} ch x\n", "PING\r\n", "XYZ \xff\n", "\xff\n", "REGISTER {topic}\tch\n", "  V1PING\n", "\0\n",
)  # fmt: skip
KINDS = {"tcp": tcp_sequence, "http": http_sequence, "lookupd": lookupd_sequence}
