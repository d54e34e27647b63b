"""What random sequences of commands are drawn from in both dialects: the same seed is the same, on every machine."""

from __future__ import annotations

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

    Attributes:
        lines: commands that are none, with ``{topic}`` and ``{number}``.
    """

    lines: tuple[str, ...] = ()
    _name = ""

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
        return self._random.choice(self.lines).replace("{topic}", topic).replace("{number}", self.number())
