"""Random sequences of commands and requests for both dialects: the same seed is the same sequence, on every machine."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from .transcripts import Step

NUMBERS = (
    "0", "1", "-1", "2", "5", "254", "255", "256", "2500", "2501", "4000", "60000", "2147483648", "9223372036854775807",
    "9223372036854775808", "18446744073709551615", "18446744073709551616", "-9223372036854775809",
    "99999999999999999999999", "", "x", "+1", "01", "1.0", "0x1", "1_0", " 1",
)  # fmt: skip
NAMES = ("", "a b", "bad!", "x" * 64, "x" * 65, "a#ephemeral", "#ephemeral", "a#b", "ü")
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD")
BODIES = ("hello", "x", "", "a\nb\n\nc", "y" * 300)


def sized(body: str, size: int | None = None) -> str:
    """A body behind its size, or behind another one."""
    return struct.pack(">I", (len(body) if size is None else size) % (1 << 32)).decode("latin-1") + body


BINARY = (sized("", 1) + sized("m"), sized("", 2) + sized("m") + sized("n"), sized("", 0),
          sized("", 2) + sized("m"), "x",
          sized("", 1) + sized("m") + "rest", sized("", 1) + sized("m", 0), "")  # fmt: skip
"""Bodies of /mpub with ``binary=true``."""


class Draws:
    """Draws parts of commands and requests."""

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def one(self, *choices: tuple[int, Any]) -> Any:
        """One of several, each with its weight."""
        weights, values = zip(*choices, strict=True)
        return self._random.choices(values, weights)[0]

    def number(self) -> str:
        """Of any size, or none."""
        return self._random.choice(NUMBERS)

    def interleaved(self, scripts: list[list[Step]]) -> list[Step]:
        """The steps of several connections in a random order."""
        steps = []
        while scripts := [script for script in scripts if script]:
            steps.append(self._random.choice(scripts).pop(0))
        return steps

    def sized(self, body: str, share: float = 0.06) -> str:
        """A body behind its size, which is wrong now and then."""
        if self._random.random() > share:
            return sized(body)
        size = self._random.choice([0, -1, 1 << 31, len(body) - 1, 1024 * 1024 + 1, 5 * 1024 * 1024 + 1])
        return sized(body, max(size, -1))

    def several(self, make: Callable[[], str]) -> str:
        """The body of an MPUB."""
        messages = [self.sized(make(), 0.04) for _ in range(self._random.randint(1, 4))]
        count = len(messages)
        if self._random.random() < 0.06:
            count = self._random.choice([0, -1, count - 1, 1 << 30, 1048575, 1048576])
        return sized("", count) + "".join(messages)

    def plain(self) -> str:
        """The body of a message."""
        return self._random.choice(["a", "bb", "hello", "\n", " ", "NOP\n", "\0", "x" * 300]) + str(
            self._random.randrange(100)
        )

    def query(self, **arguments: Any) -> str:
        """A query in which an argument is missing, empty or wrong now and then."""
        shown = []
        for name, value in arguments.items():
            chance = self._random.random()
            if chance < 0.05:
                continue
            if chance < 0.1:
                wrong = (
                    ["", "%zz", "bad!"]
                    if name == "topic"
                    else ["", "x", "-1", "1", "none", "%zz", "bad!", *NUMBERS[:12]]
                )
                value = self._random.choice(wrong)
            shown.append(f"{name}={str(value).replace(' ', '%20').replace('#', '%23').replace('+', '%2B')}")
        return "?" + "&".join(shown) if shown else ""

    def method(self, usual: str) -> str:
        """The method of a request, now and then another one."""
        return usual if self._random.random() < 0.97 else self._random.choice(METHODS)


class Conversations(Draws):
    """Connections that publish, consume, and do what they should not: what both dialects have of them.

    Args:
        lines: commands that are none, with ``{topic}`` and ``{number}``.
    """

    def __init__(self, random: random.Random, lines: tuple[str, ...]) -> None:
        super().__init__(random)
        self._lines = lines
        self._name = ""

    def publish(self, topic: str) -> str:
        """A command that publishes, to this topic mostly."""
        raise NotImplementedError

    def subscribe(self, topic: str) -> str:
        """SUB, the right one mostly."""
        raise NotImplementedError

    def answer(self, topic: str) -> str:
        """FIN, REQ or TOUCH."""
        raise NotImplementedError

    def identify(self, topic: str) -> str:
        """IDENTIFY, now and then with a value that is out of range, or a body that is none."""
        raise NotImplementedError

    def commands(self, name: str, topic: str) -> list[str]:
        """What is sent over one connection after IDENTIFY."""
        self._name = name
        does = self.one((5, self._consume), (4, self._publish_some), (2, self._anything))
        return list(does(topic))

    def _publish_some(self, topic: str) -> list[str]:
        return [self.publish(topic) for _ in range(self._random.randint(2, 8))]

    def _consume(self, topic: str) -> list[str]:
        commands = [self.subscribe(topic)]
        if self._random.random() < 0.9:
            commands.append(f"RDY {self.one((9, '1'), (9, '5'), (1, self.number()))}\n")
        for _ in range(self._random.randint(1, 10)):
            does = self.one(
                (8, self.publish), (7, self.answer), (2, self._ready), (1, self._state), (1, self._bad_line)
            )
            commands.append(does(topic))
        return commands

    def _anything(self, topic: str) -> list[str]:
        kinds = (self.publish, self.subscribe, self.answer, self._ready, self._state, self._bad_line)
        return [self._random.choice(kinds)(topic) for _ in range(self._random.randint(1, 4))]

    def _ready(self, topic: str) -> str:
        return f"RDY {self.one((4, '0'), (4, '1'), (2, '2500'), (2, self.number()))}\n"

    def _state(self, topic: str) -> str:
        return str(self.one((3, "CLS\n"), (3, "NOP\n"), (1, self.subscribe(topic)), (1, self.identify(topic))))

    def _bad_line(self, topic: str) -> str:
        return self._random.choice(self._lines).replace("{topic}", topic).replace("{number}", self.number())


# The original dialect: nsqd and nsqlookupd, TCP and HTTP


ORIGINAL_TOPICS = ("t{run}", "u{run}", "e{run}#ephemeral")
DELAYS = (
    "0", "0", "0", "-1", "60000", "3599999", "3600000", "3600001", "2147483648", "9223372036854775807",
    "9223372036854775808", "18446744073709551615", "18446744073709551616", "99999999999999999999999", "", "x", "+1",
    "1.0", "0x1", "1_0",
)  # fmt: skip
"""In milliseconds. None of them ends while a sequence is performed: when a scan finds it is nobody's to say."""


