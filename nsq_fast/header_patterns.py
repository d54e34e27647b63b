"""Patterns of header filters, checked before a server gets them: one that it cannot compile it ignores in silence, and
delivers everything (youzan/nsq: nsqdserver/protocol_v2.go, IDENTIFY; nsqd/ext_filter.go, NewExtFilter).

Servers compile them in Go: regular expressions with ``regexp``, globs with ``gobwas/glob``. What is accepted here is
less than those accept, so that all of it compiles there.
"""

from __future__ import annotations

import re

MOST_REPEATS = 1000
"""Of Go's regexp/syntax, where counts within counts are multiplied."""

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d{1,4})(,(\d{1,4})?)?\})\??", re.ASCII)
_GROUP = re.compile(r"\((?:\?(?:P<[A-Za-z_]\w*>|[imsU]*(?:-[imsU]+)?:))?", re.ASCII)
_FLAGS = re.compile(r"\(\?[imsU]+(?:-[imsU]+)?\)")
_ESCAPE = re.compile(r"\\(?:[dDsSwWbBAtnrfv]|x[0-9A-Fa-f]{2}|[!-/:-@\[-`{-~])")
_CLASS_ESCAPE = re.compile(r"\\(?:[dDsSwWtnrfv]|x[0-9A-Fa-f]{2}|[!-/:-@\[-`{-~])")
_CLASS_NAME = re.compile(
    r"\[:\^?(?:alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|word|xdigit):\]"
)
_SETS = frozenset("dDsSwW")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


class PatternInvalid(ValueError):
    """What is wrong with a pattern, and where."""


def check_regexp(pattern: str) -> None:
    """Raise PatternInvalid unless Go's regexp compiles ``pattern``."""
    parser = _Regexp(pattern)
    parser.alternatives(depth=0)
    if parser.at < len(pattern):
        raise PatternInvalid(f"')' without '(' at {parser.at}")


class _Regexp:
    """Reads a regular expression from ``at`` on. Each method returns how often what it read may be repeated in all."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> int:
        """Read up to the end, or to the ')' of the group."""
        if depth > 200:
            raise PatternInvalid("groups are nested too deep")
        most, can_repeat = 1, 0
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            char = self._pattern[self.at]
            if char in "*+?{":
                if not can_repeat:
                    raise PatternInvalid(f"{char!r} at {self.at} repeats nothing, or what is repeated already")
                most, can_repeat = max(most, self._repeats(can_repeat)), 0
            elif char == "|" or self._skip(_FLAGS):
                self.at += char == "|"
                can_repeat = 0
            else:
                can_repeat = self._atom(char, depth)
                most = max(most, can_repeat)
        return most

    def _repeats(self, inner: int) -> int:
        found = _QUANTIFIER.match(self._pattern, self.at)
        if found is None:
            raise PatternInvalid(f"'{{' at {self.at}: write \\{{ for the character")
        self.at = found.end()
        low = int(found[1] or 1)
        high = int(found[3]) if found[3] else low
        if high < low or max(low, high) * inner > MOST_REPEATS:
            raise PatternInvalid(f"{found[0]!r} repeats more than {MOST_REPEATS} times, or its bounds are exchanged")
        return max(low, high, 1) * inner

    def _atom(self, char: str, depth: int) -> int:
        if char == "(":
            return self._group(depth)
        if char == "[":
            self._class()
        elif char == "\\":
            if not self._skip(_ESCAPE):
                raise PatternInvalid(f"{self._pattern[self.at : self.at + 2]!r} at {self.at}: not an escape in Go")
        elif char in "]}":
            raise PatternInvalid(f"{char!r} at {self.at}: write \\{char} for the character")
        else:
            self.at += 1
        return 1

    def _group(self, depth: int) -> int:
        begin = self.at
        self._skip(_GROUP)
        if self._pattern.startswith("?", self.at):
            raise PatternInvalid(
                f"{self._pattern[begin : begin + 3]!r} at {begin}: Go has no lookaheads, lookbehinds, conditions and"
                " references"
            )
        most = self.alternatives(depth + 1)
        if self.at >= len(self._pattern):
            raise PatternInvalid(f"'(' at {begin} is not closed")
        self.at += 1
        return most

    def _class(self) -> None:
        begin = self.at
        self.at += 1
        self.at += self._pattern.startswith("^", self.at)
        first = self.at
        while not self._pattern.startswith("]", self.at):
            low = self._member(begin)
            if self._pattern.startswith("-", self.at) and not self._pattern.startswith("-]", self.at):
                self.at += 1
                high = self._member(begin)
                if low is None or high is None or low > high:
                    raise PatternInvalid(f"the class at {begin} has a range that is none")
        if self.at == first:
            raise PatternInvalid(f"the class at {begin} is empty: write \\] for the character")
        self.at += 1

    def _member(self, begin: int) -> str | None:
        """Read one member of a class: the character that it is; None for a set such as ``\\d``."""
        if self.at >= len(self._pattern):
            raise PatternInvalid(f"'[' at {begin} is not closed")
        text = self._pattern[self.at]
        if text == "[":
            if not self._skip(_CLASS_NAME):
                raise PatternInvalid(f"'[' at {self.at} in a class: write \\[ for the character")
            return None
        if text != "\\":
            self.at += 1
            return text
        start = self.at
        if not self._skip(_CLASS_ESCAPE):
            raise PatternInvalid(f"{self._pattern[start : start + 2]!r} at {start}: not an escape in a class in Go")
        escape = self._pattern[start + 1 : self.at]
        if escape in _SETS:
            return None
        return chr(int(escape[1:], 16)) if len(escape) > 1 else _CONTROLS.get(escape, escape)

    def _skip(self, expected: re.Pattern[str]) -> bool:
        found = expected.match(self._pattern, self.at)
        if found is not None:
            self.at = found.end()
        return found is not None


_GLOB_TOKEN = re.compile(
    r"\\."  # an escaped character
    r"|\[!?(?:[^\]\[\\!,{}*?-]-[^\]\[\\!,{}*?-]|[^\]\[\\!,{}*?-]+)\]"  # one range, or a list of characters
    r"|[^\\\[\]]",
    re.DOTALL,
)


def check_glob(pattern: str) -> None:
    """Raise PatternInvalid unless gobwas/glob compiles ``pattern``: ``*``, ``?``, ``[a-c]``, ``[!abc]``, ``{a,b}``."""
    at = depth = 0
    while at < len(pattern):
        found = _GLOB_TOKEN.match(pattern, at)
        if found is None:
            raise PatternInvalid(f"{pattern[at]!r} at {at} is not closed, or not a range or list of characters")
        token = found[0]
        if token[0] == "[" and token[-3] == "-" and token[-4] > token[-2]:
            raise PatternInvalid(f"the range {token!r} at {at} is exchanged")
        depth += (token == "{") - (token == "}")
        if depth < 0:
            raise PatternInvalid(f"'}}' at {at} without '{{': write \\}} for the character")
        at = found.end()
    if depth:
        raise PatternInvalid("'{' is not closed: write \\{ for the character")
