"""Globs as youzan's nsqd reads them, as Python regular expressions (gobwas/glob v0.2.3: syntax/lexer, syntax/ast)."""

from __future__ import annotations

import re


def translate_glob(pattern: str) -> str:
    """A regular expression that matches the same texts in full; ValueError where the server refuses the glob.

    ``*`` and ``**`` are any text, ``?`` any character, ``[abc]``, ``[a-z]``, ``[!abc]`` one of some, ``{a,b}`` one
    of several. Braces need no end, and nor does a backslash; brackets do.
    """
    return _Translator(pattern).translate()


class _Translator:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def translate(self) -> str:
        parts: list[str] = []
        depth = 0
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char == "[":
                parts.append(self._brackets())
                continue
            self._at += 1
            if char == "\\":
                parts.append(self._escaped())
            elif char == "{":
                depth += 1
                parts.append("(?:")
            elif char == "}" and depth:
                depth -= 1
                parts.append(")")
            elif char == "," and depth:
                parts.append("|")
            else:
                parts.append({"*": ".*", "?": "."}.get(char) or re.escape(char))
        if depth and parts[-1] == "(?:":
            raise ValueError(f"glob {self._pattern!r}: an empty brace at the end, which makes the real server panic")
        # A pattern of one character alone matches an empty text, too (gobwas/glob: match/single.go, list.go, range.go).
        is_one_of_many = len(parts) == 1 and (parts[0] == "." or parts[0].startswith("[^"))
        return f"(?s:{''.join(parts)}{')' * depth}){'?' if is_one_of_many else ''}"

    def _escaped(self) -> str:
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        return re.escape(char)

    def _brackets(self) -> str:
        self._at += 1
        negation = ""
        if self._pattern[self._at : self._at + 1] == "!":
            negation = "^"
            self._at += 1
        chars = self._range() if self._pattern[self._at + 1 : self._at + 2] == "-" else self._list()
        if self._pattern[self._at : self._at + 1] != "]":
            raise ValueError(f"glob {self._pattern!r}: a bracket is not closed")
        self._at += 1
        return f"[{negation}{chars}]"

    def _range(self) -> str:
        low, high = self._pattern[self._at], self._pattern[self._at + 2 : self._at + 3]
        self._at += 3
        if high < low:
            raise ValueError(f"glob {self._pattern!r}: a range ends before it begins")
        return f"{re.escape(low)}-{re.escape(high)}"

    def _list(self) -> str:
        chars: list[str] = []
        while self._at < len(self._pattern) and self._pattern[self._at] != "]":
            if self._pattern[self._at] == "\\":
                self._at += 1
            chars += self._pattern[self._at : self._at + 1]
            self._at += 1
        if not chars:
            raise ValueError(f"glob {self._pattern!r}: empty brackets")
        return "".join(map(re.escape, chars))