def original_tcp_sequence(seed: int) -> list[Step]:
    """Connections to an nsqd that publish, consume, and do what they should not."""
    return _OriginalConversations(random.Random(f"original tcp {seed}"), _ORIGINAL_LINES).steps()


def original_http_sequence(seed: int) -> list[Step]:
    """Requests to an nsqd and its nsqlookupd, beside a consumer."""
    return _OriginalRequests(random.Random(f"original http {seed}")).steps()


def lookupd_sequence(seed: int) -> list[Step]:
    """Connections to an nsqlookupd that register topics and channels, and requests for them."""
    return _OriginalRegistrations(random.Random(f"original lookupd {seed}")).steps()


class _OriginalConversations(Conversations):
    def steps(self) -> list[Step]:
        """Several connections, their steps in a random order."""
        topics = [self._random.choice(ORIGINAL_TOPICS) for _ in range(self._random.randint(1, 4))]
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
_ORIGINAL_LINES = (
    "\n", "\r\n", " \n", "NOP\r\n", "nop\n", "NOP x\n", "XYZ\n", "SUB_ORDERED {topic} c\n", "PUB\n", "DPUB\n", "MPUB\n",
    "DPUB {topic}\n\0\0\0\1x", "AUTH\n\0\0\0\1x", "AUTH x\n", "AUTH\n\0\0\0\0", "AUTH\n\xff\xff\xff\xff", "CLS x\n",
    "RDY {number}\n", "RDY 1 2\n", "RDY\n", "  V2", "PUB {topic}\r\n\0\0\0\1x", "PUB  {topic}\n\0\0\0\1x", "\0\n",
    "PUB\t{topic}\n\0\0\0\1x", "XYZ \xff\n", "X" * 300 + "\n", "IDENTIFY x\n\0\0\0\2{}", "IDENTIFY\r\n\0\0\0\2{}",
    "PUB {topic}\n\0\0\0\0", "TOUCH\n", "FIN\n", "REQ\n", 'XYZ "a\\b"\n', "FINX\n", "GET /ping HTTP/1.1\r\n\r\n",
)  # fmt: skip


