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