class _OriginalRequests(Draws):
    def steps(self) -> list[Step]:
        """A consumer on a channel, and requests that are about it, or about other things."""
        draw = self._random
        topic = draw.choice(ORIGINAL_TOPICS)
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
        values = {**_ORIGINAL_VALUES, "topic": (topic,) * 12 + NAMES[1:5], "channel": _CHANNELS * 4 + NAMES[1:5]}
        query = self.query(**{name: draw.choice(values[name]) for name in names.split()})
        method = self.method(method)
        if isinstance(body, tuple):
            body = draw.choice(body)
        return ["http", role, method, path + query, "" if method == "HEAD" else body, {}]


class _OriginalRegistrations(_OriginalRequests):
    def steps(self) -> list[Step]:
        """Some nsqds that are none, each on its connection, and requests between what they send."""
        draw = self._random
        scripts = [self._script(f"p{number}", number) for number in range(draw.randint(0, 3))]
        topic = draw.choice(ORIGINAL_TOPICS)
        requests = [
            self._request("lookupd", topic, draw.choice(_ORIGINAL_LOOKUPD_ROUTES)) for _ in range(draw.randint(3, 12))
        ]
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
        topic = draw.choice(ORIGINAL_TOPICS) if draw.random() < 0.9 else draw.choice(NAMES)
        channel = draw.choice(["", *_CHANNELS[:2], *_CHANNELS, draw.choice(NAMES)])
        name = self.one((6, "REGISTER"), (4, "UNREGISTER"), (2, "PING"), (1, "IDENTIFY"), (1, "other"))
        if name == "IDENTIFY":
            return self._identify(number)
        if name == "other":
            return draw.choice(_LOOKUPD_LINES).replace("{topic}", topic)
        return f"{name}\n" if name == "PING" or draw.random() < 0.03 else f"{name} {topic} {channel}\n"


_CHANNELS = ("ch", "ch", "ch", "other", "x#ephemeral")
_ORIGINAL_VALUES: dict[str, tuple[Any, ...]] = {
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
_ORIGINAL_LOOKUPD_ROUTES: tuple[tuple[str, str, str, Any], ...] = (
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
ORIGINAL = {"tcp": original_tcp_sequence, "http": original_http_sequence, "lookupd": lookupd_sequence}


# The redesigned dialect


TOPICS = ("p{slot}", "d{slot}", "r{slot}", "o{slot}", "e{slot}", "n{slot}", "oe{slot}")
"""Plain; two partitions; two replicas; ordered; with headers; without automatic channels; ordered with headers."""
REGISTERED = "reg"
"""The channel that the topic without automatic channels has."""
EXT_TOPICS = ("e{slot}", "oe{slot}")
_ORDERED = ("o{slot}", "oe{slot}")
ACCEPT = "application/vnd.nsq; version=1.0"


def tcp_sequence(seed: int) -> list[Step]:
    """Connections that publish, consume, and do what they should not."""
    return _Conversations(random.Random(f"tcp {seed}"), _LINES).steps()


def http_sequence(seed: int) -> list[Step]:
    """Requests to the nodes, beside a consumer, and to the nsqlookupds."""
    return _Requests(random.Random(f"http {seed}")).steps()


class _Conversations(Conversations):
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
